"""What is installed on each node: rows of the workers' own lists, their age, and who asks when.

The bus is played by the test, the database is real.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NoResponders, NotConnected
from localai_cluster.messaging.messages import encode
from nodes.backends import inventory, upgrade_state
from nodes.backends.intent_queue import IntentQueue
from nodes.backends.intents import MAX_ATTEMPTS
from nodes.loading.load_request import load_on_other_node
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from nodes.registry import change, lifecycle
from operations.changes import events
from tests.conftest import until
from tests.support import api, hot
from tests.support import intents as wished
from tests.support.effort import EFFORT

pytestmark = pytest.mark.django_db(transaction=True)

ECHO = m.InstalledBackend(name="echo", version="1.0.0", installed_at="2026-08-20T09:12:44Z", uri="/srv/echo")
MINILM = m.InstalledBackend(name="minilm")


class Closed:
    """A subscription that nothing arrives on."""

    async def close(self) -> None:
        """Nothing to end."""


class Bus:
    """Workers by subject: bytes to answer, or an error to raise; `gate` holds all answers back."""

    connected, generation, connected_since = True, 1, -math.inf

    def __init__(self) -> None:
        self.replies: dict[str, Any] = {}
        self.asked: list[str] = []
        self.most, self._now = 0, 0
        self.gate = asyncio.Event()
        self.gate.set()

    def lists(self, node: BackendNode, *backends: m.InstalledBackend, error: str = "") -> None:
        self.replies[messages.subject("backend.list", str(node.id))] = encode(
            m.ListReply(backends, error=error)
        )

    async def wait_connected(self, *, after: int = 0) -> int:
        return self.generation

    async def publish(self, subject: str, payload: bytes) -> None:
        """No one takes it amiss."""

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        self.asked.append(subject)
        reply = self.replies.get(subject, NoResponders(subject))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await self.gate.wait()
        finally:
            self._now -= 1
        if isinstance(reply, Exception):
            raise reply
        found: bytes = reply
        return found

    async def subscribe(self, subject: str, handler: Any, *, limit: int = 64) -> Closed:
        return Closed()

    async def close(self) -> None:
        """Nothing to end."""


def question(node: BackendNode) -> BackendNode:
    return api.node(node.id)


def listed(node: BackendNode) -> list[str]:
    return sorted(NodeBackend.objects.filter(node=node).values_list("name", flat=True))


def on_another_connection(function: Callable[[], Any]) -> Any:
    """The result of another connection."""
    return asyncio.run(hot.in_thread(function))


def told(channel: str, action: Callable[[], Any]) -> list[str]:
    """What was notified by the time the action had committed."""
    with psycopg.connect(events.conninfo(), autocommit=True) as link:
        link.execute(f"LISTEN {channel}")
        action()
        link.execute(f"NOTIFY {channel}, 'that is all'")
        return list(takewhile(lambda text: text != "that is all", (n.payload for n in link.notifies())))


def due(node: BackendNode, seconds: float | None, **columns: Any) -> None:
    """Due in so many seconds, None = as soon as somebody looks."""
    at = None if seconds is None else clock.now() + timedelta(seconds=seconds)
    BackendNode.objects.filter(pk=node.pk).update(inventory_due_at=at, **columns)


def wait_of(node: BackendNode, now: datetime | None = None) -> float:
    """In how many seconds from `now` it is due."""
    at = api.node(node.id).inventory_due_at
    assert at is not None
    return float((at - (now or clock.now())).total_seconds())


def marked_unhealthy(node: BackendNode) -> None:
    """It did not answer a command; its heartbeats still arrive."""
    now = clock.now()
    BackendNode.objects.filter(pk=node.pk).update(unhealthy_at=now, last_heartbeat=now)


def keep(node: BackendNode, *backends: m.InstalledBackend, at: datetime | None = None) -> bool:
    return bool(inventory.store([inventory.InventoryReply(question(node), backends, at or clock.now())]))


@asynccontextmanager
async def asking(bus: Bus) -> AsyncIterator[inventory.Inventory]:
    """The controller's loop."""
    lists = inventory.Inventory(bus)
    task = asyncio.create_task(lists.run())
    try:
        yield lists
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(bus: Bus, node: BackendNode) -> bool:
    return await inventory.request_list(bus, await hot.in_thread(question, node))


