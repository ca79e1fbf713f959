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

from localai_cluster import clock, errors
from nodes import identity, passwords, services
from nodes.api import throttle
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


def client_address(request: Request) -> str:
    """Where the request came from, as far as the socket tells; "" if it does not."""
    return str(request.META.get("REMOTE_ADDR") or "")[:64]


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
        """The principal of the session's user, None without one.

        Raises PasswordChangeRequired while the password is the generated one.
        """
        found = super().authenticate(request)
        if found is None:
            return None
        who = identity.of_session(found[0])
        if who.kind == "newcomer":
            raise passwords.PasswordChangeRequired
        return (who, None) if who.is_authenticated else None

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


class SignInAuthentication(CookieAuthentication):
    """For the routes of signing in themselves: a session as it is, and the CSRF token from everybody.

    Without that another site could sign a browser in as somebody else, or out.
    """

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """The user of the session, None without one; 403 for a change without the CSRF token."""
        self.enforce_csrf(request)
        user = request._request.user
        return (user, None) if user.is_authenticated and user.is_active else None


class WorkerAuthentication(BaseAuthentication):
    """What the worker's own routes have in common: a person who is signed in is forbidden, not unknown."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """The worker's principal; 401 without a worker's credential, 429 after too many wrong ones.

        403 for a person or another node.
        """
        offered = identity.bearer(request.headers.get("authorization", ""))
        try:
            if not offered:
                raise errors.NotAuthenticated(NO_CREDENTIAL)
            return self.prove(request, offered), None
        except errors.NotAuthenticated as refusal:
            if not isinstance(refusal, identity.MustRotate) and person(request).is_authenticated:
                raise errors.Forbidden(WORKERS_ONLY) from None
            if isinstance(refusal, identity.WrongCredential):
                throttle.shared().note(client_address(request), clock.now())
            raise

    def prove(self, request: Request, offered: str) -> Principal:
        """Who offers this; raises NotAuthenticated for nobody."""
        raise NotImplementedError

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


NO_CREDENTIAL = "missing or invalid Authorization header"
WORKERS_ONLY = "this route is for workers only"


def person(request: Request) -> Principal:
    """The user behind a key or a browser's session, whatever the route asks for."""
    offered = credential(request)
    found = identity.by_credential(offered) if offered else None
    return found or identity.of_user(request._request.user)


class NodeAuthentication(WorkerAuthentication):
    """A worker's own secret, for exactly the node in the URL (`kwargs["node_id"]`).

    A view with `rotating` set is open to a secret that an admin wants replaced.
    """

    def prove(self, request: Request, offered: str) -> Principal:
        """The node's principal; 401 without its secret, 403 for another node, 404 for an unknown id.

        409 for a process that another one has replaced, which becomes a conflict that an admin sees. 429 for
        the shared token of an address with too many failures, unless it is this node's credential.
        """
        context = request.parser_context
        node_id = parse_node_id(context["kwargs"]["node_id"])
        instance = request.headers.get(identity.INSTANCE_HEADER, "")
        rotating = getattr(context["view"], "rotating", False)
        try:
            return identity.prove_node(node_id, offered, instance, rotating=rotating)
        except identity.OtherProcess:
            assert node_id is not None  # it was found
            source = client_address(request)
            services.note_other_process(node_id, instance, source_address=source, now=clock.now())
            raise
        except (errors.NotFound, errors.Forbidden):
            if identity.is_registration_token(offered):
                # Over the limit a right guess must not look different from a wrong one.
                throttle.shared().check(client_address(request), clock.now())
            raise


class RegistrationAuthentication(WorkerAuthentication):
    """The shared registration token, which lets a worker knock and nothing else."""

    def prove(self, request: Request, offered: str) -> Principal:
        """Nobody in particular; 401 with a wrong token, 429 unseen after too many failures of its address."""
        throttle.shared().check(client_address(request), clock.now())
        if not identity.is_registration_token(offered):
            raise identity.WrongCredential("invalid registration token")
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
