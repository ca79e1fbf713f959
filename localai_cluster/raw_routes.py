"""The raw route tables: the HTTP and websocket routes in front of Django, with their applications.

`edge.py` dispatches by it; the OpenAPI document, and the tests that check every route, read it.
"""

from dataclasses import dataclass
from typing import Any

from channels.routing import URLRouter
from channels.sessions import CookieMiddleware, SessionMiddleware
from django.urls import re_path

from localai_cluster.accounts.sessions import PrincipalMiddleware
from localai_cluster.kit import database_pool
from localai_cluster.scraping import MetricsApplication, RowReader
from localai_cluster.web.sockets import LiveSocket, NoSuchSocket
from nodes.api.gallery import GalleryApplication
from nodes.api.heartbeats import HeartbeatApplication
from nodes.api.registrations import RegistrationApplication
from nodes.backends import worker_logs
from nodes.dialects import routes as inference
from nodes.live import watch as nodes
from nodes.registry import heartbeats
from operations.changes import topics as operations

_operations: Any = LiveSocket.as_asgi(topics=(operations.single_changes,))
_feed: Any = LiveSocket.as_asgi(
    topics=(operations.grouped_changes, nodes.node_messages, nodes.alive_messages),
    greeting=nodes.greeting,
    explains=True,
)
_logs: Any = LiveSocket.as_asgi(topics=(worker_logs.output,), admit=worker_logs.admit, explains=True)
_unknown: Any = NoSuchSocket.as_asgi()

websocket_application: Any = CookieMiddleware(
    SessionMiddleware(
        PrincipalMiddleware(
            URLRouter(
                [
                    re_path(r"^ws/operations/?$", _operations),
                    re_path(r"^ws/feed/?$", _feed),
                    re_path(r"^ws/nodes/(?P<node_id>[^/]+)/backend-logs/(?P<model>.+)$", _logs),
                    re_path(r"", _unknown),
                ]
            )
        )
    )
)


@dataclass(frozen=True)
class RawRoute:
    """One route; `path` is an OpenAPI template."""

    method: str
    path: str
    app: Any


ROUTES: tuple[RawRoute, ...] = (
    *(
        RawRoute(method, path, endpoint)
        for path, route in inference.ROUTES.items()
        for endpoint in (route.endpoint,)
        for method in (route.method, *endpoint.others)
    ),
    RawRoute("GET", "/metrics", MetricsApplication("web", RowReader())),
    RawRoute("POST", "/api/node/register", RegistrationApplication()),
    RawRoute("GET", "/api/node/{node_id}/gallery/{file}", GalleryApplication()),
    RawRoute(
        "POST",
        "/api/node/{node_id}/heartbeat",
        HeartbeatApplication(database_pool.shared, heartbeats.identity_cache()),
    ),
)
