"""Stopping a node's worker: what may be asked, and what the operation makes of the worker (review R12).

The bus is played by the test, the database is real.
"""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NoResponders, NotConnected
from nodes.backends import node_stop
from nodes.commands import commands
from nodes.commands.outcomes import CommandFailed
from nodes.models import BackendNode, NodeEvent, NodeType
from nodes.registry import lifecycle
from operations.executor.work import Postpone, Work, write_batch
from operations.ledger import attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Operation, OperationTarget
from tests.conftest import until
from tests.support import api, hot
from tests.support.bus import PlayedBus
from tests.support.command_line import refused, run

pytestmark = pytest.mark.django_db(transaction=True)

HERE = m.ListReply((), instance="first")


class Stage:
    """A node whose worker is there, and a controller that stops it."""

    def __init__(self) -> None:
        self.bus, self.node = PlayedBus(), hot.node("one")
        self.list = messages.subject("backend.list", str(self.node.id))
        self.bus.replies[self.list] = HERE

    @property
    def told(self) -> int:
        """How often the worker was told to stop."""
        assert {subject for subject, _ in self.bus.published} <= {messages.subject("stop", str(self.node.id))}
        return len(self.bus.published)

    def begins(self) -> Work:
        """The first attempt."""
        node_stop.request_stop(BackendNode.objects.get(), by=Requester("anna"), now=clock.now())
        return self.claimed()

    def claimed(self) -> Work:
        (operation,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
        return Work(operation, Recorder(write_batch))

    async def stops(self, work: Work) -> Mapping[str, Any]:
        return await asyncio.wait_for(node_stop.StopNode(self.bus)(work), 60)

    async def until_told(self, times: int) -> None:
        await until(lambda: self.told >= times)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    for name in ("PING_EVERY", "_RETRY_PAUSE_SECONDS", "BUS_WAIT"):
        monkeypatch.setattr(commands, name, 0.0)
    monkeypatch.setattr(node_stop, "POLL_SECONDS", 0.01)
    return Stage()


def part() -> tuple[str, str]:
    found = OperationTarget.objects.get()
    return found.status, found.error


@pytest.mark.rule("nats-4.11")
async def test_the_operation_ends_when_the_worker_has_left(stage: Stage) -> None:
    work = await hot.in_thread(stage.begins)
    attempt = asyncio.create_task(stage.stops(work))
    await stage.until_told(1)
    assert not attempt.done(), "it has been told, but is still there"
    await hot.in_thread(lambda: lifecycle.deactivate(stage.node.id, now=clock.now()))
    assert await attempt == {"nodes": ["one"]}
    assert await hot.in_thread(part) == ("success", "")
    assert stage.told == 1


@pytest.mark.rule("nats-4.11")
async def test_a_worker_that_left_and_was_started_again_is_not_told_once_more(stage: Stage) -> None:
    """A controller that takes over reads that it has left; the new process goes on."""
    work = await hot.in_thread(stage.begins)
    await hot.in_thread(lambda: lifecycle.deactivate(stage.node.id, now=clock.now()))
    await hot.in_thread(lambda: BackendNode.objects.update(offline_at=None))
    await stage.stops(work)
    assert (stage.told, await hot.in_thread(part)) == (0, ("success", ""))


async def test_the_same_process_is_told_again_and_another_one_is_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command without a reply may be lost."""
    monkeypatch.setattr(node_stop, "REPEAT_SECONDS", 0.01)
    work = await hot.in_thread(stage.begins)
    attempt = asyncio.create_task(stage.stops(work))
    await stage.until_told(3)
    stage.bus.replies[stage.list] = m.ListReply((), instance="second")
    await attempt
    assert await hot.in_thread(part) == ("success", "")


async def test_a_worker_that_has_gone_is_looked_for_at_intervals(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left the bus, but not the registry yet: each question is followed by a pause."""
    work = await hot.in_thread(stage.begins)
    questions, pauses = 0, 0

    async def instance_of(*_: Any, **more: Any) -> str | None:
        nonlocal questions
        questions += 1
        if questions > 9:
            raise CommandFailed("enough")
        return "first" if questions == 1 else None

    async def sleep(_: float) -> None:
        nonlocal pauses
        pauses += 1

    monkeypatch.setattr(node_stop, "REPEAT_SECONDS", 1e-9)
    monkeypatch.setattr(node_stop, "_instance_of", instance_of)
    monkeypatch.setattr(node_stop, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(CommandFailed):
        await stage.stops(work)
    assert (questions, pauses) == (10, 9)
    assert stage.told == 1


async def test_a_stock_worker_is_told_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say which process it is: a second command might end the one that was started again."""
    monkeypatch.setattr(node_stop, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(node_stop, "LEAVE_LIMIT", 0.5)
    stage.bus.replies[stage.list] = m.ListReply(())
    work = await hot.in_thread(stage.begins)
    with pytest.raises(CommandFailed, match="node one has not left within"):
        await stage.stops(work)
    assert stage.told == 1
    assert (await hot.in_thread(part))[0] == "error"


@pytest.mark.parametrize(
    ("reply", "raised"),
    [(NoResponders("x"), CommandFailed), (NotConnected("lost"), Postpone)],
    ids=["deaf", "our connection"],
)
async def test_a_worker_that_is_not_reached_is_told_nothing(
    stage: Stage, reply: Exception, raised: type[Exception]
) -> None:
    stage.bus.replies[stage.list] = reply
    work = await hot.in_thread(stage.begins)
    with pytest.raises(raised):
        await stage.stops(work)
    assert stage.told == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"node_type": NodeType.AGENT}, "an agent"),
    ({"approved_at": None}, "pending approval"),
    ({"offline_at": clock.now()}, "already offline"),
]


def over_rest(node: BackendNode) -> str:
    answer = api.admin().post(f"/api/nodes/{node.id}/stop", {}, content_type="application/json")
    assert answer.status_code == 409
    return str(api.message(answer))


def at_the_command_line(node: BackendNode) -> str:
    return refused("nodes", "stop", node.name, "--yes")


@pytest.mark.parametrize("ask", [over_rest, at_the_command_line])
@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_cannot_be_stopped_is_refused_with_the_reason(
    ask: Callable[[BackendNode], str], fields: dict[str, Any], reason: str
) -> None:
    node = hot.node("one")
    BackendNode.objects.update(**fields)
    assert reason in ask(node)
    assert not Operation.objects.exists()


def test_rest_answers_with_the_operation_and_a_second_request_joins_it() -> None:
    node = hot.node("one")
    first, second = (
        api.admin().post(f"/api/nodes/{node.id}/stop", {"reason": "moves"}, content_type="application/json")
        for _ in range(2)
    )
    assert (first.status_code, second.status_code) == (202, 202)
    operation = Operation.objects.get()
    assert (operation.kind, operation.element, operation.node_id) == ("node_stop", "one", node.id)
    assert operation.payload == {"reason": "moves"}
    assert first.json()["jobID"] == second.json()["jobID"] == str(operation.id)
    assert (first.json().get("deduplicated"), second.json()["deduplicated"]) == (None, True)
    assert not NodeEvent.objects.exists(), "nothing has happened to the node yet"


def test_the_command_line_asks_before_it_stops_a_worker() -> None:
    """Without a terminal, the command requires `--yes`."""
    node = hot.node("one")
    assert "give --yes to stop the worker of one without a question" in refused("nodes", "stop", "one")
    assert not Operation.objects.exists()
    said = run("nodes", "stop", "one", "--yes", "--reason", "moves")
    operation = Operation.objects.get()
    assert f"one: the worker is being stopped (operation {operation.id})" in said
    assert operation.node_id == node.id


def test_a_failed_stop_is_tried_again_for_the_same_node() -> None:
    node = hot.node("one")
    failed = node_stop.request_stop(node, by=Requester("anna"), now=clock.now()).operation
    Operation.objects.update(status="failed", finished_at=clock.now())
    OperationTarget.objects.update(status="error", error="node one is not responding")
    answer = api.admin().post(f"/api/operations/{failed.id}/retry", {}, content_type="application/json")
    assert answer.status_code == 200, answer.content
    newer = Operation.objects.get(pk=answer.json()["jobID"])
    assert (newer.kind, newer.node_id, newer.pk != failed.pk) == ("node_stop", node.id, True)
