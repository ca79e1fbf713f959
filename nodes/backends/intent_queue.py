"""The queue of intents: each is sent to its node's worker, and what comes of it becomes the outcome.

A command whose time limit is over is not a failure: the worker may still be busy with it. The part says so,
and the attempt goes on waiting, for the late answer, or for a list of the worker's that proves the outcome.
After a second time limit it is sent again, which every worker takes as the same command. After two hours the
outcome is unknown (O50). An answer to an attempt that has lost its intent changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from django.db import InterfaceError, OperationalError

from localai_cluster import clock, errors
from localai_cluster.accounts.actors import CONTROLLER
from localai_cluster.logs import request_id
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.metrics import controller as metrics
from nodes.backends import install, intents, one_node, sparing, upgrade_delete
from nodes.backends.commands import Worker, first
from nodes.backends.intents import Ended, Failed, Intent, PutBack, Settlement
from nodes.backends.one_node import Command, CommandFailed, Unclear
from nodes.backends.outcomes import (
    BusDown,
    Done,
    NoResponders,
    NotSent,
    Outcome,
    Refused,
    Restarted,
    StillRunning,
    Unheard,
    Unreadable,
)
from nodes.backends.together import Together
from nodes.models import BackendNode, PendingBackendOp
from nodes.registry import services
from operations.executor.recorder import Batch, Recorder
from operations.executor.work import in_thread
from operations.ledger.fence import LeaseLost
from operations.ledger.progress import Attempt, Tick
from operations.states import Event

log = logging.getLogger(__name__)

COMMANDS: dict[str, Command] = {
    PendingBackendOp.Op.INSTALL: install.COMMAND,
    PendingBackendOp.Op.UPGRADE: upgrade_delete.UPGRADE,
    PendingBackendOp.Op.DELETE: upgrade_delete.DELETE,
}
SLOTS = 2048
UNKNOWN_AFTER = timedelta(hours=2)
"""O50: how long a worker may be busy without an answer before the outcome counts as unknown."""
LOOK_FOR_PROOF_EVERY = 15.0
BUS_PAUSE = 5.0
CALL_OFF_FOR = timedelta(minutes=5)
"""How long a worker is asked to stop while our own connection is down."""

Written = tuple[Attempt, Settlement, Collection[Tick]]


async def write_reports(batch: Batch) -> set[Attempt]:
    """Writes reports of progress in one of the shared threads."""
    return await in_thread(intents.record, batch, now=clock.now())


class IntentQueue:
    """Intents, carried out over the bus; see `operations.executor.queue.Queue`."""

    name = "intents"
    slots = SLOTS

    def __init__(self, bus: Bus, load_elsewhere: sparing.LoadElsewhere) -> None:
        self._bus, self._load_elsewhere = bus, load_elsewhere
        self._lost: Callable[[Attempt], None] = lambda attempt: None
        self._recorder = Recorder(write_reports, lambda attempt: self._lost(attempt))
        self._outcomes = Together(self._write)
        self._away: dict[UUID, set[asyncio.Future[str]]] = {}
        """By node, the attempts that are told when it goes offline."""

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """See `Queue`."""
        self._lost = lost

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> Sequence[Intent]:
        """See `Queue`."""
        time_limits = {op: command.limit() for op, command in COMMANDS.items()}
        return intents.claim(owner, now=now, lease=lease, limit=limit, time_limits=time_limits)

    def renew(self, owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
        """See `Queue`."""
        return intents.renew(owner, ids, now=now, lease=lease)

    def release(self, owner: str, *, now: datetime) -> int:
        """See `Queue`."""
        return intents.release(owner, now=now)

    def reap(self) -> None:
        """See `Queue`."""
        again, ended = intents.reap(now=clock.now())
        if again or ended:
            log.warning("expired leases of intents: %d taken back, %d given up", again, ended)

    def forget(self, attempt: Attempt) -> None:
        """See `Queue`."""
        self._recorder.forget(attempt)

    def close(self) -> None:
        """See `Queue`."""
        self._recorder.close()

    async def nodes_changed(self) -> None:
        """Ends the attempts whose node went offline: nothing waits for a worker that is known to be gone."""
        if self._away:
            gone = await in_thread(_offline, list(self._away))
            for node_id, name in gone:
                for told in self._away.get(node_id, ()):
                    if not told.done():
                        told.set_result(f"node {name} is offline")

    async def carry_out(self, intent: Intent) -> None:
        """One attempt, with its outcome written."""
        request_id.set(str(intent.row.operation_id))
        attempt = (intent.id, intent.fence)
        if intent.row.cancelled_at is not None:
            note = await self._call_off(intent)
            if note is None:
                await in_thread(intents.call_off_later, intent, seconds=BUS_PAUSE, now=clock.now())
                return
            await _over(intent)
            await in_thread(intents.called_off, {attempt: note}, now=clock.now())
            return
        log.info("%s (%s): start, fence %d", intent, intent.id, intent.fence)
        with metrics.attempt(f"intent_{intent.row.op}") as told:
            settlement = await self._attempt(intent)
            log.info("%s (%s): %s", intent, intent.id, settlement)
            # First: the settlement may open the next wave, which counts the nodes that serve these models.
            await _over(intent, settlement)
            await self._outcomes.put((attempt, settlement, await self._recorder.take(attempt)))
            told.outcome = _event(settlement)
        await sparing.settled(intent, settlement)

    async def _write(self, batch: Sequence[Written]) -> None:
        outcomes = {attempt: (settlement, ticks) for attempt, settlement, ticks in batch}
        for id, _ in await in_thread(intents.settle, outcomes, now=clock.now()):
            log.warning("intent %s: the lease was lost; its outcome is not recorded", id)

    async def _attempt(self, intent: Intent) -> Settlement:
        command = COMMANDS.get(intent.row.op)
        if command is None:
            return Ended(error=f"unknown operation {intent.row.op}")  # R4.29
        try:
            outcome = await self._patient(intent, command)
            if isinstance(outcome, Refused) and outcome.reply.interrupted:
                return Failed(outcome.reason)
            if isinstance(outcome, Done | Refused):
                return await command.conclude(self._bus, intent, outcome)
            return await self._without_answer(intent, outcome)
        except CommandFailed as failure:
            return Ended(error=failure.message)
        except Unclear as unclear:
            return Failed(str(unclear))
        except (LeaseLost, OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("%s (%s): unexpected failure", intent, intent.id)
            return Ended(error=f"internal error; the log has it under {request_id.get()}")

    async def _patient(self, intent: Intent, command: Command) -> Outcome[Any] | PutBack:
        """The outcome of the command, waited for beyond the time limit; PutBack if its node is gone."""
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._away.setdefault(intent.node.id, set()).add(told)
        try:
            return await first(_away(told), self._answer(intent, command))
        finally:
            self._away[intent.node.id].discard(told)
            if not self._away[intent.node.id]:
                del self._away[intent.node.id]

    async def _answer(self, intent: Intent, command: Command) -> Outcome[Any] | PutBack:
        def say(event: messages.ProgressEvent) -> None:
            self._recorder.add((intent.id, intent.fence), one_node.tick(intent.node, event))

        if (instead := await sparing.spare(intent, self._recorder, self._load_elsewhere)) is not None:
            return instead
        limit = command.limit()
        if intent.row.spares_requests:
            await in_thread(intents.command_sent, intent, limit, now=clock.now())
        sent = asyncio.create_task(command.send(self._bus, intent, 2 * limit, say))
        try:
            done, _ = await asyncio.wait({sent}, timeout=limit)
            if done:
                return sent.result()
            await self._overdue(intent, f"node {intent.node.name} has not answered within {limit:.0f} s")
            return await first(self._proof(intent, command), _result(sent))
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    async def _proof(self, intent: Intent, command: Command) -> Done[None]:
        """Ends when the worker's list proves that the command has been carried out."""
        worker = Worker(self._bus, str(intent.node.id), intent.node.name)
        while True:
            await asyncio.sleep(LOOK_FOR_PROOF_EVERY)
            found = await worker.backends()
            if isinstance(found, Done) and command.proven(
                intent, one_node.listed(intent.row.backend, found.reply)
            ):
                return Done(None)

    async def _overdue(self, intent: Intent, reason: str) -> datetime:
        said = f"{reason}; the worker may still be busy with it"
        return await in_thread(intents.overdue, intent, said, now=clock.now())

    async def _without_answer(self, intent: Intent, outcome: Outcome[Any] | PutBack) -> Settlement:
        match outcome:
            case PutBack():
                return outcome
            case BusDown(reason):
                return PutBack(reason, BUS_PAUSE)
            case NotSent(reason):
                return Failed(reason)
            case StillRunning(reason):
                since = await self._overdue(intent, reason)
                if clock.now() - since >= UNKNOWN_AFTER:
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

    async def _call_off(self, intent: Intent) -> str | None:
        """Asks the worker to stop; answers what is known of it then, None if it is to be asked again."""
        worker = Worker(self._bus, str(intent.node.id), intent.node.name)
        outcome = await worker.cancel(str(intent.row.operation_id))
        match outcome:
            case Done(reply):
                return "the worker stopped" if reply.found else "the worker was not at it any more"
            case Unheard():
                return "this worker cannot stop it: it goes on, and its result is discarded"
            case Refused(reason) | StillRunning(reason) | NoResponders(reason) | Unreadable(reason):
                return f"the worker may go on ({reason}); its result is discarded"
            case BusDown(reason):
                if clock.now() - (intent.row.cancelled_at or clock.now()) < CALL_OFF_FOR:
                    return None
                return f"the worker was not asked to stop ({reason}); its result is discarded"
            case _:
                assert_never(outcome)


