"""Many simulated workers: started together, looked at together, gone together.

    async with fleet(url, token, 1000, bus=servers) as simulated:
        ...
        assert [command.body["backend"] for command in simulated.received("backend.install")] == [...]

With `bus`, one connection carries all of them; its user must be allowed all nodes' subjects, as a service of
the cluster is (`messaging.credentials.mint_service`). Without it each dials with the credentials that its
registration brought.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import Servers
from tests.support.simulator.machine import Command
from tests.support.simulator.script import Script
from tests.support.simulator.worker import Home, SimulatedWorker

AT_ONCE = 16
"""Maximum parallel registrations."""


@dataclass(frozen=True)
class Fleet:
    """The workers in the order of their numbers, and the commands that they received."""

    workers: list[SimulatedWorker]

    def received(self, verb: str) -> list[Command]:
        """Return the commands of this verb that any worker received, in the order of arrival."""
        found = [c for worker in self.workers for c in worker.machine.received if c.verb == verb]
        return sorted(found, key=lambda command: command.at)

    def count(self, verb: str) -> int:
        """Return the number of these commands, including those that no worker has kept."""
        return sum(worker.count(verb) for worker in self.workers)


@asynccontextmanager
async def fleet(
    url: str,
    token: str,
    count: int,
    *,
    bus: Servers | None = None,
    script: Callable[[int], Script] = lambda number: Script(),
    name: str = "simulated",
    names: Sequence[str] = (),
    beat_every: float = 10.0,
) -> AsyncIterator[Fleet]:
    """Run `count` workers that answer on the bus; `script` returns the script of each by its number.

    Their names are `names`, or else `name` with their number.
    """
    limits = httpx.Limits(max_connections=4 * AT_ONCE)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        shared = None
        if bus is not None:
            shared = NatsBus(bus, name=f"{name} fleet")
            shared.start()
            await asyncio.wait_for(shared.wait_connected(), 60)
        http = await asyncio.start_server(_says_that_it_is_there, "127.0.0.1", 0)
        http_address = "127.0.0.1:{1}".format(*http.sockets[0].getsockname())
        home = Home(url, token, client, beat_every, shared, http_address)
        workers = [
            SimulatedWorker(called, number, home, script(number))
            for number, called in enumerate(names or [f"{name}-{number}" for number in range(count)])
        ]
        gate = asyncio.Semaphore(AT_ONCE)

        async def start(worker: SimulatedWorker) -> None:
            async with gate:
                await worker.start()

        try:
            await asyncio.gather(*(start(worker) for worker in workers))
            yield Fleet(workers)
        finally:
            for worker in workers:
                worker.machine.end()
            if shared is not None:
                await shared.close()
            await asyncio.gather(*(worker.stop() for worker in workers))
            http.close()


async def _says_that_it_is_there(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
    writer.close()
