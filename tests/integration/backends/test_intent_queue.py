"""One attempt at an intent when its worker is late, silent, gone or asked to stop; the bus is played."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Bus, NoResponders, NotConnected, RequestTimeout
from localai_cluster.messaging.messages import decode
from nodes.backends import admission, intent_queue, node_commands
from nodes.backends.intent_queue import IntentQueue
from nodes.backends.intents import Intent
from nodes.backends.node_commands import Command
from nodes.commands.outcomes import Outcome
from nodes.commands.shared_commands import OnProgress
from nodes.loading.load_request import load_on_other_node
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from nodes.reconcilers import intents
from operations.changes import feed
from operations.executor.executor import Executor, OperationQueue
from operations.executor.work import Work
from operations.ledger.admission import OperationRequest, Requester, admit
from operations.models import Operation, OperationTarget
from tests.support import hot
from tests.support.bus import NEVER, PlayedBus
from tests.support.intents import DELETE, INSTALL, UPGRADE, Stage, ask, claim, due_now, quick

pytestmark = pytest.mark.django_db(transaction=True)

ECHO = m.InstalledBackend("echo", version="1", gallery_url="file:///srv/index.yaml")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    quick(monkeypatch)
    return Stage()


def amber() -> bool:
    return OperationTarget.objects.filter(overdue_since__isnull=False).exists()


def limited(command: Command, seconds: float) -> Command:
    """The command, whose time limit is over after so many seconds, and the second one never."""

    async def send(bus: Bus, intent: Intent, timeout: float, say: OnProgress) -> Outcome[Any]:
        return await command.send(bus, intent, 600, say)

    return replace(command, limit=lambda: seconds, send=send)


# --- over the time limit


@pytest.mark.rule("O19", "R4.31", "R6.19", "O15", "A81", "R6.21", "R6.37", "T-MGR-15")
async def test_a_late_answer_ends_what_is_overdue(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the part runs on, says why, and keeps its lease; nothing is sent twice."""
    monkeypatch.setattr(intent_queue, "PROOF_POLL_SECONDS", 60.0)
    monkeypatch.setitem(intent_queue.COMMANDS, "install", limited(node_commands.COMMAND, 0.2))
    answer = asyncio.Event()

    async def late() -> m.InstallReply:
        await answer.wait()
        return m.InstallReply(True)

    stage.answers(late)
    intent = await hot.in_thread(stage.begins, INSTALL)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(amber, "it is overdue")
    part = await stage.part(intent)
    assert part.status == "running_on_worker"
    assert "the worker may still be busy with it" in part.reason
    assert (part.operation.status, part.operation.message) == ("processing", part.reason)
    row = await stage.row(intent)
    assert row is not None
    assert row.unanswered_since == part.overdue_since
    answer.set()
    part = await attempt
    assert (part.status, part.operation.status, part.overdue_since) == ("success", "completed", None)
    assert len(stage.sent) == 1


