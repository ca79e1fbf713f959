"""`/ws/feed`: who may watch, what is told first, changes within a second, coming back, outages."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.db import connections

from localai_cluster import clock
from localai_cluster.embedded.valkey import EmbeddedValkey
from nodes import actors, services
from nodes.api.websockets import websocket_application
from nodes.live import watch as watching
from nodes.models import BackendNode
from operations import services as ledger
from operations.models import Operation
from tests.support import api
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db(transaction=True)

ADMIN = [(b"authorization", f"Bearer {API_KEY}".encode())]
PAGE = [(b"host", b"cluster:8080"), (b"origin", b"http://cluster:8080")]
ANN = actors.Actor(actors.ActorKind.USER, "ann")


def look_and_close() -> watching.Look:
    """A look; channels' communicator keeps connections of threads from being closed as they are elsewhere."""
    try:
        return watching.look()
    finally:
        connections.close_all()


@pytest.fixture(autouse=True)
def process(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> watching.NodeFeed:
    """This test's web process."""
    feed = watching.NodeFeed(look_and_close)
    monkeypatch.setattr(watching, "_shared", feed)
    return feed


class Tab:
    """A page's socket; `seen` is every message so far, `nodes` and `operations` what the page shows."""

    def __init__(self, query: str = "", headers: Any = ADMIN) -> None:
        self.socket = WebsocketCommunicator(websocket_application, f"/ws/feed{query}", headers=list(headers))
        self.seen: list[dict[str, Any]] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.cursor, self.seq = "", 0

    async def open(self) -> "Tab":
        accepted, _ = await self.socket.connect(timeout=5)
        assert accepted
        return self

    async def next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json_from(timeout=5)
        self.seen.append(message)
        self._apply(message)
        return message

    def _apply(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind.startswith("nodes."):
            self.cursor = message["cursor"]
        if kind == "nodes.snapshot":
            self.nodes = {node["id"]: node for node in message["nodes"]}
        elif kind == "nodes.delta":
            for patch in message["changed"]:
                self.nodes[patch["id"]] = self.nodes.get(patch["id"], {}) | patch
            for node in message["removed"]:
                del self.nodes[node]
        if kind.startswith("operations."):
            self.seq = message["seq"]
        if kind == "operations.snapshot":
            self.operations = {}
        if kind.startswith("operations."):
            self.operations |= {one["jobID"]: one for one in message["operations"]}

    async def until(self, holds: Callable[[], Any]) -> None:
        """Reads until it holds."""
        while not holds():
            await self.next()

    async def greeted(self) -> "Tab":
        """Reads until nodes and operations have been told once."""
        kinds = ("nodes", "operations")
        await self.until(lambda: all(any(m["type"].startswith(k) for m in self.seen) for k in kinds))
        return self

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.seen if message["type"] == kind]


Open = Callable[..., Awaitable[Tab]]


@pytest.fixture
async def tab() -> AsyncIterator[Open]:
    """Opens tabs, and closes them afterwards."""
    opened: list[Tab] = []

    async def start(query: str = "", headers: Any = ADMIN) -> Tab:
        opened.append(Tab(query, headers))
        return await opened[-1].open()

    yield start
    for one in opened:
        await one.socket.disconnect()
    await sync_to_async(connections.close_all)()


def shown(page: Tab, node: BackendNode) -> dict[str, Any]:
    """The node as the page shows it."""
    return page.nodes[str(node.id)]


make_node = sync_to_async(api.make_node)


@sync_to_async
def admit(name: str = "mock") -> Operation:
    request = ledger.OperationRequest("backend_install", key=name, element=name, actor="x")
    return ledger.admit(request, now=clock.now()).operation


@sync_to_async
def drain(node: BackendNode, reason: str = "disk") -> None:
    services.drain(node.id, actor=ANN, now=clock.now(), reason=reason)


async def test_hello_comes_first_and_then_everything(tab: Open) -> None:
    """Who we are, whom we take the client for; operations, nodes and notices as they are."""
    node, operation = await make_node(), await admit()
    page = await (await tab()).greeted()
    assert page.seen[0] | {"at": "", "build": ""} == {
        "type": "hello",
        "at": "",
        "build": "",
        "version": "0.1.0",
        "user": {"name": "static-key", "role": "admin"},
    }
    assert [one["name"] for one in page.nodes.values()] == [node.name]
    assert list(page.operations) == [str(operation.id)]
    assert len(page.told("nodes.snapshot")) == len(page.told("operations.snapshot")) == 1
    assert page.told("notices")


async def test_two_tabs_see_a_change_within_a_second(tab: Open) -> None:
    """A NOTIFY wakes the look; the patch carries the keys that changed and nothing else."""
    node = await make_node()
    pages = [await (await tab()).greeted() for _ in range(2)]
    began = clock.monotonic()
    await drain(node)
    for page in pages:
        await page.until(lambda: shown(page, node)["status"] == "draining")  # noqa: B023 - called at once
    assert clock.monotonic() - began < 1
    (patch,) = pages[0].told("nodes.delta")[-1]["changed"]
    assert set(patch) == {"id", "status", "reason", "since", "drain", "revision"}
    assert patch["reason"] == "drained by ann: disk"
    assert pages[0].nodes == pages[1].nodes
