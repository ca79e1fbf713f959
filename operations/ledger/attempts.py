"""Attempts at operations: a controller claims an operation under a lease, renews it, and records the outcome.

Every function is one short transaction. It locks the row, checks fence and status against the table in
`operations/models.py`, writes, takes the next sequence number last, and publishes the change at commit. The
number comes last so that no transaction waits for a row while it holds the counter. If the row belongs to
another attempt, the function raises `LeaseLost` and never overwrites the row.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from localai_cluster.kit import errors, leases
from localai_cluster.kit.leases import update_rows
from localai_cluster.kit.transactions import committed
from operations import targets
from operations.changes import events
from operations.changes.events import emit
from operations.ledger.admission import DISMISSAL_COLUMNS, set_dismissed
from operations.ledger.progress import REPORT_COLUMNS, Tick, apply_last_reports
from operations.models import (
    QUEUED,
    UNDISMISSED_FAILURE,
    Event,
    Operation,
    OperationQuerySet,
    OperationTarget,
    Status,
    TargetStatus,
    next_status,
    storable,
)


def leased_operations() -> OperationQuerySet:
    """Return the operations that a controller is running under a lease."""
    return Operation.objects.filter(status=Status.PROCESSING, by_parts=False)


def lock_owned(operation_id: UUID, fence: int) -> Operation:
    """Lock the operation and return it. Raise LeaseLost if it is not owned by the attempt with this fence."""
    operation = leases.lock_attempt_rows(leased_operations(), [(operation_id, fence)]).get(operation_id)
    if operation is None:
        raise leases.LeaseLost(str(operation_id))
    return operation


def end_target(
    operation_id: UUID, fence: int, node_id: UUID, status: TargetStatus, error: str = "", *, now: datetime
) -> None:
    """End the operation's target on one node and publish it; see `end_targets` and `publish_targets`.

    Raises NotFound if the operation has no target on the node, and ValueError unless the status is final.
    """
    if status not in targets.ENDED:
        raise ValueError(f"{status} is not a final status")
    with committed("ledger.target_done"):
        lock_owned(operation_id, fence)
        if not OperationTarget.objects.filter(operation_id=operation_id, node_id=node_id).exists():
            raise errors.NotFound(f"operation {operation_id} has no part on node {node_id}")
        if end_targets(operation_id, {node_id: (status, error)}):
            publish_targets(operation_id, fence, [node_id], now=now)


def end_targets(operation_id: UUID, outcomes: Mapping[UUID, tuple[TargetStatus, str]]) -> int:
    """End the targets on these nodes with status and error. Return how many had not ended before.

    Their progress stays (O70). The caller owns the operation in its transaction, and publishes the targets
    later.
    """
    rows = OperationTarget.objects.filter(operation_id=operation_id, node_id__in=outcomes)
    ending = list(rows.filter(status__in=targets.UNFINISHED))
    for target in ending:
        target.status, error = outcomes[target.node_id]
        target.error, target.phase, target.percentage = storable(error), "", targets.target_progress(target)
    update_rows(ending, ["status", "error", "phase", "percentage"])
    return len(ending)


def publish_targets(operation_id: UUID, fence: int, node_ids: Collection[UUID], *, now: datetime) -> None:
    """Derive the operation's state from its targets, and publish the targets on these nodes.

    Raises LeaseLost.
    """
    with committed("ledger.target_done"):
        operation, nodes = lock_owned(operation_id, fence), frozenset(node_ids)
        parts = list(OperationTarget.objects.filter(operation_id=operation_id))
        if len(parts) > 1:
            targets.aggregate_progress(operation, parts)
        operation.updated_at = now
        operation.save(update_fields=REPORT_COLUMNS)
        emit([operation], {operation_id: parts}, [part for part in parts if part.node_id in nodes])


def finish(
    operation_id: UUID,
    fence: int,
    event: Event,
    *,
    now: datetime,
    error: str = "",
    message: str = "",
    result: Mapping[str, Any] | None = None,
    ticks: Collection[Tick] = (),
) -> None:
    """End the attempt and its operation: complete, fail or cancel.

    Raises LeaseLost if the attempt has lost it. Targets that have already ended keep their status. A
    completed operation dismisses the failures of its children. `ticks` are unwritten reports.
    """
    with committed("ledger.finish"):
        operation, error = lock_owned(operation_id, fence), storable(error)
        apply_last_reports(operation, ticks, now)
        ok = event is Event.COMPLETE
        operation.status = next_status(event, operation.status)
        operation.end_lease()
        operation.finished_at = operation.updated_at = now
        operation.time_limit_at = None
        operation.error = error
        default_message = "completed" if ok else f"error: {error}" if error else event.value
        operation.message = storable(message) or default_message
        operation.phase = ""
        operation.progress = 100 if ok else operation.progress
        operation.result = dict(result or {})
        operation.save()
        unfinished = OperationTarget.objects.filter(operation=operation, status__in=targets.UNFINISHED)
        if ok:
            unfinished.update(status=TargetStatus.SUCCESS, phase="", percentage=100)
        else:
            unfinished.update(status=TargetStatus.ERROR, phase="", error=error or operation.message)
        emit([*(_dismiss_failed_children(operation, now) if ok else ()), operation])


def _dismiss_failed_children(operation: Operation, now: datetime) -> list[Operation]:
    """Dismiss the failed children of a completed operation; the caller emits them."""
    failed = operation.children.filter(UNDISMISSED_FAILURE)
    children = list(failed.order_by("pk").select_for_update(no_key=True))
    for child in children:
        set_dismissed(child, "system", f"operation {operation.id} has completed without it", now)
    update_rows(children, DISMISSAL_COLUMNS)
    return children


def put_back(
    operation_id: UUID,
    fence: int,
    event: Event,
    *,
    now: datetime,
    until: datetime,
    reason: str,
    payload: Mapping[str, Any] | None = None,
    ticks: Collection[Tick] = (),
) -> None:
    """End the attempt and requeue the operation, with the reason and the time of the retry (rule 4).

    The retry comes no later than `needed_until`, because the operation is abandoned at that time.
    """
    with committed("ledger.put_back"):
        operation = lock_owned(operation_id, fence)
        apply_last_reports(operation, ticks, now)
        operation.status = next_status(event, operation.status)
        operation.end_lease()
        operation.attempts += 1 if event is Event.POSTPONE else 0
        deadline = operation.needed_until
        operation.next_attempt_at = deadline if deadline is not None and now < deadline < until else until
        operation.message = storable(reason) or operation.message
        operation.phase, operation.time_limit_at = QUEUED, None
        operation.updated_at = now
        if payload is not None:
            operation.payload = dict(payload)
        operation.save()
        emit([operation])


def update_payload(operation_id: UUID, fence: int, entries: Mapping[str, Any]) -> None:
    """Add entries to the operation's payload for later attempts."""
    with committed("ledger.remember"):
        operation = lock_owned(operation_id, fence)
        operation.payload = {**operation.payload, **entries}
        operation.save(update_fields=["payload"])


