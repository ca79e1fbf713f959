"""OpenAPI descriptions of the routes in Anthropic's, OpenAI's Responses and Ollama's dialects."""

from dataclasses import dataclass
from typing import Any

import msgspec

from localai_cluster.web.openapi import Operation, schema_of
from nodes.dialects.anthropic import CountBody, MessagesBody
from nodes.dialects.models import ShowBody
from nodes.dialects.ollama import GenerateBody, OllamaChatBody
from nodes.dialects.openapi_text import COUNT, MAYBE_TEXT, TEXT, many, record, word
from nodes.dialects.responses import ResponsesBody
from nodes.dialects.retrieval import EmbedBody, OlderEmbedBody

_ANY: Operation = {"type": "object"}
_FLAG: Operation = {"type": "boolean"}
_NUMBERS = many({"type": "number"})
_SSE, _NDJSON = "text/event-stream", "application/x-ndjson"


def _one_of(*words: str) -> Operation:
    return {"type": "string", "enum": list(words)}


_ANTHROPIC_ERROR = record(type=word("error"), error=record(type=TEXT, message=TEXT))
_OLLAMA_ERROR = record(error=TEXT)
_MESSAGE = record(
    id=TEXT,
    type=word("message"),
    role=word("assistant"),
    model=TEXT,
    content=many(
        {
            "oneOf": [
                record(type=word("text"), text=TEXT),
                record(type=word("thinking"), thinking=TEXT, signature=TEXT),
                record(type=word("tool_use"), id=TEXT, name=TEXT, input=_ANY),
            ]
        }
    ),
    stop_reason=_one_of("end_turn", "max_tokens", "tool_use"),
    stop_sequence=MAYBE_TEXT,
    usage=record(
        "cache_read_input_tokens",
        input_tokens=COUNT,
        output_tokens=COUNT,
        cache_read_input_tokens={**COUNT, "description": "What the engine remembered, if it says so."},
    ),
)
_RESPONSE: Operation = {
    "type": "object",
    "description": "OpenAI's `response`, which also repeats what the request said.",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    "properties": {
        "id": TEXT,
        "object": word("response"),
        "created_at": COUNT,
        "status": _one_of("completed", "incomplete"),
        "model": TEXT,
        "output": many(_ANY),
        "usage": _ANY,
    },
    "additionalProperties": True,
}
_CALL = record(id=TEXT, function=record(index=COUNT, name=TEXT, arguments=_ANY))
_ENDED = {
    "model": TEXT,
    "created_at": TEXT,
    "done": _FLAG,
    "done_reason": _one_of("stop", "length"),
    **{
        name: {"type": "integer", "format": "int64"}
        for name in (
            *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
            *("eval_count", "eval_duration"),
        )
    },
    "logprobs": many(_ANY),
}
_CHATTED = record(
    "logprobs",
    message=record(
        *("thinking", "tool_calls"),
        role=word("assistant"),
        content=TEXT,
        thinking=TEXT,
        tool_calls=many(_CALL),
    ),
    **_ENDED,
)
_GENERATED = record("logprobs", "thinking", response=TEXT, thinking=TEXT, **_ENDED)
_DETAILS = record(
    parent_model=TEXT,
    format=TEXT,
    family=TEXT,
    families=many(TEXT),
    parameter_size=TEXT,
    quantization_level=TEXT,
)
_LISTED = {"name": TEXT, "model": TEXT, "size": COUNT, "digest": TEXT, "details": _DETAILS}


@dataclass(frozen=True)
class _Route:
    """One route; empty attributes are omitted from its description."""

    name: str
    summary: str
    answer: Operation
    error: Operation | None = None
    """Its error envelope; None means OpenAI's."""
    body: type[msgspec.Struct] | None = None
    description: str = ""
    stream: str = ""


