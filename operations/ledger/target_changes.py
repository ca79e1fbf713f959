"""Targets that run independently: a change of an intent applies to every target that shares the intent.

An intent is a command that waits for one node; several operations may need the same one. `record_changes` is
one short transaction, and `apply_changes` a step of the caller's. Both need a constant number of statements
for any number of intents: they lock the operations in the order of their ids, change their targets, and
derive each operation's state from its targets. The changes are published at commit. A caller that also writes
intents locks the intents first. An operation that has ended does not change, so its end is final (A84).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Q

from localai_cluster.kit.leases import update_rows
from localai_cluster.kit.transactions import committed, limit_lock_wait
from operations import targets
from operations.changes.events import emit
from operations.ledger.progress import Tick, apply_to_target
from operations.models import ACTIVE, Operation, OperationTarget, TargetStatus, storable

Change = Callable[[OperationTarget, datetime], None]
"""A function that changes a target; it gets the target and the time."""
TARGET_COLUMNS = [
    "intent_id", "status", "phase", "percentage", "current_bytes", "total_bytes", "file_name", "error",
    "reason", "attempts", "next_check_at", "waits_for_node", "overdue_since", "started_at", "finished_at",
    "last_progress_at", "time_limit_at",
]  # fmt: skip
"""Columns of a target that a change may write."""
OPERATION_COLUMNS = [
    "status", "message", "error", "phase", "progress", "attempts", "current_bytes",
    "total_bytes", "next_attempt_at", "updated_at", "started_at", "finished_at",
    "last_progress_at", "time_limit_at",
]  # fmt: skip
"""Columns of the operation that follow from its targets."""


@dataclass(frozen=True)
class ChangedOperations:
    """Operations that were locked and changed, with all their targets. The caller emits them."""

    operations: Sequence[Operation]
    parts: Mapping[UUID, Sequence[OperationTarget]]
    moved: Sequence[OperationTarget] = ()
    """The changed targets."""


def record_changes(changes: Mapping[UUID, Change], *, now: datetime, lock_timeout: float = 0) -> None:
    """Apply each change to the unfinished targets of its intent, and emit the operations.

    Raises OperationalError if a lock takes longer than `lock_timeout` seconds; 0 = no limit.
    """
    with committed("ledger.happen"):
        limit_lock_wait(lock_timeout)
        changed = apply_changes(changes, now=now)
        emit(changed.operations, changed.parts, changed.moved)


def apply_changes(
    changes: Mapping[UUID, Change], *, now: datetime, held: Mapping[int, Change] | None = None
) -> ChangedOperations:
    """Apply each change to the unfinished targets of its intent. Return the changed operations.

    The caller emits them as the last step of its transaction. `held` maps ids of targets without an intent to
    their changes.
    """
    by_id = held or {}
    condition = Q(intent_id__in=changes) | Q(pk__in=by_id, intent_id__isnull=True)
    named = OperationTarget.objects.filter(condition, status__in=targets.UNFINISHED)
    ids = set(named.values_list("operation_id", flat=True)) if changes or by_id else set()
    if not ids:
        return ChangedOperations((), {})
    rows = Operation.objects.filter(pk__in=ids, status__in=ACTIVE).order_by("pk")
    operations = list(rows.select_for_update(no_key=True))
    parts = targets.of(operations)
    moved = []
    for operation in operations:
        for part in parts[operation.id]:
            apply = changes.get(part.intent_id) if part.intent_id else by_id.get(part.pk)
            if apply is not None and part.status not in targets.ENDED:
                apply(part, now)
                moved.append(part)
        targets.set_derived_state(operation, parts[operation.id], now)
    update_rows(moved, TARGET_COLUMNS)
    update_rows(operations, OPERATION_COLUMNS)
    return ChangedOperations(operations, parts, moved)


def begin(part: OperationTarget, now: datetime) -> None:
    """Start a new attempt at the target, unless a worker may still be running the previous attempt."""
    part.status = TargetStatus.RUNNING_ON_WORKER
    part.started_at = part.started_at or now
    part.next_check_at, part.waits_for_node = None, False
    if part.overdue_since is not None:
        return
    part.phase = "resolving"
    part.last_progress_at, part.time_limit_at = now, None
    part.percentage, part.file_name, part.current_bytes, part.total_bytes = 0, "", 0, 0
    part.reason, part.error = f"contacting {part.node_name}", ""


def begin_within(seconds: float) -> Change:
    """Return the change that starts an attempt: a command is sent now, to be answered in `seconds`."""
    return apply_both(begin, set_time_limit(seconds))


def set_time_limit(seconds: float) -> Change:
    """Return the change that sets the time limit of a command that is sent now, in `seconds`."""

    def apply(part: OperationTarget, now: datetime) -> None:
        part.time_limit_at = now + timedelta(seconds=seconds)

    return apply


def apply_reports(ticks: Collection[Tick]) -> Change:
    """Return the change that applies the worker's progress reports."""

    def apply(part: OperationTarget, now: datetime) -> None:
        for tick in ticks:
            apply_to_target(part, tick, now)
            part.reason = storable(tick.message) or part.reason

    return apply


def mark_overdue(reason: str, since: datetime) -> Change:
    """Return the change that marks the target as past its time limit. The worker may still run it (O19)."""

    def apply(part: OperationTarget, now: datetime) -> None:
        part.status, part.reason, part.overdue_since = TargetStatus.RUNNING_ON_WORKER, storable(reason), since

    return apply


def queue_again(
    reason: str,
    *,
    until: datetime | None,
    node: bool = False,
    attempts: int | None = None,
    worker_gone: bool = False,
) -> Change:
    """Return the change that queues a target again, until its node is back or its next attempt is due.

    `worker_gone` means that no worker is running the target any more.
    """

    def apply(part: OperationTarget, now: datetime) -> None:
        part.status, part.phase, part.time_limit_at = TargetStatus.QUEUED, "", None
        part.reason, part.next_check_at, part.waits_for_node = storable(reason), until, node
        part.attempts = part.attempts if attempts is None else attempts
        part.overdue_since = None if worker_gone else part.overdue_since

    return apply


def end(status: TargetStatus, *, error: str = "", reason: str = "", attempts: int | None = None) -> Change:
    """Return the change that ends a target. Its progress stays (O70)."""

    def apply(part: OperationTarget, now: datetime) -> None:
        part.status, part.phase, part.time_limit_at = status, "", None
        part.percentage = targets.target_progress(part)
        part.error, part.reason = storable(error), storable(reason)
        part.attempts = part.attempts if attempts is None else attempts
        part.next_check_at, part.waits_for_node, part.overdue_since = None, False, None
        part.finished_at = now

    return apply


def apply_both(first: Change, then: Change) -> Change:
    """Return a change that applies these two changes in order."""

    def apply(part: OperationTarget, now: datetime) -> None:
        first(part, now)
        then(part, now)

    return apply


def set_reasons(notes: Mapping[UUID, str], *, now: datetime) -> None:
    """Store the workers' replies as the reasons of cancelled targets, in the caller's transaction.

    No other column of an ended operation changes.
    """
    cancelled = OperationTarget.objects.filter(intent_id__in=notes, status=TargetStatus.CANCELLED)
    ids = set(cancelled.values_list("operation_id", flat=True))
    operations = list(Operation.objects.filter(pk__in=ids).order_by("pk").select_for_update(no_key=True))
    if not operations:
        return
    parts = list(cancelled.select_for_update(no_key=True))
    for part in parts:
        part.reason = storable(notes[part.intent_id]) if part.intent_id else part.reason
    update_rows(parts, ["reason"])
    emit(operations)
