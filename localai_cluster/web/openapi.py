"""The base of the OpenAPI document: refusals, media types, and what a serializer says beyond its fields.

Every room describes its own routes with this; `localai_cluster/api_document.py` puts them together.
"""

from typing import Any

import msgspec
from drf_spectacular.extensions import OpenApiSerializerExtension
from drf_spectacular.utils import OpenApiExample, OpenApiResponse
from rest_framework import serializers

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
    502: "A worker did not do it, or cannot be called; the message names nodes and reasons.",
    503: "Not possible right now; Retry-After says when to come back.",
    504: "The node's worker has not answered in time.",
}
_SAID = {
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


class RefusalSerializer(serializers.Serializer[Any]):
    """A refusal of a caller, nested envelope (§0.4)."""

    class Inner(serializers.Serializer[Any]):
        """What went wrong."""

        code = serializers.IntegerField()
        message = serializers.CharField()
        type = serializers.CharField(allow_blank=True)
        field = serializers.CharField(required=False, help_text="What is wrong, or has moved since.")

        class Meta:
            ref_name = "RefusalDetail"

    error = Inner()


class FlatRefusalSerializer(serializers.Serializer[Any]):
    """A refusal, flat envelope (§0.4)."""

    error = serializers.CharField()
    field = serializers.CharField(required=False, help_text="What is wrong.")
    code = serializers.CharField(required=False)
    meta_alternative = serializers.CharField(required=False, help_text="What to install in its place.")
    last_replicas = serializers.ListField(
        child=serializers.CharField(),
        required=False,
        help_text="Models whose last replica would stop; send them in `last_replicas` to confirm.",
    )


def refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """Responses in the nested envelope, and the 503 of a database that does not answer."""
    return {
        status: OpenApiResponse(RefusalSerializer, _MEANINGS[status], [_refusal(status)])
        for status in (*statuses, 503)
    }


def flat_refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """The same in the flat envelope; who may not ask at all gets the nested one on every route."""
    flat = {status: OpenApiResponse(FlatRefusalSerializer, _MEANINGS[status]) for status in (*statuses, 503)}
    return {**refusals(401, 403), **flat}


def _refusal(status: int) -> OpenApiExample:
    message, kind = _SAID[status]
    body = {"error": {"code": status, "message": message, "type": kind}}
    return OpenApiExample(f"refused {status}", body, response_only=True, status_codes=[str(status)])


class DescribedSerializer(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """Lets a serializer say what its fields alone do not: presence, and limits that a view checks."""

    target_class = "localai_cluster.web.fields.Described"
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> Operation:
        """The schema made from the fields, corrected by the serializer itself."""
        schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        described: Operation = self.target.described(schema)
        return described


def json_body(schema: Operation, example: Any = None) -> Operation:
    """A JSON media type with an optional example."""
    return {"application/json": {"schema": schema} | ({"example": example} if example is not None else {})}


def schema_of(body: type[msgspec.Struct]) -> Operation:
    """The schema of a raw route's body, in the dialect of OpenAPI 3.0."""
    _, components = msgspec.json.schema_components([body])
    made: Operation = components[body.__name__]
    properties = {name: _in_3_0(schema) for name, schema in made["properties"].items()}
    return {"type": "object", "required": made["required"], "properties": properties}


def _in_3_0(schema: Operation) -> Operation:
    """One property: null is no type of its own, and says nothing as a default."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != _NULL]
    kept = {name: value for name, value in schema.items() if name != "anyOf"}
    if kept.get("default", ...) is None:
        del kept["default"]
    if len(kinds) > 1:
        return {**kept, "oneOf": kinds}
    if not kinds:
        return kept
    kind = dict(kinds[0], nullable=True)
    if "enum" in kind:
        kind |= {"type": "string", "enum": [*kind["enum"], None]}
    return {**kind, **kept}


_NULL = {"type": "null"}
