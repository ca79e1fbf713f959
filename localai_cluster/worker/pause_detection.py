"""Detection of pauses of this process: stopped by a signal, with its container, or asleep with its machine.

Messages sent before the end of a pause lie in the socket and are read afterwards, when their sender may have
given them up: the node counted as offline, and an operator may have decided otherwise. Clocks of other
machines are not comparable, and the sender may be another process by then. So a command that may be that old
is not begun. Its sender, if it still needs it, repeats it. A pause that the machine's own clocks do not show,
as of a virtual machine, is not detected.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator

from localai_cluster.kit import cancellation, clock

log = logging.getLogger(__name__)

LONGEST = 15.0
"""Seconds without a tick that count as a busy machine rather than a pause: no sender gives up that fast."""
CATCHES_UP = 5.0
"""Seconds after a pause within which all messages sent before have been read."""
_TICK = 1.0

LATE = "the worker was stopped for a while and has not begun this"


class Pauses:
    """Detects pauses by a periodic tick: a late tick means a pause."""

    def __init__(self) -> None:
        self._ticked_at = clock.since_boot()
        self._over_at = -math.inf

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Run the ticks while the context is active."""
        self._ticked_at = clock.since_boot()
        task = asyncio.create_task(self._run(), name="pauses")
        try:
            yield
        finally:
            await cancellation.end(task)

    async def _run(self) -> None:
        while True:
            self.tick(clock.since_boot())
            await asyncio.sleep(_TICK)

    def tick(self, now: float) -> None:
        """Record that this process runs at `now`."""
        paused, self._ticked_at = now - self._ticked_at, now
        if paused > LONGEST:
            self._over_at = now
            log.warning("this process did not run for %.0f s; commands from before are not begun", paused)

    def may_precede(self, arrived_at: float) -> bool:
        """Return True if a message read at `arrived_at` may have been sent before the last pause ended."""
        is_tick_overdue = arrived_at - self._ticked_at > LONGEST  # the first tick has not come yet
        return is_tick_overdue or arrived_at <= self._over_at + CATCHES_UP
