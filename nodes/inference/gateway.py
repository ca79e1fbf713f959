"""From a model's name to an engine's answer: pick or load, call, count out, go on elsewhere if the replica
died.

One `Gateway` a web process, on the loop that serves; `start` and `stop` are called by `manage.py serve`
(or by ASGI's lifespan). Everything a request counts in is counted out in a `finally`, so success, error,
disconnect and cancellation end alike.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from localai_cluster import clock, conf
from localai_cluster.errors import Unavailable
from localai_cluster.rpc.client import BackendClient, ClientPool
from localai_cluster.rpc.errors import BackendError, IdentityMismatch, Lost, ModelNotLoaded, Refused
from nodes.loading.wait import Asker, Loads
from nodes.registry import known
from nodes.routing import pool
from nodes.routing.picks import Picker, Replica
from nodes.routing.process import Presence
from operations.changes.events import NODES, OPERATIONS, listen
from operations.executor.waiting import Hints

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REPLICAS = 4
"""Replicas that one request tries: the first and three more."""
MAX_LOADS = 3
"""C34: loads that ended without an error after which a request that still finds no replica gives up."""
PROBE_SECONDS = 2.0
"""C19: limit of the health call that decides whether a replica is dead."""

Work = Callable[[BackendClient, float], Awaitable[T]]
"""What a replica is asked for, and when it must have answered (monotonic clock)."""


@dataclass(slots=True)
class Ask:
    """One request for a model. `key_hash` is emptied once the database has confirmed the key."""

    model: str
    asker: Asker
    key_hash: str
    wait_until: float
    """When it stops waiting for a load, on the monotonic clock; infinite without a limit."""


def wait_until() -> float:
    """The end of the wait of a request that arrives now (C32)."""
    budget = conf.cluster().model_load_wait
    return clock.monotonic() + budget if budget else math.inf


class Gateway:
    """Replicas, engines and loads as one web process sees them."""

    def __init__(self, picker: Picker, clients: ClientPool, loads: Loads) -> None:
        self.picker = picker
        self._clients = clients
        self._loads = loads

    async def run(self, ask: Ask, work: "Work[T]") -> tuple[T, Replica]:
        """Has one replica do `work` and says which; raises ClusterErrors.

        A replica that did no work (dead, busy, or holding another model) is replaced by the next one or by a
        load. One whose connection broke halfway is replaced once only: the request may be what kills it. Any
        other error is the answer.

        The request's time limit begins with its first replica and covers everything after that: further
        replicas get the time that is left.
        """
        losses, deadline = 0, math.inf
        for attempt in range(1, MAX_REPLICAS + 1):
            replica = await self._acquire(ask)
            deadline = min(deadline, clock.monotonic() + conf.cluster().request_timeout)
            ask.wait_until = min(ask.wait_until, deadline)
            try:
                return await work(self._clients.get(replica.address), deadline), replica
            except BackendError as error:
                await self._check(replica, error)
                lost = isinstance(error, Lost)
                losses += lost
                if attempt == MAX_REPLICAS or losses > 1 or not (error.repeatable or lost):
                    raise
                logger.info("%s at %s: %s; going on", replica.model, replica.address, error.message)
            finally:
                self.picker.give_back(replica)
        raise AssertionError("the last attempt returns or raises")

    async def _acquire(self, ask: Ask) -> Replica:
        loaded = 0
        replica = await self._pick(ask)
        while replica is None:
            if loaded == MAX_LOADS:
                raise Unavailable(f"model {ask.model} was loaded, but no replica of it is available")
            loaded += await self._loads.wait(ask.model, ask.wait_until, ask.asker)
            replica = await self._pick(ask)
        return replica

    async def _pick(self, ask: Ask) -> Replica | None:
        caller, replica = await self.picker.take(ask.model, ask.key_hash)
        if caller is not None:
            ask.key_hash = ""
            ask.asker = Asker(caller.name, ask.asker.request_id, ask.asker.client_address)
        return replica

    async def _check(self, replica: Replica, error: BackendError) -> None:
        """Takes the replica out of service when the error shows, or a probe confirms, that it is of no
        use."""
        wrong = isinstance(error, ModelNotLoaded | IdentityMismatch)
        dead = isinstance(error, Refused | Lost) and not await self._answers(replica)
        if not (wrong or dead):
            return
        try:
            removed = await self.picker.remove(replica)
        except pool.UNREACHABLE as away:
            raise Unavailable("the database is not reachable", retry_after=2) from away
        if removed:
            logger.warning(
                "Removed the replica of %s at %s: %s", replica.model, replica.address, error.message
            )
        if dead:
            self._clients.forget(replica.address)

    async def _answers(self, replica: Replica) -> bool:
        try:
            return await self._clients.get(replica.address).health(PROBE_SECONDS)
        except BackendError:
            return False


@dataclass
class _Running:
    gateway: Gateway
    presence: Presence
    clients: ClientPool
    loads: Loads
    hearing: "asyncio.Task[None]"


_running: _Running | None = None


def current() -> Gateway:
    """The gateway of this process; raises Unavailable before it is started."""
    if _running is None:
        raise Unavailable("the web process is not ready yet", retry_after=1)
    return _running.gateway


async def start() -> None:
    """Opens the pool, announces this process, and makes it able to serve."""
    global _running
    shared = await pool.open_shared()
    picker = Picker(shared, pool.Line(conf.cluster().database_url))
    hints = Hints()
    clients, loads = ClientPool(conf.cluster().registration_token), Loads(hints)
    presence = Presence(picker, conf.cluster().web_stale_after)
    await presence.start()
    hearing = asyncio.create_task(_hear(hints))
    _running = _Running(Gateway(picker, clients, loads), presence, clients, loads, hearing)


async def end_waits() -> None:
    """Sends everyone who waits for a load away with a 503; the loads themselves go on."""
    if _running is not None:
        await _running.loads.close()


async def stop() -> None:
    """Gives everything back; requests must have ended before."""
    global _running
    running, _running = _running, None
    if running is None:
        return
    running.hearing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running.hearing
    await running.loads.close()
    await running.presence.stop()
    await running.clients.close()
    await pool.close_shared()


async def _hear(hints: Hints) -> None:
    async for channel, payload in listen(OPERATIONS, NODES):
        if channel != OPERATIONS:
            known.shared().forget(payload)
        if channel != NODES:
            hints.notify(payload.partition(" ")[0])
