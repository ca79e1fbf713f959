"""Buffers the progress reports of running attempts and writes them in batches.

Every executor has one recorder. It keeps the latest report of each target in memory, writes at once if no
write is running, and starts at most ten batches a second, five if they are slow: outcomes and leases need the
same rows. A batch that cannot be written is retried, merged with newer reports. A crash loses unwritten
reports, never an outcome.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

from localai_cluster.kit import clock
from operations.ledger.progress import Attempt, Tick

log = logging.getLogger(__name__)

BATCH_EVERY, BATCH_EVERY_AT_MOST = 0.1, 0.2
"""Seconds between the beginnings of two batches: twice as long as the last one took, within these bounds."""
RETRY_AFTER = 1.0
"""Seconds before a failed write is retried."""
WRITE_TIMEOUT = 5.0

Batch = Mapping[Attempt, Collection[Tick]]


class Recorder:
    """Buffers reports without waiting; `write` returns the attempts that have lost their operation."""

    def __init__(
        self,
        write: Callable[[Batch], Awaitable[set[Attempt]]],
        lost: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        self._write, self._lost = write, lost
        self._waiting: dict[Attempt, list[Tick]] = {}
        self._batch: Batch = {}
        self._writing = asyncio.Lock()
        self._next_at = clock.monotonic()
        self._task: asyncio.Task[None] | None = None

    def add(self, attempt: Attempt, tick: Tick) -> None:
        """Buffer a report for the next batch."""
        self._waiting[attempt] = _merge([*self._waiting.get(attempt, []), tick])
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="progress")

    async def take(self, attempt: Attempt) -> list[Tick]:
        """Remove and return the unwritten reports of an attempt, to be written with its outcome.

        A running batch with a report of this attempt ends first: it must not be written after the outcome.
        """
        if attempt in self._batch:
            async with self._writing:
                pass
        return self._waiting.pop(attempt, [])

    def forget(self, attempt: Attempt) -> None:
        """Drop the unwritten reports of an attempt that has ended."""
        self._waiting.pop(attempt, None)

    def close(self) -> None:
        """Stop writing."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(max(self._next_at - clock.monotonic(), 0))
            async with self._writing:
                began, self._next_at = clock.monotonic(), 0.0
                self._batch, self._waiting = self._waiting, {}
                try:
                    await self._write_batch()
                finally:
                    self._batch = {}
                    pause = min(2 * (clock.monotonic() - began), BATCH_EVERY_AT_MOST)
                    self._next_at = max(self._next_at, began + max(pause, BATCH_EVERY))

    async def _write_batch(self) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                lost = await self._write(self._batch)
        except (OperationalError, InterfaceError, TimeoutError) as error:
            log.warning("progress of %d operations waits: %s", len(self._batch), error or "no answer")
            self._put_back(self._batch.items())
            self._next_at = clock.monotonic() + RETRY_AFTER
        except DatabaseError as error:
            await self._write_one_by_one(error)
        else:
            self._report_lost(lost)

    async def _write_one_by_one(self, error: DatabaseError) -> None:
        """Write the reports separately, so that one that the database refuses does not block the others."""
        for attempt, ticks in self._batch.items():
            try:
                async with asyncio.timeout(WRITE_TIMEOUT):
                    self._report_lost(await self._write({attempt: ticks}))
            except (OperationalError, InterfaceError, TimeoutError):
                self._put_back([(attempt, ticks)])
            except DatabaseError as refusal:
                log.warning("a report of operation %s cannot be written: %s", attempt[0], refusal)

    def _put_back(self, reports: Iterable[tuple[Attempt, Collection[Tick]]]) -> None:
        for attempt, ticks in reports:
            self._waiting[attempt] = _merge([*ticks, *self._waiting.get(attempt, [])])

    def _report_lost(self, lost: Iterable[Attempt]) -> None:
        for attempt in lost:
            self._lost(attempt)


def _merge(ticks: Iterable[Tick]) -> list[Tick]:
    """Merge the reports of one attempt: at most two for a node, in the order in which they came.

    A report without bytes follows the last one with bytes, whose final figures it must not replace.
    """
    merged: dict[tuple[UUID | None, bool], Tick] = {}
    for tick in ticks:
        key = (tick.node_id, tick.total_bytes > 0)
        earlier = merged.pop(key, None)
        merged[key] = tick.after(earlier) if earlier else tick
    return list(merged.values())
