"""The handler of `model_load` against a real PostgreSQL and a bus whose workers the test plays."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection, transaction
from django.db.models import F, Sum
from pytest_django import Settings

from localai_cluster import clock, names
from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import NoResponders, NotConnected, RequestTimeout
from localai_cluster.rpc.errors import BackendError, DeadlineExceeded, Lost
from nodes.backends import commands, intents
from nodes.definitions.folder import Folder
from nodes.loading import asking, engines, load
from nodes.loading.another import load_another
from nodes.loading.failures import LoadFailed
from nodes.loading.stopping import Stopper
from nodes.loading.wish import ANOTHER
from nodes.models import BackendNode, EngineStart, NodeEvent, NodeModel
from nodes.placement.setbacks import from_payload
from nodes.replicas import retire, slots, snapshot
from nodes.replicas.slots import Slot
from operations.executor.operation_queue import write_batch
from operations.executor.recorder import Recorder
from operations.executor.waiting import Hints
from operations.executor.work import Abandoned, Postpone, Work, in_thread
from operations.ledger import admission, lease
from operations.models import Operation
from tests.conftest import eventually
from tests.support import backends, hot
from tests.support import intents as wished
from tests.support.bus import NEVER, PlayedBus

pytestmark = pytest.mark.django_db(transaction=True)

BACKEND = m.InstalledBackend(name="echo")


class Stage:
    """Two nodes, a definition, and one claimed load."""

    def __init__(self, folder: Path) -> None:
        (folder / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
        self.bus, self.folder = PlayedBus(), folder
        self.one, self.two = hot.node("one"), hot.node("two")
        now = clock.now()
        request = admission.OperationRequest(
            load.KIND,
            key=load.key("echo"),
            element="echo",
            actor="test",
            needed_until=now - timedelta(seconds=1),
        )
        admission.admit(request, now=now)
        (operation,) = lease.claim("controller", now=now, lease=60, limit=1)
        self.work = Work(operation, Recorder(write_batch))
        self.handler = load.LoadModel(self.bus, Folder(folder), Hints())

    def lists(self, node: BackendNode, *backends: m.InstalledBackend) -> None:
        self.bus.replies[subjects.backend_list(str(node.id))] = m.ListReply(backends)

    def installs(self, node: BackendNode, reply: Any) -> None:
        self.bus.replies[subjects.backend_install(str(node.id))] = reply

    def need_until(self) -> None:
        """Somebody waits again, as a request says that attaches to the running load."""
        admission.need_until(self.work.id, clock.now() + timedelta(seconds=60))

    async def play(self, happens: Callable[[], bool] = lambda: True) -> BaseException:
        """Runs the handler; `happens` is tried until it has happened. Answers how the attempt ended."""
        attempt = asyncio.create_task(self.handler(self.work))

        async def happened() -> bool:
            return await hot.in_thread(happens)

        try:
            assert await clock.wait_until(happened, timeout=60)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(attempt), 60)
            assert attempt.done(), "the attempt goes on forever"
            error = attempt.exception()
            assert error is not None
            return error
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def vanishes_while_installing(stage: Stage) -> Callable[[], bool]:
    def happens() -> bool:
        for held in wished.claim():
            failed = {(held.id, held.fence): (intents.Failed("worker gone"), ())}
            assert not intents.settle(failed, now=clock.now())
            return True
        return False

    return happens


async def test_a_load_leaves_a_worker_that_vanished_while_it_installed(stage: Stage) -> None:
    """Rule 4: the installation goes on when its worker is back; the load tries elsewhere meanwhile."""
    stage.lists(stage.one)
    stage.lists(stage.two, BACKEND)
    await hot.in_thread(stage.need_until)
    ended = await stage.play(vanishes_while_installing(stage))
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.seconds) == (True, 0), "the node rests, the load does not"
    assert ended.payload is not None
    assert list(from_payload(ended.payload)) == [stage.one.id]
    assert await hot.in_thread(NodeModel.objects.count) == 0


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waiting"])
@pytest.mark.parametrize("kind", [wished.UPGRADE, wished.DELETE])
@pytest.mark.rule("O34")
async def test_a_load_tries_elsewhere_while_its_backend_is_being_deleted(
    stage: Stage, kind: str, begun: bool
) -> None:
    """Another command on the backend keeps it from being installed; that is no failure of the load.

    A deletion that has not begun stands too: a load never takes the place of what somebody asked for.
    """
    asked: list[Operation] = []

    def busy() -> None:
        asked.append(wished.ask(kind, stage.one))
        if begun:
            wished.claim()
        stage.need_until()

    stage.lists(stage.one)
    stage.lists(stage.two, BACKEND)
    await hot.in_thread(busy)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    verb, state = kind.removeprefix("backend_"), "in progress" if begun else "waiting"
    assert ended.reason.startswith(f"{verb} echo on one is {state}")
    assert str(asked[0].id) in ended.reason
    await hot.in_thread(asked[0].refresh_from_db)
    assert asked[0].status == ("processing" if begun else "pending")
    assert ended.payload is not None
    assert list(from_payload(ended.payload)) == [stage.one.id]
    assert await hot.in_thread(NodeModel.objects.count) == 0


async def test_a_load_waits_while_the_models_folder_hangs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 4: the operation says why it waits and looks again; the controller goes on."""
    goes_on, plain = threading.Event(), os.scandir

    def hanging(path: Any) -> Any:
        goes_on.wait()
        return plain(path)

    monkeypatch.setattr("nodes.definitions.folder.os.scandir", hanging)
    stage.handler = load.LoadModel(stage.bus, Folder(stage.folder, limit=0.05), Hints())
    try:
        ended = await stage.play()
    finally:
        goes_on.set()
    assert isinstance(ended, Postpone), ended
    assert ("does not answer" in ended.reason, ended.seconds) == (True, 5.0)


