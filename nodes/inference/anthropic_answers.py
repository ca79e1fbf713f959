"""Anthropic's Messages: whole answers, the events of a stream, and refusals. Pure.

An answer is blocks, each with its place. What the prompt took is known at the end only, so the first event
says 0 of it and the last but one has the figures, which count for the whole answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.inference import blocks
from nodes.inference.anthropic_requests import read
from nodes.inference.blocks import Block, BlockChange, BlockKind, Blocks, BlockStep
from nodes.inference.generation import Dialect, Head, TextDelta, Usage, total

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
"""By status; any other one is an `api_error`."""


def _error(error: ClusterError) -> dict[str, Any]:
    """The envelope; it has no place for the field, so the text names it."""
    kind = _TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": wire.naming_field(error)}}


def refused(error: ClusterError) -> Answer:
    """A refusal in Anthropic's envelope."""
    return Answer(orjson.dumps(_error(error)), error.status, wire.error_answer(error).headers)


def whole(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """The answer's body."""
    content = [_content(head, block) for block in blocks.of(deltas)]
    reason = next((delta.finish for delta in deltas if delta.finish), "stop")
    return orjson.dumps(_message(head, content, _reason(reason), _usage(total(deltas, 1))))


def _message(
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


def _usage(taken: Usage) -> dict[str, int]:
    """Remembered tokens do not count as the prompt's, and are told only if the engine said so."""
    told = {"input_tokens": taken.prompt - (taken.cached or 0), "output_tokens": taken.completion}
    return told if taken.cached is None else told | {"cache_read_input_tokens": taken.cached}


def _content(head: Head, block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return _opening(head, block) | {"input": blocks.arguments(block.content)}
    return _opening(head, block) | {_FIELDS[block.kind]: block.content}


_FIELDS = {BlockKind.THOUGHT: "thinking", BlockKind.TEXT: "text", BlockKind.CALL: "partial_json"}
_DELTAS = {
    BlockKind.THOUGHT: "thinking_delta",
    BlockKind.TEXT: "text_delta",
    BlockKind.CALL: "input_json_delta",
}


def _opening(head: Head, block: Block) -> dict[str, Any]:
    """A block before anything is said of it."""
    if block.kind is BlockKind.THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    call = block.call
    identity = call.id or f"toolu_{head.id[:24]}_{call.index}"
    return {"type": "tool_use", "id": identity, "name": call.name, "input": {}}


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **content}))


class MessageEvents:
    """The stream of one answer."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._begun = False

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """The events of these deltas."""
        return b"".join(event for delta in deltas for event in self._of(delta))

    def _of(self, delta: TextDelta) -> list[bytes]:
        made = []
        if not self._begun:
            self._begun = True
            made.append(_event("message_start", message=_message(self._head, [], None, _usage(Usage()))))
        made.extend(self._step(step) for step in self._blocks.steps(delta))
        if delta.finish:
            end = {"stop_reason": _reason(delta.finish), "stop_sequence": None}
            made.append(_event("message_delta", delta=end, usage=_usage(total([delta], 1))))
        return made

    def _step(self, step: BlockStep) -> bytes:
        place, kind = step.block.number, step.block.kind
        if step.change is BlockChange.OPENED:
            return _event("content_block_start", index=place, content_block=_opening(self._head, step.block))
        if step.change is BlockChange.CLOSED:
            return _event("content_block_stop", index=place)
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: step.text}
        return _event("content_block_delta", index=place, delta=delta)

    def failed(self, error: ClusterError, /) -> bytes:
        """The event of an answer that cannot go on."""
        return b"event: error\ndata: " + orjson.dumps(_error(error)) + b"\n\n"


DIALECT = Dialect(read, MessageEvents, whole, done=_event("message_stop"), keep_alive=_event("ping"))
