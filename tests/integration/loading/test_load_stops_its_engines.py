"""An attempt of a load stops the engine that it has left, and no other one."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection, transaction

from localai_cluster.kit import clock
from localai_cluster.kit.leases import Attempt
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import RequestTimeout
from localai_cluster.messaging.messages import decode
from localai_cluster.rpc.errors import BackendError, Cancelled, DeadlineExceeded, Lost
from nodes.decisions import fleet_cache
from nodes.loading import staging
from nodes.loading.load_attempts import LoadFailed
from nodes.loading.load_request import SCALE_UP, request_scale_up
from nodes.models import BackendNode, NodeModel
from nodes.replicas import engines, slots
from nodes.replicas.slots import Slot
from nodes.replicas.stops import Stopper
from operations.executor.work import Abandoned, Postpone, Work, in_thread, write_batch
from operations.ledger import attempts
from operations.ledger.progress import Recorder
from operations.models import Operation
from tests.conftest import eventually
from tests.support import hot
from tests.support.loading import BACKEND, STARTED, Stage, left, loads, stage, stops

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)


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


@pytest.mark.rule("R2.62", "T-ROU-4")
async def test_a_cancelled_load_has_its_engine_stopped(stage: Stage) -> None:
    """No request waits any more while the engine still starts."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, RequestTimeout("late"))
    ended = await stage.play()
    assert isinstance(ended, Abandoned), ended
    assert stage.bus.stops(stage.one.id) == [], "a late stop could hit the next engine with this key"
    await Stopper(stage.bus).run_pass()
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
    ],
    ids=["deadline", "refused", "died"],
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
    assert await hot.in_thread(left) == [("echo#0", STARTED.address)]
    await Stopper(stage.bus).run_pass()
    assert stage.bus.stops(stage.one.id) == ["echo#0"]


async def test_an_engine_that_is_stopped_while_it_loads_has_died(stage: Stage, loads: list[Any]) -> None:
    """It refuses nothing: the killed worker's reaper ends it, and it cancels its calls."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)
    loads.append(Cancelled("CANCELLED"))
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert "the engine was stopped while it loaded the model" in str(ended)
    assert ended.payload is not None
    assert ended.payload["engine_deaths"] == 1


@pytest.mark.rule("R2.64")
async def test_a_scale_up_that_is_repeated_after_its_replica_serves_loads_no_second_one(
    stage: Stage, loads: list[Any]
) -> None:
    """Its controller was killed before it wrote the end of the operation."""

    def again() -> Work:
        at = clock.now() + timedelta(minutes=5)
        eventually(lambda: attempts.reap(now=at) == (1, 0), seconds=60, what="no report has it locked")
        (operation,) = eventually(
            lambda: attempts.claim("other", now=at, lease=60, limit=1), seconds=60, what="nor now"
        )
        return Work(operation, Recorder(write_batch))

    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
    stage.work.operation.payload |= {SCALE_UP: True}
    await in_thread(lambda: Operation.objects.update(payload=stage.work.operation.payload))
    result = await stage.handler(stage.work)
    assert await stage.handler(await in_thread(again)) == result
    assert await in_thread(NodeModel.objects.count) == 1


async def test_an_attempt_whose_operation_another_controller_has_publishes_nothing(
    stage: Stage, loads: list[Any]
) -> None:
    """It stood still for too long; the other one has not ended its row yet."""

    def overtaken() -> None:
        at = clock.now() + timedelta(minutes=5)
        eventually(lambda: attempts.reap(now=at) == (1, 0), seconds=60, what="no report has it locked")
        eventually(lambda: attempts.claim("other", now=at, lease=60, limit=1), seconds=60, what="nor now")

    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await in_thread(stage.need_until)
    loads.append(overtaken)
    assert isinstance(await stage.play(), Postpone)
    assert (await in_thread(NodeModel.objects.get)).phase == "stopping"


async def test_an_attempt_whose_place_was_taken_over_stops_nothing(stage: Stage, loads: list[Any]) -> None:
    """The engine under this key is a later attempt's."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)

    loads.append(lambda: NodeModel.objects.update(owner_fence=99))
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert stage.bus.stops(stage.one.id) == []
    assert (await hot.in_thread(NodeModel.objects.get)).phase == "starting"


