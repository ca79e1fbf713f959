"""The fan-out of operations' changes in a web process: one subscription to the channel layer for all cursors.

The layer keeps an endless queue for every subscriber and reads it at that one's pace. So one subscription
serves the whole process and is emptied at once. The layer may be away or lose messages: then the cursors find
the changes in the rows a little later.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from channels.layers import get_channel_layer

from localai_cluster import cancel
from operations.changes.cursor import Cursor
from operations.changes.events import GROUP

log = logging.getLogger(__name__)

TEXTS = 8
"""Texts kept: readers stand at the same place, or a moment behind."""
RETRY_AFTER = 1.0
"""Seconds before the next try to subscribe."""


class FanOut:
    """Is subscribed while there is a cursor."""

    def __init__(self) -> None:
        self._cursors: set[Cursor] = set()
        self._task: asyncio.Task[None] | None = None
        self._texts: dict[tuple[int, int], str] = {}

    def text(self, span: tuple[int, int], made: Callable[[], str]) -> str:
        """What is told of the changes from one number to another, made once for all who stand there."""
        found = self._texts.get(span)
        if found is None:
            if len(self._texts) >= TEXTS:
                del self._texts[next(iter(self._texts))]
            found = self._texts[span] = made()
        return found

    @contextlib.asynccontextmanager
    async def subscribe(self, cursor: Cursor) -> AsyncIterator[None]:
        """The cursor receives every change that gets through."""
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
                await cancel.end(task)

    async def _run(self) -> None:
        failing = False
        while True:
            try:
                async with _subscription() as (layer, channel):
                    failing = False
                    for cursor in self._cursors:
                        cursor.wake()  # earlier changes did not come through
                    while True:
                        message = await layer.receive(channel)
                        for cursor in self._cursors:
                            for change in message["operations"]:
                                cursor.receive(int(change["seq"]), change)
            except Exception as error:
                # Any error of the layer's client: without it, rows are read from time to time.
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
    """The one fan-out of this process."""
    return _shared
