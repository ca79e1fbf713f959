"""Interface of an operation's handler: its argument, the exceptions that it may raise, and its reports.

Handlers and requests wait for an operation without polling: each process has one `WakeUps`, which its LISTEN
loop notifies. A waiter opens a `Watch`, reads the row, and then waits for `changed`. A wake-up between the
two is kept, so no change is missed. The row determines the state.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from channels.db import database_sync_to_async
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

from localai_cluster.kit import backoff, clock
from localai_cluster.kit.batching import Batcher
from localai_cluster.kit.leases import Attempt
from operations.ledger import attempts, progress
from operations.ledger.progress import Tick
from operations.models import Operation

log = logging.getLogger(__name__)

BATCH_INTERVAL = 0.1
"""Minimum seconds between the starts of two batches. The interval is twice the duration of the last batch."""
SLOW_BATCH_INTERVAL = 0.2
"""Seconds between the starts of two batches if the last batch took longer than half of it."""
WRITE_TIMEOUT = 5.0
_UNREACHABLE = (OperationalError, InterfaceError, TimeoutError)

Batch = Mapping[Attempt, Collection[Tick]]


class Recorder:
    """Buffers the progress reports of running attempts and writes them in batches, one recorder per executor.

    It keeps the latest report of each target, and writes at once if no write is running. It starts at most
    ten batches a second, five if they are slow, because outcomes and leases need the same rows. A batch that
    cannot be written is retried, merged with newer reports. A crash loses unwritten reports, never an
    outcome. `write` returns the attempts that have lost their operation.
    """

    def __init__(
        self,
        write: Callable[[Batch], Awaitable[set[Attempt]]],
        lost: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        self._write, self._lost = write, lost
        self._batches: Batcher[Attempt, list[Tick]] = Batcher(
            self._write_batch,
            merge=_merge,
            interval=(BATCH_INTERVAL, SLOW_BATCH_INTERVAL),
            retry_on=_UNREACHABLE,
        )

    def add(self, attempt: Attempt, tick: Tick) -> None:
        """Buffer a report for the next batch."""
        self._batches.add(attempt, [tick])

    async def take(self, attempt: Attempt) -> list[Tick]:
        """Remove and return the unwritten reports of an attempt, so that they are written with its outcome.

        If a running batch has a report of the attempt, the call waits for its end: the report must not be
        written after the outcome.
        """
        return await self._batches.take(attempt) or []

    def forget(self, attempt: Attempt) -> None:
        """Drop the unwritten reports of an attempt that has ended."""
        self._batches.discard(attempt)

    def close(self) -> None:
        """Stop writing."""
        self._batches.close()

    async def _write_batch(self, batch: Mapping[Attempt, list[Tick]]) -> Mapping[Attempt, list[Tick]]:
        try:
            await self._write_reports(batch)
        except _UNREACHABLE:
            raise
        except DatabaseError:
            return await self._write_one_by_one(batch)
        return {}

    async def _write_reports(self, batch: Batch) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT):
            for attempt in await self._write(batch):
                self._lost(attempt)

    async def _write_one_by_one(self, batch: Mapping[Attempt, list[Tick]]) -> Mapping[Attempt, list[Tick]]:
        """Write the reports of each attempt separately, so that a refused report blocks no other."""
        left = {}
        for attempt, ticks in batch.items():
            try:
                await self._write_reports({attempt: ticks})
            except _UNREACHABLE:
                left[attempt] = ticks
            except DatabaseError as refusal:
                log.warning("a report of operation %s cannot be written: %s", attempt[0], refusal)
        return left


def _merge(earlier_ticks: list[Tick], later_ticks: list[Tick]) -> list[Tick]:
    """Merge the reports of one attempt, in order, to at most two per node.

    A report without bytes does not replace the figures of the last report with bytes; it follows that report.
    """
    merged: dict[tuple[UUID | None, bool], Tick] = {}
    for tick in (*earlier_ticks, *later_ticks):
        key = (tick.node_id, tick.total_bytes > 0)
        earlier = merged.pop(key, None)
        merged[key] = tick.after(earlier) if earlier else tick
    return list(merged.values())


P = ParamSpec("P")


R = TypeVar("R")


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run synchronous database code in a worker thread, with fresh connections."""
    call = database_sync_to_async(function, thread_sensitive=False)
    result: R = await call(*args, **kwargs)
    return result


async def write_batch(batch: Batch) -> set[Attempt]:
    """Write reports on operations in one of the shared threads."""
    return await in_thread(progress.record, batch, now=clock.now(), lock_timeout=progress.BATCH_LOCK_TIMEOUT)


class Postpone(Exception):
    """Ends the attempt and requeues the operation: retry in `seconds`, because of `reason`.

    With `waiting` the operation waits for a node: a change of a node that could take it ends the wait early,
    and the attempt does not count. Otherwise the pause is a back-off, which is never cut short.
    """

    def __init__(
        self, reason: str, *, seconds: float, waiting: bool = False, payload: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.seconds, self.waiting, self.payload = reason, seconds, waiting, payload


class Abandoned(Exception):
    """Ends the operation as cancelled with this reason: no request waits for the outcome any more."""


@dataclass(frozen=True)
class Work:
    """Argument of a handler: the claimed operation, and two methods to report. Every report is fenced."""

    operation: Operation
    recorder: Recorder

    @property
    def id(self) -> UUID:
        """The operation's id."""
        return self.operation.id

    @property
    def attempt(self) -> Attempt:
        """Id of the operation and fence of the attempt."""
        return self.id, self.operation.fence

    async def report(self, tick: Tick) -> None:
        """Report the attempt's next step. Raise LeaseLost if the attempt has lost the operation."""
        self.recorder.add(self.attempt, tick)
        await in_thread(attempts.confirm, *self.attempt)

    def progress(self, tick: Tick) -> None:
        """Report progress, as often as needed: the next batch writes the latest figures.

        The executor cancels an attempt that has lost its operation.
        """
        self.recorder.add(self.attempt, tick)


Handler = Callable[[Work], Awaitable[Mapping[str, Any] | None]]


def retry_delay(attempts: int) -> float:
    """Return the seconds until the next attempt, after `attempts` early ends: 1, 2, 4 … 30."""
    return backoff.delay(attempts + 1, first=1.0, longest=30.0)


class Watch:
    """The wake-ups of one waiter for one operation."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiter, because the operation may have changed."""
        self._notified.set()

    async def changed(self, *, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a wake-up. Return True if there was one.

        A wake-up since the previous call counts at once.
        """
        try:
            # Not `wait_for`: Python 3.11's swallows a cancellation that arrives together with the wake-up.
            async with asyncio.timeout(timeout):
                await self._notified.wait()
        except TimeoutError:
            return False
        self._notified.clear()
        return True


class WakeUps:
    """The watches of this process, by operation id."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}

    def notify(self, operation_id: str) -> None:
        """Wake all waiters of this operation. The empty id, after lost notifications, wakes all waiters."""

        groups = self._watches.values() if not operation_id else (self._watches.get(operation_id, set()),)
        for group in groups:
            for watch in group:
                watch.notify()

    @contextmanager
    def watch(self, operation_id: UUID) -> Iterator[Watch]:
        """Open a watch for the operation. The caller reads the row after this, to miss no change."""
        watch, name = Watch(), str(operation_id)
        group = self._watches.setdefault(name, set())
        group.add(watch)
        try:
            yield watch
        finally:
            group.discard(watch)
            if not group:
                self._watches.pop(name, None)
