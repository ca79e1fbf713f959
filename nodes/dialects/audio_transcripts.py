"""Renderings of a transcript: JSON in OpenAI's two forms, text, subtitles and events. Pure.

Engines report times in nanoseconds, as the reference's do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from localai_cluster.rpc.messages import TranscriptResult, TranscriptSegment
from nodes.dialects.openai_events import DONE, Chunks, render_event
from nodes.gateway.generation import Telling, TextDelta

_SECOND = 1_000_000_000
_JSON, _PLAIN = b"application/json", b"text/plain; charset=utf-8"


def render_transcript(
    form: str, result: TranscriptResult, words: bool, segments: bool
) -> tuple[bytes, bytes]:
    """Return the body and its content type. `words` and `segments` select the lists in `verbose_json`."""
    if form == "verbose_json":
        return orjson.dumps(_verbose(result, words, segments)), _JSON
    if form == "text":
        return transcript_text(result).encode() + b"\n", _PLAIN
    if form == "srt":
        return "".join(_subtitles(result, ",", numbered=True)).encode(), b"application/x-subrip"
    if form == "vtt":
        return ("WEBVTT\n\n" + "".join(_subtitles(result, ".", numbered=False))).encode(), b"text/vtt"
    return orjson.dumps({"text": transcript_text(result)}), _JSON


def transcript_text(result: TranscriptResult) -> str:
    """Return the complete text; some engines report segments only."""
    return result.text.strip() or " ".join(part.text.strip() for part in result.segments)


def _verbose(result: TranscriptResult, words: bool, segments: bool) -> Mapping[str, Any]:
    document: dict[str, Any] = {
        "task": "transcribe",
        "language": result.language,
        "duration": result.duration or _seconds(max((part.end for part in result.segments), default=0)),
        "text": transcript_text(result),
    }
    if words:
        document["words"] = [
            {"word": word.text, "start": _seconds(word.start), "end": _seconds(word.end)}
            for part in result.segments
            for word in part.words
        ]
    if segments:
        document["segments"] = [_segment(part) for part in result.segments]
    return document


def _segment(part: TranscriptSegment) -> Mapping[str, Any]:
    document = {
        "id": part.id,
        "start": _seconds(part.start),
        "end": _seconds(part.end),
        "text": part.text,
        "tokens": list(part.tokens),
    }
    return document | ({"speaker": part.speaker} if part.speaker else {})


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / _SECOND


def _subtitles(result: TranscriptResult, point: str, *, numbered: bool) -> Iterable[str]:
    for number, part in enumerate(result.segments, start=1):
        head = f"{number}\n" if numbered else ""
        # A blank line would end the subtitle.
        lines = "\n".join(line for line in part.text.strip().splitlines() if line.strip())
        yield f"{head}{_clock(part.start, point)} --> {_clock(part.end, point)}\n{lines}\n\n"


def _clock(nanoseconds: int, point: str) -> str:
    seconds, thousandths = divmod(max(nanoseconds, 0) // 1_000_000, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{thousandths:03}"


def event_format() -> Telling:
    """Return the event stream of a transcript: its pieces, then the complete text."""
    return Telling(_Pieces(), DONE)


class _Pieces(Chunks):
    """The stream of one transcript.

    The last delta holds the engine's complete text, if any, in `reasoning`.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def told(self, deltas: Sequence[TextDelta], /) -> bytes:
        events = b""
        for delta in deltas:
            if delta.text:
                self._pieces.append(delta.text)
                events += render_event({"type": "transcript.text.delta", "delta": delta.text})
            if delta.finish:
                transcript = delta.reasoning or "".join(self._pieces).strip()
                events += render_event({"type": "transcript.text.done", "text": transcript})
        return events
