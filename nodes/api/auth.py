"""Who may call what over REST.

`BearerAuthentication` reads the headers, `CookieAuthentication` the browser's session (with CSRF); both yield
a `Principal` as `request.user`. Views are open to admins unless they say otherwise. The worker's own routes
use `NodeAuthentication`: the node in the URL must be the one whose secret is offered.
"""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from localai_cluster import errors
from nodes import identity
from nodes.identity import ANONYMOUS, Principal

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView

CHALLENGE = "Bearer"


def principal(request: Request) -> Principal:
    """Who is calling."""
    user: Any = request.user
    return user if isinstance(user, Principal) else ANONYMOUS


def parse_node_id(text: str) -> UUID | None:
    """A node id from a path, None for a text that cannot be one."""
    try:
        return UUID(text)
    except ValueError:
        return None


def credential(request: Request) -> str | None:
    """What the request's headers offer."""
    return identity.offered(lambda name: request.headers.get(name, ""))


class BearerAuthentication(BaseAuthentication):
    """The static admin key or an API key in `Authorization: Bearer`, `x-api-key`, `xi-api-key`: one query."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The principal; None without such a header; 401 for a credential of nobody."""
        offered = credential(request)
        if offered is None:
            return None
        found = identity.by_credential(offered)
        if found is None or not found.is_authenticated:
            raise AuthenticationFailed("invalid API key")
        return found, None

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


class CookieAuthentication(SessionAuthentication):
    """The session of a signed-in browser; state-changing requests need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The principal of the session's user, None without one."""
        found = super().authenticate(request)
        if found is None:
            return None
        who = identity.of_user(found[0])
        return (who, None) if who.is_authenticated else None

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


class WorkerAuthentication(BaseAuthentication):
    """What the worker's own routes have in common: a person who is signed in is forbidden, not unknown."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """The worker's principal; 401 without a worker's credential, 403 for a person or another node."""
        offered = identity.bearer(request.headers.get("authorization", ""))
        try:
            if not offered:
                raise errors.NotAuthenticated("missing or invalid Authorization header")
            return self.prove(request, offered), None
        except errors.NotAuthenticated:
            if person(request).is_authenticated:
                raise errors.Forbidden(WORKERS_ONLY) from None
            raise

    def prove(self, request: Request, offered: str) -> Principal:
        """Who offers this; raises NotAuthenticated for nobody."""
        raise NotImplementedError

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


WORKERS_ONLY = "this route is for workers only"


def person(request: Request) -> Principal:
    """The user behind a key or a browser's session, whatever the route asks for."""
    offered = credential(request)
    found = identity.by_credential(offered) if offered else None
    return found or identity.of_user(request._request.user)


class NodeAuthentication(WorkerAuthentication):
    """A worker's own secret, for exactly the node in the URL (`kwargs["node_id"]`)."""

    def prove(self, request: Request, offered: str) -> Principal:
        """The node's principal; 401 without its secret, 403 for another node, 404 for an unknown id."""
        return identity.prove_node(parse_node_id(request.parser_context["kwargs"]["node_id"]), offered)


class RegistrationAuthentication(WorkerAuthentication):
    """The shared registration token, which lets a worker knock and nothing else."""

    def prove(self, request: Request, offered: str) -> Principal:
        """Nobody in particular; 401 with a wrong token."""
        if not identity.is_registration_token(offered):
            raise errors.NotAuthenticated("invalid registration token")
        return ANONYMOUS


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


class IsTheNode(BasePermission):
    """The node of the URL itself; `NodeAuthentication` has proved it."""

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Whether the caller is a node."""
        return principal(request).kind == "node"
