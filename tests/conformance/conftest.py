"""A real bus, a stub controller and a worker process for the conformance tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import BusError, ask
from localai_cluster.messaging.nats import NatsBus
from tests.conformance.worker_support import NatsServer, StubController, Worker, eventually


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
async def controller() -> AsyncIterator[StubController]:
    controller = StubController()
    await controller.start()
    yield controller
    await controller.stop()


@pytest.fixture
async def worker(tmp_path: Path, controller: StubController, nats: NatsServer) -> AsyncIterator[Worker]:
    """A worker that the test launches."""
    worker = Worker(tmp_path, controller, nats)
    yield worker
    worker.kill()


@pytest.fixture
async def running(worker: Worker, bus: NatsBus) -> Worker:
    """A worker that answers on the bus."""
    worker.launch()

    async def answers() -> bool:
        subject = subjects.backend_list(worker.controller.node_id)
        try:
            return not (await ask(bus, subject, m.Nothing(), m.ListReply, 30)).error
        except BusError:
            return False

    await eventually(answers, 15, "the worker answers")
    return worker
