"""Publishing of changes: a change of operations takes the next number, and is published at commit.

The counter's row is locked from taking a number until that commit. So `announce` is the last operation of a
transaction, and taking the number is its last statement: no transaction may wait for a row while it holds
the counter.
"""

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from django.db import connection, transaction

from operations import targets
from operations.changes import events, feed
from operations.models import Operation, OperationTarget


def announce(
    operations: Iterable[Operation],
    parts: Mapping[UUID, Sequence[OperationTarget]] | None = None,
    moved: Iterable[OperationTarget] | None = None,
) -> None:
    """Number the changes of these saved rows, and publish them at commit.

    `parts` are the rows' targets if the caller has read them, `moved` the changed ones among them. An upgrade
    in waves is always published complete, because a wave that opens changes further targets.
    """
    rows = list(operations)
    if not rows:
        return
    parts_by_id = targets.of(rows) if parts is None else parts
    events.notify(events.OPERATIONS, *(f"{operation.id} {operation.status}" for operation in rows))
    moved_by_id = None if moved is None else _by_operation(moved)
    changes = [
        feed.change_of(
            operation,
            parts_by_id.get(operation.id, ()),
            None if moved_by_id is None or operation.waves else moved_by_id.get(operation.id, ()),
        )
        for operation in rows
    ]
    _number(rows)
    for operation, change in zip(rows, changes, strict=True):
        change["seq"] = operation.seq
    transaction.on_commit(lambda: events.publish(changes))


def _by_operation(parts: Iterable[OperationTarget]) -> dict[UUID, list[OperationTarget]]:
    grouped: dict[UUID, list[OperationTarget]] = {}
    for part in parts:
        grouped.setdefault(part.operation_id, []).append(part)
    return grouped


def _number(rows: list[Operation]) -> None:
    """Assign the next numbers to the rows in their order; the counter's row stays locked until the commit."""
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH taken AS (INSERT INTO operation_sequence AS s (id, value) VALUES (1, %s)"
            " ON CONFLICT (id) DO UPDATE SET value = s.value + EXCLUDED.value RETURNING value)"
            " UPDATE operations SET seq = taken.value - %s + row.number"
            " FROM taken, unnest(%s::uuid[]) WITH ORDINALITY AS row (id, number)"
            " WHERE operations.id = row.id RETURNING operations.id, operations.seq",
            [len(rows), len(rows), [operation.id for operation in rows]],
        )
        numbers = dict(cursor.fetchall())
    for operation in rows:
        operation.seq = numbers[operation.id]
