"""How a request waits for a cold load: together with all requests of this process for the same model.

A request that finds no replica calls `Loads.wait`. The first one of a model admits the operation `model_load`
(or joins the active one of another process), later ones attach. A hint or a look every two seconds ends a
turn; then all of them pick again, because the rows decide and not the hint. A failed load is an error for all
of them, and it stands as the answer for some seconds, so that not every request loads a broken model again. A
client that leaves takes only itself away: the operation goes on for the requests that still wait.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from django.db import DatabaseError

from localai_cluster import clock, conf
from localai_cluster.errors import ClusterError, Conflict, Unavailable
from nodes.loading.failures import LoadFailed, refusals
from nodes.loading.load import KIND, key
from nodes.models import BackendNode, NodeEvent
from nodes.routing.request import InferenceRequest
from operations.executor.waiting import Hints
from operations.executor.work import in_thread
from operations.ledger import admission
from operations.models import TERMINAL, Operation, Status

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_EVERY = 2.0
"""C33: seconds between two looks at the row without a hint."""
_HORIZON = 60.0
"""How far ahead a request without a limit says that it is wanted, in seconds; renewed at each look."""
RETRY_MIN, RETRY_MAX = 5.0, 300.0
"""C35: bounds of Retry-After on the answer "still loading"."""

_PHASES = frozenset({"installing", "staging", "loading"})


class StillLoading(Unavailable):
    """The model is still being loaded."""

    code = "model_loading"


@dataclass(frozen=True)
class Look:
    """The operation's row as a waiting request sees it."""

    id: UUID
    status: str
    phase: str
    node_name: str
    progress: float
    current_bytes: int
    total_bytes: int
    message: str
    error: str
    started_at: datetime | None
    finished_at: datetime | None
    file_index: int = 0
    total_files: int = 0
    bytes_per_second: int = 0
    kind: str = KIND
    """Another one is an unload or a deletion, which must end before the model can be loaded."""


_COLUMNS = tuple(Look.__dataclass_fields__)
_UNSEEN = Look(UUID(int=0), "pending", "", "", 0.0, 0, 0, "", "", None, None)


def eta_seconds(look: Look, now: datetime) -> float | None:
    """R2.23: what is left over the rate seen so far; None until bytes move for at least a second.

    A load that sends files says the rate itself: it knows which bytes were there before.
    """
    if look.phase == "staging":
        left = look.total_bytes - look.current_bytes
        return left / look.bytes_per_second if left > 0 and look.bytes_per_second > 0 else None
    elapsed = (now - look.started_at).total_seconds() if look.started_at else 0.0
    if not 0 < look.current_bytes < look.total_bytes or elapsed < 1:
        return None
    return (look.total_bytes - look.current_bytes) * elapsed / look.current_bytes


def loading_body(model: str, look: Look, now: datetime) -> dict[str, Any]:
    """The `loading` object of `contract/http-api.md` §6.1."""
    body: dict[str, Any] = {
        "model": model,
        "state": _state(look),
        "progress": look.progress,
        "bytes_sent": look.current_bytes,
        "total_bytes": look.total_bytes,
        "file_index": look.file_index,
        "total_files": look.total_files,
    }
    if look.node_name:
        body["node"] = look.node_name
    eta = eta_seconds(look, now)
    if eta is not None:
        body["eta_seconds"] = math.ceil(eta)
    return body


def still_loading(model: str, look: Look, budget: float, now: datetime) -> StillLoading:
    """The answer to a request whose wait is over while the load goes on (R2.22)."""
    eta = eta_seconds(look, now)
    details = [f"{look.progress:.0f}%"] if look.progress else []
    details += [f"ETA ~{math.ceil(eta)}s"] if eta is not None else []
    message = f"model {model} is {_state(look)}"
    message += f" on node {look.node_name}" if look.node_name else ""
    message += f" ({', '.join(details)})" if details else ""
    message += f": {look.message}" if look.message else ""
    if look.kind != KIND:
        message = f"model {model} is not loaded while its {look.kind} is in progress (operation {look.id})"
    retry_after = min(max(budget if eta is None else eta, RETRY_MIN), RETRY_MAX)
    return StillLoading(message, retry_after=retry_after, loading=loading_body(model, look, now))


