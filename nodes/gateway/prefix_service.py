"""The prefix routing of one web process: its table, its bus connection and the tasks that maintain both.

The bus carries hints between web processes (decision 20). Without it each process remembers its own prompts
only, and nothing else changes.
"""

import asyncio
from uuid import UUID

from localai_cluster import bus_access
from localai_cluster.kit.database_pool import Pool
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.metrics import web as metrics
from nodes.gateway.prefix_updates import Outbox, hear
from nodes.gateway.prefixes import Prefixes
from nodes.replicas import hooks


class PrefixService:
    """Prefix routing of one web process. Bound to the serving event loop."""

    def __init__(self, ttl: float, bus: Bus) -> None:
        self._bus = bus
        self._telling = Outbox(bus)
        self.prefixes = Prefixes(ttl, self._telling.tell)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, pool: Pool, process: UUID) -> None:
        """Start to send and receive updates. Does not wait for a connection."""
        metrics.PREFIX_ENTRIES.set_function(self.prefixes.entries)
        hooks.on_removed.append(self._telling.removed)
        await hear(self._bus, self.prefixes.heard)
        self._tasks = [
            asyncio.create_task(self._telling.run(), name="prefix news"),
            asyncio.create_task(self.prefixes.keep(pool, process), name="prefixes"),
        ]

    async def stop(self) -> None:
        """Stop the tasks and close the bus."""
        hooks.on_removed.remove(self._telling.removed)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bus.close()


def begin(ttl: float) -> PrefixService:
    """Create a service with a bus connection of its own, which `stop` closes."""
    bus = NatsBus(bus_access.service("web"), name="web", echo=False)
    bus.start()
    return PrefixService(ttl, bus)
