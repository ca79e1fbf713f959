"""OpenAI's Responses, `POST /v1/responses`: requests, complete responses, stream events. Pure.

A conversation is a list of items of several kinds (`responses_input.py`). If the cluster stores no responses
(`stored_responses.py`), the response says `store: false`, and a request that refers to an earlier response is
refused.

Each event has a sequence number and its type twice, as the event's name and in its data.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import ResponseBody, field_error
from nodes.dialects import blocks, openai_common
from nodes.dialects.blocks import Block, BlockChange, BlockKind, Blocks, BlockStep
from nodes.dialects.openai_common import Fraction, PositiveInt, Text
from nodes.dialects.openai_messages import (
    MAX_TOOLS,
    Name,
    check_tools,
    encode_json,
    encode_schema,
)
from nodes.dialects.responses_input import (
    NO_STORED_ITEMS,
    FunctionTools,
    Items,
    RequestedChoice,
    StoredItems,
    collect_images,
    convert_items,
    read_items,
    strip_unknown_items,
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

_CLIENT_FIELD_NAMES = {"messages": "input", "response_format": "text", "logprobs": "include"}
"""Field names of the Responses API by the name of the field with the same meaning in the chat API."""
LOGPROBS_INCLUDE = "message.output_text.logprobs"
"""Value of `include` that requests log probabilities."""


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The requested format of the answer: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """The requested format of the answer's text; `verbosity` is ignored."""

    format: TextFormat | None = None


class ResponseObject(ResponseBody, kw_only=True):
    """OpenAI's object `response`, which also repeats parameters of the request."""

    has_other_fields: ClassVar[bool] = True
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["completed", "incomplete"]})]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ResponsesBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request for a response. Other fields of OpenAI's API are ignored or refused by name."""

    model: Text
    input: str | Items
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    tools: (
        Annotated[
            list[dict[str, Any]],
            msgspec.Meta(max_length=MAX_TOOLS, description="Functions; others are left out."),
        ]
        | None
    ) = None
    tool_choice: RequestedChoice = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None


UNSUPPORTED_FIELDS = {
    "background": "no answer is kept, so it must be waited for",
    "conversation": "no conversations are kept; send the whole one as `input`",
    "prompt": "no prompts are kept; send it as `instructions` and `input`",
    "moderation": "no engine here judges texts",
}
UNSUPPORTED_WITHOUT_STORE = {
    "previous_response_id": "nothing is kept; send the whole conversation as `input`"
}


def parse_request(fields: Mapping[str, Any], earlier: StoredItems = NO_STORED_ITEMS) -> Generation:
    """Parse the body of a request for a response. Raise InvalidInput with the name of the first wrong field.

    `earlier` has the stored items to which the request refers.
    """
    openai_common.refuse_fields(
        fields, UNSUPPORTED_FIELDS if earlier.has_store else UNSUPPORTED_FIELDS | UNSUPPORTED_WITHOUT_STORE
    )
    known_fields = {**fields, "input": strip_unknown_items(fields.get("input"))}
    body = wire.parse_struct(known_fields, ResponsesBody)
    tools = FunctionTools(body.tools or ())
    functions, wanted_tool = tools.choose(body.tool_choice)
    tools_json, choice = check_tools(functions, wanted_tool, "parameters")
    entries = read_items(body.input, earlier)
    messages = tuple(convert_items(body.instructions, entries, tools.names_in_request))
    if not entries:
        raise field_error("input", "has nothing that a model can read")
    return Generation(
        model=body.model,
        prompts=(
            Conversation(
                messages=messages,
                tools=tools_json,
                tool_choice=choice,
                parallel_tool_calls=body.parallel_tool_calls if tools_json else None,
                images=collect_images(entries),
            ),
        ),
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            grammar=_response_schema_json(body.text),
            logprobs=LOGPROBS_INCLUDE in (body.include or ()) or bool(body.top_logprobs),
            top_logprobs=body.top_logprobs or 0,
        ),
        stream=bool(body.stream),
        client_field_names=_CLIENT_FIELD_NAMES,
        echo=_echoed_fields(body) | {"store": earlier.has_store and body.store is not False},
        tool_namespaces=tools.namespaces,
    )


def _response_schema_json(text: TextConfig | None) -> str:
    """Return the JSON schema that the response must match, "" if any text is allowed."""
    if text is None or text.format is None or text.format.type == "text":
        return ""
    if text.format.type == "json_object":
        return encode_json({"type": "object"})
    if text.format.schema is None:
        raise InvalidInput("text.format.schema: what the JSON is to be", field="text")
    return encode_schema(text.format.schema, "text.format.schema")


def _echoed_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the request's fields that the response repeats, with OpenAI's defaults for omitted fields."""
    format = body.text.format if body.text is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id or None,
        "temperature": body.temperature,
        "text": {"format": msgspec.to_builtins(format) or {"type": "text"}},
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


Json = dict[str, Any]

_ID_PREFIX_BY_KIND = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
"""Prefix of an output item's id, by the kind of block."""
_EVENT_NAME_BY_KIND = {
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}
"""Beginning of the names of the events about a block, by the kind of block."""


