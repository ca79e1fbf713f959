"""Assembly of the OpenAPI document: adds the routes that Django does not know.

Heartbeats, inference and websockets are raw ASGI applications. Their operations are written by hand, and
`add_raw_routes` merges them and the shapes of responses into the generated document. A test compares the
complete route table with the result.
"""

from copy import deepcopy
from typing import Any

from localai_cluster import system_health
from localai_cluster.web.openapi import Operation, RawRoute, json_body
from nodes.api import openapi as api
from nodes.dialects import openapi as inference
from nodes.live import shapes as live
from nodes.live import shapes as messages

_COME_BACK: Operation = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "required": True}}


_TOO_MANY_KEYS = "Too many wrong API keys from this address; Retry-After says when to come back."
_HEADERS: dict[str, Operation] = {
    "401": {"WWW-Authenticate": {"schema": {"type": "string", "enum": ["Bearer"]}, "required": True}},
    "429": _COME_BACK,
    "503": _COME_BACK,
}


def _component(serializer: str) -> Operation:
    return {"$ref": f"#/components/schemas/{serializer}"}


OPERATIONS_SOCKET: Operation = {
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
    "summary": "Check that the web process is alive",
    "security": [],
    "responses": {"200": {"description": "It does.", "content": json_body({"type": "object"})}},
}


READYZ: Operation = {
    "operationId": "readyz",
    "tags": ["health"],
    "summary": "Check that the web process is ready",
    "security": [],
    "responses": {
        "200": {"description": "Ready.", "content": json_body(_READINESS)},
        "503": {
            "description": "Not ready; the checks say what is missing.",
            "content": json_body(_READINESS),
        },
    },
}


METRICS: Operation = {
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
        **inference.error_answers(401, 403, 429, 503),
    },
}


RAW_ROUTES: list[RawRoute] = [
    ("GET", "/healthz", HEALTHZ),
    ("GET", "/readyz", READYZ),
    ("GET", "/metrics", METRICS),
    ("GET", "/ws/operations", OPERATIONS_SOCKET),
]


def raw_routes() -> list[RawRoute]:
    """Return every route that Django's resolver does not know, such as heartbeats and inference."""
    return RAW_ROUTES + live.ROUTES + api.ROUTES + inference.operations()


def add_raw_routes(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Merge the raw routes and messages into the document; a postprocessing hook of drf-spectacular."""
    schemas = result["components"]["schemas"]
    for component in (*api.COMPONENTS, *messages.COMPONENTS, *system_health.COMPONENTS):
        schemas.setdefault(component.name, deepcopy(component.schema))
    result["components"]["schemas"] = dict(sorted(schemas.items()))
    for method, path, operation in raw_routes():
        result["paths"].setdefault(path, {})[method.lower()] = operation
    for methods in result["paths"].values():
        for operation in methods.values():
            _add_wrong_keys(operation)
            _add_headers(operation["responses"])
    result["paths"] = dict(sorted(result["paths"].items()))
    return result


def _add_wrong_keys(operation: Operation) -> None:
    """Add the 429 of routes that take API keys, in the envelope of their 503."""
    responses = operation["responses"]
    if {"apiKey": []} in operation.get("security", ()) and "401" in responses and "429" not in responses:
        media = responses["503"]["content"]["application/json"]
        content: Operation = {"schema": media["schema"]}
        for example in media.get("examples", {}).values():
            content["examples"] = {"refused 429": {"value": _too_many(example["value"])}}
        responses["429"] = {"description": _TOO_MANY_KEYS, "content": {"application/json": content}}


def _too_many(refusal: Operation) -> Operation:
    """Convert the example of another error to one of the 429."""
    error, message = refusal["error"], "too many failed API keys from this address; try again later"
    return {"error": {**error, "code": 429, "message": message} if isinstance(error, dict) else message}


def _add_headers(responses: dict[str, Any]) -> None:
    """Add the headers of errors: WWW-Authenticate to 401, Retry-After to 429 and 503."""
    for status, headers in _HEADERS.items():
        if status in responses:
            responses[status]["headers"] = headers
