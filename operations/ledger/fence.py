"""Fencing of attempts: an attempt may write only while it still owns the operation."""

from uuid import UUID

from operations.models import Operation, Status


class LeaseLost(Exception):
    """Another attempt owns the operation, or it has ended; the caller's write is void."""


def owned(operation_id: UUID, fence: int) -> Operation:
    operation = (
        Operation.objects.select_for_update(no_key=True)
        .filter(pk=operation_id, fence=fence, status=Status.PROCESSING)
        .first()
    )
    if operation is None:
        raise LeaseLost(str(operation_id))
    return operation
