"""The queue of intents: send each intent to its node's worker, and turn the reply into the intent's outcome.

A command that exceeds its time limit has not failed: the worker may still be running the command. The target
shows this state, and the attempt waits for the late reply, or for a list of the worker that proves the
outcome. After a second time limit the command is sent again; every worker joins equal commands. After two
hours the outcome is unknown (O50). A reply to an attempt that has lost its lease changes nothing.

An upgrade in waves, or an install that drains, waits for running requests before it stops engines. The node's
replicas of the backend are withdrawn from the picks. The wait ends when they run no more requests, or after
`CLUSTER_UPGRADE_DRAIN`. A model's last replica stays in the picks until another node has a replica, which
this module requests, or until an operator has confirmed the stop. The wait has a limit: after it the target
shows the required decision, and is checked less and less often until an operator decides. At the end of the
attempt, replicas that were not stopped return to the picks; the worker's list of its engines decides, or, if
the worker sends none, a check as after the report of an engine's end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

from localai_cluster.accounts.actors import CONTROLLER
from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.batching import CallBatcher
from localai_cluster.kit.leases import Attempt, LeaseLost
from localai_cluster.kit.logs import request_id
from localai_cluster.kit.quantities import counted
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.metrics import controller as metrics
from nodes.backends import intents, inventory, node_commands, waves
from nodes.backends.intents import Ended, Failed, Intent, PutBack, Settlement
from nodes.backends.node_commands import Command, Unclear
from nodes.commands.commands import Worker, first_result
from nodes.commands.outcomes import (
    BusDown,
    CommandFailed,
    Done,
    NoCommandListener,
    NoResponders,
    NotSent,
    Outcome,
    Refused,
    Restarted,
    StillRunning,
    Unreadable,
)
from nodes.models import BackendNode, PendingBackendOp
from nodes.placement.load_times import load_limit
from nodes.registry import lifecycle
from nodes.replicas import drains
from nodes.replicas.drains import UpgradeDrain
from operations.executor.work import in_thread
from operations.ledger.progress import Batch, Recorder, Tick
from operations.models import TERMINAL, Event, Operation, Status

POLL_SECONDS = 0.25
"""Seconds between two counts of the running requests: no message reports the end of a request."""
LOAD_POLL_SECONDS = 1.0
"""Seconds between two checks while a last replica is loaded on another node."""
BLOCKED_PAUSE, MAX_BLOCKED_PAUSE = 15.0, 900.0
"""Seconds until the next check of a blocked last replica.

The pause equals the age of the intent, so it doubles each time.
"""

LoadElsewhere = Callable[[str, UUID, UUID | None], Operation]
"""Requests a replica of a model on another node.

