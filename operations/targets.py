"""Targets of an operation, one per node, and the aggregation of their states (O64 to O70).

The progress of an operation on several nodes is the mean of its targets: a success counts 100, a queued
target 0, and a failed target its last percentage. The progress never decreases within an attempt, and reaches
100 only at the end. `summarize_targets` derives the complete state of an operation that runs by its targets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from operations.models import QUEUED, Operation, OperationTarget, Status, TargetStatus, facts_of

ENDED = (TargetStatus.SUCCESS, TargetStatus.ERROR, TargetStatus.CANCELLED, TargetStatus.SUPERSEDED)
UNFINISHED = tuple(status for status in TargetStatus if status not in ENDED)
"""The statuses of a target that has not ended.

Queries filter by these and do not exclude `ENDED`, because PostgreSQL uses a partial index only for a
condition that implies its own.
"""
NO_ELIGIBLE_NODE = "no eligible node"
MAX_NAMED_FAILURES = 10
"""Failed targets that an operation's error names; the others are counted."""
MAX_RUNNING_PERCENT = 99.0
_MAX_BYTES = 2**63 - 1
"""Largest value of a column; the sum of the workers' figures may exceed it."""


def target_progress(target: OperationTarget) -> float:
    """Return the progress of the target in percent."""
    return 100.0 if target.status == TargetStatus.SUCCESS else target.percentage


def aggregate_progress(operation: Operation, parts: Sequence[OperationTarget]) -> None:
    """Set progress, bytes and message of an operation from those of its targets."""
    done = sum(part.status == TargetStatus.SUCCESS for part in parts)
    failed = sum(part.status == TargetStatus.ERROR for part in parts)
    raise_progress(operation, sum(map(target_progress, parts)) / len(parts))
    reached = min(sum(part.current_bytes for part in parts), _MAX_BYTES)
    operation.current_bytes = max(reached, operation.current_bytes)
    operation.total_bytes = min(sum(part.total_bytes for part in parts), _MAX_BYTES)
    operation.message = f"{done} of {len(parts)} nodes done" + (f", {failed} failed" if failed else "")


@dataclass(frozen=True)
class TargetsSummary:
    """The columns of an operation that follow from its targets."""

    status: Status
    message: str
    error: str = ""
    phase: str = ""
    progress: float = 0.0
    next_check_at: datetime | None = None
    attempts: int = 0
    last_progress_at: datetime | None = None
    time_limit_at: datetime | None = None


def summarize_targets(kind: str, parts: Sequence[OperationTarget]) -> TargetsSummary:
    """Derive the state of an operation that runs by these targets (O16, O18, O21).

    Without targets no node was eligible: a deletion is then completed, every other kind failed.
    """
    if not parts and facts_of(kind).is_deletion:
        return TargetsSummary(Status.COMPLETED, "completed", progress=100)
    if not parts:
        return TargetsSummary(Status.FAILED, f"error: {NO_ELIGIBLE_NODE}", NO_ELIGIBLE_NODE)
    unfinished = [part for part in parts if part.status not in ENDED]
    attempts = max(part.attempts for part in parts)
    progress = min(sum(map(target_progress, parts)) / len(parts), MAX_RUNNING_PERCENT)
    if not unfinished:
        return _final_state(parts, progress, attempts)
    running = [part for part in unfinished if part.status != TargetStatus.QUEUED]
    waits = all(part.waits_for_node for part in unfinished)
    progress_times = [part.last_progress_at for part in running if part.last_progress_at is not None]
    limits = [part.time_limit_at for part in running if part.time_limit_at is not None]
    next_looks = [part.next_check_at for part in unfinished if part.next_check_at is not None]
    return TargetsSummary(
        Status.PROCESSING if running else Status.WAITING if waits else Status.PENDING,
        unfinished[0].reason if len(parts) == 1 else _count_text(parts, unfinished),
        phase=(unfinished[0].phase if len(parts) == 1 else "") if running else QUEUED,
        progress=progress,
        next_check_at=min(next_looks, default=None),
        attempts=attempts,
        last_progress_at=max(progress_times, default=None),
        time_limit_at=max(limits, default=None),
    )


