"""A real bus, a stub control plane and a worker process for the conformance tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import BusError
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import parse_url
from tests.conformance.worker_support import NatsServer, Registry, StubControlPlane, Worker, ask
from tests.conftest import until
from tests.support.simulator import Fleet, Script, fleet


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(nats: NatsServer) -> AsyncIterator[NatsBus]:
    bus = NatsBus(parse_url(nats.url), name="test")
    bus.start()
    await asyncio.wait_for(bus.wait_connected(), 30)
    yield bus
    await bus.close()


@pytest.fixture
async def control_plane() -> AsyncIterator[StubControlPlane]:
    control_plane = StubControlPlane()
    await control_plane.start()
    yield control_plane
    await control_plane.stop()


@pytest.fixture
async def worker(tmp_path: Path, control_plane: StubControlPlane, nats: NatsServer) -> AsyncIterator[Worker]:
    """A worker that the test launches."""
    worker = Worker(tmp_path, control_plane, nats)
    yield worker
    worker.kill()
    print(worker.log.read_text()[-4000:] if worker.log.exists() else "the worker was never launched")


@pytest.fixture
async def running(worker: Worker, bus: NatsBus) -> Worker:
    """A worker that answers on the bus."""
    worker.launch()

    async def answers() -> bool:
        subject = messages.subject("backend.list", worker.control_plane.node_id)
        try:
            return not (await ask(bus, subject, m.EmptyRequest(), m.ListReply, 30)).error
        except BusError:
            return False

    await until(answers, 15, "the worker answers")
    return worker


Play = Callable[..., AbstractAsyncContextManager[Fleet]]
"""`play(count, stock=…, knows=…, backend_install=Act(…))`: simulated workers, and what each does."""


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """The control plane of many workers."""
    made = Registry()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def play(registry: Registry, nats: NatsServer) -> Play:
    """Opens a fleet of simulated workers on one connection."""

    def opened(
        count: int = 1,
        *,
        stock: bool = False,
        knows: frozenset[str] = frozenset(),
        beat_every: float = 0.1,
        **acts: Any,
    ) -> AbstractAsyncContextManager[Fleet]:
        named = {verb.replace("_", "."): act for verb, act in acts.items()}
        return fleet(
            f"http://127.0.0.1:{registry.port}",
            "token",
            count,
            bus=parse_url(nats.url),
            script=lambda number: Script(named, stock, knows),
            beat_every=beat_every,
        )

    return opened
