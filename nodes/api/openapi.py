"""The OpenAPI document: how callers authenticate, how refusals look, and the routes that Django does not see.

Heartbeats, inference and websockets are raw ASGI applications; their operations are written by hand and
merged into the generated document by `add_raw_routes`. A test compares the whole route table with the result.
"""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.utils import OpenApiExample, OpenApiResponse

from operations.api.serializers import RefusalSerializer

Operation = dict[str, Any]
RawRoute = tuple[str, str, Operation]

_MEANINGS = {
    400: "The request is not valid; the message names the field.",
    401: "A valid credential is required.",
    403: "This credential may not do that.",
    404: "There is no such thing.",
    409: "The present state does not allow that; the message says why.",
    413: "The request body is too large.",
    429: "Too many wrong tokens or secrets from this address; Retry-After says when to come back.",
    503: "Not possible right now; Retry-After says when to come back.",
}
_SAID = {
    400: ("invalid request body", "node_error"),
    401: ("invalid API key", "invalid_request_error"),
    403: ("admin access required", "authorization_error"),
    404: ("node not found", "node_error"),
    409: ("the node is pending", "node_error"),
    413: ("the request body is too large", "node_error"),
    429: ("too many wrong tokens from this address", "node_error"),
    503: ("the database does not answer", "node_error"),
}
_COME_BACK: Operation = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "required": True}}
_HEADERS: dict[str, Operation] = {
    "401": {"WWW-Authenticate": {"schema": {"type": "string", "enum": ["Bearer"]}, "required": True}},
    "429": _COME_BACK,
    "503": _COME_BACK,
}


def refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """Responses in the nested envelope, and the 503 of a database that does not answer."""
    return {
        status: OpenApiResponse(RefusalSerializer, _MEANINGS[status], [_refusal(status)])
        for status in (*statuses, 503)
    }


def _refusal(status: int) -> OpenApiExample:
    message, kind = _SAID[status]
    body = {"error": {"code": status, "message": message, "type": kind}}
    return OpenApiExample(f"refused {status}", body, response_only=True, status_codes=[str(status)])


class DescribedSerializer(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """Lets a serializer say what its fields alone do not: presence, and limits that a view checks."""

    target_class = "nodes.api.fields.Described"
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> Operation:
        """The schema made from the fields, corrected by the serializer itself."""
        schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        described: Operation = self.target.described(schema)
        return described


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The admin key or a user's API key."""

    target_class = "nodes.api.auth.BearerAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "LOCALAI_API_KEY or a user's key (lac-…)."}


class CookieScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A browser's session."""

    target_class = "nodes.api.auth.CookieAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """The session cookie."""
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}


class SignInScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The same cookie, good for signing out and for a new password even while nothing else is open."""

    target_class = "nodes.api.auth.SignInAuthentication"
    name = "signedIn"


class NodeScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A worker's own secret."""

    target_class = "nodes.api.auth.NodeAuthentication"
    name = "nodeSecret"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "The secret of the node in the URL."}


class RegistrationScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The shared token."""

    target_class = "nodes.api.auth.RegistrationAuthentication"
    name = "registrationToken"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "LOCALAI_REGISTRATION_TOKEN."}


def json_body(schema: Operation, example: Any = None) -> Operation:
    """A JSON media type with an optional example."""
    return {"application/json": {"schema": schema} | ({"example": example} if example is not None else {})}


def _component(serializer: str) -> Operation:
    return {"$ref": f"#/components/schemas/{serializer}"}


OPERATIONS_SOCKET: Operation = {
    "operationId": "ws_operations",
    "tags": ["operations"],
    "summary": "WebSocket: a snapshot of the operations, then every change by sequence number.",
    "description": (
        'The first message is `{"type":"snapshot","seq":N,"operations":[…]}`; every change follows as '
        '`{"type":"delta","seq":N,"operation":{…}}`, without gaps. With `?since=N` only what changed after N '
        "is sent. Admins only; the handshake of anybody else is refused."
    ),
    "security": [{"apiKey": []}, {"session": []}],
    "parameters": [
        {
            "name": "since",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "format": "int64", "minimum": 0},
            "description": "The last sequence number seen; the stream resumes after it.",
        }
    ],
    "responses": {
        "101": {"description": "The stream begins."},
        "403": {"description": "Refused."},
        "404": {
            "description": "Not a websocket's handshake: over plain HTTP nothing is here.",
            "content": json_body(_component("Refusal")),
        },
    },
}

_CHECKS = {"type": "object", "additionalProperties": {"type": "string"}}
_READINESS = {
    "type": "object",
    "required": ["status", "checks"],
    "properties": {"status": {"type": "string", "enum": ["ready", "not ready"]}, "checks": _CHECKS},
}

HEALTHZ: Operation = {
    "operationId": "healthz",
    "tags": ["health"],
    "summary": "Whether the web process answers.",
    "security": [],
    "responses": {"200": {"description": "It does.", "content": json_body({"type": "object"})}},
}

READYZ: Operation = {
    "operationId": "readyz",
    "tags": ["health"],
    "summary": "Whether everything that a request needs is there; names each dependency.",
    "security": [],
    "responses": {
        "200": {"description": "Ready.", "content": json_body(_READINESS)},
        "503": {
            "description": "Not ready; the checks say what is missing.",
            "content": json_body(_READINESS),
        },
    },
}

RAW_ROUTES: list[RawRoute] = [
    ("GET", "/healthz", HEALTHZ),
    ("GET", "/readyz", READYZ),
    ("GET", "/ws/operations", OPERATIONS_SOCKET),
]


def raw_routes() -> list[RawRoute]:
    """Every route that the resolver of Django does not know: heartbeats and the inference room's included."""
    from nodes.api import worker_openapi
    from nodes.inference.openapi import ROUTES
    from nodes.live import openapi as live

    inference = [(method, path, what) for path, methods in ROUTES.items() for method, what in methods.items()]
    return RAW_ROUTES + live.ROUTES + worker_openapi.ROUTES + inference


def add_raw_routes(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """drf-spectacular's postprocessing hook: merges the raw routes and messages into the document."""
    from nodes.live import openapi as live

    live.add_messages(result)
    for method, path, operation in raw_routes():
        result["paths"].setdefault(path, {})[method.lower()] = operation
    for methods in result["paths"].values():
        for operation in methods.values():
            _add_headers(operation["responses"])
    result["paths"] = dict(sorted(result["paths"].items()))
    return result


def _add_headers(responses: dict[str, Any]) -> None:
    """Every 401 says how to authenticate, every 503 when to come back."""
    for status, headers in _HEADERS.items():
        if status in responses:
            responses[status]["headers"] = headers