_MESSAGES_STREAM = (
    "With `stream`, events from `message_start` to `message_stop`, and `ping` while the engine thinks. A"
    " failure after the first of them is an event `error`. `anthropic-version` is accepted and not looked at."
)
_RESPONSES_STREAM = (
    "With `stream`, events from `response.created` to `response.completed`. A failure after the first of them"
    " is `error`, then `response.failed`. Nothing is kept: `store` and earlier answers are refused."
)
_OLLAMA_STREAM = (
    "Streams unless `stream` is false: a line of JSON for each piece. A failure after the first is a line"
    " with `error`. `keep_alive` and options about loading are ignored."
)
_WITH_PREFIX = {
    "/messages": _Route(
        "create_message",
        "Answer a conversation (Anthropic)",
        _MESSAGE,
        _ANTHROPIC_ERROR,
        MessagesBody,
        _MESSAGES_STREAM,
        _SSE,
    ),
    "/messages/count_tokens": _Route(
        "count_message_tokens",
        "Count the tokens of a conversation (Anthropic)",
        record(input_tokens=COUNT),
        _ANTHROPIC_ERROR,
        CountBody,
        "Images are not counted.",
    ),
    "/responses": _Route(
        "create_response",
        "Answer a conversation (OpenAI's Responses)",
        _RESPONSE,
        None,
        ResponsesBody,
        _RESPONSES_STREAM,
        _SSE,
    ),
}
_CHAT = _Route(
    "ollama_chat",
    "Answer a conversation (Ollama)",
    _CHATTED,
    _OLLAMA_ERROR,
    OllamaChatBody,
    _OLLAMA_STREAM,
    _NDJSON,
)
_GENERATE = _Route(
    "ollama_generate",
    "Answer a prompt (Ollama)",
    _GENERATED,
    _OLLAMA_ERROR,
    GenerateBody,
    _OLLAMA_STREAM,
    _NDJSON,
)
_EMBEDDED = record(
    model=TEXT,
    embeddings=many(_NUMBERS),
    total_duration=COUNT,
    load_duration=COUNT,
    prompt_eval_count=COUNT,
)
_SHOWN = record(
    modelfile=TEXT,
    parameters=TEXT,
    template=TEXT,
    details=_DETAILS,
    model_info=_ANY,
    capabilities=many(TEXT),
    modified_at=TEXT,
)
_DEFINED = record(models=many(record(**_LISTED, modified_at=TEXT)))
_LOADED = record(models=many(record(**_LISTED, size_vram=COUNT, expires_at=TEXT)))
_OLLAMA = {
    "/api/chat": _CHAT,
    "/api/generate": _GENERATE,
    "/api/embed": _Route("ollama_embed", "Create embeddings (Ollama)", _EMBEDDED, _OLLAMA_ERROR, EmbedBody),
    "/api/embeddings": _Route(
        "ollama_embeddings",
        "Create one embedding (Ollama, older)",
        record(embedding=_NUMBERS),
        _OLLAMA_ERROR,
        OlderEmbedBody,
    ),
    "/api/show": _Route("ollama_show", "Show one model (Ollama)", _SHOWN, _OLLAMA_ERROR, ShowBody),
    "/api/tags": _Route(
        "ollama_tags",
        "List models (Ollama)",
        _DEFINED,
        _OLLAMA_ERROR,
        description="What is defined, loaded or not. Files are not measured: `size` is 0.",
    ),
    "/api/ps": _Route(
        "ollama_ps",
        "List loaded models (Ollama)",
        _LOADED,
        _OLLAMA_ERROR,
        description="`size` is what all replicas of a model were given.",
    ),
    "/api/version": _Route(
        "ollama_version", "Show the version of Ollama's API", record(version=TEXT), _OLLAMA_ERROR
    ),
}


def routes(
    security: list[dict[str, list[str]]], refusals: dict[str, Operation]
) -> dict[str, dict[str, Operation]]:
    """Return the operations of all these routes, by path and method."""
    operations = {}
    for path, route in _WITH_PREFIX.items():
        for prefix, suffix in (("/v1", ""), ("", "_without_prefix")):
            operations[prefix + path] = {"POST": _operation(route, suffix, security, refusals)}
    for path, route in _OLLAMA.items():
        operations[path] = {"POST" if route.body else "GET": _operation(route, "", security, refusals)}
    return operations


def _operation(
    route: _Route, suffix: str, security: list[dict[str, list[str]]], refusals: dict[str, Operation]
) -> Operation:
    content: Operation = {"application/json": {"schema": route.answer}}
    if route.stream:
        content[route.stream] = {"schema": TEXT}
    operation: dict[str, Any] = {
        "operationId": route.name + suffix,
        "tags": ["inference"],
        "summary": route.summary,
        "description": route.description,
        "security": security,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{status: _refusal(refusal, route.error) for status, refusal in refusals.items()},
        },
    }
    if route.body:
        body = {"application/json": {"schema": schema_of(route.body)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _refusal(refusal: Operation, envelope: Operation | None) -> Operation:
    if envelope is None:
        return refusal
    return {**refusal, "content": {"application/json": {"schema": envelope}}}
