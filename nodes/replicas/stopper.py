"""Stops of engines that no operation stops, and the end of rows whose owner has ended.

Engines of ended load attempts, those that an unload has left, those of departed replicas as soon as their
node can be reached, and all of a drained node.

One `Stopper` lives in every controller. It polls when a node changed and every `LOOK_EVERY` seconds. Polls
are claimed, so one controller at a time contacts a worker. An engine counts as ended only when its worker
confirms it; a stock worker that cannot confirm it gets the stop all the same.
"""

import asyncio
import logging
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, assert_never
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster.kit import clock
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.metrics import passes
from localai_cluster.rpc.client import probe
from localai_cluster.rpc.messages import Sign
from nodes.commands.commands import PING_TIMEOUT, Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.models import BackendNode, NodeType
from nodes.registry import dial_targets
from nodes.replicas import drained_nodes, drains, load_ends, retire, stops, terminations
from nodes.replicas.drained_nodes import DrainedNode
from nodes.replicas.exact_stop import stop_exactly
from nodes.replicas.lifecycle import Engine
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds between two looks when no hint arrives."""
AT_ONCE = 16
_MOST_STOPS = 256
"""Engines of one node that a look has stopped; what a worker lists beyond that is for the next look."""
_GATHER = 1.0
"""Hints of so many seconds are one look: nodes change more often than drains end."""
_LOOK_AT_STOPS = 1.0
_LOOK_AT_SILENT = 10.0
_LOOK_AT_STOCK = 60.0
_PROBE_TIMEOUT = 1.0
"""C4."""
CANNOT_TELL = "its worker cannot tell what runs there"


class Stopper(PeriodicTask):
    """The periodic task of a controller that stops what no operation stops."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(
            "stops", self._run_pass, interval=LOOK_EVERY, gather=_GATHER, retry_on=(DatabaseError,)
        )
        self._bus = bus

    async def _run_pass(self) -> float | None:
        with passes.counted("stops"):
            return _LOOK_AT_STOPS if self._bus.connected and await self.look_once() else None

    async def look_once(self) -> int:
        """Carries out what is due; answers how much that was."""
        now = clock.now()
        for row in await in_thread(load_ends.end_abandoned_loads, now=now):
            log.info("the slot of %s on %s is given up: its load has ended", row, row.node.name)
        for row in await in_thread(retire.forget_departed, now=now):
            log.warning("%s counts as ended: its node has been away since %s", row, row.updated_at)
        for engine in await in_thread(drains.return_abandoned):
            log.info("%s serves again: its unload ended before it was stopped", engine.process_key)
        left: list[Coroutine[Any, Any, None]] = [
            *(self._stop(engine) for engine in await in_thread(stops.claim_due, AT_ONCE, now=now)),
            *(self._empty(node) for node in await in_thread(drained_nodes.claim_due, AT_ONCE, now=now)),
        ]
        for failure in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(failure, Exception):
                # Its claim runs out by itself.
                log.warning("an engine was not stopped: %r", failure)
        return len(left)

    async def _stop(self, engine: Engine) -> None:
        """Send the stop of an engine that this controller has claimed."""
        if (
            engine.is_lost
            and await self._answers(engine)
            and await in_thread(terminations.restore_lost, engine)
        ):
            log.info("%s serves again: its engine answers", engine.process_key)
            return
        name = await in_thread(_node_name, engine.node_id)
        if not await in_thread(stops.record_sent, engine, now=clock.now()):
            return
        worker = Worker(self._bus, str(engine.node_id), name)
        stopped = await stop_exactly(
            worker, engine.process_key, engine.address, lambda: in_thread(stops.is_due, engine)
        )
        if stopped.gone and not engine.may_still_start(clock.now()):
            await in_thread(retire.confirm, engine.id, stop_sent=stopped.sent_at)
            return
        if stopped.reason:
            log.info("engine %s on %s: %s", engine.process_key, name, stopped.reason)
        await in_thread(stops.record_failure, engine, stopped.reason, now=clock.now())

    async def _answers(self, engine: Engine) -> bool:
        """Return True if the engine serves its model: it was only out of reach when a request came."""
        proof = await in_thread(_bearer, engine.node_id)
        return proof is not None and await probe(engine.address, proof, _PROBE_TIMEOUT) is Sign.ALIVE

    async def _empty(self, node: DrainedNode) -> None:
        if node.node_type == NodeType.AGENT:
            await in_thread(drained_nodes.confirm_empty, node, now=clock.now())
            return
        worker = Worker(self._bus, str(node.id), node.name)
        answer = await worker.running()
        if not await in_thread(drained_nodes.is_same_drain, node):
            return
        match answer:
            case Done(reply) if not reply.models:
                log.info("node %s is drained and runs no engine", node.name)
                await in_thread(drained_nodes.confirm_empty, node, now=clock.now())
                return
            case Done(reply):
                error, pause = await _stop_all(worker, reply.models[:_MOST_STOPS]), _LOOK_AT_STOPS
            case NoResponders(reason):
                error, pause = await _unasked(worker, node, reason)
            case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
                error, pause = reason, _LOOK_AT_SILENT
            case _:
                assert_never(answer)
        due_at = clock.now() + timedelta(seconds=pause)
        await in_thread(drained_nodes.schedule_check, node, error, due_at=due_at)


async def _stop_all(worker: Worker, models: tuple[messages.RunningModel, ...]) -> str:
    """Asks for each to be stopped; answers what went wrong."""
    stops = [_stop_one(worker, model) for model in models]
    return next((error for error in await asyncio.gather(*stops) if error), "")


async def _stop_one(worker: Worker, model: messages.RunningModel) -> str:
    key = messages.process_key(model.model_id, model.replica_index)
    outcome = await worker.stop_model(key, model.address)
    match outcome:
        case Done() | StillRunning():
            return ""
        case NoResponders():
            await worker.stop(key)
            return ""
        case Refused(reason) | Unreadable(reason) | BusDown(reason):
            return f"{key}: {reason}"
        case _:
            assert_never(outcome)


async def _unasked(worker: Worker, node: DrainedNode, reason: str) -> tuple[str, float]:
    """Return the error for a node whose worker does not answer `models.running`, and the next poll."""
    if isinstance(await worker.backends(PING_TIMEOUT), NoResponders | BusDown | StillRunning):
        return reason, _LOOK_AT_SILENT
    if await in_thread(drained_nodes.is_same_drain, node):
        await worker.stop("")
    return CANNOT_TELL, _LOOK_AT_STOCK


def _node_name(node_id: UUID) -> str:
    return BackendNode.objects.filter(pk=node_id).values_list("name", flat=True).first() or ""


def _bearer(node_id: UUID) -> str | None:
    """Return what a call to an engine of the node carries; None when the node was removed."""
    node = BackendNode.objects.filter(pk=node_id).values_list("engine_token", "weak_identity").first()
    return None if node is None else dial_targets.bearer(*node)
