"""One attempt of a load, its failures, and what follows a failure: a retry, or the end of the load.

Each failure is recorded before the retry or the end takes effect. The record compares no nodes; it has the
cause, how often the cause has occurred, and whether the load is still needed.

A refusal by one node does not apply to the next: the load tries up to `MAX_NODES` nodes, each once. The
payload of the operation stores the reasons. If all fail, the reasons are the load's error, so a definition
that no engine can load costs a few attempts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from localai_cluster.kit import clock, errors
from localai_cluster.messaging import messages
from localai_cluster.rpc.errors import Busy, Lost, Refused
from nodes.commands.commands import Worker
from nodes.decisions import decision_log
from nodes.decisions.decision_log import DecisionRecord, NodeSlot
from nodes.definitions.files import Definition
from nodes.loading.load_request import ProgressDeadline, request_of
from nodes.models import DecisionKind
from nodes.placement.evict import Eviction
from nodes.placement.explain import MAX_SENTENCE_LENGTH, DecisionOutcome, truncate
from nodes.placement.load_times import NodeBackoffs, add_failure, into_payload
from nodes.replicas.slots import Slot
from operations.executor.work import Abandoned, Postpone, Work, retry_delay
from operations.ledger.progress import Tick
from operations.models import Operation

MAX_NODES = 3
"""Maximum number of nodes that may refuse one load."""
MAX_ENGINE_DEATHS = 3
"""Maximum number of engines that may die during one load."""
_REFUSALS_KEY = "refusals"


class Cause(StrEnum):
    """Why an attempt ended without a replica, or could not begin."""

    WORKER_GONE = "worker_gone"
    ENGINE_DIED = "engine_died"
    NODE_REFUSED = "node_refused"
    FAILED = "failed"
    ON_ITS_WAY = "on_its_way"
    INTERRUPTED = "interrupted"
    NO_BUS = "no_bus"
    UNDEFINED = "undefined"


_MAX_ATTEMPTS_BY_CAUSE = {
    Cause.ENGINE_DIED: MAX_ENGINE_DEATHS,
    Cause.NODE_REFUSED: MAX_NODES,
    Cause.FAILED: 1,
    Cause.UNDEFINED: 1,
}
"""Number of failures by this cause that ends the load. A failure by any other cause ends only a load that
nobody needs."""


def is_last(cause: Cause, times: int) -> bool:
    """Return True if the load ends when this cause has occurred `times` times."""
    return cause in _MAX_ATTEMPTS_BY_CAUSE and times >= _MAX_ATTEMPTS_BY_CAUSE[cause]


class LoadFailed(errors.Unavailable):
    """The model could not be loaded."""

    message = "The model could not be loaded."
    code = "model_load_failed"


class NodeRefused(LoadFailed):
    """This node could not load the model, but another node may."""

    message = "This node could not load it; another one may."


class WorkerGone(errors.Unavailable):
    """The attempt's worker does not answer, or the attempt has lost its slot on the node."""

    message = "The attempt's worker is gone, or its place on it."
    code = "worker_gone"


@dataclass(frozen=True)
class NodeReason:
    """A node that could not load the model, with the reason."""

    node_id: UUID
    node_name: str
    reason: str


def refusals(payload: Mapping[str, Any]) -> list[NodeReason]:
    """Return the refusals in an operation's payload, in the order of the attempts."""
    return [NodeReason(UUID(id), name, reason) for id, name, reason in payload.get(_REFUSALS_KEY, ())]


def with_refusal(payload: Mapping[str, Any], refusal: NodeReason) -> dict[str, Any]:
    """Return a copy of the payload with one more refusal."""
    rows = [[str(row.node_id), row.node_name, row.reason] for row in [*refusals(payload), refusal]]
    return {**payload, _REFUSALS_KEY: rows}