async def test_a_load_ends_when_its_slot_is_gone(stage: Stage) -> None:
    """A node that fell silent, left or started again takes its rows away; those who wait for it stop.

    The worker here is a stock one: it does not name its process, so nothing else tells that it was restarted.
    """
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, NEVER)
    await hot.in_thread(stage.need_until)

    def silent() -> bool:
        if not stage.bus.asked[subjects.backend_install(str(stage.one.id))]:
            return False
        return NodeModel.objects.filter(state="loading").delete()[0] > 0

    ended = await stage.play(silent)
    assert isinstance(ended, Postpone), ended
    assert stage.bus.stops(stage.one.id) == ["echo#0"], "its engine may live on"


async def test_anyone_who_came_later_keeps_the_load_alive(stage: Stage) -> None:
    """The wish is read when the attempt ends, not when it began."""
    stage.lists(stage.one, BACKEND)
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended


async def test_an_engine_stopped_while_it_started_is_started_again(stage: Stage) -> None:
    """A stop meant for an earlier attempt may meet the engine of this one: no failure of the model."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(error="was stopped while it started", interrupted=True))
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended


@pytest.mark.parametrize("silence", ["no listener", "no answer"])
async def test_twelve_dead_nodes_cost_one_attempt_a_short_wait(
    stage: Stage, silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead nodes that still count as healthy rank first; the one that lives gets the load all the same."""
    monkeypatch.setattr(asking, "ANSWER_WITHIN", 0.05)
    dead = [
        *(stage.one, stage.two),
        *[await hot.in_thread(partial(hot.node, f"dead-{number}", available_vram=9)) for number in range(10)],
    ]
    alive = await hot.in_thread(hot.node, "local")
    stage.lists(alive, BACKEND)
    stage.installs(alive, NEVER)
    for node in dead if silence == "no answer" else []:
        stage.bus.replies[subjects.backend_list(str(node.id))] = NEVER
    await hot.in_thread(stage.need_until)

    def placed() -> bool:
        return NodeModel.objects.filter(node=alive, state="loading").exists()

    attempt = asyncio.create_task(stage.handler(stage.work))

    async def started() -> bool:
        assert not attempt.done(), attempt.exception()
        return await hot.in_thread(placed)

    assert await clock.wait_until(started, timeout=20)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    asked = [subjects.backend_list(str(node.id)) for node in dead]
    assert [len(stage.bus.asked[subject]) for subject in asked] == [1] * len(dead)


async def test_a_load_whose_nodes_are_all_silent_waits_and_says_so(stage: Stage) -> None:
    """Each node rests for longer and longer; the load looks when the first one has rested."""
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.reason) == (
        True,
        "no node can take it: 2 not answering or failed a moment ago",
    )
    assert 0 < ended.seconds <= 1
    assert ended.payload is not None
    known = from_payload(ended.payload)
    assert {id: setback.times for id, setback in known.items()} == {stage.one.id: 1, stage.two.id: 1}


