"""Ollama's answers to `/api/chat` and `/api/generate`, one JSON object or one a line, and its refusals. Pure.

A line that is not the last one has a piece of the answer. Calls of tools are told at once, before the end,
since their arguments are objects here. A blank before a line keeps the connection alive.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from localai_cluster.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.inference import blocks, generation
from nodes.inference.generation import Dialect, FoldedChoice, Head, TextDelta, Took, ToolPiece
from nodes.inference.ollama_requests import read_chat, read_generate

KIND = b"application/x-ndjson"

Calls = list[dict[str, Any]]
Said = Callable[[str, str, Calls], dict[str, Any]]
"""A text, what was thought, and calls of tools, in the form of a route."""


def _as_message(text: str, thought: str, calls: Calls) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _as_response(text: str, thought: str, _: Calls) -> dict[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


def error_body(error: ClusterError) -> bytes:
    """The envelope, which has a text only."""
    return orjson.dumps({"error": wire.naming_field(error)})


def refused(error: ClusterError) -> Answer:
    """A refusal in Ollama's envelope."""
    return Answer(error_body(error), error.status, wire.error_answer(error).headers)


def _line(head: Head, content: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": head.generation.model, "created_at": moment(head.created), **content, **more}


def moment(seconds: int) -> str:
    """A time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as Ollama writes it."""
    return int(seconds * 1_000_000_000)


def _end(last: TextDelta) -> dict[str, Any]:
    """Why it ended and what it took."""
    took, taken = last.took or Took(), generation.total([last], 1)
    return {
        "done": True,
        "done_reason": "length" if last.finish == "length" else "stop",
        "total_duration": nanoseconds(took.load + took.prompt + took.answer),
        "load_duration": nanoseconds(took.load),
        "prompt_eval_count": taken.prompt,
        "prompt_eval_duration": nanoseconds(took.prompt),
        "eval_count": taken.completion,
        "eval_duration": nanoseconds(took.answer),
    }


def _calls(head: Head, pieces: Sequence[ToolPiece]) -> Calls:
    return [
        {
            "id": piece.id or f"call_{head.id[:24]}_{piece.index}",
            "function": {
                "index": place,
                "name": piece.name,
                "arguments": blocks.arguments(piece.arguments),
            },
        }
        for place, piece in enumerate(pieces)
    ]


def whole_in(said: Said) -> Callable[[Head, Sequence[TextDelta]], bytes]:
    """Makes the body of a whole answer in this form."""

    def whole(head: Head, deltas: Sequence[TextDelta]) -> bytes:
        choice: FoldedChoice = generation.folded(deltas, 1)[0]
        last = next((delta for delta in reversed(deltas) if delta.finish), TextDelta(0, finish="stop"))
        told = _line(head, said(choice.text, choice.reasoning, _calls(head, choice.tools)), **_end(last))
        return orjson.dumps(told | ({"logprobs": choice.logprobs} if choice.logprobs else {}))

    return whole


class OllamaLines:
    """The stream of one answer."""

    def __init__(self, head: Head, said: Said) -> None:
        self._head = head
        self._said = said
        self._calls: list[ToolPiece] = []

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """The lines of these deltas."""
        return b"".join(orjson.dumps(line) + b"\n" for delta in deltas for line in self._of(delta))

    def failed(self, error: ClusterError, /) -> bytes:
        """The line of an answer that cannot go on."""
        return error_body(error) + b"\n"

    def _of(self, delta: TextDelta) -> list[dict[str, Any]]:
        made = []
        self._calls.extend(delta.tools)
        if delta.text or delta.reasoning or delta.logprobs:
            logprobs = {"logprobs": delta.logprobs} if delta.logprobs else {}
            piece = self._said(delta.text, delta.reasoning, [])
            made.append(_line(self._head, piece, done=False, **logprobs))
        if delta.finish:
            if calls := generation.joined(self._calls):
                called = self._said("", "", _calls(self._head, calls))
                made.append(_line(self._head, called, done=False))
            made.append(_line(self._head, self._said("", "", []), **_end(delta)))
        return made


def _dialect(read: Callable[[Mapping[str, Any]], generation.Generation], said: Said) -> Dialect:
    return Dialect(read, lambda head: OllamaLines(head, said), whole_in(said), kind=KIND, keep_alive=b" ")


CHAT = _dialect(read_chat, _as_message)
GENERATE = _dialect(read_generate, _as_response)
