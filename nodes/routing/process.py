"""The row that stands for this web process: made at start, renewed while it lives, removed on a clean stop.

When it falls silent the liveness pass removes the row and subtracts what the process had counted in. A
process that was only slow notices at its next look and announces itself again, with its counts.
"""

import asyncio
import contextlib
import logging

from localai_cluster.errors import Unavailable
from nodes.routing.picks import Picker
from nodes.routing.pool import UNREACHABLE

logger = logging.getLogger(__name__)

BEATS_PER_LIMIT = 3
"""How often within the silence limit a process says that it lives."""
BEATS_PER_AUDIT = 12
"""Every so many beats the counts are compared, against a statement that outlived its connection."""


class Presence:
    """Keeps the row of one web process."""

    def __init__(self, picker: Picker, silence_limit: float) -> None:
        self._picker = picker
        self._every = silence_limit / BEATS_PER_LIMIT
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Announces the process; a database that is away only delays it."""
        await self._announce()
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Gives every count back and removes the row."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            await self._picker.leave()
        except UNREACHABLE as error:
            logger.warning("Could not sign off, the liveness pass will: %s", error)

    async def _keep(self) -> None:
        beats = 0
        while True:
            await asyncio.sleep(self._every)
            beats += 1
            try:
                alive = await self._picker.seen()
            except UNREACHABLE as error:
                logger.warning("Cannot say that this process lives: %s", error)
                continue
            if not alive:
                logger.warning("This process was taken for dead; it announces itself again")
            if not alive or beats % BEATS_PER_AUDIT == 0:
                await self._announce()

    async def _announce(self) -> None:
        try:
            await self._picker.settle()
        except Unavailable as error:
            logger.warning("Cannot announce this process yet: %s", error)
