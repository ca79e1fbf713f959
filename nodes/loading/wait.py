"""Waiting for a cold load: all requests of this process for one model share one wait.

A request that finds no replica joins the model's load with `Loads.join`. The first request for a model admits
the operation `model_load` (or joins the active operation of another process); later requests attach to it. A
turn ends with a wake-up or a poll every two seconds; then all requests pick again, because the rows decide
and not the wake-up. A failed load is an error for all its requests. New requests get the same error for some
seconds (the grace), so that not every request loads a broken model again. If a client disconnects, the
operation continues for the remaining requests.
"""

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Protocol

from django.db import DatabaseError

from localai_cluster.accounts.principals import Principal
from localai_cluster.kit import cancellation, clock, conf, outage
from localai_cluster.kit.errors import ClusterError, Conflict, Unavailable
from nodes.loading.load_attempts import LoadFailed, refusals
from nodes.loading.load_request import KIND, any_replica
from nodes.models import BackendNode, NodeEvent
from nodes.models.replica import load_key
from operations.causes import cause_of
from operations.executor.work import WakeUps, in_thread
from operations.ledger import admission
from operations.ledger.admission import Requester
from operations.models import TERMINAL, UNDISMISSED_FAILURE, Operation, Status

logger = logging.getLogger(__name__)

POLL_EVERY = 2.0
"""Seconds between two polls of the row without a wake-up (C33)."""
_NEED_EXTENSION_SECONDS = 60.0
"""A request without a time limit keeps its load from being abandoned for this long; each poll renews it."""
MIN_RETRY_AFTER = 5.0
"""Minimum seconds of Retry-After in the response "still loading" (C35)."""
MAX_RETRY_AFTER = 300.0
"""Maximum seconds of Retry-After in the response "still loading" (C35)."""

_SHOWN_STEPS = frozenset({"installing", "staging", "loading"})


class StillLoading(Unavailable):
    """The model is still being loaded."""

    code = "model_loading"


class WaitingRequest(Protocol):
    """The part of an inference request that waiting for a load reads."""

    @property
    def model(self) -> str: ...
    @property
    def wait_until(self) -> float:
        """The deadline of the wait, on the monotonic clock."""

    @property
    def principal(self) -> Principal: ...
    @property
    def requester(self) -> Requester: ...


def eta_seconds(operation: Operation, now: datetime) -> float | None:
    """Return the remaining bytes divided by the average rate, in seconds; None until a rate is known (R2.23).

    A load that sends files reports the rate itself, without the bytes that the node already had.
    """
    if operation.phase == "staging":
        remaining = operation.total_bytes - operation.current_bytes
        return (
            remaining / operation.bytes_per_second
            if remaining > 0 and operation.bytes_per_second > 0
            else None
        )
    elapsed = (now - operation.started_at).total_seconds() if operation.started_at else 0.0
    if not 0 < operation.current_bytes < operation.total_bytes or elapsed < 1:
        return None
    return (operation.total_bytes - operation.current_bytes) * elapsed / operation.current_bytes


def may_see_nodes(principal: Principal) -> bool:
    """Return True if responses to the caller may name nodes: administrators always, others by a setting."""
    return principal.is_admin or conf.cluster().expose_node_header


def loading_body(
    model: str, operation: Operation, now: datetime, *, shows_node: bool = False
) -> dict[str, Any]:
    """Return the `loading` object of `contract/http-api.md` §6.1; the node is included if `shows_node`."""
    body: dict[str, Any] = {
        "model": model,
        "state": _state(operation),
        "progress": operation.progress,
        "bytes_sent": operation.current_bytes,
        "total_bytes": operation.total_bytes,
        "file_index": operation.file_index,
        "total_files": operation.total_files,
    }
    if operation.node_name and shows_node:
        body["node"] = operation.node_name
    eta = eta_seconds(operation, now)
    if eta is not None:
        body["eta_seconds"] = math.ceil(eta)
    return body