@pytest.mark.rule("R2.49")
async def test_without_the_bus_no_node_is_blamed(stage: Stage) -> None:
    """This controller has lost its connection: nothing is known of the nodes, and no node's change helps."""
    for node in (stage.one, stage.two):
        stage.bus.replies[subjects.backend_list(str(node.id))] = NotConnected("lost")
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.payload) == (False, None)
    assert "message bus" in ended.reason


async def test_a_load_that_no_one_wants_any_more_says_so_at_its_next_look(stage: Stage) -> None:
    """Its end is the one that the pages tell beforehand."""
    ended = await stage.play()
    assert isinstance(ended, Abandoned), ended
    assert "2 not answering" in str(ended)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `LoadModel` of each engine comes to, in turn: nothing, an error, or something to do first."""
    script: list[Any] = []

    class Client:
        def __init__(self, address: str, token: str) -> None:
            assert (address, token) == (STARTED.address, backends.TOKEN)

        async def load_model(self, options: Any, timeout: float) -> Any:
            what = script.pop(0) if script else None
            if isinstance(what, Exception):
                raise what
            if what is not None:
                await hot.in_thread(what)
            return SimpleNamespace(success=True, message="")

        async def close(self) -> None:
            """Nothing to end."""

    monkeypatch.setattr(load, "BackendClient", Client)
    return script


STARTED = m.InstallReply(True, "127.0.0.1:7")


def left() -> list[tuple[str, str]]:
    """Engines that may have to be stopped, with their addresses."""
    return [(str(row), row.address) for row in EngineStart.objects.all()]


async def test_a_lost_bus_and_an_early_lack_of_a_listener_move_no_load(
    stage: Stage, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on with what it was told: the load stays with it."""
    monkeypatch.setattr(commands, "_ASK_AGAIN", 0.0)

    def lost() -> Exception:
        stage.bus.generation += 1
        stage.bus.connected_since = clock.monotonic()
        return NotConnected("lost")

    listed = m.ListReply((BACKEND,))
    absent = NoResponders("early")
    stage.bus.replies[subjects.backend_list(str(stage.one.id))] = [*[listed] * 3, absent, absent, listed]
    stage.installs(stage.one, [lost, STARTED])
    assert (await stage.handler(stage.work))["node"] == "one"
    assert stage.bus.stops(stage.one.id) == []
    assert await hot.in_thread(left) == [], "the replica accounts for the engine"


async def test_an_address_belongs_to_the_engine_that_was_started_there_last(
    stage: Stage, loads: list[Any]
) -> None:
    """A stock worker that restarted gives its ports again; rows of its former engines survive until asked."""

    def rows() -> list[tuple[str, str]]:
        return sorted((str(row), row.node.name) for row in NodeModel.objects.select_related("node"))

    def former() -> None:
        BackendNode.objects.update(max_replicas_per_model=2)
        hot.replica(stage.one, "other", address=STARTED.address)
        hot.replica(stage.one, "echo", 1, address=STARTED.address, state="unloading")
        hot.replica(stage.one, "third", address="127.0.0.1:8")
        hot.replica(stage.two, "other", address=STARTED.address)

    seen: list[Any] = []
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(former)
    loads.append(lambda: seen.append(rows()))
    assert (await stage.handler(stage.work))["node"] == "one"
    expected = [("echo#0", "one"), ("other#0", "two"), ("third#0", "one")]
    assert seen == [expected], "before the engine loads: a request must not reach it as the former one"
    assert await hot.in_thread(rows) == expected


async def test_a_start_that_takes_long_is_waited_for(stage: Stage, loads: list[Any]) -> None:
    """The time limit is no failure while the worker is there and a request waits."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, [RequestTimeout("late"), STARTED])
    await hot.in_thread(stage.need_until)
    assert (await stage.handler(stage.work))["node"] == "one"


@pytest.mark.rule("R2.62", "T-ROU-4")
async def test_a_cancelled_load_has_its_engine_stopped(stage: Stage) -> None:
    """No request waits any more while the engine still starts."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, RequestTimeout("late"))
    ended = await stage.play()
    assert isinstance(ended, Abandoned), ended
    assert stage.bus.stops(stage.one.id) == ["echo#0"]
    assert await hot.in_thread(left) == [("echo#0", "")], "until a controller has seen that it is gone"
    kept = await hot.in_thread(NodeModel.objects.get)
    assert (kept.state, kept.address) == ("unloading", ""), "its place is not free before"


