"""Routing by prefix in one web process: what it remembers, what it says of a pick, what it learns of one.

request with a chain -> `advise` (which replica had the beginning of its prompt) -> the pick, one statement ->
`landed` (remember, count, tell the others). The guard against overload is in the statement, because only that
knows how busy replicas are.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from localai_cluster import clock
from localai_cluster.metrics import web as metrics
from nodes.replicas.hooks import Removed
from nodes.routing.affinity import Affinity, Place
from nodes.routing.pool import UNREACHABLE, Parameters, Pool
from nodes.routing.prefix_news import Given, News
from nodes.routing.pressure import Pressure
from nodes.routing.request import InferenceRequest
from nodes.scheduling.pressure import REPORT, WINDOW

logger = logging.getLogger(__name__)

REPORT_EVERY = 2.0
"""Seconds between two reports of pressure, and two looks whether a sweep is due."""


class Prefixes:
    """Lives on the loop that serves."""

    def __init__(self, ttl: float, tell: Callable[[News], None]) -> None:
        self._affinity = Affinity(ttl)
        self._pressure = Pressure()
        self._unreported: set[str] = set()
        """Models with pressure that no row tells yet."""
        self._tell = tell
        self._sweep_every, self._swept = ttl / 2, clock.monotonic()

    def entries(self) -> int:
        """How many blocks of prompts it knows a replica of."""
        return len(self._affinity)

    def advise(self, request: InferenceRequest) -> None:
        """R2.6: what the next pick of the request should know."""
        if not request.chain:
            return
        found = self._affinity.match(request.model, request.chain, clock.monotonic())
        request.preferred = None if found is None else found.place
        request.share = 0.0 if found is None else found.depth / len(request.chain)

    def landed(self, request: InferenceRequest) -> None:
        """R3.17, R3.18: what its pick came to."""
        replica = request.replica
        if replica is None or request.remembered is None:
            return
        place, chain, model = (replica.node_id, replica.index), request.chain, request.model
        kept_away = request.remembered and place != request.preferred
        if kept_away:
            self._pressure.record(model, clock.now())
            self._unreported.add(model)
        share = request.share if request.remembered and not kept_away else 0.0
        metrics.prefix_picked(model, request.remembered, kept_away, len(chain), share or 0.0)
        if self._affinity.observe(model, chain, place, clock.monotonic()):
            self._tell(Given(model, chain, *place))

    def weights(self, model: str) -> list[tuple[Place, float]]:
        """R3.12: for the pick."""
        return self._affinity.weights(model, clock.monotonic())

    def heard(self, news: News) -> None:
        """R3.21: another process told it; it is not told again."""
        if isinstance(news, Given):
            place = news.node_id, news.replica
            self._affinity.observe(news.model, news.chain, place, clock.monotonic())
        else:
            self._affinity.forget(news.model, news.node_id, news.replica)

    def removed(self, one: Removed) -> None:
        """R3.23: a replica's row has gone."""
        self._affinity.forget(one.model_name, one.node_id, one.replica_index)

    def forget_all(self) -> None:
        """After a time in which it may have missed that replicas went."""
        self._affinity.clear()

    async def keep(self, pool: Pool, process: UUID) -> None:
        """Reports pressure and drops what is too old, until cancelled."""
        while True:
            await asyncio.sleep(REPORT_EVERY)
            if clock.monotonic() - self._swept >= self._sweep_every:
                self._swept = clock.monotonic()
                self._affinity.sweep(self._swept)
            try:
                await self.report(pool, process)
            except (psycopg.Error, *UNREACHABLE) as error:
                logger.warning("Cannot report pressure: %s", error)

    async def report(self, pool: Pool, process: UUID) -> None:
        """One statement for all models with news; what could not be reported is again, whole."""
        if not self._unreported:
            return
        models, self._unreported, now = self._unreported, set(), clock.now()
        told = {model: self._pressure.within(model, now) for model in models}
        try:
            await pool.run(REPORT, _reported(process, told, now))
        except BaseException:
            self._unreported |= models
            raise


def _reported(process: UUID, told: Mapping[str, Sequence[datetime]], now: datetime) -> Parameters:
    times = {model: [at.isoformat() for at in found] for model, found in told.items()}
    return {"process": process, "told": Jsonb(times), "now": now, "since": now - 2 * WINDOW}
