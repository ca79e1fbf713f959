"""The OpenAPI document and its pages, with the routes that Django does not know.

Heartbeats, inference and websockets are raw ASGI applications. Their operations are written by hand, and
`add_raw_routes` merges them and the shapes of responses into the generated document. A test compares the
complete route table with the result. The first request for it imports this module and drf-spectacular.
"""

import secrets
import threading
from copy import deepcopy
from functools import cache
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpResponseBase, HttpResponseRedirect, JsonResponse
from django.templatetags.static import static
from drf_spectacular import utils
from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer2
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.views import SpectacularSwaggerView
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts.authentication import BEARER_CHALLENGE, IsUser
from localai_cluster.accounts.passwords import PasswordChangeRequired
from localai_cluster.web import wire
from localai_cluster.web.bodies import FORM_TYPE
from localai_cluster.web.envelopes import exception_handler
from localai_cluster.web.openapi import (
    OPERATION_NAMES,
    VIEW_DESCRIPTIONS,
    Operation,
    RawRoute,
    describe,
    extend_schema,
    json_body,
    response_schema_of,
    schema_of,
)
from localai_cluster.web.policy import CSP_HEADER, content_security_policy
from localai_cluster.web.rest import Described, Strict
from localai_cluster.web.shapes import COMPONENT_SCHEMAS, reference
from nodes.api.gallery import GALLERY
from nodes.api.heartbeats import HEARTBEAT
from nodes.api.registrations import RegistrationDescription
from nodes.dialects import audio
from nodes.dialects import routes as inference
from nodes.live import shapes as live

_GENERATION_LOCK = threading.Lock()
"""Lock for generating the document: the library fills its tables on first use, in one thread only."""


def document() -> dict[str, Any]:
    """Return the OpenAPI document. A process generates it once."""
    with _GENERATION_LOCK:
        return _generate()


@cache
def _generate() -> dict[str, Any]:
    generator: Any = SchemaGenerator  # untyped by its library
    generated: dict[str, Any] = generator().get_schema(request=None, public=True)
    return generated


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Security scheme of the admin key and users' API keys."""

    target_class = "localai_cluster.accounts.authentication.BearerAuthentication"
    name = "apiKey"
    description = "LOCALAI_API_KEY or a user's key (lac-…)."

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """Return the scheme of `Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": self.description}


class CookieScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Security scheme of a browser's session cookie."""

    target_class = "localai_cluster.accounts.authentication.CookieAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """Return the scheme of the session cookie."""
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}


class SignInScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """Security scheme of the session cookie on the routes for sign-out and change of password.

    These routes also accept a session whose generated password was not changed yet.
    """

    target_class = "localai_cluster.accounts.authentication.SignInAuthentication"
    name = "signedIn"


class PersonScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """Security scheme of the session of a person who signed in with a password; for their own keys."""

    target_class = "localai_cluster.accounts.api_keys.PersonAuthentication"
    name = "personSession"


class RememberingScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """Security scheme of a session cookie that stays valid for minutes while the database is away."""

    target_class = "localai_cluster.accounts.authentication.RememberingAuthentication"
    name = "recentSession"


class NodeScheme(BearerScheme):  # type: ignore[no-untyped-call]
    """Security scheme of a worker's own secret."""

    target_class = "nodes.api.worker_routes.NodeAuthentication"
    name = "nodeSecret"
    description = "The secret of the node in the URL."


class RegistrationScheme(BearerScheme):  # type: ignore[no-untyped-call]
    """Security scheme of the shared registration token."""

    target_class = "nodes.api.worker_routes.RegistrationAuthentication"
    name = "registrationToken"
    description = "Registration or join token."


class JoinScheme(BearerScheme):  # type: ignore[no-untyped-call]
    """Security scheme of a join token or the registration token."""

    target_class = "nodes.api.join.JoinAuthentication"
    name = "joinToken"
    description = "Join token or registration token."


