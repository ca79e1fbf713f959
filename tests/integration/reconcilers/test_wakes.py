"""Which change of a node wakes which waiting operation, and how often a burst of changes leads to a look."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock
from localai_cluster.management.commands import controller
from nodes.backends.intents import Failed, record_outcomes
from nodes.loading import load_request
from nodes.models import BackendNode
from nodes.placement.choose import Need
from nodes.placement.load_times import add_failure, into_payload
from nodes.reconcilers import intents, wake_ups
from nodes.registry import labels as registry
from operations.executor.work import WakeUps
from operations.ledger import admission, attempts, progress
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.models import Event, Operation
from tests.conftest import until
from tests.support import hot
from tests.support import intents as wished

pytestmark = pytest.mark.django_db(transaction=True)

ANNA = Actor(ActorKind.USER, "anna")


def running(kind: str, element: str, node: BackendNode | None = None) -> Operation:
    """An operation under a lease."""
    now = clock.now()
    request = admission.OperationRequest(
        kind,
        key=f"{kind}:{element}:{node}",
        element=element,
        by=Requester("test"),
        node=(node.id, node.name) if node else None,
    )
    admission.admit(request, now=now)
    (operation,) = attempts.claim("controller", now=now, lease=60, limit=1)
    return operation


def waiting(kind: str, element: str, node: BackendNode | None = None, event: Event = Event.WAIT) -> Operation:
    """An operation that looks again in an hour."""
    operation, now = running(kind, element, node), clock.now()
    attempts.put_back(
        operation.id, operation.fence, event, now=now, until=now + timedelta(hours=1), reason="it waits"
    )
    return operation


def report(operation: Operation, percentage: float) -> None:
    """Some progress of a running operation."""
    attempt = (operation.id, operation.fence)
    assert not progress.record({attempt: [Tick(percentage=percentage)]}, now=clock.now())


def complete(operation: Operation) -> None:
    attempts.finish(operation.id, operation.fence, Event.COMPLETE, now=clock.now())


def is_due(operation: Operation) -> bool:
    return Operation.objects.due(at=clock.now()).filter(pk=operation.pk).exists()


def offline(name: str) -> BackendNode:
    return hot.node(name, offline_at=clock.now(), offline_recovers=True)


def back(node: BackendNode) -> None:
    """The node's worker is there again."""
    BackendNode.objects.filter(pk=node.pk).update(offline_at=None, offline_recovers=False)


def label(node: BackendNode, rack: str) -> None:
    """A change that is told to every controller."""
    registry.edit_labels(node.id, {"rack": rack}, actor=ANNA, now=clock.now())


def said(operation: Operation) -> tuple[bool, str]:
    """Whether the operation's part waits for its node, and what it says."""
    found = wished.part(operation)
    return found.waits_for_node, found.reason


@pytest.mark.parametrize("kind", wished.KINDS)
@pytest.mark.rule("R1.109", "A4")
def test_work_on_a_backend_waits_for_its_own_node_alone(kind: str) -> None:
    """Neither another node's change nor its own that does not bring it back ends the wait."""
    mine, other = offline("mine"), hot.node("other")
    operation = wished.ask(kind, mine)
    for changed in ([other.id], [mine.id]):
        wake_ups.wake_waiting_work(changed)
        assert said(operation)[0]
        assert not wished.claim()
    back(mine)
    wake_ups.wake_waiting_work([other.id])
    assert said(operation)[0]
    wake_ups.wake_waiting_work([other.id, mine.id])
    assert said(operation) == (False, "queued")
    assert [intent.row.operation_id for intent in wished.claim()] == [operation.id]


@pytest.mark.rule("A66")
def test_an_install_whose_node_was_removed_says_so() -> None:
    mine = offline("mine")
    operation = wished.ask(wished.INSTALL, mine)
    mine.delete()
    intents.end_stale_intents(now=clock.now())
    operation.refresh_from_db()
    assert (operation.status, operation.error) == ("failed", "node mine was removed")


