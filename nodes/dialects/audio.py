"""Sound: `POST /v1/audio/transcriptions`, `POST /v1/audio/speech` and `/tts`.

The file of a transcription is copied from the form to the worker of the picked replica, whose engine reads it
there. A transcript is rendered as JSON in OpenAI's two forms, text, subtitles or events. Engines report times
in nanoseconds, like the engines of the reference.

For a speech request the engine writes a file on its worker; the gateway fetches and forwards the file. With
`stream` the audio is forwarded while the engine produces it. Nothing is converted: a response has the format
that its engine produces.
"""

import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import IO, Annotated, Any, Literal

import msgspec
import orjson
from msgspec import UNSET, UnsetType

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.errors import BackendFailed, Unimplemented
from localai_cluster.rpc.messages import (
    Reply,
    TranscriptRequest,
    TranscriptResult,
    TranscriptSegment,
    TTSRequest,
)
from localai_cluster.web import wire
from localai_cluster.web.bodies import Upload
from localai_cluster.web.wire import Answer, Header, ResponseBody
from nodes.dialects import openai_common
from nodes.dialects.openai_common import Chunks, Text, render_event
from nodes.gateway import gateway
from nodes.gateway.gateway import find_model
from nodes.gateway.generation import TextDelta
from nodes.gateway.request import InferenceRequest, node_header
from nodes.gateway.streams import ByteStream, EventStream, FileAnswer
from nodes.gateway.worker_files import open_files

_NANOSECONDS_PER_SECOND = 1_000_000_000
_JSON_CONTENT_TYPE, _TEXT_CONTENT_TYPE = b"application/json", b"text/plain; charset=utf-8"


class TranscriptResponse(ResponseBody, kw_only=True):
    """A transcript; the fields after `text` are sent in the format `verbose_json` only."""

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
        return msgspec.json.encode(_render_verbose(result, words, segments)), _JSON_CONTENT_TYPE
    if form == "text":
        return transcript_text(result).encode() + b"\n", _TEXT_CONTENT_TYPE
    if form == "srt":
        return "".join(_render_subtitles(result, ",", numbered=True)).encode(), b"application/x-subrip"
    if form == "vtt":
        return ("WEBVTT\n\n" + "".join(_render_subtitles(result, ".", numbered=False))).encode(), b"text/vtt"
    return msgspec.json.encode(TranscriptResponse(text=transcript_text(result))), _JSON_CONTENT_TYPE


def transcript_text(result: TranscriptResult) -> str:
    """Return the complete text of a transcript.

    Some engines report only segments; then the texts of the segments are joined.
    """
    return result.text.strip() or " ".join(part.text.strip() for part in result.segments)


def _render_verbose(result: TranscriptResult, words: bool, segments: bool) -> TranscriptResponse:
    word_list = [
        {"word": word.text, "start": _to_seconds(word.start), "end": _to_seconds(word.end)}
        for part in result.segments
        for word in part.words
    ]
    return TranscriptResponse(
        task="transcribe",
        language=result.language,
        duration=result.duration or _to_seconds(max((part.end for part in result.segments), default=0)),
        text=transcript_text(result),
        words=word_list if words else UNSET,
        segments=[_render_segment(part) for part in result.segments] if segments else UNSET,
    )


def _render_segment(part: TranscriptSegment) -> dict[str, Any]:
    document = {
        "id": part.id,
        "start": _to_seconds(part.start),
        "end": _to_seconds(part.end),
        "text": part.text,
        "tokens": list(part.tokens),
    }
    return document | ({"speaker": part.speaker} if part.speaker else {})


def _to_seconds(nanoseconds: int) -> float:
    return nanoseconds / _NANOSECONDS_PER_SECOND


def _render_subtitles(result: TranscriptResult, point: str, *, numbered: bool) -> Iterable[str]:
    for number, part in enumerate(result.segments, start=1):
        head = f"{number}\n" if numbered else ""
        # A blank line would end the subtitle.
        lines = "\n".join(line for line in part.text.strip().splitlines() if line.strip())
        yield f"{head}{_format_clock(part.start, point)} --> {_format_clock(part.end, point)}\n{lines}\n\n"


