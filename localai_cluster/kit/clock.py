"""The only module that reads a clock.

`now()` is for instants that are stored or compared across processes (aware, UTC). `monotonic()` is for
durations inside one process. Other code takes the time as a parameter; the lint bans all other clock
functions, so a pass reads the clock once and a test can drive it.
"""

import asyncio
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime


def now() -> datetime:
    """Return the current instant, aware, in UTC."""
    return datetime.now(UTC)


monotonic = time.monotonic
"""Return the seconds of a clock that never steps; only differences between readings have a meaning."""


def since_boot() -> float:
    """Return seconds like `monotonic`, plus the time of suspend on systems with such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


_MAX_TIMER_SECONDS = 24 * 3600.0
"""Maximum seconds of one asyncio timer. A longer or infinite time uses several timers."""


class SilenceTimer:
    """Calls `expire` if `begin` is not called for `seconds`, or for `first` seconds at the start.

    `begin` only moves the end of the one timer, which is cheap enough for each token of a stream.
    """

    def __init__(self, seconds: float, first: float, expire: Callable[[], object]) -> None:
        self._seconds = seconds
        self._expire = expire
        self._until = monotonic() + max(first, 0)
        self._set_timer()

    def begin(self) -> None:
        """Restart the period of silence now."""
        self._until = monotonic() + self._seconds

    def pause(self) -> None:
        """Suspend the timer until `begin`."""
        self._until = math.inf

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _set_timer(self) -> None:
        delay = min(max(self._until - monotonic(), 0), self._seconds, _MAX_TIMER_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire_if_due)

    def _expire_if_due(self) -> None:
        if monotonic() >= self._until:
            self._expire()
        else:
            self._set_timer()
