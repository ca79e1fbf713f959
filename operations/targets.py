"""An operation's part on each of its nodes, and what the parts add up to (O64 to O70).

An operation on several nodes is as far as the mean of its parts: a success counts 100, one that waits
nothing, and one that failed what it had reached. It never goes back within an attempt, and 100 is for the
end.
"""

from collections.abc import Iterable, Sequence
from uuid import UUID

from operations.models import Operation, OperationTarget, TargetStatus

ENDED = (TargetStatus.SUCCESS, TargetStatus.ERROR)
LAST_BEFORE_THE_END = 99.0
_MOST_BYTES = 2**63 - 1
"""What a column holds: each worker's figures do, but not always their sum."""


def share(target: OperationTarget) -> float:
    """How far this part is, in percent."""
    return 100.0 if target.status == TargetStatus.SUCCESS else target.percentage


def add_up(operation: Operation, parts: Sequence[OperationTarget]) -> None:
    """Sets progress, bytes and message of an operation on several nodes from its parts."""
    ended = sum(part.status in ENDED for part in parts)
    failed = sum(part.status == TargetStatus.ERROR for part in parts)
    reach(operation, sum(map(share, parts)) / len(parts))
    reached = min(sum(part.current_bytes for part in parts), _MOST_BYTES)
    operation.current_bytes = max(reached, operation.current_bytes)
    operation.total_bytes = min(sum(part.total_bytes for part in parts), _MOST_BYTES)
    operation.message = f"{ended} of {len(parts)} nodes done" + (f", {failed} failed" if failed else "")


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
