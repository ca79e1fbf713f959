"""Websocket topics of operations: a stream of numbered changes, one message per change or batch.

The channel layer keeps an unbounded queue for every subscriber, which a slow subscriber would fill. So one
subscription serves the whole process and is drained at once. While the layer is away or loses messages, the
cursors read the changes from the rows a little later.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from channels.layers import get_channel_layer

from localai_cluster.kit import cancellation
from localai_cluster.web.sockets import Scope, encode_message, query_number
from operations.changes.cursor import Cursor, Update
from operations.changes.events import GROUP
from operations.changes.feed import PARTIAL, folded

log = logging.getLogger(__name__)

TEXTS = 8
"""Cached texts: most readers are at the same position, or slightly behind."""
RETRY_AFTER = 1.0
"""Seconds before the next try to subscribe."""


class FanOut:
    """The subscription of a process to the channel layer; it exists while there is a cursor."""

    def __init__(self) -> None:
        self._cursors: set[Cursor] = set()
        self._task: asyncio.Task[None] | None = None
        self._texts: dict[tuple[int, int], str] = {}

    def text(self, span: tuple[int, int], render: Callable[[], str]) -> str:
        """Return the text of the changes in `span`; `render` makes it once for all readers."""
        message = self._texts.get(span)
        if message is None:
            if len(self._texts) >= TEXTS:
                del self._texts[next(iter(self._texts))]
            message = self._texts[span] = render()
        return message

    @contextlib.asynccontextmanager
    async def subscribe(self, cursor: Cursor) -> AsyncIterator[None]:
        """Deliver to the cursor every change that the layer delivers."""
        self._cursors.add(cursor)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="operations fan-out")
        try:
            yield
        finally:
            self._cursors.discard(cursor)
            if not self._cursors:
                self._texts.clear()
            if not self._cursors and self._task is not None:
                task, self._task = self._task, None
                await cancellation.end(task)

    async def _run(self) -> None:
        failing = False
        while True:
            try:
                async with _subscription() as (layer, channel):
                    failing = False
                    for cursor in self._cursors:
                        cursor.wake()  # earlier changes were not received
                    while True:
                        message = await layer.receive(channel)
                        for cursor in self._cursors:
                            for change in message["operations"]:
                                cursor.receive(int(change["seq"]), change)
            except Exception as error:
                # Any error of the layer's client: meanwhile the cursors poll the rows.
                if not failing:
                    log.warning("changes of operations are not received: %r; retrying", error)
                failing = True
                await asyncio.sleep(RETRY_AFTER)


@contextlib.asynccontextmanager
async def _subscription() -> AsyncIterator[tuple[Any, str]]:
    layer: Any = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add(GROUP, channel)
    try:
        yield layer, channel
    finally:
        with contextlib.suppress(Exception):
            await layer.group_discard(GROUP, channel)


_shared = FanOut()


def shared() -> FanOut:
    """Return the fan-out of this process."""
    return _shared


async def _updates(since: int | None) -> AsyncGenerator[Update, None]:
    """Yield the update from `since` to the current state, then every change, without end."""
    cursor = Cursor()
    async with shared().subscribe(cursor):
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
                yield shared().text((update.after, update.seq), functools.partial(_group, update))


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
