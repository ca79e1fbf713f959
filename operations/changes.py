"""How a change of operations becomes news: it takes the next number, and leaves when its transaction commits.

The counter's row is locked by whoever writes until that commit, so `announce` is the last thing that a
transaction does to operations: nobody may wait for a row while holding the counter.
"""

from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from operations import events, feed
from operations.models import Operation, OperationTarget


def announce(operations: Iterable[Operation]) -> None:
    """Numbers the changes of these rows, which are saved already, and lets the news leave at commit."""
    rows = list(operations)
    if not rows:
        return
    last = _take_numbers(len(rows))
    for seq, operation in enumerate(rows, start=last - len(rows) + 1):
        operation.seq = seq
    Operation.objects.bulk_update(rows, ["seq"])
    targets: dict[UUID, list[OperationTarget]] = {}
    for target in OperationTarget.objects.filter(operation__in=rows):
        targets.setdefault(target.operation_id, []).append(target)
    events.notify(events.OPERATIONS, *(f"{operation.id} {operation.status}" for operation in rows))
    for operation in rows:
        change = feed.as_dict(operation, targets.get(operation.id, []))
        transaction.on_commit(_publisher(operation.seq, change))


def _take_numbers(count: int) -> int:
    """The last of the next `count` numbers; the counter's row stays locked until this transaction commits."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO operation_sequence AS s (id, value) VALUES (1, %s)"
            " ON CONFLICT (id) DO UPDATE SET value = s.value + EXCLUDED.value RETURNING value",
            [count],
        )
        return int(cursor.fetchone()[0])


def _publisher(seq: int, change: dict[str, Any]) -> Callable[[], None]:
    return lambda: events.publish(seq, change)
