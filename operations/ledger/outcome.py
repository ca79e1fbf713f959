"""Outcomes of attempts, and of their targets on single nodes.

Every function of this package is one short transaction: lock the row, check fence and status against the
table in `states.py`, write, take the next sequence number last (so that no transaction waits for a row while
it holds the counter), and publish the change at commit. A function whose row belongs to another attempt
raises `LeaseLost`; it never overwrites. Row locks are `FOR NO KEY UPDATE`: a stronger one would make the
foreign key of a child, checked at its commit, wait for its parent's transaction while it holds the counter.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from localai_cluster.kit import errors
from localai_cluster.kit.commit_hooks import committed
from operations import targets
from operations.changes.publish import announce
from operations.ledger.fence import LeaseLost, owned
from operations.ledger.progress import REPORTED, Tick, catch_up, record
from operations.models import QUEUED, Operation, OperationTarget, Status, TargetStatus, storable
from operations.states import Event, after


def progress(operation_id: UUID, fence: int, tick: Tick, *, now: datetime) -> None:
    """Record one report of the running attempt; raise LeaseLost if it no longer owns the operation."""
    if record({(operation_id, fence): [tick]}, now=now):
        raise LeaseLost(str(operation_id))


def target_done(
    operation_id: UUID, fence: int, node_id: UUID, status: TargetStatus, error: str = "", *, now: datetime
) -> None:
    """End the target on one node: success, or error with the reason; its progress stays (O70).

    Idempotent: a target that has ended does not change. Raises LeaseLost if the attempt no longer owns the
    operation, NotFound if the operation has no target on that node, ValueError unless the status is final.
    """
    if status not in targets.ENDED:
        raise ValueError(f"{status} is no end")
    with committed("ledger.target_done"):
        operation = owned(operation_id, fence)
        parts = list(OperationTarget.objects.filter(operation_id=operation_id))
        target = next((target for target in parts if target.node_id == node_id), None)
        if target is None:
            raise errors.NotFound(f"operation {operation_id} has no part on node {node_id}")
        if target.status in targets.ENDED:
            return
        target.status, target.error, target.phase = status, storable(error), ""
        target.percentage = targets.share(target)
        target.save()
        if len(parts) > 1:
            targets.add_up(operation, parts)
        operation.updated_at = now
        operation.save(update_fields=REPORTED)
        announce([operation], {operation_id: parts}, [target])


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
    """End the attempt's operation: complete, fail or cancel. Raises LeaseLost if the attempt lost it.

    Targets that have already ended keep their status. A completed operation dismisses the failures of its
    children. `ticks` are reports that are not written yet.
    """
    with committed("ledger.finish"):
        operation, error = owned(operation_id, fence), storable(error)
        catch_up(operation, ticks, now)
        ok = event is Event.COMPLETE
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.finished_at = operation.updated_at = now
        operation.time_limit_at = None
        operation.error = error
        default_message = "completed" if ok else f"error: {error}" if error else event.value
        operation.message = storable(message) or default_message
        operation.phase = ""
        operation.progress = 100 if ok else operation.progress
        operation.result = dict(result or {})
        operation.save()
        unfinished = OperationTarget.objects.filter(operation=operation).exclude(status__in=targets.ENDED)
        if ok:
            unfinished.update(status=TargetStatus.SUCCESS, phase="", percentage=100)
        else:
            unfinished.update(status=TargetStatus.ERROR, phase="", error=error or operation.message)
        announce([*(_dismiss_failed_children(operation, now) if ok else ()), operation])


def _dismiss_failed_children(operation: Operation, now: datetime) -> list[Operation]:
    """Dismiss the failed children of a completed operation; the caller announces them."""
    failed = operation.children.filter(status=Status.FAILED, dismissed_at__isnull=True)
    children = list(failed.order_by("pk").select_for_update(no_key=True))
    for child in children:
        child.dismissed_at, child.dismissed_by = now, "system"
        child.dismissed_comment = f"operation {operation.id} has completed without it"
    Operation.objects.bulk_update(children, ["dismissed_at", "dismissed_by", "dismissed_comment"])
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

    The retry comes no later than `needed_until`, when the operation is abandoned.
    """
    with committed("ledger.put_back"):
        operation = owned(operation_id, fence)
        catch_up(operation, ticks, now)
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.attempts += 1 if event is Event.POSTPONE else 0
        deadline = operation.needed_until
        operation.next_attempt_at = deadline if deadline is not None and now < deadline < until else until
        operation.message = storable(reason) or operation.message
        operation.phase, operation.time_limit_at = QUEUED, None
        operation.updated_at = now
        if payload is not None:
            operation.payload = dict(payload)
        operation.save()
        announce([operation])
