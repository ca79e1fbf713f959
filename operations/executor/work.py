"""Interface of an operation's handler: its argument, the exceptions that it may raise, and its reports.

Handlers and requests wait for an operation without polling: each process has one `WakeUps`, which its LISTEN
loop notifies. A waiter opens a `Watch`, reads the row, and then waits for `changed`. A wake-up between the
two is kept, so no change is missed. The row determines the state.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from channels.db import database_sync_to_async

from localai_cluster.kit import backoff, clock
from localai_cluster.kit.leases import Attempt
from operations.ledger import attempts, progress
from operations.ledger.progress import Batch, Recorder, Tick
from operations.models import Operation

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run synchronous database code in a worker thread, with fresh connections."""
    call = database_sync_to_async(function, thread_sensitive=False)
    result: R = await call(*args, **kwargs)
    return result


async def write_batch(batch: Batch) -> set[Attempt]:
    """Write the progress reports of operations in one of the shared threads."""
    return await in_thread(progress.record, batch, now=clock.now(), lock_timeout=progress.BATCH_LOCK_TIMEOUT)


class Postpone(Exception):
    """Ends the attempt and requeues the operation: retry in `seconds`, because of `reason`.

    With `waiting` the operation waits for a node: a change of a node that could run it ends the wait early,
    and the attempt does not count. Otherwise the pause is a back-off, which is never cut short.
    """

    def __init__(
        self, reason: str, *, seconds: float, waiting: bool = False, payload: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.seconds, self.waiting, self.payload = reason, seconds, waiting, payload


class Abandoned(Exception):
    """Ends the operation as cancelled, because no request waits for its outcome any more."""


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
        """Id of the operation, and fence of this attempt."""
        return self.id, self.operation.fence

    async def report(self, tick: Tick) -> None:
        """Add the next step to the next batch. Raise LeaseLost if the attempt has lost the operation."""
        self.recorder.add(self.attempt, [tick])
        await in_thread(attempts.confirm, *self.attempt)

    def progress(self, tick: Tick) -> None:
        """Add a progress report to the next batch, which writes only the latest figures.

        Call it as often as needed. The executor cancels an attempt that has lost its operation.
        """
        self.recorder.add(self.attempt, [tick])


Handler = Callable[[Work], Awaitable[Mapping[str, Any] | None]]
"""Function that runs an attempt and returns the operation's result."""


def retry_delay(attempts: int) -> float:
    """Return the seconds until the next attempt, after `attempts` that ended early: 1, 2, 4 … 30."""
    return backoff.delay(attempts + 1, first=1.0, longest=30.0)


class Watch(asyncio.Event):
    """The wake-ups of one waiter that waits for one operation: set when the operation may have changed."""

    async def changed(self, *, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a wake-up; return True if there was one.

        A wake-up since the previous call counts too.
        """
        try:
            # Not `wait_for`: Python 3.11's swallows a cancellation that arrives together with the wake-up.
            async with asyncio.timeout(timeout):
                await self.wait()
        except TimeoutError:
            return False
        self.clear()
        return True


class WakeUps:
    """The waiters of this process, by the id of the operation that they wait for."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}

    def notify(self, operation_id: str) -> None:
        """Wake all waiters of this operation. An empty id, after lost notifications, wakes every waiter."""

        groups = self._watches.values() if not operation_id else (self._watches.get(operation_id, set()),)
        for group in groups:
            for watch in group:
                watch.set()

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
