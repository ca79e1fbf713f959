"""OpenAPI operations of the inference routes, included in the generated document."""

from localai_cluster.web import wire
from localai_cluster.web.bodies import FORM_TYPE
from localai_cluster.web.openapi import Operation, json_body, response_schema_of, schema_of
from nodes.dialects.audio_transcriptions import MANY
from nodes.dialects.routes import ROUTES, Route

_SECURITY: list[dict[str, list[str]]] = [{"apiKey": []}, {"session": []}]
_MEANINGS = {
    400: "The request is not valid; `param` names the field.",
    401: "A valid API key is required, or the session of a signed-in browser.",
    403: "Of a session: no CSRF token, another site asks, or the password has to be changed first.",
    404: "No model of that name is defined.",
    413: "The request body is too large.",
    429: "Too many wrong API keys from this address; Retry-After says when to come back.",
    500: "An error inside the cluster; its log has the cause under the request id.",
    503: "Not possible right now; Retry-After says when to come back.",
}
_MODEL_PARAMETER: Operation = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "The name, which may have a `/` in it, escaped or not.",
}
_DIGEST_PARAMETER: Operation = {
    "name": "digest",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "`sha256:` and the hash of a file.",
}
_BYTES: Operation = {"type": "string", "format": "binary"}


def error_answers(*statuses: int, body: type[wire.ResponseBody] = wire.ErrorBody) -> dict[str, Operation]:
    """Return the error responses for these statuses, in the envelope of a dialect."""
    content = json_body(response_schema_of(body))
    return {str(status): {"description": _MEANINGS[status], "content": content} for status in statuses}


def operations() -> list[tuple[str, str, Operation]]:
    """Return method, path and operation of every inference route."""
    return [(route.method, path, _operation(path, route)) for path, route in ROUTES.items()]


def _operation(path: str, route: Route) -> Operation:
    has_other_path = f"/v1{path}" in ROUTES
    content: Operation = {}
    if route.response is not None:
        content |= json_body(response_schema_of(route.response))
    for kind in route.other_kinds:
        content[kind] = {"schema": {"type": "string"} if route.response is not None else _BYTES}
    operation: Operation = {
        "operationId": route.name + ("_without_prefix" if has_other_path else ""),
        "tags": ["inference"],
        "summary": route.summary,
        "security": _SECURITY,
        "responses": {
            "200": {"description": route.meaning, "content": content},
            **error_answers(*route.errors, body=route.envelope.body),
        },
    }
    if route.description:
        operation["description"] = route.description
    if "{model}" in path:
        operation["parameters"] = [_MODEL_PARAMETER]
    elif "{digest}" in path:
        operation["parameters"] = [_DIGEST_PARAMETER]
    if route.body is not None:
        schema = schema_of(route.body)
        body = {FORM_TYPE: {"schema": _form(schema)}} if route.form else json_body(schema)
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _form(schema: Operation) -> Operation:
    """Return the schema of a form with a file; clients append `[]` to the name of a repeated field."""
    properties = dict(schema["properties"])
    properties[MANY + "[]"] = properties.pop(MANY)
    return {**schema, "required": ["file", "model"], "properties": {"file": _BYTES, **properties}}