def _state(look: Look) -> str:
    if look.status == Status.FAILED:
        return "failed"
    return look.phase if look.status == Status.PROCESSING and look.phase in _PHASES else "pending"


def failure(model: str, look: Look, now: datetime, grace: float) -> LoadFailed:
    """What everyone who waits for a failed load is told; Retry-After is when it may be tried again."""
    cause = look.error or look.message or look.status
    since = (now - look.finished_at).total_seconds() if look.finished_at else 0.0
    return LoadFailed(f"loading model {model} failed: {cause}", retry_after=max(math.ceil(grace - since), 1))


@dataclass
class _Load:
    """One model that somebody in this process waits for."""

    turn: "asyncio.Future[bool]"
    deadlines: list[float] = field(default_factory=list)
    """Of each waiting request, on the monotonic clock; infinite without a limit."""
    look: Look = _UNSEEN
    wanted: float = 0.0
    """Until when the operation's row says it is wanted, on the monotonic clock."""
    task: "asyncio.Task[None] | None" = None

    def needed_until(self) -> float:
        """Until when the row should say so."""
        return min(max(self.deadlines, default=0.0), clock.monotonic() + _HORIZON)


class Loads:
    """The cold loads that requests of this process wait for."""

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self._loads: dict[str, _Load] = {}

    async def wait(self, request: InferenceRequest) -> bool:
        """Waits until the request should pick again; returns whether the load has ended (done or given up).

        Raises StillLoading when the request may wait no longer, LoadFailed when the load failed now or a
        moment ago.
        """
        model, deadline = request.model, request.wait_until
        load = self._loads.get(model) or self._begin(request)
        load.deadlines.append(deadline)
        try:
            async with asyncio.timeout(_remaining(deadline)):
                return await asyncio.shield(load.turn)
        except TimeoutError:
            raise still_loading(model, load.look, conf.cluster().model_load_wait, clock.now()) from None
        finally:
            load.deadlines.remove(deadline)

    def waiting(self) -> int:
        """How many requests of this process wait for a load; from any thread."""
        return sum(len(load.deadlines) for load in list(self._loads.values()))

    async def close(self) -> None:
        """Stops watching; the operations themselves go on."""
        tasks = [load.task for load in self._loads.values() if load.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, request: InferenceRequest) -> _Load:
        load = self._loads[request.model] = _Load(_new_turn())
        # The watch gets no more than it needs: it may outlive the request, whose body is large.
        wanted = admission.OperationRequest(
            KIND,
            key=key(request.model),
            element=request.model,
            payload={"model": request.model},
            actor=request.principal.name,
            request_id=request.request_id,
            client_address=request.client_address,
        )
        watch = self._watch(load, wanted, request.wait_until)
        load.task = asyncio.get_running_loop().create_task(watch)
        return load

    async def _watch(self, load: _Load, wanted: admission.OperationRequest, deadline: float) -> None:
        try:
            await self._follow(load, wanted, deadline)
        except asyncio.CancelledError:
            load.turn.set_exception(Unavailable("this web process is stopping", retry_after=1))
            raise
        except Exception as error:
            load.turn.set_exception(_as_answer(error))
        else:
            load.turn.set_result(load.look.status in TERMINAL)
        finally:
            self._loads.pop(wanted.element, None)

    async def _follow(self, load: _Load, wanted: admission.OperationRequest, deadline: float) -> None:
        """Returns when the operation has ended or no request waits any more; raises LoadFailed."""
        load.wanted = min(deadline, clock.monotonic() + _HORIZON)
        load.look = await in_thread(_admit, replace(wanted, needed_until=_instant(load.wanted)))
        with self.hints.watch(load.look.id) as watch:
            while (look := await in_thread(_look_again, load.look)).status not in TERMINAL:
                load.look = look
                if not load.deadlines:
                    return
                await self._keep_wanted(load)
                _end_turn(load)
                await watch.changed(timeout=LOOK_EVERY)
        load.look = look
        # One that was cancelled had no one left; a request that attached in that moment asks again.
        if load.look.status == Status.FAILED and load.look.kind == KIND:
            raise failure(wanted.element, load.look, clock.now(), conf.cluster().load_failure_grace)

    @staticmethod
    async def _keep_wanted(load: _Load) -> None:
        until = load.needed_until()
        if until > load.wanted + 1 and load.look.kind == KIND:
            load.wanted = until
            await in_thread(admission.need_until, load.look.id, _instant(until))


