"""Unloads and deletions of a model (`model_unload`, `model_delete`): their creation and their run.

An operation for one node owns the model on that node. An operation for the cluster owns a key suffix of the
model, as each of its loads does, so unloads and loads exclude each other. This module chooses the nodes when
it creates the operation, with one target for each node.

One transaction, under the attempt's fence, drains the replicas before any command is sent. Their requests may
run until the row's deadline. Then up to `AT_ONCE` engines are stopped by key and address, again and again
until the worker confirms the stop or `STOP_WITHIN` has passed; only a confirmation removes the row. A target
ends with success or with an error, and the operation ends like its targets. An interrupted attempt is
repeated: every command is idempotent, and targets that have ended keep their result.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar, assert_never
from uuid import UUID

from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.quantities import counted
from localai_cluster.kit.transactions import committed
from localai_cluster.messaging.bus import Bus
from nodes.commands.commands import RECONNECT_GRACE, Worker
from nodes.commands.outcomes import (
    BusDown,
    CommandFailed,
    Done,
    NoResponders,
    Refused,
    StillRunning,
    Unreadable,
)
from nodes.decisions import decision_log
from nodes.decisions.decision_log import DecisionRecord, Section, State
from nodes.models import BEING_LOADED, BackendNode, BroughtModel, DecisionKind, NodeModel, NodeType
from nodes.models.replica import ALL_REPLICAS_SUFFIX, NodeModelQuerySet, load_key
from nodes.placement.evict import join_names
from nodes.placement.explain import MAX_SENTENCE_LENGTH, DecisionOutcome, truncate
from nodes.replicas import drains, engines, stops, terminations
from nodes.replicas.stops import StopResult
from operations import targets
from operations.executor.work import Work, in_thread
from operations.ledger import attempts
from operations.ledger.admission import Admission, OperationRequest, Requester, admit, exclusion_error
from operations.ledger.attempts import lock_owned
from operations.ledger.progress import Tick
from operations.models import Operation, OperationTarget, TargetStatus

log = logging.getLogger(__name__)

_REPLICA_COLUMNS = ("id", "node_id", "node__name", "replica_index", "state")


def record_unload(
    model_name: str,
    operation_id: UUID,
    *,
    because: str,
    node_id: UUID | None,
    index: int | None,
    now: datetime,
) -> None:
    """Record why replicas of the model are unloaded: all, those of one node, or one. Three statements."""
    rows = NodeModel.objects.of(model_name).values_list(*_REPLICA_COLUMNS)
    replicas = {row[0]: row[1:] for row in rows}
    of_operation = {
        "because": because,
        "node": None if node_id is None else str(node_id),
        "index": index,
    }
    snapshot_ref = decision_log.store_snapshot(
        {f"held/{model_name}": Section(replicas), f"unload/{operation_id}": Section(of_operation)}, now=now
    )
    explanation = decision_log.explanation_without_fleet(
        DecisionOutcome.UNLOADING, _sentence(replicas, of_operation)
    )
    decision_log.record(
        DecisionRecord(model_name, operation_id, explanation, snapshot_ref, DecisionKind.UNLOAD), now=now
    )


def replay_unload(state: State, model_name: str, operation_id: UUID | None) -> str | None:
    """Return the sentence of an unload's record from its snapshot; None if the snapshot lacks it."""
    request = state.get(f"unload/{operation_id}")
    return _sentence(state.get(f"held/{model_name}", {}), request) if request else None


def _sentence(replicas: Mapping[Any, Any], request: Mapping[str, Any]) -> str:
    terminating = [
        f"{index} on {node}"
        for node_id, node, index, state in replicas.values()
        if state in drains.UNLOADABLE_STATES
        and request["node"] in (None, str(node_id))
        and request["index"] in (None, index)
    ]
    outcome = f"replicas that leave: {join_names(terminating)}" if terminating else "no replica is there"
    return truncate(f"{request['because']}; {outcome}", MAX_SENTENCE_LENGTH)


UNLOAD_KIND, DELETE_KIND = drains.UNLOAD_KIND, drains.DELETE_KIND
MAX_GRACE = 3600
"""Maximum grace for running requests, in seconds."""

Targets = Sequence[tuple[UUID, str]]


@dataclass(frozen=True)
class UnloadRequest:
    """A request to unload or delete a model, on one node or, without a node, in the whole cluster.

    `grace`: seconds that running requests have before their engine is stopped, None = the setting. `reason`
    is stored with the operation.
    """

    model: str
    requester: Requester
    node: BackendNode | None = None
    index: int | None = None
    grace: float | None = None
    reason: str = ""


