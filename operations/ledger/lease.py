"""Which controller works on an operation: claimed under a lease, renewed, handed back, reaped."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from localai_cluster.commits import committed
from operations import targets
from operations.changes import events
from operations.changes.announce import announce
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
    """Takes up to `limit` due operations under a lease of `lease` seconds, and waits for no row."""
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
    """Extends the leases of `owner` on `ids`; answers id and fence of those that are still its own.

    Only what is really being worked on may be named: the others must run out. A row that is locked, because
    its progress or outcome is being written, is left out this time: one that hangs must not cost all others
    their leases. It stays the owner's, since taking leases back leaves locked rows out too.
    """
    mine = Operation.objects.filter(pk__in=ids, status=Status.PROCESSING, lease_owner=owner)
    with committed("ledger.renew"):
        free = list(mine.select_for_update(skip_locked=True, no_key=True).values_list("pk", flat=True))
        Operation.objects.filter(pk__in=free).update(lease_until=now + timedelta(seconds=lease))
    return dict(mine.values_list("id", "fence"))


def confirm(operation_id: UUID, fence: int) -> None:
    """Raises LeaseLost when the operation is no longer this attempt's; locks and writes nothing."""
    if not Operation.objects.filter(pk=operation_id, fence=fence, status=Status.PROCESSING).exists():
        raise LeaseLost(str(operation_id))


def release(owner: str, *, now: datetime) -> int:
    """Hands back everything `owner` holds, at once: it is stopping. Answers how many."""
    with committed("ledger.release"):
        mine = list(
            Operation.objects.select_for_update(no_key=True)
            .filter(status=Status.PROCESSING, lease_owner=owner)
            .order_by("pk")
        )
        _hand_back(mine, Event.RELEASE, now, "its controller stopped; another one takes over")
    return len(mine)


def reap(*, now: datetime) -> tuple[int, int]:
    """Operations whose lease ran out go back to the queue, or fail after too many.

    Answers (requeued, failed).
    """
    with committed("ledger.reap"):
        lost = list(Operation.objects.orphaned(at=now).select_for_update(skip_locked=True, no_key=True))
        hopeless = [operation for operation in lost if operation.lost_leases >= MAX_LOST_LEASES]
        again = [operation for operation in lost if operation.lost_leases < MAX_LOST_LEASES]
        for operation in again:
            operation.lost_leases += 1
        _hand_back(again, Event.LOSE, now, "its controller fell silent; another one takes over")
        for operation in hopeless:
            finish(
                operation.id,
                operation.fence,
                Event.FAIL,
                now=now,
                error=f"given up: {operation.lost_leases} controllers fell silent while working on it",
            )
    return len(again), len(hopeless)


def _hand_back(operations: list[Operation], event: Event, now: datetime, reason: str) -> None:
    for operation in operations:
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.next_attempt_at = operation.updated_at = now
        operation.message, operation.phase = reason, QUEUED
    update(operations, _HANDED_BACK)
    announce(operations)


def wake(ids: Collection[UUID], *, now: datetime) -> int:
    """Has those of the operations that wait for nodes looked at now; answers how many.

    A back-off after a failed attempt is not cut short. The rows are locked in the order of their ids, because
    several controllers may wake the same ones.
    """
    if not ids:
        return 0
    with committed("ledger.wake"):
        waiting = Operation.objects.filter(pk__in=ids, status=Status.WAITING, next_attempt_at__gt=now)
        found = list(waiting.order_by("id").select_for_update(no_key=True).values_list("id", flat=True))
        if found:
            Operation.objects.filter(pk__in=found).update(next_attempt_at=now)
            events.notify(events.OPERATIONS, f"* {Status.PENDING}")
    return len(found)
