"""Runs the replica pass as soon as a node or a rule changes; the tick of the schedule is the safety net."""

from django.db import Error as DatabaseError

from localai_cluster.kit.periodic_task import PeriodicTask
from nodes.reconcilers import replicas
from operations.executor.work import in_thread

GATHER = 1.0
"""Seconds for which changes are gathered into one pass."""


class Scaler(PeriodicTask):
    """The periodic task of a controller that runs the replica pass after each change."""

    def __init__(self) -> None:
        super().__init__(
            "replica pass", self._run_pass, interval=None, gather=GATHER, retry_on=(DatabaseError,)
        )

    async def _run_pass(self) -> None:
        if not await in_thread(replicas.run_pass, tick=False):
            # The pass of another process may have read the rows before the change.
            self.wake()
