"""`/metrics` of the server processes: authorization and response.

It requires a scraper's token (`LOCALAI_METRICS_TOKEN`) or an admin's API key. The token authorizes nothing
else. Web processes serve it beside their other routes. Controllers and the task cluster, which serve nothing
else, listen on an address of their own if one is configured.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from channels.db import database_sync_to_async
from django.db import Error as DatabaseError
from prometheus_client import Metric

from localai_cluster.accounts import principals
from localai_cluster.accounts.principals import WrongKey
from localai_cluster.kit import conf
from localai_cluster.kit.addresses import Address
from localai_cluster.kit.errors import ClusterError, Forbidden, NotAuthenticated, NotFound, Unavailable
from localai_cluster.metrics import exposed
from localai_cluster.web import throttle, wire
from localai_cluster.web.wire import Answer, Receive, Scope, Send

PATH = "/metrics"
_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"xi-api-key"})


class OnlyGet(ClusterError):
    """There is nothing to change here."""

    status = 405
    code = "method_not_allowed"


class Source(Protocol):
    """Source of metrics in addition to the process's own."""

    async def families(self) -> Iterable[Metric]:
        """Return the current metrics."""
        ...


class MetricsApplication:
    """The ASGI application of one process."""

    def __init__(self, process: str, source: Source | None = None) -> None:
        self._process, self._source = process, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; refuse a websocket."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        try:
            answer = await self._answer(scope)
        except ClusterError as error:
            refused = wire.error_answer(error)
            allow = ((b"allow", b"GET"),) if error.status == 405 else ()
            answer = Answer(refused.body, refused.status, (*refused.headers, *allow, *_HEADERS))
        await wire.send_answer(send, answer)

    async def _answer(self, scope: Scope) -> Answer:
        if scope["path"] != PATH:
            raise NotFound("only /metrics is here")
        await admit(scope)
        if scope["method"] != "GET":
            raise OnlyGet("only GET is accepted here")
        additional = await self._source.families() if self._source else ()
        # In a thread: a hundred models make thousands of lines, and requests must not wait for them.
        body = await asyncio.to_thread(exposed.text, self._process, tuple(additional))
        return Answer(body, headers=_HEADERS, kind=exposed.CONTENT_TYPE.encode())


async def admit(scope: Scope) -> None:
    """Raise NotAuthenticated, Forbidden or Unavailable unless the caller may read the metrics."""
    headers: dict[bytes, bytes] = {name: value for name, value in scope["headers"] if name in _CREDENTIALS}

    def header(name: str) -> str:
        return headers.get(name.encode(), b"").decode("latin-1")

    offered = principals.offered_credential(header)
    if not offered:
        raise NotAuthenticated("a scraper's token or an admin's API key is required")
    if principals.secrets_equal(offered, conf.cluster().metrics_token):
        return
    try:
        principal = await database_sync_to_async(principals.owner_of, thread_sensitive=False)(
            principals.classify_credential(offered)
        )
    except DatabaseError as error:
        raise Unavailable("the database is not reachable", retry_after=2) from error
    if not principal.is_authenticated:
        wrong = WrongKey("this token or API key is not valid")
        raise await throttle.api_keys().noted(wrong, wire.client_of(scope))
    if not principal.is_admin:
        raise Forbidden("admin access required")


async def serve(process: str, address: Address | None) -> None:
    """Serve the metrics of this process until cancelled; without an address only wait for that."""
    if address is None:
        await asyncio.Event().wait()
        return
    # uvicorn needs much memory, and most of these processes have no address.
    from localai_cluster.kit import listening

    await listening.serve(address, MetricsApplication(process))