@pytest.mark.rule("R2.62", "R2.61", "T-DL-21", "T-DL-22", "T-DL-23", "T-DL-24")
@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (DeadlineExceeded("late"), LoadFailed),
        (BackendError("no such file"), Postpone),
        (Lost("the engine died"), Postpone),
        (lambda: NodeModel.objects.all().delete(), Postpone),
    ],
    ids=["deadline", "refused", "died", "not published"],
)
async def test_an_attempt_without_a_replica_has_its_engine_stopped(
    stage: Stage, loads: list[Any], error: Any, ends: type
) -> None:
    """Exactly that process, by its key; how the load ended is still what is told."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)
    loads.append(error)
    ended = await stage.play()
    assert isinstance(ended, ends), ended
    assert stage.bus.stops(stage.one.id) == ["echo#0"]
    assert await hot.in_thread(left) == [("echo#0", STARTED.address)]


async def test_an_attempt_whose_place_was_taken_over_stops_nothing(stage: Stage, loads: list[Any]) -> None:
    """The engine under this key is a later attempt's."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)

    def taken_over() -> None:
        slot = Slot(NodeModel.objects.get().pk, stage.one.id, "one", 0)
        NodeModel.objects.update(loading_by="later:2")
        assert engines.note(slot, "echo", mark="later:2", now=clock.now())

    loads.append(taken_over)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert stage.bus.stops(stage.one.id) == []
    assert await hot.in_thread(left) == [("echo#0", "")]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A host of this machine that no node has registered."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        server.setblocking(False)
        yield server


def met(server: socket.socket) -> bool:
    """Whether somebody has connected."""
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.2:{port}",
        "ipv4:127.0.0.2:{port}",
        "ipv4:127.0.0.1:1,127.0.0.2:{port}",
        "dns:///127.0.0.2:{port}",
        "127.0.0.1:1,127.0.0.2:{port}",
        "127.0.0.1@127.0.0.2:{port}",
        "http://127.0.0.2:{port}",
        "0177.0.0.2:{port}",
        "127.0.0.2:{port}/",
        "unix:{path}",
        "unix://{path}",
        "127.0.0.1:1" + "\x00" * 9,
        "127.0.0.1",
        "127.0.0.1:0",
    ],
)
async def test_an_engine_is_dialled_on_its_own_host_only(
    stage: Stage, listening: socket.socket, tmp_path: Path, address: str
) -> None:
    """The operation names both values, the timeline keeps it, and no one is connected to."""
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "engine.sock"))
        local.listen()
        local.setblocking(False)
        said = address.format(port=listening.getsockname()[1], path=tmp_path / "engine.sock")
        stage.lists(stage.one, BACKEND)
        stage.installs(stage.one, m.InstallReply(True, said))
        await hot.in_thread(stage.need_until)
        ended = await stage.play()
        assert isinstance(ended, Postpone), ended
        assert "127.0.0.1:1'" in ended.reason
        assert names.plain(said) in ended.reason
        assert not met(listening)
        assert not met(local)
    told = await hot.in_thread(NodeEvent.objects.get)
    assert (told.node_id, told.kind) == (stage.one.id, "address_refused")
    assert told.detail == {"replied": names.plain(said), "registered": "127.0.0.1:1"}
    assert stage.bus.stops(stage.one.id) == ["echo#0"], "its engine is stopped all the same"


async def test_an_engine_is_dialled_on_a_host_that_the_operator_lists(
    stage: Stage, listening: socket.socket, settings: Settings
) -> None:
    """And the test above would see a connection."""
    settings.CLUSTER = replace(settings.CLUSTER, node_hosts={"one": frozenset({"127.0.0.2"})})
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(True, f"127.0.0.2:{listening.getsockname()[1]}"))
    await hot.in_thread(stage.need_until)
    playing = asyncio.create_task(stage.play())
    assert await clock.wait_until(lambda: asyncio.to_thread(met, listening), timeout=60)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert not await hot.in_thread(NodeEvent.objects.exists)


