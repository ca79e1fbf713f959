"""Leases of operations: a controller claims, renews and releases them; expired ones are reaped."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from localai_cluster.kit.commit_hooks import committed
from operations import targets
from operations.changes import events
from operations.changes.publish import announce
from operations.ledger.fence import LeaseLost
from operations.ledger.outcome import finish
from operations.ledger.progress import update
from operations.models import QUEUED, Operation, Status
from operations.states import Event, after

MAX_LOST_LEASES = 10


_CLAIMED = [
    "status", "lease_owner", "lease_until", "fence", "started_at", "updated_at",
    "phase", "message", "progress", "current_bytes", "total_bytes",
    "file_index", "total_files", "bytes_per_second", "last_progress_at", "time_limit_at",
]  # fmt: skip
_HANDED_BACK = [
    "status", "lease_owner", "lease_until", "next_attempt_at", "updated_at", "message", "phase",
    "lost_leases",
]  # fmt: skip


def claim(owner: str, *, now: datetime, lease: float, limit: int) -> list[Operation]:
    """Claim up to `limit` due operations under a lease of `lease` seconds; skip locked rows."""
    with committed("ledger.claim"):
        due = list(
            Operation.objects.due(at=now)
            .select_for_update(skip_locked=True, no_key=True)
            .order_by("next_attempt_at")[:limit]
        )
        for operation in due:
            operation.status = after(Event.CLAIM, operation.status)
            operation.lease_owner, operation.lease_until = owner, now + timedelta(seconds=lease)
            operation.fence += 1
            operation.started_at = operation.started_at or now
            operation.updated_at = now
            operation.phase, operation.message = "", "starting"
            operation.progress = operation.current_bytes = operation.total_bytes = 0
            operation.file_index = operation.total_files = operation.bytes_per_second = 0
            operation.last_progress_at, operation.time_limit_at = now, None
        targets.restart_parts(operation for operation in due if operation.fence > 1)
        update(due, _CLAIMED)
        announce(due)
    return due


def renew(owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
    """Extend the leases of `owner` on `ids`; return the ids that it still owns, with their fences.

    Pass only the ids of running attempts: the other leases must expire. A row that is locked, because its
    progress or outcome is being written, is skipped: one blocked row must not cost all others their leases.
    The owner keeps it, because `reap` skips locked rows too.
    """
    mine = Operation.objects.filter(pk__in=ids, status=Status.PROCESSING, lease_owner=owner)
    with committed("ledger.renew"):
        free = list(mine.select_for_update(skip_locked=True, no_key=True).values_list("pk", flat=True))
        Operation.objects.filter(pk__in=free).update(lease_until=now + timedelta(seconds=lease))
    return dict(mine.values_list("id", "fence"))


def confirm(operation_id: UUID, fence: int) -> None:
    """Raise LeaseLost if the attempt no longer owns the operation; lock and write nothing."""
    if not Operation.objects.filter(pk=operation_id, fence=fence, status=Status.PROCESSING).exists():
        raise LeaseLost(str(operation_id))


def release(owner: str, *, now: datetime) -> int:
    """Release all operations of `owner`, which is stopping; return their number."""
    with committed("ledger.release"):
        mine = list(
            Operation.objects.select_for_update(no_key=True)
            .filter(status=Status.PROCESSING, lease_owner=owner)
            .order_by("pk")
        )
        _hand_back(mine, Event.RELEASE, now, "its controller stopped; another one takes over")
    return len(mine)


def reap(*, now: datetime) -> tuple[int, int]:
    """Requeue the operations whose lease has expired, or fail them after too many lost leases.

    Return (requeued, failed).
    """
    with committed("ledger.reap"):
        lost = list(Operation.objects.orphaned(at=now).select_for_update(skip_locked=True, no_key=True))
        hopeless = [operation for operation in lost if operation.lost_leases >= MAX_LOST_LEASES]
        requeued = [operation for operation in lost if operation.lost_leases < MAX_LOST_LEASES]
        for operation in requeued:
            operation.lost_leases += 1
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
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.next_attempt_at = operation.updated_at = now
        operation.message, operation.phase = reason, QUEUED
    update(operations, _HANDED_BACK)
    announce(operations)


def wake(ids: Collection[UUID], *, now: datetime) -> int:
    """Make those of the operations that wait for nodes due now; return their number.

    A back-off after a failed attempt is not cut short. The rows are locked in the order of their ids, because
    several controllers may wake the same ones.
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
