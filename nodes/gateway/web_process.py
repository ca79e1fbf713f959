"""The database row of this web process: created at start, renewed by heartbeats, removed on a clean stop.

When the process falls silent, the liveness pass removes the row and subtracts the requests that the process
had counted in. A process that was only slow notices the removal at its next heartbeat and registers again,
with its counts.
"""

import asyncio
import contextlib
import logging

from localai_cluster.kit.database_pool import UNREACHABLE
from localai_cluster.kit.errors import Unavailable
from nodes.gateway.picks import Picker

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LIMIT = 3
"""Renewals of the row per silence limit."""
HEARTBEATS_PER_AUDIT = 12
"""Heartbeats between two settlements of the counts, in case a statement outlived its connection."""


class ProcessHeartbeat:
    """Maintains the row of one web process."""

    def __init__(self, picker: Picker, silence_limit: float) -> None:
        self._picker = picker
        self._interval = silence_limit / HEARTBEATS_PER_LIMIT
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the process; an unreachable database only delays the registration."""
        await self._announce()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Release every count and remove the row."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            await self._picker.sign_off()
        except UNREACHABLE as error:
            logger.warning("Could not sign off, the liveness pass will: %s", error)

    async def _run(self) -> None:
        heartbeats = 0
        while True:
            await asyncio.sleep(self._interval)
            heartbeats += 1
            try:
                is_registered = await self._picker.renew()
            except UNREACHABLE as error:
                logger.warning("Cannot renew the row of this process: %s", error)
                continue
            if not is_registered:
                logger.warning("This process was taken for dead; it announces itself again")
            if not is_registered or heartbeats % HEARTBEATS_PER_AUDIT == 0:
                await self._announce()

    async def _announce(self) -> None:
        try:
            await self._picker.settle()
        except Unavailable as error:
            logger.warning("Cannot announce this process yet: %s", error)
