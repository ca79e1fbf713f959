"""When this process did not run: stopped by a signal, with its container, or asleep with its machine.

What was sent to it before lies in the socket and is read afterwards, when its sender may have given it up:
the node counted as offline, an operator has decided otherwise. No clock of another machine tells, and the
sender may be another process by then. So a command that may be that old is not begun. Its sender, if it
still wants it, asks again. A pause that the machine's own clocks do not see, as of a virtual machine, is not
noticed.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator

from localai_cluster import cancel, clock

log = logging.getLogger(__name__)

LONGEST = 15.0
"""Seconds without a tick that are no pause yet, only a busy machine: nothing is given up that fast."""
CATCHES_UP = 5.0
"""Seconds after a pause within which what was sent before has been read."""
_TICK = 1.0

LATE = "the worker was stopped for a while and has not begun this"


class Pauses:
    """Ticks; a tick that is missing is a pause."""

    def __init__(self) -> None:
        self._ticked_at = clock.since_boot()
        self._over_at = -math.inf

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Ticks meanwhile."""
        self._ticked_at = clock.since_boot()
        ticking = asyncio.create_task(self._run(), name="pauses")
        try:
            yield
        finally:
            await cancel.end(ticking)

    async def _run(self) -> None:
        while True:
            self.tick(clock.since_boot())
            await asyncio.sleep(_TICK)

    def tick(self, now: float) -> None:
        """This process runs."""
        paused, self._ticked_at = now - self._ticked_at, now
        if paused > LONGEST:
            self._over_at = now
            log.warning("this process did not run for %.0f s; commands from before are not begun", paused)

    def may_precede(self, arrived_at: float) -> bool:
        """Whether what was read at this moment may have been sent before the last pause ended."""
        unnoticed = arrived_at - self._ticked_at > LONGEST  # the first tick has not come yet
        return unnoticed or arrived_at <= self._over_at + CATCHES_UP
