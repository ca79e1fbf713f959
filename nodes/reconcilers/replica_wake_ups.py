"""Runs the replica pass as soon as a node or a rule changes; the tick of the schedule is the safety net."""

import asyncio
import logging

from django.db import Error as DatabaseError

from nodes.reconcilers import replicas
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

GATHER = 1.0
"""Seconds for which changes are gathered into one pass."""


class Scaler:
    """Periodic task of a controller."""

    def __init__(self) -> None:
        self._look = asyncio.Event()

    def wake(self) -> None:
        """Run a pass soon, as something has changed."""
        self._look.set()

    async def run(self) -> None:
        """Run a pass after each change, until cancelled."""
        while True:
            await self._look.wait()
            await asyncio.sleep(GATHER)
            self._look.clear()
            try:
                looked = await in_thread(replicas.run_pass, tick=False)
            except DatabaseError as error:
                log.warning("cannot see what the scheduling rules need: %s", error)
                continue
            if not looked:
                # The pass of another process may have read the rows before the change.
                self._look.set()