A repeated call with the operation of the first call renews the request.
"""


class LastReplicaBlocked(Exception):
    """A last replica must not stop yet; the text has its model and why no other node has a replica."""


async def wait_until_drained(
    intent: Intent, recorder: Recorder, load_elsewhere: LoadElsewhere
) -> PutBack | None:
    """Wait until the requests have ended or their deadline has passed, and last replicas run elsewhere.

    Return PutBack if the command must not be sent. Raise LeaseLost.
    """
    if not intent.row.spares_requests or intent.row.unanswered_since is not None:
        return None
    loads: dict[str, UUID] = {}
    last_message = ""
    cluster = conf.cluster()
    patience = clock.monotonic() + cluster.install_timeout + load_limit(0, cluster.model_load_timeout)
    while True:
        confirmed = (await in_thread(waves.confirmed_models, [intent.id]))[intent.id]
        withdrawal, is_overdue = await in_thread(_withdraw, intent, confirmed)
        if withdrawal.last_of:
            try:
                # Not before another node was tried, however slow this process is.
                if last_message and clock.monotonic() >= patience:
                    reason = _last_replica_reason(withdrawal.last_of)
                    raise LastReplicaBlocked(f"{reason} ({last_message})")
                message = await in_thread(_replace, intent, withdrawal.last_of, loads, load_elsewhere)
            except LastReplicaBlocked as blocked:
                pause = _blocked_pause(intent, clock.now())
                return PutBack(str(blocked), pause, confirmed=confirmed)
        elif is_overdue or not withdrawal.running:
            return None
        else:
            message = f"waiting for {counted(withdrawal.running, 'request')} on {intent.node.name}"
        if message != last_message:
            last_message = message
            tick = Tick("draining", message, node_id=intent.node.id, node_name=intent.node.name)
            recorder.add((intent.id, intent.fence), [tick])
        await asyncio.sleep(LOAD_POLL_SECONDS if withdrawal.last_of else POLL_SECONDS)


def _blocked_pause(intent: Intent, now: datetime) -> float:
    age = (now - intent.row.created_at).total_seconds()
    return min(max(age, BLOCKED_PAUSE), MAX_BLOCKED_PAUSE)


def _last_replica_reason(models: Collection[str]) -> str:
    names = ", ".join(models)
    return f"it would stop the last replica of {names}; confirm, or load it on another node"


def _withdraw(intent: Intent, confirmed: Collection[str] | None) -> tuple[UpgradeDrain, bool]:
    """Drain the replicas; return the result, and True if the time for running requests is over."""
    intents.confirm(intent)
    now = clock.now()
    deadline = intent.row.drain_until or now + timedelta(seconds=conf.cluster().upgrade_drain)
    withdrawal = drains.drain_for_upgrade(
        intent.node.id, intent.row.backend, intent_id=intent.id, confirmed=confirmed, deadline=deadline
    )
    if withdrawal.last_of:
        return withdrawal, False
    return withdrawal, intents.drain_until(intent, now=now) <= now


def _replace(
    intent: Intent, models: Collection[str], loads: dict[str, UUID], load_elsewhere: LoadElsewhere
) -> str:
    """Load each model on another node; return the progress as text. Raise LastReplicaBlocked."""
    messages = []
    for model in models:
        reason = _last_replica_reason([model])
        try:
            load = load_elsewhere(model, intent.node.id, loads.get(model))
        except errors.ClusterError as refusal:
            raise LastReplicaBlocked(f"{reason} ({refusal.message})") from refusal
        loads[model] = load.id
        if load.status in TERMINAL:
            del loads[model]
            if load.status != Status.COMPLETED:
                raise LastReplicaBlocked(f"{reason} ({load.error or load.message})")
        messages.append(f"{model} is loaded on another node first: {load.message}")
    return "; ".join(messages)


log = logging.getLogger(__name__)

COMMANDS: dict[str, Command] = {
    PendingBackendOp.Op.INSTALL: node_commands.COMMAND,
    PendingBackendOp.Op.UPGRADE: node_commands.UPGRADE,
    PendingBackendOp.Op.DELETE: node_commands.DELETE,
}
QUEUE_SLOTS = 2048
MAX_OUTCOMES = 1024
"""Outcomes that are written in one transaction, which bounds its locks and its memory."""
UNKNOWN_OUTCOME_AFTER = timedelta(hours=2)
"""O50: time without a reply after which the outcome of a command is unknown."""
PROOF_POLL_SECONDS = 15.0
"""Seconds between two requests for the worker's list while its reply is late."""
BUS_RETRY_SECONDS = 5.0
CANCEL_RETRY_LIMIT = timedelta(minutes=5)
"""Limit for repeated cancellations of a worker's command while our own connection is down."""

Written = tuple[Attempt, Settlement, Collection[Tick]]


async def write_reports(batch: Batch) -> set[Attempt]:
    """Write progress reports in one of the shared threads."""
    return await in_thread(intents.record, batch, now=clock.now())


