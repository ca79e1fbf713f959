"""Waiting for an operation without polling: a wake-up triggers a read, and the row decides.

Each process has one `WakeUps`, which its LISTEN loop notifies. A waiter opens a `Watch`, reads the row, and
then waits for `changed`; a wake-up that arrives between the two is kept, so no change is missed.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID


class Watch:
    """One waiter's wake-ups for one operation."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiter, because the operation may have changed."""
        self._notified.set()

    async def changed(self, *, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a wake-up since the last call; return True if there was one."""
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
        """Wake all waiters of this operation; the empty id wakes all waiters, after lost wake-ups."""

        groups = self._watches.values() if not operation_id else (self._watches.get(operation_id, set()),)
        for group in groups:
            for watch in group:
                watch.notify()

    @contextmanager
    def watch(self, operation_id: UUID) -> Iterator[Watch]:
        """Open a watch for the operation; read the row after opening it."""
        watch, name = Watch(), str(operation_id)
        group = self._watches.setdefault(name, set())
        group.add(watch)
        try:
            yield watch
        finally:
            group.discard(watch)
            if not group:
                self._watches.pop(name, None)