class DescribedSerializer(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """Extension that adds what fields and serializers declare: limits of a view, required fields."""

    target_class = "rest_framework.serializers.Serializer"
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> Operation:
        """Return the schema of the fields after fields and serializer have corrected it."""
        schema: Operation = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        for name, field in self.target.fields.items():
            if isinstance(field, Strict):
                schema["properties"][name] |= field.schema
        return self.target.described(schema) if isinstance(self.target, Described) else schema


class SchemaView(APIView):
    """`/api/schema`: the OpenAPI document as JSON.

    Without the library's own view, whose `lang` and `version` parameters end in headers and settings.
    """

    permission_classes = [IsUser]
    renderer_classes = [OpenApiJsonRenderer2]

    @describe(
        "schema",
        "Download the OpenAPI document",
        OpenApiTypes.OBJECT,
        meaning="This document.",
        tag="documents",
    )
    def get(self, request: Request) -> Response:
        """This document."""
        return Response(document())


class DocsView(SpectacularSwaggerView):
    """`/api/docs`: the interactive pages."""

    permission_classes = [IsUser]
    template_name = "docs.html"

    @extend_schema(exclude=True)
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """The library's viewer in the product's own page; inline scripts carry the nonce of this answer."""
        library: Any = super()  # untyped
        answer: Response = library.get(request, *args, **kwargs)
        nonce = secrets.token_urlsafe(16)
        answer.data |= {"nonce": nonce, "css_href": static("docs.css"), "favicon_href": static("favicon.svg")}
        answer[CSP_HEADER] = content_security_policy(scripts=nonce, styles=nonce)
        del answer["Cross-Origin-Opener-Policy"]  # it opens no window of others
        return answer

    def handle_exception(self, exc: Exception) -> Any:
        """Redirect browsers to the sign-in, or to the change of a generated password; else refuse."""
        if "text/html" in self.request.headers.get("accept", "") and (first := _redirect_target(exc)):
            return HttpResponseRedirect(f"{first}?{urlencode({'next': self.request.get_full_path()})}")
        refusal = exception_handler(exc, {"view": self})
        return _render_as_json(refusal) if refusal is not None else super().handle_exception(exc)


def _redirect_target(exc: Exception) -> str:
    if isinstance(exc, PasswordChangeRequired):
        return settings.PASSWORD_URL
    return settings.LOGIN_URL if isinstance(exc, exceptions.NotAuthenticated) else ""


def _render_as_json(refusal: Response) -> HttpResponseBase:
    answer = JsonResponse(refusal.data, status=refusal.status_code)
    if refusal.status_code == 401:
        answer["WWW-Authenticate"] = BEARER_CHALLENGE
    return answer


_RETRY_AFTER_HEADER: Operation = {
    "Retry-After": {"schema": {"type": "integer", "minimum": 1}, "required": True}
}


_TOO_MANY_KEYS_TEXT = "Too many wrong API keys from this address; Retry-After says when to come back."
_HEADERS_BY_STATUS: dict[str, Operation] = {
    "401": {"WWW-Authenticate": {"schema": {"type": "string", "enum": ["Bearer"]}, "required": True}},
    "429": _RETRY_AFTER_HEADER,
    "503": _RETRY_AFTER_HEADER,
}


OPERATIONS_SOCKET_OPERATION: Operation = {
    "operationId": "ws_operations",
    "tags": ["operations"],
    "summary": "Subscribe to operations (WebSocket)",
    "description": (
        'The first message is `{"type":"snapshot","seq":N,"operations":[…]}`; every change follows as '
        '`{"type":"delta","seq":N,"operation":{…}}`, without gaps. With `"partial":true` its `nodes` '
        "has only the parts that changed, the others are as they were. With `?since=N` only what changed"
        " after N is sent. Admins only; the handshake of anybody else is refused."
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
            "content": json_body(reference("Refusal")),
        },
    },
}