def _format_clock(nanoseconds: int, point: str) -> str:
    seconds, thousandths = divmod(max(nanoseconds, 0) // 1_000_000, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{thousandths:03}"


class _TranscriptChunks(Chunks):
    """Renders one streamed transcript as server-sent events.

    The last delta has the engine's complete text, if any, in `reasoning`.
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


MAX_BODY_BYTES = 100 * 1024 * 1024
"""Limit on the bytes of a form with an audio file."""
MAX_PROMPT_LENGTH = 16 * 1024
"""Maximum number of characters of a transcription's prompt."""
REPEATABLE_FIELD = "timestamp_granularities"
"""Name of the form field that may occur several times. Clients append `[]` to the name."""
_FILE_SUFFIX_PATTERN = re.compile(r"\A[A-Za-z0-9]{1,8}\Z")
"""Accepted suffix of an uploaded file's name, without its dot."""


class TranscriptionBody(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of a transcription form, without its file."""

    model: Text
    language: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    prompt: Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_LENGTH)] | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    timestamp_granularities: Annotated[
        list[Literal["word", "segment"]] | None, msgspec.Meta(description="For `verbose_json` only.")
    ] = None
    stream: bool | None = None


async def transcribe(request: InferenceRequest) -> Answer | EventStream:
    """Respond with the transcript of the audio file in the form."""
    upload, body = _parse_form(request)
    definition = await find_model(request, body.model)
    call_options = TranscriptRequest(
        language=body.language or "",
        prompt=body.prompt or "",
        temperature=body.temperature or 0,
        timestamp_granularities=body.timestamp_granularities or [],
        stream=bool(body.stream),
        ModelIdentity=definition.model,
    )
    if body.stream:
        return EventStream(request, _TranscriptChunks(), _stream_transcript(request, upload, call_options))
    result = await _transcribe(request, upload, call_options)
    granularities = body.timestamp_granularities or ["segment"]
    content, kind = render_transcript(
        body.response_format or "json", result, "word" in granularities, "segment" in granularities
    )
    return Answer(content, headers=tuple(node_header(request)), kind=kind)


def _parse_form(request: InferenceRequest) -> tuple[Upload, TranscriptionBody]:
    fields = request.form.fields
    values_by_name: dict[str, object] = {name: values[-1] for name, values in fields.items()}
    values_by_name[REPEATABLE_FIELD] = fields.get(REPEATABLE_FIELD + "[]") or fields.get(REPEATABLE_FIELD)
    body = wire.parse_struct(values_by_name, TranscriptionBody, texts=True)
    upload = request.form.files.get("file")
    if upload is None or not upload.size:
        raise InvalidInput("file: a file of sound is needed", field="file")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise InvalidInput(
            f"{REPEATABLE_FIELD}: needs `response_format` verbose_json", field=REPEATABLE_FIELD
        )
    if body.stream and body.response_format not in (None, "json", "text"):
        raise InvalidInput("response_format: a stream contains only text", field="response_format")
    return upload, body


@asynccontextmanager
async def _call_with_stored_audio(
    request: InferenceRequest, upload: Upload, call_options: TranscriptRequest
) -> AsyncIterator[TranscriptRequest]:
    """Store the audio file on the worker of the picked replica. Yield the call with the file's path."""
    # The client's file name is untrusted; only its extension is useful to an engine.
    ending = _FILE_SUFFIX_PATTERN.search(upload.name.rpartition(".")[2])
    name = f"audio.{ending[0].lower()}" if ending else "audio"
    async with open_files(request) as files:
        call = TranscriptRequest()
        call.CopyFrom(call_options)
        call.dst = await files.put(name, upload.file, upload.size)
        yield call


async def _transcribe(
    request: InferenceRequest, upload: Upload, call_options: TranscriptRequest
) -> TranscriptResult:
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine, _call_with_stored_audio(request, upload, call_options) as call:
            return await engine.transcribe(call, request.deadline - clock.monotonic())


async def _stream_transcript(
    request: InferenceRequest, upload: Upload, call_options: TranscriptRequest
) -> AsyncGenerator[TextDelta, None]:
    """Yield the transcript in pieces, then one delta with the engine's complete text, "" without one."""
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine, _call_with_stored_audio(request, upload, call_options) as call:
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


CONTENT_TYPES = {
    "wav": b"audio/wav",
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "flac": b"audio/flac",
    "aac": b"audio/aac",
    "pcm": b"audio/pcm",
}
"""Content types of audio by the format names that requests use."""
UNKNOWN_CONTENT_TYPE = b"application/octet-stream"
DEFAULT_SAMPLE_RATE = 16000
"""Sample rate in Hz of a stream whose engine reports none."""
_UNKNOWN_WAV_LENGTH = 0xFFFFFFFF


def detect_format(head: bytes) -> str:
    """Return the format of a file that begins with these bytes; "" for an unknown format."""
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] in (b"OggS", b"fLaC"):
        return "opus" if head[:4] == b"OggS" else "flac"
    if head[:3] == b"ID3":
        return "mp3"
    if len(head) > 1 and head[0] == 0xFF:
        # The layer bits of an MPEG frame: they are 0 for AAC.
        if head[1] & 0xF6 == 0xF0:
            return "aac"
        if head[1] & 0xE0 == 0xE0:
            return "mp3"
    return ""


def wav_header(rate: int) -> bytes:
    """Return the header of a mono 16-bit WAV of unknown length; `rate` is in Hz."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(
            b"RIFF",
            _UNKNOWN_WAV_LENGTH,
            b"WAVE",
            b"fmt ",
            16,
            1,
            1,
            rate,
            2 * rate,
            2,
            16,
            b"data",
            _UNKNOWN_WAV_LENGTH,
        ),
    )


MAX_INPUT_LENGTH = 64 * 1024
"""Limit on the input in characters."""
UNSUPPORTED_FIELDS = {"stream_format": "`stream` sends sound as it is made"}
_FORMAT_HEAD_BYTES = 16
"""Number of bytes from which the format of an audio file is detected."""
_VALID_SAMPLE_RATES = range(1000, 400_000)
_ShortText = Annotated[str, msgspec.Meta(max_length=4096)]


class SpeechBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a speech request.

    `language`, `stream` and `backend` are fields of LocalAI's API; `backend` is ignored.
    """

    model: Text
    input: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_INPUT_LENGTH)]
    voice: Annotated[
        _ShortText | None, msgspec.Meta(description="A name that the model knows; no path out of its folder.")
    ] = None
    response_format: Annotated[
        Literal["wav", "mp3", "opus", "aac", "flac", "pcm"] | None,
        msgspec.Meta(description="Absent: the format of the model's engine. Streams are `wav` or `pcm`."),
    ] = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4)] | None = None
    instructions: _ShortText | None = None
    language: _ShortText | None = None
    stream: bool | None = None