@pytest.mark.rule("http-2.10", "nats-4.7")
async def test_the_rows_become_what_the_worker_lists() -> None:
    """Added, changed and removed; every column is kept; the next question is due after five minutes."""
    bus, node = Bus(), await hot.in_thread(hot.node)
    for backends in ((ECHO,), (ECHO, MINILM), (m.InstalledBackend(name="echo", version="2"),), ()):
        bus.lists(node, *backends)
        before = clock.now()
        assert await ask(bus, node)
        rows = await hot.in_thread(lambda: list(NodeBackend.objects.values(*inventory.COLUMNS)))
        assert [m.InstalledBackend(**row) for row in rows] == list(backends)
        kept = await hot.in_thread(api.node, node.id)
        assert before <= kept.inventory_at <= clock.now()
        assert kept.inventory_due_at == kept.inventory_at + timedelta(seconds=inventory.REFRESH_INTERVAL)
        assert (kept.inventory_error, kept.revision, kept.updated_at) == ("", 0, node.updated_at)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (NoResponders("x"), "is not responding"),
        (NotConnected("x"), "message bus is not connected"),
        (b"{", "cannot be read"),
        (b'{"backends": "x"}', "cannot be read: backends: expected a list"),
        (b'{"backends": [5]}', "cannot be read"),
        (b'{"error": "disk \\u0000 gone"}', "cannot read its backends: disk   gone"),
    ],
)
@pytest.mark.rule("R6.31", "nats-6.1")
async def test_without_an_answer_the_rows_stay_and_the_reason_is_kept(reply: Any, says: str) -> None:
    """A list that could not be had is unknown, not empty."""
    bus, node = Bus(), await hot.in_thread(hot.node)
    await hot.in_thread(keep, node, ECHO)
    before = await hot.in_thread(api.node, node.id)
    bus.replies[messages.subject("backend.list", str(node.id))] = reply
    assert not await ask(bus, node)
    after = await hot.in_thread(api.node, node.id)
    assert says in after.inventory_error
    assert after.inventory_at == before.inventory_at
    assert after.inventory_due_at < clock.now() + timedelta(seconds=10)
    assert await hot.in_thread(listed, node) == ["echo"]
    bus.lists(node, ECHO)
    assert await ask(bus, node)
    assert (await hot.in_thread(api.node, node.id)).inventory_error == ""


