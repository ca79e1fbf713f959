"""Building blocks of the OpenAPI document: error responses, media types, corrections by serializers.

Every package describes its own routes with them; `localai_cluster/api_document.py` merges the result.
drf-spectacular takes megabytes and imports Django's test client, so only its plain types are imported here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from drf_spectacular.utils import OpenApiExample, OpenApiResponse
from msgspec import UNSET
from rest_framework import serializers

from localai_cluster.web import wire
from localai_cluster.web.shapes import Named, example_of

Operation = dict[str, Any]
RawRoute = tuple[str, str, Operation]
View = TypeVar("View")
VIEW_DESCRIPTIONS: list[tuple[Any, Callable[[Any], dict[str, Any]]]] = []
"""Views, each with a function that returns arguments of `extend_schema` for the view's class.

`describe_views` applies them when the document is generated for the first time.
"""
OPERATION_NAMES: list[tuple[Any, dict[str, str]]] = []
"""View classes with the operation ids of their inherited methods, by HTTP method."""


def extend_schema(**description: Any) -> Callable[[View], View]:
    """Describe a view for the API document. The arguments are those of drf-spectacular's decorator."""
    return _describe_by(lambda view_class: description)


def describe(
    operation_id: str,
    summary: str,
    answer: Any = None,
    *,
    status: int = 200,
    meaning: str = "",
    others: Mapping[Any, Any] | None = None,
    refused: Sequence[int] = (),
    body: Any = None,
    parameters: Sequence[Any] = (),
    sent: Any = None,
    shown: Any = None,
    examples: Sequence[OpenApiExample] = (),
    tag: str = "",
) -> Callable[[View], View]:
    """Describe a view's method for the API document.

    `answer` is a shape, a schema or a serializer, `others` has the responses besides it, `refused` the
    statuses of errors; 401, 403 and 503 follow from the view. `sent` and `shown` are examples of the bodies;
    without `shown` and another example of a response, it is that of the shape. The view has the tag, unless
    the operation has another one.
    """

    def arguments(view_class: Any) -> dict[str, Any]:
        schema = answer.ref if isinstance(answer, Named) else answer
        example = UNSET if shown is None else shown
        if shown is None and isinstance(schema, dict) and not any(entry.response_only for entry in examples):
            example = example_of(schema)
        response = OpenApiResponse(schema, meaning) if meaning else schema
        responses = {} if answer is None and status == 200 else {status: response}
        return {
            "operation_id": operation_id,
            "summary": summary,
            "tags": [tag or view_class.tag],
            "parameters": list(parameters),
            "request": body,
            "responses": {**responses, **_view_refusals(view_class, refused), **(others or {})},
            "examples": [
                *([] if sent is None else [request_example(sent)]),
                *([] if example is UNSET else [response_example(example, str(status), "answer")]),
                *examples,
            ],
        }

    return _describe_by(arguments)


def _view_refusals(view_class: Any, statuses: Sequence[int]) -> dict[int, OpenApiResponse]:
    """Return the error responses of a view, in its envelope."""
    if getattr(view_class, "envelope", "nested") == "flat":
        return flat_refusals(*statuses)
    is_for_users = any(kind.__name__ == "IsUser" for kind in view_class.permission_classes)
    return refusals(401, *(() if is_for_users else (403,)), *statuses)


def _describe_by(arguments: Callable[[Any], dict[str, Any]]) -> Callable[[View], View]:
    def note(view: View) -> View:
        VIEW_DESCRIPTIONS.append((view, arguments))
        return view

    return note


def name_operations(**ids: str) -> Callable[[View], View]:
    """Set the operation ids of a view class's inherited methods, by HTTP method."""

    def note(view: View) -> View:
        OPERATION_NAMES.append((view, ids))
        return view

    return note


_MEANING_BY_STATUS = {
    400: "The request is not valid; the message names the field.",
    401: "A valid credential is required.",
    403: "This credential may not do that.",
    404: "There is no such thing.",
    409: "The present state does not allow that; the message says why.",
    413: "The request body is too large.",
    429: "Too many wrong tokens or secrets from this address; Retry-After says when to come back.",
    502: "A worker did not do it, or cannot be called; the message names nodes and reasons.",
    503: "Not possible right now; Retry-After says when to come back.",
    504: "The node's worker has not answered in time.",
}
_EXAMPLE_BY_STATUS = {
    400: ("invalid request body", "node_error"),
    401: ("invalid API key", "invalid_request_error"),
    403: ("admin access required", "authorization_error"),
    404: ("node not found", "node_error"),
    409: ("the node is pending", "node_error"),
    413: ("the request body is too large", "node_error"),
    429: ("too many wrong tokens from this address", "node_error"),
    502: ("gpu-a: minilm#0 may still run: node gpu-a is not responding", "node_error"),
    503: ("the database is unavailable", "node_error"),
    504: ("node gpu-a: its worker has not answered within 15 s", "node_error"),
}


class NodeRefusalSerializer(serializers.Serializer[Any]):
    """A node that cannot take a request for many nodes."""

    node_id = serializers.UUIDField()
    node_name = serializers.CharField()
    reason = serializers.CharField()

    class Meta:
        ref_name = "NodeRefusal"


def _node_refusals() -> NodeRefusalSerializer:
    help_text = "The nodes that cannot take it. Nothing has started; the same request without them may."
    return NodeRefusalSerializer(many=True, required=False, help_text=help_text)


