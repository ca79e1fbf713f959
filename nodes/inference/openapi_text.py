"""OpenAPI descriptions of what is answered with text, tokens or documents."""

from typing import Any

from localai_cluster.web.openapi import Operation, schema_of
from nodes.inference.openai_chat import ChatBody
from nodes.inference.openai_completions import CompletionBody
from nodes.inference.rerank import RerankBody
from nodes.inference.tokens import DetokenizeBody, TokenizeBody

_TEXT: Operation = {"type": "string"}
_MAYBE_TEXT: Operation = {"type": "string", "nullable": True}
_COUNT: Operation = {"type": "integer"}
_ANYTHING: Operation = {"type": "object", "nullable": True}


def _object(*absent: str, **properties: Operation) -> Operation:
    required = [name for name in properties if name not in absent]
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Operation) -> Operation:
    return {"type": "array", "items": items}


def _word(word: str) -> Operation:
    return {"type": "string", "enum": [word]}


_USAGE = _object(
    "prompt_tokens_details",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details={
        **_object(cached_tokens=_COUNT),
        "description": "What of the prompt the engine remembered; only if it says so.",
    },
)
_FINISH: Operation = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
_TOOL_CALL = _object(id=_TEXT, type=_word("function"), function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(
    "reasoning_content",
    "tool_calls",
    role=_word("assistant"),
    content=_MAYBE_TEXT,
    refusal=_MAYBE_TEXT,
    reasoning_content=_TEXT,
    tool_calls=_list(_TOOL_CALL),
)
_CHAT = _object(
    id={**_TEXT, "description": "The request's id, as in X-Correlation-ID."},
    object=_word("chat.completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(_object(index=_COUNT, message=_MESSAGE, logprobs=_ANYTHING, finish_reason=_FINISH)),
    usage=_USAGE,
)
_COMPLETION = _object(
    id=_TEXT,
    object=_word("text_completion"),
    created=_COUNT,
    model=_TEXT,
    choices=_list(_object(index=_COUNT, text=_TEXT, logprobs=_ANYTHING, finish_reason=_FINISH)),
    usage=_USAGE,
)
_RANKED = _object(
    model=_TEXT,
    usage=_object(total_tokens=_COUNT, prompt_tokens=_COUNT),
    results=_list(
        _object("document", index=_COUNT, relevance_score={"type": "number"}, document=_object(text=_TEXT))
    ),
)
_STREAM = (
    "With `stream`, server-sent events: chunks, then `data: [DONE]`. What fails before the first of them is a"
    " refusal with its status; after that it is an event with `error`. Comments keep the connection alive."
)

# Path -> operation id, summary, description, the body, the answer, whether it may be streamed.
_ROUTES: dict[str, tuple[str, str, str, type[Any], Operation, bool]] = {
    "/chat/completions": ("create_chat_completion", "Answer a conversation", _STREAM, ChatBody, _CHAT, True),
    "/completions": ("create_completion", "Go on from a text", _STREAM, CompletionBody, _COMPLETION, True),
    "/tokenize": (
        "tokenize",
        "Divide a text into tokens",
        "By the model's own tokenizer.",
        TokenizeBody,
        _object(tokens=_list(_COUNT)),
        False,
    ),
    "/detokenize": (
        "detokenize",
        "Make a text of tokens",
        "By the model's own tokenizer.",
        DetokenizeBody,
        _object(content=_TEXT),
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
    """Every route of these, with and without its prefix."""
    made = {}
    for path, (name, summary, description, body, answer, streams) in _ROUTES.items():
        content: Operation = {"application/json": {"schema": answer}}
        if streams:
            content["text/event-stream"] = {"schema": _TEXT}
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
            made[prefix + path] = {"POST": operation}
    return made
