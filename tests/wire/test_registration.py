"""What a worker tells the control plane from its start on (worker.md §3 to §6), and what it listens to."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.wire.node import Node
from tests.wire.servers import TOKEN, Call, NatsServer, own_address, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMMANDS = (
    "backend.install",
    "backend.upgrade",
    "backend.stop",
    "backend.delete",
    "backend.list",
    "models.running",
    "model.unload",
    "model.stop",
    "model.delete",
    "stop",
)
INTERVAL, LAG = 1.0, 0.1
LONGEST = 10.0
"""Seconds by which a busy machine may be late."""


class Started:
    """A worker on a bus of its own, whose registration was refused twice."""

    def __init__(self, node: Node, bus: NatsServer, host: str) -> None:
        self.node, self.bus, self.host = node, bus, host

    @property
    def registrations(self) -> list[Call]:
        return self.node.frontend.seen("/register")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    folder = tmp_path_factory.mktemp("registration")
    async with AsyncExitStack() as stack:
        bus = NatsServer(folder)
        stack.callback(bus.stop)
        await bus.start()
        node, host = Node(folder / "node", bus), own_address()
        stack.push_async_callback(node.stop)
        node.control_plane.refusals = [500, 401]
        # Whoever sets the address of the engines sets that of the files too (worker.md §3).
        await node.start(
            LOCALAI_ADDR=f"{host}:{node.base}",
            LOCALAI_HEARTBEAT_INTERVAL=f"{INTERVAL:g}s",
            LOCALAI_NODE_LABELS="tier=t1, odd",
            LOCALAI_MAX_REPLICAS_PER_MODEL="2",
        )
        yield Started(node, bus, host)


@pytest.mark.rule("W1", "W2", "worker-3", "worker-5.1")
async def test_a_registration_says_who_and_where_the_worker_is(started: Started) -> None:
    call = started.registrations[-1]
    assert (call.method, call.path) == ("POST", "/api/node/register")
    assert call.headers["content-type"].startswith("application/json")
    assert call.headers["authorization"] == f"Bearer {TOKEN}"
    assert call.body["token"] == TOKEN
    assert call.body["name"] == started.node.folder.name
    assert call.body["address"] == f"{started.host}:{started.node.base}"
    assert call.body["http_address"] == f"{started.host}:{started.node.base - 1}"
    assert call.body["labels"] == {"tier": "t1", "node.replica-slots": "2"}
    assert call.body["max_replicas_per_model"] == 2
    assert "node_type" not in call.body
    assert {"total_vram", "available_vram", "gpu_vendor", "gpu_compute_capability", "capability"} <= set(
        call.body
    )


@pytest.mark.rule("W3", "worker-5.2")
async def test_a_refused_registration_is_tried_again_after_two_then_four_seconds(started: Started) -> None:
    """Whatever the refusal says."""
    first, second, third = started.registrations
    assert (first.status, second.status, third.status) == (500, 401, 201)
    assert 2 - LAG <= second.at - first.at < 2 + LONGEST
    assert 4 - LAG <= third.at - second.at < 4 + LONGEST


@pytest.mark.rule("W5", "worker-6")
async def test_the_first_heartbeat_comes_one_interval_after_the_start(started: Started) -> None:
    await until(lambda: started.node.frontend.seen("/heartbeat"), "the first heartbeat")
    heartbeat = started.node.frontend.seen("/heartbeat")[0]
    assert heartbeat.at - started.registrations[-1].at >= INTERVAL - LAG
    assert 0 < heartbeat.body["available_disk"] < heartbeat.body["total_disk"]
    has_gpu = started.registrations[-1].body["total_vram"] > 0
    assert ("available_vram" in heartbeat.body) == has_gpu


@pytest.mark.rule("W7", "R6.1", "nats-2.1", "nats-3")
async def test_each_command_has_a_listener_and_no_other_node_has_one(started: Started) -> None:
    subjects = set(await started.bus.subscriptions())
    assert {started.node.subject(command) for command in COMMANDS} <= subjects
    own = started.node.subject("")
    assert [
        subject for subject in subjects if subject.startswith("nodes") and not subject.startswith(own)
    ] == []


@pytest.mark.rule("W26", "worker-10.2")
async def test_engines_of_a_worker_that_other_machines_reach_listen_on_all_addresses(
    started: Started,
) -> None:
    """Exactly `--addr 0.0.0.0:<port>`, in the folder of the backend; calls need the token."""
    if started.host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    address = await started.node.load("open", "open")
    host, _, port = address.rpartition(":")
    assert host == started.host
    [engine] = started.node.notes("open", "started")
    assert engine["argv"] == ["--addr", f"0.0.0.0:{port}"]
    assert engine["cwd"] == str(started.node.backends / "open")
    assert engine["env"]["LOCALAI_GRPC_AUTH_TOKEN"] == started.node.engine_token
    assert await started.node.healthy(address)
    assert not await started.node.healthy(address, "wrong")
