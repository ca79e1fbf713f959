"""Stops of replicas that go, until their workers confirm: who sends them, how often, what they may remove."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging import messages as m
from nodes.models import NodeModel
from nodes.replicas import stops as engine_stops
from nodes.replicas.stops import Stopper
from operations.executor.work import in_thread
from tests.conftest import until
from tests.integration.replicas.test_going import TERMINATED, bus_of, stops
from tests.support import hot, races
from tests.support.bus import NEVER, PlayedBus

pytestmark = pytest.mark.django_db(transaction=True)

DUE: dict[str, Any] = {
    "phase": "stopping",
    "reason": "replaced",
    "next_stop_at": hot.EPOCH,
}


@pytest.mark.rule("R2.84", "C46", "T-REV-10")
@pytest.mark.parametrize(("attempts", "pause"), [(1, 2), (2, 4), (3, 8), (8, 256), (9, 300), (99, 300)])
def test_it_is_tried_again_later_and_later(attempts: int, pause: int) -> None:
    row = hot.replica(hot.node(), stop_attempts=attempts, **DUE)
    now = clock.now()
    engine_stops.record_failure(row, "x" * 999, now=now)
    row.refresh_from_db()
    assert row.next_stop_at == now + timedelta(seconds=pause)
    assert row.stop_error == "x" * 240


@pytest.mark.rule("R2.84", "R1.99", "T-REV-10", "T-REV-12", "T-REG-100", "T-REV-7")
@pytest.mark.parametrize(
    ("reply", "said"),
    [(None, "is not responding"), (m.StopModelReply(matched=True, error="cannot be killed"), "be killed")],
    ids=["not there", "refused"],
)
async def test_what_was_not_confirmed_is_counted_said_and_due_again(reply: Any, said: str) -> None:
    node = await in_thread(hot.node)
    row = await in_thread(lambda: hot.replica(node, stop_attempts=2, **DUE))
    bus = PlayedBus() if reply is None else bus_of(node, reply)
    assert await Stopper(bus).run_pass() == 1
    await in_thread(row.refresh_from_db)
    assert (row.state, row.stop_attempts) == ("unloading", 3)
    assert said in row.stop_error
    assert await Stopper(bus).run_pass() == 0
    assert row.next_stop_at is not None
    later = row.next_stop_at
    assert [one.id for one in await in_thread(lambda: engine_stops.claim_due(1, now=later))] == [row.id]


@pytest.mark.rule("R1.99", "T-REV-12", "T-REG-101")
@pytest.mark.parametrize(
    "reply", [TERMINATED, m.StopModelReply(matched=True, error="no")], ids=["done", "no"]
)
@pytest.mark.parametrize("taken", [True, False], ids=["place taken", "gone"])
async def test_a_late_reply_removes_no_other_row(reply: m.StopModelReply, taken: bool) -> None:
    node = await in_thread(hot.node)
    row = await in_thread(lambda: hot.replica(node, stop_attempts=1, **DUE))

    def replaced() -> list[Any]:
        row.delete()
        return [hot.replica(node, address=row.address).pk] if taken else []

    left: list[Any] = []

    async def answers() -> m.StopModelReply:
        left.extend(await in_thread(replaced))
        return reply

    assert await Stopper(bus_of(node, [answers, reply])).run_pass() == 1
    found = await in_thread(lambda: list(NodeModel.objects.values_list("pk", "state", "stop_error")))
    assert found == [(pk, "loaded", "") for pk in left]


@pytest.mark.rule("R1.99", "T-REV-13")
async def test_of_two_controllers_one_sends_the_stop() -> None:
    node = await in_thread(hot.node)
    await in_thread(lambda: hot.replica(node, stop_attempts=1, **DUE))
    bus = bus_of(node)
    looks = await asyncio.gather(*(Stopper(bus).run_pass() for _ in range(2)))
    assert sorted(looks) == [0, 1]
    assert len(stops(bus, node)) == 1
    assert not await in_thread(NodeModel.objects.exists)


@pytest.mark.rule("R1.99", "C46", "T-REV-14")
def test_a_stop_under_way_is_nobody_elses_for_a_minute() -> None:
    """Then its controller has died."""
    hot.replica(hot.node(), stop_attempts=1, **DUE)
    now = clock.now()
    ages = {0: 1, 31: 0, 59: 0, 60: 1}
    assert {age: len(engine_stops.claim_due(9, now=now + timedelta(seconds=age))) for age in ages} == ages


@pytest.mark.rule("C46")
async def test_a_worker_that_hangs_delays_no_stop_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load on the other node may wait for the memory of the engine that is stopped there."""
    monkeypatch.setattr(engine_stops, "_GATHER_SECONDS", 0.0)
    frozen, well = await in_thread(lambda: [hot.node("frozen"), hot.node("well")])
    bus = bus_of(well)
    bus.replies[m.subject("model.stop", str(frozen.id))] = NEVER
    stopper = Stopper(bus)
    running = asyncio.create_task(stopper.run())

    async def is_stopped() -> bool:
        return not await in_thread(NodeModel.objects.filter(node=well).exists)

    try:
        await in_thread(lambda: hot.replica(frozen, **DUE))
        stopper.wake()
        await until(lambda: bool(stops(bus, frozen)))
        await in_thread(lambda: hot.replica(well, **DUE))
        stopper.wake()
        await until(is_stopped)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(stops(bus, frozen)) == 1
    assert await in_thread(NodeModel.objects.filter(node=frozen).exists)