def unload(request: UnloadRequest, *, now: datetime) -> Admission:
    """Create the operation that unloads the model's replicas, or join the active operation.

    Raises NotFound without a replica, Conflict while the model is being loaded or deleted.
    """
    rows = drains.unloadable_replicas(
        request.model, node_id=request.node.id if request.node else None, index=request.index
    )
    targets = list(rows.order_by("node__name").values_list("node_id", "node__name").distinct())
    if not targets and not Operation.objects.active().filter(key=_key(request), kind=UNLOAD_KIND).exists():
        raise _not_loaded(request)
    admission = _admit(request, UNLOAD_KIND, targets, now)
    if admission.created:
        _record(request, "unload", admission.operation, now)
    elif request.grace is not None:
        drains.advance_deadline(rows, deadline=now + timedelta(seconds=request.grace))
    return admission


def evict(node: BackendNode, actor: str, *, now: datetime) -> Admission:
    """Unload the least recently used idle replica of the node (R2.55).

    Raises NotFound if no replica is idle.
    """
    row = least_recently_used([node.id]).first()
    if row is None:
        raise errors.NotFound(f"no replica on node {node.name} is idle")
    reason = "the least recently used on its node"
    request = UnloadRequest(
        row.model_name, Requester(actor), node=node, index=row.replica_index, reason=reason
    )
    return unload(request, now=now)


def least_recently_used(node_ids: Collection[UUID]) -> NodeModelQuerySet:
    """Return the idle replicas on these nodes, if healthy backend nodes, the longest unused first (R1.75)."""
    unused = NodeModel.objects.serving().filter(in_flight=0, node__node_type="backend")
    return unused.filter(node__in=node_ids).order_by("last_used", "id")


def delete(request: UnloadRequest, *, now: datetime) -> Admission:
    """Create the operation that unloads the model and deletes its files, on one or every approved node.

    Raises NotFound if no node can have the model, Conflict while it is being loaded or unloaded.
    """
    if request.node is not None:
        _refuse_while_loading(request, request.node)
        targets = [(request.node.id, request.node.name)]
    else:
        nodes = BackendNode.objects.filter(node_type=NodeType.BACKEND).exclude(status="pending")
        targets = list(nodes.order_by("name").values_list("id", "name"))
    if not targets:
        raise errors.NotFound("there is no node that could have files of a model")
    admission = _admit(request, DELETE_KIND, targets, now)
    if admission.created:
        _record(request, "deletion", admission.operation, now)
    return admission


def _record(request: UnloadRequest, kind: str, operation: Operation, now: datetime) -> None:
    reason = request.reason or f"{kind} asked for by {request.requester.actor}"
    node_id = request.node.id if request.node is not None else None
    record_unload(request.model, operation.id, because=reason, node_id=node_id, index=request.index, now=now)


def loading_there(model: str, node_id: UUID) -> UUID | None:
    """Return the operation of a load that has a slot for the model on the node; None if there is none."""
    rows = NodeModel.objects.of(model).filter(node_id=node_id, state__in=BEING_LOADED)
    return rows.values_list("owner_id", flat=True).first()


def _key(request: UnloadRequest) -> str:
    if request.node is None:
        return load_key(request.model, ALL_REPLICAS_SUFFIX)
    target = "model" if request.index is None else f"replica:{request.index}"
    return f"node:{request.node.id}:{target}:{request.model}"


def _admit(request: UnloadRequest, kind: str, targets: Targets, now: datetime) -> Admission:
    grace = conf.cluster().unload_grace if request.grace is None else request.grace
    payload: dict[str, Any] = {"model": request.model, "grace": grace, "replica_index": request.index}
    payload |= {"reason": request.reason} if request.reason else {}
    operation_request = OperationRequest(
        kind,
        key=_key(request),
        element=request.model,
        payload=payload,
        by=request.requester,
        node=(request.node.id, request.node.name) if request.node else None,
        targets=targets,
    )
    return admit(operation_request, now=now)


def _not_loaded(request: UnloadRequest) -> Exception:
    if request.node is None:
        active = (
            Operation.objects.active().sharing(_key(request), request.model).order_by("created_at").first()
        )
        if active is not None:
            return exclusion_error(active)
        return errors.NotFound(f"model {request.model} is not loaded on any node")
    _refuse_while_loading(request, request.node)
    replica = "" if request.index is None else f" as replica {request.index}"
    state = "" if request.node.status == "healthy" else f", which is {request.node.status}"
    return errors.NotFound(f"model {request.model} is not loaded{replica} on node {request.node.name}{state}")


def _refuse_while_loading(request: UnloadRequest, node: BackendNode) -> None:
    if (operation := loading_there(request.model, node.id)) is not None:
        raise errors.Conflict(
            f"model {request.model} is being loaded on node {node.name} (operation {operation}):"
            " wait for it, or cancel it"
        )


