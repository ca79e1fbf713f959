"""Anthropic's Messages, `POST /v1/messages`: requests, complete responses, stream events, error bodies. Pure.

A conversation is a list of blocks (`anthropic_input.py`); a response is a list of numbered blocks. The first
event has the prompt's token count if the engine has already reported the count, otherwise 0; the last event
but one has the figures of the whole response.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects import blocks, openai_common
from nodes.dialects.anthropic_input import (
    Messages,
    System,
    collect_images,
    convert_messages,
    drop_unknown_blocks,
)
from nodes.dialects.blocks import Block, BlockChange, BlockKind, Blocks, BlockStep
from nodes.dialects.openai_common import MAX_STOP_WORDS, Fraction, PositiveInt, Text, TopK
from nodes.dialects.openai_messages import (
    MAX_TOOLS,
    Choice,
    ForcedTool,
    Function,
    FunctionName,
    Tool,
    check_tools,
    encode_schema,
)
from nodes.gateway.generation import (
    Conversation,
    Dialect,
    Events,
    Generation,
    Head,
    Sampling,
    TextDelta,
    Usage,
    last_delta,
    total_usage,
)

_CLIENT_FIELD_NAMES = {"response_format": "output_config"}
"""Names of Anthropic's fields, by the names of the equal fields in OpenAI's chat."""


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that the client runs; `input_schema` is the JSON schema of its arguments."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """The client's choice of a tool: any, none, or a named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The requested format of the answer: JSON that matches `schema`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """The requested format of the answer; `effort` is ignored."""

    format: OutputFormat | None = None


class TextContent(ResponseBody, tag_field="type", tag="text"):
    text: str


