"""OpenAI's Responses: whole answers and the events of a stream. Pure.

An answer is items: what the model thought, a message, calls of tools. Events carry their type twice, as the
name of the event and inside, and a number that counts them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.errors import ClusterError
from localai_cluster.web import wire
from nodes.inference import blocks
from nodes.inference.blocks import Block, BlockChange, BlockKind, Blocks, BlockStep
from nodes.inference.generation import Dialect, Head, TextDelta, Usage, total
from nodes.inference.responses_requests import read

Content = dict[str, Any]

_PREFIXES = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_SAID = {
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


def whole(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """The answer's body."""
    last = next((delta for delta in reversed(deltas) if delta.finish), TextDelta(0, finish="stop"))
    return orjson.dumps(_ended(head, blocks.of(deltas), last))


def _ended(head: Head, made: Sequence[Block], last: TextDelta) -> Content:
    """The response of an answer that has come to its end."""
    cut = last.finish == "length"
    status = "incomplete" if cut else "completed"
    items = [_item(head, block, status if block is made[-1] else "completed") for block in made]
    return _response(
        head,
        status,
        items,
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        usage=_usage(total([last], 1)),
    )


def _response(head: Head, status: str, output: Sequence[Content], **more: Any) -> Content:
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
        **more,
    }


def _usage(taken: Usage) -> Content:
    """The form has a place for what engines do not tell: 0 stands there."""
    return {
        "input_tokens": taken.prompt,
        "input_tokens_details": {"cached_tokens": taken.cached or 0, "cache_write_tokens": 0},
        "output_tokens": taken.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": taken.prompt + taken.completion,
    }


def _identity(head: Head, block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{head.id}_{block.number}"


def _item(head: Head, block: Block, status: str) -> Content:
    """An item of the output; one in progress has nothing in it yet."""
    identity = _identity(head, block)
    parts = [] if status == "in_progress" else [_part(head, block)]
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


def _part(head: Head, block: Block) -> Content:
    """The only part of a message or a thought, with all that was said."""
    if block.kind is BlockKind.THOUGHT:
        return {"type": "reasoning_text", "text": block.content}
    told: Content = {"type": "output_text", "text": block.content, "annotations": []}
    return told | ({"logprobs": block.logprobs} if head.generation.sampling.logprobs else {})


class ResponseEvents:
    """The stream of one answer."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = Blocks()
        self._number = 0

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """The events of these deltas."""
        return b"".join(event for delta in deltas for event in self._of(delta))

    def failed(self, error: ClusterError, /) -> bytes:
        """An `error`, which clients raise, and the response as it stands."""
        told = orjson.loads(wire.error_answer(error).body)["error"]
        made = [self._begun()] if not self._number else []
        flat = {name: told[name] for name in ("code", "message", "param")}
        made.append(self._event("error", **flat, error=told))
        items = [_item(self._head, block, "incomplete") for block in self._blocks.made]
        reason = {"code": "server_error", "message": told["message"]}
        made.append(
            self._event("response.failed", response=_response(self._head, "failed", items, error=reason))
        )
        return b"".join(made)

    def _of(self, delta: TextDelta) -> Iterator[bytes]:
        if not self._number:
            yield self._begun()
        # All of them first: only the very last block can be incomplete.
        for step in list(self._blocks.steps(delta)):
            cut = delta.finish == "length" and step.block is self._blocks.made[-1]
            yield from self._step(step, "incomplete" if cut else "completed")
        if delta.finish:
            response = _ended(self._head, self._blocks.made, delta)
            yield self._event(f"response.{response['status']}", response=response)

    def _begun(self) -> bytes:
        response = _response(self._head, "in_progress", [])
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=response) for name in names)

    def _step(self, step: BlockStep, status: str) -> Iterator[bytes]:
        """`status` is that of an item that ends here."""
        block, name = step.block, _SAID[step.block.kind]
        place = {"item_id": _identity(self._head, block), "output_index": block.number}
        inner = {} if block.kind is BlockKind.CALL else {"content_index": 0}
        if step.change is BlockChange.OPENED:
            blank = Block(block.number, block.kind, block.call)
            item = _item(self._head, blank, "in_progress")
            yield self._event("response.output_item.added", output_index=block.number, item=item)
            if inner:
                part = _part(self._head, blank)
                yield self._event("response.content_part.added", **place, **inner, part=part)
        elif step.change is BlockChange.SAID:
            logprobs = {"logprobs": step.logprobs} if block.kind is BlockKind.TEXT else {}
            yield self._event(f"{name}.delta", **place, **inner, delta=step.text, **logprobs)
        else:
            yield self._event(f"{name}.done", **place, **inner, **_said(block))
            if inner:
                part = _part(self._head, block)
                yield self._event("response.content_part.done", **place, **inner, part=part)
            item = _item(self._head, block, status)
            yield self._event("response.output_item.done", output_index=block.number, item=item)

    def _event(self, kind: str, **content: Any) -> bytes:
        told = orjson.dumps({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), told)


def _said(block: Block) -> Mapping[str, Any]:
    """All that was said of a block, under the name that its last event has for it."""
    if block.kind is BlockKind.CALL:
        return {"name": block.call.name, "arguments": block.content}
    if block.kind is BlockKind.THOUGHT:
        return {"text": block.content}
    return {"text": block.content, "logprobs": block.logprobs}


DIALECT = Dialect(read, ResponseEvents, whole)