def still_loading_error(
    model: str, operation: Operation, reason: str, budget: float, now: datetime, *, shows_node: bool = False
) -> StillLoading:
    """Return the error for a request whose wait has ended while the load continues (R2.22).

    `reason` is why the load waits. `budget` is Retry-After in seconds if there is no estimate.
    """
    eta = eta_seconds(operation, now)
    details = [f"{operation.progress:.0f}%"] if operation.progress else []
    details += [f"ETA ~{math.ceil(eta)}s"] if eta is not None else []
    message = f"model {model} is {_state(operation)}"
    message += f" on node {operation.node_name}" if operation.node_name and shows_node else ""
    message += f" ({', '.join(details)})" if details else ""
    message += f": {reason}" if reason else ""
    if operation.kind != KIND:
        kind, row_id = operation.kind, operation.id
        message = f"model {model} is not loaded while its {kind} is in progress (operation {row_id})"
    retry_after = min(max(budget if eta is None else eta, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
    loading = loading_body(model, operation, now, shows_node=shows_node)
    return StillLoading(message, retry_after=retry_after, loading=loading)


def _state(operation: Operation) -> str:
    if operation.status == Status.FAILED:
        return "failed"
    return (
        operation.phase
        if operation.status == Status.PROCESSING and operation.phase in _SHOWN_STEPS
        else "pending"
    )


def load_failure(model: str, operation: Operation, now: datetime, grace: float) -> LoadFailed:
    """Return the error of a failed load for its waiting requests; Retry-After is the rest of the grace."""
    cause = operation.error or operation.message or operation.status
    age = (now - operation.finished_at).total_seconds() if operation.finished_at else 0.0
    return LoadFailed(_failure_text(model, cause), retry_after=max(math.ceil(grace - age), 1))


def _failure_text(model: str, cause: str) -> str:
    return f"loading model {model} failed: {cause}"


def without_nodes(failure: LoadFailed, model: str) -> LoadFailed:
    """Return the failure for callers who may not see nodes: only its cause, without names and addresses."""
    try:
        cause = _without_names(failure.message.removeprefix(_failure_text(model, "")))
    except DatabaseError:
        return LoadFailed(retry_after=2)
    return LoadFailed(_failure_text(model, cause), **failure.data)


def _without_names(text: str) -> str:
    """Return the text with names of nodes, addresses and figures removed. At most one query."""
    if not text:
        return ""
    names = BackendNode.objects.values_list("name", flat=True)
    return cause_of(text, [name for name in names.iterator() if name in text], every_name=True)


@dataclass
class ModelWait:
    """The wait of this process for one model, shared by at least one request."""

    turn: "asyncio.Future[bool]"
    operation: Operation
    """The operation that the requests wait for, as last read; a pending load before the first read. It may be
    an unload or deletion, which must end before the model can be loaded."""
    deadlines: list[float] = field(default_factory=list)
    """Deadlines of the waiting requests, on the monotonic clock; infinite without a limit."""
    public_failure: LoadFailed | None = None
    """The failure of the turn for callers who may not see nodes."""
    public_reason: "tuple[str, asyncio.Task[str]] | None" = None
    """Why the load waits, with the task that removes the names of nodes from this text."""
    row_deadline: float = 0.0
    """Time until which the row says that the operation is needed, on the monotonic clock."""
    task: "asyncio.Task[None] | None" = None

    async def next_turn(self, request: WaitingRequest) -> bool:
        """Wait until the request should pick again; return True if the load has ended.

        Raises StillLoading at the request's deadline. Raises LoadFailed if the load has failed now or within
        the grace.
        """
        shows_node = may_see_nodes(request.principal)
        try:
            seconds = request.wait_until - clock.monotonic()
            async with asyncio.timeout(None if math.isinf(seconds) else max(seconds, 0)):
                return await asyncio.shield(self.turn)
        except TimeoutError:
            budget, now = conf.cluster().model_load_wait, clock.now()
            reason = self.operation.message if shows_node else await self._public_reason()
            raise still_loading_error(
                request.model, self.operation, reason, budget, now, shows_node=shows_node
            ) from None
        except LoadFailed:
            if shows_node or self.public_failure is None:
                raise
            raise self.public_failure from None

    async def _public_reason(self) -> str:
        """Return why the load waits, without names of nodes. One query serves all requests."""
        message = self.operation.message if _state(self.operation) == "pending" else ""
        if self.public_reason is None or self.public_reason[0] != message:
            self.public_reason = message, asyncio.create_task(in_thread(_without_names, message))
        try:
            return await asyncio.shield(self.public_reason[1])
        except DatabaseError:
            return ""


class Loads:
    """The cold loads for which requests of this process wait."""

    def __init__(self, wake_ups: WakeUps) -> None:
        self.wake_ups = wake_ups
        self._loads: dict[str, ModelWait] = {}

    @contextmanager
    def join(self, request: WaitingRequest) -> Iterator[ModelWait]:
        """Add the request to those that wait for its model's load, while the block runs.

        The process follows the load until no request waits for it.
        """
        deadline = request.wait_until
        load = self._loads.get(request.model)
        if load is None:
            load = self._loads[request.model] = ModelWait(_new_turn(), Operation(kind=KIND, progress=0.0))
            # The watch keeps no reference to the request, which it may outlive and whose body is large.
            operation_request = any_replica(request.model, request.requester)
            load.task = asyncio.get_running_loop().create_task(self._watch(load, operation_request, deadline))
        load.deadlines.append(deadline)
        try:
            yield load
        finally:
            load.deadlines.remove(deadline)

    def waiting(self) -> int:
        """Return the number of requests in this process that wait for a load. Thread-safe."""
        return sum(len(load.deadlines) for load in list(self._loads.values()))

    async def close(self) -> None:
        """Stop following the loads; the operations continue."""
        await cancellation.cancel_and_wait(
            *(load.task for load in self._loads.values() if load.task is not None)
        )

    async def _watch(self, load: ModelWait, request: admission.OperationRequest, deadline: float) -> None:
        try:
            await self._follow(load, request, deadline)
        except asyncio.CancelledError:
            load.turn.set_exception(Unavailable("this web process is stopping", retry_after=1))
            raise
        except LoadFailed as failure:
            await self._end_with(load, failure, request.element)
        except Exception as error:
            load.turn.set_exception(_to_client_error(error))
        else:
            load.turn.set_result(load.operation.status in TERMINAL)
        finally:
            self._loads.pop(request.element, None)

    @staticmethod
    async def _end_with(load: ModelWait, failure: LoadFailed, model: str) -> None:
        load.public_failure = LoadFailed(**failure.data)
        try:
            load.public_failure = await in_thread(without_nodes, failure, model)
        finally:
            load.turn.set_exception(failure)

    async def _follow(self, load: ModelWait, request: admission.OperationRequest, deadline: float) -> None:
        """Follow the operation until it ends or no request waits. Raise LoadFailed."""
        load.row_deadline = min(deadline, clock.monotonic() + _NEED_EXTENSION_SECONDS)
        load.operation = await in_thread(
            _admit, replace(request, needed_until=_to_datetime(load.row_deadline))
        )
        with self.wake_ups.watch(load.operation.id) as watch:
            while (operation := await in_thread(_refresh, load.operation)).status not in TERMINAL:
                load.operation = operation
                if not load.deadlines:
                    return
                needed = min(max(load.deadlines), clock.monotonic() + _NEED_EXTENSION_SECONDS)
                if needed > load.row_deadline + 1 and operation.kind == KIND:
                    load.row_deadline = needed
                    await in_thread(admission.extend_need, {operation.id: _to_datetime(needed)})
                load.turn, turn = _new_turn(), load.turn
                turn.set_result(False)
                await watch.changed(timeout=POLL_EVERY)
        load.operation = operation
        # A cancelled load had no waiting request left; a request that attached in that moment retries.
        if load.operation.status == Status.FAILED and load.operation.kind == KIND:
            raise load_failure(
                request.element, load.operation, clock.now(), conf.cluster().load_failure_grace
            )


def _to_client_error(error: Exception) -> ClusterError:
    """Return the error for the waiting requests when the operation could not be admitted or polled."""
    if isinstance(error, Conflict):
        return Unavailable(error.message, retry_after=5)
    if isinstance(error, DatabaseError):
        logger.warning("Cannot follow a load: %s", error)
        return outage.unreachable_error()
    if isinstance(error, ClusterError):
        return error
    logger.error("Following a load failed", exc_info=error)
    return ClusterError()


def _new_turn() -> "asyncio.Future[bool]":
    turn = asyncio.get_running_loop().create_future()
    # Read the exception, so that asyncio logs none if no request waits when the load fails.
    turn.add_done_callback(lambda done: done.cancelled() or done.exception())
    return turn


def _to_datetime(deadline: float) -> datetime:
    return clock.now() + timedelta(seconds=deadline - clock.monotonic())


def _admit(request: admission.OperationRequest) -> Operation:
    """Create or join the load; return an active unload or deletion instead if it excludes the load.

    Raises LoadFailed within the grace of the last load's failure.
    """
    now = clock.now()
    if not Operation.objects.filter(key=request.key).active().exists():
        recent = _recent_failure(request.element, now)
        if recent is not None:
            raise load_failure(request.element, recent, now, conf.cluster().load_failure_grace)
    try:
        return admission.admit(request, now=now).operation
    except Conflict as busy:
        return Operation.objects.get(pk=busy.data["operation"])


def _recent_failure(model: str, now: datetime) -> Operation | None:
    """Return the last failed load that requests had joined, if it failed within the grace (C33)."""
    since = now - timedelta(seconds=conf.cluster().load_failure_grace)
    failed = Operation.objects.filter(UNDISMISSED_FAILURE, key=load_key(model), kind=KIND)
    load = failed.filter(finished_at__gt=since).first()
    return None if load is None or has_other_node_since(load) else load


def has_other_node_since(failure: Operation) -> bool:
    """Return True if a node became healthy after the failure that has not refused the load."""
    refused = [refusal.node_id for refusal in refusals(failure.payload)]
    healthy = BackendNode.objects.filter(status="healthy", node_type="backend").exclude(pk__in=refused)
    events = NodeEvent.objects.filter(at__gt=failure.finished_at, status_after="healthy")
    return events.exclude(status_before="healthy").filter(node_id__in=healthy.values("pk")).exists()


def status(model: str, now: datetime) -> Operation | None:
    """Return the model's active load with the lowest key; without one, its last failure within the grace."""
    loads = Operation.objects.active().sharing(load_key(model), model).filter(kind=KIND)
    return loads.order_by("key").first() or _recent_failure(model, now)


def _refresh(before: Operation) -> Operation:
    row = Operation.objects.filter(pk=before.pk).defer("payload", "result").first()
    # The operation ended long ago and was deleted; the next pick finds its replica, if it left one.
    return row or Operation(pk=before.pk, kind=before.kind, status=Status.COMPLETED)