class ThinkingContent(ResponseBody, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class CallContent(ResponseBody, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextContent | ThinkingContent | CallContent


class MessageUsage(ResponseBody):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: (
        Annotated[int, msgspec.Meta(description="What the engine remembered, if it says so.")] | UnsetType
    ) = UNSET


class MessageResponse(ResponseBody, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: Annotated[
        str,
        msgspec.Meta(extra_json_schema={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}),
    ]
    stop_sequence: str | None = None
    usage: MessageUsage


class ErrorDetail(ResponseBody):
    type: str
    message: str


class AnthropicErrorBody(ResponseBody, kw_only=True):
    type: Literal["error"] = "error"
    error: ErrorDetail


class CountBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request that counts the tokens of a conversation."""

    model: Text
    messages: Messages
    system: System | None = None
    tools: (
        Annotated[
            list[dict[str, Any]],
            msgspec.Meta(max_length=MAX_TOOLS, description="The client's own; Anthropic's are left out."),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None

    @property
    def conversation(self) -> Conversation:
        """Return the conversation for the engine. Raise InvalidInput with the name of the wrong field."""
        tools, choice = list(_client_tools(self.tools or ())), self.tool_choice
        tools_json, choice_json = check_tools(tools, _convert_tool_choice(choice), "input_schema")
        is_single_call = choice is not None and choice.disable_parallel_tool_use
        return Conversation(
            messages=tuple(convert_messages(self.system, self.messages)),
            tools=tools_json,
            tool_choice=choice_json,
            parallel_tool_calls=False if tools_json and is_single_call else None,
            images=collect_images(self.messages),
        )


class MessagesBody(CountBody, kw_only=True, frozen=True):
    """The body of a request for a message. Other fields of Anthropic's API are ignored or refused by name."""

    max_tokens: PositiveInt
    stream: bool | None = None
    stop_sequences: Annotated[list[Text], msgspec.Meta(max_length=MAX_STOP_WORDS)] | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    output_config: OutputConfig | None = None


UNSUPPORTED_FIELDS = {
    "container": "no engine here runs code",
    "mcp_servers": "the cluster calls no other server",
}


def parse_request(fields: Mapping[str, Any]) -> Generation:
    """Parse the body of a request for a message; raise InvalidInput for the first wrong field."""
    openai_common.refuse_fields(fields, UNSUPPORTED_FIELDS)
    body = wire.parse_struct(drop_unknown_blocks(fields), MessagesBody)
    return Generation(
        model=body.model,
        prompts=(body.conversation,),
        sampling=Sampling(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=openai_common.to_top_k(body.top_k),
            stop=tuple(body.stop_sequences or ()),
            grammar=_output_schema_json(body.output_config),
        ),
        stream=bool(body.stream),
        client_field_names=_CLIENT_FIELD_NAMES,
    )


def _client_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[Tool]:
    """Yield the client's own tools; skip Anthropic's tools, which the cluster cannot run."""
    for number, fields in enumerate(tools):
        if fields.get("type") in (None, "custom"):
            tool = wire.parse_part(fields, ClientTool, f"tools[{number}]")
            yield Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _convert_tool_choice(choice: ToolChoice | None) -> Choice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidInput("tool_choice.name: the tool to call", field="tool_choice")
        return ForcedTool(FunctionName(choice.name))
    return "required" if choice.type == "any" else choice.type


def _output_schema_json(config: OutputConfig | None) -> str:
    if config is None or config.format is None:
        return ""
    return encode_schema(config.format.schema, "output_config.format.schema")


_STOP_REASON_BY_FINISH = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's stop reasons by the finish reason of a choice; the default is `end_turn`."""
_ERROR_TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types by HTTP status; every other status is an `api_error`."""


def _error_envelope(error: ClusterError) -> AnthropicErrorBody:
    """Return the error envelope. The envelope has no field name, so the message contains it."""
    kind = _ERROR_TYPE_BY_STATUS.get(error.status, "api_error")
    return AnthropicErrorBody(error=ErrorDetail(kind, wire.message_with_field(error)))


def render_error(error: ClusterError) -> Answer:
    """Return the error response in Anthropic's envelope."""
    return wire.json_answer(_error_envelope(error), error.status, wire.error_headers(error))


def render_response(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the body of a complete response."""
    content = [_render_block(head, block, block.content) for block in blocks.collect_blocks(deltas)]
    last = last_delta(deltas)
    message = _empty_message(head, total_usage(deltas, 1)) | {"content": content} | _render_end(last)
    return msgspec.json.encode(MessageResponse(**message))


def _empty_message(head: Head, usage: Usage) -> dict[str, Any]:
    """Return the fields of a message without content, with which a stream begins."""
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.generation.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _render_usage(usage),
    }


def _render_end(last: TextDelta) -> dict[str, Any]:
    """Return the fields `stop_reason` and `stop_sequence` of a complete message."""
    reason = "stop_sequence" if last.stop_word else _STOP_REASON_BY_FINISH.get(last.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": last.stop_word or None}


def _render_usage(usage: Usage) -> MessageUsage:
    """Return the usage in Anthropic's form.

    Cached tokens are excluded from the prompt tokens, and present only if the engine reported cached tokens.
    """
    return MessageUsage(
        usage.prompt - (usage.cached or 0), usage.completion, UNSET if usage.cached is None else usage.cached
    )


_CONTENT_FIELD_BY_KIND = {
    BlockKind.THOUGHT: "thinking",
    BlockKind.TEXT: "text",
    BlockKind.CALL: "partial_json",
}
"""Field of a stream event that holds the added text, by the kind of block."""
_DELTA_TYPE_BY_KIND = {
    BlockKind.THOUGHT: "thinking_delta",
    BlockKind.TEXT: "text_delta",
    BlockKind.CALL: "input_json_delta",
}
"""Type of the stream event's delta, by the kind of block."""


def _render_block(head: Head, block: Block, content: str) -> OutputBlock:
    """Return a block of a message with `content`. A stream sends the block with "" first."""
    if block.kind is BlockKind.THOUGHT:
        return ThinkingContent(content)
    if block.kind is BlockKind.TEXT:
        return TextContent(content)
    call = block.call
    identity = call.id or f"toolu_{head.call_key}_{call.index}"
    return CallContent(identity, call.name, blocks.parse_arguments(content))


def _render_event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **content}))


class MessageEvents(Events):
    """Renders one streamed message as Anthropic's server-sent events."""

    keep_alive = _render_event("ping")
    done = _render_event("message_stop")

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._has_started = False

    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the encoded events for these deltas."""
        return b"".join(event for delta in deltas for event in self._render_delta(delta))

    def _render_delta(self, delta: TextDelta) -> list[bytes]:
        events = []
        if not self._has_started:
            self._has_started = True
            message = _empty_message(self._head, Usage(prompt=delta.prompt_tokens))
            events.append(_render_event("message_start", message=message))
        events.extend(self._render_step(step) for step in self._blocks.steps(delta))
        if delta.finish:
            usage = _render_usage(total_usage([delta], 1))
            events.append(_render_event("message_delta", delta=_render_end(delta), usage=usage))
        return events

    def _render_step(self, step: BlockStep) -> bytes:
        index, kind = step.block.number, step.block.kind
        if step.change is BlockChange.OPENED:
            return _render_event(
                "content_block_start", index=index, content_block=_render_block(self._head, step.block, "")
            )
        if step.change is BlockChange.CLOSED:
            return _render_event("content_block_stop", index=index)
        delta = {"type": _DELTA_TYPE_BY_KIND[kind], _CONTENT_FIELD_BY_KIND[kind]: step.text}
        return _render_event("content_block_delta", index=index, delta=delta)

    def render_failure(self, error: ClusterError, /) -> bytes:
        """Return the event that ends a stream after an error."""
        return b"event: error\ndata: " + wire.encode(_error_envelope(error)) + b"\n\n"


DIALECT = Dialect(parse_request, MessageEvents, render_response)
