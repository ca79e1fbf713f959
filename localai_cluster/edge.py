"""The outermost ASGI application: dispatches to raw routes (`ROUTES`), Django and websockets.

Every request passes `Edge`: it assigns the request's id, accepts a trailing slash without a redirect, and
converts an unexpected error to a plain 500 of the route's dialect with that id, while the log has the cause.
It adds the headers that a response lacks: no caching, and no guessing of types.

Pages of the origins in `CLUSTER_CORS_ORIGINS` may use inference (CORS), with a key: credentials of browsers
are never allowed, so no page of another origin uses a session. A preflight has no key; it tells only that the
route exists.
"""

import logging
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from channels.routing import URLRouter
from channels.sessions import CookieMiddleware, SessionMiddleware
from django.conf import settings
from django.urls import re_path

from localai_cluster import scraping
from localai_cluster.accounts.sessions import PrincipalMiddleware
from localai_cluster.kit import clock, conf, database_pool, logs
from localai_cluster.kit.errors import ClusterError, Unavailable
from localai_cluster.metrics import web as metrics
from localai_cluster.web import wire
from localai_cluster.web.bodies import BoundedBody, Utf8Only
from localai_cluster.web.page import StaticFiles
from localai_cluster.web.sockets import LiveSocket, NoSuchSocket
from nodes.api import placement
from nodes.api.gallery import GalleryApplication
from nodes.api.heartbeats import HeartbeatApplication
from nodes.api.registrations import RegistrationApplication
from nodes.backends import worker_logs
from nodes.dialects import routes as inference
from nodes.gateway import gateway
from nodes.gateway.endpoint import Endpoint
from nodes.live import watch as nodes
from nodes.registry import heartbeats
from operations.changes import topics as operations

logger = logging.getLogger(__name__)

_operations_socket: Any = LiveSocket.as_asgi(topics=(operations.single_changes,))
_feed_socket: Any = LiveSocket.as_asgi(
    topics=(operations.grouped_changes, nodes.node_messages, nodes.alive_messages),
    greeting=nodes.hello_message,
    explains=True,
)
_logs_socket: Any = LiveSocket.as_asgi(topics=(worker_logs.output,), admit=worker_logs.admit, explains=True)
_unknown_socket: Any = NoSuchSocket.as_asgi()

websocket_application: Any = CookieMiddleware(
    SessionMiddleware(
        PrincipalMiddleware(
            URLRouter(
                [
                    re_path(r"^ws/operations/?$", _operations_socket),
                    re_path(r"^ws/feed/?$", _feed_socket),
                    re_path(r"^ws/nodes/(?P<node_id>[^/]+)/backend-logs/(?P<model>.+)$", _logs_socket),
                    re_path(r"", _unknown_socket),
                ]
            )
        )
    )
)


@dataclass(frozen=True)
class RawRoute:
    """A route outside of Django; `path` is an OpenAPI template."""

    method: str
    path: str
    app: Any


ROUTES: tuple[RawRoute, ...] = (
    *(
        RawRoute(served.method, path, route)
        for path, route in inference.ROUTES.items()
        for served in (route, *route.other_methods)
    ),
    RawRoute("GET", scraping.METRICS_PATH, scraping.MetricsApplication("web", scraping.RowReader())),
    RawRoute(
        "GET",
        scraping.NODE_METRICS_PATH,
        scraping.MetricsApplication(
            "", scraping.RowReader(scraping.read_node_metrics), scraping.NODE_METRICS_PATH
        ),
    ),
    RawRoute("POST", "/api/node/register", RegistrationApplication()),
    RawRoute("GET", "/api/node/{node_id}/gallery/{file}", GalleryApplication()),
    RawRoute(
        "POST",
        "/api/node/{node_id}/heartbeat",
        HeartbeatApplication(database_pool.shared, heartbeats.identity_cache()),
    ),
)

_PATHS_WITH_SLASH = (
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
_REQUEST_ID_HEADER, _CORRELATION_ID_HEADER = b"x-request-id", b"x-correlation-id"
_SAFE_REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9_.:-]{1,64}\Z")

_APP_BY_PATH = {route.path: route.app for route in ROUTES if "{" not in route.path}
# A model's name may contain `/`.
_PATTERNS_AND_APPS = [
    (re.compile(re.sub(r"\{[^/}]+\}", "[^/]+", route.path.replace("{model}", ".+"))), route.app)
    for route in ROUTES
    if "{" in route.path
]


def find_route(path: str) -> Any | None:
    """Return the raw application for a path without a trailing slash; None if Django serves the path.

    All of `/v1` is inference: an application refuses unknown paths there in the client's dialect.
    """
    app = _APP_BY_PATH.get(path)
    if app is None:
        app = next((app for pattern, app in _PATTERNS_AND_APPS if pattern.fullmatch(path)), None)
    return inference.refuse_unknown if app is None and path.startswith("/v1/") else app