_CLAIM_COLUMNS = [
    *leases.LEASE_COLUMNS, "status", "started_at", "updated_at",
    "phase", "message", "progress", "current_bytes", "total_bytes",
    "file_index", "total_files", "bytes_per_second", "last_progress_at", "time_limit_at",
]  # fmt: skip
_RELEASE_COLUMNS = [
    *leases.LEASE_COLUMNS, "status", "next_attempt_at", "updated_at", "message", "phase",
]  # fmt: skip


def claim(owner: str, *, now: datetime, lease: float, limit: int) -> list[Operation]:
    """Claim up to `limit` due operations under a lease of `lease` seconds; skip locked rows."""
    with committed("ledger.claim"):
        queue = Operation.objects.due(at=now).order_by("next_attempt_at")
        due = leases.claim(queue, owner, now=now, lease=lease, limit=limit)
        for operation in due:
            operation.status = next_status(Event.CLAIM, operation.status)
            operation.started_at = operation.started_at or now
            operation.updated_at = now
            operation.phase, operation.message = "", "starting"
            operation.progress = operation.current_bytes = operation.total_bytes = 0
            operation.file_index = operation.total_files = operation.bytes_per_second = 0
            operation.last_progress_at, operation.time_limit_at = now, None
        targets.restart_targets([operation for operation in due if operation.fence > 1])
        update_rows(due, _CLAIM_COLUMNS)
        emit(due)
    return due


def renew(owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
    """Extend the leases of a controller; see `leases.renew`."""
    with committed("ledger.renew"):
        return leases.renew(leased_operations(), owner, ids, now=now, lease=lease)


def confirm(operation_id: UUID, fence: int) -> None:
    """Raise LeaseLost if the attempt does not own the operation any more. Locks and writes nothing."""
    leases.confirm(leased_operations(), (operation_id, fence))


def release(owner: str, *, now: datetime) -> int:
    """Give back all operations of the stopping controller `owner`. Return their number."""
    with committed("ledger.release"):
        mine = leases.lock_owned_rows(leased_operations(), owner)
        _hand_back(mine, Event.RELEASE, now, "its controller stopped; another one takes over")
    return len(mine)


def reap(*, now: datetime) -> tuple[int, int]:
    """Requeue the operations whose lease has expired, or fail them after too many lost leases.

    Return the numbers of requeued and of failed operations.
    """
    with committed("ledger.reap"):
        requeued, hopeless = leases.lock_expired_rows(leased_operations(), now=now)
        _hand_back(requeued, Event.LOSE, now, "its controller fell silent; another one takes over")
        for operation in hopeless:
            finish(
                operation.id,
                operation.fence,
                Event.FAIL,
                now=now,
                error=f"given up: {operation.lost_leases} controllers fell silent while working on it",
            )
    return len(requeued), len(hopeless)


def _hand_back(operations: list[Operation], event: Event, now: datetime, reason: str) -> None:
    for operation in operations:
        operation.status = next_status(event, operation.status)
        operation.end_lease()
        operation.next_attempt_at = operation.updated_at = now
        operation.message, operation.phase = reason, QUEUED
    update_rows(operations, _RELEASE_COLUMNS)
    emit(operations)


def wake(ids: Collection[UUID], *, now: datetime) -> int:
    """Make those of these operations due now that wait for a node. Return the number of changed operations.

    A back-off after a failed attempt is not cut short. The rows are locked in the order of their ids, because
    several controllers may wake the same operations.
    """
    if not ids:
        return 0
    with committed("ledger.wake"):
        waiting = Operation.objects.filter(pk__in=ids, status=Status.WAITING, next_attempt_at__gt=now)
        locked_ids = list(waiting.order_by("id").select_for_update(no_key=True).values_list("id", flat=True))
        if locked_ids:
            Operation.objects.filter(pk__in=locked_ids).update(next_attempt_at=now)
            events.notify(events.OPERATIONS, f"* {Status.PENDING}")
    return len(locked_ids)