def render_response(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the body of a complete response."""
    return msgspec.json.encode(final_response(head, blocks.collect_blocks(deltas), last_delta(deltas)))


def final_response(head: Head, response_blocks: Sequence[Block], last: TextDelta) -> Json:
    """Return the object `response` with its final status and complete output."""
    is_truncated = last.finish == "length"
    status = "incomplete" if is_truncated else "completed"
    items = [
        _render_item(head, block, status if block is response_blocks[-1] else "completed")
        for block in response_blocks
    ]
    return _response_object(
        head,
        status,
        items,
        incomplete_details={"reason": "max_output_tokens"} if is_truncated else None,
        usage=_render_usage(total_usage([last], 1)),
    )


def _response_object(head: Head, status: str, output: Sequence[Json], **fields: Any) -> Json:
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": head.generation.model,
        "output": output,
        "previous_response_id": None,
        "store": False,
        "usage": None,
        **head.generation.echo,
        **fields,
    }


def _render_usage(usage: Usage) -> Json:
    """Return the token usage in OpenAI's form. Required counts that engines do not report are 0."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _item_id(head: Head, block: Block) -> str:
    return f"{_ID_PREFIX_BY_KIND[block.kind]}_{head.id}_{block.number}"


def _render_item(head: Head, block: Block, status: str) -> Json:
    """Return an item of the output. An item with the status `in_progress` has no content."""
    identity = _item_id(head, block)
    parts = [] if status == "in_progress" else [_render_part(head, block)]
    if block.kind is BlockKind.THOUGHT:
        return {"id": identity, "type": "reasoning", "status": status, "summary": [], "content": parts}
    if block.kind is BlockKind.TEXT:
        return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": parts}
    call = block.call
    item = {
        "id": identity,
        "type": "function_call",
        "status": status,
        "call_id": call.id or f"call_{head.call_key}_{call.index}",
        "name": call.name,
        "arguments": block.content,
    }
    if call.name in head.generation.tool_namespaces:
        item["namespace"], item["name"] = head.generation.tool_namespaces[call.name]
    return item


def _render_part(head: Head, block: Block) -> Json:
    """Return the only part of a message or thought, with the content received until now."""
    if block.kind is BlockKind.THOUGHT:
        return {"type": "reasoning_text", "text": block.content}
    part: Json = {"type": "output_text", "text": block.content, "annotations": []}
    return part | ({"logprobs": block.logprobs} if head.generation.sampling.logprobs else {})


class ResponseEvents(Events):
    """Renders one streamed response as OpenAI's numbered events."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._number = 0

    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the encoded events for these deltas."""
        return b"".join(event for delta in deltas for event in self._render_delta(delta))

    def render_failure(self, error: ClusterError, /) -> bytes:
        """Return an `error` event and the failed response with the content received until now."""
        error_fields = wire.error_body(error).error
        events = [self._start_events()] if not self._number else []
        flat_fields = {name: getattr(error_fields, name) for name in ("code", "message", "param")}
        events.append(self._event("error", **flat_fields, error=error_fields))
        items = [_render_item(self._head, block, "incomplete") for block in self._blocks.blocks]
        reason = {"code": "server_error", "message": error_fields.message}
        events.append(
            self._event(
                "response.failed", response=_response_object(self._head, "failed", items, error=reason)
            )
        )
        return b"".join(events)

    def _render_delta(self, delta: TextDelta) -> Iterator[bytes]:
        if not self._number:
            yield self._start_events()
        # All steps first: only the very last block can be incomplete.
        for step in list(self._blocks.steps(delta)):
            is_truncated = delta.finish == "length" and step.block is self._blocks.blocks[-1]
            yield from self._render_step(step, "incomplete" if is_truncated else "completed")
        if delta.finish:
            response = final_response(self._head, self._blocks.blocks, delta)
            yield self._event(f"response.{response['status']}", response=response)

    def _start_events(self) -> bytes:
        response = _response_object(self._head, "in_progress", [])
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=response) for name in names)

    def _render_step(self, step: BlockStep, status: str) -> Iterator[bytes]:
        """Yield the events for one change of a block; `status` is the status of a closed item."""
        block, name = step.block, _EVENT_NAME_BY_KIND[step.block.kind]
        position = {"item_id": _item_id(self._head, block), "output_index": block.number}
        inner = {} if block.kind is BlockKind.CALL else {"content_index": 0}
        if step.change is BlockChange.OPENED:
            blank = Block(block.number, block.kind, block.call)
            item = _render_item(self._head, blank, "in_progress")
            yield self._event("response.output_item.added", output_index=block.number, item=item)
            if inner:
                part = _render_part(self._head, blank)
                yield self._event("response.content_part.added", **position, **inner, part=part)
        elif step.change is BlockChange.ADDED:
            logprobs = {"logprobs": step.logprobs} if block.kind is BlockKind.TEXT else {}
            yield self._event(f"{name}.delta", **position, **inner, delta=step.text, **logprobs)
        else:
            yield self._event(f"{name}.done", **position, **inner, **_final_content(block))
            if inner:
                part = _render_part(self._head, block)
                yield self._event("response.content_part.done", **position, **inner, part=part)
            item = _render_item(self._head, block, status)
            yield self._event("response.output_item.done", output_index=block.number, item=item)

    def _event(self, kind: str, **content: Any) -> bytes:
        content_json = wire.encode({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), content_json)


def _final_content(block: Block) -> Mapping[str, Any]:
    """Return the content fields of the event that completes a block."""
    if block.kind is BlockKind.CALL:
        return {"name": block.call.name, "arguments": block.content}
    if block.kind is BlockKind.THOUGHT:
        return {"text": block.content}
    return {"text": block.content, "logprobs": block.logprobs}


DIALECT = Dialect(parse_request, ResponseEvents, render_response)
