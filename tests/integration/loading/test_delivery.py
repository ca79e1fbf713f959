"""A load whose model has files: they go to the node before its engine starts; what follows if they do not."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from nodes.decisions import fleet_cache
from nodes.decisions.fleet_cache import read_file_bytes
from nodes.loading import load_request, staging, transfer, wait
from nodes.loading.load_attempts import LoadFailed, NodeRefused, refusals
from nodes.loading.source_files import OpenedFile, plan_files
from nodes.models import BackendNode, NodeModel
from nodes.models.replica import load_key
from nodes.placement import memory
from nodes.placement.choose import NO_NEED, Need, Reason, find_refusal
from nodes.placement.explain import FleetView
from nodes.replicas import slots, unload_requests
from operations.executor.work import Postpone, Work, in_thread, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder, Tick, record
from operations.models import Event, Operation
from tests.conftest import eventually
from tests.integration.loading.test_load_steps import told
from tests.support import backends, hot
from tests.support.file_server import Cut, FileServer, Hangs, Says, file_server
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage

__all__ = ["loads", "stage", "told"]
pytestmark = pytest.mark.django_db(transaction=True)

SIZE = 3_000_000
DEFINITION = "name: echo\nbackend: echo\nparameters: {model: sub/a.gguf}\nmmproj: proj.bin\n"
KEY = "models/echo/sub/a.gguf"


@pytest.fixture
def files(stage: Stage, settings: Settings) -> Path:
    """The models folder with a model that has two files; both nodes have the backend."""
    settings.CLUSTER = replace(settings.CLUSTER, models_path=stage.folder)
    (stage.folder / "echo.yaml").write_text(DEFINITION)
    (stage.folder / "sub").mkdir()
    (stage.folder / "sub" / "a.gguf").write_bytes(os.urandom(SIZE))
    (stage.folder / "proj.bin").write_bytes(b"projector")
    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
    return stage.folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "retry_delay", lambda attempts: 0.01)
    monkeypatch.setattr(staging, "REPORT_EVERY", 0.02)
    monkeypatch.setattr(staging, "_TURN_POLL_SECONDS", 0.02)


@asynccontextmanager
async def worker(folder: Path, node: BackendNode) -> AsyncIterator[FileServer]:
    """The file server of a node."""
    async with file_server(folder) as server:
        server.token = backends.TOKEN
        await in_thread(lambda: BackendNode.objects.filter(pk=node.pk).update(http_address=server.address))
        yield server


async def states() -> list[tuple[str, int, str]]:
    rows = NodeModel.objects.order_by("replica_index").values_list("node__name", "replica_index", "state")
    return await in_thread(lambda: list(rows))


@pytest.mark.rule(
    "R2.26",
    "R2.56",
    "R2.29",
    "T-ROU-2",
    "T-STG-9",
    "T-STG-28",
    "T-STG-29",
    "T-FLW-3",
    "T-FLW-6",
    "T-FLW-17",
    "T-FLW-18",
)
async def test_the_files_are_there_before_the_engine_starts(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    steps: list[Any] = []

    async with worker(tmp_path / "w", stage.one) as server:

        async def starting() -> Any:
            there = sorted(path.name for path in server.folder.rglob("*") if path.is_file())
            steps.append((there, await states()))
            return STARTED

        stage.installs(stage.one, starting)
        result = await stage.handler(stage.work)
    assert result["warnings"] == []
    assert not stage.bus.published, "D-STAGE-ROWS: no message tells it"
    assert steps == [(["a.gguf", "proj.bin"], [("one", 0, "loading")])]
    root = str(server.folder / "models/echo")
    (options,) = told
    assert (options.ModelFile, options.ModelPath) == (f"{root}/sub/a.gguf", root)
    assert (options.Model, options.MMProj) == ("sub/a.gguf", f"{root}/proj.bin")
    row = await in_thread(NodeModel.objects.get)
    assert (row.state, row.model_options["MMProj"]) == ("loaded", "proj.bin")


@pytest.mark.rule("R2.58", "R2.21", "R2.23", "C48", "T-STG-25", "http-6.1", "http-6.2")
async def test_every_process_sees_bytes_and_files_while_they_are_sent(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    """D-STAGE-ROWS: the operation's row tells it, whoever sends."""
    async with worker(tmp_path / "w", stage.one) as server:
        (files / "sub/a.gguf").write_bytes(bytes(10 * SIZE))
        server.faults = [Hangs(5), Hangs(5)]
        attempt = asyncio.create_task(stage.handler(stage.work))
        try:
            await hot.until(lambda: Operation.objects.get().current_bytes > 9)  # more than the projector
            assert await states() == [("one", 0, "staging")]
            look = await in_thread(wait.status, "echo", clock.now())
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
    assert look is not None
    body = wait.loading_body("echo", look, clock.now(), shows_node=True)
    assert (body["state"], body["node"]) == ("staging", "one")
    assert (body["total_bytes"], body["total_files"], body["file_index"]) == (10 * SIZE + 9, 2, 1)
    assert 0 < body["bytes_sent"] < 10 * SIZE
    assert body["progress"] == pytest.approx(90 * body["bytes_sent"] / (10 * SIZE + 9))
    assert "to one" in look.message
    assert "file 1 of 2" in look.message


