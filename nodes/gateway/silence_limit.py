"""A limit on silence: work may take any time, as long as it makes progress.

`asyncio.timeout` would need a new timer for every token. Here one timer checks at intervals, so a limit may
expire slightly late, and recording progress costs one assignment.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from localai_cluster.kit import clock


class SilenceLimit:
    """The silence limit, as the limited work controls it."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, first: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._until = clock.monotonic() + max(first, 0)
        self._set_timer()

    def begin(self) -> None:
        """Restart the limit: silence counts from now on."""
        self._until = clock.monotonic() + self._seconds

    def pause(self) -> None:
        """Suspend the limit until `begin`."""
        self._until = math.inf

    def _set_timer(self) -> None:
        remaining = max(self._until - clock.monotonic(), 0)
        self.timer = asyncio.get_running_loop().call_later(min(remaining, self._seconds), self._check)

    def _check(self) -> None:
        if clock.monotonic() >= self._until:
            self._limit.reschedule(0)  # expired
        else:
            self._set_timer()


@asynccontextmanager
async def silence(seconds: float, first: float) -> AsyncIterator[SilenceLimit]:
    """Raise TimeoutError after `first` seconds of silence, or after `seconds` following a `begin`."""
    async with asyncio.timeout(None) as limit:
        silence_limit = SilenceLimit(limit, seconds, first)
        try:
            yield silence_limit
        finally:
            silence_limit.timer.cancel()
