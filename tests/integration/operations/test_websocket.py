"""`/ws/operations`: who may watch, snapshot, deltas in order, gaps, doubles, resuming."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.layers import get_channel_layer
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.db import connections
from django.test import Client

from localai_cluster.accounts import principals
from localai_cluster.edge import websocket_application
from localai_cluster.embedded.bundled_servers import EmbeddedValkey
from localai_cluster.kit import clock
from operations.changes import events, feed, topics
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.models import Event, Operation
from tests.support import api
from tests.support.environment import API_KEY, REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db(transaction=True)

ADMIN = [(b"authorization", f"Bearer {API_KEY}".encode())]
Watch = Callable[..., Awaitable[WebsocketCommunicator]]


@pytest.fixture(autouse=True)
def no_news(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ledger publishes is held back: a test sends by hand what the channel layer shall deliver."""
    monkeypatch.setattr(events, "publish", lambda operations: None)


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    """Opens sockets, and closes them afterwards."""
    opened: list[WebsocketCommunicator] = []

    async def start(
        query: str = "", headers: Any = ADMIN, path: str = "/ws/operations"
    ) -> WebsocketCommunicator:
        socket = WebsocketCommunicator(websocket_application, path + query, headers=list(headers))
        opened.append(socket)
        return socket

    yield start
    for socket in opened:
        await socket.disconnect()
    await sync_to_async(connections.close_all)()


@sync_to_async
def admit(name: str = "mock") -> Operation:
    """One more operation."""
    return admission.admit(
        admission.OperationRequest("backend_install", key=name, element=name, by=Requester("x")),
        now=clock.now(),
    ).operation


@sync_to_async
def finish(operation: Operation) -> None:
    """Claims and completes what is due first."""
    (work,) = attempts.claim("t", now=clock.now(), lease=30, limit=1)
    attempts.finish(work.id, work.fence, Event.COMPLETE, now=clock.now())


@sync_to_async
def change(operation: Operation) -> dict[str, Any]:
    """The newest change of an operation."""
    return feed.as_dict(Operation.objects.get(pk=operation.pk))


async def deliver(change: dict[str, Any]) -> None:
    """Sends a change as the channel layer carries it."""
    layer = get_channel_layer()
    assert layer is not None
    await layer.group_send(events.GROUP, {"type": "operations.changed", "operations": [change]})


async def opened(socket: WebsocketCommunicator) -> Any:
    """The first message of an accepted socket."""
    accepted, _ = await socket.connect(timeout=30)
    assert accepted
    return await socket.receive_json_from(timeout=30)


async def test_only_admins_may_watch(watch: Watch) -> None:
    """Before the socket is accepted: 4401 without a credential, 4403 for a user; a node is a stranger."""
    user = await sync_to_async(get_user_model().objects.create_user)("ann", password="x")
    _, plain = await sync_to_async(principals.create_api_key)(user, "k")
    node_secret = f"Bearer {api.SECRET}".encode()
    await sync_to_async(api.make_node)()
    await sync_to_async((client := Client()).force_login)(user)
    session = f"sessionid={client.cookies['sessionid'].value}".encode()
    for headers, code in [
        ([], 4401),
        ([(b"authorization", b"Bearer wrong")], 4401),
        ([(b"authorization", node_secret)], 4401),
        ([(b"authorization", f"Bearer {REGISTRATION_TOKEN}".encode())], 4401),
        ([(b"x-api-key", plain.encode())], 4403),
        ([(b"cookie", session)], 4403),
        ([*ADMIN, (b"host", b"cluster:8080"), (b"origin", b"http://evil.example")], 4403),
    ]:
        socket = await watch(headers=headers)
        assert await socket.connect(timeout=30) == (False, code), headers


async def test_a_signed_in_admin_watches_from_our_own_page(watch: Watch) -> None:
    """The browser's way: session cookie and an Origin of the same host."""
    user = await sync_to_async(get_user_model().objects.create_superuser)("root", password="x")
    await sync_to_async((client := Client()).force_login)(user)
    headers = [
        (b"cookie", f"sessionid={client.cookies['sessionid'].value}".encode()),
        (b"host", b"cluster:8080"),
        (b"origin", b"http://cluster:8080"),
    ]
    assert (await opened(await watch(headers=headers)))["type"] == "snapshot"


async def test_other_paths_are_refused(watch: Watch) -> None:
    """No traceback, no open socket."""
    socket = await watch(path="/ws/nope")
    assert await socket.connect(timeout=30) == (False, 4404)


async def test_snapshot_then_deltas_without_doubles(watch: Watch) -> None:
    """The stream starts where the snapshot ends; what is delivered twice is sent once."""
    first = await admit("one")
    socket = await watch()
    hello = await opened(socket)
    assert (hello["type"], hello["seq"]) == ("snapshot", first.seq or hello["seq"])
    assert [entry["name"] for entry in hello["operations"]] == ["one"]
    news = await change(await admit("two"))
    await deliver(await change(first))
    await deliver(news)
    await deliver(news)
    delta = await socket.receive_json_from(timeout=30)
    assert (delta["type"], delta["seq"]) == ("delta", news["seq"])
    assert delta["operation"]["name"] == "two"
    assert await socket.receive_nothing(timeout=0.3)


async def test_a_gap_leads_back_to_the_rows(watch: Watch) -> None:
    """A lost message costs nothing: the next one brings everything missed, in order."""
    socket = await watch()
    await opened(socket)
    for name in ("one", "two"):
        await admit(name)
    await deliver(await change(await admit("three")))
    got = [await socket.receive_json_from(timeout=30) for _ in range(3)]
    assert [delta["operation"]["name"] for delta in got] == ["one", "two", "three"]
    assert [delta["seq"] for delta in got] == sorted(delta["seq"] for delta in got)
    assert await socket.receive_nothing(timeout=0.3)


async def test_silence_is_not_trusted(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no message ever comes, the client sees the change."""
    monkeypatch.setattr(topics, "READ_INTERVAL", 0.05)
    socket = await watch()
    await opened(socket)
    await admit("one")
    assert (await socket.receive_json_from(timeout=30))["operation"]["name"] == "one"


async def test_resuming_by_sequence(watch: Watch) -> None:
    """`?since=N`: what changed after N, finished operations included, and then the stream goes on."""
    first = await admit("one")
    seen = (await change(first))["seq"]
    await admit("two")
    await finish(first)
    socket = await watch(f"?since={seen}")
    accepted, _ = await socket.connect(timeout=30)
    assert accepted
    got = [await socket.receive_json_from(timeout=30) for _ in range(2)]
    assert {delta["operation"]["status"] for delta in got} == {"pending", "completed"}
    assert all(delta["type"] == "delta" and delta["seq"] > seen for delta in got)
    news = await change(await admit("three"))
    await deliver(news)
    assert (await socket.receive_json_from(timeout=30))["seq"] == news["seq"]


@pytest.mark.parametrize("since", ["999999", "-1", "x", "", "9" * 40, "%00"])
async def test_a_number_that_was_never_given_starts_anew(watch: Watch, since: str) -> None:
    """Ahead of the counter, or no number at all: a snapshot."""
    await admit("one")
    assert (await opened(await watch(f"?since={since}")))["type"] == "snapshot"
