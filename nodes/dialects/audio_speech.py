"""`POST /v1/audio/speech` and `/tts`: text to speech.

The engine writes a file on its worker, which is fetched and forwarded. With `stream` the audio is forwarded
while the engine produces it. Nothing is converted: a response has the format that its engine produces.
"""

import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import IO, Annotated, Any, Literal

import msgspec
import orjson

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendFailed
from localai_cluster.rpc.messages import Reply, TTSRequest
from localai_cluster.web import wire
from localai_cluster.web.wire import Header
from nodes.dialects import openai_common
from nodes.dialects.openai_common import Text
from nodes.gateway import gateway
from nodes.gateway.gateway import find_definition
from nodes.gateway.request import InferenceRequest, node_header
from nodes.gateway.streams import ByteStream, FileAnswer
from nodes.gateway.worker_files import open_files

KINDS = {
    "wav": b"audio/wav",
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "flac": b"audio/flac",
    "aac": b"audio/aac",
    "pcm": b"audio/pcm",
}
"""Content types by the format's name in requests."""
UNKNOWN = b"application/octet-stream"
USUAL_RATE = 16000
"""Sample rate in Hz of a stream that reports none."""
_ENDLESS = 0xFFFFFFFF


def format_of(head: bytes) -> str:
    """Return the format of a file by its first bytes, "" for one that is not among `KINDS`."""
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


def wav_head(rate: int) -> bytes:
    """Return the header of a mono 16-bit WAV of unknown length; `rate` is in Hz."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", _ENDLESS, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", _ENDLESS),
    )


LONGEST_INPUT = 64 * 1024
"""Limit on the input in characters."""
REFUSED = {"stream_format": "`stream` sends sound as it is made"}
_HEAD = 16
_RATES = range(1000, 400_000)
_Phrase = Annotated[str, msgspec.Meta(max_length=4096)]


class SpeechBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request. `language`, `stream` and `backend` are LocalAI's; `backend` is ignored."""

    model: Text
    input: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_INPUT)]
    voice: Annotated[
        _Phrase | None, msgspec.Meta(description="A name that the model knows; no path out of its folder.")
    ] = None
    response_format: Annotated[
        Literal["wav", "mp3", "opus", "aac", "flac", "pcm"] | None,
        msgspec.Meta(description="What the model's engine makes, or absent. Streams are `wav` or `pcm`."),
    ] = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4)] | None = None
    instructions: _Phrase | None = None
    language: _Phrase | None = None
    stream: bool | None = None


Spoken = FileAnswer | ByteStream


def speech(has_node_header: bool) -> Callable[[InferenceRequest], Awaitable[Spoken]]:
    """Return the handler of a route; `has_node_header` adds the node header (§6.3)."""

    async def answer(request: InferenceRequest) -> Spoken:
        body = parse_request(wire.parse_json_object(request.body))
        definition = await find_definition(body.model)
        request.model = definition.name
        call = _engine_request(body, definition.model)

        def headers() -> tuple[Header, ...]:
            return tuple(node_header(request)) if has_node_header else ()

        if body.stream:
            kind = KINDS[body.response_format or "wav"]
            return ByteStream(
                _stream(request, call, body.response_format != "pcm"),
                lambda: [(b"content-type", kind), *headers()],
            )
        file = await gateway.current().run(request, lambda engine: _synthesize(request, engine, call))
        format_name = format_of(file.read(_HEAD))
        if body.response_format not in (None, format_name):
            file.close()
            actual_format = format_name or "another format"
            raise InvalidInput(
                f"response_format: this model's engine makes {actual_format}", field="response_format"
            )
        return FileAnswer(file, KINDS.get(format_name, UNKNOWN), headers())

    return answer


def parse_request(fields: Mapping[str, Any]) -> SpeechBody:
    """Check a request's fields; raise InvalidInput, which names the first wrong field."""
    if fields.get("stream_format") != "audio":
        openai_common.refuse_fields(fields, REFUSED)
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


async def _synthesize(request: InferenceRequest, engine: BackendClient, template: TTSRequest) -> IO[bytes]:
    assert request.replica is not None
    async with open_files(request.replica.node_id, request.deadline) as files:
        call = TTSRequest()
        call.CopyFrom(template)
        call.dst = await files.temp()
        result = await engine.speak(call, request.deadline - clock.monotonic())
        if not result.success:
            raise BackendFailed(result.message or None)
        return await files.fetch(call.dst)


async def _stream(
    request: InferenceRequest, call: TTSRequest, has_header: bool
) -> AsyncGenerator[bytes, None]:
    for attempt in gateway.current().attempts(request):
        async with attempt as engine:
            first, rate = request.deadline - clock.monotonic(), USUAL_RATE
            replies = engine.speak_stream(call).within(first, conf.cluster().stream_stall)
            async with aclosing(replies):
                async for reply in replies:
                    rate = _rate(reply) or rate
                    if reply.audio:
                        header = wav_head(rate) if has_header and not request.begun else b""
                        request.begun = True
                        yield header + reply.audio
            if not request.begun:
                raise BackendFailed("the engine made no sound")
            return


def _rate(reply: Reply) -> int:
    """Return the sample rate in Hz that this reply reports, else 0."""
    try:
        metadata = orjson.loads(reply.message)
    except orjson.JSONDecodeError:
        return 0
    rate = metadata.get("sample_rate") if isinstance(metadata, dict) else None
    return int(rate) if isinstance(rate, int | float) and int(rate) in _RATES else 0