@pytest.mark.rule("R1.99")
def test_first_stops_come_before_repeated_ones() -> None:
    """However many engines of a worker that hangs are due again."""
    node = hot.node()
    for number in range(3):
        hot.replica(node, index=number, id=UUID(int=number + 1), stop_attempts=4, **DUE)
    first = hot.replica(node, index=3, id=UUID(int=9), **DUE)
    claimed = engine_stops.claim_due(2, now=clock.now())
    assert first.pk in {engine.id for engine in claimed}


@pytest.mark.rule("R1.99", "C46")
def test_one_node_never_takes_all_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker may hang, and each of its stops then takes until the time limit."""
    monkeypatch.setattr(engine_stops, "AT_ONCE_ON_NODE", 2)
    frozen, well, now = hot.node("frozen"), hot.node("well"), clock.now()
    for number in range(6):
        hot.replica(frozen, index=number, id=UUID(int=number + 1), **DUE)
    later = hot.replica(well, id=UUID(int=99), **DUE)
    claimed = engine_stops.claim_due(4, now=now)
    assert [engine.pk for engine in claimed] == [UUID(int=1), UUID(int=2), later.pk]
    assert engine_stops.claim_due(4, now=now) == []
    engine_stops.record_failure(claimed[0], "it hangs", now=now)
    assert [engine.pk for engine in engine_stops.claim_due(4, now=now)] == [UUID(int=3)]


END_BLOCKED_SESSIONS = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND datname = current_database()"""


@pytest.mark.rule("R1.99", "T-REV-12")
async def test_a_pass_that_loses_the_database_is_run_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The task lasts as long as the controller: an outage must neither end it nor leave the engine there."""
    monkeypatch.setattr(engine_stops, "_GATHER_SECONDS", 0.0)
    node = await in_thread(hot.node)
    await in_thread(lambda: hot.replica(node, stop_attempts=1, **DUE))
    bus = bus_of(node)

    def begin_and_lose_session() -> "asyncio.Future[None]":
        with races.holding("LOCK TABLE node_models") as session:
            running = asyncio.run_coroutine_threadsafe(Stopper(bus).run(), loop)
            races.waiting()
            ended = session.execute(END_BLOCKED_SESSIONS).fetchone()
        assert ended == (1,)
        return asyncio.wrap_future(running, loop=loop)

    async def is_stopped() -> bool:
        return running.done() or not await in_thread(NodeModel.objects.exists)

    loop = asyncio.get_running_loop()
    running = await asyncio.to_thread(begin_and_lose_session)
    await until(is_stopped)
    assert not running.done(), running
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert len(stops(bus, node)) == 1
    assert [record.getMessage() for record in caplog.records if "; retrying" in record.getMessage()]
