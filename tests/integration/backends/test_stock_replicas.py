"""Replica rows of stock workers: their registrations do not say what runs there, so a controller asks.

The bus is played by the test, the database is real.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NoResponders
from nodes.backends import inventory
from nodes.models import BackendNode, NodeModel
from nodes.replicas import engines, hooks
from nodes.replicas.hooks import RemovedReplica
from tests.support import api, hot
from tests.support.bus import PlayedBus

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("nats-9.3")]

HOST = "127.0.0.1"
EARLIER = timedelta(minutes=5)


@pytest.fixture(autouse=True)
def stock_admitted(settings: Any) -> None:
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)


def stock_node() -> BackendNode:
    """A stock worker with two replicas, loaded some minutes ago."""
    node = api.make_node(secret="")
    for index in (0, 1):
        hot.replica(node, index=index, updated_at=clock.now() - EARLIER)
    return node


def running(*engines: tuple[str, int, str]) -> m.RunningReply:
    return m.RunningReply(tuple(m.RunningModel(*one) for one in engines))


def rows(node: BackendNode) -> list[str]:
    return sorted(str(row) for row in NodeModel.objects.filter(node=node))


async def ask(node: BackendNode, reply: Any) -> PlayedBus:
    """The question for its backends, which the worker answers, and what follows from it."""
    bus = PlayedBus()
    bus.replies[messages.subject("backend.list", str(node.id))] = m.ListReply()
    bus.replies[messages.subject("models.running", str(node.id))] = reply
    assert await inventory.request_list(bus, node)
    return bus


async def test_what_a_stock_worker_still_runs_survives_its_registration() -> None:
    """The registration keeps all rows, for its engines may run on; the next question finds the truth."""
    node = await hot.in_thread(stock_node)
    await hot.in_thread(lambda: api.make_node(secret=""))
    assert await hot.in_thread(rows, node) == ["echo#0", "echo#1"]
    await ask(node, running(("echo", 1, f"{HOST}:50001")))
    assert await hot.in_thread(rows, node) == ["echo#1"]


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        ([("echo", 0, "10.9.9.9:50000"), ("echo", 1, "")], ["echo#0", "echo#1"]),
        ([("echo", 0, f"{HOST}:50001"), ("echo", 1, f"{HOST}:50000")], []),
        ([("other", 0, f"{HOST}:50000"), ("echo", 10, f"{HOST}:50001")], []),
        ([], []),
    ],
    ids=["its own view of its host, or no address", "other ports", "other engines", "nothing"],
)
@pytest.mark.rule("nats-4.8")
async def test_an_engine_is_known_by_its_key_and_port(
    listed: list[tuple[str, int, str]], left: list[str]
) -> None:
    node = await hot.in_thread(stock_node)
    await ask(node, running(*listed))
    assert await hot.in_thread(rows, node) == left


@pytest.mark.parametrize(
    "reply", [NoResponders("old"), b"{", m.RunningReply(error="busy")], ids=["unknown", "unreadable", "error"]
)
@pytest.mark.rule("nats-4.8", "nats-6.1")
async def test_a_worker_that_cannot_say_what_runs_keeps_its_rows(reply: Any) -> None:
    node = await hot.in_thread(stock_node)
    await ask(node, reply)
    assert await hot.in_thread(rows, node) == ["echo#0", "echo#1"]


async def test_a_replica_that_a_slower_clock_has_published_later_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clocks of two controllers differ: it was published while the worker answered."""
    node = await hot.in_thread(stock_node)
    asked_at = clock.now()
    earlier = asked_at - timedelta(seconds=0.5)
    await hot.in_thread(lambda: hot.replica(node, index=2, updated_at=earlier))
    monkeypatch.setattr(clock, "now", lambda: asked_at)
    await ask(node, running(("echo", 1, f"{HOST}:50001")))
    assert await hot.in_thread(rows, node) == ["echo#1", "echo#2"]


async def test_only_stock_workers_are_asked() -> None:
    """Ours list their engines when they register."""
    node = await hot.in_thread(api.make_node)
    bus = await ask(node, running())
    assert list(bus.asked) == [messages.subject("backend.list", str(node.id))]


def test_a_replica_of_later_than_the_question_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was published while the worker answered. What goes is announced; other nodes and loads are left."""
    node, other = stock_node(), api.make_node("w2")
    hot.replica(other, updated_at=clock.now() - EARLIER)
    asked_at = clock.now()
    hot.replica(node, index=2, updated_at=asked_at)
    hot.replica(node, index=3, state="loading", address="", updated_at=asked_at - EARLIER)
    told: list[RemovedReplica] = []
    monkeypatch.setattr(hooks, "on_removed", [told.append])
    gone = engines.end_unlisted(node.id, {("echo#1", "50001")}, before=asked_at)
    assert gone == ["echo#0"]
    assert told == [RemovedReplica("echo", node.id, 0)]
    assert rows(node) == ["echo#1", "echo#2", "echo#3"]
    assert rows(other) == ["echo#0"]
