"""A worker on a stock frontend, which knows no secrets of nodes, and on a bus that is open to everybody.

The tests share one worker, which sends a heartbeat every few milliseconds; what ends it comes last. Another
one awaits its approval meanwhile.
"""

import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.wire.node import Node
from tests.wire.servers import TOKEN, NatsServer, StockFrontend, WebSocket, ask, get, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEARTBEATS = 400
INTERVAL = "100ms" if "TEST_EFFORT" in os.environ else "10ms"
ROW = {"model_name": "loaded", "replica_index": 0, "in_flight": 0, "state": "loaded"}
CONTENT = os.urandom(200_000)


class Stock:
    """A frontend, a bus and a worker."""

    def __init__(self, folder: Path, *, auto_approve: bool = True) -> None:
        self.frontend = StockFrontend(auto_approve=auto_approve)
        self.bus = NatsServer(folder, is_open=True)
        self.node = Node(folder / "node", self.bus, 8, self.frontend)

    def heartbeats(self) -> int:
        return sum(call.status == 200 for call in self.frontend.seen("/heartbeat"))

    def registrations(self) -> int:
        return len(self.frontend.seen("/register"))

    async def sends_heartbeats(self) -> None:
        """Waits until some more were accepted."""
        before = self.heartbeats()
        await until(lambda: self.heartbeats() >= before + 5, "heartbeats are accepted")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pending(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stock]:
    """A worker that requires credentials for the bus and awaits its approval."""
    async with AsyncExitStack() as stack:
        played = Stock(tmp_path_factory.mktemp("pending"), auto_approve=False)
        stack.callback(played.bus.stop)
        await played.bus.start()
        stack.push_async_callback(played.node.stop)
        await played.node.begin(LOCALAI_NATS_REQUIRE_AUTH="true")
        yield played


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(tmp_path_factory: pytest.TempPathFactory, pending: Stock) -> AsyncIterator[Stock]:
    async with AsyncExitStack() as stack:
        played = Stock(tmp_path_factory.mktemp("stock"))
        stack.callback(played.bus.stop)
        await played.bus.start()
        stack.push_async_callback(played.node.stop)
        await played.node.start(LOCALAI_HEARTBEAT_INTERVAL=INTERVAL)
        played.frontend.replicas = [ROW]
        yield played


@pytest.mark.rule("W26", "worker-10.2", "worker-5.2")
async def test_engines_get_the_registration_token(stock: Stock) -> None:
    """D-ENGINE-TOKEN: the frontend calls them with it, and has no other."""
    address = await stock.node.load("plain", "plain")
    [started] = stock.node.notes("plain", "started")
    assert started["env"]["LOCALAI_GRPC_AUTH_TOKEN"] == TOKEN
    assert await stock.node.healthy(address, TOKEN)
    assert not await stock.node.healthy(address, "wrong")
    assert not await stock.node.healthy(address, "")


@pytest.mark.rule("W27", "W28", "worker-12", "worker-13")
async def test_files_are_staged_with_the_registration_token(stock: Stock) -> None:
    """D-FILE-TOKEN: HEAD 404, HEAD 404, PUT with a range from 0, HEAD with the hash, as it was recorded."""
    digest, last = hashlib.sha256(CONTENT).hexdigest(), len(CONTENT) - 1
    http, path = stock.node.http, "/v1/files/models/staged/model.gguf"
    assert [(await ask(http, "HEAD", path, TOKEN)).status for _ in range(2)] == [404, 404]
    span = f"bytes 0-{last}/{last + 1}"
    put = await ask(http, "PUT", path, TOKEN, CONTENT, Content_Range=span, X_Content_SHA256=digest)
    assert put.status == 200
    head = await ask(http, "HEAD", path, TOKEN)
    assert (head.status, head.headers["x-content-sha256"]) == (200, digest)
    assert (stock.node.models / "staged" / "model.gguf").read_bytes() == CONTENT
    for token in ("", "wrong"):
        assert (await ask(http, "GET", path, token)).status == 401


@pytest.mark.rule("W30", "worker-12.7")
async def test_logs_are_read_with_the_registration_token(stock: Stock) -> None:
    """D-LOG-TOKEN."""
    assert (await get(stock.node.http, "/v1/backend-logs", TOKEN))[0] == 200
    async with WebSocket(stock.node.http, "/v1/backend-logs/plain/ws", TOKEN) as socket:
        assert socket.status == 101
    async with WebSocket(stock.node.http, "/v1/backend-logs/plain/ws", "wrong") as socket:
        assert socket.status == 401


