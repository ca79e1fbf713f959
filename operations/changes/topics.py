"""What sockets carry of operations: one stream of numbered changes, as one message each or together."""

import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Any

from localai_cluster.web.sockets import Scope, encoded, number_in
from operations.changes import fanout
from operations.changes.cursor import Cursor, Update
from operations.changes.partial import PARTIAL, folded


async def _updates(since: int | None) -> AsyncGenerator[Update, None]:
    """First where operations stand, as seen from `since`, then every change, without end."""
    cursor = Cursor()
    async with fanout.shared().subscribe(cursor):
        async for update in cursor.updates(since):
            yield update


async def single_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """`/ws/operations`: a snapshot, then one message for each change; `?since=` resumes."""
    async with contextlib.aclosing(_updates(number_in(scope, "since"))) as stream:
        async for update in stream:
            if update.whole:
                yield encoded({"type": "snapshot", "seq": update.seq, "operations": update.operations})
                continue
            for change in update.operations:
                operation, partial = _split(change)
                told = {"type": "delta", "seq": operation["seq"], "operation": operation}
                yield encoded(told | ({PARTIAL: True} if partial else {}))


async def grouped_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """`/ws/feed`: changes that come together are one message; `?operations=` resumes."""
    async with contextlib.aclosing(_updates(number_in(scope, "operations"))) as stream:
        async for update in stream:
            if update.whole:
                whole = {"type": "operations.snapshot", "seq": update.seq, "operations": update.operations}
                yield encoded(whole)
            elif update.after is None:
                yield _group(update)
            else:
                yield fanout.shared().text((update.after, update.seq), functools.partial(_group, update))


def _group(update: Update) -> str:
    operations, partial = [], []
    for change in folded(update.operations):
        operation, is_partial = _split(change)
        operations.append(operation)
        partial += [operation["jobID"]] if is_partial else []
    told = {"type": "operations.delta", "seq": update.seq, "operations": operations}
    return encoded(told | ({PARTIAL: partial} if partial else {}))


def _split(change: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The operation as the document describes it, and whether only the parts that changed are in it."""
    return {key: value for key, value in change.items() if key != PARTIAL}, PARTIAL in change
