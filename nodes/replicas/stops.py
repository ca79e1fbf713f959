"""Stops of engines: which stops are due, who sends them, and what follows until the worker confirms the end.

An unload stops its own engines. One controller at a time claims all other engines: those of ended load
attempts, those of ended operations, and those of departed replicas as soon as their node can be reached. Each
outcome names the row of the engine, so it does not affect a later engine in the same slot.

`model.stop` names key and address, so it does not affect an engine that was started since under the same key.
A worker without this command gets a stop of the key, and `models.running` reports the result. Every request
is idempotent: after a lost or late reply, one more request finds that the engine has ended. Only a
confirmation ends an engine, except at a stock worker, which cannot confirm the end.

A drain of a node is over when the node has no replicas and no engines of former replicas. From then on a
controller stops the engines that the node's worker lists, until the list is empty. A result is written only
while the same drain lasts: engines of a resumed node are not stopped.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When, Window
from django.db.models.functions import RowNumber

from localai_cluster.kit import backoff, cancellation, clock, names
from localai_cluster.kit.leases import claim_rows
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.metrics import passes
from localai_cluster.rpc.client import probe
from localai_cluster.rpc.messages import Sign
from nodes.commands.commands import PING_TIMEOUT, Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.models import BackendNode, NodeModel, NodeType, OwnerKind, Phase, PhaseReason
from nodes.models.node import BackendNodeQuerySet
from nodes.registry import dial_targets
from nodes.replicas import drains, engines, slots, states, terminations
from nodes.replicas.states import ReplicaEvent
from operations.changes import events
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

POLL_EVERY = 5.0
"""Seconds between two passes without a wake-up."""
AT_ONCE = 64
"""Maximum number of engines and drained nodes that are being stopped when a pass claims no more."""
AT_ONCE_ON_NODE = 16
"""Maximum number of engines of one node that controllers stop at once: its worker may hang."""
_GATHER_SECONDS = 1.0
"""Seconds for which wake-ups are collected into one pass: nodes change more often than drains end."""
_POLL_AFTER_STOP_SECONDS = 1.0
_PROBE_TIMEOUT = 1.0
"""Seconds for a probe of an engine's port (C4)."""

StillDue = Callable[[], Awaitable[bool]]
"""Function that returns True while a stop is still due; it is called before each command after the first."""
NO_CONFIRMATION = "termination not confirmed"


@dataclass(frozen=True)
class StopResult:
    """The result of a stop. `gone`: the engine has certainly ended; otherwise `reason` states why not.

    `silent`: the worker does not answer at all. `sent_at`: time of the stop that ended the engine; None if
    the engine may have ended before.
    """

    gone: bool
    reason: str = ""
    silent: bool = False
    sent_at: datetime | None = None


GONE = StopResult(True)


async def stop_exactly(worker: Worker, process_key: str, address: str, is_still_due: StillDue) -> StopResult:
    """Stop the engine with this key at this address; an empty address is unknown."""
    sent_at = clock.now()
    outcome = await worker.stop_model(process_key, address)
    if isinstance(outcome, Refused) and outcome.reply.matched and outcome.reply.address:
        recorded_address = outcome.reply.address
        if address and _port(recorded_address) != _port(address):
            return GONE  # another process has the key now, so this one has ended
        if recorded_address != address and await is_still_due():
            # A stock worker compares with its own form of the address (nats.md §4.5).
            outcome = await worker.stop_model(process_key, recorded_address)
    match outcome:
        case Done(reply):
            return StopResult(True, sent_at=sent_at if reply.matched else None)
        case NoResponders(reason):
            if not await is_still_due():
                return StopResult(False, reason)
            return await _stop_by_key(worker, process_key, address)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            return StopResult(False, reason)
        case _:
            assert_never(outcome)


async def _stop_by_key(worker: Worker, process_key: str, address: str) -> StopResult:
    """Stop the engine of a worker that lacks `model.stop` or does not listen (nats.md §6.3)."""
    if address:
        await worker.unload_model(process_key.rpartition("#")[0], address)
    await worker.stop(process_key)
    answer = await worker.running()
    match answer:
        case Done(reply):
            keys = {messages.process_key(model.model_id, model.replica_index) for model in reply.models}
            return StopResult(False, NO_CONFIRMATION) if process_key in keys else GONE
        case NoResponders(reason):
            # A worker that answers other requests has received the stop but cannot confirm it: that must do.
            is_connected = isinstance(await worker.backends(PING_TIMEOUT), Done)
            return GONE if is_connected else StopResult(False, reason, silent=True)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            return StopResult(False, reason)
        case _:
            assert_never(answer)


