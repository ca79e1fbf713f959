"""`POST /v1/audio/speech` and `/tts`: a text as sound.

The engine writes a file on its worker, which is fetched and sent on; with `stream` its sound is sent while it
is made.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Annotated, Any, Literal

import msgspec
import orjson

from localai_cluster import clock, conf
from localai_cluster.errors import InvalidInput
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendFailed, DeadlineExceeded
from localai_cluster.rpc.messages import Reply, TTSRequest
from localai_cluster.web import wire
from localai_cluster.web.wire import Header
from nodes.inference import audio_formats, gateway, openai_bodies
from nodes.inference.byte_streams import ByteSink, ByteStream, FileAnswer
from nodes.inference.defined import defined
from nodes.inference.limits import silence
from nodes.inference.openai_bodies import Text
from nodes.inference.streams import node_header
from nodes.inference.worker_files import open_files
from nodes.routing.request import InferenceRequest

LONGEST_INPUT = 64 * 1024
"""Characters."""
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


def speech(tells_node: bool) -> Callable[[InferenceRequest], Awaitable[Spoken]]:
    """The handler of a route; §6.3 says which of them tells the node."""

    async def answer(request: InferenceRequest) -> Spoken:
        body = parse(wire.json_object(request.body))
        definition = await defined(body.model)
        request.model = definition.name
        asked = _asked(body, definition.model)

        def headers() -> tuple[Header, ...]:
            return tuple(node_header(request)) if tells_node else ()

        if body.stream:
            kind = audio_formats.KINDS[body.response_format or "wav"]
            return ByteStream(
                lambda sink: _stream(request, asked, body.response_format != "pcm", sink),
                lambda: [(b"content-type", kind), *headers()],
            )
        file = await gateway.current().run(request, lambda engine: _spoken(request, engine, asked))
        found = audio_formats.format_of(file.read(_HEAD))
        if body.response_format not in (None, found):
            file.close()
            made = found or "another format"
            raise InvalidInput(f"response_format: this model's engine makes {made}", field="response_format")
        return FileAnswer(file, audio_formats.KINDS.get(found, audio_formats.UNKNOWN), headers())

    return answer


def parse(fields: Mapping[str, Any]) -> SpeechBody:
    """Checks a request's fields; raises InvalidInput that names the first wrong one."""
    if fields.get("stream_format") != "audio":
        openai_bodies.refuse(fields, REFUSED)
    body = wire.typed(fields, SpeechBody)
    # Engines read such a voice from their machine.
    if body.voice and (body.voice[0] in "/\\~" or ".." in body.voice or "://" in body.voice):
        raise InvalidInput("voice: a name is needed, no path or address", field="voice")
    if body.stream and body.response_format not in (None, "wav", "pcm"):
        raise InvalidInput("response_format: a stream is wav or pcm", field="response_format")
    if body.response_format == "pcm" and not body.stream:
        raise InvalidInput("response_format: pcm is for `stream` only", field="response_format")
    return body


def _asked(body: SpeechBody, model: str) -> TTSRequest:
    asked = TTSRequest(text=body.input, model=model, voice=body.voice or "", ModelIdentity=model)
    if body.language:
        asked.language = body.language
    if body.instructions:
        asked.instructions = body.instructions
    # The protocol has no fields for these; an engine may look here.
    if body.speed is not None:
        asked.params["speed"] = f"{body.speed:g}"
    if body.response_format:
        asked.params["response_format"] = body.response_format
    return asked


async def _spoken(request: InferenceRequest, engine: BackendClient, asked: TTSRequest) -> IO[bytes]:
    assert request.replica is not None
    async with open_files(request.replica.node_id, request.deadline) as files:
        call = TTSRequest()
        call.CopyFrom(asked)
        call.dst = await files.temp()
        result = await engine.speak(call, request.deadline - clock.monotonic())
        if not result.success:
            raise BackendFailed(result.message or None)
        return await files.fetch(call.dst)


async def _stream(request: InferenceRequest, asked: TTSRequest, head: bool, sink: ByteSink) -> None:
    async def work(engine: BackendClient) -> None:
        replies = engine.speak_stream(asked)
        first = request.deadline - clock.monotonic()
        try:
            async with silence(conf.cluster().stream_stall, first) as limit:
                rate = audio_formats.USUAL_RATE
                async for reply in replies:
                    # Only the engine's time counts, not that of a client who reads slowly.
                    limit.pause()
                    rate = _rate(reply) or rate
                    if reply.audio:
                        before = audio_formats.wav_head(rate) if head and not request.begun else b""
                        request.begun = True
                        await sink(before + reply.audio)
                    limit.begin()
        except TimeoutError:
            raise DeadlineExceeded("the engine has sent nothing for too long") from None
        finally:
            replies.cancel()
        if not request.begun:
            raise BackendFailed("the engine made no sound")

    await gateway.current().run(request, work)


def _rate(reply: Reply) -> int:
    """Samples a second, if this reply says so."""
    try:
        told = orjson.loads(reply.message)
    except orjson.JSONDecodeError:
        return 0
    rate = told.get("sample_rate") if isinstance(told, dict) else None
    return int(rate) if isinstance(rate, int | float) and int(rate) in _RATES else 0