async def test_an_attempt_whose_place_is_lost_starts_nothing(stage: Stage) -> None:
    """Its row went between the look at the backends and the start."""
    await hot.in_thread(stage.need_until)

    async def lost() -> m.ListReply:
        if await hot.in_thread(NodeModel.objects.exists):
            await hot.in_thread(NodeModel.objects.all().delete)
        return m.ListReply((BACKEND,))

    stage.bus.replies[subjects.backend_list(str(stage.one.id))] = lost
    stage.installs(stage.one, STARTED)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert stage.bus.asked[subjects.backend_install(str(stage.one.id))] == []
    assert await hot.in_thread(left) == []


async def test_an_attempt_before_the_start_stops_nothing(stage: Stage) -> None:
    """There is no engine, and another one may have the key."""
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert stage.bus.published == []


async def test_the_next_attempt_stops_what_a_killed_one_has_left(stage: Stage, loads: list[Any]) -> None:
    """At the place that it has taken itself: another load may have a place that was left elsewhere."""
    killed = f"{stage.work.id}:0"

    def left_behind() -> None:
        row = NodeModel.objects.create(node=stage.two, model_name="echo", state="loading", loading_by=killed)
        assert engines.note(Slot(row.pk, stage.two.id, "two", 0), "echo", mark=killed, now=clock.now())
        row.delete()

    await in_thread(left_behind)
    stage.lists(stage.two, BACKEND)
    stage.installs(stage.two, STARTED)
    assert (await stage.handler(stage.work))["node"] == "two"
    assert stage.bus.stops(stage.two.id) == ["echo#0"]


@pytest.mark.parametrize("more", [True, False], ids=["one more", "any"])
async def test_only_a_load_of_one_more_replica_is_carried_out_beside_one_that_serves(
    stage: Stage, loads: list[Any], more: bool
) -> None:
    await in_thread(hot.replica, stage.two)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    stage.work.operation.payload = {ANOTHER: more}
    result = await stage.handler(stage.work)
    assert (result.get("node"), result.get("already_loaded")) == (("one", None) if more else (None, True))


@pytest.mark.rule("R2.44")
async def test_a_load_leaves_the_engines_and_slots_of_another_active_load_alone(
    stage: Stage, loads: list[Any]
) -> None:
    """Several replicas of a model may be loaded at once; what an ended load has left is cleared.

    A request's load does not make one beside that which is on its way.
    """
    marks: list[str] = []

    def others() -> None:
        BackendNode.objects.update(max_replicas_per_model=3)
        active = load_another("echo", only=None, actor="test", reason="test")
        (operation,) = lease.claim("controller", now=clock.now(), lease=60, limit=1)
        assert operation.id == active.id
        marks.extend((f"{active.id}:{operation.fence}", f"{uuid4()}:1"))
        for index, mark in enumerate(marks):
            (view, _) = sorted(snapshot.fleet("echo"), key=lambda one: one.name)
            slot = slots.reserve(view, "echo", mark=mark, backend="echo", now=clock.now())
            assert isinstance(slot, Slot)
            assert slot.replica_index == index
            assert engines.note(slot, "echo", mark=mark, now=clock.now())

    await in_thread(others)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    with pytest.raises(Abandoned, match="another replica of the model"):
        await stage.handler(stage.work)
    stage.work.operation.payload[ANOTHER] = True
    assert (await stage.handler(stage.work))["replica_index"] == 1
    assert stage.bus.stops(stage.one.id) == ["echo#1"]
    active, _ = marks
    left = await in_thread(lambda: list(NodeModel.objects.filter(state="loading").values_list("loading_by")))
    assert left == [(active,)]
    assert await in_thread(lambda: list(EngineStart.objects.values_list("mark"))) == [(active,)]


async def stops(stage: Stage) -> None:
    """The attempt is over, controllers stop what it has left; then its place is free, for the next one."""
    await in_thread(Operation.objects.update, fence=F("fence") + 1)
    stage.bus.replies[subjects.model_stop(str(stage.one.id))] = m.StopModelReply(terminated=True)
    await Stopper(stage.bus).look_once()
    assert await in_thread(NodeModel.objects.count) == 0
    await in_thread(Operation.objects.update, fence=F("fence") - 1)


