"""Authentication of people and programs over REST.

`BearerAuthentication` reads the headers, `CookieAuthentication` the session of a browser with its CSRF rule.
Both set a `Principal` as `request.user`. Views are open to admins unless they declare other permissions. The
workers' routes use `nodes/api/worker_routes.py`.
"""

from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request

from localai_cluster.accounts import passwords, principals, sessions
from localai_cluster.accounts.principals import ANONYMOUS, KeyUser, Principal
from localai_cluster.accounts.sessions import KeyBackend
from localai_cluster.kit import clock
from localai_cluster.web import throttle

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView


BEARER_CHALLENGE = "Bearer"


def principal(request: Request) -> Principal:
    """Return the principal of a request's caller."""
    user: Any = request.user
    return user if isinstance(user, Principal) else ANONYMOUS


def client_address(request: HttpRequest | Request) -> str:
    """Return the address of the client's connection, "" if the socket has none."""
    return str(request.META.get("REMOTE_ADDR") or "")[:64]


def _owner_of_headers(request: Request) -> Principal | None:
    """Return the principal of the credential in the headers, None without a credential. One query at most."""
    credential = principals.read_credential(request.headers)
    return None if credential is None else principals.owner_of(credential)


class BearerAuthentication(BaseAuthentication):
    """Authentication by the static admin key or an API key, in one query.

    The key is in `Authorization: Bearer`, `x-api-key` or `xi-api-key`.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the principal; None without a key in the headers.

        Raise 401 for an unknown key, 429 after too many unknown keys from one address.
        """
        caller = _owner_of_headers(request)
        if caller is None:
            return None
        if not caller.is_authenticated:
            if principals.offered_credential(request.headers):
                throttle.api_keys().note(client_address(request), clock.now())
            raise AuthenticationFailed("invalid API key")
        return caller, None

    def authenticate_header(self, request: Request) -> str:
        """Return the authentication challenge. With it DRF responds 401 instead of 403."""
        return BEARER_CHALLENGE


class CookieAuthentication(SessionAuthentication):
    """DRF authentication by the session of a browser.

    A change must come from a page of this origin.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the principal of the session's user; None without a session.

        Raise PasswordChangeRequired while the user has the generated password.
        """
        user_and_auth = super().authenticate(request)
        if user_and_auth is None:
            return None
        owner = principals.of_session(user_and_auth[0])
        if owner.kind == "newcomer":
            raise passwords.PasswordChangeRequired
        if not owner.is_authenticated:
            return None
        recent_sessions.add(_session_key(request), owner)
        return owner, None

    def enforce_csrf(self, request: Request) -> None:
        """Raise 403 for a change that does not come from a page of this origin."""
        if problem := sessions.csrf_problem(request._request):
            raise PermissionDenied(f"CSRF Failed: {problem}")

    def authenticate_header(self, request: Request) -> str:
        """Return the authentication challenge. With it DRF responds 401 instead of 403."""
        return BEARER_CHALLENGE


class RecentSessions:
    """Owners of recently used sessions. One route uses them while the database is unavailable."""

    MAX_AGE, MAX_SESSIONS = 900.0, 1000

    def __init__(self) -> None:
        self._owners: dict[str, tuple[Principal, float]] = {}

    def add(self, session_key: str, owner: Principal) -> None:
        """Record that the session was valid just now."""
        if len(self._owners) >= self.MAX_SESSIONS:
            self._owners.clear()
        self._owners[principals.hash_secret(session_key)] = (owner, clock.monotonic())

    def find(self, session_key: str) -> Principal | None:
        """Return the owner of the session if it was valid in the last `MAX_AGE` seconds, otherwise None."""
        owner, since = self._owners.get(principals.hash_secret(session_key), (None, 0.0))
        return owner if clock.monotonic() - since < self.MAX_AGE else None

    def clear(self) -> None:
        """Remove all sessions, because the access of some user has ended."""
        self._owners.clear()


recent_sessions = RecentSessions()
"""The recently used sessions of this web process."""


def _session_key(request: Request) -> str:
    return str(request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""))


class RememberingAuthentication(CookieAuthentication):
    """DRF authentication by a session that, if recently used, also works without the database.

    Only the route of the system's health uses this class.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the principal of the session; None without a session.

        Raise the same errors as `CookieAuthentication`.
        """
        try:
            return super().authenticate(request)
        except (OperationalError, InterfaceError):
            owner = recent_sessions.find(_session_key(request))
            if owner is None or request.method not in SAFE_METHODS:
                raise
            return owner, None


class SignInAuthentication(CookieAuthentication):
    """DRF authentication of the sign-in routes, also for users with a generated password.

    Every change must come from a page of this origin. Otherwise another site could sign a browser out, or in
    as another user.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the user of the session; None without a session.

        Raise 403 for a change that comes from another origin.
        """
        self.enforce_csrf(request)
        user = request._request.user
        return (user, None) if user.is_authenticated and user.is_active else None


def user_of_key(request: Request) -> KeyUser | None:
    """Return the user of the key in the headers, None without a valid key. Count a wrong key as a failure."""
    key = principals.offered_credential(request.headers)
    user: KeyUser | None = KeyBackend().authenticate(None, key) if key else None
    if key and user is None:
        throttle.api_keys().note(client_address(request), clock.now())
    return user


def person_of(request: Request) -> Principal:
    """Return the user of a key or of a browser's session. The checks of single routes are not applied."""
    owner = _owner_of_headers(request)
    return owner if owner and owner.is_authenticated else principals.of_user(request._request.user)


class IsAdmin(BasePermission):
    """DRF permission for admins: staff, superusers and the static key."""

    message = "admin access required"

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Return True if the caller is an admin."""
        return principal(request).is_admin


class IsUser(BasePermission):
    """DRF permission for every signed-in user."""

    message = "sign-in required"

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Return True if the caller is a user."""
        return principal(request).is_user
