"""Sessions of browsers, and the authentication of raw routes and websockets.

A browser sends its cookie with every request, including requests by pages of other sites. So a change by a
session, on raw routes and in REST, must come from a page of this origin (`csrf_problem`): the browser says so
itself, or the request has the CSRF token in a header and an origin of this host, by Django's own check.

The caller of a websocket authenticates by the same headers as over REST, or by the session cookie. The
middleware sets the principal in the scope, and each consumer decides before it accepts. A session whose
generated password was not changed is recognized and may open no socket.

The database notifies when a caller's access may have ended (`ACCESS_CHANNEL`, by triggers on users, keys and
sessions). The web process wakes its open sockets, which then read their principal again; they also do so
periodically.
"""

import hashlib
import io
from typing import Any

from channels.auth import get_user
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib import auth
from django.contrib.auth.backends import BaseBackend
from django.contrib.sessions.backends import db
from django.contrib.sessions.backends.base import VALID_KEY_CHARS
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from rest_framework.authentication import CSRFCheck

from localai_cluster.accounts import passwords, principals
from localai_cluster.accounts.models import ApiKey
from localai_cluster.accounts.principals import ANONYMOUS, KeyUser, Principal, WrongKey
from localai_cluster.kit import conf, outage
from localai_cluster.kit.errors import Forbidden, NotAuthenticated
from localai_cluster.web import throttle, wire
from localai_cluster.web.wire import Scope


class SessionStore(db.SessionStore):
    """Django's session store, which ignores malformed session keys.

    A cookie can contain an escaped NUL character. PostgreSQL refuses such a text, and every route would
    respond with 500. The class keeps its name, because Django signs sessions with it.
    """

    def _validate_session_key(self, key: Any) -> bool:
        """Return True if the session key has the form of Django's keys."""
        return bool(super()._validate_session_key(key)) and set(key) <= set(VALID_KEY_CHARS)  # type: ignore[misc]


_FIRST_STORED_KEY_ID = 1000
"""Offset of the negative ids of stored keys in `KeyUser`.

The ids are -1, -2 … for the static keys and below -1000 for stored keys. A row's id is positive.
"""


class KeyBackend(BaseBackend):
    """Django authentication backend for API keys. The session ends when the key ends.

    The key of an agent node cannot begin a session.
    """

    def authenticate(self, request: HttpRequest | None, token: str) -> Any:  # type: ignore[override]
        """Return the session user for a valid key, otherwise None."""
        position = principals.find_static_key(token)
        if position is not None:
            return KeyUser(-1 - position, principals.hash_secret(token))
        credential = principals.classify_credential(token)
        if not isinstance(credential, principals.StoredKey) or token.startswith(principals.AGENT_KEY_PREFIX):
            return None
        return self._of_row(principals.find_stored_key(key_hash=credential.hash))

    def get_user(self, user_id: int) -> Any:
        """Return the session user with this id. The result is None if the key no longer exists.

        It is also None for the id of a user with a row.
        """
        if user_id < -_FIRST_STORED_KEY_ID:
            return self._of_row(principals.find_stored_key(pk=-user_id - _FIRST_STORED_KEY_ID))
        keys = conf.cluster().api_keys
        if -len(keys) <= user_id < 0:
            return KeyUser(user_id, principals.hash_secret(keys[-user_id - 1]))
        return None

    def _of_row(self, row: ApiKey | None) -> KeyUser | None:
        return KeyUser(-_FIRST_STORED_KEY_ID - row.pk, row.key_hash, row.user) if row is not None else None


_CHECKED_HEADERS = frozenset({b"cookie", b"host", b"origin", b"referer", b"sec-fetch-site", b"x-csrftoken"})
"""Headers that the session and CSRF checks read; they do not read the body or its content type."""


def has_session(scope: Scope) -> bool:
    """Return True if the request has a session cookie. The session may have ended."""
    name = settings.SESSION_COOKIE_NAME.encode()
    return any(header == b"cookie" and name in value for header, value in scope["headers"])