def _final_state(parts: Sequence[OperationTarget], progress: float, attempts: int) -> TargetsSummary:
    failed = [part for part in parts if part.status == TargetStatus.ERROR]
    if failed:
        named = failed[:MAX_NAMED_FAILURES]
        reasons = [part.error if len(parts) == 1 else f"{part.node_name}: {part.error}" for part in named]
        reasons += [f"and {len(failed) - len(named)} more"] if len(failed) > len(named) else []
        error = "; ".join(reasons)
        return TargetsSummary(Status.FAILED, f"error: {error}", error, progress=progress, attempts=attempts)
    if any(part.status == TargetStatus.SUCCESS for part in parts):
        cancelled = sum(part.status == TargetStatus.CANCELLED for part in parts)
        left_out = f", cancelled on {cancelled} of {len(parts)} nodes" if cancelled else ""
        return TargetsSummary(Status.COMPLETED, f"completed{left_out}", progress=100, attempts=attempts)
    return TargetsSummary(
        Status.CANCELLED, parts[0].reason or "cancelled", progress=progress, attempts=attempts
    )


def awaits_wave(part: OperationTarget) -> bool:
    """Return True if the target waits for its wave to open."""
    return part.wave is not None and part.intent_id is None and part.status not in ENDED


def wave_texts(parts: Iterable[OperationTarget]) -> dict[int, str]:
    """Return the text about each wave, by its number."""
    waves = sorted({part.wave for part in parts if part.wave is not None})
    return {wave: f"wave {number} of {len(waves)}" for number, wave in enumerate(waves, 1)}


def _count_text(parts: Sequence[OperationTarget], unfinished: Sequence[OperationTarget]) -> str:
    """Return a text with the number of nodes by outcome, the current wave, and why the rest waits."""
    done = sum(part.status == TargetStatus.SUCCESS for part in parts)
    failed = sum(part.status == TargetStatus.ERROR for part in parts)
    cancelled = sum(part.status == TargetStatus.CANCELLED for part in parts)
    waiting = sum(part.waits_for_node for part in unfinished)
    counts = [f"{done} of {len(parts)} nodes done"]
    counts += [f"{failed} failed"] if failed else []
    counts += [f"{cancelled} cancelled"] if cancelled else []
    counts += [f"{waiting} wait for their node"] if waiting else []
    text = ", ".join(counts)
    waves = [part.wave for part in unfinished if part.wave is not None]
    if not waves:
        return text
    # If all unfinished targets are held, the operation waits for the reason of the first.
    reason = f"; {unfinished[0].reason}" if all(map(awaits_wave, unfinished)) else ""
    return f"{wave_texts(parts)[min(waves)]}: {text}{reason}"


def set_derived_state(operation: Operation, parts: Sequence[OperationTarget], now: datetime) -> None:
    """Set the operation's state to the one that follows from its targets."""
    state = summarize_targets(operation.kind, parts)
    operation.status, operation.message, operation.error = state.status, state.message, state.error
    operation.phase, operation.progress, operation.attempts = state.phase, state.progress, state.attempts
    operation.last_progress_at, operation.time_limit_at = state.last_progress_at, state.time_limit_at
    operation.current_bytes = min(sum(part.current_bytes for part in parts), _MAX_BYTES)
    operation.total_bytes = min(sum(part.total_bytes for part in parts), _MAX_BYTES)
    operation.next_attempt_at = state.next_check_at or now
    operation.updated_at = now
    if state.status == Status.PROCESSING:
        operation.started_at = operation.started_at or now
    if state.status in (Status.COMPLETED, Status.FAILED, Status.CANCELLED):
        operation.finished_at = now


def raise_progress(operation: Operation, percentage: float) -> None:
    """Raise the operation's progress to `percentage`, but below 100. Progress never decreases."""
    operation.progress = min(max(percentage, operation.progress), MAX_RUNNING_PERCENT)


def of(operations: Iterable[Operation]) -> dict[UUID, list[OperationTarget]]:
    """Return the targets of these operations by operation id, in one query."""
    parts: dict[UUID, list[OperationTarget]] = {}
    for part in OperationTarget.objects.filter(operation__in=operations):
        parts.setdefault(part.operation_id, []).append(part)
    return parts


def restart_targets(operations: Iterable[Operation]) -> None:
    """Queue the unfinished targets of these operations for a new attempt; ended targets stay. Two queries."""
    rows = {operation.id: operation for operation in operations}
    if not rows:
        return
    for operation_id, parts in of(rows.values()).items():
        ended = [part for part in parts if part.status in ENDED]
        raise_progress(rows[operation_id], sum(map(target_progress, ended)) / len(parts))
    OperationTarget.objects.filter(operation_id__in=rows, status__in=UNFINISHED).update(
        status=TargetStatus.QUEUED, percentage=0, phase="", file_name="", current_bytes=0, total_bytes=0
    )
