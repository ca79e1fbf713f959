"""One reader of the operations: where it stands, what it has heard since, what it is told next.

Changes arrive through the channel layer, which may lose, double or reorder them. They are gathered for a
moment and told together; a gap in their numbers, or a look every few seconds, leads back to the rows. A
reader that takes its time hears no more than `MOST_HEARD` changes and is brought up to date from the rows.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from channels.db import database_sync_to_async
from django.db import Error as DatabaseError

from operations import feed

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds between two looks at the rows when nothing is heard."""
LOOK_AGAIN = 1.0
"""The same while the database cannot be read."""
GATHER = 0.05
"""Seconds for which changes are gathered: ten thousand a minute are twenty messages a second at most."""
FARTHEST_BACK = 1000
"""Changes that are worth sending one by one; a client that missed more starts anew."""
MOST_HEARD = 1000


@dataclass(frozen=True)
class News:
    """What the reader is told: everything (`whole`), or what changed, in order; `seq` = where it stands."""

    whole: bool
    seq: int
    operations: list[dict[str, Any]]


def look(since: int | None) -> News:
    """What changed after `since`; the whole list if that is too much, unknown, or not asked for.

    Usually nothing did, and that costs one query: everybody who watches looks again and again.
    """
    if since is None or not 0 <= (behind := feed.current_seq() - since) <= FARTHEST_BACK:
        now = feed.snapshot()
        return News(True, now.seq, now.operations)
    if not behind:
        return News(False, since, [])
    missed = feed.since(since)
    return News(False, missed.seq, missed.operations)


_look = database_sync_to_async(look)


class Follower:
    """Follows the operations for one reader."""

    def __init__(self, look_every: float = LOOK_EVERY) -> None:
        self._look_every = look_every
        self._seq = 0
        self._heard: dict[int, dict[str, Any]] = {}
        self._woken = asyncio.Event()
        self._failing = False

    def hear(self, seq: int, operation: dict[str, Any]) -> None:
        """A change from the channel layer."""
        if len(self._heard) >= MOST_HEARD:
            self._heard.clear()  # the gap leads back to the rows
        self._heard[seq] = operation
        self._woken.set()

    def wake(self) -> None:
        """Something may have been missed."""
        self._woken.set()

    async def follow(self, since: int | None) -> AsyncIterator[News]:
        """First where things stand, as seen from `since`, then every change, for ever."""
        step: Callable[[], Awaitable[News | None]] = functools.partial(self._read, since)
        while True:
            try:
                news = await step()
            except DatabaseError as error:
                self._complain(error)
            else:
                self._failing, step = False, self._next
                if news is not None:
                    yield news
            await self._pause()

    async def _next(self) -> News | None:
        heard, self._heard = self._heard, {}
        fresh = sorted(seq for seq in heard if seq > self._seq)
        if heard and not fresh:
            return None
        if fresh and fresh[-1] - self._seq == len(fresh):
            self._seq = fresh[-1]
            return News(False, self._seq, [heard[seq] for seq in fresh])
        before = self._seq
        news = await self._read(before)
        return news if news.whole or news.seq > before else None

    async def _read(self, since: int | None) -> News:
        news = await _look(since)
        self._seq = news.seq
        return news

    async def _pause(self) -> None:
        """Waits for a change, and for those that come with it; or for the time of the next look."""
        try:
            async with asyncio.timeout(LOOK_AGAIN if self._failing else self._look_every):
                await self._woken.wait()
        except TimeoutError:
            return
        await asyncio.sleep(GATHER)
        self._woken.clear()

    def _complain(self, error: DatabaseError) -> None:
        if not self._failing:
            log.warning("operations not read: %s; looking again", type(error).__name__)
        self._failing = True