_DEFAULT_SECURITY: list[dict[str, list[str]]] = [{"apiKey": []}, {"session": []}]
_MEANING_BY_STATUS = {
    400: "The request is not valid; `param` names the field.",
    401: "A valid API key is required, or the session of a signed-in browser.",
    403: "Of a session: no CSRF token, another site asks, or the password has to be changed first. Of a"
    " route that changes models: the caller is no administrator.",
    404: "There is no such model, or no such stored response.",
    409: "The present state does not allow that; the message says why.",
    413: "The request body is too large.",
    429: "Too many wrong API keys from this address; Retry-After says when to come back.",
    500: "An error inside the cluster; its log has the cause under the request id.",
    501: "The cluster has no such function.",
    502: "A source of models cannot be read; the message has its own words.",
    503: "Not possible right now; Retry-After says when to come back.",
}
_PARAMETER_DESCRIPTIONS = {
    "model": "The name, which may have a `/` in it, escaped or not.",
    "response_id": "The id of a response, such as `resp_…`.",
    "digest": "`sha256:` and the hash of a file.",
}
"""Descriptions of path parameters, by parameter name."""
_BYTES_SCHEMA: Operation = {"type": "string", "format": "binary"}


def error_answers(*statuses: int, body: type[wire.ResponseBody] = wire.ErrorBody) -> dict[str, Operation]:
    """Return the error responses for these statuses; `body` is the schema of the dialect's envelope."""
    content = json_body(response_schema_of(body))
    return {
        str(status): {"description": _MEANING_BY_STATUS[status], "content": content} for status in statuses
    }


def inference_operations() -> list[tuple[str, str, Operation]]:
    """Return the method, path and OpenAPI operation of every inference route."""
    return [
        (route.method, path, _inference_operation(path, route))
        for path, main in inference.ROUTES.items()
        for route in (main, *main.other_methods)
    ]


def _inference_operation(path: str, route: inference.Route) -> Operation:
    has_other_path = f"/v1{path}" in inference.ROUTES
    content: Operation = {}
    if route.response is not None:
        content |= json_body(response_schema_of(route.response))
    for kind in route.other_kinds:
        content[kind] = {"schema": {"type": "string"} if route.response is not None else _BYTES_SCHEMA}
    operation: Operation = {
        "operationId": route.name + ("_without_prefix" if has_other_path else ""),
        "tags": ["inference"],
        "summary": route.summary,
        "security": _DEFAULT_SECURITY,
        "responses": {
            "200": {"description": route.response_meaning, "content": content},
            **error_answers(*route.errors, body=route.envelope.body),
        },
    }
    if route.description:
        operation["description"] = route.description
    for name, meaning in _PARAMETER_DESCRIPTIONS.items():
        if f"{{{name}}}" in path:
            required = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [required | {"description": meaning}]
    if route.body is not None:
        schema = schema_of(route.body)
        body = {FORM_TYPE: {"schema": _form_schema(schema)}} if route.has_form else json_body(schema)
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _form_schema(schema: Operation) -> Operation:
    """Return the schema of a form with a file. Clients append `[]` to the name of a repeated field."""
    properties = dict(schema["properties"])
    properties[audio.REPEATABLE_FIELD + "[]"] = properties.pop(audio.REPEATABLE_FIELD)
    return {**schema, "required": ["file", "model"], "properties": {"file": _BYTES_SCHEMA, **properties}}


_CHECKS_SCHEMA = {"type": "object", "additionalProperties": {"type": "string"}}


_READINESS_SCHEMA = {
    "type": "object",
    "required": ["status", "checks"],
    "properties": {"status": {"type": "string", "enum": ["ready", "not ready"]}, "checks": _CHECKS_SCHEMA},
}


HEALTHZ_OPERATION: Operation = {
    "operationId": "healthz",
    "tags": ["health"],
    "summary": "Check that the web process is alive",
    "security": [],
    "responses": {"200": {"description": "It does.", "content": json_body({"type": "object"})}},
}


READYZ_OPERATION: Operation = {
    "operationId": "readyz",
    "tags": ["health"],
    "summary": "Check that the web process is ready",
    "security": [],
    "responses": {
        "200": {"description": "Ready.", "content": json_body(_READINESS_SCHEMA)},
        "503": {
            "description": "Not ready; the checks say what is missing.",
            "content": json_body(_READINESS_SCHEMA),
        },
    },
}


