"""The one place that reads a clock.

`now()` is for instants that are stored or compared across processes (aware, UTC). `monotonic()` is for
durations inside one process. Everything else takes the time as a parameter; the lint bans every other
way to read it, so a pass reads the clock once and a test can drive it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime


def now() -> datetime:
    """The current instant, aware, in UTC."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Seconds on a clock that never steps; only differences mean anything."""
    return time.monotonic()


def since_boot() -> float:
    """As `monotonic`, and goes on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def wait_until(
    condition: Callable[[], Awaitable[bool]], *, timeout: float, every: float = 0.05
) -> bool:
    """Looks at `condition` until it holds or `timeout` seconds have passed; returns whether it held."""
    deadline = monotonic() + timeout
    while not await condition():
        if monotonic() >= deadline:
            return False
        await asyncio.sleep(every)
    return True