def _as_answer(error: Exception) -> ClusterError:
    """What the waiting requests are told when admitting or looking itself went wrong."""
    if isinstance(error, Conflict):
        return Unavailable(error.message, retry_after=5)
    if isinstance(error, DatabaseError):
        logger.warning("Cannot follow a load: %s", error)
        return Unavailable("the database is not reachable", retry_after=2)
    if isinstance(error, ClusterError):
        return error
    logger.error("Following a load failed", exc_info=error)
    return ClusterError()


def _new_turn() -> "asyncio.Future[bool]":
    turn = asyncio.get_running_loop().create_future()
    # Everyone may have left when a load fails; that is not an error that went unseen.
    turn.add_done_callback(lambda done: done.cancelled() or done.exception())
    return turn


def _end_turn(load: _Load) -> None:
    if load.look.status in (Status.PENDING, Status.PROCESSING, Status.WAITING):
        load.turn, turn = _new_turn(), load.turn
        turn.set_result(False)


def _remaining(deadline: float) -> float | None:
    return None if math.isinf(deadline) else max(deadline - clock.monotonic(), 0)


def _instant(deadline: float) -> datetime:
    return clock.now() + timedelta(seconds=deadline - clock.monotonic())


def _admit(wanted: admission.OperationRequest) -> Look:
    """Joins or makes the load, or answers what keeps it from being made: the model is being unloaded.

    Raises LoadFailed while the last one's failure still stands.
    """
    now = clock.now()
    if not Operation.objects.filter(key=wanted.key).active().exists():
        recent = _standing_failure(wanted.element, now)
        if recent is not None:
            raise failure(wanted.element, _look(recent), now, conf.cluster().load_failure_grace)
    try:
        return _look(admission.admit(wanted, now=now).operation)
    except Conflict as busy:
        return _look(Operation.objects.get(pk=busy.data["operation"]))


def _standing_failure(model: str, now: datetime) -> Operation | None:
    """Return the failure of the load that requests join, while it is their answer (C33)."""
    since = now - timedelta(seconds=conf.cluster().load_failure_grace)
    failed = Operation.objects.filter(key=key(model), kind=KIND, status=Status.FAILED)
    found = failed.filter(dismissed_at__isnull=True, finished_at__gt=since).first()
    return None if found is None or has_other_node_since(found) else found


def has_other_node_since(failure: Operation) -> bool:
    """Return True if a node that has not refused this failed load has become healthy after it."""
    refused = [one.node_id for one in refusals(failure.payload)]
    healthy = BackendNode.objects.filter(status="healthy", node_type="backend").exclude(pk__in=refused)
    events = NodeEvent.objects.filter(at__gt=failure.finished_at, status_after="healthy")
    return events.exclude(status_before="healthy").filter(node_id__in=healthy.values("pk")).exists()


def status(model: str, now: datetime) -> Look | None:
    """The load of a model that goes on, that which requests join first; or its failure while that stands."""
    loads = Operation.objects.active().sharing(key(model), model).filter(kind=KIND)
    found = loads.order_by("key").first() or _standing_failure(model, now)
    return _look(found) if found is not None else None


def _look(operation: Operation) -> Look:
    return Look(**{column: getattr(operation, column) for column in _COLUMNS})


def _look_again(before: Look) -> Look:
    row = Operation.objects.filter(pk=before.id).values(*_COLUMNS).first()
    # Ended long ago and tidied away: what it left, if anything, is found by the next pick.
    return Look(**row) if row else Look(**{**vars(before), "status": Status.COMPLETED})
