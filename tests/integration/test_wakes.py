"""Which change of a node wakes which waiting operation, and how often a burst of changes leads to a look."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from localai_cluster import clock
from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.management.commands import controller
from nodes.backends import install
from nodes.loading import load
from nodes.models import BackendNode
from nodes.placement.setbacks import after_failure, into_payload
from nodes.reconcilers import wakes
from nodes.registry import services as registry
from operations.executor.waiting import Hints
from operations.ledger import admission, lease, outcome
from operations.models import Operation
from operations.states import Event
from tests.support import hot

pytestmark = pytest.mark.django_db(transaction=True)

ANNA = Actor(ActorKind.USER, "anna")


def waiting(kind: str, element: str, node: BackendNode | None = None, event: Event = Event.WAIT) -> Operation:
    """An operation that looks again in an hour."""
    now = clock.now()
    request = admission.OperationRequest(
        kind,
        key=f"{kind}:{element}:{node}",
        element=element,
        actor="test",
        node=(node.id, node.name) if node else None,
    )
    admission.admit(request, now=now)
    (operation,) = lease.claim("controller", now=now, lease=60, limit=1)
    outcome.put_back(
        operation.id, operation.fence, event, now=now, until=now + timedelta(hours=1), reason="it waits"
    )
    return operation


def is_due(operation: Operation) -> bool:
    return Operation.objects.due(at=clock.now()).filter(pk=operation.pk).exists()


def offline(name: str) -> BackendNode:
    return hot.node(name, offline_at=clock.now(), offline_recovers=True)


def back(node: BackendNode) -> None:
    """The node's worker is there again."""
    BackendNode.objects.filter(pk=node.pk).update(offline_at=None, offline_recovers=False)


def label(node: BackendNode, rack: str) -> None:
    """A change that is told to every controller."""
    registry.merge_labels(node.id, {"rack": rack}, actor=ANNA, now=clock.now())


def test_an_install_waits_for_its_own_node_alone() -> None:
    """Neither another node's change nor its own that does not bring it back ends the wait."""
    mine, other = offline("mine"), hot.node("other")
    operation = waiting(install.KIND, "echo", mine)
    assert wakes.wake([other.id]) == 0
    assert wakes.wake([mine.id]) == 0
    back(mine)
    assert wakes.wake([other.id]) == 0
    assert wakes.wake([other.id, mine.id]) == 1
    assert is_due(operation)


def test_an_install_whose_node_was_removed_is_woken_to_say_so() -> None:
    mine = offline("mine")
    operation = waiting(install.KIND, "echo", mine)
    node_id = mine.id
    mine.delete()
    assert wakes.wake([node_id]) == 1
    assert is_due(operation)


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
    operation = waiting(load.KIND, "echo")
    node = hot.node("one", **fields)
    assert wakes.wake([node.id]) == woken
    assert is_due(operation) == bool(woken)


def test_a_full_node_wakes_no_load_of_that_model_and_more_room_does() -> None:
    """R1.62: the slots of a node are counted for each model."""
    node = hot.node("one")
    hot.replica(node, "echo", state="unloading")
    echo, other = waiting(load.KIND, "echo"), waiting(load.KIND, "other")
    assert wakes.wake([node.id]) == 1
    assert (is_due(echo), is_due(other)) == (False, True)
    BackendNode.objects.update(max_replicas_per_model=2)
    assert wakes.wake([node.id]) == 1
    assert is_due(echo)


def test_a_node_that_rests_after_a_failure_does_not_wake_the_load_that_it_failed() -> None:
    """Or a silent node whose labels change would be asked again and again."""
    node = hot.node("one")
    operation = waiting(load.KIND, "echo")
    known = after_failure({}, node.id, clock.now() + timedelta(seconds=60))
    Operation.objects.update(payload=into_payload({}, known))
    assert wakes.wake([node.id]) == 0
    assert wakes.wake([hot.node("two").id]) == 1
    assert is_due(operation)


def test_a_back_off_is_not_cut_short() -> None:
    node = hot.node("one")
    waiting(install.KIND, "echo", node, Event.POSTPONE)
    waiting(load.KIND, "echo", None, Event.POSTPONE)
    assert wakes.wake([node.id]) == 0
    assert wakes.wake(None) == 0


def test_after_a_gap_in_the_news_everything_is_looked_at() -> None:
    """What came while nobody listened is found in the rows."""
    mine = offline("mine")
    operations = [waiting(install.KIND, "echo", mine), waiting(load.KIND, "echo")]
    assert wakes.wake(None) == 0
    back(mine)
    assert wakes.wake(None) == 2
    assert all(is_due(operation) for operation in operations)


async def test_a_burst_of_changes_is_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many nodes change within a moment, the rows are looked at once, for all of them."""
    looks: list[Any] = []
    monkeypatch.setattr(wakes, "wake", looks.append)
    nodes = [await hot.in_thread(hot.node, f"n{number}") for number in range(3)]
    heard = wakes.Wakes()
    for _ in range(500):
        for node in nodes:
            heard.changed(str(node.id))
    running = asyncio.create_task(heard.run())

    async def looked() -> bool:
        return bool(looks)

    async def looked_again() -> bool:
        return len(looks) > 1

    try:
        assert await clock.wait_until(looked, timeout=20)
        assert looks == [{node.id for node in nodes}]
        heard.changed("")
        assert await clock.wait_until(looked_again, timeout=20)
        assert looks[1:] == [None]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Listener:
    """Counts hints, as an executor or an inventory would hear them."""

    hints = 0

    def hint(self) -> None:
        self.hints += 1


async def test_a_controller_leaves_a_waiting_install_alone_while_labels_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen before: one waiting install tried 4 to 18 times a second while another node's labels changed."""
    mine, other = await hot.in_thread(offline, "mine"), await hot.in_thread(hot.node, "other")
    operation = await hot.in_thread(waiting, install.KIND, "echo", mine)
    woken: list[datetime] = []
    really = lease.wake

    def wake(ids: Any, *, now: datetime) -> int:
        found = really(ids, now=now)
        woken.extend([now] * found)
        return found

    monkeypatch.setattr(lease, "wake", wake)
    executor, lists, heard, listening = Listener(), Listener(), wakes.Wakes(), asyncio.Event()
    hear = heard.changed

    def told(node_id: str) -> None:
        listening.set()
        hear(node_id)

    monkeypatch.setattr(heard, "changed", told)
    tasks = [
        asyncio.create_task(heard.run()),
        asyncio.create_task(controller.listen_for_changes(executor, lists, heard, Listener(), Hints())),  # type: ignore[arg-type]
    ]

    async def due() -> bool:
        return await hot.in_thread(is_due, operation)

    try:
        await asyncio.wait_for(listening.wait(), 20)
        for number in range(30):
            for node in (other, mine):
                await hot.in_thread(label, node, str(number))
        assert woken == []
        await hot.in_thread(back, mine)
        await hot.in_thread(label, mine, "told")
        assert await clock.wait_until(due, timeout=20)
        assert len(woken) == 1
        assert executor.hints <= 2, "once for the connection, once for the wake"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