class Edge:
    """The outermost ASGI application. While `stopping` is True, it refuses new requests.

    An open connection can still send a request after the process has stopped accepting connections.
    """

    def __init__(self, django: Any) -> None:
        self._django = Utf8Only(
            BoundedBody(StaticFiles(django), {placement.PLAN_PATH: placement.MAX_BODY_BYTES})
        )
        self.stopping = False

    async def __call__(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        """Serve one connection or request."""
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
            return
        set_request_id(scope)
        scope = strip_slash(scope)
        if scope["type"] == "websocket":
            await websocket_application(scope, receive, send)
        else:
            await self._serve_http(scope, receive, send)

    async def _serve_http(self, scope: wire.Scope, receive: wire.Receive, send: wire.Send) -> None:
        began, answer = (
            clock.monotonic(),
            _HeaderAddingSend(send, logs.request_id.get().encode(), scope["path"]),
        )
        app: Any = find_route(scope["path"]) or self._django
        refused = app.envelope.render if isinstance(app, Endpoint) else wire.error_answer
        origin = _allowed_origin(scope) if isinstance(app, Endpoint) else b""
        if origin:
            answer.add(_cors_headers(origin))
        try:
            if origin and (preflight := _preflight_response(scope, app.methods)) is not None:
                await wire.send_answer(answer, preflight)
                return
            if self.stopping:
                await wire.send_answer(answer, refused(_STOPPING_ERROR))
                return
            await app(scope, receive, answer)
        except Unavailable as error:
            if not answer.status:
                await wire.send_answer(answer, refused(error))
        except Exception:
            logger.exception("%s %r failed", scope["method"], scope["path"])
            if not answer.status:
                await wire.send_answer(answer, refused(_INTERNAL_ERROR))
        finally:
            metrics.request_ended(
                scope["path"], answer.status or metrics.CLIENT_LEFT, clock.monotonic() - began
            )


_INTERNAL_ERROR = ClusterError("internal error")
_STOPPING_ERROR = Unavailable("this web process is stopping", retry_after=1)


_DEFAULT_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_DEFAULT_FILE_HEADERS = ((b"x-content-type-options", b"nosniff"),)
"""Default headers of static files. A browser may cache and revalidate them."""


class _HeaderAddingSend:
    """A `send` callable that adds the request's id and the default headers. `status` is 0 at first."""

    __slots__ = ("_added", "_id", "_send", "status")

    def __init__(self, send: wire.Send, identifier: bytes, path: str) -> None:
        self._send = send
        self._added = _DEFAULT_FILE_HEADERS if path.startswith(settings.STATIC_URL) else _DEFAULT_HEADERS
        self._id = identifier
        self.status = 0

    def add(self, headers: tuple[wire.Header, ...]) -> None:
        """Add headers to the default headers."""
        self._added = (*self._added, *headers)

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                *message.get("headers", ()),
                (_REQUEST_ID_HEADER, self._id),
                (_CORRELATION_ID_HEADER, self._id),
            ]
            names = {name.lower() for name, _ in headers}
            headers += [header for header in self._added if header[0] not in names]
            message = {**message, "headers": headers}
        await self._send(message)


def set_request_id(scope: wire.Scope) -> None:
    """Set the request's id in the logging context: the caller's own id if it is safe, otherwise a new id."""
    offered = b""
    for name, value in scope["headers"]:
        if name in (_REQUEST_ID_HEADER, _CORRELATION_ID_HEADER):
            offered = value
    is_safe = _SAFE_REQUEST_ID_PATTERN.match(offered)
    logs.request_id.set(offered.decode("ascii") if is_safe else os.urandom(16).hex())


def strip_slash(scope: wire.Scope) -> wire.Scope:
    """Return the scope without one trailing slash, on paths where clients may send one (§0.1)."""
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or path.encode()
    # An escaped slash at the end is a part of the name.
    if not path.endswith("/") or not raw.endswith(b"/") or not path.startswith(_PATHS_WITH_SLASH):
        return scope
    return {**scope, "path": path[:-1], "raw_path": raw[:-1]}


async def _run_lifespan(receive: wire.Receive, send: wire.Send) -> None:
    """Start and stop the gateway, for servers that support lifespan; daphne does not."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await gateway.start()
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await gateway.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return


_CORS_HEADER_NAMES_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}(?:, ?[A-Za-z0-9_-]{1,64}){0,63}")
_CORS_EXPOSE_HEADERS = (
    b"access-control-expose-headers",
    b"x-request-id, x-correlation-id, x-localai-node, retry-after",
)
_CORS_MAX_AGE_HEADER = (b"access-control-max-age", b"600")


def _allowed_origin(scope: wire.Scope) -> bytes:
    """Return the request's origin if its pages may use inference, b"" otherwise."""
    origins = conf.cluster().cors_origins
    if not origins:
        return b""
    origin: bytes = next((value for name, value in scope["headers"] if name == b"origin"), b"")
    return origin if origin and ("*" in origins or origin.decode("latin-1").lower() in origins) else b""


def _cors_headers(origin: bytes) -> tuple[wire.Header, ...]:
    """Return the CORS headers of a response to a page of this allowed origin."""
    return ((b"access-control-allow-origin", origin), (b"vary", b"Origin"), _CORS_EXPOSE_HEADERS)


def _preflight_response(scope: wire.Scope, methods: str) -> wire.Answer | None:
    """Return the response to a CORS preflight; None for any other request.

    `methods` are the methods of the route, separated by commas.
    """
    headers = dict(scope["headers"])
    if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
        return None
    wanted: bytes = headers.get(b"access-control-request-headers", b"")
    allowed = [(b"access-control-allow-methods", methods.encode()), _CORS_MAX_AGE_HEADER]
    if _CORS_HEADER_NAMES_PATTERN.fullmatch(wanted.decode("latin-1")):
        allowed.append((b"access-control-allow-headers", wanted))
    return wire.Answer(b"", headers=tuple(allowed), kind=b"text/plain")
