"""Websocket topics of operations: a stream of numbered changes, one message per change or batch."""

import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Any

from localai_cluster.web.sockets import Scope, encode_message, query_number
from operations.changes import fanout
from operations.changes.cursor import Cursor, Update
from operations.changes.partial import PARTIAL, folded


async def _updates(since: int | None) -> AsyncGenerator[Update, None]:
    """Yield the update from `since` to the current state, then every change, without end."""
    cursor = Cursor()
    async with fanout.shared().subscribe(cursor):
        async for update in cursor.updates(since):
            yield update


async def single_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield for `/ws/operations` a snapshot, then one message per change; `?since=` resumes."""
    async with contextlib.aclosing(_updates(query_number(scope, "since"))) as stream:
        async for update in stream:
            if update.whole:
                yield encode_message({"type": "snapshot", "seq": update.seq, "operations": update.operations})
                continue
            for change in update.operations:
                operation, partial = _split(change)
                message = {"type": "delta", "seq": operation["seq"], "operation": operation}
                yield encode_message(message | ({PARTIAL: True} if partial else {}))


async def grouped_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield for `/ws/feed` one message per batch of changes; `?operations=` resumes."""
    async with contextlib.aclosing(_updates(query_number(scope, "operations"))) as stream:
        async for update in stream:
            if update.whole:
                message = {"type": "operations.snapshot", "seq": update.seq, "operations": update.operations}
                yield encode_message(message)
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
    message = {"type": "operations.delta", "seq": update.seq, "operations": operations}
    return encode_message(message | ({PARTIAL: partial} if partial else {}))


def _split(change: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the operation as documented, and True if it has only the changed targets."""
    return {key: value for key, value in change.items() if key != PARTIAL}, PARTIAL in change
