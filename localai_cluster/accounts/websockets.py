"""Authentication of websockets: the principal of a handshake, and the current one of an open socket.

A caller authenticates by the same headers as over REST, or by the session cookie of a signed-in browser. The
middleware sets the principal in the scope, and each consumer decides before it accepts. A session whose
generated password was not changed is recognized and may open no socket.

The database notifies when a caller's access may have ended (`ACCESS`, by triggers on users, keys and
sessions). The web process wakes its open sockets, which then read their principal again; they also do so
periodically.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from channels.auth import get_user
from channels.db import database_sync_to_async

from localai_cluster.accounts import credentials, principals
from localai_cluster.accounts.principals import ANONYMOUS, Principal
from localai_cluster.web import throttle, wire

ACCESS = "cluster_access"
"""NOTIFY channel: `user <id>` or `session <MD5 of its key>`, as in `access_names`."""


class PrincipalMiddleware:
    """Sets `scope["principal"]`; needs `SessionMiddleware` outside."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """Read the principal, in at most two queries; count a wrong key like one over REST."""
        principal = without_newcomers(await principal_of_socket(scope))
        if not principal.is_authenticated and credentials.offered_credential(_header_of(scope)):
            await throttle.api_keys().noted(credentials.WrongKey(), wire.client_of(scope))
        entries = {
            "principal": principal,
            "current_principal": lambda: current_principal(scope),
            "access_names": access_names(scope, principal),
        }
        return await self._app({**scope, **entries}, receive, send)


def access_names(scope: Any, principal: Principal) -> frozenset[str]:
    """Return the names of the caller in the database's notifications of `ACCESS`."""
    key = scope["session"].session_key or ""
    session = hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()
    return frozenset({f"user {principal.user_id}", f"session {session}"})


def without_newcomers(principal: Principal) -> Principal:
    """Return the caller for sockets: anonymous until a generated password is changed on the sign-in page."""
    return ANONYMOUS if principal.kind == "newcomer" else principal


async def principal_of_socket(scope: Any) -> Principal:
    """Return the caller; a wrong credential is anonymous, even together with a valid session."""
    credential = credentials.read_credential(_header_of(scope))
    if credential is not None:
        return await database_sync_to_async(credentials.owner_of)(credential)
    return principals.of_session(await get_user(scope))


def _header_of(scope: Any) -> Callable[[str], str]:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    return lambda name: headers.get(name, "")


async def current_principal(scope: Any) -> Principal:
    """Return the current caller: the session is read again."""
    session = type(scope["session"]._wrapped)(scope["session"].session_key)
    return without_newcomers(await principal_of_socket({**scope, "session": session}))