@pytest.mark.rule("R2.62")
async def test_an_attempt_whose_node_has_left_leaves_its_engine_to_the_controllers(
    stage: Stage, loads: list[Any]
) -> None:
    """They stop exactly that process as soon as the node can be reached."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)

    @transaction.atomic
    def leaves() -> None:
        engines.depart(stage.one.id, now=clock.now())

    loads.append(leaves)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert await hot.in_thread(left) == [("echo#0", STARTED.address)]
    await stops(stage)
    (stop,) = stage.bus.asked[messages.subject("model.stop", str(stage.one.id))]
    assert decode(stop, m.StopModelRequest).expected_address == STARTED.address


async def test_an_attempt_whose_place_is_lost_starts_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row went between the look at the backends and the start."""
    await hot.in_thread(stage.need_until)
    plain = staging.stage_files

    async def lost(*given: Any) -> Any:
        await hot.in_thread(NodeModel.objects.all().delete)
        return await plain(*given)

    monkeypatch.setattr(staging, "stage_files", lost)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert stage.bus.asked[messages.subject("backend.install", str(stage.one.id))] == []
    assert await hot.in_thread(left) == []


async def test_an_attempt_before_the_start_stops_nothing(stage: Stage) -> None:
    """There is no engine, and another one may have the key."""
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert stage.bus.published == []


async def test_the_next_attempt_leaves_the_slot_of_a_killed_one_alone(stage: Stage, loads: list[Any]) -> None:
    """Its engine may run, so its index and its process key are not used again before that is stopped."""
    killed = (stage.work.id, 0)
    await in_thread(lambda: hot.replica(stage.two, phase="starting", address="", owner=killed))
    stage.lists(stage.two, BACKEND)
    stage.installs(stage.two, STARTED)
    done = await stage.handler(stage.work)
    assert (done["node"], done["replica_index"]) == ("two", 1)
    assert await in_thread(left) == [("echo#0", "")]
    await Stopper(stage.bus).run_pass()
    assert stage.bus.stops(stage.two.id) == ["echo#0"]


@pytest.mark.rule("R2.44")
async def test_a_load_leaves_the_engines_and_slots_of_another_active_load_alone(
    stage: Stage, loads: list[Any]
) -> None:
    """Several replicas of a model may be loaded at once; what an ended load has left is cleared.

    A request's load does not make one beside that which is on its way.
    """
    marks: list[Attempt] = []

    def others() -> None:
        BackendNode.objects.update(max_replicas_per_model=3)
        active = request_scale_up("echo", allowed_nodes=None, actor="test", reason="test")
        (operation,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
        assert operation.id == active.id
        marks.extend(((active.id, operation.fence), (uuid4(), 1)))
        for index, mark in enumerate(marks):
            (view, _) = sorted(fleet_cache.read_fleet("echo"), key=lambda one: one.name)
            slot = slots.reserve(view, "echo", attempt=mark, backend="echo", now=clock.now())
            assert isinstance(slot, Slot)
            assert slot.replica_index == index
            assert slots.start(slot, attempt=mark, now=clock.now())

    await in_thread(others)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    with pytest.raises(Abandoned, match="another replica of the model"):
        await stage.handler(stage.work)
    stage.work.operation.payload[SCALE_UP] = True
    assert (await stage.handler(stage.work))["replica_index"] == 2
    active, _ = marks
    loading = NodeModel.objects.filter(state="loading")
    assert await in_thread(lambda: [row.owner_id for row in loading]) == [active[0]]
    assert await in_thread(left) == [("echo#1", "")], "what the ended one may have started is stopped"


def test_leftovers_are_locked_in_the_order_of_their_ids() -> None:
    """Anyone who ends replicas of several nodes may hold an earlier one: nothing is held while it waits."""
    early, late = sorted((uuid4(), uuid4()))
    for number, pk in enumerate((late, early)):
        hot.replica(hot.node(f"n{number}"), "m", id=pk, state="loading")

    def clear() -> list[NodeModel]:
        try:
            return slots.end_abandoned_loads("m", now=clock.now())
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