ACTOR = "system"


def report_stuck(*, now: datetime) -> int:
    """Create an unload for each replica whose stop stays unconfirmed; return the number of unloads.

    Until then the stops of replicas without an operation are repeated without a report. The unload then owns
    the row. If it fails too, it stays in the inbox with the reason, and controllers repeat the stops.
    """
    created = 0
    for row in terminations.overdue_stops(now=now):
        reason = (
            f"its engine was to go ({row.get_reason_display().lower()}) and was not stopped: {row.stop_error}"
        )
        request = UnloadRequest(
            row.model_name, Requester(ACTOR), node=row.node, index=row.replica_index, grace=0, reason=reason
        )
        try:
            created += unload(request, now=now).created
        except errors.ClusterError as refusal:
            log.info("%s on %s: %s; %s", row, row.node.name, reason, refusal.message)
    return created


R = TypeVar("R")

STOP_WITHIN = 45.0
"""Seconds for which a stop is repeated until it is confirmed; a worker has 20 seconds for one stop."""
SILENT_FOR = RECONNECT_GRACE
"""Seconds without a listener on the bus after which a worker counts as unreachable."""
REPEAT_SECONDS = 2.0
POLL_SECONDS = 0.25
AT_ONCE = 64
"""Maximum number of nodes that one operation contacts in parallel."""


@dataclass(frozen=True)
class UnloadTarget:
    """A target of an unload: a node with its replicas to stop."""

    node_id: UUID
    name: str
    status: str | None
    """Status of the node; None if it is no longer registered."""
    replicas: tuple[NodeModel, ...]

    def why_unreachable(self) -> str:
        """Why no command can be sent to the node; empty if one can."""
        if self.status is None:
            return "the node is no longer registered"
        return "the node is offline, so what runs there is not known" if self.status == "offline" else ""


