"""The fan-out of operations' changes in a web process: one subscription to the channel layer for all cursors.

The layer keeps an unbounded queue for every subscriber, which a slow subscriber would fill. So one
subscription serves the whole process and is drained at once. While the layer is away or loses messages, the
cursors read the changes from the rows a little later.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from channels.layers import get_channel_layer

from localai_cluster.kit import cancellation
from operations.changes.cursor import Cursor
from operations.changes.events import GROUP

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
