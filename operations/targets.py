"""An operation's part on each of its nodes, and what the parts add up to (O64 to O70).

An operation on several nodes is as far as the mean of its parts: a success counts 100, one that waits
nothing, and one that failed what it had reached. It never goes back within an attempt, and 100 is for the
end. The whole state of an operation that is carried out by its parts is `state_of` them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from operations.models import QUEUED, Operation, OperationTarget, Status, TargetStatus

ENDED = (TargetStatus.SUCCESS, TargetStatus.ERROR, TargetStatus.CANCELLED, TargetStatus.SUPERSEDED)
NO_NODE = "no eligible node"
LAST_BEFORE_THE_END = 99.0
_MOST_BYTES = 2**63 - 1
"""What a column holds: each worker's figures do, but not always their sum."""


def share(target: OperationTarget) -> float:
    """How far this part is, in percent."""
    return 100.0 if target.status == TargetStatus.SUCCESS else target.percentage


def add_up(operation: Operation, parts: Sequence[OperationTarget]) -> None:
    """Sets progress, bytes and message of an operation on several nodes from its parts."""
    done = sum(part.status == TargetStatus.SUCCESS for part in parts)
    failed = sum(part.status == TargetStatus.ERROR for part in parts)
    reach(operation, sum(map(share, parts)) / len(parts))
    reached = min(sum(part.current_bytes for part in parts), _MOST_BYTES)
    operation.current_bytes = max(reached, operation.current_bytes)
    operation.total_bytes = min(sum(part.total_bytes for part in parts), _MOST_BYTES)
    operation.message = f"{done} of {len(parts)} nodes done" + (f", {failed} failed" if failed else "")


@dataclass(frozen=True)
class State:
    """What the parts of an operation say about it."""

    status: Status
    message: str
    error: str = ""
    phase: str = ""
    progress: float = 0.0
    next_look_at: datetime | None = None
    attempts: int = 0
    last_progress_at: datetime | None = None
    time_limit_at: datetime | None = None


def state_of(kind: str, parts: Sequence[OperationTarget]) -> State:
    """O16, O18, O21: the state of an operation of this kind that is carried out by these parts.

    Without a part there was no node for it: done if it was to delete something, a failure otherwise.
    """
    deletes = kind.endswith("_delete")
    if not parts:
        done = State(Status.COMPLETED, "completed", progress=100)
        return done if deletes else State(Status.FAILED, f"error: {NO_NODE}", NO_NODE)
    left = [part for part in parts if part.status not in ENDED]
    attempts = max(part.attempts for part in parts)
    progress = min(sum(map(share, parts)) / len(parts), LAST_BEFORE_THE_END)
    if not left:
        return _end_of(parts, progress, attempts)
    running = [part for part in left if part.status != TargetStatus.QUEUED]
    waits = all(part.waits_for_node for part in left)
    heard = [part.last_progress_at for part in running if part.last_progress_at is not None]
    limits = [part.time_limit_at for part in running if part.time_limit_at is not None]
    looks = [part.next_look_at for part in left if part.next_look_at is not None]
    return State(
        Status.PROCESSING if running else Status.WAITING if waits else Status.PENDING,
        left[0].reason if len(parts) == 1 else _count(parts, left),
        phase=(left[0].phase if len(parts) == 1 else "") if running else QUEUED,
        progress=progress,
        next_look_at=min(looks, default=None),
        attempts=attempts,
        last_progress_at=max(heard, default=None),
        time_limit_at=max(limits, default=None),
    )


def _end_of(parts: Sequence[OperationTarget], progress: float, attempts: int) -> State:
    failed = [part for part in parts if part.status == TargetStatus.ERROR]
    if failed:
        reasons = [part.error if len(parts) == 1 else f"{part.node_name}: {part.error}" for part in failed]
        error = "; ".join(reasons)
        return State(Status.FAILED, f"error: {error}", error, progress=progress, attempts=attempts)
    if any(part.status == TargetStatus.SUCCESS for part in parts):
        cancelled = sum(part.status == TargetStatus.CANCELLED for part in parts)
        left_out = f", cancelled on {cancelled} of {len(parts)} nodes" if cancelled else ""
        return State(Status.COMPLETED, f"completed{left_out}", progress=100, attempts=attempts)
    return State(Status.CANCELLED, parts[0].reason or "cancelled", progress=progress, attempts=attempts)


