"""`POST /v1/audio/transcriptions`: an audio file in a form, its transcript as the response.

The file is copied from the form to the worker of the picked replica, whose engine reads it there. A
transcript is rendered as JSON in OpenAI's two forms, text, subtitles or events. Engines report times in
nanoseconds, as the reference's do.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import Unimplemented
from localai_cluster.rpc.messages import TranscriptRequest, TranscriptResult, TranscriptSegment
from localai_cluster.web import wire
from localai_cluster.web.bodies import Upload
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects.openai_common import DONE, Chunks, Text, render_event
from nodes.gateway import gateway
from nodes.gateway.gateway import find_definition
from nodes.gateway.generation import StreamFormat, TextDelta
from nodes.gateway.request import InferenceRequest, node_header
from nodes.gateway.streams import EventStream
from nodes.gateway.worker_files import open_files

_SECOND = 1_000_000_000
_JSON, _PLAIN = b"application/json", b"text/plain; charset=utf-8"


class TranscriptResponse(ResponseBody, kw_only=True):
    """All but `text` is of `verbose_json`."""

    task: str | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    text: str
    words: list[dict[str, Any]] | UnsetType = UNSET
    segments: list[dict[str, Any]] | UnsetType = UNSET


def render_transcript(
    form: str, result: TranscriptResult, words: bool, segments: bool
) -> tuple[bytes, bytes]:
    """Return the body and its content type. `words` and `segments` select the lists in `verbose_json`."""
    if form == "verbose_json":
        return msgspec.json.encode(_verbose(result, words, segments)), _JSON
    if form == "text":
        return transcript_text(result).encode() + b"\n", _PLAIN
    if form == "srt":
        return "".join(_subtitles(result, ",", numbered=True)).encode(), b"application/x-subrip"
    if form == "vtt":
        return ("WEBVTT\n\n" + "".join(_subtitles(result, ".", numbered=False))).encode(), b"text/vtt"
    return msgspec.json.encode(TranscriptResponse(text=transcript_text(result))), _JSON


def transcript_text(result: TranscriptResult) -> str:
    """Return the complete text; some engines report segments only."""
    return result.text.strip() or " ".join(part.text.strip() for part in result.segments)


def _verbose(result: TranscriptResult, words: bool, segments: bool) -> TranscriptResponse:
    word_list = [
        {"word": word.text, "start": _seconds(word.start), "end": _seconds(word.end)}
        for part in result.segments
        for word in part.words
    ]
    return TranscriptResponse(
        task="transcribe",
        language=result.language,
        duration=result.duration or _seconds(max((part.end for part in result.segments), default=0)),
        text=transcript_text(result),
        words=word_list if words else UNSET,
        segments=[_segment(part) for part in result.segments] if segments else UNSET,
    )


def _segment(part: TranscriptSegment) -> dict[str, Any]:
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


def event_format() -> StreamFormat:
    """Return the event stream of a transcript: its pieces, then the complete text."""
    return StreamFormat(_Pieces(), DONE)


class _Pieces(Chunks):
    """The stream of one transcript.

    The last delta holds the engine's complete text, if any, in `reasoning`.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        events = b""
        for delta in deltas:
            if delta.text:
                self._pieces.append(delta.text)
                events += render_event({"type": "transcript.text.delta", "delta": delta.text})
            if delta.finish:
                transcript = delta.reasoning or "".join(self._pieces).strip()
                events += render_event({"type": "transcript.text.done", "text": transcript})
        return events


LARGEST_BODY = 100 * 1024 * 1024
"""Limit on the bytes of a form with an audio file."""
MOST_PROMPT = 16 * 1024
MANY = "timestamp_granularities"
"""The field that may have several values; clients append `[]` to its name."""
_ENDING = re.compile(r"\A[A-Za-z0-9]{1,8}\Z")


class TranscriptionBody(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of the form beside its file."""

    model: Text
    language: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    prompt: Annotated[str, msgspec.Meta(max_length=MOST_PROMPT)] | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    timestamp_granularities: Annotated[
        list[Literal["word", "segment"]] | None, msgspec.Meta(description="For `verbose_json` only.")
    ] = None
    stream: bool | None = None


async def transcribe(request: InferenceRequest) -> Answer | EventStream:
    """Transcribe the file of one request."""
    upload, body = _read(request)
    definition = await find_definition(body.model)
    request.model = definition.name
    call_options = TranscriptRequest(
        language=body.language or "",
        prompt=body.prompt or "",
        temperature=body.temperature or 0,
        timestamp_granularities=body.timestamp_granularities or [],
        stream=bool(body.stream),
        ModelIdentity=definition.model,
    )
    if body.stream:
        return EventStream(
            request,
            event_format(),
            _stream(request, upload, call_options),
        )

    async def work(engine: BackendClient) -> TranscriptResult:
        async with _stored_call(request, upload, call_options) as call:
            return await engine.transcribe(call, request.deadline - clock.monotonic())

    result = await gateway.current().run(request, work)
    granularities = body.timestamp_granularities or ["segment"]
    content, kind = render_transcript(
        body.response_format or "json", result, "word" in granularities, "segment" in granularities
    )
    return Answer(content, headers=tuple(node_header(request)), kind=kind)


def _read(request: InferenceRequest) -> tuple[Upload, TranscriptionBody]:
    fields = request.form.fields
    values_by_name: dict[str, object] = {name: values[-1] for name, values in fields.items()}
    values_by_name[MANY] = fields.get(MANY + "[]") or fields.get(MANY)
    body = wire.parse_struct(values_by_name, TranscriptionBody, texts=True)
    upload = request.form.files.get("file")
    if upload is None or not upload.size:
        raise InvalidInput("file: a file of sound is needed", field="file")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise InvalidInput(f"{MANY}: needs `response_format` verbose_json", field=MANY)
    if body.stream and body.response_format not in (None, "json", "text"):
        raise InvalidInput("response_format: a stream has text only", field="response_format")
    return upload, body


@asynccontextmanager
async def _stored_call(
    request: InferenceRequest, upload: Upload, call_options: TranscriptRequest
) -> AsyncIterator[TranscriptRequest]:
    """Yield the call while the audio file is stored on the worker of the picked replica."""
    assert request.replica is not None
    # The client's file name is untrusted; only its extension is useful to an engine.
    ending = _ENDING.search(upload.name.rpartition(".")[2])
    name = f"audio.{ending[0].lower()}" if ending else "audio"
    async with open_files(request.replica.node_id, request.deadline) as files:
        call = TranscriptRequest()
        call.CopyFrom(call_options)
        call.dst = await files.put(name, upload.file, upload.size)
        yield call


async def _stream(
    request: InferenceRequest, upload: Upload, call_options: TranscriptRequest
) -> AsyncGenerator[TextDelta, None]:
    """Yield pieces as they arrive, and at the end the complete text if the engine reports it, else ""."""
    for attempt in gateway.current().attempts(request):
        async with attempt as engine, _stored_call(request, upload, call_options) as call:
            transcript, first = "", request.deadline - clock.monotonic()
            replies = engine.transcribe_stream(call).within(first, conf.cluster().stream_stall)
            try:
                async with aclosing(replies):
                    async for reply in replies:
                        if reply.delta:
                            yield TextDelta(0, reply.delta)
                        if reply.HasField("final_result"):
                            transcript = transcript_text(reply.final_result)
            except Unimplemented:
                result = await engine.transcribe(call, request.deadline - clock.monotonic())
                transcript = transcript_text(result)
                yield TextDelta(0, transcript)
            yield TextDelta(0, reasoning=transcript, finish="stop")
            return
