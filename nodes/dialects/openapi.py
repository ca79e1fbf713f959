"""OpenAPI descriptions of the inference routes, included in the generated document."""

from localai_cluster.web.openapi import Operation, schema_of
from nodes.dialects import openapi_dialects, openapi_media, openapi_text
from nodes.dialects.retrieval import EmbeddingsBody

_SECURITY: list[dict[str, list[str]]] = [{"apiKey": []}, {"session": []}]
_LOADING: Operation = {
    "type": "object",
    "description": "Where the load stands, when the wait for it is over but the load goes on.",
    "properties": {
        "model": {"type": "string"},
        "state": {"type": "string", "enum": ["pending", "installing", "staging", "loading", "failed"]},
        "node": {"type": "string"},
        "progress": {"type": "number"},
        "bytes_sent": {"type": "integer", "format": "int64"},
        "total_bytes": {"type": "integer", "format": "int64"},
        "file_index": {"type": "integer"},
        "total_files": {"type": "integer"},
        "eta_seconds": {"type": "integer"},
    },
}
_ERROR: Operation = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "string", "nullable": True, "description": "The field it is about."},
                "code": {"type": "string"},
            },
        },
        "loading": _LOADING,
    },
}
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


def _json(schema: Operation) -> Operation:
    return {"application/json": {"schema": schema}}


def error_answers(*statuses: int) -> dict[str, Operation]:
    """Return the error responses for these statuses, in the envelope of inference."""
    return {str(status): {"description": _MEANINGS[status], "content": _json(_ERROR)} for status in statuses}


_EMBEDDINGS_ANSWER: Operation = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "model": {"type": "string"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "index", "embedding"],
                "properties": {
                    "object": {"type": "string", "enum": ["embedding"]},
                    "index": {"type": "integer"},
                    "embedding": {
                        "oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}],
                        "description": "Numbers, or base64 of little-endian float32.",
                    },
                },
            },
        },
        "usage": {
            "type": "object",
            "required": ["prompt_tokens", "total_tokens"],
            "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
        },
    },
}
_MODEL: Operation = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string", "enum": ["model"]},
        "created": {"type": "integer", "description": "When the definition's file was written."},
        "owned_by": {"type": "string"},
        "warnings": {
            "type": "array",
            "items": {"type": "string"},
            "description": "What of the model's definition is not followed; absent if all is.",
        },
    },
}
_MODELS_ANSWER: Operation = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"type": "string", "enum": ["list"]},
        "data": {
            "type": "array",
            "items": _MODEL,
        },
    },
}


def _embeddings(name: str) -> Operation:
    return {
        "operationId": name,
        "tags": ["inference"],
        "summary": "Create embeddings",
        "security": _SECURITY,
        "requestBody": {"required": True, "content": _json(schema_of(EmbeddingsBody))},
        "responses": {
            "200": {"description": "The vectors.", "content": _json(_EMBEDDINGS_ANSWER)},
            **error_answers(400, 401, 403, 404, 429, 500, 503),
        },
    }


def _models(name: str) -> Operation:
    return {
        "operationId": name,
        "tags": ["inference"],
        "summary": "List models",
        "security": _SECURITY,
        "responses": {
            "200": {"description": "The models.", "content": _json(_MODELS_ANSWER)},
            **error_answers(401, 403, 429, 500, 503),
        },
    }


_ONE_MODEL: Operation = {
    "operationId": "get_model",
    "tags": ["inference"],
    "summary": "Show one model",
    "security": _SECURITY,
    "parameters": [
        {
            "name": "model",
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": "The name, which may have a `/` in it, escaped or not.",
        }
    ],
    "responses": {
        "200": {"description": "The model.", "content": _json(_MODEL)},
        **error_answers(401, 403, 404, 429, 500, 503),
    },
}


_OF_TEXT = error_answers(400, 401, 403, 404, 413, 429, 500, 503)
ROUTES: dict[str, dict[str, Operation]] = {
    "/v1/embeddings": {"POST": _embeddings("create_embeddings")},
    "/embeddings": {"POST": _embeddings("create_embeddings_without_prefix")},
    "/v1/models": {"GET": _models("list_models")},
    "/v1/models/{model}": {"GET": _ONE_MODEL},
    "/models": {"GET": _models("list_models_without_prefix")},
    **openapi_text.routes(_SECURITY, _OF_TEXT),
    **openapi_dialects.routes(_SECURITY, _OF_TEXT),
    **openapi_media.routes(_SECURITY, _OF_TEXT),
}