def _event(settlement: Settlement) -> Event:
    """What figures call it, as for operations."""
    match settlement:
        case Ended(error):
            return Event.FAIL if error else Event.COMPLETE
        case Failed():
            return Event.POSTPONE
        case PutBack():
            return Event.WAIT
        case _:
            assert_never(settlement)


async def _over(intent: Intent, settlement: Settlement | None = None) -> None:
    """The worker's answer is never lost to this; `upgrade_drains.return_forgotten` sees to what fails."""
    try:
        await sparing.over(intent, settlement)
    except Exception:
        log.exception("%s (%s): its replicas are not back in the picks yet", intent, intent.id)


async def _away(told: "asyncio.Future[str]") -> PutBack:
    return PutBack(await asyncio.shield(told))


async def _result(sent: "asyncio.Task[Outcome[Any]]") -> Outcome[Any]:
    return await asyncio.shield(sent)


def _offline(node_ids: Collection[UUID]) -> list[tuple[UUID, str]]:
    gone = BackendNode.objects.filter(pk__in=node_ids, status="offline")
    return list(gone.values_list("id", "name"))


def _mark_unhealthy(node_id: UUID, reason: str) -> None:
    """A3, A5; a node that is gone meanwhile, or that another attempt has marked, needs no more."""
    try:
        services.mark_unhealthy(node_id, actor=CONTROLLER, now=clock.now(), reason=reason)
    except (errors.NotFound, errors.Conflict) as refusal:
        log.info("node %s is not marked unhealthy: %s", node_id, refusal.message)
