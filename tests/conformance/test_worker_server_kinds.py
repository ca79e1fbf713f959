"""The worker process where the server is, or becomes, a stock frontend."""

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.nats import NatsBus
from tests.conformance.worker_support import (
    TOKEN,
    StubControlPlane,
    Worker,
    ask,
    engines_of,
)
from tests.conftest import until
from tests.wire.servers import ask as http


async def install(worker: Worker, bus: NatsBus, name: str) -> str:
    """The token with which an engine of a new backend was started."""
    request = m.InstallRequest(name, uri=str(worker.source(name)), model_id=name)
    subject = messages.subject("backend.install", worker.control_plane.node_id)
    reply = await ask(bus, subject, request, m.InstallReply, 60)
    assert reply.success, reply.error
    token: str = worker.started(name, reply.address)["env"]["LOCALAI_GRPC_AUTH_TOKEN"]
    return token


async def status(worker: Worker, token: str) -> int:
    """What the worker's file server answers to this token."""
    return (await http(f"127.0.0.1:{worker.base}", "HEAD", "/v1/files/models/none", token)).status


async def answers(worker: Worker, bus: NatsBus) -> bool:
    try:
        subject = messages.subject("backend.list", worker.control_plane.node_id)
        await ask(bus, subject, m.EmptyRequest(), m.ListReply, 5)
    except Exception:
        return False
    return True


async def test_engines_of_one_kind_of_server_end_before_the_other_kind_is_served(
    worker: Worker, control_plane: StubControlPlane, bus: NatsBus
) -> None:
    """D-ENGINE-TOKEN, D-FILE-TOKEN: the former engines accept a token that the new server does not have."""
    worker.launch(LOCALAI_WORKER_ALLOW_STOCK_FRONTEND="true")
    await until(lambda: answers(worker, bus), 30)
    assert await install(worker, bus, "first") == worker.engine_token
    assert (await status(worker, worker.engine_token), await status(worker, TOKEN)) == (404, 401)
    control_plane.is_stock = True
    await until(lambda: "everybody who has the registration token" in worker.log.read_text(), 30)
    assert engines_of(worker.folder) == []
    await until(lambda: answers(worker, bus), 30)
    assert await install(worker, bus, "second") == TOKEN
    assert (await status(worker, worker.engine_token), await status(worker, TOKEN)) == (401, 404)
    beats = len(control_plane.seen("/heartbeat"))
    await until(lambda: len(control_plane.seen("/heartbeat")) > beats + 1)
    assert control_plane.seen("/heartbeat")[-1].status == 200
    assert len(control_plane.seen("/register")) == 2
    assert "server='LocalAI Cluster'" in worker.log.read_text()
    assert "this worker serves a stock LocalAI frontend" in worker.log.read_text()


async def test_without_a_registration_token_files_and_engines_stay_closed(
    worker: Worker, control_plane: StubControlPlane, bus: NatsBus
) -> None:
    """D-FILE-TOKEN, D-ENGINE-TOKEN: a stock worker opens both to everybody."""
    control_plane.is_stock = True
    worker.environment["LOCALAI_REGISTRATION_TOKEN"] = ""
    worker.launch()
    await until(lambda: answers(worker, bus), 30)
    assert len(await install(worker, bus, "closed")) == 64
    assert await status(worker, "") == 401
    assert "stay closed. Set LOCALAI_REGISTRATION_TOKEN" in worker.log.read_text()
    assert "status=healthy server='stock LocalAI'" in worker.log.read_text()
    await until(lambda: control_plane.seen("/heartbeat"))
    assert "authorization" not in control_plane.seen("/heartbeat")[0].headers
