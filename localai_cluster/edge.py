"""The outermost ASGI application: raw routes in front, Django behind, websockets beside.

Everything that comes in passes `Edge`: it gives the request its id, accepts a trailing slash without a
redirect, and makes sure that an unexpected error leaves as a plain 500 of the route's dialect with that id
while the log has the cause. What an answer does not say itself is added on its way out: nothing is kept, and
no type is guessed.
"""

import logging
from collections.abc import MutableMapping
from typing import Any

from django.conf import settings

from localai_cluster import clock, logs, raw_routes
from localai_cluster.errors import ClusterError, Unavailable
from localai_cluster.metrics import web as metrics
from localai_cluster.web import wire
from localai_cluster.web.middleware import BoundedBody, Utf8Only
from localai_cluster.web.static_files import StaticFiles
from localai_cluster.websockets import websocket_application
from nodes.inference import gateway
from nodes.inference.endpoint import Endpoint

logger = logging.getLogger(__name__)

_SLASHED = (
    "/api/",
    "/v1/",
    "/ws/",
    "/app/",
    "/browse/",
    "/login/",
    "/version/",
    "/healthz/",
    "/readyz/",
    "/metrics/",
    "/embeddings/",
    "/models/",
    "/chat/",
    "/completions/",
    "/tokenize/",
    "/detokenize/",
    "/rerank/",
    "/audio/",
    "/images/",
    "/tts/",
    "/messages/",
    "/responses/",
    "/backend/",
    "/backends/",
)
_REQUEST_ID, _CORRELATION_ID = b"x-request-id", b"x-correlation-id"


class Edge:
    """The outermost application. `stopping` refuses what still arrives on open connections."""

    def __init__(self, django: Any) -> None:
        self._django = Utf8Only(BoundedBody(StaticFiles(django)))
        self.stopping = False

    async def __call__(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        """Return one connection or request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        identify(scope)
        scope = without_slash(scope)
        if scope["type"] == "websocket":
            await websocket_application(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        began, answer = clock.monotonic(), _Tagged(send, logs.request_id.get().encode(), scope["path"])
        app: Any = raw_routes.find(scope["path"]) or self._django
        refused = app.refused if isinstance(app, Endpoint) else wire.error_answer
        try:
            if self.stopping:
                await wire.send_answer(answer, refused(_STOPPING))
                return
            await app(scope, receive, answer)
        except Unavailable as error:
            if not answer.status:
                await wire.send_answer(answer, refused(error))
        except Exception:
            logger.exception("%s %r failed", scope["method"], scope["path"])
            if not answer.status:
                await wire.send_answer(answer, refused(_FAILED))
        finally:
            metrics.request_ended(scope["path"], answer.status or metrics.LEFT, clock.monotonic() - began)


_FAILED = ClusterError("internal error")
_STOPPING = Unavailable("this web process is stopping", retry_after=1)


_UNLESS_SAID = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_UNLESS_SAID_OF_FILES = ((b"x-content-type-options", b"nosniff"),)
"""Of static files: a browser may keep them, and asks whether they have changed."""


class _Tagged:
    """`send` that puts the request's id on the answer, and what `_UNLESS_SAID` has; remembers with which
    status one has begun, 0 before.
    """

    __slots__ = ("_added", "_id", "_send", "status")

    def __init__(self, send: wire.Send, identifier: bytes, path: str) -> None:
        self._send = send
        self._added = _UNLESS_SAID_OF_FILES if path.startswith(settings.STATIC_URL) else _UNLESS_SAID
        self._id = identifier
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (_REQUEST_ID, self._id), (_CORRELATION_ID, self._id)]
            said = {name.lower() for name, _ in headers}
            headers += [header for header in self._added if header[0] not in said]
            message = {**message, "headers": headers}
        await self._send(message)


def identify(scope: wire.Scope) -> None:
    """Create the request's id, the caller's own if it sent a harmless one, known to everything it causes."""
    offered = b""
    for name, value in scope["headers"]:
        if name in (_REQUEST_ID, _CORRELATION_ID):
            offered = value
    logs.request_id.set(logs.new_request_id(offered.decode("latin-1")))


def without_slash(scope: wire.Scope) -> wire.Scope:
    """The same request without one trailing slash, where clients may send one (§0.1)."""
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or path.encode()
    # An escaped slash belongs to the name that it ends.
    if not path.endswith("/") or not raw.endswith(b"/") or not path.startswith(_SLASHED):
        return scope
    return {**scope, "path": path[:-1], "raw_path": raw[:-1]}


async def _lifespan(receive: wire.Receive, send: wire.Send) -> None:
    """The process's own start and end, for servers that know it; daphne does not."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await gateway.start()
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await gateway.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return
