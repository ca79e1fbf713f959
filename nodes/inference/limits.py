"""A limit on silence: work may take any time, as long as something happens.

`asyncio.timeout` would need a new timer for every token. Here one timer looks now and then, so a limit may
run out a little late, and to note that something has happened costs an assignment.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from localai_cluster import clock


class SilenceLimit:
    """The limit, from the inside of the work."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, first: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._until = clock.monotonic() + max(first, 0)
        self._set_timer()

    def begin(self) -> None:
        """From now on silence counts."""
        self._until = clock.monotonic() + self._seconds

    def pause(self) -> None:
        """Silence does not count until it begins again."""
        self._until = math.inf

    def _set_timer(self) -> None:
        left = max(self._until - clock.monotonic(), 0)
        self.timer = asyncio.get_running_loop().call_later(min(left, self._seconds), self._look)

    def _look(self) -> None:
        if clock.monotonic() >= self._until:
            self._limit.reschedule(0)  # has run out
        else:
            self._set_timer()


@asynccontextmanager
async def silence(seconds: float, first: float) -> AsyncIterator[SilenceLimit]:
    """Raises TimeoutError after `first` seconds of silence, or `seconds` once it has begun again."""
    async with asyncio.timeout(None) as limit:
        held = SilenceLimit(limit, seconds, first)
        try:
            yield held
        finally:
            held.timer.cancel()
