"""How people and programs authenticate over REST.

`BearerAuthentication` reads the headers, `CookieAuthentication` the browser's session (with CSRF). Both
yield a `Principal` as `request.user`. Views are open to admins unless they say otherwise. The workers' own
routes use `nodes/api/worker_auth.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from localai_cluster import clock
from localai_cluster.accounts import credentials, passwords, principals
from localai_cluster.accounts.principals import ANONYMOUS, Principal
from localai_cluster.web import throttle

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView


CHALLENGE = "Bearer"


def principal(request: Request) -> Principal:
    """Who is calling."""
    user: Any = request.user
    return user if isinstance(user, Principal) else ANONYMOUS


def client_address(request: HttpRequest | Request) -> str:
    """Where the request came from, as far as the socket tells; "" if it does not."""
    return str(request.META.get("REMOTE_ADDR") or "")[:64]


def _header_of(request: Request) -> Callable[[str], str]:
    return lambda name: request.headers.get(name, "")


def _of_headers(request: Request) -> Principal | None:
    """Who the credential in the headers belongs to, in at most one query; None without a credential."""
    credential = credentials.read(_header_of(request))
    return None if credential is None else credentials.principal_of(credential)


class BearerAuthentication(BaseAuthentication):
    """The static admin key or an API key in `Authorization: Bearer`, `x-api-key`, `xi-api-key`: one query."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The principal; None without such a header.

        401 for an unknown credential, 429 after too many of them from one address.
        """
        found = _of_headers(request)
        if found is None:
            return None
        if not found.is_authenticated:
            if credentials.offered(_header_of(request)):
                throttle.api_keys().note(client_address(request), clock.now())
            raise AuthenticationFailed("invalid API key")
        return found, None

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


class CookieAuthentication(SessionAuthentication):
    """The session of a signed-in browser; state-changing requests need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The principal of the session's user, None without one.

        Raises PasswordChangeRequired while the password is the generated one.
        """
        found = super().authenticate(request)
        if found is None:
            return None
        who = principals.of_session(found[0])
        if who.kind == "newcomer":
            raise passwords.PasswordChangeRequired
        if not who.is_authenticated:
            return None
        recent_sessions.add(_session_key(request), who)
        return who, None

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


class RecentSessions:
    """Who the sessions of the last minutes belong to, for the one route that answers without the database."""

    MAX_AGE, MOST = 900.0, 1000

    def __init__(self) -> None:
        self._known: dict[str, tuple[Principal, float]] = {}

    def add(self, session_key: str, who: Principal) -> None:
        """Remember that the session was valid now."""
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[principals.hash_secret(session_key)] = (who, clock.monotonic())

    def find(self, session_key: str) -> Principal | None:
        """Return whose the session was a few minutes ago, None if it was nobody's."""
        who, since = self._known.get(principals.hash_secret(session_key), (None, 0.0))
        return who if clock.monotonic() - since < self.MAX_AGE else None

    def clear(self) -> None:
        """Forget all: somebody's access has ended."""
        self._known.clear()


recent_sessions = RecentSessions()
"""Those of this web process."""


def _session_key(request: Request) -> str:
    return str(request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""))


class RememberingAuthentication(CookieAuthentication):
    """A session that this process has seen valid in the last minutes counts while the database is away.

    For reading what is wrong with the system, nothing else.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The principal of the session, None without one; raises as `CookieAuthentication` does."""
        try:
            return super().authenticate(request)
        except (OperationalError, InterfaceError):
            who = recent_sessions.find(_session_key(request))
            if who is None or request.method not in SAFE_METHODS:
                raise
            return who, None


class SignInAuthentication(CookieAuthentication):
    """For the routes of signing in themselves: a session as it is, and the CSRF token from everyone.

    Without that another site could sign a browser in as somebody else, or out.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The user of the session, None without one; 403 for a change without the CSRF token."""
        self.enforce_csrf(request)
        user = request._request.user
        return (user, None) if user.is_authenticated and user.is_active else None


def person(request: Request) -> Principal:
    """The user behind a key or a browser's session, without the checks of the route."""
    found = _of_headers(request)
    return found if found and found.is_authenticated else principals.of_user(request._request.user)


class IsAdmin(BasePermission):
    """Admins only: staff, superusers, the static key."""

    message = "admin access required"

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Whether the caller is an admin."""
        return principal(request).is_admin


class IsUser(BasePermission):
    """Any signed-in user."""

    message = "sign-in required"

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Whether the caller is a user."""
        return principal(request).is_user
