"""Routing by prefix in one web process: its prefix table, preferred replicas for picks, and updates.

For a request with a chain, `set_preferred_replica` finds the replica that had the prompt's prefix. The pick
is one statement. `record_pick` stores the result and notifies other processes. The overload guard is in the
statement, because only the database has the load of all replicas. `PrefixService` connects the router to the
bus, which carries updates between web processes (decision 20); without the bus each process knows its own
prompts only.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from localai_cluster import bus_access
from localai_cluster.kit import cancellation, clock
from localai_cluster.kit.database_pool import UNREACHABLE_ERRORS, Parameters, Pool
from localai_cluster.kit.settings_table import MAX_PRESSURE
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.metrics import web as metrics
from nodes.gateway.prefix_table import PrefixTables, Slot
from nodes.gateway.prefix_updates import Outbox, PrefixObserved, PrefixUpdate, subscribe_to_updates
from nodes.gateway.request import InferenceRequest
from nodes.replicas import hooks
from nodes.replicas.hooks import RemovedReplica
from nodes.scheduling.pressure import PRESSURE_WINDOW, REPORT_PRESSURE_SQL

logger = logging.getLogger(__name__)


class Pressure:
    """Times of diversions by model in one web process, at most as many as scaling needs.

    A diversion is a request that did not go to the replica that caches its prompt.
    """

    def __init__(self) -> None:
        self._times: dict[str, deque[datetime]] = {}

    def record(self, model: str, now: datetime) -> None:
        """Record one diversion (R3.18)."""
        times = self._times.setdefault(model, deque(maxlen=MAX_PRESSURE))
        times.append(now)
        self._prune(times, now)

    def recent_times(self, model: str, now: datetime) -> Sequence[datetime]:
        """Return the times of diversions within the window, oldest first (R3.19)."""
        times = self._times.get(model)
        if times is None:
            return ()
        self._prune(times, now)
        if not times:
            del self._times[model]
        return tuple(times)

    def _prune(self, times: deque[datetime], now: datetime) -> None:
        while times and now - times[0] > PRESSURE_WINDOW:
            times.popleft()


REPORT_SECONDS = 2.0
"""Seconds between two reports of pressure, and between two checks for expired blocks."""


class PrefixRouter:
    """Chooses the preferred replica of each request by its prompt. Bound to the serving event loop."""

    def __init__(self, ttl: float, publish: Callable[[PrefixUpdate], None]) -> None:
        self._affinity = PrefixTables(ttl)
        self._pressure = Pressure()
        self._unreported: set[str] = set()
        """Models with pressure that is not yet stored in a row."""
        self._publish = publish
        self._sweep_every, self._swept_at = ttl / 2, clock.monotonic()

    def entries(self) -> int:
        """Return the number of prompt blocks in the prefix tables."""
        return self._affinity.size

    def set_preferred_replica(self, request: InferenceRequest) -> None:
        """Set the preferred replica and the cached prefix ratio of the request before its pick (R2.6)."""
        if not request.chain:
            return
        match = self._affinity.match(request.model, request.chain, clock.monotonic())
        request.preferred = None if match is None else match.slot
        request.cached_ratio = 0.0 if match is None else match.depth / len(request.chain)

    def record_pick(self, request: InferenceRequest) -> None:
        """Record which replica the request got (R3.17, R3.18)."""
        replica = request.replica
        if replica is None or request.is_prefix_cached is None:
            return
        slot, chain, model = (replica.node_id, replica.index), request.chain, request.model
        cached = 0
        if not request.is_prefix_cached:
            outcome = "miss"
        elif slot == request.preferred:
            outcome, cached = "hit", round(len(chain) * (request.cached_ratio or 0.0))
        else:
            outcome = "kept_away"
            self._pressure.record(model, clock.now())
            self._unreported.add(model)
        metrics.prefix_picked(model, outcome, len(chain), cached)
        if self._affinity.observe(model, chain, slot, clock.monotonic()):
            self._publish(PrefixObserved(model, chain, *slot))

    def weights(self, model: str) -> list[tuple[Slot, float]]:
        """Return the prefix weights of the model's replicas for the pick (R3.12)."""
        return self._affinity.weights(model, clock.monotonic())

    def apply_update(self, update: PrefixUpdate) -> None:
        """Apply an update of another process to the tables (R3.21). The update is not forwarded."""
        if isinstance(update, PrefixObserved):
            slot = update.node_id, update.replica
            self._affinity.observe(update.model, update.chain, slot, clock.monotonic())
        else:
            self._affinity.forget(update.model, update.node_id, update.replica)

    def forget_replica(self, replica: RemovedReplica) -> None:
        """Forget a replica whose row was deleted (R3.23)."""
        self._affinity.forget(replica.model_name, replica.node_id, replica.replica_index)

    def forget_all(self) -> None:
        """Clear the tables, because removals of replicas may have been missed."""
        self._affinity.clear()

    async def run_reports(self, pool: Pool, process: UUID) -> None:
        """Report pressure and drop expired blocks periodically, until cancelled."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if clock.monotonic() - self._swept_at >= self._sweep_every:
                self._swept_at = clock.monotonic()
                self._affinity.sweep(self._swept_at)
            try:
                await self.report_pressure(pool, process)
            except (psycopg.Error, *UNREACHABLE_ERRORS) as error:
                logger.warning("Cannot report pressure: %s", error)

    async def report_pressure(self, pool: Pool, process: UUID) -> None:
        """Store new pressure of all models in one statement. If it fails, the next report includes it."""
        if not self._unreported:
            return
        models, self._unreported, now = self._unreported, set(), clock.now()
        times_by_model = {model: self._pressure.recent_times(model, now) for model in models}
        try:
            await pool.run(REPORT_PRESSURE_SQL, _report_parameters(process, times_by_model, now))
        except BaseException:
            self._unreported |= models
            raise


def _report_parameters(
    process: UUID, times_by_model: Mapping[str, Sequence[datetime]], now: datetime
) -> Parameters:
    times = {
        model: [time.isoformat() for time in model_times] for model, model_times in times_by_model.items()
    }
    return {"process": process, "times": Jsonb(times), "now": now, "since": now - 2 * PRESSURE_WINDOW}


_MAX_DIAL_WAIT_SECONDS = 1.0
"""Maximum seconds for which a start waits for the bus; an address without an answer takes 5 s to fail."""


class PrefixService:
    """Prefix routing of one web process with its bus connection. Bound to the serving event loop."""

    def __init__(self, ttl: float, bus: NatsBus) -> None:
        self._bus = bus
        self._outbox = Outbox(bus)
        self.prefixes = PrefixRouter(ttl, self._outbox.queue)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def connect(cls, ttl: float) -> "PrefixService":
        """Create a service with a bus connection of its own, which `stop` closes."""
        bus = NatsBus(bus_access.service_servers("web"), name="web", echo=False)
        bus.start()
        return cls(ttl, bus)

    async def start(self, pool: Pool, process: UUID) -> None:
        """Start sending and receiving updates. Wait for the first attempt to connect, not for a success.

        A process that serves before it has subscribed would miss the prompts that others receive meanwhile.
        """
        metrics.set_reader(metrics.PREFIX_ENTRIES, self.prefixes.entries)
        hooks.on_removed.append(self._outbox.queue_removal)
        await subscribe_to_updates(self._bus, self.prefixes.apply_update)
        await self._bus.wait_dialed(_MAX_DIAL_WAIT_SECONDS)
        self._tasks = [
            asyncio.create_task(self._outbox.run(), name="prefix news"),
            asyncio.create_task(self.prefixes.run_reports(pool, process), name="prefixes"),
        ]

    async def stop(self) -> None:
        """Stop the tasks and close the bus."""
        hooks.on_removed.remove(self._outbox.queue_removal)
        await cancellation.cancel_and_wait(*self._tasks)
        await self._bus.close()
