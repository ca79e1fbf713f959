"""A real bus, a stub control plane and a worker process for the conformance tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import BusError, ask
from localai_cluster.messaging.nats import NatsBus
from tests.conformance.worker_support import NatsServer, StubControlPlane, Worker, eventually


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(nats: NatsServer) -> AsyncIterator[NatsBus]:
    bus = NatsBus(nats.url, name="test")
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


@pytest.fixture
async def running(worker: Worker, bus: NatsBus) -> Worker:
    """A worker that answers on the bus."""
    worker.launch()

    async def answers() -> bool:
        subject = subjects.backend_list(worker.control_plane.node_id)
        try:
            return not (await ask(bus, subject, m.Nothing(), m.ListReply, 30)).error
        except BusError:
            return False

    await eventually(answers, 15, "the worker answers")
    return worker