SpeechAnswer = FileAnswer | ByteStream


def speech_handler(has_node_header: bool) -> Callable[[InferenceRequest], Awaitable[SpeechAnswer]]:
    """Return the handler of a speech route; `has_node_header` adds the node header (§6.3)."""

    async def answer(request: InferenceRequest) -> SpeechAnswer:
        body = parse_request(wire.parse_json_object(request.body))
        definition = await find_model(request, body.model)
        call = _engine_request(body, definition.model)

        def headers() -> tuple[Header, ...]:
            return tuple(node_header(request)) if has_node_header else ()

        if body.stream:
            kind = CONTENT_TYPES[body.response_format or "wav"]
            return ByteStream(
                _stream_speech(request, call, body.response_format != "pcm"),
                lambda: [(b"content-type", kind), *headers()],
            )
        file = await _synthesize(request, call)
        format_name = detect_format(file.read(_FORMAT_HEAD_BYTES))
        if body.response_format not in (None, format_name):
            file.close()
            actual_format = format_name or "another format"
            raise InvalidInput(
                f"response_format: this model's engine makes {actual_format}", field="response_format"
            )
        return FileAnswer(file, CONTENT_TYPES.get(format_name, UNKNOWN_CONTENT_TYPE), headers())

    return answer


def parse_request(fields: Mapping[str, Any]) -> SpeechBody:
    """Parse the body of a speech request. Raise InvalidInput with the name of the first wrong field."""
    if fields.get("stream_format") != "audio":
        openai_common.refuse_fields(fields, UNSUPPORTED_FIELDS)
    body = wire.parse_struct(fields, SpeechBody)
    # Engines read such a voice from their own file system.
    if body.voice and (body.voice[0] in "/\\~" or ".." in body.voice or "://" in body.voice):
        raise InvalidInput("voice: a name is needed, no path or address", field="voice")
    if body.stream and body.response_format not in (None, "wav", "pcm"):
        raise InvalidInput("response_format: a stream is wav or pcm", field="response_format")
    if body.response_format == "pcm" and not body.stream:
        raise InvalidInput("response_format: pcm is for `stream` only", field="response_format")
    return body


def _engine_request(body: SpeechBody, model: str) -> TTSRequest:
    call = TTSRequest(text=body.input, model=model, voice=body.voice or "", ModelIdentity=model)
    if body.language:
        call.language = body.language
    if body.instructions:
        call.instructions = body.instructions
    # The protocol has no fields for these; an engine may read them from `params`.
    if body.speed is not None:
        call.params["speed"] = f"{body.speed:g}"
    if body.response_format:
        call.params["response_format"] = body.response_format
    return call


async def _synthesize(request: InferenceRequest, template: TTSRequest) -> IO[bytes]:
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine, open_files(request) as files:
            call = TTSRequest()
            call.CopyFrom(template)
            call.dst = await files.temp()
            result = await engine.speak(call, request.deadline - clock.monotonic())
            if not result.success:
                raise BackendFailed(result.message or None)
            return await files.fetch(call.dst)


async def _stream_speech(
    request: InferenceRequest, call: TTSRequest, has_header: bool
) -> AsyncGenerator[bytes, None]:
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine:
            first, rate = request.deadline - clock.monotonic(), DEFAULT_SAMPLE_RATE
            replies = engine.speak_stream(call).within(first, conf.cluster().stream_stall)
            async with aclosing(replies):
                async for reply in replies:
                    rate = _sample_rate(reply) or rate
                    if reply.audio:
                        header = wav_header(rate) if has_header and not request.has_begun else b""
                        request.has_begun = True
                        yield header + reply.audio
            if not request.has_begun:
                raise BackendFailed("the engine made no sound")
            return


def _sample_rate(reply: Reply) -> int:
    """Return the sample rate in Hz that the engine's reply reports, 0 without a valid rate."""
    try:
        metadata = orjson.loads(reply.message)
    except orjson.JSONDecodeError:
        return 0
    rate = metadata.get("sample_rate") if isinstance(metadata, dict) else None
    return int(rate) if isinstance(rate, int | float) and int(rate) in _VALID_SAMPLE_RATES else 0