class RefusalSerializer(serializers.Serializer[Any]):
    """A refused request, nested envelope (§0.4)."""

    class Inner(serializers.Serializer[Any]):
        """The error."""

        code = serializers.IntegerField()
        message = serializers.CharField()
        type = serializers.CharField(allow_blank=True)
        field = serializers.CharField(required=False, help_text="What is wrong, or has moved since.")
        refusals = _node_refusals()

        class Meta:
            ref_name = "RefusalDetail"

    error = Inner()


class FlatRefusalSerializer(serializers.Serializer[Any]):
    """A refusal, flat envelope (§0.4)."""

    error = serializers.CharField()
    field = serializers.CharField(required=False, help_text="What is wrong.")
    code = serializers.CharField(required=False)
    meta_alternative = serializers.CharField(required=False, help_text="What to install in its place.")
    revision = serializers.IntegerField(required=False, help_text="The revision that the subject has now.")
    line = serializers.IntegerField(required=False, help_text="Line of a text that is wrong, from 1.")
    column = serializers.IntegerField(required=False, help_text="Column in that line, from 1.")
    last_replicas = serializers.ListField(
        child=serializers.CharField(),
        required=False,
        help_text="Models whose last replica would stop; send them in `last_replicas` to confirm.",
    )
    refusals = _node_refusals()


def refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """Return the error responses of a route in the nested envelope. A 503 for the database is included."""
    return {
        status: OpenApiResponse(RefusalSerializer, _MEANING_BY_STATUS[status], [_refusal_example(status)])
        for status in (*statuses, 503)
    }


def flat_refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """Return the error responses of a route in the flat envelope. 401 and 403 are nested on every route."""
    flat = {
        status: OpenApiResponse(FlatRefusalSerializer, _MEANING_BY_STATUS[status])
        for status in (*statuses, 503)
    }
    return {**refusals(401, 403), **flat}


def _refusal_example(status: int) -> OpenApiExample:
    message, kind = _EXAMPLE_BY_STATUS[status]
    body = {"error": {"code": status, "message": message, "type": kind}}
    return response_example(body, str(status), f"refused {status}")


def request_example(value: Any, name: str = "request") -> OpenApiExample:
    """Return an example of a request body."""
    return OpenApiExample(name, value, request_only=True)


def response_example(value: Any, status: str = "200", name: str = "") -> OpenApiExample:
    """Return an example of a response body."""
    return OpenApiExample(name or f"answer {status}", value, response_only=True, status_codes=[status])


def json_body(schema: Operation, example: Any = None) -> Operation:
    """Return a JSON media type with this schema and an optional example."""
    return {"application/json": {"schema": schema} | ({"example": example} if example is not None else {})}


def schema_of(body: type[msgspec.Struct]) -> Operation:
    """Return the OpenAPI 3.0 schema of a raw route's request body, with its components inlined."""
    return _to_openapi_3_0(*_schema_components(body))


def response_schema_of(body: type[wire.ResponseBody]) -> Operation:
    """Return the schema of a raw route's response. Only fields that admit `UNSET` are optional."""
    schema, components = _schema_components(body)
    for component in (schema, *components.values()):
        component["required"] = [
            name
            for name, value in component["properties"].items()
            if name in component["required"] or "default" in value
        ]
        for value in component["properties"].values():
            value.pop("default", None)
    if body.has_other_fields:
        schema["additionalProperties"] = True
    return _to_openapi_3_0(schema, components)


def _schema_components(body: type[msgspec.Struct]) -> tuple[Operation, dict[str, Operation]]:
    (reference,), components = msgspec.json.schema_components([body])
    return components.pop(reference["$ref"].rpartition("/")[2]), components


def _to_openapi_3_0(schema: Operation, components: Mapping[str, Operation]) -> Operation:
    """Convert a part of a JSON schema to OpenAPI 3.0: inline references, replace the null type."""
    if "$ref" in schema:
        described = {name: value for name, value in schema.items() if name != "$ref"}
        return {**_to_openapi_3_0(components[schema["$ref"].rpartition("/")[2]], components), **described}
    base = _without_alternatives(schema, components)
    if "anyOf" not in schema:
        return base
    kinds = [_to_openapi_3_0(kind, components) for kind in schema["anyOf"] if kind != _NULL_SCHEMA]
    nullable = {"nullable": True} if _NULL_SCHEMA in schema["anyOf"] else {}
    if len(kinds) > 1:
        return {**nullable, **base, "oneOf": kinds}
    kind = {**kinds[0], **nullable}
    if nullable and "enum" in kind:
        kind["enum"] = [*kind["enum"], None]
    return {**kind, **base}


def _without_alternatives(schema: Operation, components: Mapping[str, Operation]) -> Operation:
    """Return a part of a schema without the keywords that OpenAPI 3.0 lacks, its inner parts converted."""
    result = {
        name: value for name, value in schema.items() if name not in ("anyOf", "discriminator", "title")
    }
    if result.get("default", ...) is None:
        del result["default"]
    if result.get("required") == []:
        del result["required"]
    for name in ("items", "additionalProperties"):
        if isinstance(result.get(name), dict):
            result[name] = _to_openapi_3_0(result[name], components)
    if "properties" in result:
        result["properties"] = {
            name: _to_openapi_3_0(value, components) for name, value in result["properties"].items()
        }
    return {"type": "string", **result} if "enum" in result else result


_NULL_SCHEMA = {"type": "null"}
