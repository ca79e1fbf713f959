"""Tabs on `/ws/feed` in this process, and changes of nodes, operations and users."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.db import connections
from django.test import Client

from localai_cluster.accounts import actors
from localai_cluster.embedded.bundled_servers import EmbeddedValkey
from localai_cluster.kit import clock
from nodes.live import watch as watching
from nodes.models import BackendNode
from nodes.registry import lifecycle
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.models import Event, Operation
from tests.support import api, live
from tests.support.live import Tab

PAGE = [(b"host", b"cluster:8080"), (b"origin", b"http://cluster:8080")]
ANN = actors.Actor(actors.ActorKind.USER, "ann")


@pytest.fixture(autouse=True)
def process(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> watching.NodeFeed:
    """Start this test's web process."""
    made = watching.NodeFeed(live.look)
    monkeypatch.setattr(watching, "_shared_feed", made)
    return made


Open = Callable[..., Awaitable[Tab]]


@pytest.fixture
async def tab() -> AsyncIterator[Open]:
    """Return a function that opens tabs; close the tabs at the end."""
    opened: list[Tab] = []

    async def start(query: str = "", headers: Any = live.ADMIN) -> Tab:
        opened.append(Tab(query, headers))
        return await opened[-1].open()

    yield start
    for one in opened:
        await one.socket.disconnect()
    await sync_to_async(connections.close_all)()


def shown(page: Tab, node: BackendNode) -> dict[str, Any]:
    """Return the node as the page shows it."""
    return page.nodes[str(node.id)]


async def sees(page: Tab, condition: Callable[[Tab], Any]) -> None:
    """Wait until the condition holds for the page."""
    await page.until(lambda: condition(page))


make_node = sync_to_async(api.make_node)


def admitted(name: str = "mock") -> Operation:
    request = admission.OperationRequest("backend_install", key=name, element=name, by=Requester("x"))
    return admission.admit(request, now=clock.now()).operation


admit = sync_to_async(admitted)


@sync_to_async
def end(event: Event = Event.FAIL, error: str = "no such file") -> Operation:
    """Claim the first due operation and end it."""
    (work,) = attempts.claim("t", now=clock.now(), lease=30, limit=1)
    attempts.finish(work.id, work.fence, event, now=clock.now(), error=error)
    return work


@sync_to_async
def drain(node: BackendNode, reason: str = "disk") -> None:
    lifecycle.drain(node.id, actor=ANN, now=clock.now(), reason=reason)


@sync_to_async
def signed_in(name: str = "root", **fields: Any) -> tuple[Any, list[tuple[bytes, bytes]]]:
    """Return an admin and the headers of his page."""
    user = get_user_model().objects.create_superuser(name, password="x", **fields)
    (client := Client()).force_login(user)
    cookie = f"sessionid={client.cookies['sessionid'].value}".encode()
    return user, [*PAGE, (b"cookie", cookie)]
