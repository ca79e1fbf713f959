"""A cursor: the position of one reader in the stream of changes, and its next update.

Changes arrive through the channel layer, which may lose, duplicate or reorder them. A change after a quiet
period is yielded at once; the changes that closely follow it are batched. If a gap in the numbers does not
close while a batch is gathered, the cursor reads the rows; it also reads them every few seconds. A slow
reader buffers no more than `MOST_RECEIVED` changes and then catches up from the rows.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from channels.db import database_sync_to_async
from django.db import Error as DatabaseError

from localai_cluster.kit import clock
from operations.changes import feed

log = logging.getLogger(__name__)

READ_EVERY = 5.0
"""Seconds between two reads of the rows when nothing is received."""
READ_AGAIN = 1.0
"""Seconds between two reads of the rows while the database cannot be read."""
GATHER = 0.05
"""Least seconds between two updates: ten thousand changes a minute are twenty messages a second."""
FARTHEST_BACK = 1000
"""Most changes that are sent one by one; a client that missed more gets a snapshot."""
MOST_RECEIVED = 1000


@dataclass(frozen=True)
class Update:
    """An update for a reader: a snapshot (`whole`), or the changes in order; `seq` is its new position.

    The update from `after` to `seq` is equal for all readers; None: the rows were read for this reader.
    """

    whole: bool
    seq: int
    operations: list[dict[str, Any]]
    after: int | None = None


def read(since: int | None) -> Update:
    """Return the changes after `since`; a snapshot if they are too many, or if `since` is None or invalid.

    Without changes, which is the usual case, it costs one query: every open page calls this periodically.
    """
    if since is None or not 0 <= (behind := feed.current_seq() - since) <= FARTHEST_BACK:
        current = feed.snapshot()
        return Update(True, current.seq, current.operations)
    if not behind:
        return Update(False, since, [])
    missed = feed.since(since)
    return Update(False, missed.seq, missed.operations)


_read_rows = database_sync_to_async(read)


def gathers_for(update_age: float, has_gap: bool) -> float:
    """Return the seconds for which received changes are gathered; a gap may be only a reordering."""
    return GATHER if has_gap else max(GATHER - update_age, 0.0)


class Cursor:
    """A client's position in the stream of changes."""

    def __init__(self) -> None:
        self._seq = 0
        self._received: dict[int, dict[str, Any]] = {}
        self._woken = asyncio.Event()
        self._failing = False
        self._told_at = -GATHER

    def receive(self, seq: int, operation: dict[str, Any]) -> None:
        """Buffer a change from the channel layer."""
        if len(self._received) >= MOST_RECEIVED:
            self._received.clear()  # the gap makes the cursor read the rows
        self._received[seq] = operation
        self._woken.set()

    def wake(self) -> None:
        """Make the cursor read the rows, because a change may have been lost."""
        self._woken.set()

    async def updates(self, since: int | None) -> AsyncGenerator[Update, None]:
        """Yield the update from `since` to the current state, then every change, without end."""
        step: Callable[[], Awaitable[Update | None]] = functools.partial(self._read, since)
        while True:
            try:
                update = await step()
            except DatabaseError as error:
                self._warn_once(error)
            else:
                self._failing, step = False, self._next
                if update is not None:
                    self._told_at = clock.monotonic()
                    yield update
            await self._pause()

    async def _next(self) -> Update | None:
        fresh, received, self._received = self._fresh(), self._received, {}
        if received and not fresh:
            return None
        if fresh and not self._is_gap(fresh):
            before, self._seq = self._seq, fresh[-1]
            return Update(False, self._seq, [received[seq] for seq in fresh], after=before)
        before = self._seq
        update = await self._read(before)
        return update if update.whole or update.seq > before else None

    def _fresh(self) -> list[int]:
        return sorted(seq for seq in self._received if seq > self._seq)

    def _is_gap(self, fresh: list[int]) -> bool:
        return fresh[-1] - self._seq != len(fresh)

    async def _read(self, since: int | None) -> Update:
        update = await _read_rows(since)
        self._seq = update.seq
        return update

    async def _pause(self) -> None:
        """Wait for a change and the batch that follows it, or until the next read is due."""
        try:
            async with asyncio.timeout(READ_AGAIN if self._failing else READ_EVERY):
                await self._woken.wait()
        except TimeoutError:
            return
        fresh = self._fresh()
        has_gap = not fresh or self._is_gap(fresh)
        await asyncio.sleep(gathers_for(clock.monotonic() - self._told_at, has_gap))
        self._woken.clear()

    def _warn_once(self, error: DatabaseError) -> None:
        if not self._failing:
            log.warning("operations not read: %s; reading again", type(error).__name__)
        self._failing = True