@dataclass
class DrainWatch:
    """Sets an event for each replica that is idle or past its deadline; one query for all replicas."""

    work: Work
    parts: Sequence[UnloadTarget]
    reached: dict[UUID, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reached = {replica.id: asyncio.Event() for part in self.parts for replica in part.replicas}

    async def watch(self) -> None:
        """Poll until every replica is idle or past its deadline."""
        reported: dict[UUID, int] = {}
        while waiting := [id for id, event in self.reached.items() if not event.is_set()]:
            rows, now = await in_thread(drains.running_requests, waiting), clock.now()
            for id in waiting:
                requests, until = rows.get(id, (0, None))
                if not requests or until is None or until <= now:
                    self.reached[id].set()
            for part in self.parts:
                running = sum(rows.get(replica.id, (0, None))[0] for replica in part.replicas)
                if running and reported.get(part.node_id) != running:
                    reported[part.node_id] = running
                    message = f"waiting for {counted(running, 'request')} on {part.name}"
                    self.work.progress(_tick(part, "draining", message))
            await asyncio.sleep(POLL_SECONDS)


class UnloadModel:
    """Handler of `model_unload`; one instance serves all unloads of its controller."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the targets that have not ended; raise CommandFailed if any of them failed."""
        parts = await in_thread(_drain_targets, work)
        drain_watch, bound = DrainWatch(work, parts), asyncio.Semaphore(AT_ONCE)
        await _run_all(
            drain_watch.watch(), *(self._run_target(work, part, drain_watch, bound) for part in parts)
        )
        ended_targets = await in_thread(_targets, work)
        failed = [
            f"{part.node_name}: {part.error}" for part in ended_targets if part.status == TargetStatus.ERROR
        ]
        if failed:
            raise CommandFailed("; ".join(failed))
        return {"nodes": [part.node_name for part in ended_targets]}

    async def _run_target(
        self, work: Work, part: UnloadTarget, drain_watch: DrainWatch, bound: asyncio.Semaphore
    ) -> None:
        stops = (self._unload(work, part, replica, drain_watch, bound) for replica in part.replicas)
        problems = [problem for problem in await _run_all(*stops) if problem]
        problem = "; ".join(problems) or part.why_unreachable()
        if not problem:
            async with bound:
                problem = await self.finish_node(work, part)
        if problem:
            log.warning("%s %s on %s: %s", work.operation.kind, work.operation.element, part.name, problem)
        status = TargetStatus.ERROR if problem else TargetStatus.SUCCESS
        await in_thread(attempts.end_target, *work.attempt, part.node_id, status, problem, now=clock.now())

    async def finish_node(self, work: Work, part: UnloadTarget) -> str:
        """Do what is left on the node after the stops; return the error, empty for success."""
        return ""

    async def _unload(
        self,
        work: Work,
        part: UnloadTarget,
        replica: NodeModel,
        drain_watch: DrainWatch,
        bound: asyncio.Semaphore,
    ) -> str:
        """Stop one engine and remove its row; return the error, empty for success."""
        await drain_watch.reached[replica.id].wait()

        async def stop() -> StopResult | None:
            await work.report(_tick(part, "stopping", f"stopping {replica} on {part.name}"))
            return await stops.send_stop(self._bus, replica, part.name)

        async with bound:
            stopped = await _until_confirmed(stop)
        if stopped is None:
            return await in_thread(_reason_not_stopped, part, replica)
        if stopped.gone:
            await in_thread(engines.confirm_end, replica.id, stop_sent=stopped.sent_at)
            return ""
        await in_thread(stops.record_failure, replica, stopped.reason, now=clock.now())
        return f"{replica} may still run: {stopped.reason}"


class DeleteModel(UnloadModel):
    """Handler of `model_delete`: unloads the model, then deletes its files on nodes where it has ended."""

    async def finish_node(self, work: Work, part: UnloadTarget) -> str:
        model = work.operation.element

        async def delete() -> StopResult | None:
            await work.report(_tick(part, "deleting", f"removing the files of {model} on {part.name}"))
            if await in_thread(loading_there, model, part.node_id) is not None:
                return StopResult(True, f"{model} is being loaded there; its files stay")
            answer = await Worker(self._bus, str(part.node_id), part.name).delete_model(model)
            match answer:
                case Done():
                    await in_thread(forget_staged_files, part.node_id, model)
                    return StopResult(True)
                case Refused(reason) | Unreadable(reason):
                    return StopResult(True, reason)
                case NoResponders(reason):
                    return StopResult(False, reason, silent=True)
                case StillRunning(reason) | BusDown(reason):
                    return StopResult(False, reason)
                case _:
                    assert_never(answer)

        deletion = await _until_confirmed(delete)
        return deletion.reason if deletion else ""


def forget_staged_files(node_id: UUID, model_name: str) -> None:
    """Delete the stored number of bytes of the model's files, because they were deleted on the node."""
    with committed("unload.files"):
        BroughtModel.objects.filter(node_id=node_id, model_name=model_name).delete()


async def _until_confirmed(command: Callable[[], Awaitable[StopResult | None]]) -> StopResult | None:
    """Repeat a command until its result is final, the worker is unreachable, or `STOP_WITHIN` has passed."""
    began, silent_since = clock.monotonic(), None
    while True:
        stopped, now = await command(), clock.monotonic()
        if stopped is None or stopped.gone:
            return stopped
        silent_since = (silent_since or now) if stopped.silent else None
        if now - began >= STOP_WITHIN or (silent_since and now - silent_since >= SILENT_FOR):
            return stopped
        await asyncio.sleep(REPEAT_SECONDS)


def _drain_targets(work: Work) -> list[UnloadTarget]:
    """Drain the replicas of all targets; return the targets that have not ended yet.

    Raises LeaseLost before any write if another attempt owns the operation.
    """
    payload, now = work.operation.payload, clock.now()
    with committed("unload.begin"):
        lock_owned(*work.attempt)
        unfinished = [part for part in _targets(work) if part.status not in targets.ENDED]
        ids = [part.node_id for part in unfinished]
        rows = drains.drain_for_unload(
            work.operation.element,
            ids,
            index=payload.get("replica_index"),
            deadline=now + timedelta(seconds=payload["grace"]),
            operation_id=work.id,
            now=now,
        )
        states = dict(BackendNode.objects.filter(pk__in=ids).values_list("id", "status"))
    return [
        UnloadTarget(
            part.node_id,
            part.node_name,
            states.get(part.node_id),
            tuple(row for row in rows if row.node_id == part.node_id),
        )
        for part in unfinished
    ]


def _targets(work: Work) -> list[OperationTarget]:
    return list(OperationTarget.objects.filter(operation_id=work.id).order_by("node_name"))


def _reason_not_stopped(part: UnloadTarget, replica: NodeModel) -> str:
    """Return why no stop was sent: the replica is in use again, or its row was removed with the node."""
    if drains.is_in_use(replica):
        return f"{replica} is in use again: try again"
    status = BackendNode.objects.filter(pk=part.node_id).values_list("status", flat=True).first()
    return UnloadTarget(part.node_id, part.name, status, ()).why_unreachable()


async def _run_all(*work: Awaitable[R]) -> list[R]:
    """Run all awaitables concurrently; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tick(part: UnloadTarget, phase: str, message: str) -> Tick:
    return Tick(phase, message, node_id=part.node_id, node_name=part.name)