def _port(address: str) -> str:
    return address.rpartition(":")[2]


_MAX_ERROR_LENGTH = 240
_MAX_PAUSE_SECONDS = 300.0
_CLAIM_DURATION = timedelta(seconds=60)
"""Duration of a claim: longer than one stop of an engine, or one check of a drained node."""
_REACHABLE_STATUSES = ("healthy", "unhealthy", "draining")
"""Statuses of nodes to whose worker a stop can be sent."""
_STOPPABLE_PHASES = (Phase.STOPPING, Phase.DEPARTED)
_REASONS_WITHOUT_UNLOAD = (PhaseReason.LOAD_FAILED, PhaseReason.NODE_LEFT)
"""Reasons of engines that are not replicas, so that no unload stops them."""


def _is_drained(now: datetime) -> Q:
    return Q(in_flight=0) | Q(deadline__lte=now)


def claim_due(limit: int, *, now: datetime) -> list[NodeModel]:
    """Claim the engines whose stop is due, except those that an operation stops; return them.

    First stops come before repeated ones, whose worker may hang. Running stops count toward the limit of
    their node.
    """
    is_lost = Q(phase=Phase.DRAINING, owner_kind=OwnerKind.CONTROLLERS)
    is_departed = Q(phase=Phase.DEPARTED, node__status__in=_REACHABLE_STATUSES)
    due = ((Q(phase=Phase.TERMINATING) | is_lost) & _is_drained(now)) | (
        (Q(phase=Phase.STOPPING) | is_departed) & (Q(next_stop_at__isnull=True) | Q(next_stop_at__lte=now))
    )
    is_free = Q(claimed_until__isnull=True) | Q(claimed_until__lte=now)
    # No operation stops a replica that controllers own: a running unload stops those that it has drained.
    is_controllers = Q(owner_kind=OwnerKind.CONTROLLERS)
    is_left = Q(reason__in=_REASONS_WITHOUT_UNLOAD) | is_controllers | drains.has_no_operation()
    rows = NodeModel.engines.filter(due, is_left).order_by("stop_attempts", "id")
    running_first = Case(When(is_free, then=1), default=0)
    place = Window(RowNumber(), partition_by="node_id", order_by=[running_first, "stop_attempts", "id"])
    first_of_nodes = rows.order_by().annotate(place=place).filter(place__lte=AT_ONCE_ON_NODE)
    return claim_rows(
        rows.filter(is_free, pk__in=first_of_nodes.values("pk")),
        limit=limit,
        **engines.CONTROLLER_OWNER_COLUMNS,
        claimed_until=now + _CLAIM_DURATION,
    )


def record_sent(engine: NodeModel, *, now: datetime) -> bool:
    """Record that a stop is about to be sent; return False if it must not be sent.

    That is so if the engine has ended, serves again, has departed, or has running requests: the caller's
    check may be old.
    """
    first = now + states.UNCONFIRMED_STOP_LIMIT
    deadline = Case(When(phase__in=_STOPPABLE_PHASES, then=F("deadline")), default=Value(first))
    seen = NodeModel.engines if engine.phase == Phase.DEPARTED else NodeModel.objects
    rows = seen.filter(Q(phase__in=_STOPPABLE_PHASES) | _is_drained(now), pk=engine.id)
    attempts = F("stop_attempts") + 1
    return bool(engines.apply_event(rows, ReplicaEvent.STOP_SENT, stop_attempts=attempts, deadline=deadline))


def is_due(engine: NodeModel) -> bool:
    """Return True while the end of the engine is unconfirmed; until then no other engine gets its slot."""
    return NodeModel.engines.filter(pk=engine.id, phase__in=_STOPPABLE_PHASES).exists()


async def send_stop(bus: Bus, engine: NodeModel, node_name: str) -> StopResult | None:
    """Send one stop and return its result; return None if no stop must be sent (`record_sent`)."""
    if not await in_thread(record_sent, engine, now=clock.now()):
        return None
    worker = Worker(bus, str(engine.node_id), node_name)
    return await stop_exactly(worker, engine.process_key, engine.address, lambda: in_thread(is_due, engine))


def record_failure(engine: NodeModel, error: str, *, now: datetime) -> None:
    """Store why the engine may still run, and the time of the next stop."""
    with transaction.atomic():
        rows = NodeModel.engines.filter(pk=engine.id)
        row = rows.filter(phase__in=_STOPPABLE_PHASES).select_for_update(of=("self",)).first()
        if row is None:
            return
        pause = backoff.delay(row.stop_attempts + 1, first=1.0, longest=_MAX_PAUSE_SECONDS)
        engines.apply_event(
            rows,
            ReplicaEvent.STOP_FAILED,
            stop_error=names.to_single_line(error[:_MAX_ERROR_LENGTH]),
            next_stop_at=now + timedelta(seconds=pause),
            claimed_until=None,
        )
        events.notify(events.NODES, str(row.node_id))


