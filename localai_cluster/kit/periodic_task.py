"""Periodic tasks and work pools of a process: work that recurs or follows a wake-up.

The work is in rows; a wake-up only makes a task read the rows earlier. A lost wake-up therefore costs at most
one interval, and nothing is lost when a process dies.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from localai_cluster.kit import backoff

log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 30.0


class PeriodicTask:
    """Runs `step` after each wake-up, and every `interval` seconds unless `interval` is None.

    A step may return the seconds until the next step. A wake-up during a step causes another step. Wake-ups
    within `gather` seconds cause one step together. A step that raises one of `retry_on` is retried with
    back-off. Any other error ends the task, and then the process, which is restarted.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[float | None]],
        *,
        interval: float | None,
        gather: float = 0.0,
        retry_on: tuple[type[Exception], ...] = (),
    ) -> None:
        self._name, self._step = name, step
        self._interval, self._gather, self._retry_on = interval, gather, retry_on
        self._woken = asyncio.Event()
        self._stopping = False
        self._failures = 0

    def wake(self) -> None:
        """Run the step as soon as the current step has ended."""
        self._woken.set()

    def stop(self) -> None:
        """Start no further step; `run` returns after the current step."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Run the steps until `stop` or cancellation."""
        if self._interval is None:
            await self._woken.wait()
            await asyncio.sleep(self._gather)
        while not self._stopping:
            self._woken.clear()
            await self._wait_for_wake_up(await self._try_step())

    async def _try_step(self) -> float | None:
        try:
            pause = await self._step()
        except self._retry_on as error:
            self._failures += 1
            longest = _MAX_RETRY_SECONDS if self._interval is None else self._interval
            seconds = backoff.delay(self._failures, first=min(_FIRST_RETRY_SECONDS, longest), longest=longest)
            log.warning("%s: %s; retrying", self._name, error or type(error).__name__)
            return seconds
        self._failures = 0
        return self._interval if pause is None else pause

    async def _wait_for_wake_up(self, seconds: float | None) -> None:
        if self._stopping:
            return
        with contextlib.suppress(TimeoutError):
            # Not `wait_for`: Python 3.11's swallows a cancellation that arrives together with the wake-up.
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        await asyncio.sleep(self._gather)


T = TypeVar("T")


class WorkPool(ABC, Generic[T]):
    """Runs due items as asyncio tasks, at most `parallel` at a time.

    Several processes may share the items, because each item is claimed.
    """

    def __init__(
        self,
        name: str,
        *,
        parallel: int,
        interval: float,
        gather: float,
        retry_on: tuple[type[Exception], ...],
    ) -> None:
        self._loop = PeriodicTask(name, self._start_due, interval=interval, gather=gather, retry_on=retry_on)
        self._group = asyncio.TaskGroup()
        self._parallel, self._running = parallel, 0

    @abstractmethod
    async def claim_due(self, limit: int) -> Sequence[T]:
        """Claim up to `limit` due items."""

    @abstractmethod
    async def next_due(self) -> float:
        """Return the seconds until the next item is due."""

    @abstractmethod
    async def run_item(self, item: T) -> None:
        """Run one item without raising an error. A failed item is due again when its claim expires."""

    def wake(self) -> None:
        """Check for due items without waiting for the next interval."""
        self._loop.wake()

    async def run(self) -> None:
        """Run due items until cancelled."""
        async with self._group:
            await self._loop.run()

    async def _start_due(self) -> float | None:
        free = self._parallel - self._running
        if free <= 0:
            return None
        for item in await self.claim_due(free):
            self._running += 1
            self._group.create_task(self._run_and_count(item), name=str(item))
        return await self.next_due()

    async def _run_and_count(self, item: T) -> None:
        try:
            await self.run_item(item)
        finally:
            if self._running == self._parallel:
                self.wake()
            self._running -= 1