@pytest.mark.rule("R2.38")
async def test_what_has_arrived_is_recorded_while_the_rest_is_sent(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are no longer free: a load in progress holds only those that are still to come."""
    monkeypatch.setattr(staging, "STORE_EVERY", 1)
    async with worker(tmp_path / "w", stage.one) as server:
        (files / "sub/a.gguf").write_bytes(bytes(10 * SIZE))
        server.faults = [Hangs(5), Hangs(5)]
        attempt = asyncio.create_task(stage.handler(stage.work))
        try:
            await hot.until(lambda: 9 < staged_files().get(stage.one.pk, 0) < 10 * SIZE)
            assert await states() == [("one", 0, "staging")]
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)


@pytest.mark.rule("R2.23", "T-STG-26", "T-STG-27")
def test_the_time_that_is_left_follows_from_what_moved_of_late(stage: Stage) -> None:
    """What the node had before is there, and no speed; bytes begin again after those of an installation."""
    attempt, now = stage.work.attempt, clock.now()
    install = Tick("installing", "x", current_bytes=500, total_bytes=500, percentage=45)
    files = Tick(
        "staging", "x", current_bytes=80, total_bytes=100, file_index=1, total_files=2, bytes_per_second=4
    )
    assert not record({attempt: [install]}, now=now)
    assert not record({attempt: [files.after(install)]}, now=now)
    look = wait.status("echo", now)
    assert look is not None
    assert (look.current_bytes, look.total_bytes, look.progress) == (80, 100, 45)
    assert wait.eta_seconds(look, now) == 5
    assert record({(attempt[0], attempt[1] + 1): [files]}, now=now), "nobody else says it"
    late = replace(files, current_bytes=70, bytes_per_second=0)
    assert not record({attempt: [late.after(files)]}, now=now)
    look = wait.status("echo", now)
    assert look is not None
    assert (look.current_bytes, wait.eta_seconds(look, now)) == (80, None)
    attempts.finish(*attempt, Event.CANCEL, now=now)
    assert wait.status("echo", now) is None


@pytest.mark.rule("R2.56", "R2.36", "T-STG-8", "T-DSK-12", "T-FLW-19", "worker-14")
async def test_with_shared_models_nothing_is_sent_nor_rewritten(
    stage: Stage, files: Path, told: list[Any], settings: Settings
) -> None:
    """Nor is the disk looked at: a node needs no room for what is there."""
    settings.CLUSTER = replace(settings.CLUSTER, shared_models=True)
    await in_thread(lambda: BackendNode.objects.update(total_disk=10**9, available_disk=0))
    result = await stage.handler(stage.work)
    assert "warnings" not in result
    (options,) = told
    assert (options.ModelFile, options.ModelPath) == (str(files / "sub/a.gguf"), str(files))
    assert options.MMProj == "proj.bin"


@pytest.mark.rule("R2.57", "R2.68", "R2.28", "worker-16")
@pytest.mark.parametrize(
    ("fault", "said"),
    [(Says(507, "disk is full"), "disk is full"), (Says(500, "broken"), "broken")],
    ids=["full", "broken"],
)
async def test_a_refusal_of_the_models_file_goes_to_the_next_node(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path, fault: Says, said: str
) -> None:
    async with worker(tmp_path / "w", stage.one) as server:
        server.faults = [fault, fault]
        await in_thread(stage.need_until)
        ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    (refusal,) = refusals(ended.payload)
    assert refusal.node_name == "one"
    assert refusal.reason.startswith("staging: ")
    assert said in refusal.reason
    assert (told, await states(), await in_thread(NodeModel.engines.count)) == ([], [], 0)
    assert not stage.bus.asked[messages.subject("backend.install", str(stage.one.id))], (
        "no engine was started for it"
    )


CLOSED = "127.0.0.1:1"


@pytest.mark.rule("R2.26", "worker-13")
async def test_a_file_port_that_refuses_sends_this_load_and_the_next_to_another_node(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    """Review R4: it was no refusal of the model, and the next load went there again."""
    await in_thread(lambda: BackendNode.objects.filter(pk=stage.one.pk).update(http_address=CLOSED))
    await in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    said = f"its file port {CLOSED} does not answer: connection refused"
    assert ended.reason == f"staging: one: {said}; trying another node"
    assert (ended.seconds, refusals(ended.payload or {})) == (0, [])
    node = await in_thread(BackendNode.objects.get, pk=stage.one.pk)
    assert (node.file_port_error, node.file_port_failures) == (said, 1)
    assert await states() == []
    async with worker(tmp_path / "w", stage.two):
        # The same operation without what it knows: as a load of anybody else.
        assert (await stage.handler(stage.work))["node"] == "two"


@pytest.mark.rule("R2.38")
async def test_a_load_without_files_goes_to_a_node_whose_file_port_failed(
    stage: Stage, told: list[Any]
) -> None:
    """And one with files waits, with the reason, while there is no other node (review R4)."""
    await in_thread(lambda: BackendNode.objects.update(file_port_error="down"))
    nodes = await in_thread(fleet_cache.read_fleet, "echo")
    assert {find_refusal(node, need=Need(disk=1)) for node in nodes} == {None}
    decision = FleetView(nodes, Need(files=1)).decide()
    assert decision.describe_refusals() == "no node can take it: 2 with a file port that does not answer"


@pytest.mark.rule("R2.57")
async def test_a_companion_that_is_refused_is_told_and_the_model_loads(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(tmp_path / "w", stage.one) as server:
        server.file(KEY).parent.mkdir(parents=True)
        server.file(KEY).write_bytes((files / "sub/a.gguf").read_bytes())
        server.faults = [Says(400, "no projectors here")]
        result = await stage.handler(stage.work)
    (warning,) = result["warnings"]
    assert "MMProj proj.bin" in warning
    assert "no projectors here" in warning
    assert result["message"] == f"completed without {warning}"
    assert warning in caplog.text
    assert told[0].MMProj == ""


@pytest.mark.rule("R2.57", "T-STG-6")
async def test_a_model_without_a_file_here_loads_by_its_name(
    stage: Stage, told: list[Any], settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.CLUSTER = replace(settings.CLUSTER, models_path=stage.folder)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    result = await stage.handler(stage.work)
    assert result["warnings"] == ["ModelFile echo: not found in the models folder"]
    assert "message" not in result
    (line,) = (record for record in caplog.records if "not found in the models folder" in record.message)
    assert line.levelname == "INFO", "the example model of the README loads so"
    assert (told[0].Model, told[0].ModelFile, told[0].ModelPath) == ("echo", "", "")


@pytest.mark.rule("worker-16", "R2.38", "T-DSK-11")
async def test_the_disk_is_looked_at_again_just_before(
    stage: Stage, files: Path, told: list[Any], settings: Settings
) -> None:
    """Others may have brought files since the node was chosen."""
    slot = await in_thread(taken, stage, stage.one, stage.work)
    await in_thread(disk_of, stage.one, 10**9)
    with pytest.raises(
        NodeRefused, match=r"0\.9 GiB of disk space free, 3 MiB of files and 1\.0 GiB to spare needed"
    ):
        await in_thread(staging._check_disk_space, slot, SIZE)
    await in_thread(staging._check_disk_space, slot, 0)
    settings.CLUSTER = replace(settings.CLUSTER, disk_headroom_check=False)
    await in_thread(staging._check_disk_space, slot, SIZE)


@pytest.mark.rule("R2.38")  # D-DISK-BROUGHT
async def test_a_node_needs_no_space_for_files_that_it_has(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    """A full disk keeps out a model that it has not, and takes one back that it has, also half of it."""
    need = Need(disk=memory.required_disk(40 * 2**30), disk_required=True)

    def refused() -> Any:
        looks = (
            fleet_cache.read_fleet("echo"),
            fleet_cache.FleetCache().decide("echo", FleetView((), need))[0].nodes,
        )
        first, second = ({one.id: find_refusal(one, need=need) for one in nodes} for nodes in looks)
        assert first == second
        return first[stage.one.pk]

    async with worker(tmp_path / "w", stage.one):
        await in_thread(disk_of, stage.one, 2 * 2**30)
        assert await in_thread(refused) is Reason.DISK
        await in_thread(lambda: staging.store_staged_bytes(stage.one.pk, "echo", 30 * 2**30, now=clock.now()))
        assert await in_thread(refused) is Reason.DISK
        await in_thread(lambda: staging.store_staged_bytes(stage.one.pk, "echo", 40 * 2**30, now=clock.now()))
        assert await in_thread(refused) is None
        await stage.handler(stage.work)
        there = await in_thread(staged_files)
        assert there == {stage.one.pk: SIZE + len(b"projector")}
        await in_thread(disk_of, stage.one, 2**30)
        await in_thread(lambda: NodeModel.objects.all().delete())
        await in_thread(lambda: BackendNode.objects.exclude(pk=stage.one.pk).delete())
        assert (await stage.handler(await in_thread(another_load)))["warnings"] == []
    await in_thread(unload_requests.forget_staged_files, stage.one.pk, "echo")
    assert await in_thread(staged_files) == {}


def staged_files() -> dict[Any, int]:
    return read_file_bytes(["echo"]).staged_by_node("echo")


def disk_of(node: BackendNode, free: int) -> None:
    BackendNode.objects.filter(pk=node.pk).update(total_disk=10**12, available_disk=free)


def taken(stage: Stage, node: BackendNode, work: Work) -> Any:
    """A slot of the node."""
    BackendNode.objects.filter(pk=node.pk).update(max_replicas_per_model=4)
    (view,) = [one for one in fleet_cache.read_fleet("echo") if one.id == node.id]
    return slots.reserve(view, "echo", attempt=work.attempt, backend="echo", now=clock.now(), need=NO_NEED)


def another_load() -> Work:
    now = clock.now()
    wanted = admission.OperationRequest(
        load_request.KIND,
        key=load_key("echo", "1"),
        element="echo",
        by=Requester("test"),
        needed_until=now + timedelta(hours=1),
    )
    admission.admit(wanted, now=now)
    (operation,) = attempts.claim("controller", now=now, lease=60, limit=1)
    return Work(operation, Recorder(write_batch))


@pytest.mark.rule("R2.26", "worker-13")
async def test_one_load_at_a_time_brings_a_models_files_to_a_node(stage: Stage, files: Path) -> None:
    """Also by another controller; one whose attempt has ended holds nobody up."""
    other = await in_thread(another_load)
    mine, theirs = [await in_thread(taken, stage, stage.one, work) for work in (stage.work, other)]

    def begin(slot: Any, work: Work) -> bool | None:
        return slots.begin_staging(slot, attempt=work.attempt, files=SIZE)

    assert await in_thread(begin, mine, stage.work) is True
    assert await in_thread(begin, mine, stage.work) is True
    assert await in_thread(begin, theirs, other) is False
    await in_thread(lambda: Operation.objects.filter(pk=stage.work.id).update(fence=99))
    assert await in_thread(begin, theirs, other) is True
    left = await in_thread(partial(slots.end_abandoned_loads, "echo", now=clock.now()))
    assert [slot.replica_index for slot in left] == [0]
    assert await in_thread(begin, mine, stage.work) is None
    assert await in_thread(lambda: slots.end_staging(theirs, attempt=other.attempt))
    assert not await in_thread(lambda: slots.end_staging(mine, attempt=stage.work.attempt))


@pytest.mark.parametrize("seed", range(3))
async def test_two_that_begin_at_once_do_not_both_send(stage: Stage, files: Path, seed: int) -> None:
    other = await in_thread(another_load)
    works = (stage.work, other)
    places = [await in_thread(taken, stage, stage.one, work) for work in works]

    def begin(number: int) -> bool | None:
        return slots.begin_staging(places[number], attempt=works[number].attempt, files=SIZE)

    begun = await asyncio.gather(*(in_thread(begin, number) for number in (seed % 2, 1 - seed % 2)))
    assert sorted(map(bool, begun)) == [False, True]


@pytest.mark.rule("T-STG-13", "R2.59", "I3")
async def test_an_attempt_that_ends_leaves_what_has_arrived_and_the_next_one_goes_on(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    """Cancelled, or its controller killed: the row goes, the part on the worker stays."""
    (files / "proj.bin").unlink()
    async with worker(tmp_path / "w", stage.one) as server:
        server.faults = [Hangs(1_000_000)]
        attempt = asyncio.create_task(stage.handler(stage.work))
        await hot.until(lambda: server.file(KEY).exists() and server.file(KEY).stat().st_size == 1_000_000)
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        assert await states() == [("one", 0, "staging")]

        def claimed_again() -> Work:
            attempts.release("controller", now=clock.now())
            (operation,) = eventually(  # a late report may have it locked
                lambda: attempts.claim("another", now=clock.now(), lease=60, limit=1), seconds=60
            )
            return Work(operation, Recorder(write_batch))

        assert (await stage.handler(await in_thread(claimed_again)))["node"] == "one"
        ranges = [one.headers["content-range"] for one in server.asked if one.method == "PUT"]
        assert ranges[-1] == f"bytes 1000000-{SIZE - 1}/{SIZE}"
        assert server.file(KEY).read_bytes() == (files / "sub/a.gguf").read_bytes()


async def test_a_lost_place_ends_the_upload(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    """The node left or restarted: the load tries elsewhere."""
    async with worker(tmp_path / "w", stage.one) as server:
        server.faults = [Hangs(10), Hangs(10)]
        await in_thread(stage.need_until)
        ended = await stage.play(lambda: NodeModel.objects.filter(state="staging").delete()[0] > 0)
    assert isinstance(ended, Postpone), ended
    assert "disconnected or restarted" in ended.reason


async def test_a_worker_that_started_again_is_no_node_that_refuses(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    """It serves by a new token before it registers: its node has not refused the load."""
    async with worker(tmp_path / "w", stage.one) as server:
        server.token = "of its new process"

        def registers() -> bool:
            return ("HEAD", 401) in server.steps and NodeModel.objects.all().delete()[0] > 0

        await in_thread(stage.need_until)
        ended = await stage.play(registers)
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    assert not refusals(ended.payload)
    assert "disconnected or restarted" in ended.reason


async def test_a_token_that_stays_wrong_goes_to_the_next_node(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_REGISTRATION_SECONDS", 0.0)
    async with worker(tmp_path / "w", stage.one) as server:
        server.token = "another"
        await in_thread(stage.need_until)
        ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    assert "does not accept our token" in refusals(ended.payload)[0].reason


@pytest.mark.rule("C31", "R2.24", "T-DL-15")
async def test_no_load_sends_for_longer_than_a_day(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    stage.work.operation.created_at = clock.now() - timedelta(hours=24)
    async with worker(tmp_path / "w", stage.one):
        await in_thread(stage.need_until)
        ended = await stage.play()
    assert isinstance(ended, LoadFailed), ended
    assert "deadline exceeded" in str(ended)


async def test_a_folder_whose_server_does_not_answer_is_no_deadline(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount answers ETIMEDOUT, which Python calls a TimeoutError too."""

    def late(*args: Any) -> Any:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(OpenedFile, "_read", late)
    async with worker(tmp_path / "w", stage.one):
        await in_thread(stage.need_until)
        ended = await stage.play()
    assert isinstance(ended, LoadFailed), ended
    assert "a file cannot be read (Connection timed out)" in str(ended)


async def test_a_model_that_leads_out_of_the_folder_is_no_matter_of_the_node(
    stage: Stage, files: Path, told: list[Any]
) -> None:
    (files / "sub/a.gguf").unlink()
    (files / "sub/a.gguf").symlink_to("/etc/hostname")
    await in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, LoadFailed), ended
    assert "leads out of the models folder" in str(ended)


async def test_a_file_that_is_still_being_written_is_looked_at_again(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def then_longer(*args: Any) -> Any:
        made = plan_files(*args)
        with (files / "sub/a.gguf").open("ab") as file:
            file.write(b"more")
        return made

    monkeypatch.setattr(staging, "plan_files", then_longer)
    async with worker(tmp_path / "w", stage.one):
        await in_thread(stage.need_until)
        ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert "was changed" in ended.reason


async def test_a_node_without_a_file_server_is_one_that_refuses(
    stage: Stage, files: Path, told: list[Any]
) -> None:
    await in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    assert "no HTTP address" in refusals(ended.payload)[0].reason


@pytest.mark.rule("T-STG-15", "R2.57")
async def test_an_upload_that_breaks_is_resumed_within_the_load(
    stage: Stage, files: Path, told: list[Any], tmp_path: Path
) -> None:
    async with worker(tmp_path / "w", stage.one) as server:
        server.faults = [Cut(5), Cut(70_000), Cut(1)]
        assert (await stage.handler(stage.work))["node"] == "one"
        assert server.file(KEY).read_bytes() == (files / "sub/a.gguf").read_bytes()