async def principal_of_request(scope: Scope) -> Principal:
    """Return the principal of the request's session.

    Raise NotAuthenticated without a session cookie, NoSuchSession if the cookie's session does not exist,
    Forbidden for a request from another origin, PasswordChangeRequired while the user has the generated
    password.
    """
    with outage.unavailable_on(DatabaseError):
        return await database_sync_to_async(_read_session)(scope)


class NoSuchSession(WrongKey):
    """The session has ended or never existed. It counts like a wrong key, because it may be a guess."""

    message = "sign-in required"
    code = NotAuthenticated.code


def _empty_response(_: HttpRequest) -> HttpResponse:
    return HttpResponse()


def csrf_problem(request: HttpRequest) -> str:
    """Return the reason why a session may not make this change; "" if it may.

    It is also "" if the request changes nothing.
    """
    if _is_same_origin(request):
        return ""
    check = CSRFCheck(_empty_response)
    check.process_request(request)
    return str(check.process_view(request, _empty_response, (), {}) or "")


def _is_same_origin(request: HttpRequest) -> bool:
    """Return True if the browser's headers state that a page of this origin sent the request.

    No script can set these headers. Browsers omit `Sec-Fetch-Site` on a page without TLS, except at a
    loopback address.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    try:
        return request.headers.get("origin") == f"{request.scheme}://{request.get_host()}"
    except DisallowedHost:
        return False


def _read_session(scope: Scope) -> Principal:
    headers = [(name, value) for name, value in scope["headers"] if name in _CHECKED_HEADERS]
    request = ASGIRequest({**scope, "headers": headers, "query_string": b""}, io.BytesIO())
    request.session = SessionStore(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
    has_session_key = request.session.session_key is not None
    owner = principals.of_session(auth.get_user(request))
    if not owner.is_authenticated:
        raise NoSuchSession if has_session_key else NotAuthenticated("sign-in required")
    if problem := csrf_problem(request):
        raise Forbidden(f"CSRF Failed: {problem}")
    if owner.kind == "newcomer":
        raise passwords.PasswordChangeRequired
    return owner


ACCESS_CHANNEL = "cluster_access"
"""NOTIFY channel for callers whose access may have ended.

A payload is `user <id>` or `session <MD5 of its key>`, as in `access_names`.
"""


class PrincipalMiddleware:
    """ASGI middleware for websockets that sets `scope["principal"]`. Use it inside of `SessionMiddleware`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """Set the principal, with at most two queries. Count a wrong key as a failure of its address."""
        principal = anonymous_if_newcomer(await principal_of_socket(scope))
        offered = principals.offered_credential(principals.credential_headers(scope))
        if offered and not principal.is_authenticated:
            await throttle.api_keys().note_in_thread(principals.WrongKey(), wire.client_of(scope))
        entries = {
            "principal": principal,
            "current_principal": lambda: current_principal(scope),
            "access_names": access_names(scope, principal),
        }
        return await self._app({**scope, **entries}, receive, send)


def access_names(scope: Any, principal: Principal) -> frozenset[str]:
    """Return the payloads of `ACCESS_CHANNEL` that concern this caller."""
    key = scope["session"].session_key or ""
    session = hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()
    return frozenset({f"user {principal.user_id}", f"session {session}"})


def anonymous_if_newcomer(principal: Principal) -> Principal:
    """Return the principal, or an anonymous one while the user has a generated password."""
    return ANONYMOUS if principal.kind == "newcomer" else principal


async def principal_of_socket(scope: Any) -> Principal:
    """Return the principal of a websocket's caller.

    A caller with a wrong key is anonymous, even with a valid session.
    """
    credential = principals.read_credential(principals.credential_headers(scope))
    if credential is not None:
        return await database_sync_to_async(principals.owner_of)(credential)
    return principals.of_session(await get_user(scope))


async def current_principal(scope: Any) -> Principal:
    """Read the session or the key again, and return the caller's principal."""
    session = type(scope["session"]._wrapped)(scope["session"].session_key)
    return anonymous_if_newcomer(await principal_of_socket({**scope, "session": session}))