@pytest.mark.rule("W1", "W5", "worker-6")
async def test_four_hundred_heartbeats_cost_one_registration_and_no_row(stock: Stock) -> None:
    """D-IDENTITY: another registration would delete the node's replicas."""
    await until(lambda: stock.heartbeats() >= HEARTBEATS, f"{HEARTBEATS} heartbeats", 60)
    assert [call.path for call in stock.frontend.calls if call.status not in (200, 201)] == []
    assert stock.registrations() == 1
    assert stock.frontend.replicas == [ROW]
    first = stock.frontend.calls[0]
    assert (first.path, first.body["token"]) == ("/api/node/register", TOKEN)
    assert {call.headers["authorization"] for call in stock.frontend.calls} == {f"Bearer {TOKEN}"}


@pytest.mark.rule("worker-5.2", "worker-6")
async def test_a_frontend_that_was_restarted_gets_heartbeats_and_no_registration(stock: Stock) -> None:
    await stock.frontend.stop()
    stock.frontend.drops = True
    await stock.frontend.start()
    await until(lambda: stock.frontend.calls[-1].status == 0, "the worker misses it")
    stock.frontend.drops = False
    await stock.sends_heartbeats()
    assert (stock.registrations(), stock.frontend.replicas) == (1, [ROW])


@pytest.mark.rule("W6", "worker-6")
async def test_without_the_bus_there_is_no_heartbeat_and_with_it_no_registration(stock: Stock) -> None:
    stock.bus.stop()

    async def ready(status: int) -> bool:
        return (await ask(stock.node.http, "GET", "/readyz", "")).status == status

    await until(lambda: ready(503), "the worker is not ready")
    assert (await ask(stock.node.http, "GET", "/healthz", "")).status == 200
    silent_since = len(stock.frontend.calls)
    await stock.bus.start()
    await until(lambda: ready(200), "the worker is ready")
    await until(stock.node.answers, "it obeys commands", 30)
    await stock.sends_heartbeats()
    # One may have been on its way.
    assert all(call.path.endswith("/heartbeat") for call in stock.frontend.calls[silent_since:])
    assert (stock.registrations(), stock.frontend.replicas) == (1, [ROW])


@pytest.mark.rule("worker-5.2", "worker-6")
async def test_a_rejected_token_is_no_reason_to_register(stock: Stock) -> None:
    """The worker goes on when the token is accepted again."""
    stock.frontend.token = "another"
    await until(lambda: stock.frontend.seen("/heartbeat")[-1].status == 401, "it is refused")
    stock.frontend.token = TOKEN
    await stock.sends_heartbeats()
    assert (stock.registrations(), stock.frontend.replicas) == (1, [ROW])


@pytest.mark.rule("worker-5.2")
async def test_a_frontend_that_does_not_know_the_node_gets_one_registration(stock: Stock) -> None:
    """D-AGAIN-ON-404: under another id, whose commands the worker obeys."""
    former = stock.frontend.node_id
    stock.frontend.forget()
    await until(lambda: stock.frontend.node_id, "it registers again")
    assert stock.frontend.node_id != former
    await until(stock.node.answers, "it obeys commands", 30)
    await stock.sends_heartbeats()
    assert stock.registrations() == 2


@pytest.mark.rule("W32", "worker-19")
async def test_a_signal_drains_and_deregisters(stock: Stock) -> None:
    """D-SIGNALS."""
    process = stock.node.process
    assert process
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None, "the worker ends", 30)
    assert process.returncode == 0
    steps = [call for call in stock.frontend.calls if not call.path.endswith("/heartbeat")][-3:]
    assert [call.path.rpartition("/")[2] for call in steps] == ["drain", "models", "deregister"]
    assert [call.status for call in steps] == [200] * 3
    assert stock.frontend.status == "offline"
    assert stock.node.alive("plain") == []


@pytest.mark.rule("W4", "worker-5.2")
async def test_a_pending_worker_stays_off_the_bus_until_it_is_approved(pending: Stock) -> None:
    """It registers until the answer has credentials."""

    def has_asked_again() -> bool:
        pending.node.check_that_it_runs()
        return pending.registrations() >= 2

    await until(has_asked_again, "it asks again", 30)
    assert not await pending.node.answers()
    assert pending.frontend.seen("/heartbeat") == []
    pending.frontend.gives_credentials = True
    pending.frontend.approve()
    await until(pending.node.answers, "it obeys commands", 60)