class Stopper(PeriodicTask):
    """Periodic task of a controller that stops engines: after each change of nodes, and regularly.

    Each stop is claimed, so that one controller at a time contacts a worker. No pass waits for the stops that
    it begins: a worker that hangs delays no stop on another node.
    """

    def __init__(self, bus: Bus) -> None:
        super().__init__(
            "stops", self._run_step, interval=POLL_EVERY, gather=_GATHER_SECONDS, retry_on=(DatabaseError,)
        )
        self._bus = bus
        self._stops: set[asyncio.Task[None]] = set()
        self._has_ended = False
        """True if a stop has ended since the last pass began; a failed one is due again soon."""

    async def run(self) -> None:
        """Run the passes until `stop` or cancellation; then cancel the running stops, whose claims expire."""
        try:
            await super().run()
        finally:
            await cancellation.cancel_and_wait(*self._stops)

    async def _run_step(self) -> float | None:
        has_ended, self._has_ended = self._has_ended, False
        with passes.count_pass("stops"):
            begun = await self._begin_stops()
        return _POLL_AFTER_STOP_SECONDS if begun or has_ended else None

    async def run_pass(self) -> int:
        """Run one pass and wait for the stops that it begins; return their number."""
        begun = await self._begin_stops()
        await asyncio.gather(*begun)
        return len(begun)

    async def _begin_stops(self) -> "Sequence[asyncio.Task[None]]":
        """End abandoned loads, return abandoned replicas to service, and begin the due stops.

        Without the bus no stop is sent, but replicas still return to service, because requests reach engines
        without the bus.
        """
        now = clock.now()
        for row in await in_thread(slots.end_abandoned_loads, now=now):
            log.info("the slot of %s on %s is given up: its load has ended", row, row.node.name)
        for row in await in_thread(engines.forget_departed, now=now):
            log.warning("%s counts as ended: its node has been away since %s", row, row.updated_at)
        for row in await in_thread(drains.return_abandoned):
            log.info("%s serves again: its unload ended before it was stopped", row)
        free = AT_ONCE - len(self._stops)
        if free <= 0 or not self._bus.connected:
            return []
        due = await in_thread(claim_due, free, now=now)
        nodes = await in_thread(claim_drained_nodes, free, now=now)
        targets: list[NodeModel | BackendNode] = [*due, *nodes]
        begun = [asyncio.create_task(self._run_stop(target), name="stop") for target in targets]
        for task in begun:
            self._stops.add(task)
            task.add_done_callback(self._forget)
        return begun

    async def _run_stop(self, target: NodeModel | BackendNode) -> None:
        try:
            await (self._stop(target) if isinstance(target, NodeModel) else stop_engines(self._bus, target))
        except Exception as failure:
            # Its claim expires.
            log.warning("an engine was not stopped: %r", failure)

    def _forget(self, stop: "asyncio.Task[None]") -> None:
        self._stops.discard(stop)
        self._has_ended = True
        self.wake()  # another stop may be due, for which there was no capacity

    async def _stop(self, engine: NodeModel) -> None:
        """Send the stop to an engine that this controller has claimed."""
        if (
            engine.reason == PhaseReason.LOST
            and await self._answers(engine)
            and await in_thread(terminations.restore_lost, engine)
        ):
            log.info("%s serves again: its engine answers", engine)
            return
        name = await in_thread(_node_name, engine.node_id)
        stopped = await send_stop(self._bus, engine, name)
        if stopped is None:
            return
        if stopped.gone and not engines.may_still_start(engine, clock.now()):
            await in_thread(engines.confirm_end, engine.id, stop_sent=stopped.sent_at)
            return
        if stopped.reason:
            log.info("engine %s on %s: %s", engine, name, stopped.reason)
        await in_thread(record_failure, engine, stopped.reason, now=clock.now())

    async def _answers(self, engine: NodeModel) -> bool:
        """Return True if the engine serves its model: then it was unreachable only when a request came."""
        proof = await in_thread(_bearer, engine.node_id)
        return proof is not None and await probe(engine.address, proof, _PROBE_TIMEOUT) is Sign.ALIVE


def _node_name(node_id: UUID) -> str:
    return BackendNode.objects.filter(pk=node_id).values_list("name", flat=True).first() or ""


def _bearer(node_id: UUID) -> str | None:
    """Return the token for calls to engines of the node; None if the node was removed."""
    node = BackendNode.objects.filter(pk=node_id).values_list("engine_token", "weak_identity").first()
    return None if node is None else dial_targets.bearer_token(*node)


