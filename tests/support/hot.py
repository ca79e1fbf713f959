"""Rows, a runtime and a bare ASGI client for the tests of the hot path."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.db import connection
from psycopg.conninfo import make_conninfo

from localai_cluster.accounts.models import ApiKey
from localai_cluster.kit import clock, conf, database_pool
from localai_cluster.kit.database_pool import DedicatedConnection, Pool
from localai_cluster.rpc.client import ClientPool
from nodes.gateway import gateway
from nodes.gateway.picks import Picker, ProcessHeartbeat
from nodes.gateway.prefix_routing import PrefixRouter
from nodes.loading.wait import Loads
from nodes.models import BackendNode, NodeModel, WebProcess
from operations.executor.work import WakeUps
from tests import conftest
from tests.support import asgi
from tests.support.backends import TOKEN
from tests.support.environment import API_KEY
from tests.support.replicas import columns

T = TypeVar("T")

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def database_url() -> str:
    """Return the URL of the test database for the web process's own pool."""
    return make_conninfo(conf.cluster().database_url, dbname=connection.settings_dict["NAME"])


def node(name: str = "one", **fields: Any) -> BackendNode:
    """Create an approved, live backend node."""
    now = clock.now()
    values = {
        "address": "127.0.0.1:1",
        "approved_at": now,
        "last_heartbeat": now,
        "engine_token": TOKEN,
        **fields,
    }
    return BackendNode.objects.create(name=name, **values)


def replica(on: BackendNode, model: str = "echo", index: int = 0, **fields: Any) -> NodeModel:
    """Create a loaded replica; by default it was last used at `EPOCH` plus its index in seconds."""
    values = columns(
        **{"address": f"127.0.0.1:{50000 + index}", "last_used": EPOCH + timedelta(seconds=index), **fields}
    )
    return NodeModel.engines.create(node=on, model_name=model, replica_index=index, **values)


def api_key(key_hash: str, user: str = "someone", *, active: bool = True, **fields: Any) -> ApiKey:
    """Create a user's API key by its hash."""
    owner = User.objects.create(username=user, is_active=active)
    return ApiKey.objects.create(user=owner, name="key", prefix="lac-", key_hash=key_hash, **fields)


class CountingConnection(DedicatedConnection):
    """A connection that counts its statements."""

    executed = 0

    async def fetch_rows(self, statement: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """Counts, then runs."""
        self.executed += 1
        return await super().fetch_rows(statement, parameters)


class CountedPicker(Picker):
    """A picker whose statements are counted."""

    def __init__(self, pool: Pool, prefixes: PrefixRouter) -> None:
        self.connection, self.pool = CountingConnection(database_url()), pool
        super().__init__(pool, self.connection, prefixes.weights)


def alone() -> PrefixRouter:
    """Return the prefix router of a process that publishes nothing."""
    return PrefixRouter(300.0, lambda news: None)


@asynccontextmanager
async def picker(prefixes: PrefixRouter | None = None) -> AsyncIterator[CountedPicker]:
    """Yield a picker with its own connections and process row; it does not sign off at the end."""
    pool = Pool(database_url())
    await pool.open()
    made = CountedPicker(pool, prefixes or alone())
    try:
        await made.settle()
        yield made
    finally:
        await made.connection.close()
        await pool.close()


def counts() -> dict[str, int]:
    """Return the in-flight counts by address."""
    return dict(NodeModel.objects.values_list("address", "in_flight"))


def processes() -> int:
    """Return the number of rows of web processes."""
    return WebProcess.objects.count()


@asynccontextmanager
async def serving(prefixes: PrefixRouter | None = None) -> AsyncIterator[CountedPicker]:
    """Run the parts of `manage.py serve` in this process, on the test database, without a bus."""
    hints, prefixes = WakeUps(), prefixes or alone()
    clients, loads = ClientPool(stream_client=conf.cluster().stream_client), Loads(hints)
    async with picker(prefixes) as made:
        database_pool._shared_pool = made.pool
        listener = asyncio.create_task(gateway._listen_for_notifications(hints, prefixes))
        heartbeat = ProcessHeartbeat(made, 15)
        gateway._running_resources = gateway._GatewayResources(
            gateway.Gateway(made, clients, loads, prefixes), heartbeat, clients, loads, listener
        )
        try:
            yield made
        finally:
            gateway._running_resources = database_pool._shared_pool = None
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            await loads.close()
            await made.settle()
            await clients.close()


@dataclass
class Reply:
    """The answer of an application."""

    status: int
    headers: dict[str, str]
    body: Any


class Client:
    """Calls an ASGI application directly; `leave` makes the client disconnect."""

    def __init__(self, app: Any, key: str | None = API_KEY) -> None:
        self._app = app
        self._key = key

    async def post(
        self,
        path: str,
        body: Any,
        *,
        leave: asyncio.Event | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply | None:
        """Return the reply to a JSON body (bytes are sent unchanged); None without an answer."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, raw, leave=leave, headers=headers)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        leave: asyncio.Event | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply | None:
        """Return the reply to one request; None without an answer."""
        given = dict(headers or {})
        if self._key is not None:
            given.setdefault("authorization", f"Bearer {self._key}")
        pairs = [(name.lower().encode(), value.encode()) for name, value in given.items()]
        sent = await asgi.exchange(self._app, method, path, body, pairs, leave=leave)
        return _reply(sent) if sent else None


def _reply(sent: list[dict[str, Any]]) -> Reply:
    start, *parts = sent
    headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    whole = b"".join(part["body"] for part in parts)
    plain = headers.get("content-type", "").startswith(("text/", "application/x-ndjson"))
    return Reply(start["status"], headers, whole.decode() if plain else json.loads(whole))


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run ORM code of a test outside of its event loop."""

    def run() -> T:
        try:
            return function(*arguments)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


async def until(rows: Callable[[], Any], what: object = "condition") -> Any:
    """Wait until the condition of the rows is true."""
    return await conftest.until(lambda: in_thread(rows), 30, what)
