"""Who opens a websocket: the principal of a handshake, and of an open socket as of now.

A caller proves itself by the same headers as over REST, or by the session cookie of a signed-in browser. The
principal goes into the scope, and each consumer decides before it accepts. A session whose generated password
was not changed is known and may open nothing.
"""

from typing import Any

from channels.auth import get_user
from channels.db import database_sync_to_async

from localai_cluster.accounts import credentials, principals
from localai_cluster.accounts.principals import ANONYMOUS, Principal


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
    credential = credentials.read(lambda name: headers.get(name, ""))
    if credential is not None:
        return await database_sync_to_async(credentials.principal_of)(credential)
    return principals.of_session(await get_user(scope))


async def principal_again(scope: Any) -> Principal:
    """The caller as of now: the session is read again."""
    session = type(scope["session"]._wrapped)(scope["session"].session_key)
    return watcher(await principal_of({**scope, "session": session}))
