"""What sockets carry of operations: one stream of numbered changes, as one message each or together."""

import contextlib
from collections.abc import AsyncGenerator

from localai_cluster.web.sockets import Scope, encoded, number_in
from operations.changes import fanout
from operations.changes.cursor import Cursor, Update


async def updates(since: int | None) -> AsyncGenerator[Update, None]:
    """First where operations stand, as seen from `since`, then every change, without end."""
    cursor = Cursor()
    async with fanout.shared().subscribe(cursor):
        async for update in cursor.updates(since):
            yield update


async def single_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """`/ws/operations`: a snapshot, then one message for each change; `?since=` resumes."""
    async with contextlib.aclosing(updates(number_in(scope, "since"))) as stream:
        async for update in stream:
            if update.whole:
                yield encoded({"type": "snapshot", "seq": update.seq, "operations": update.operations})
                continue
            for operation in update.operations:
                yield encoded({"type": "delta", "seq": operation["seq"], "operation": operation})


async def grouped_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """`/ws/feed`: changes that come together are one message; `?operations=` resumes."""
    async with contextlib.aclosing(updates(number_in(scope, "operations"))) as stream:
        async for update in stream:
            kind = "operations.snapshot" if update.whole else "operations.delta"
            # Several changes of one operation are its last one.
            last = {operation["jobID"]: operation for operation in update.operations}
            operations = [one for one in update.operations if last[one["jobID"]] is one]
            yield encoded({"type": kind, "seq": update.seq, "operations": operations})