def refusals_error(payload: Mapping[str, Any]) -> LoadFailed:
    """Return the error of a load that nodes have refused: the reasons, each with its nodes."""
    by_reason: dict[str, list[str]] = {}
    for refusal in refusals(payload):
        by_reason.setdefault(refusal.reason, []).append(refusal.node_name)
    return LoadFailed("; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()))


_RECORDED_ERRORS = (WorkerGone, Lost, Refused, Busy, LoadFailed, Abandoned, Postpone)
"""The errors that end an attempt with a record. Any other error is a defect, an outage or a lost lease."""


@dataclass(frozen=True)
class Attempt:
    """One claimed attempt of a load with its reserved slot."""

    work: Work
    definition: Definition
    slot: Slot
    worker: Worker
    backoffs: NodeBackoffs
    """Back-offs of the nodes that have failed this load or have not answered it."""
    why: str
    """Why placement chose this slot."""
    deadline: ProgressDeadline
    payload: int = 0
    """Bytes of the model's files; 0 = unknown."""
    listed: messages.ListReply | None = None
    """The worker's list of backends; None if it is older than the moment when the slot became free."""
    eviction: Eviction | None = None
    """The replicas that must stop on the node before the engine starts; None if no replica must stop."""

    @property
    def process_key(self) -> str:
        """The key of the engine process on the worker."""
        return messages.process_key(self.definition.name, self.slot.replica_index)

    def tick(self, phase: str, message: str, **figures: Any) -> Tick:
        """Return a progress report of the load."""
        return Tick(phase, message, node_id=self.slot.node_id, node_name=self.slot.node_name, **figures)

    async def report(self, phase: str, message: str, *, time_limit: float | None = None) -> None:
        """Report the next step, with its time limit in seconds; raise LeaseLost if the lease is lost."""
        limit_at = None if time_limit is None else clock.now() + timedelta(seconds=time_limit)
        await self.work.report(self.tick(phase, message, time_limit_at=limit_at))


def after_error(attempt: Attempt, error: Exception) -> Exception:
    """Record the error and return the exception that ends the attempt. A defect is returned unchanged."""
    if not isinstance(error, _RECORDED_ERRORS):
        return error
    # Refresh: requests that came while the attempt ran have moved the load's deadline.
    operation = Operation.objects.get(pk=attempt.work.id)
    match error:
        case WorkerGone():
            cause, outcome = Cause.WORKER_GONE, _retry_on_other_node(attempt, operation, error)
        case Lost() | Refused() | Busy():
            cause, outcome = Cause.ENGINE_DIED, _after_engine_death(attempt, operation, error)
        case NodeRefused():
            cause, outcome = Cause.NODE_REFUSED, _after_refusal(attempt, operation, error)
        case LoadFailed():
            cause, outcome = Cause.FAILED, error
        case _:
            cause, outcome = Cause.INTERRUPTED, error
    _record(operation, cause, outcome, attempt.slot)
    return outcome


def record_without_slot(
    load: UUID, cause: Cause, reason: str, *, seconds: float, waiting: bool = True
) -> Exception:
    """Record that a load gets no slot now; return the exception that postpones or ends the load."""
    operation = Operation.objects.get(pk=load)
    outcome = retry_or_end(operation, reason, seconds=seconds, waiting=waiting)
    _record(operation, cause, outcome)
    return outcome


def record_undefined(load: UUID) -> errors.NotFound:
    """Record that the model has no definition; return the error that ends the load."""
    operation = Operation.objects.get(pk=load)
    outcome = errors.NotFound(f"model {operation.element} is not defined")
    _record(operation, Cause.UNDEFINED, outcome)
    return outcome


def _record(operation: Operation, cause: Cause, outcome: Exception, slot: Slot | None = None) -> None:
    explanation = decision_log.explanation_without_fleet(
        DecisionOutcome.WAITING if isinstance(outcome, Postpone) else DecisionOutcome.REFUSED,
        truncate(str(outcome), MAX_SENTENCE_LENGTH),
        cause=cause,
        times=_count_occurrences(operation.payload, cause),
        over=isinstance(outcome, Abandoned),
    )
    node_slot = NodeSlot(slot.node_id, slot.node_name, slot.replica_index) if slot is not None else None
    decided = DecisionRecord(
        operation.element, operation.pk, explanation, None, DecisionKind.ATTEMPT, node_slot
    )
    decision_log.record(decided, now=clock.now())


def _count_occurrences(payload: Mapping[str, Any], cause: Cause) -> int:
    """Return how often the cause has occurred in this load, including this time."""
    if cause is Cause.NODE_REFUSED:
        return len(refusals(payload)) + 1
    return int(payload.get("engine_deaths", 0)) + 1 if cause is Cause.ENGINE_DIED else 1


def replay_outcome(facts: Mapping[str, Any]) -> DecisionOutcome:
    """Return the outcome that follows from the facts of a record: a retry, or the end of the load."""
    ends = facts["over"] or is_last(Cause(facts["cause"]), facts["times"])
    return DecisionOutcome.REFUSED if ends else DecisionOutcome.WAITING


def _payload_with_backoff(attempt: Attempt, operation: Operation) -> dict[str, Any]:
    backoffs = add_failure(attempt.backoffs, attempt.slot.node_id, clock.now())
    return into_payload(operation.payload, backoffs)


def _retry_on_other_node(attempt: Attempt, operation: Operation, gone: WorkerGone) -> Exception:
    # The node is in back-off, the load is not: it takes another node at once, or waits with a reason.
    payload = _payload_with_backoff(attempt, operation)
    return retry_or_end(operation, f"{gone.message}; trying another node", seconds=0, payload=payload)


def _after_engine_death(attempt: Attempt, operation: Operation, error: errors.ClusterError) -> Exception:
    deaths = _count_occurrences(operation.payload, Cause.ENGINE_DIED)
    if is_last(Cause.ENGINE_DIED, deaths):
        return LoadFailed(f"the engine of {operation.element} died while loading: {error.message}")
    payload = _payload_with_backoff(attempt, operation) | {"engine_deaths": deaths}
    pause = retry_delay(operation.attempts)
    return retry_or_end(operation, error.message, seconds=pause, payload=payload, waiting=False)


def _after_refusal(attempt: Attempt, operation: Operation, refusal: NodeRefused) -> Exception:
    slot = attempt.slot
    payload = _payload_with_backoff(attempt, operation)
    payload = with_refusal(payload, NodeReason(slot.node_id, slot.node_name, refusal.message))
    if is_last(Cause.NODE_REFUSED, len(refusals(payload))):
        return refusals_error(payload)
    reason = f"{slot.node_name}: {refusal.message}; trying another node"
    return Postpone(reason, seconds=0, waiting=True, payload=payload)


def retry_or_end(
    operation: Operation,
    reason: str,
    *,
    seconds: float,
    payload: Mapping[str, Any] | None = None,
    waiting: bool = True,
) -> Exception:
    """Return a retry in `seconds`, or the end of the load if its deadline has passed."""
    return end_if_not_needed(operation, reason) or Postpone(
        reason, seconds=seconds, waiting=waiting, payload=payload
    )


def end_if_not_needed(operation: Operation, reason: str) -> Abandoned | None:
    """Return the exception that ends a load which is no longer needed; None while it is needed."""
    if operation.needed_until is None or operation.needed_until > clock.now():
        return None
    request = request_of(operation)
    if request.is_scale_up:
        cause = f" ({request.reason})" if request.reason else ""
        return Abandoned(f"not possible in time{cause}; {reason}")
    return Abandoned(f"no request waits for it any more; {reason}")
