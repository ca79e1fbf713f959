"""Routing by prefix as one web process runs it: the memory, its connection to the bus, and what keeps both.

The bus carries hints between web processes (decision 20). Without it each process remembers its own prompts
only, and nothing else changes.
"""

import asyncio
from uuid import UUID

from localai_cluster import bus_access
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.metrics import web as metrics
from nodes.replicas import hooks
from nodes.routing.pool import Pool
from nodes.routing.prefix_news import Outbox, hear
from nodes.routing.prefixes import Prefixes


class PrefixService:
    """Lives on the loop that serves."""

    def __init__(self, ttl: float, bus: Bus) -> None:
        self._bus = bus
        self._telling = Outbox(bus)
        self.prefixes = Prefixes(ttl, self._telling.tell)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, pool: Pool, process: UUID) -> None:
        """Begins to tell and to hear; waits for nobody."""
        metrics.PREFIX_ENTRIES.set_function(self.prefixes.entries)
        hooks.on_removed.append(self._telling.removed)
        await hear(self._bus, self.prefixes.heard)
        self._tasks = [
            asyncio.create_task(self._telling.run(), name="prefix news"),
            asyncio.create_task(self.prefixes.keep(pool, process), name="prefixes"),
        ]

    async def stop(self) -> None:
        """Ends all of it."""
        hooks.on_removed.remove(self._telling.removed)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bus.close()


def begin(ttl: float) -> PrefixService:
    """With a connection of its own, which it has closed when it is stopped."""
    bus = NatsBus(bus_access.service("web"), name="web", echo=False)
    bus.start()
    return PrefixService(ttl, bus)
