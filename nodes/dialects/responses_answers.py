"""OpenAI's Responses: complete responses and the events of a stream. Pure.

A response consists of items: thoughts, a message, tool calls. Events carry their type twice, as the event's
name and inside, and a sequence number.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.kit.errors import ClusterError
from localai_cluster.web import wire
from nodes.dialects import blocks
from nodes.dialects.blocks import Block, BlockChange, BlockKind, Blocks, BlockStep
from nodes.dialects.responses_requests import parse_request
from nodes.gateway.generation import Dialect, Head, TextDelta, Usage, total

Json = dict[str, Any]

_PREFIXES = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_EVENT_NAMES = {
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


def render_response(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the response body."""
    last = next((delta for delta in reversed(deltas) if delta.finish), TextDelta(0, finish="stop"))
    return orjson.dumps(_final_response(head, blocks.collect_blocks(deltas), last))


def _final_response(head: Head, response_blocks: Sequence[Block], last: TextDelta) -> Json:
    """Return the final `response` object."""
    is_truncated = last.finish == "length"
    status = "incomplete" if is_truncated else "completed"
    items = [
        _render_item(head, block, status if block is response_blocks[-1] else "completed")
        for block in response_blocks
    ]
    return _response(
        head,
        status,
        items,
        incomplete_details={"reason": "max_output_tokens"} if is_truncated else None,
        usage=_render_usage(total([last], 1)),
    )


def _response(head: Head, status: str, output: Sequence[Json], **fields: Any) -> Json:
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
    """Return the usage. Required fields that engines do not report are 0."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _identity(head: Head, block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{head.id}_{block.number}"


def _render_item(head: Head, block: Block, status: str) -> Json:
    """Return an item of the output; an item in progress is empty."""
    identity = _identity(head, block)
    parts = [] if status == "in_progress" else [_render_part(head, block)]
    if block.kind is BlockKind.THOUGHT:
        return {"id": identity, "type": "reasoning", "status": status, "summary": [], "content": parts}
    if block.kind is BlockKind.TEXT:
        return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": parts}
    call = block.call
    return {
        "id": identity,
        "type": "function_call",
        "status": status,
        "call_id": call.id or f"call_{head.id[:24]}_{call.index}",
        "name": call.name,
        "arguments": block.content,
    }


def _render_part(head: Head, block: Block) -> Json:
    """Return the only part of a message or a thought, with its content so far."""
    if block.kind is BlockKind.THOUGHT:
        return {"type": "reasoning_text", "text": block.content}
    part: Json = {"type": "output_text", "text": block.content, "annotations": []}
    return part | ({"logprobs": block.logprobs} if head.generation.sampling.logprobs else {})


class ResponseEvents:
    """The stream of one response."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._number = 0

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the events of these deltas."""
        return b"".join(event for delta in deltas for event in self._render_delta(delta))

    def failed(self, error: ClusterError, /) -> bytes:
        """Return an `error` event, which clients raise, and the response with the content so far."""
        error_fields = orjson.loads(wire.error_answer(error).body)["error"]
        events = [self._start_events()] if not self._number else []
        flat_fields = {name: error_fields[name] for name in ("code", "message", "param")}
        events.append(self._event("error", **flat_fields, error=error_fields))
        items = [_render_item(self._head, block, "incomplete") for block in self._blocks.made]
        reason = {"code": "server_error", "message": error_fields["message"]}
        events.append(
            self._event("response.failed", response=_response(self._head, "failed", items, error=reason))
        )
        return b"".join(events)

    def _render_delta(self, delta: TextDelta) -> Iterator[bytes]:
        if not self._number:
            yield self._start_events()
        # All steps first: only the very last block can be incomplete.
        for step in list(self._blocks.steps(delta)):
            is_truncated = delta.finish == "length" and step.block is self._blocks.made[-1]
            yield from self._render_step(step, "incomplete" if is_truncated else "completed")
        if delta.finish:
            response = _final_response(self._head, self._blocks.made, delta)
            yield self._event(f"response.{response['status']}", response=response)

    def _start_events(self) -> bytes:
        response = _response(self._head, "in_progress", [])
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=response) for name in names)

    def _render_step(self, step: BlockStep, status: str) -> Iterator[bytes]:
        """Yield the events of one step; `status` is the final status of an item that the step closes."""
        block, name = step.block, _EVENT_NAMES[step.block.kind]
        position = {"item_id": _identity(self._head, block), "output_index": block.number}
        inner = {} if block.kind is BlockKind.CALL else {"content_index": 0}
        if step.change is BlockChange.OPENED:
            blank = Block(block.number, block.kind, block.call)
            item = _render_item(self._head, blank, "in_progress")
            yield self._event("response.output_item.added", output_index=block.number, item=item)
            if inner:
                part = _render_part(self._head, blank)
                yield self._event("response.content_part.added", **position, **inner, part=part)
        elif step.change is BlockChange.SAID:
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
        content_json = orjson.dumps({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), content_json)


def _final_content(block: Block) -> Mapping[str, Any]:
    """Return a block's content under the names that its last event uses."""
    if block.kind is BlockKind.CALL:
        return {"name": block.call.name, "arguments": block.content}
    if block.kind is BlockKind.THOUGHT:
        return {"text": block.content}
    return {"text": block.content, "logprobs": block.logprobs}


DIALECT = Dialect(parse_request, ResponseEvents, render_response)
