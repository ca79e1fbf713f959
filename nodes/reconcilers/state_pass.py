"""The state pass: check the engines of suspect replicas. Observe, judge (pure), record.

A schedule, or a worker's report of an engine's end, marks replicas as suspects and wakes the controllers
(`nodes/replicas/checks.py`). A controller claims rows and requests the list of engines from the worker of
each node. Without a list it probes the port of the engine. Several controllers divide the rows by their
claims, so no lock is held during a request. If a controller dies, one pass is lost.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

from django.db import Error as DatabaseError

from localai_cluster.kit import clock, conf
from localai_cluster.kit.cancellation import cancel_and_wait
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging.bus import Bus
from localai_cluster.rpc.client import probe
from localai_cluster.rpc.messages import Sign
from nodes.backends.inventory import engines_of
from nodes.commands.commands import Worker
from nodes.models import NodeModel
from nodes.registry import dial_targets
from nodes.replicas import checks
from nodes.replicas.evidence import CheckResult, is_listed, judge
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

MAX_PARALLEL_NODES = 64
MAX_PARALLEL_PROBES = 64
PROBE_TIMEOUT = 1.0
"""Seconds that a probe of an engine's port may take (C4)."""
CHECK_LIMIT = 15.0
"""Seconds after which a check ends; replicas without a result stay unchanged."""
_GATHER_SECONDS = 0.1
"""Seconds for which wake-ups are gathered into one check."""


class StatePass(PeriodicTask):
    """The periodic task of a controller that checks suspect engines. Several passes may run at a time."""

    def __init__(self, bus: Bus) -> None:
        super().__init__("state pass", self._begin_pass, interval=None)
        self._bus = bus
        self._passes = asyncio.TaskGroup()
        self._nodes = asyncio.Semaphore(MAX_PARALLEL_NODES)
        self._ports = asyncio.Semaphore(MAX_PARALLEL_PROBES)

    async def run(self) -> None:
        """Begin a pass after each wake-up, until cancelled."""
        async with self._passes:
            await super().run()

    async def _begin_pass(self) -> None:
        self._passes.create_task(self._run_pass(), name="state pass")
        await asyncio.sleep(_GATHER_SECONDS)

    async def _run_pass(self) -> None:
        """Run a pass and log errors. The claims of a failed check expire, and the schedule checks again."""
        try:
            await self.run_pass()
        except DatabaseError as error:
            log.warning("cannot find out which engines have ended: %s", error)
        except Exception:
            # R4.5: a defect must not end the looks of this controller.
            log.exception("a look at engines failed")

    async def run_pass(self) -> int:
        """Claim suspect replicas and check their engines; return their number."""
        now = clock.now()
        heard_since = now - timedelta(seconds=conf.cluster().node_stale_after)
        suspects = await in_thread(checks.claim_suspects, heartbeat_since=heard_since, now=now)
        if not suspects:
            return 0
        by_node = groupby(sorted(suspects, key=_node_id), key=_node_id)
        check_tasks = [asyncio.create_task(self._check_node(list(group))) for _, group in by_node]
        try:
            done, _ = await asyncio.wait(check_tasks, timeout=CHECK_LIMIT)
        finally:
            await cancel_and_wait(*check_tasks)
        findings: dict[NodeModel, CheckResult] = {}
        for check_task in done:
            if error := check_task.exception():
                log.warning("the engines of a node were not looked at: %r", error)
            else:
                findings |= check_task.result()
        for gone in await in_thread(checks.record_results, findings, now=now):
            log.warning("engine %s on %s has ended: its replica serves no more", gone, gone.node.name)
        return len(suspects)

    async def _check_node(self, suspects: Sequence[NodeModel]) -> dict[NodeModel, CheckResult]:
        """Check the replicas of one node (R4.24): by the worker's list, or without a list by probes."""
        node = suspects[0].node
        async with self._nodes:
            running = await engines_of(Worker(self._bus, str(node.id), node.name))
        if running is not None:
            return {
                suspect: judge(suspect, is_listed(running, suspect.process_key, suspect.address), None)
                for suspect in suspects
            }
        ports = await asyncio.gather(*(self._probe_port(suspect) for suspect in suspects))
        return {suspect: judge(suspect, None, port) for suspect, port in zip(suspects, ports, strict=True)}

    async def _probe_port(self, suspect: NodeModel) -> Sign:
        token = dial_targets.bearer_token(suspect.node.engine_token, suspect.node.weak_identity)
        async with self._ports:
            return await probe(suspect.address, token, PROBE_TIMEOUT)


def _node_id(suspect: NodeModel) -> str:
    return str(suspect.node_id)