def held(part: OperationTarget) -> bool:
    """Whether its wave has not opened for it yet."""
    return part.wave is not None and part.intent_id is None and part.status not in ENDED


def waves_in_words(parts: Iterable[OperationTarget]) -> dict[int, str]:
    """Each wave as people count: the canary is the first."""
    waves = sorted({part.wave for part in parts if part.wave is not None})
    return {wave: f"wave {place} of {len(waves)}" for place, wave in enumerate(waves, 1)}


def _count(parts: Sequence[OperationTarget], left: Sequence[OperationTarget]) -> str:
    """How many nodes are done, and what the rest does."""
    done = sum(part.status == TargetStatus.SUCCESS for part in parts)
    failed = sum(part.status == TargetStatus.ERROR for part in parts)
    cancelled = sum(part.status == TargetStatus.CANCELLED for part in parts)
    waiting = sum(part.waits_for_node for part in left)
    counts = [f"{done} of {len(parts)} nodes done"]
    counts += [f"{failed} failed"] if failed else []
    counts += [f"{cancelled} cancelled"] if cancelled else []
    counts += [f"{waiting} wait for their node"] if waiting else []
    said = ", ".join(counts)
    waves = [part.wave for part in left if part.wave is not None]
    if not waves:
        return said
    # If all that is left is held, its reason is what the operation waits for.
    reason = f"; {left[0].reason}" if all(map(held, left)) else ""
    return f"{waves_in_words(parts)[min(waves)]}: {said}{reason}"


def adopt(operation: Operation, parts: Sequence[OperationTarget], now: datetime) -> None:
    """Brings an operation that is carried out by its parts to their state."""
    state = state_of(operation.kind, parts)
    operation.status, operation.message, operation.error = state.status, state.message, state.error
    operation.phase, operation.progress, operation.attempts = state.phase, state.progress, state.attempts
    operation.last_progress_at, operation.time_limit_at = state.last_progress_at, state.time_limit_at
    operation.current_bytes = min(sum(part.current_bytes for part in parts), _MOST_BYTES)
    operation.total_bytes = min(sum(part.total_bytes for part in parts), _MOST_BYTES)
    operation.next_attempt_at = state.next_look_at or now
    operation.updated_at = now
    if state.status == Status.PROCESSING:
        operation.started_at = operation.started_at or now
    if state.status in (Status.COMPLETED, Status.FAILED, Status.CANCELLED):
        operation.finished_at = now


def reach(operation: Operation, percentage: float) -> None:
    """Moves the progress forward, never back and never to the end."""
    operation.progress = min(max(percentage, operation.progress), LAST_BEFORE_THE_END)


def of(operations: Iterable[Operation]) -> dict[UUID, list[OperationTarget]]:
    """The parts of these operations, in one query."""
    parts: dict[UUID, list[OperationTarget]] = {}
    for part in OperationTarget.objects.filter(operation__in=operations):
        parts.setdefault(part.operation_id, []).append(part)
    return parts


def restart_parts(operations: Iterable[Operation]) -> None:
    """A new attempt of these operations: parts that have ended stay, the others wait again. Two queries."""
    rows = {operation.id: operation for operation in operations}
    if not rows:
        return
    for operation_id, found in of(rows.values()).items():
        ended = [part for part in found if part.status in ENDED]
        reach(rows[operation_id], sum(map(share, ended)) / len(found))
    OperationTarget.objects.filter(operation_id__in=rows).exclude(status__in=ENDED).update(
        status=TargetStatus.QUEUED, percentage=0, phase="", file_name="", current_bytes=0, total_bytes=0
    )
