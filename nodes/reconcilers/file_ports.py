"""Periodic checks of the nodes' file ports, at approval and after a failure (`registry/file_port.py`).

One `FilePorts` lives in every controller. They share the nodes by claims, so no lock is held while a port is
contacted. What a check finds wakes the loads that wait for the node, by the NOTIFY of its row.
"""

import asyncio
import contextlib
import logging

from django.db import Error as DatabaseError

from localai_cluster.kit import clock
from localai_cluster.metrics import passes
from nodes.registry import file_port
from nodes.registry.file_port import DueCheck
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

PARALLEL = 16
LOOK_EVERY = 30.0
"""Seconds between two passes when no wake-up arrives and nothing is due."""
_GATHER = 0.2
"""Seconds for which wake-ups are gathered into one pass."""


class FilePorts:
    """Periodic task of a controller."""

    def __init__(self) -> None:
        self._hint = asyncio.Event()
        self._running = 0

    def hint(self) -> None:
        """Run a pass now, as a node may be due."""
        self._hint.set()

    async def run(self) -> None:
        """Check what is due until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._hint.clear()
                pause = await self.start_due(group)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._hint.wait()
                await asyncio.sleep(_GATHER)

    async def start_due(self, group: asyncio.TaskGroup) -> float:
        """Start the checks that are due; return the seconds until there is more to do."""
        if self._running >= PARALLEL:
            return LOOK_EVERY
        try:
            with passes.counted("file ports"):
                for due in await in_thread(file_port.claim_due, PARALLEL - self._running, now=clock.now()):
                    self._running += 1
                    group.create_task(self._check(due), name=f"file port of {due.node_name}")
                return await in_thread(file_port.seconds_until_due, now=clock.now(), at_most=LOOK_EVERY)
        except DatabaseError as error:
            log.warning("cannot see which file ports are to be checked: %s", error)
            return LOOK_EVERY

    async def _check(self, due: DueCheck) -> None:
        try:
            server = await in_thread(file_port.server_of, due.node_id)
            if server is None:
                return  # its claim runs out
            error = await file_port.probe(server)
            await in_thread(file_port.record_check, due.node_id, error, now=clock.now())
            if error:
                log.warning("node %s: %s", due.node_name, error)
        except DatabaseError as error:
            log.warning("the check of the file port of %s was not recorded: %s", due.node_name, error)
        except Exception:
            # One node's server must not end the checks of all others; the claim runs out.
            log.exception("the check of the file port of %s failed", due.node_name)
        finally:
            if self._running == PARALLEL:
                self._hint.set()
            self._running -= 1
