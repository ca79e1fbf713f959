"""Anthropic's Messages: complete responses, stream events and error bodies. Pure.

A response is a list of numbered blocks. The prompt's token count is available at the end only, so the first
event reports 0 and the last but one has the figures, which apply to the whole response.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.kit.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.dialects import blocks
from nodes.dialects.anthropic_requests import parse_request
from nodes.dialects.blocks import Block, BlockChange, BlockKind, Blocks, BlockStep
from nodes.gateway.generation import Dialect, Head, TextDelta, Usage, total

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {
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


def _error(error: ClusterError) -> dict[str, Any]:
    """Return the error envelope. It has no attribute for the field, so the text names it."""
    kind = _TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": wire.naming_field(error)}}


def render_error(error: ClusterError) -> Answer:
    """Return the error response in Anthropic's envelope."""
    return Answer(orjson.dumps(_error(error)), error.status, wire.error_answer(error).headers)


def render_response(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the response body."""
    content = [_render_block(head, block) for block in blocks.collect_blocks(deltas)]
    reason = next((delta.finish for delta in deltas if delta.finish), "stop")
    return orjson.dumps(_render_message(head, content, _reason(reason), _render_usage(total(deltas, 1))))


def _render_message(
    head: Head, content: Sequence[Any], reason: str | None, usage: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.generation.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": usage,
    }


def _reason(finish: str) -> str:
    return _REASONS.get(finish, "end_turn")


def _render_usage(usage: Usage) -> dict[str, int]:
    """Return the usage in Anthropic's form.

    Cached tokens are excluded from the prompt's, and present only if the engine reported them.
    """
    fields = {"input_tokens": usage.prompt - (usage.cached or 0), "output_tokens": usage.completion}
    return fields if usage.cached is None else fields | {"cache_read_input_tokens": usage.cached}


def _render_block(head: Head, block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return _opening(head, block) | {"input": blocks.parse_arguments(block.content)}
    return _opening(head, block) | {_FIELDS[block.kind]: block.content}


_FIELDS = {BlockKind.THOUGHT: "thinking", BlockKind.TEXT: "text", BlockKind.CALL: "partial_json"}
_DELTAS = {
    BlockKind.THOUGHT: "thinking_delta",
    BlockKind.TEXT: "text_delta",
    BlockKind.CALL: "input_json_delta",
}


def _opening(head: Head, block: Block) -> dict[str, Any]:
    """Return the empty form of a block, which opens it."""
    if block.kind is BlockKind.THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    call = block.call
    identity = call.id or f"toolu_{head.id[:24]}_{call.index}"
    return {"type": "tool_use", "id": identity, "name": call.name, "input": {}}


def _render_event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **content}))


class MessageEvents:
    """The stream of one response."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._has_started = False

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the events of these deltas."""
        return b"".join(event for delta in deltas for event in self._render_delta(delta))

    def _render_delta(self, delta: TextDelta) -> list[bytes]:
        events = []
        if not self._has_started:
            self._has_started = True
            events.append(
                _render_event(
                    "message_start", message=_render_message(self._head, [], None, _render_usage(Usage()))
                )
            )
        events.extend(self._render_step(step) for step in self._blocks.steps(delta))
        if delta.finish:
            end = {"stop_reason": _reason(delta.finish), "stop_sequence": None}
            events.append(_render_event("message_delta", delta=end, usage=_render_usage(total([delta], 1))))
        return events

    def _render_step(self, step: BlockStep) -> bytes:
        index, kind = step.block.number, step.block.kind
        if step.change is BlockChange.OPENED:
            return _render_event(
                "content_block_start", index=index, content_block=_opening(self._head, step.block)
            )
        if step.change is BlockChange.CLOSED:
            return _render_event("content_block_stop", index=index)
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: step.text}
        return _render_event("content_block_delta", index=index, delta=delta)

    def failed(self, error: ClusterError, /) -> bytes:
        """Return the event that ends a failed response."""
        return b"event: error\ndata: " + orjson.dumps(_error(error)) + b"\n\n"


DIALECT = Dialect(
    parse_request,
    MessageEvents,
    render_response,
    done=_render_event("message_stop"),
    keep_alive=_render_event("ping"),
)
