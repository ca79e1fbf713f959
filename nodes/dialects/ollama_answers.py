"""Ollama's responses to `/api/chat` and `/api/generate`: one JSON object, or one per line, and errors. Pure.

Every line but the last has a piece of the response. Tool calls are sent complete, just before the last line,
because their arguments are objects here. A blank before a line keeps the connection alive.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from localai_cluster.kit.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.dialects import blocks
from nodes.dialects.ollama_requests import parse_chat, parse_generate
from nodes.gateway import generation
from nodes.gateway.generation import Dialect, FoldedChoice, Head, TextDelta, Took, ToolPiece

KIND = b"application/x-ndjson"

Calls = list[dict[str, Any]]
Renderer = Callable[[str, str, Calls], dict[str, Any]]
"""Renders text, thoughts and tool calls in the form of a route."""


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
    """Return the error envelope, which has a text only."""
    return orjson.dumps({"error": wire.naming_field(error)})


def render_error(error: ClusterError) -> Answer:
    """Return the error response in Ollama's envelope."""
    return Answer(error_body(error), error.status, wire.error_answer(error).headers)


def _render_line(head: Head, content: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": head.generation.model, "created_at": format_time(head.created), **content, **fields}


def format_time(seconds: int) -> str:
    """Return a Unix time in Ollama's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def to_nanoseconds(seconds: float) -> int:
    """Return a duration in Ollama's unit."""
    return int(seconds * 1_000_000_000)


def _render_end(last: TextDelta) -> dict[str, Any]:
    """Return the finish reason, the durations and the token counts."""
    durations, usage = last.took or Took(), generation.total([last], 1)
    return {
        "done": True,
        "done_reason": "length" if last.finish == "length" else "stop",
        "total_duration": to_nanoseconds(durations.load + durations.prompt + durations.answer),
        "load_duration": to_nanoseconds(durations.load),
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": to_nanoseconds(durations.prompt),
        "eval_count": usage.completion,
        "eval_duration": to_nanoseconds(durations.answer),
    }


def _render_calls(head: Head, pieces: Sequence[ToolPiece]) -> Calls:
    return [
        {
            "id": piece.id or f"call_{head.id[:24]}_{piece.index}",
            "function": {
                "index": index,
                "name": piece.name,
                "arguments": blocks.parse_arguments(piece.arguments),
            },
        }
        for index, piece in enumerate(pieces)
    ]


def response_renderer(render: Renderer) -> Callable[[Head, Sequence[TextDelta]], bytes]:
    """Return a function that renders a complete response in this form."""

    def render_whole(head: Head, deltas: Sequence[TextDelta]) -> bytes:
        choice: FoldedChoice = generation.folded(deltas, 1)[0]
        last = next((delta for delta in reversed(deltas) if delta.finish), TextDelta(0, finish="stop"))
        document = _render_line(
            head,
            render(choice.text, choice.reasoning, _render_calls(head, choice.tools)),
            **_render_end(last),
        )
        return orjson.dumps(document | ({"logprobs": choice.logprobs} if choice.logprobs else {}))

    return render_whole


class OllamaLines:
    """The stream of one response."""

    def __init__(self, head: Head, render: Renderer) -> None:
        self._head = head
        self._render = render
        self._calls: list[ToolPiece] = []

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the lines of these deltas."""
        return b"".join(orjson.dumps(line) + b"\n" for delta in deltas for line in self._render_delta(delta))

    def failed(self, error: ClusterError, /) -> bytes:
        """Return the line that ends a failed response."""
        return error_body(error) + b"\n"

    def _render_delta(self, delta: TextDelta) -> list[dict[str, Any]]:
        lines = []
        self._calls.extend(delta.tools)
        if delta.text or delta.reasoning or delta.logprobs:
            logprobs = {"logprobs": delta.logprobs} if delta.logprobs else {}
            piece = self._render(delta.text, delta.reasoning, [])
            lines.append(_render_line(self._head, piece, done=False, **logprobs))
        if delta.finish:
            if calls := generation.joined(self._calls):
                calls_piece = self._render("", "", _render_calls(self._head, calls))
                lines.append(_render_line(self._head, calls_piece, done=False))
            lines.append(_render_line(self._head, self._render("", "", []), **_render_end(delta)))
        return lines


def _dialect(read: Callable[[Mapping[str, Any]], generation.Generation], render: Renderer) -> Dialect:
    return Dialect(
        read, lambda head: OllamaLines(head, render), response_renderer(render), kind=KIND, keep_alive=b" "
    )


CHAT = _dialect(parse_chat, _as_message)
GENERATE = _dialect(parse_generate, _as_response)
