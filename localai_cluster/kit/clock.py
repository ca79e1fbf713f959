"""The only module that reads a clock.

`now()` is for instants that are stored or compared across processes (aware, UTC). `monotonic()` is for
durations inside one process. Other code takes the time as a parameter; the lint bans all other clock
functions, so a pass reads the clock once and a test can drive it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime


def now() -> datetime:
    """Return the current instant, aware, in UTC."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Return the seconds of a clock that never steps; only differences are meaningful."""
    return time.monotonic()


def since_boot() -> float:
    """Return seconds like `monotonic`, including those of suspend where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def wait_until(
    condition: Callable[[], Awaitable[bool]], *, timeout: float, every: float = 0.05
) -> bool:
    """Poll `condition` until it holds or `timeout` seconds have passed; return True if it held."""
    deadline = monotonic() + timeout
    while not await condition():
        if monotonic() >= deadline:
            return False
        await asyncio.sleep(every)
    return True