class IntentQueue:
    """Runs intents over the bus; implements `operations.executor.executor.Queue`."""

    name = "intents"
    slots = QUEUE_SLOTS
    renew = staticmethod(intents.renew)
    release = staticmethod(intents.release)

    def __init__(self, bus: Bus, load_elsewhere: LoadElsewhere) -> None:
        self._bus, self._load_elsewhere = bus, load_elsewhere
        self._lost: Callable[[Attempt], None] = lambda attempt: None
        self._recorder = Recorder(write_reports, lambda attempt: self._lost(attempt))
        self._outcomes = CallBatcher(self._write, most=MAX_OUTCOMES, one_by_one=(DatabaseError,))
        self._offline_waiters: dict[UUID, set[asyncio.Future[str]]] = {}
        """Futures of the attempts to resolve when their node goes offline, by node."""

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """Implement `Queue`."""
        self._lost = lost

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> Sequence[Intent]:
        """Implement `Queue`."""
        time_limits = {op: command.limit() for op, command in COMMANDS.items()}
        return intents.claim(owner, now=now, lease=lease, limit=limit, time_limits=time_limits)

    def reap(self) -> None:
        """Implement `Queue`."""
        reclaimed, ended = intents.reap(now=clock.now())
        if reclaimed or ended:
            log.warning("expired leases of intents: %d taken back, %d given up", reclaimed, ended)

    def forget(self, attempt: Attempt) -> None:
        """Implement `Queue`."""
        self._recorder.discard(attempt)

    def close(self) -> None:
        """Implement `Queue`."""
        self._recorder.close()

    async def nodes_changed(self) -> None:
        """End the attempts whose node went offline, because their worker cannot reply."""
        if self._offline_waiters:
            offline_nodes = await in_thread(_offline_nodes, list(self._offline_waiters))
            for node_id, name in offline_nodes:
                for waiter in self._offline_waiters.get(node_id, ()):
                    if not waiter.done():
                        waiter.set_result(f"node {name} is offline")

    async def execute(self, intent: Intent) -> None:
        """Run one attempt and write its outcome."""
        request_id.set(str(intent.row.operation_id))
        attempt = (intent.id, intent.fence)
        if intent.row.cancelled_at is not None:
            note = await self._cancel(intent)
            if note is None:
                await in_thread(
                    intents.retry_cancellation, intent, seconds=BUS_RETRY_SECONDS, now=clock.now()
                )
                return
            await self._restore_replicas(intent)
            await in_thread(intents.delete_cancelled, {attempt: note}, now=clock.now())
            return
        log.info("%s (%s): start, fence %d", intent, intent.id, intent.fence)
        with metrics.count_attempt(f"intent_{intent.row.op}") as measurement:
            settlement = await self._attempt(intent)
            log.info("%s (%s): %s", intent, intent.id, settlement)
            # First: the settlement may open the next wave, which counts the nodes that serve these models.
            await self._restore_replicas(intent, settlement)
            await self._outcomes.put((attempt, settlement, await self._recorder.take(attempt) or []))
            measurement.outcome = _event(settlement)

    async def _write(self, batch: Sequence[Written]) -> Sequence[None]:
        outcomes = {attempt: (settlement, ticks) for attempt, settlement, ticks in batch}
        for id, _ in await in_thread(intents.record_outcomes, outcomes, now=clock.now()):
            log.warning("intent %s: the lease was lost; its outcome is not recorded", id)
        return [None] * len(batch)

    async def _attempt(self, intent: Intent) -> Settlement:
        command = COMMANDS.get(intent.row.op)
        if command is None:
            return Ended(error=f"unknown operation {intent.row.op}")  # R4.29
        try:
            outcome = await self._await_outcome(intent, command)
            if isinstance(outcome, Refused) and outcome.reply.interrupted:
                return Failed(outcome.reason)
            if isinstance(outcome, Done | Refused):
                return await command.conclude(self._bus, intent, outcome)
            return await self._settle_without_reply(intent, outcome)
        except CommandFailed as failure:
            return Ended(error=failure.message)
        except Unclear as unclear:
            return Failed(str(unclear))
        except (LeaseLost, OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("%s (%s): unexpected failure", intent, intent.id)
            return Ended(error=f"internal error; the log has it under {request_id.get()}")

    async def _await_outcome(self, intent: Intent, command: Command) -> Outcome[Any] | PutBack:
        """Return the outcome, also a late one, or PutBack if the node goes offline."""
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._offline_waiters.setdefault(intent.node.id, set()).add(waiter)
        try:
            return await first_result(_node_offline(waiter), self._send(intent, command))
        finally:
            self._offline_waiters[intent.node.id].discard(waiter)
            if not self._offline_waiters[intent.node.id]:
                del self._offline_waiters[intent.node.id]

    async def _send(self, intent: Intent, command: Command) -> Outcome[Any] | PutBack:
        def report(event: messages.ProgressEvent) -> None:
            self._recorder.add((intent.id, intent.fence), [node_commands.tick(intent.node, event)])

        if (put_back := await wait_until_drained(intent, self._recorder, self._load_elsewhere)) is not None:
            return put_back
        limit = command.limit()
        if intent.row.spares_requests:
            await in_thread(intents.record_command_sent, intent, limit, now=clock.now())
        sent = asyncio.create_task(command.send(self._bus, intent, 2 * limit, report))
        try:
            done, _ = await asyncio.wait({sent}, timeout=limit)
            if done:
                return sent.result()
            await self._overdue(intent, f"node {intent.node.name} has not answered within {limit:.0f} s")
            return await first_result(self._find_proof(intent, command), _result(sent))
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    async def _find_proof(self, intent: Intent, command: Command) -> Done[None]:
        """Return Done when the worker's list proves that the command was executed."""
        worker = Worker(self._bus, str(intent.node.id), intent.node.name)
        while True:
            await asyncio.sleep(PROOF_POLL_SECONDS)
            reply = await worker.backends()
            if isinstance(reply, Done) and command.is_proven(
                intent, node_commands.listed(intent.row.backend, reply.reply)
            ):
                return Done(None)

    async def _overdue(self, intent: Intent, reason: str) -> datetime:
        text = f"{reason}; the worker may still be busy with it"
        return await in_thread(intents.record_overdue, intent, text, now=clock.now())

    async def _settle_without_reply(self, intent: Intent, outcome: Outcome[Any] | PutBack) -> Settlement:
        match outcome:
            case PutBack():
                return outcome
            case BusDown(reason):
                # An earlier attempt may have sent the command.
                return PutBack(reason, BUS_RETRY_SECONDS, busy=intent.row.unanswered_since is not None)
            case NotSent(reason) if intent.row.unanswered_since is None:
                return Failed(reason)
            case StillRunning(reason):
                since = await self._overdue(intent, reason)
                if clock.now() - since >= UNKNOWN_OUTCOME_AFTER:
                    return Ended(error=f"outcome unknown: {reason}")
                return PutBack(f"{reason}; asking again", busy=True)
            case Unreadable(reason):
                return Ended(error=reason)
            case Restarted(reason):
                return Failed(reason)
            case NoResponders(reason):
                await in_thread(_mark_unhealthy, intent.node.id, reason)  # A3: before the failure is recorded
                return Failed(reason)
            case Done() | Refused():
                raise AssertionError(outcome)
            case _:
                assert_never(outcome)

    async def _restore_replicas(self, intent: Intent, settlement: Settlement | None = None) -> None:
        """Remove replicas that the attempt stopped, and return the others to the picks.

        Not while the worker may be busy. Errors are only logged, so that the worker's reply is not lost.
        After an error, `drains.return_without_upgrade` returns the replicas later.
        """
        row, node = intent.row, intent.node
        if row.op == PendingBackendOp.Op.INSTALL and not row.force:
            return
        if isinstance(settlement, PutBack) and settlement.busy:
            return
        try:
            is_compared = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(inventory.SHORT_LIMIT):
                    is_compared = await inventory.compare_replicas(self._bus, node.id, node.name)
            if row.spares_requests:
                await in_thread(drains.end_upgrade, intent.id, intent.fence, not is_compared)
        except Exception:
            log.exception("%s (%s): its replicas are not back in the picks yet", intent, intent.id)

    async def _cancel(self, intent: Intent) -> str | None:
        """Cancel the command on the worker; return a note on the result, or None to try again later."""
        worker = Worker(self._bus, str(intent.node.id), intent.node.name)
        outcome = await worker.cancel(str(intent.row.operation_id))
        match outcome:
            case Done(reply):
                return "the worker stopped" if reply.found else "the worker was not at it any more"
            case NoCommandListener():
                return "this worker cannot stop it: it goes on, and its result is discarded"
            case Refused(reason) | StillRunning(reason) | NoResponders(reason) | Unreadable(reason):
                return f"the worker may go on ({reason}); its result is discarded"
            case BusDown(reason):
                if clock.now() - (intent.row.cancelled_at or clock.now()) < CANCEL_RETRY_LIMIT:
                    return None
                return f"the worker was not asked to stop ({reason}); its result is discarded"
            case _:
                assert_never(outcome)


def _event(settlement: Settlement) -> Event:
    """Return the label under which metrics count the settlement, as for operations."""
    match settlement:
        case Ended(error):
            return Event.FAIL if error else Event.COMPLETE
        case Failed():
            return Event.POSTPONE
        case PutBack():
            return Event.WAIT
        case _:
            assert_never(settlement)


async def _node_offline(waiter: "asyncio.Future[str]") -> PutBack:
    return PutBack(await asyncio.shield(waiter))


async def _result(sent: "asyncio.Task[Outcome[Any]]") -> Outcome[Any]:
    return await asyncio.shield(sent)


def _offline_nodes(node_ids: Collection[UUID]) -> list[tuple[UUID, str]]:
    offline = BackendNode.objects.filter(pk__in=node_ids, status="offline")
    return list(offline.values_list("id", "name"))


def _mark_unhealthy(node_id: UUID, reason: str) -> None:
    """A3, A5: mark the node unhealthy, unless it was removed or another attempt has marked it already."""
    try:
        lifecycle.mark_unhealthy(node_id, actor=CONTROLLER, now=clock.now(), reason=reason)
    except (errors.NotFound, errors.Conflict) as refusal:
        log.info("node %s is not marked unhealthy: %s", node_id, refusal.message)