async def test_only_deaths_of_the_engine_count_as_deaths(stage: Stage, loads: list[Any]) -> None:
    """Attempts that were put off for other reasons say nothing about the model."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)
    await in_thread(Operation.objects.update, attempts=9)
    for deaths in (1, 2):
        loads.append(Lost("the engine died"))
        ended = await stage.play()
        assert isinstance(ended, Postpone), ended
        assert ended.payload is not None
        assert ended.payload["engine_deaths"] == deaths
        # The node is not avoided here: what follows is about the count alone.
        await in_thread(Operation.objects.update, payload={"engine_deaths": deaths})
        await stops(stage)
    loads.append(Lost("the engine died"))
    ended = await stage.play()
    assert isinstance(ended, LoadFailed), ended


def test_leftovers_are_locked_in_the_order_of_their_ids() -> None:
    """Anyone who ends replicas of several nodes may hold an earlier one: nothing is held while it waits."""
    early, late = sorted((uuid4(), uuid4()))
    for number, pk in enumerate((late, early)):
        NodeModel.objects.create(
            id=pk, node=hot.node(f"n{number}"), model_name="m", state="loading", loading_by="gone"
        )

    def clear() -> list[Slot]:
        try:
            return retire.retire_slots_of_ended(engines.running_attempts(), "m")
        finally:
            connection.close()

    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(hot.database_url(), autocommit=True) as watcher:
        with transaction.atomic():
            NodeModel.objects.select_for_update().get(pk=early)
            cleared = pool.submit(clear)
            eventually(lambda: watcher.execute(waiting).fetchone(), what="it waits for the earlier one")
            NodeModel.objects.select_for_update(nowait=True).get(pk=late)
        assert {slot.id for slot in cleared.result(timeout=90)} == {early, late}


@pytest.mark.rule("R2.32", "R2.40", "R2.43")
async def test_a_load_reserves_what_its_file_needs(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Measured before the node is chosen, reserved with the slot, and kept until a reading shows it."""
    await hot.in_thread(lambda: BackendNode.objects.update(available_vram=10 * 2**30))
    (stage.folder / "echo").write_bytes(bytes(4096))
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    loads.append(Lost("the engine died"))
    await hot.in_thread(stage.need_until)
    await stage.play()
    await stops(stage)
    assert await in_thread(lambda: BackendNode.objects.aggregate(left=Sum("reserved_vram"))["left"]) == 0
    await in_thread(Operation.objects.update, payload={})
    settings.CLUSTER = replace(settings.CLUSTER, vram_policy="require")
    loaded = await stage.handler(stage.work)
    assert loaded["node"] == "one"
    assert loaded["why"] == "equal to two in every term, the first by name"
    row = await in_thread(NodeModel.objects.select_related("node").get)
    needed = 4096 + 2048 * 8192
    assert (row.vram_needed, row.vram_seen, row.loaded_at is not None) == (needed, 10 * 2**30, True)
    assert row.node.reserved_vram == needed


ROOM: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "memory": (
        {"available_vram": 0},
        {"vram_policy": "require"},
        "2 without the VRAM it needs (0.1 GiB: one has 0.0 GiB free, two has 0.0 GiB free)",
    ),
    "disk": (
        {"total_disk": 9 * 2**30, "available_disk": 2**30},
        {},
        "2 without the disk space it needs"
        " (1.1 GiB: one has 1.0 GiB of 9.0 GiB free, two has 1.0 GiB of 9.0 GiB free)",
    ),
}


@pytest.mark.rule("R2.32", "R2.39", "T-DSK-6", "T-DSK-7", "T-DSK-8")
@pytest.mark.parametrize("lack", ROOM)
async def test_a_load_without_room_anywhere_waits_and_says_what_is_missing(
    stage: Stage, lack: str, settings: Settings
) -> None:
    """D-VRAM-POLICY, D-DISK-WAITS: no worker is asked anything; the operation names need and nodes."""
    figures, policy, said = ROOM[lack]
    await hot.in_thread(lambda: BackendNode.objects.update(**figures))
    settings.CLUSTER = replace(settings.CLUSTER, **policy)
    (stage.folder / "echo").write_bytes(bytes(4096))
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.reason) == (True, f"no node can take it: {said}")
    assert not stage.bus.asked


@pytest.mark.rule("R2.39", "T-DSK-9", "T-DSK-10")
async def test_the_disk_check_switched_off_only_warns(
    stage: Stage, loads: list[Any], settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    figures = ROOM["disk"][0]
    await hot.in_thread(lambda: BackendNode.objects.update(**figures))
    settings.CLUSTER = replace(settings.CLUSTER, disk_headroom_check=False)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    assert (await stage.handler(stage.work))["node"] == "one"
    assert "one may have too little disk space for echo" in caplog.text