METRICS_OPERATION: Operation = {
    "operationId": "metrics",
    "tags": ["health"],
    "summary": "Read the figures for Prometheus",
    "description": (
        "What this web process has counted, and figures of the whole cluster (docs/metrics.md). The bearer is"
        " LOCALAI_METRICS_TOKEN or an admin's API key."
    ),
    "security": [{"apiKey": []}],
    "responses": {
        "200": {
            "description": "The figures, in the text format of Prometheus 0.0.4.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **error_answers(401, 403, 429, 503),
    },
}


NODE_METRICS_OPERATION: Operation = METRICS_OPERATION | {
    "operationId": "metrics_nodes",
    "summary": "Read the figures of single nodes and GPUs for Prometheus",
    "description": "Of all web processes alike: scrape one of them. The bearer is that of `/metrics`.",
}


RAW_ROUTES: list[RawRoute] = [
    ("GET", "/healthz", HEALTHZ_OPERATION),
    ("GET", "/readyz", READYZ_OPERATION),
    ("GET", "/metrics", METRICS_OPERATION),
    ("GET", "/metrics/nodes", NODE_METRICS_OPERATION),
    ("GET", "/ws/operations", OPERATIONS_SOCKET_OPERATION),
    ("POST", "/api/node/{node_id}/heartbeat", HEARTBEAT),
    ("GET", "/api/node/{node_id}/gallery/{file}", GALLERY),
]


ViewEndpoint = tuple[str, str, str, Any]


def describe_views(endpoints: list[ViewEndpoint]) -> list[ViewEndpoint]:
    """Apply the descriptions that views have registered; a preprocessing hook of drf-spectacular.

    Also add the route of the document itself, which imports this module only when it is requested, and the
    raw route for registrations, whose body is a serializer.
    """
    extend: Any = utils  # untyped
    all_endpoints = [
        *endpoints,
        ("/api/schema", "/api/schema", "GET", SchemaView.as_view()),
        ("/api/node/register", "/api/node/register", "POST", RegistrationDescription.as_view()),
    ]
    classes = {
        getattr(callback.cls, method.lower()): callback.cls for _, _, method, callback in all_endpoints
    }
    while VIEW_DESCRIPTIONS:
        view, arguments = VIEW_DESCRIPTIONS.pop(0)
        extend.extend_schema(**arguments(classes.get(view)))(view)
    while OPERATION_NAMES:
        view, ids = OPERATION_NAMES.pop(0)
        extend.extend_schema_view(
            **{name: extend.extend_schema(operation_id=id) for name, id in ids.items()}
        )(view)
    return all_endpoints


def add_raw_routes(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Merge the raw routes and messages into the document; a postprocessing hook of drf-spectacular."""
    schemas = result["components"]["schemas"]
    for name, schema in COMPONENT_SCHEMAS.items():
        schemas.setdefault(name, deepcopy(schema))
    result["components"]["schemas"] = dict(sorted(schemas.items()))
    for method, path, operation in RAW_ROUTES + live.ROUTES + inference_operations():
        result["paths"].setdefault(path, {})[method.lower()] = operation
    for methods in result["paths"].values():
        for operation in methods.values():
            _add_wrong_key_response(operation)
            _add_error_headers(operation["responses"])
    result["paths"] = dict(sorted(result["paths"].items()))
    return result


def _add_wrong_key_response(operation: Operation) -> None:
    """Add the 429 of routes that accept API keys, in the envelope of the route's 503."""
    responses = operation["responses"]
    if {"apiKey": []} in operation.get("security", ()) and "401" in responses and "429" not in responses:
        media = responses["503"]["content"]["application/json"]
        content: Operation = {"schema": media["schema"]}
        for example in media.get("examples", {}).values():
            content["examples"] = {"refused 429": {"value": _too_many_example(example["value"])}}
        responses["429"] = {"description": _TOO_MANY_KEYS_TEXT, "content": {"application/json": content}}


def _too_many_example(refusal: Operation) -> Operation:
    """Return the example of another error, changed to the error 429."""
    error, message = refusal["error"], "too many failed API keys from this address; try again later"
    return {"error": {**error, "code": 429, "message": message} if isinstance(error, dict) else message}


def _add_error_headers(responses: dict[str, Any]) -> None:
    """Add the headers of error responses: WWW-Authenticate to 401, Retry-After to 429 and 503."""
    for status, headers in _HEADERS_BY_STATUS.items():
        if status in responses:
            responses[status]["headers"] = headers
