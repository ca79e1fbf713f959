"""Who may call the workers' own routes: the node in the URL must be the one whose secret is offered.

Also what the API document says of it: schemes, headers and the refusal.
"""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiParameter
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from localai_cluster.accounts import principals
from localai_cluster.accounts.authentication import CHALLENGE, client_address, person_of, principal
from localai_cluster.accounts.principals import Principal
from localai_cluster.kit import clock, errors
from localai_cluster.web import throttle
from localai_cluster.web.openapi import Operation
from localai_cluster.web.shapes import FLAG, TEXT, Shape, field
from nodes.registry import identity, services

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView


def parse_node_id(text: str) -> UUID | None:
    """A node id from a path, None for a text that cannot be one."""
    try:
        return UUID(text)
    except ValueError:
        return None


class WorkerAuthentication(BaseAuthentication):
    """What the worker's own routes have in common: a person who is signed in is forbidden, not unknown."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """The worker's principal; 401 without a worker's credential, 429 after too many wrong ones.

        403 for a person or another node.
        """
        offered = principals.bearer(request.headers.get("authorization", ""))
        try:
            if not offered:
                raise errors.NotAuthenticated(NO_CREDENTIAL)
            return self.prove(request, offered), None
        except errors.NotAuthenticated as refusal:
            if not isinstance(refusal, identity.MustRotate) and person_of(request).is_authenticated:
                raise errors.Forbidden(WORKERS_ONLY) from None
            if isinstance(refusal, identity.WrongCredential):
                throttle.shared().note(client_address(request), clock.now())
            raise

    def prove(self, request: Request, offered: str) -> Principal:
        """Who offers this; raises NotAuthenticated without a known credential."""
        raise NotImplementedError

    def authenticate_header(self, request: Request) -> str:
        """Makes DRF answer 401, not 403."""
        return CHALLENGE


NO_CREDENTIAL = "missing or invalid Authorization header"
WORKERS_ONLY = "this route is for workers only"


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
            if principals.is_registration_token(offered):
                # Over the limit a right guess must not look different from a wrong one.
                throttle.shared().check(client_address(request), clock.now())
            raise


class IsTheNode(BasePermission):
    """The node of the URL itself; `NodeAuthentication` has proved it."""

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Whether the caller is a node."""
        return principal(request).kind == "node"


class RegistrationAuthentication(BaseAuthentication):
    """The shared registration token, which lets a worker register and nothing else."""

    def authenticate(self, request: Request) -> None:
        """Serves no request."""


class NodeScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A worker's own secret."""

    target_class = "nodes.api.worker_auth.NodeAuthentication"
    name = "nodeSecret"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "The secret of the node in the URL."}


class RegistrationScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The shared token."""

    target_class = "nodes.api.worker_auth.RegistrationAuthentication"
    name = "registrationToken"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {
            "type": "http",
            "scheme": "bearer",
            "description": "Registration or join token.",
        }


WORKER_REFUSAL = Shape(
    "WorkerRefusal",
    "The 401 of a worker, flat (§0.4). `rotate`, true, if an admin wants the secret replaced.",
    [field("error", TEXT), field("rotate", FLAG, optional=True)],
)
WRONG = "No credential, or a wrong one. `rotate`: the secret is right, but an admin wants it replaced."


def _header(name: str, digits: int, meaning: str, *, required: bool = False) -> OpenApiParameter:
    secret = f"[0-9a-f]{{{digits}}}"
    return OpenApiParameter(
        name,
        {"type": "string", "pattern": f"^{secret}$" if required else f"^({secret})?$"},
        OpenApiParameter.HEADER,
        required=required,
        description=meaning,
    )


SECRET = _header(
    identity.SECRET_HEADER, 64, "The worker's own secret, bound to the name by its first registration."
)
NEW_SECRET = _header(
    identity.NEW_SECRET_HEADER, 64, "What the worker proves itself by from now on.", required=True
)
INSTANCE = _header(
    identity.INSTANCE_HEADER,
    32,
    "One value for each worker process. A call under an earlier one is refused with 409: two processes use"
    " one data folder, or a copy of it.",
)
