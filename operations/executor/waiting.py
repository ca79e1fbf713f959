"""Waiting for an operation without polling for it: a hint wakes, the row decides.

One `Hints` lives in a process and is fed by its LISTEN loop. Who waits opens a `Watch`, reads the row, and
then waits for `changed`; a hint that came between the two is kept, so no change is slept through.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID


class Watch:
    """One waiter's ear for one operation."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Something may have changed."""
        self._notified.set()

    async def changed(self, *, timeout: float) -> bool:
        """Wait for a hint since the last call, up to `timeout` seconds; return whether one came."""
        try:
            # Not `wait_for`: Python 3.11's swallows a cancellation that comes together with the hint.
            async with asyncio.timeout(timeout):
                await self._notified.wait()
        except TimeoutError:
            return False
        self._notified.clear()
        return True


class Hints:
    """Who waits for which operation in this process."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}

    def notify(self, operation_id: str) -> None:
        """Wake everyone who waits for this operation; the empty id wakes all (news may have been missed)."""
        groups = self._watches.values() if not operation_id else (self._watches.get(operation_id, set()),)
        for group in groups:
            for watch in group:
                watch.notify()

    @contextmanager
    def watch(self, operation_id: UUID) -> Iterator[Watch]:
        """Listen from now on; read the row after opening it."""
        watch, name = Watch(), str(operation_id)
        group = self._watches.setdefault(name, set())
        group.add(watch)
        try:
            yield watch
        finally:
            group.discard(watch)
            if not group:
                self._watches.pop(name, None)
