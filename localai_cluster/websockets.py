"""The websocket routes of the web process: who is calling, then which consumer."""

from typing import Any

from channels.routing import URLRouter
from channels.sessions import CookieMiddleware, SessionMiddleware
from django.urls import re_path

from localai_cluster.accounts.websockets import PrincipalMiddleware
from nodes.live.consumer import FeedConsumer
from operations.api.websockets import websocket_urlpatterns
from operations.consumers import NoSuchSocket

_feed: Any = re_path(r"^ws/feed/?$", FeedConsumer.as_asgi())  # type: ignore[arg-type]
_everything_else: Any = re_path(r"", NoSuchSocket.as_asgi())  # type: ignore[arg-type]
websocket_application = CookieMiddleware(
    SessionMiddleware(PrincipalMiddleware(URLRouter([*websocket_urlpatterns, _feed, _everything_else])))
)
