"""Who a browser is on the routes in front of Django: the session of a signed-in person, as over REST.

A browser sends its cookie with every request, also with one that a page of another site makes. So a change
needs the CSRF token in a header and an origin of this host: Django's own check of both, which REST uses too.
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
from localai_cluster.errors import Forbidden, NotAuthenticated, Unavailable
from localai_cluster.web.wire import Scope

_READ = frozenset({b"cookie", b"host", b"origin", b"referer", b"x-csrftoken"})
"""What the check reads: neither the body nor what it is of concerns it."""


def has_session(scope: Scope) -> bool:
    """Whether the request carries the cookie of a session, which may have ended."""
    name = settings.SESSION_COOKIE_NAME.encode()
    return any(header == b"cookie" and name in value for header, value in scope["headers"])


async def principal_of(scope: Scope) -> Principal:
    """The person whose session this is.

    Raises NotAuthenticated without one, as WrongKey if it was looked for: guesses count as those of keys do.
    Raises Forbidden if another site asks or the token is missing, and PasswordChangeRequired while the
    password is the generated one.
    """
    try:
        return await database_sync_to_async(_principal)(scope)
    except DatabaseError as unreachable:
        raise Unavailable("the database is not reachable", retry_after=2) from unreachable


def _nothing(_: HttpRequest) -> HttpResponse:
    return HttpResponse()


def _principal(scope: Scope) -> Principal:
    headers = [(name, value) for name, value in scope["headers"] if name in _READ]
    request = ASGIRequest({**scope, "headers": headers, "query_string": b""}, io.BytesIO())
    request.session = SessionStore(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
    could_be_one = request.session.session_key is not None
    who = principals.of_session(get_user(request))
    if not who.is_authenticated:
        raise WrongKey("sign-in required") if could_be_one else NotAuthenticated("sign-in required")
    check = CSRFCheck(_nothing)
    check.process_request(request)
    if reason := check.process_view(request, _nothing, (), {}):
        raise Forbidden(f"CSRF Failed: {reason}")
    if who.kind == "newcomer":
        raise passwords.PasswordChangeRequired
    return who
