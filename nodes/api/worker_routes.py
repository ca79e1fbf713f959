"""Authentication of workers, and helpers of their raw ASGI routes: bodies, responses, descriptions.

A worker's own route accepts only the secret of the node in its URL.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson
from channels.sessions import CookieMiddleware, SessionMiddleware
from drf_spectacular.utils import OpenApiParameter
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from localai_cluster.accounts import principals
from localai_cluster.accounts.authentication import BEARER_CHALLENGE, client_address, person_of, principal
from localai_cluster.accounts.principals import Principal
from localai_cluster.accounts.sessions import principal_of_socket
from localai_cluster.kit import clock, errors
from localai_cluster.web import throttle, wire
from localai_cluster.web.openapi import Operation, json_body, refusals
from localai_cluster.web.shapes import FLAG, TEXT, Shape, field, reference
from nodes.registry import claims, identity

if TYPE_CHECKING:  # the framework's views import this module while they are being imported
    from rest_framework.views import APIView


def parse_node_id(text: str) -> UUID | None:
    """Return the node id in a path; None if it is invalid."""
    try:
        return UUID(text)
    except ValueError:
        return None


def parse_id(text: str, kind: str = "node") -> UUID:
    """Return the id in a path; raise NotFound if it is invalid."""
    row_id = parse_node_id(text)
    if row_id is None:
        raise errors.NotFound(f"{kind} not found")
    return row_id


NO_CREDENTIAL_MESSAGE = "missing or invalid Authorization header"
WORKERS_ONLY_MESSAGE = "this route is for workers only"


class NodeAuthentication(BaseAuthentication):
    """Authentication of the node in the URL (`kwargs["node_id"]`) by its worker's own secret.

    A view with `rotating` set also accepts a secret that an admin wants replaced. A signed-in user gets 403
    instead of 401.
    """

    def authenticate(self, request: Request) -> tuple[Any, None]:
        """Return the node's principal.

        Raises the errors for 401 (without the node's secret), 403 (a user or another node), 404 (unknown id),
        409 (a process that another one has replaced), and 429 (too many wrong credentials).
        """
        offered = principals.bearer(request.headers.get("authorization", ""))
        try:
            if not offered:
                raise errors.NotAuthenticated(NO_CREDENTIAL_MESSAGE)
            return _prove(request, offered), None
        except errors.NotAuthenticated as refusal:
            if not isinstance(refusal, identity.MustRotate) and person_of(request).is_authenticated:
                raise errors.Forbidden(WORKERS_ONLY_MESSAGE) from None
            if isinstance(refusal, identity.WrongCredential):
                throttle.token_failures().note(client_address(request), clock.now())
            raise

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge that makes DRF respond 401, not 403."""
        return BEARER_CHALLENGE


def _prove(request: Request, offered: str) -> Principal:
    context = request.parser_context
    node_id = parse_node_id(context["kwargs"]["node_id"])
    instance = request.headers.get(identity.INSTANCE_HEADER, "")
    rotating = getattr(context["view"], "rotating", False)
    with watch_proof(node_id, offered, instance, client_address(request)):
        return identity.prove_node(node_id, offered, instance, rotating=rotating)


@contextmanager
def watch_proof(node_id: UUID | None, offered: str, instance: str, source: str) -> Iterator[None]:
    """Record a conflict if the block finds that another process has replaced this one.

    If the block refuses the shared token, an address with too many failures gets 429.
    """
    try:
        yield
    except identity.OtherProcess:
        assert node_id is not None  # it was found
        claims.record_other_process(node_id, instance, source_address=source, now=clock.now())
        raise
    except (errors.NotFound, errors.Forbidden):
        if principals.is_registration_token(offered):
            # Over the limit a right guess must not look different from a wrong one.
            throttle.token_failures().check(source, clock.now())
        raise


class IsTheNode(BasePermission):
    """Permission for the node in the URL, which `NodeAuthentication` has authenticated."""

    def has_permission(self, request: Request, view: "APIView") -> bool:
        return principal(request).kind == "node"


class RegistrationAuthentication(BaseAuthentication):
    """The shared registration token as a security scheme of the API document. It authenticates nothing."""

    def authenticate(self, request: Request) -> None:
        """Return None, because it authenticates no request."""


WORKER_REFUSAL_SHAPE = Shape(
    "WorkerRefusal",
    "The 401 of a worker, flat (§0.4). `rotate`, true, if an admin wants the secret replaced.",
    [field("error", TEXT), field("rotate", FLAG, optional=True)],
)
WRONG_SECRET_MEANING = (
    "No credential, or a wrong one. `rotate`: the secret is right, but an admin wants it replaced."
)


def _header(name: str, digits: int, meaning: str, *, required: bool = False) -> OpenApiParameter:
    secret = f"[0-9a-f]{{{digits}}}"
    return OpenApiParameter(
        name,
        {"type": "string", "pattern": f"^{secret}$" if required else f"^({secret})?$"},
        OpenApiParameter.HEADER,
        required=required,
        description=meaning,
    )


SECRET_PARAMETER = _header(
    identity.SECRET_HEADER, 64, "The worker's own secret, bound to the name by its first registration."
)
NEW_SECRET_PARAMETER = _header(
    identity.NEW_SECRET_HEADER, 64, "What the worker proves itself by from now on.", required=True
)
INSTANCE_PARAMETER = _header(
    identity.INSTANCE_HEADER,
    32,
    "One value for each worker process. A call under an earlier one is refused with 409: two processes use"
    " one data folder, or a copy of it.",
)


Scope = dict[str, Any]


def headers_of(scope: Scope) -> dict[bytes, str]:
    """Return the headers by their names in lower case."""
    return {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}


def client_of(scope: Scope) -> str:
    """Return the client's address, cut to the length of the column that stores it."""
    return wire.client_of(scope)[:64]


async def refusal_for_caller(refusal: errors.ClusterError, scope: Scope) -> errors.ClusterError:
    """Return the refusal to send, and count a wrong credential. A signed-in user gets 403 instead of 401."""
    if refusal.status != 401 or isinstance(refusal, identity.MustRotate):
        return refusal
    if await _is_from_user(scope):
        return errors.Forbidden(WORKERS_ONLY_MESSAGE)
    if isinstance(refusal, identity.WrongCredential):
        return await throttle.token_failures().note_in_thread(refusal, client_of(scope))
    return refusal


async def _is_from_user(scope: Scope) -> bool:
    """Return True if the request has a user's key or a browser session."""
    callers: list[Principal] = []

    async def note(inner: Any, receive: Any, send: Any) -> None:
        callers.append(await principal_of_socket(inner))

    middleware: Any = CookieMiddleware(SessionMiddleware(note))
    await middleware(scope, None, None)
    return callers[0].is_authenticated


def require_method(scope: Scope, allowed: str) -> None:
    """Raise MethodNotAllowed if the request has another method."""
    if scope["method"] != allowed:
        raise errors.MethodNotAllowed(f'method "{scope["method"]}" not allowed', allowed)


async def send_json(send: Any, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    lines = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
    await wire.send_answer(send, wire.Answer(orjson.dumps(body, option=orjson.OPT_UTC_Z), status, lines))


def describe_refusals(*statuses: int) -> dict[str, Operation]:
    """Describe the refusals with these statuses, for the API document."""
    meanings = {status: answer.description for status, answer in refusals(*statuses).items()}
    return {
        str(status): {"description": meaning, "content": json_body(reference("Refusal"))}
        for status, meaning in meanings.items()
    }


def describe_node_route(operation_id: str, summary: str, description: str, *in_path: str) -> Operation:
    """Describe a route that a node calls with its own secret, for the API document."""
    return {
        "operationId": operation_id,
        "tags": ["worker"],
        "summary": summary,
        "description": description,
        "security": [{"nodeSecret": []}],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in in_path
            ),
            {
                "name": INSTANCE_PARAMETER.name,
                "in": "header",
                "required": INSTANCE_PARAMETER.required,
                "schema": INSTANCE_PARAMETER.type,
                "description": INSTANCE_PARAMETER.description,
            },
        ],
    }


WRONG_SECRET_RESPONSE: Operation = {
    "401": {
        "description": WRONG_SECRET_MEANING,
        "content": json_body(WORKER_REFUSAL_SHAPE.ref, {"error": "invalid node credential"}),
    }
}
"""Description of the 401 for a wrong secret, for the API document."""
