"""Has engines stopped that nothing else stops: those of ended load attempts, those that an unload has left,
and all of a drained node.

One `Stopper` lives in every controller. It looks when a node changed and every `LOOK_EVERY` seconds. Looks
are claimed, so one controller at a time asks a worker. An engine counts as gone only when its worker says so;
a stock worker that cannot say so is asked to stop it all the same.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, assert_never

from django.db import Error as DatabaseError

from localai_cluster import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.metrics import passes
from localai_cluster.rpc.client import probe
from localai_cluster.rpc.signs import Sign
from nodes.backends.commands import PING_TIMEOUT, Worker
from nodes.backends.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.loading import drained, engines
from nodes.loading.drained import Drained
from nodes.loading.engines import Engine
from nodes.loading.exact_stop import stop_exactly
from nodes.models import NodeType
from nodes.replicas import leaving, retire
from nodes.replicas.leaving import Leaving
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds between two looks when no hint arrives."""
AT_ONCE = 16
_MOST_STOPS = 256
"""Engines of one node that a look has stopped; what a worker lists beyond that is for the next look."""
_GATHER = 1.0
"""Hints of so many seconds are one look: nodes change more often than drains end."""
_LONGEST_PAUSE = 300.0
_LOOK_AT_STOPS = 1.0
_LOOK_AT_SILENT = 10.0
_LOOK_AT_STOCK = 60.0
_PROBE_TIMEOUT = 1.0
"""C4."""
CANNOT_TELL = "its worker cannot tell what runs there"


class Stopper:
    """A controller's part."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._look = asyncio.Event()

    def hint(self) -> None:
        """Something may be due; look now."""
        self._look.set()

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            self._look.clear()
            try:
                with passes.counted("stops"):
                    pause = _LOOK_AT_STOPS if self._bus.connected and await self.look_once() else LOOK_EVERY
            except DatabaseError as error:
                log.warning("cannot see which engines must be stopped: %s", error)
                pause = LOOK_EVERY
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look.wait()
            await asyncio.sleep(_GATHER)

    async def look_once(self) -> int:
        """Carries out what is due; answers how much that was."""
        for slot in await in_thread(retire.retire_slots_of_ended, engines.running_attempts()):
            log.info("place %d on %s given up: its load has ended", slot.replica_index, slot.node_name)
        if places := await in_thread(retire.retire_noted):
            log.info("%d places of failed loads given back: their engines are gone", places)
        for replica in await in_thread(leaving.put_back):
            log.info("%s serves again: its unload ended before it was stopped", replica.process_key)
        now = clock.now()
        left: list[Coroutine[Any, Any, None]] = [
            *(self._stop(engine) for engine in await in_thread(engines.claim, AT_ONCE, now=now)),
            *(self._unload(replica) for replica in await in_thread(leaving.claim, AT_ONCE, now=now)),
            *(self._empty(node) for node in await in_thread(drained.claim, AT_ONCE, now=now)),
        ]
        for failure in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(failure, Exception):
                # Its claim runs out by itself.
                log.warning("an engine was not stopped: %r", failure)
        return len(left)

    async def _stop(self, engine: Engine) -> None:
        name = await in_thread(engines.node_name, engine.node_id)
        worker = Worker(self._bus, str(engine.node_id), name or "")
        stopped = await stop_exactly(
            worker, engine.process_key, engine.address, lambda: in_thread(engines.still, engine)
        )
        if name is None or (stopped.gone and not engine.may_still_start(clock.now())):
            log.info("engine %s of an ended load on %s: gone", engine.process_key, name)
            await in_thread(engines.gone, engine)
            await in_thread(retire.retire_noted, engine.mark)
            return
        if stopped.reason:
            log.info("engine %s on %s: %s", engine.process_key, name, stopped.reason)
        pause = min(2.0 ** min(engine.attempts, 10), _LONGEST_PAUSE)
        await in_thread(engines.look_again, engine, clock.now() + timedelta(seconds=pause))

    async def _unload(self, replica: Leaving) -> None:
        """The stop of an engine that no operation stops, or another one because none was confirmed."""
        if replica.lost and await self._lives(replica) and await in_thread(leaving.found_again, replica):
            log.info("%s serves again: its engine answers", replica.process_key)
            return
        name = await in_thread(engines.node_name, replica.node_id)
        worker = Worker(self._bus, str(replica.node_id), name or "")
        if not await in_thread(leaving.stop_sent, replica):
            return
        stopped = await stop_exactly(
            worker, replica.process_key, replica.address, lambda: in_thread(leaving.still, replica)
        )
        if stopped.gone:
            await in_thread(retire.retire_unloaded, replica.id, stop_sent=stopped.sent_at)
        else:
            await in_thread(leaving.not_gone, replica, stopped.reason, now=clock.now())

    async def _lives(self, replica: Leaving) -> bool:
        """Whether the engine serves its model: it was out of reach when a request came, nothing else."""
        proof = await in_thread(engines.bearer_at, replica.node_id)
        return proof is not None and await probe(replica.address, proof, _PROBE_TIMEOUT) is Sign.ALIVE

    async def _empty(self, node: Drained) -> None:
        if node.node_type == NodeType.AGENT:
            await in_thread(drained.confirm, node, now=clock.now())
            return
        worker = Worker(self._bus, str(node.id), node.name)
        answer = await worker.running()
        if not await in_thread(drained.still, node):
            return
        match answer:
            case Done(reply) if not reply.models:
                log.info("node %s is drained and runs no engine", node.name)
                await in_thread(drained.confirm, node, now=clock.now())
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
        await in_thread(drained.look_again, node, error, due_at=due_at)


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


async def _unasked(worker: Worker, node: Drained, reason: str) -> tuple[str, float]:
    """What to say of a node whose worker does not answer `models.running`, and when to look again."""
    if isinstance(await worker.backends(PING_TIMEOUT), NoResponders | BusDown | StillRunning):
        return reason, _LOOK_AT_SILENT
    if await in_thread(drained.still, node):
        await worker.stop("")
    return CANNOT_TELL, _LOOK_AT_STOCK
