"""Session authentication of browsers on the routes in front of Django, as over REST.

A browser sends its cookie with every request, including requests by pages of other sites. So a change needs
the CSRF token in a header and an origin of this host: Django's own check of both, which REST uses too.
"""

import io

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from rest_framework.authentication import CSRFCheck

from localai_cluster.accounts import passwords, principals
from localai_cluster.accounts.credentials import WrongKey
from localai_cluster.accounts.principals import Principal
from localai_cluster.accounts.session_store import SessionStore
from localai_cluster.kit.errors import Forbidden, NotAuthenticated, Unavailable
from localai_cluster.web.wire import Scope

_CHECKED_HEADERS = frozenset({b"cookie", b"host", b"origin", b"referer", b"x-csrftoken"})
"""Headers that the session and CSRF checks read; they do not read the body or its content type."""


def has_session(scope: Scope) -> bool:
    """Return True if the request has a session cookie; the session may have ended."""
    name = settings.SESSION_COOKIE_NAME.encode()
    return any(header == b"cookie" and name in value for header, value in scope["headers"])


async def principal_of_request(scope: Scope) -> Principal:
    """Return the person of the request's session.

    Raises NotAuthenticated without a session, as WrongKey if the cookie's session was looked up in vain:
    guesses count like those of keys. Raises Forbidden if the origin is another site or the token is missing,
    and PasswordChangeRequired while the password is the generated one.
    """
    try:
        return await database_sync_to_async(_read_session)(scope)
    except DatabaseError as unreachable:
        raise Unavailable("the database is not reachable", retry_after=2) from unreachable


def _nothing(_: HttpRequest) -> HttpResponse:
    return HttpResponse()


def _read_session(scope: Scope) -> Principal:
    headers = [(name, value) for name, value in scope["headers"] if name in _CHECKED_HEADERS]
    request = ASGIRequest({**scope, "headers": headers, "query_string": b""}, io.BytesIO())
    request.session = SessionStore(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
    has_session_key = request.session.session_key is not None
    owner = principals.of_session(get_user(request))
    if not owner.is_authenticated:
        raise WrongKey("sign-in required") if has_session_key else NotAuthenticated("sign-in required")
    check = CSRFCheck(_nothing)
    check.process_request(request)
    if reason := check.process_view(request, _nothing, (), {}):
        raise Forbidden(f"CSRF Failed: {reason}")
    if owner.kind == "newcomer":
        raise passwords.PasswordChangeRequired
    return owner
