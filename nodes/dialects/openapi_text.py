"""OpenAPI descriptions of the routes that return text, tokens or documents."""

from typing import Any

from localai_cluster.web.openapi import Operation, schema_of
from nodes.dialects.openai_chat import ChatBody
from nodes.dialects.openai_completions import CompletionBody
from nodes.dialects.retrieval import RerankBody
from nodes.dialects.tokens import DetokenizeBody, TokenizeBody

TEXT: Operation = {"type": "string"}
MAYBE_TEXT: Operation = {"type": "string", "nullable": True}
COUNT: Operation = {"type": "integer"}
_ANYTHING: Operation = {"type": "object", "nullable": True}


def record(*absent: str, **properties: Operation) -> Operation:
    """Return the schema of an object; `absent` names its optional properties."""
    required = [name for name in properties if name not in absent]
    return {"type": "object", "required": required, "properties": properties}


def many(items: Operation) -> Operation:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def word(word: str) -> Operation:
    """Return the schema of a constant text."""
    return {"type": "string", "enum": [word]}


_USAGE = record(
    "prompt_tokens_details",
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details={
        **record(cached_tokens=COUNT),
        "description": "What of the prompt the engine remembered; only if it says so.",
    },
)
_FINISH: Operation = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
_TOOL_CALL = record(id=TEXT, type=word("function"), function=record(name=TEXT, arguments=TEXT))
_MESSAGE = record(
    "reasoning_content",
    "tool_calls",
    role=word("assistant"),
    content=MAYBE_TEXT,
    refusal=MAYBE_TEXT,
    reasoning_content=TEXT,
    tool_calls=many(_TOOL_CALL),
)
_CHAT = record(
    id={**TEXT, "description": "The request's id, as in X-Correlation-ID."},
    object=word("chat.completion"),
    created=COUNT,
    model=TEXT,
    choices=many(record(index=COUNT, message=_MESSAGE, logprobs=_ANYTHING, finish_reason=_FINISH)),
    usage=_USAGE,
)
_COMPLETION = record(
    id=TEXT,
    object=word("text_completion"),
    created=COUNT,
    model=TEXT,
    choices=many(record(index=COUNT, text=TEXT, logprobs=_ANYTHING, finish_reason=_FINISH)),
    usage=_USAGE,
)
_RANKED = record(
    model=TEXT,
    usage=record(total_tokens=COUNT, prompt_tokens=COUNT),
    results=many(
        record("document", index=COUNT, relevance_score={"type": "number"}, document=record(text=TEXT))
    ),
)
_STREAM = (
    "With `stream`, server-sent events: chunks, then `data: [DONE]`. What fails before the first of them is a"
    " refusal with its status; after that it is an event with `error`. Comments keep the connection alive."
)

# Path -> operation id, summary, description, request body, response, True if it can stream.
_ROUTES: dict[str, tuple[str, str, str, type[Any], Operation, bool]] = {
    "/chat/completions": ("create_chat_completion", "Answer a conversation", _STREAM, ChatBody, _CHAT, True),
    "/completions": ("create_completion", "Go on from a text", _STREAM, CompletionBody, _COMPLETION, True),
    "/tokenize": (
        "tokenize",
        "Divide a text into tokens",
        "By the model's own tokenizer.",
        TokenizeBody,
        record(tokens=many(COUNT)),
        False,
    ),
    "/detokenize": (
        "detokenize",
        "Make a text of tokens",
        "By the model's own tokenizer.",
        DetokenizeBody,
        record(content=TEXT),
        False,
    ),
    "/rerank": (
        "rerank",
        "Order documents by relevance",
        "The most relevant one first.",
        RerankBody,
        _RANKED,
        False,
    ),
}


def routes(
    security: list[dict[str, list[str]]], refusals: dict[str, Operation]
) -> dict[str, dict[str, Operation]]:
    """Return the operations of all these routes, with and without the `/v1` prefix, by path and method."""
    operations = {}
    for path, (name, summary, description, body, answer, can_stream) in _ROUTES.items():
        content: Operation = {"application/json": {"schema": answer}}
        if can_stream:
            content["text/event-stream"] = {"schema": TEXT}
        for prefix, suffix in (("/v1", ""), ("", "_without_prefix")):
            operation: Operation = {
                "operationId": name + suffix,
                "tags": ["inference"],
                "summary": summary,
                "description": description,
                "security": security,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema_of(body)}},
                },
                "responses": {"200": {"description": "The answer.", "content": content}, **refusals},
            }
            operations[prefix + path] = {"POST": operation}
    return operations
