"""Periodic checks of the nodes' file ports, at approval and after a failure (`registry/file_port.py`).

One `FilePorts` lives in every controller. They share the nodes by claims, so no lock is held while a port is
contacted. What a check finds wakes the loads that wait for the node, by the NOTIFY of its row.
"""

import logging
from collections.abc import Sequence

from django.db import Error as DatabaseError

from localai_cluster.kit import clock
from localai_cluster.kit.periodic_task import WorkPool
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


class FilePorts(WorkPool[DueCheck]):
    """Checks the due file ports of a controller."""

    def __init__(self) -> None:
        super().__init__(
            "file ports", parallel=PARALLEL, interval=LOOK_EVERY, gather=_GATHER, retry_on=(DatabaseError,)
        )

    async def claim_due(self, limit: int) -> Sequence[DueCheck]:
        """Claim due checks."""
        with passes.counted("file ports"):
            return await in_thread(file_port.claim_due, limit, now=clock.now())

    async def next_due(self) -> float:
        """Return the seconds until a check is due."""
        return await in_thread(file_port.next_due, now=clock.now(), at_most=LOOK_EVERY)

    async def run_item(self, item: DueCheck) -> None:
        """Check one node's port and record the result."""
        try:
            server = await in_thread(file_port.server_of, item.node_id)
            if server is None:
                return  # its claim expires
            error = await file_port.probe(server)
            await in_thread(file_port.record_check, item.node_id, error, now=clock.now())
            if error:
                log.warning("node %s: %s", item.node_name, error)
        except DatabaseError as error:
            log.warning("the check of the file port of %s was not recorded: %s", item.node_name, error)
        except Exception:
            # One node's server must not end the checks of all others; the claim expires.
            log.exception("the check of the file port of %s failed", item.node_name)
