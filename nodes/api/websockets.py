"""The websocket side of the web process: who is calling, then which consumer.

A caller proves itself by the same headers as over REST, or by the session cookie of a signed-in browser; the
principal goes into the scope, and each consumer decides before it accepts. A session whose generated password
was not changed is known and may open nothing.
"""

from typing import Any

from channels.auth import get_user
from channels.db import database_sync_to_async
from channels.routing import URLRouter
from channels.sessions import CookieMiddleware, SessionMiddleware
from django.urls import re_path

from nodes import identity
from nodes.identity import ANONYMOUS, Principal
from nodes.live.consumer import FeedConsumer
from operations.api.websockets import websocket_urlpatterns
from operations.consumers import NoSuchSocket


class PrincipalMiddleware:
    """Sets `scope["principal"]`; needs `SessionMiddleware` outside."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """Finds out who is calling, in at most two queries."""
        who = watcher(await principal_of(scope))
        known = {"principal": who, "principal_again": lambda: principal_again(scope)}
        return await self._app({**scope, **known}, receive, send)


def watcher(who: Principal) -> Principal:
    """The caller as sockets know it: nobody, until a generated password is changed on the sign-in page."""
    return ANONYMOUS if who.kind == "newcomer" else who


async def principal_of(scope: Any) -> Principal:
    """The caller; a wrong credential is nobody, even beside a valid session."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    credential = identity.offered(lambda name: headers.get(name, ""))
    if credential is not None:
        return await database_sync_to_async(identity.by_credential)(credential) or ANONYMOUS
    return identity.of_session(await get_user(scope))


async def principal_again(scope: Any) -> Principal:
    """The caller as of now: the session is read anew."""
    session = type(scope["session"]._wrapped)(scope["session"].session_key)
    return watcher(await principal_of({**scope, "session": session}))


_feed: Any = re_path(r"^ws/feed/?$", FeedConsumer.as_asgi())  # type: ignore[arg-type]
_everything_else: Any = re_path(r"", NoSuchSocket.as_asgi())  # type: ignore[arg-type]
websocket_application = CookieMiddleware(
    SessionMiddleware(PrincipalMiddleware(URLRouter([*websocket_urlpatterns, _feed, _everything_else])))
)