@pytest.mark.parametrize(
    ("fields", "woken"),
    [
        ({}, 1),
        ({"approved_at": None}, 0),
        ({"offline_at": clock.now()}, 0),
        ({"drained_at": clock.now()}, 0),
        ({"node_type": "agent"}, 0),
    ],
)
def test_a_load_is_woken_by_a_node_that_could_take_it(fields: dict[str, Any], woken: int) -> None:
    operation = waiting(load_request.KIND, "echo")
    node = hot.node("one", **fields)
    assert wake_ups.wake_waiting_work([node.id]) == woken
    assert is_due(operation) == bool(woken)


def test_a_full_node_wakes_no_load_of_that_model_and_more_room_does() -> None:
    """R1.62: the slots of a node are counted for each model."""
    node = hot.node("one")
    hot.replica(node, "echo", state="unloading")
    echo, other = waiting(load_request.KIND, "echo"), waiting(load_request.KIND, "other")
    assert wake_ups.wake_waiting_work([node.id]) == 1
    assert (is_due(echo), is_due(other)) == (False, True)
    BackendNode.objects.update(max_replicas_per_model=2)
    assert wake_ups.wake_waiting_work([node.id]) == 1
    assert is_due(echo)


@pytest.mark.parametrize(
    ("policy", "available", "disk", "woken"),
    [
        ("require", 4, 9, 0),
        ("require", 8, 9, 1),
        ("prefer", 4, 9, 1),
        ("prefer", 8, 2, 0),
    ],
    ids=["lacks-memory", "has-it", "memory-is-not-required", "lacks-disk"],
)
@pytest.mark.rule("R2.32", "R2.39")
def test_a_load_is_woken_by_a_node_that_has_what_it_needs(
    settings: Settings, policy: str, available: int, disk: int, woken: int
) -> None:
    """What that is stands in its row since its first look."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, vram_policy=policy)
    gib = 2**30
    operation = waiting(load_request.KIND, "echo")
    Operation.objects.update(payload=load_request.payload_with_need({}, Need(vram=8 * gib, disk=3 * gib)))
    node = hot.node("one", available_vram=available * gib, total_disk=9 * gib, available_disk=disk * gib)
    assert wake_ups.wake_waiting_work([node.id]) == woken
    assert is_due(operation) == bool(woken)


def test_a_look_costs_the_same_for_few_and_for_many_loads() -> None:
    """And considers the oldest ones only; all of them look again by themselves."""

    def queries(count: int) -> int:
        for number in range(count):
            waiting(load_request.KIND, f"m{Operation.objects.count()}-{number}")
        with CaptureQueriesContext(connection) as context:
            wake_ups._loads_to_wake([node.id])
        return len(context)

    node = hot.node("one", node_type="agent")
    assert queries(1) == queries(5) <= 7


def test_a_node_that_rests_after_a_failure_does_not_wake_the_load_that_it_failed() -> None:
    """Or a silent node whose labels change would be asked again and again."""
    node = hot.node("one")
    operation = waiting(load_request.KIND, "echo")
    known = add_failure({}, node.id, clock.now() + timedelta(seconds=60))
    Operation.objects.update(payload=into_payload({}, known))
    assert wake_ups.wake_waiting_work([node.id]) == 0
    assert wake_ups.wake_waiting_work([hot.node("two").id]) == 1
    assert is_due(operation)


def test_a_back_off_is_not_cut_short() -> None:
    node = hot.node("one")
    wished.ask(wished.INSTALL, node)
    (intent,) = wished.claim()
    failed = {(intent.id, intent.fence): (Failed("worker gone"), ())}
    assert not record_outcomes(failed, now=clock.now())
    waiting(load_request.KIND, "echo", None, Event.POSTPONE)
    for changed in ([node.id], None):
        assert wake_ups.wake_waiting_work(changed) == 0
        assert not wished.claim()


def test_after_a_gap_in_the_news_everything_is_looked_at() -> None:
    """What came while no one listened is found in the rows."""
    mine = offline("mine")
    operation, load_of_it = wished.ask(wished.INSTALL, mine), waiting(load_request.KIND, "echo")
    assert wake_ups.wake_waiting_work(None) == 0
    assert said(operation)[0]
    back(mine)
    assert wake_ups.wake_waiting_work(None) == 1
    assert is_due(load_of_it)
    assert said(operation) == (False, "queued")


async def test_a_burst_of_changes_is_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many nodes change within a moment, the rows are looked at once, for all of them."""
    looks: list[Any] = []
    monkeypatch.setattr(wake_ups, "wake_waiting_work", looks.append)
    nodes = [await hot.in_thread(hot.node, f"n{number}") for number in range(3)]
    told: list[int] = []

    async def then() -> None:
        told.append(len(looks))

    heard = wake_ups.NodeWakeUps(then)
    for _ in range(500):
        for node in nodes:
            heard.changed(str(node.id))
    running = asyncio.create_task(heard.run())

    try:
        await until(lambda: bool(looks))
        assert looks == [{node.id for node in nodes}]
        heard.changed("")
        await until(lambda: len(looks) > 1)
        assert looks[1:] == [None]
        await until(lambda: told == [1, 2], what="the queue hears of it after each look")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Listener:
    """Counts hints, as an executor or an inventory would hear them."""

    hints = 0

    def wake(self, *, cancelled: bool = False) -> None:
        self.hints += 1