_MAX_STORED_ERROR_LENGTH = 255
_MAX_STOPS = 256
"""Maximum number of engines of one node that one pass stops; the next pass stops the rest."""
_STOPPING_POLL, _SILENT_POLL, _STOCK_POLL = 1.0, 10.0, 60.0
"""Seconds until the next check of a drained node, by its state: engines stop, the worker is silent, or it
cannot list engines."""
NO_ENGINE_LIST_MESSAGE = "its worker cannot tell what runs there"


def claim_drained_nodes(limit: int, *, now: datetime) -> list[BackendNode]:
    """Claim the drained nodes whose check is due, beginning with the longest drained."""
    due = BackendNode.objects.filter(
        Q(engines_due_at__isnull=True) | Q(engines_due_at__lte=now),
        ~Exists(NodeModel.engines.filter(node=OuterRef("pk"))),
        status="draining",
        engines_gone_at__isnull=True,
    )
    nodes = due.order_by("drained_at").only("id", "name", "node_type", "drained_at")
    return claim_rows(nodes, limit=limit, engines_due_at=now + _CLAIM_DURATION)


def is_same_drain(node: BackendNode) -> bool:
    """Return True if this drain of the node still lasts: engines of a resumed node must not be stopped."""
    return _same_drain(node).exists()


def confirm_empty(node: BackendNode, *, now: datetime) -> None:
    """Record that no engine runs on the node: it is safe to power off."""
    with transaction.atomic():
        if _same_drain(node).update(engines_gone_at=now, engines_error="", engines_due_at=None):
            events.notify(events.NODES, str(node.id))


def schedule_check(node: BackendNode, error: str, *, due_at: datetime) -> None:
    """Store the time of the next check and the error.

    `error` states why the engines on the node are unknown; it is empty while engines stop.
    """
    error = names.to_single_line(error[:_MAX_STORED_ERROR_LENGTH])
    nodes = _same_drain(node)
    with transaction.atomic():
        if nodes.exclude(engines_error=error).update(engines_error=error):
            events.notify(events.NODES, str(node.id))
        nodes.update(engines_due_at=due_at)


def _same_drain(node: BackendNode) -> BackendNodeQuerySet:
    return BackendNode.objects.filter(pk=node.id, drained_at=node.drained_at, engines_gone_at__isnull=True)


async def stop_engines(bus: Bus, node: BackendNode) -> None:
    """Stop the engines on a claimed drained node; store the result and the time of the next check."""
    if node.node_type == NodeType.AGENT:
        await in_thread(confirm_empty, node, now=clock.now())
        return
    worker = Worker(bus, str(node.id), node.name)
    answer = await worker.running()
    if not await in_thread(is_same_drain, node):
        return
    match answer:
        case Done(reply) if not reply.models:
            log.info("node %s is drained and runs no engine", node.name)
            await in_thread(confirm_empty, node, now=clock.now())
            return
        case Done(reply):
            error, pause = await _stop_all(worker, reply.models[:_MAX_STOPS]), _STOPPING_POLL
        case NoResponders(reason):
            error, pause = await _without_engine_list(worker, node, reason)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            error, pause = reason, _SILENT_POLL
        case _:
            assert_never(answer)
    due_at = clock.now() + timedelta(seconds=pause)
    await in_thread(schedule_check, node, error, due_at=due_at)


async def _stop_all(worker: Worker, models: tuple[messages.RunningModel, ...]) -> str:
    """Send a stop to each engine; return the first error, empty if there is none."""
    stops = [_stop_one(worker, model) for model in models]
    return next((error for error in await asyncio.gather(*stops) if error), "")


async def _stop_one(worker: Worker, model: messages.RunningModel) -> str:
    key = messages.process_key(model.model_id, model.replica_index)
    outcome = await worker.stop_model(key, model.address)
    match outcome:
        case Done() | StillRunning():
            return ""
        case NoResponders():
            await worker.stop(key)
            return ""
        case Refused(reason) | Unreadable(reason) | BusDown(reason):
            return f"{key}: {reason}"
        case _:
            assert_never(outcome)


async def _without_engine_list(worker: Worker, node: BackendNode, reason: str) -> tuple[str, float]:
    """Return the error and the next check's delay in seconds if `models.running` gets no proper reply."""
    if isinstance(await worker.backends(PING_TIMEOUT), NoResponders | BusDown | StillRunning):
        return reason, _SILENT_POLL
    if await in_thread(is_same_drain, node):
        await worker.stop("")
    return NO_ENGINE_LIST_MESSAGE, _STOCK_POLL
