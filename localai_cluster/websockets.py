"""The websocket routes of the web process: authentication, then a socket with the topics of its path."""

from typing import Any

from channels.routing import URLRouter
from channels.sessions import CookieMiddleware, SessionMiddleware
from django.urls import re_path

from localai_cluster.accounts.sessions import PrincipalMiddleware
from localai_cluster.web.sockets import LiveSocket, NoSuchSocket
from nodes.live import watch as nodes
from nodes.live import worker_logs
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