def counted_wakes(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    """When operations are woken from now on, once for each."""
    woken: list[datetime] = []
    really = attempts.wake

    def wake(ids: Any, *, now: datetime) -> int:
        found = really(ids, now=now)
        woken.extend([now] * found)
        return found

    monkeypatch.setattr(attempts, "wake", wake)
    return woken


async def no_intent_waits() -> None:
    """What follows a look at the changed nodes."""


@asynccontextmanager
async def listening_controller(executor: Listener, heard: wake_ups.NodeWakeUps) -> AsyncIterator[None]:
    """The part of a controller that hears the database, connected; `heard` runs too."""
    parts = Mock(executors={"operations": executor}, wakes=heard, wake_ups=WakeUps())
    tasks = [
        asyncio.create_task(heard.run()),
        asyncio.create_task(controller.listen_for_changes(parts)),
    ]

    try:
        await until(lambda: executor.hints > 0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_controller_leaves_a_waiting_load_alone_while_labels_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen before: one waiting operation tried 4 to 18 times a second while another node's labels changed."""
    mine, other = await hot.in_thread(offline, "mine"), await hot.in_thread(offline, "other")
    operation = await hot.in_thread(waiting, load_request.KIND, "echo")
    woken = counted_wakes(monkeypatch)
    executor, heard = Listener(), wake_ups.NodeWakeUps(no_intent_waits)

    async def due() -> bool:
        # What counts the wake comes after its commit.
        return bool(woken) and await hot.in_thread(is_due, operation)

    async with listening_controller(executor, heard):
        for number in range(30):
            for node in (other, mine):
                await hot.in_thread(label, node, str(number))
        assert woken == []
        await hot.in_thread(back, mine)
        await hot.in_thread(label, mine, "told")
        await until(due)
        assert len(woken) == 1
        assert executor.hints <= 2, "once for the connection, once for the wake"


async def test_progress_wakes_no_executor() -> None:
    """Each report of each operation made every controller claim twice: half a processor for two hundred."""
    operation = await hot.in_thread(running, load_request.KIND, "echo")
    executor, heard = Listener(), wake_ups.NodeWakeUps(no_intent_waits)
    async with listening_controller(executor, heard):
        for number in range(30):
            await hot.in_thread(report, operation, number)
        await hot.in_thread(complete, operation)

        await until(lambda: executor.hints > 1)
        assert executor.hints == 2, "once for the connection, once for the end"
