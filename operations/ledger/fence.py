"""The fence of an attempt: it may write only while the operation is still its own."""

from uuid import UUID

from operations.models import Operation, Status


class LeaseLost(Exception):
    """Somebody else owns the operation now, or it has ended; what was about to be written is void."""


def owned(operation_id: UUID, fence: int) -> Operation:
    operation = (
        Operation.objects.select_for_update(no_key=True)
        .filter(pk=operation_id, fence=fence, status=Status.PROCESSING)
        .first()
    )
    if operation is None:
        raise LeaseLost(str(operation_id))
    return operation