@given(
    st.lists(
        st.builds(
            m.InstalledBackend, name=st.sampled_from(["", " ", "\x00", "a", "A"]) | st.text(), uri=st.text()
        )
    )
)
@settings(max_examples=25 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_list_can_be_kept(backends: list[m.InstalledBackend]) -> None:
    """Null bytes, doubles and nameless entries; keeping the same twice changes nothing."""
    node = BackendNode.objects.first() or hot.node()
    assert keep(node, *backends)
    rows = list(NodeBackend.objects.values_list("pk", "name"))
    assert {name for _, name in rows} == {
        b.name.replace("\x00", "\ufffd")[:255] for b in backends if b.name.strip()
    }
    assert keep(node, *backends)
    assert list(NodeBackend.objects.values_list("pk", "name")) == rows


def test_a_list_is_bounded() -> None:
    """Entries and texts."""
    node = hot.node()
    long = m.InstalledBackend(
        name="n" * 300,
        version="v" * 300,
        uri="u" * 3000,
        digest="d" * 300,
        gallery_url="g" * 3000,
        installed_at="i" * 99,
    )
    odd = [m.InstalledBackend(name=f"b{i}", size=(-1, 2**70)[i % 2]) for i in range(inventory.MAX_BACKENDS)]
    assert keep(node, long, *odd)
    assert NodeBackend.objects.count() == inventory.MAX_BACKENDS
    row = NodeBackend.objects.get(name="n" * 255)
    assert [len(v) for v in (row.version, row.uri, row.digest, row.gallery_url, row.installed_at)] == [
        255,
        2048,
        255,
        2048,
        64,
    ]
    assert set(NodeBackend.objects.values_list("size", flat=True)) == {0, 2**63 - 1}


def test_a_late_answer_does_not_overwrite_a_newer_one() -> None:
    """`inventory_at` is when the question left; a late failure says nothing either."""
    node, now = hot.node(), clock.now()
    assert keep(node, MINILM, at=now)
    assert not keep(node, ECHO, at=now - timedelta(seconds=1))
    late = now - timedelta(seconds=1)
    assert not inventory.store_error(question(node), "gone", asked_at=late, pause=1)
    assert (listed(node), api.node(node.id).inventory_error) == (["minilm"], "")
    asked = question(node)
    lifecycle.deregister(node.id, actor=actors.task("test"), now=now)
    assert not inventory.store([inventory.InventoryReply(asked, [ECHO], clock.now())])
    assert not NodeBackend.objects.exists()


async def test_a_list_that_is_not_kept_is_no_list_and_the_node_is_asked_again() -> None:
    """An upgrade that compares its build with an older list would end as one that changed nothing."""
    bus, node = Bus(), await hot.in_thread(hot.node)
    bus.lists(node, ECHO)
    bus.gate.clear()
    refresh = asyncio.create_task(inventory.refresh(bus, await hot.in_thread(question, node)))
    await until(lambda: bool(bus.asked))
    await hot.in_thread(keep, node, MINILM)
    bus.gate.set()
    assert not await refresh
    assert await hot.in_thread(listed, node) == ["minilm"]
    assert await hot.in_thread(wait_of, node) <= 0


def test_a_list_from_the_future_does_not_hold_back_those_of_the_present() -> None:
    """The clock of another controller is ahead, or this one's was set back."""
    node = hot.node()
    assert keep(node, MINILM, at=clock.now() + timedelta(minutes=5))
    assert keep(node, ECHO)
    assert listed(node) == ["echo"]


def test_many_lists_are_kept_at_the_cost_of_one() -> None:
    upgrade_state.request_check()  # the first one makes the row
    counts = []
    for total in (1, 50):
        nodes = [hot.node(f"{total}-{number}") for number in range(total)]
        for backends in ([MINILM], [ECHO]):
            now = clock.now()
            answers = [inventory.InventoryReply(question(node), backends, now) for node in nodes]
            with CaptureQueriesContext(connection) as queries:
                assert inventory.store(answers) == {node.id for node in nodes}
            counts.append(len(queries))
        assert {tuple(listed(node)) for node in nodes} == {("echo",)}
    assert counts[:2] == counts[2:]


def test_of_two_answers_of_one_node_the_later_question_counts() -> None:
    node, now = hot.node(), clock.now()
    asked = question(node)
    late = inventory.InventoryReply(asked, [ECHO], now)
    assert inventory.store([late, inventory.InventoryReply(asked, [MINILM], now - timedelta(seconds=1))]) == {
        node.id
    }
    assert listed(node) == ["echo"]


def test_a_due_time_set_during_the_question_counts() -> None:
    """A worker that registered meanwhile is asked again."""
    node = hot.node()
    due(node, 60)
    asked = question(node)
    due(node, 1)
    assert inventory.store([inventory.InventoryReply(asked, [ECHO], clock.now())])
    assert wait_of(node) < 2
    assert keep(node, ECHO)
    assert wait_of(node) > inventory.REFRESH_INTERVAL - 60


def test_news_are_told_only_if_there_are_any() -> None:
    """The nodes' channel hears of a first list, a changed one, a new error and its end."""
    node = hot.node()
    steps: list[tuple[Callable[[], Any], int]] = [
        (lambda: keep(node), 1),
        (lambda: keep(node), 0),
        (lambda: keep(node, ECHO), 1),
        (lambda: keep(node, ECHO), 0),
        (lambda: inventory.store_error(question(node), "gone", asked_at=clock.now(), pause=1), 1),
        (lambda: inventory.store_error(question(node), "gone", asked_at=clock.now(), pause=1), 0),
        (lambda: keep(node, ECHO), 1),
    ]
    assert [len(told(events.NODES, action)) for action, _ in steps] == [count for _, count in steps]


def test_a_node_is_claimed_once_and_only_if_it_can_be_asked() -> None:
    """Pending, offline and agent nodes never; draining and unhealthy ones, too; those held are skipped."""
    now = clock.now()
    asked = [
        hot.node("well"),
        hot.node("drained", drained_at=now),
        hot.node("unwell", unhealthy_at=now),
        hot.node("held"),
    ]
    hot.node("pending", approved_at=None)
    hot.node("gone", offline_at=now)
    hot.node("agent", node_type="agent")
    hot.node("later", inventory_due_at=now + timedelta(seconds=9))
    with transaction.atomic():
        change.lock_node(asked[3].id)
        found = on_another_connection(lambda: inventory.claim(9, now=now))
    assert {one.name for one in found} == {"well", "drained", "unwell"}
    assert inventory.next_due(now=now) == 0, "one that was never asked is due"
    assert [one.name for one in inventory.claim(9, now=now)] == ["held"]
    assert inventory.claim(9, now=now) == []
    assert inventory.next_due(now=now) == pytest.approx(9)
    assert len(inventory.claim(9, now=now + timedelta(seconds=120))) == 5


def test_who_waits_longest_is_asked_first() -> None:
    """And no more than fit."""
    for number in range(4):
        due(hot.node(f"n{number}"), -number)
    assert [one.name for one in inventory.claim(2, now=clock.now())] == ["n3", "n2"]


async def test_the_loop_asks_sixteen_at_once_and_all_in_the_end() -> None:
    """Forty nodes whose workers take their time."""
    bus = Bus()
    bus.gate.clear()
    nodes = [await hot.in_thread(hot.node, f"n{number}") for number in range(40)]
    for node in nodes:
        bus.lists(node, ECHO)
    async with asking(bus):
        await hot.until(lambda: len(bus.asked) == inventory.PARALLEL)
        bus.gate.set()
        await hot.until(lambda: NodeBackend.objects.count() == 40)
    assert (bus.most, len(bus.asked)) == (inventory.PARALLEL, 40)


async def test_a_node_that_does_not_answer_is_asked_ever_less_often() -> None:
    """5, 10, 20 … 900 seconds; a new process or an answer begins again. The others are not kept waiting."""
    bus = Bus()
    mute, other = await hot.in_thread(hot.node, "mute"), await hot.in_thread(hot.node, "other")
    bus.lists(other, ECHO)
    lists, waits = inventory.Inventory(bus), []
    for number in range(10):
        before = clock.now()
        await lists.run_item(await hot.in_thread(question, mute))
        latest, earliest = await hot.in_thread(wait_of, mute, before), await hot.in_thread(wait_of, mute)
        waits.append((earliest, latest))
        if number == 8:
            await hot.in_thread(due, mute, 0)
            await hot.in_thread(lambda: BackendNode.objects.filter(pk=mute.pk).update(instance="f" * 32))
    for pause, (earliest, latest) in zip([5, 10, 20, 40, 80, 160, 320, 640, 900, 5], waits, strict=True):
        assert earliest <= pause <= latest
    async with asking(bus) as running:
        running.wake()
        await hot.until(lambda: listed(other) == ["echo"])


async def test_no_one_is_asked_while_the_bus_is_down() -> None:
    """No worker is blamed for it; the loop goes on when it is back."""
    bus, node = Bus(), await hot.in_thread(hot.node)
    bus.connected = False
    bus.lists(node, ECHO)
    async with asking(bus) as lists:
        lists.wake()
        with pytest.raises(AssertionError):
            await until(lambda: bus.asked, seconds=0.1)
        bus.connected = True
        await hot.until(lambda: listed(node) == ["echo"])


def test_a_page_makes_old_lists_due_and_wakes_a_controller() -> None:
    """Fresh lists and nodes that are due soon anyway are left alone; mute ones become due soon."""
    now = clock.now()
    old = now - timedelta(seconds=90)
    stale, fresh = hot.node("stale", inventory_at=old), hot.node("fresh", inventory_at=now)
    mute, asked = hot.node("mute", inventory_error="gone"), hot.node("asked", inventory_at=old)
    for node in (stale, fresh):
        due(node, 200)
    due(mute, 900)
    due(asked, 20)
    assert told(inventory.CHANNEL, lambda: inventory.wake(older_than=60, now=now)) == [""]
    waits = [wait_of(node, now) for node in (stale, fresh, mute, asked)]
    assert waits == pytest.approx([0, 200, 35, 20], abs=5)
    assert told(inventory.CHANNEL, lambda: inventory.wake(older_than=60, now=now)) == []
    due(stale, 200)
    assert inventory.wake([fresh.id], older_than=60, now=now) == 0
    assert inventory.wake([stale.id], older_than=60, now=now) == 1


def test_a_worker_that_comes_back_is_due() -> None:
    """Three seconds after it has registered, when it listens; a silent one with its next beat."""
    node = api.make_node()
    assert 2 < wait_of(node) <= 3
    due(node, 200)
    api.make_node(secret=api.secret_of("w1"))
    assert 2 < wait_of(node) <= 3
    api.mark(node, "silent")
    assert api.node(node.id).inventory_due_at is None


class Stage:
    """A claimed installation on a node whose worker lists two backends afterwards."""

    def __init__(self) -> None:
        self.bus, self.node = Bus(), hot.node()
        self.bus.lists(self.node, ECHO, MINILM)
        self.bus.replies[messages.subject("backend.install", str(self.node.id))] = encode(
            m.InstallReply(success=True)
        )
        self.operation = wished.ask(wished.INSTALL, self.node)
        (self.intent,) = wished.claim()

    async def ends(self) -> str:
        """Carries it out; how its operation ended."""
        await IntentQueue(self.bus, load_on_other_node).execute(self.intent)
        await hot.in_thread(self.operation.refresh_from_db)
        return self.operation.status


async def test_an_installation_ends_with_the_list_up_to_date() -> None:
    """Who hears of its end finds the backend in the node's rows."""
    stage = await hot.in_thread(Stage)
    assert await stage.ends() == "completed"
    assert await hot.in_thread(listed, stage.node) == ["echo", "minilm"]


async def test_an_installation_does_not_fail_for_the_lists_sake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not say what it has is asked again at once; no one waits for it long."""
    stage = await hot.in_thread(Stage)
    monkeypatch.setattr(inventory, "SHORT_LIMIT", 0.05)
    subject = messages.subject("backend.list", str(stage.node.id))
    await hot.in_thread(due, stage.node, 200)
    stage.bus.replies[subject] = encode(m.ListReply(error="disk"))
    assert await stage.ends() == "completed"
    assert await hot.in_thread(wait_of, stage.node) <= 0
    await hot.in_thread(due, stage.node, 200)
    stage.bus.gate.clear()
    notes = await asyncio.to_thread(
        told, inventory.CHANNEL, lambda: asyncio.run(inventory.refresh(stage.bus, stage.node))
    )
    assert notes == [""]
    assert await hot.in_thread(wait_of, stage.node) <= 0


@pytest.mark.rule("A7", "A8", "R4.30", "O76", "H7")
async def test_each_failed_contact_with_a_deaf_node_counts_as_an_attempt_until_the_last() -> None:
    """Review R1: its worker sends heartbeats, so the node stays unhealthy and no command is ever sent."""
    node = await hot.in_thread(lambda: hot.node("deaf"))
    operation = await hot.in_thread(lambda: wished.ask(wished.INSTALL, node))
    await hot.in_thread(lambda: marked_unhealthy(node))
    bus = Bus()

    async def contact() -> None:
        assert not await inventory.request_list(bus, await hot.in_thread(lambda: question(node)))
        await hot.in_thread(operation.refresh_from_db)

    for attempt in range(1, MAX_ATTEMPTS):
        await contact()
        part = await hot.in_thread(lambda: wished.part(operation))
        assert (part.attempts, part.waits_for_node, part.next_check_at) == (attempt, True, None)
        await contact()
        row = await hot.in_thread(PendingBackendOp.objects.get)
        assert (row.attempts, operation.status) == (attempt, "waiting_for_nodes"), "the pause is not over"
        await hot.in_thread(wished.due_now)
    await contact()
    assert (operation.status, operation.attempts) == ("failed", MAX_ATTEMPTS)
    assert operation.error == "given up after 10 attempts: node deaf is not responding"
    assert not await hot.in_thread(PendingBackendOp.objects.exists)


@pytest.mark.rule("A5", "R1.113")
@pytest.mark.parametrize("case", ["healthy", "our connection is new", "no connection"])
async def test_a_question_that_proves_nothing_of_the_worker_counts_no_attempt(case: str) -> None:
    """Review R1: a healthy node is tried by its command; our own connection says nothing of it."""
    node = await hot.in_thread(lambda: hot.node("one"))
    await hot.in_thread(lambda: wished.ask(wished.INSTALL, node))
    bus = Bus()
    if case != "healthy":
        await hot.in_thread(lambda: marked_unhealthy(node))
    if case == "our connection is new":
        bus.connected_since = clock.monotonic()
    if case == "no connection":
        bus.replies[messages.subject("backend.list", str(node.id))] = NotConnected("lost")
    assert not await inventory.request_list(bus, await hot.in_thread(lambda: question(node)))
    assert (await hot.in_thread(PendingBackendOp.objects.get)).attempts == 0
