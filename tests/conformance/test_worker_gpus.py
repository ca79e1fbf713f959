"""A real worker with GPUs of the test setting: what it reports, and on which of them an engine starts."""

import pytest

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.nats import NatsBus
from tests.conformance.worker_support import Worker, ask
from tests.conftest import until

GIB = 2**30


@pytest.fixture
def worker(worker: Worker) -> Worker:
    worker.environment["LOCALAI_TEST_GPUS"] = "1x24GiB+1x48GiB:6GiB"
    return worker


def free_of(worker: Worker) -> list[int]:
    """Of the last heartbeat that told it, in GiB."""
    beats = [call.body for call in worker.control_plane.seen("/heartbeat") if "gpus" in call.body]
    assert all(beat["available_vram"] == sum(one["free_vram"] for one in beat["gpus"]) for beat in beats)
    return [one["free_vram"] // GIB for one in beats[-1]["gpus"]] if beats else []


@pytest.mark.rule("R2.43", "worker-10.2", "nats-4.1")
async def test_an_engine_sees_the_gpus_that_were_chosen_for_it(bus: NatsBus, running: Worker) -> None:
    """By UUID, in that order; others, unknown and doubled ones are refused; new ones mean a new process."""
    told = running.control_plane.seen("/register")[-1].body
    assert (told["total_vram"], [one["total_vram"] // GIB for one in told["gpus"]]) == (72 * GIB, [24, 48])
    small, large = (one["uuid"] for one in told["gpus"])
    await until(lambda: free_of(running) == [24, 48], what="a beat of an idle machine")
    source = running.source("engine")

    async def install(*gpus: str) -> m.InstallReply:
        request = m.InstallRequest("engine", uri=str(source), model_id="m", gpus=gpus)
        subject = messages.subject("backend.install", running.control_plane.node_id)
        return await ask(bus, subject, request, m.InstallReply, 60)

    def visible(reply: m.InstallReply) -> str | None:
        found: str | None = running.started("engine", reply.address)["env"].get("CUDA_VISIBLE_DEVICES")
        return found

    for wrong in (["GPU-of-another-machine"], [large, large], ["0"]):
        refused = await install(*wrong)
        assert (refused.success, refused.address) == (False, "")
        assert "no such GPUs" in refused.error
    first = await install(large)
    assert (first.success, first.gpus, visible(first)) == (True, (large,), large)
    await until(lambda: free_of(running) == [24, 42], what="a beat with one engine")
    assert await install(large) == first
    assert await install() == first, "who names none takes the engine as it is"
    both = await install(large, small)
    assert (both.gpus, visible(both)) == ((large, small), f"{large},{small}")
    await until(lambda: free_of(running) == [21, 45], what="a beat with the engine on both")
    running_subject = messages.subject("models.running", running.control_plane.node_id)
    for request, vram in ((m.RunningRequest("m#0"), 6 * GIB), (m.RunningRequest(), 0)):
        (engine,) = (await ask(bus, running_subject, request, m.RunningReply, 60)).models
        # Issue 23: the memory of one engine, and only if it is asked for.
        assert (engine.vram, engine.ram > 2**20) == (vram, vram > 0)