@pytest.mark.rule("O19", "R6.33", "T-MGR-9", "T-MGR-10")
@pytest.mark.parametrize(
    ("kind", "before", "shown"),
    [
        (INSTALL, [], [ECHO]),
        (UPGRADE, [ECHO], [m.InstalledBackend("echo", version="2", gallery_url="file:///srv/index.yaml")]),
        (DELETE, [ECHO], []),
    ],
    ids=["install", "upgrade", "delete"],
)
async def test_a_list_that_proves_it_ends_what_is_overdue(
    stage: Stage,
    kind: str,
    before: list[m.InstalledBackend],
    shown: list[m.InstalledBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer was lost; what the worker lists says that it is done."""
    for op, command in dict(intent_queue.COMMANDS).items():
        monkeypatch.setitem(intent_queue.COMMANDS, op, limited(command, 0.1))

    def begins() -> Intent:
        for one in before:
            NodeBackend.objects.create(node=stage.node, name=one.name, version=one.version)
        return stage.begins(kind)

    stage.lists(*before)
    intent = await hot.in_thread(begins)

    def heard() -> object:
        stage.lists(*shown)
        return NEVER

    stage.answers(heard)
    part = await stage.carries_out(intent)
    assert (part.status, part.operation.status) == ("success", "completed")
    assert len(stage.sent) == 1


@pytest.mark.rule("O19", "R1.113", "T-MGR-8")
async def test_a_second_time_limit_repeats_the_command(stage: Stage) -> None:
    """As often as it takes; it is no failure, and stays overdue since the first."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(RequestTimeout("late"))
    part = await stage.carries_out(intent)
    since = part.overdue_since
    part = await stage.again()
    row = await stage.row(intent)
    assert row is not None
    assert (row.attempts, row.unanswered_since, part.overdue_since) == (0, since, since)
    assert len(stage.sent) == 2
    assert len({decode(sent, m.InstallRequest).op_id for sent in stage.sent}) == 1


@pytest.mark.rule("O50")
async def test_after_two_hours_the_outcome_is_unknown(stage: Stage) -> None:
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(RequestTimeout("late"))
    await stage.carries_out(intent)
    since = clock.now() - intent_queue.UNKNOWN_OUTCOME_AFTER
    for short, status in ((timedelta(seconds=60), "queued"), (timedelta(0), "error")):
        await hot.in_thread(lambda at=since + short: PendingBackendOp.objects.update(unanswered_since=at))
        part = await stage.again()
        assert part.status == status
    assert part.operation.status == "failed"
    assert part.error.startswith("outcome unknown: node one did not answer")
    assert await stage.row(intent) is None


@pytest.mark.rule("A77")
async def test_a_worker_that_was_restarted_is_not_busy_any_more(stage: Stage) -> None:
    """The command died with it: the attempt counts, and nothing is overdue."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.lists(instance="first")

    async def restarted() -> object:
        stage.lists(instance="second")
        return NEVER

    stage.answers(RequestTimeout("late"), restarted, m.InstallReply(True))
    assert (await stage.carries_out(intent)).overdue_since is not None
    part = await stage.again()
    row = await stage.row(intent)
    assert row is not None
    assert (part.status, part.reason, row.attempts) == ("queued", "the worker of node one was restarted", 1)
    assert (row.unanswered_since, part.overdue_since) == (None, None)
    assert (await stage.again()).status == "success"


@pytest.mark.parametrize("kind", [INSTALL, UPGRADE, DELETE])
@pytest.mark.rule("nats-6.1", "O76")
async def test_a_worker_that_has_not_begun_is_asked_again(stage: Stage, kind: str) -> None:
    """It was frozen when the command was sent: its answer is no refusal, and it is not busy any more."""
    intent = await hot.in_thread(stage.begins, kind)
    stage.lists(ECHO)
    reply = m.InstallReply if kind == INSTALL else m.UpgradeReply
    stage.answers(RequestTimeout("late"), reply(error="stopped for a while", interrupted=True), reply(True))
    assert (await stage.carries_out(intent)).overdue_since is not None
    part = await stage.again()
    row = await stage.row(intent)
    assert row is not None
    assert (part.status, part.reason, row.attempts) == ("queued", "stopped for a while", 1)
    assert part.overdue_since is None
    assert (await stage.again()).status == "success"


async def test_what_is_overdue_and_taken_up_again_waits_for_no_node(stage: Stage) -> None:
    """Its node was away in between."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(RequestTimeout("late"))
    await stage.carries_out(intent)

    def back() -> OperationTarget:
        BackendNode.objects.update(unhealthy_at=clock.now())
        intents.refresh_reasons(None, now=clock.now())
        BackendNode.objects.update(unhealthy_at=None)
        due_now()
        claim()
        return OperationTarget.objects.get()

    part = await hot.in_thread(back)
    assert (part.status, part.waits_for_node, part.next_check_at) == ("running_on_worker", False, None)


# --- nodes that go


@pytest.mark.rule("A77", "R6.18", "O5", "R6.21")
async def test_an_attempt_whose_node_goes_offline_ends_at_once(stage: Stage) -> None:
    """Nothing waits for a worker that is known to be gone; it is no failure of the work."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(NEVER)
    attempt = asyncio.create_task(stage.carries_out(intent))

    await hot.until(lambda: bool(stage.sent))
    await stage.queue.nodes_changed()
    assert not attempt.done(), "nothing has happened to its node"
    await hot.in_thread(lambda: BackendNode.objects.update(offline_at=clock.now()))
    await stage.queue.nodes_changed()
    part = await asyncio.wait_for(attempt, 60)
    row = await stage.row(intent)
    assert row is not None
    assert (part.status, part.reason, row.attempts) == ("queued", "node one is offline", 0)
    assert await hot.in_thread(claim) == []


@pytest.mark.rule("A3", "A4", "A5", "O75")
async def test_without_the_bus_no_node_is_blamed(stage: Stage) -> None:
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.bus.replies[messages.subject("backend.list", str(stage.node.id))] = NotConnected("lost")
    part = await stage.carries_out(intent)
    row = await stage.row(intent)
    assert row is not None
    assert (part.status, row.attempts) == ("queued", 0)
    assert "message bus" in part.reason
    assert (await hot.in_thread(BackendNode.objects.get)).status == "healthy"


@pytest.mark.rule("R4.29")
async def test_an_unknown_operation_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intent_queue, "COMMANDS", {})
    part = await stage.carries_out(await hot.in_thread(stage.begins, INSTALL))
    assert (part.status, part.error) == ("error", "unknown operation install")


@pytest.mark.rule("O7", "O8")
async def test_an_unexpected_error_ends_it_without_its_details(stage: Stage) -> None:
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(RuntimeError("secret"))
    part = await stage.carries_out(intent)
    assert part.operation.status == "failed"
    assert part.error.startswith("internal error; the log has it under ")
    assert "secret" not in part.error


# --- called off


def cancelled(stage: Stage) -> Intent:
    """The claim that calls off an install which has begun."""
    intent = stage.begins(INSTALL)
    admission.cancel(intent.row.operation_id, actor="anna", now=clock.now())
    return stage.claimed()


@pytest.mark.rule("O54", "O60")
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (m.CancelReply(True, found=True), "the worker stopped"),
        (m.CancelReply(True), "the worker was not at it any more"),
        (m.CancelReply(error="cannot be killed"), "the worker may go on (cannot be killed)"),
        (RequestTimeout("late"), "the worker may go on (node one did not answer within"),
        (b"[", "the worker may go on"),
    ],
    ids=["stopped", "not at it", "refused", "late", "unreadable"],
)
async def test_a_worker_is_asked_to_stop_and_the_part_says_what_came_of_it(
    stage: Stage, reply: Any, says: str
) -> None:
    off = await hot.in_thread(cancelled, stage)
    subject = messages.subject("backend.cancel", str(stage.node.id))
    stage.bus.replies[subject] = reply
    part = await stage.carries_out(off)
    assert [decode(sent, m.CancelRequest).op_id for sent in stage.bus.asked[subject]] == [
        str(off.row.operation_id)
    ]
    assert (part.status, part.operation.status) == ("cancelled", "cancelled")
    assert part.reason.startswith(says)
    assert await stage.row(off) is None
    assert not stage.sent


@pytest.mark.rule("O54")
async def test_a_worker_is_asked_to_stop_once_our_own_connection_is_back(stage: Stage) -> None:
    """A cut of the bus says nothing about the worker, which may be at it: it is asked again, for a while."""
    off = await hot.in_thread(cancelled, stage)
    subject = messages.subject("backend.cancel", str(stage.node.id))
    stage.bus.replies[subject] = [NotConnected("lost"), m.CancelReply(True, found=True)]
    await stage.carries_out(off)
    row = await stage.row(off)
    assert row is not None
    assert row.next_retry_at > clock.now()
    assert (row.lease_until, row.cancelled_at) == (None, off.row.cancelled_at)
    await hot.in_thread(due_now)
    part = await stage.carries_out(await hot.in_thread(stage.claimed))
    assert part.reason == "the worker stopped"
    assert await stage.row(off) is None


@pytest.mark.rule("O54")
async def test_a_worker_that_cannot_be_asked_for_long_may_go_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intent_queue, "CANCEL_RETRY_LIMIT", timedelta(0))
    off = await hot.in_thread(cancelled, stage)
    stage.bus.replies[messages.subject("backend.cancel", str(stage.node.id))] = NotConnected("lost")
    part = await stage.carries_out(off)
    assert part.reason.startswith("the worker was not asked to stop")
    assert await stage.row(off) is None


@pytest.mark.rule("O54", "O60")
async def test_a_stock_worker_goes_on_and_the_part_says_so(stage: Stage) -> None:
    """It answers other questions, but does not know the command."""
    off = await hot.in_thread(cancelled, stage)
    part = await stage.carries_out(off)
    assert part.reason == "this worker cannot stop it: it goes on, and its result is discarded"
    assert await stage.row(off) is None


@pytest.mark.rule("O54")
async def test_a_worker_is_asked_to_stop_although_its_node_is_away(stage: Stage) -> None:
    """It may be there again; nothing else may begin on that backend before."""

    def begun() -> Intent:
        intent = stage.begins(INSTALL)
        BackendNode.objects.update(offline_at=clock.now())
        admission.cancel(intent.row.operation_id, actor="anna", now=clock.now())
        return stage.claimed()

    off = await hot.in_thread(begun)
    stage.bus.replies[messages.subject("backend.cancel", str(stage.node.id))] = NoResponders("gone")
    stage.bus.replies[messages.subject("backend.list", str(stage.node.id))] = NoResponders("gone")
    part = await stage.carries_out(off)
    assert part.reason == "the worker may go on (node one is not responding); its result is discarded"
    assert await stage.row(off) is None


# --- with its executor


def completed(operation: Operation) -> bool:
    return Operation.objects.filter(pk=operation.pk, status="completed").exists()


async def test_an_install_runs_although_the_loads_that_wait_for_it_hold_all_slots() -> None:
    """Loads that wait for their installations must not keep those from being claimed."""
    bus, node = PlayedBus(), await hot.in_thread(hot.node)
    bus.replies[messages.subject("backend.list", str(node.id))] = m.ListReply()
    bus.replies[messages.subject("backend.install", str(node.id))] = m.InstallReply(True)

    async def load(work: Work) -> None:
        installs = await hot.in_thread(ask, INSTALL, node)
        await hot.until(lambda: completed(installs), "installed")

    request = OperationRequest("probe", key="probe:x", element="x", by=Requester("test"))
    operation = (await hot.in_thread(lambda: admit(request, now=clock.now()))).operation
    running: list[Executor[Any]] = [
        Executor("test-owner", OperationQueue({"probe": load}, slots=1), lease=5.0),
        Executor("test-owner", IntentQueue(bus, load_on_other_node), lease=5.0),
    ]
    tasks = [asyncio.create_task(executor.run()) for executor in running]
    try:
        await hot.until(lambda: completed(operation), "loaded")
    finally:
        await asyncio.gather(*(executor.stop() for executor in running))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.rule("A82", "O5", "O80", "H16")
async def test_a_worker_that_never_answers_holds_up_no_other_node() -> None:
    """Of both installs only the one on the silent node is still listed."""
    bus = PlayedBus()
    silent, well = [await hot.in_thread(hot.node, name) for name in ("silent", "well")]
    for node, reply in ((silent, NEVER), (well, m.InstallReply(True))):
        bus.replies[messages.subject("backend.list", str(node.id))] = m.ListReply()
        bus.replies[messages.subject("backend.install", str(node.id))] = reply
    running: Executor[Any] = Executor("test-owner", IntentQueue(bus, load_on_other_node), lease=600.0)
    task = asyncio.create_task(running.run())
    try:
        first = await hot.in_thread(ask, INSTALL, silent)
        running.wake()
        await hot.until(
            lambda: bool(bus.asked[messages.subject("backend.install", str(silent.id))]), "it has begun"
        )
        second = await hot.in_thread(ask, INSTALL, well)
        running.wake()
        await hot.until(lambda: completed(second), "the other one is done")
        listed = (await hot.in_thread(feed.snapshot)).operations
        assert [(one["jobID"], one["status"]) for one in listed] == [(str(first.id), "processing")]
    finally:
        await running.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.rule("O54", "A84", "O55", "O60")
async def test_a_cancel_ends_the_attempt_and_stops_the_worker() -> None:
    """The executor renews at once when it hears of the cancel, finds the lease gone and lets go."""
    bus, node = PlayedBus(), await hot.in_thread(hot.node)
    install, stop = (
        messages.subject("backend.install", str(node.id)),
        messages.subject("backend.cancel", str(node.id)),
    )
    bus.replies[messages.subject("backend.list", str(node.id))] = m.ListReply()
    bus.replies[install] = NEVER
    bus.replies[stop] = m.CancelReply(True, found=True)
    running: Executor[Any] = Executor("test-owner", IntentQueue(bus, load_on_other_node), lease=600.0)
    task = asyncio.create_task(running.run())
    try:
        operation = await hot.in_thread(ask, INSTALL, node)
        running.wake()
        await hot.until(lambda: bool(bus.asked[install]), "it has begun")
        await hot.in_thread(lambda: admission.cancel(operation.id, actor="anna", now=clock.now()))
        running.wake(cancelled=True)
        await hot.until(lambda: not PendingBackendOp.objects.exists(), "it is called off")
        assert len(bus.asked[install]) == len(bus.asked[stop]) == 1
        await hot.in_thread(operation.refresh_from_db)
        assert operation.status == "cancelled"
    finally:
        await running.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
