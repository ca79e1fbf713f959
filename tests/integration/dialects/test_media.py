"""Sound and images through the edge: a scripted engine over gRPC, a scripted worker's files over HTTP."""

import asyncio
import base64
import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from django.contrib.auth import get_user_model
from pytest_django import Settings

from localai_cluster import edge
from localai_cluster.accounts.principals import create_api_key
from localai_cluster.asgi import application
from localai_cluster.rpc.messages import Reply, TranscriptStreamResponse
from nodes.dialects import audio
from nodes.gateway import endpoint
from nodes.models import BackendNode
from tests.conftest import until
from tests.support import hot
from tests.support.environment import API_KEY
from tests.support.media import STAGING, TEXT, WAV, Artist, Disk, form
from tests.support.replicas import forget_nodes
from tests.support.scripted import Refusal, running
from tests.support.served import served
from tests.support.streaming import Streamed, asked

pytestmark = pytest.mark.django_db(transaction=True)

TRANSCRIBE, SPEAK, DRAW = "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations"
DEFINITION = "name: m\nbackend: scripted\nparameters: {model: m.bin}\n"
SAY = {"model": "m", "input": "Hello."}
Scenario = Callable[[], Awaitable[Any]]


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A models folder with `m`, and a folder for temporary files in which nothing may have a name."""
    (tmp_path / "m.yaml").write_text(DEFINITION)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=0.5)


@asynccontextmanager
async def replicas(*artists: Artist) -> AsyncIterator[None]:
    """These engines as replicas of `m`. Afterwards nothing is in flight and no file has anything in it."""
    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(hot.serving())
        for number, artist in enumerate(artists):
            address = await stack.enter_async_context(running(artist))
            await stack.enter_async_context(artist.disk.serving())
            at = artist.disk.address
            await hot.in_thread(
                lambda n=number, a=address, h=at: hot.replica(
                    hot.node(f"n{n}", http_address=h), "m", index=n, address=a
                )
            )
        yield
        assert picker.in_flight() == 0
        for artist in artists:
            await until(artist.disk.emptied)
    assert all(artist.open == 0 for artist in artists)
    assert os.listdir(tempfile.gettempdir()) == []


def play(scenario: Scenario, *artists: Artist) -> Any:
    """Runs a scenario with these engines."""

    async def whole() -> Any:
        async with replicas(*artists):
            return await scenario()

    forget_nodes()  # of an earlier play in the same test
    outcome = asyncio.run(whole())
    assert set(hot.counts().values()) <= {0}
    return outcome


async def sent(path: str, body: Any, kind: str = "application/json") -> Streamed:
    """An answer, read to its end."""
    async with asked(application, path, body, kind) as (answer, work):
        await work
        return answer


def one(path: str, body: Any, artist: Artist | None = None, kind: str = "application/json") -> Streamed:
    """The answer of one engine."""
    answer: Streamed = play(lambda: sent(path, body, kind), artist or Artist())
    return answer


def transcript(artist: Artist, **fields: Any) -> Streamed:
    body, kind = form({"model": "m", **fields})
    return one(TRANSCRIBE, body, artist, kind)


def told(answer: Streamed) -> Any:
    return json.loads(answer.taken)


@pytest.mark.rule("grpc-AudioTranscription")
@pytest.mark.rule("worker-14", "http-6.3", "T-INF-13")
def test_a_transcript(settings: Settings) -> None:
    """The file is on the worker while the engine reads it, under a key of this request, and then empty."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, expose_node_header=True)
    artist = Artist()
    answer = transcript(artist, prompt="Names: Ann", language="en", temperature="0.5")
    assert (answer.status, told(answer)) == (200, {"text": "Hello there. Bye."})
    assert answer.headers["x-localai-node"] == str(BackendNode.objects.get().id)
    (call,) = artist.others
    assert (call.prompt, call.language, call.temperature) == ("Names: Ann", "en", 0.5)
    assert call.ModelIdentity == "m.bin"
    put, emptied = artist.disk.seen
    key = put.removeprefix("PUT ")
    assert artist.heard == [b"sound"]
    assert call.dst == STAGING + key
    folder, name = key.removeprefix("ephemeral/inputs/").split("/")
    assert (len(folder), name) == (8, "audio.wav")
    assert emptied == put


def test_transcripts_in_every_form() -> None:
    answers = {
        name: transcript(Artist(), response_format=name) for name in ("text", "srt", "vtt", "verbose_json")
    }
    assert answers["text"].taken == b"Hello there. Bye.\n"
    assert answers["text"].headers["content-type"].startswith("text/plain")
    assert answers["srt"].taken.decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:01:01,000 --> 01:01:02,000\nBye.\n\n"
    )
    assert answers["vtt"].taken.decode().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n")
    whole = told(answers["verbose_json"])
    assert (whole["language"], whole["duration"], whole["task"]) == ("en", 2.5, "transcribe")
    assert [(part["start"], part["end"]) for part in whole["segments"]] == [(0, 1.5), (3661, 3662)]
    assert "words" not in whole
    words = transcript(Artist(), response_format="verbose_json", **{"timestamp_granularities[]": ["word"]})
    assert told(words)["words"] == [{"word": "Hello", "start": 0, "end": 1}]
    assert "segments" not in told(words)


@pytest.mark.rule("grpc-AudioTranscriptionStream")
@pytest.mark.rule("T-INF-14")
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "an engine that does not stream"])
def test_a_streamed_transcript(streams: bool) -> None:
    pieces = [TranscriptStreamResponse(delta="Hello"), TranscriptStreamResponse(delta=" there")]
    pieces += [TranscriptStreamResponse(final_result=TEXT)]
    answer = transcript(Artist(streams=streams, pieces=pieces), stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done, end = answer.events
    assert end == "[DONE]"
    assert done == {"type": "transcript.text.done", "text": "Hello there. Bye."}
    said = ["Hello", " there"] if streams else ["Hello there. Bye."]
    assert [one["delta"] for one in deltas] == said


def test_a_transcript_that_breaks_off_ends_with_an_error() -> None:
    pieces = [TranscriptStreamResponse(delta="Hello"), Refusal(grpc.StatusCode.INTERNAL, "out of memory")]
    answer = transcript(Artist(pieces=pieces), stream="true")
    assert answer.status == 200
    assert answer.events[-2]["error"]["message"] == "out of memory"


@pytest.mark.parametrize(
    ("fields", "sound", "named"),
    [
        ({}, b"x", "model"),
        ({"model": "m"}, None, "file"),
        ({"model": "m"}, b"", "file"),
        ({"model": "m", "temperature": "hot"}, b"x", "temperature"),
        ({"model": "m", "temperature": "7"}, b"x", "temperature"),
        ({"model": "m", "response_format": "pdf"}, b"x", "response_format"),
        ({"model": "m", "response_format": "srt", "stream": "true"}, b"x", "response_format"),
        ({"model": "m", "timestamp_granularities[]": ["word"]}, b"x", "timestamp_granularities"),
        ({"model": "m", "prompt": b"\xff\xfe"}, b"x", "prompt"),
        ({"model": "m", "stream": "perhaps"}, b"x", "stream"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_a_wrong_field_of_a_form_is_named(fields: dict[str, Any], sound: bytes | None, named: str) -> None:
    body, kind = form(fields, sound)
    answer = one(TRANSCRIBE, body, kind=kind)
    assert (answer.status, told(answer)["error"]["param"]) == (400, named)


def test_what_is_no_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body, kind = form({"model": "m"})
    assert one(TRANSCRIBE, {"model": "m"}).status == 400
    assert one(TRANSCRIBE, body, kind="multipart/form-data").status == 400
    assert one(TRANSCRIBE, body[:40], kind=kind).status == 400
    assert one(TRANSCRIBE, b"", kind=kind).status == 400
    many = form({f"field{number}": "x" for number in range(2000)})[0]
    assert one(TRANSCRIBE, many, kind=kind).status == 400
    small = endpoint.Endpoint(handler=audio.transcribe, max_body_bytes=60, has_form=True)
    monkeypatch.setitem(edge._APP_BY_PATH, TRANSCRIBE, small)
    answer = one(TRANSCRIBE, body, kind=kind)
    assert answer.status == 413
    assert "60 bytes" in told(answer)["error"]["message"]


@pytest.mark.rule("grpc-TTS")
def test_a_full_disk_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    answer = transcript(Artist())
    assert (answer.status, told(answer)["error"]["type"]) == (503, "server_error")


@pytest.mark.rule("worker-14", "http-6.3", "T-INF-11")
def test_speech(settings: Settings) -> None:
    """The engine's file, as it is; of the two routes only OpenAI's tells the node."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, expose_node_header=True)
    artist = Artist()
    body = SAY | {"voice": "ann", "speed": 1.5, "instructions": "slowly", "response_format": "wav"}
    answer = one(SPEAK, body, artist)
    assert (answer.status, answer.taken, answer.whole) == (200, WAV, True)
    assert (answer.headers["content-type"], answer.headers["content-length"]) == ("audio/wav", str(len(WAV)))
    assert "x-localai-node" in answer.headers
    (call,) = artist.others
    assert (call.text, call.voice, call.instructions, call.model) == ("Hello.", "ann", "slowly", "m.bin")
    assert dict(call.params) == {"speed": "1.5", "response_format": "wav"}
    output = call.dst.removeprefix(STAGING)
    assert artist.disk.seen == ["POST temp", f"GET {output}", f"PUT {output}"]
    again = one("/tts", SAY, Artist(sound=b"ID3 music"))
    assert (again.taken, again.headers["content-type"]) == (b"ID3 music", "audio/mpeg")
    assert "x-localai-node" not in again.headers


@pytest.mark.rule("grpc-TTSStream")
@pytest.mark.rule("T-INF-12")
def test_speech_while_it_is_made() -> None:
    """The first piece leaves before the engine has made the second."""
    rate = Reply(message=b'{"sample_rate": 22050}')

    async def scenario() -> Streamed:
        async with asked(application, SPEAK, SAY | {"stream": True}) as (answer, work):
            while b"one" not in answer.taken:
                await answer.news()
            assert not work.done()
            gate.set()
            await work
            return answer

    gate = asyncio.Event()
    artist = Artist(pieces=[rate, Reply(audio=b"one"), gate, Reply(audio=b"two")])
    answer: Streamed = play(scenario, artist)
    assert (answer.status, answer.headers["content-type"], answer.whole) == (200, "audio/wav", True)
    assert (answer.taken[:4], answer.taken[44:]) == (b"RIFF", b"onetwo")
    assert int.from_bytes(answer.taken[24:28], "little") == 22050
    assert artist.others[0].dst == ""
    bare = one(SPEAK, SAY | {"stream": True, "response_format": "pcm"}, Artist(pieces=[Reply(audio=b"one")]))
    assert (bare.taken, bare.headers["content-type"]) == (b"one", "audio/pcm")


def test_speech_that_breaks_off_has_no_end() -> None:
    broken = Refusal(grpc.StatusCode.INTERNAL, "out of memory")
    answer = one(SPEAK, SAY | {"stream": True}, Artist(pieces=[Reply(audio=b"one"), broken]))
    assert (answer.status, answer.whole) == (200, False)
    before = one(SPEAK, SAY | {"stream": True}, Artist(pieces=[broken]))
    assert (before.status, told(before)["error"]["message"]) == (503, "out of memory")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (SPEAK, {"model": "m"}, "input"),
        (SPEAK, SAY | {"input": ""}, "input"),
        (SPEAK, SAY | {"input": "x" * (64 * 1024 + 1)}, "input"),
        (SPEAK, SAY | {"voice": "/etc/passwd"}, "voice"),
        (SPEAK, SAY | {"voice": "../secret"}, "voice"),
        (SPEAK, SAY | {"voice": "https://example.org/a.wav"}, "voice"),
        (SPEAK, SAY | {"voice": 3}, "voice"),
        (SPEAK, SAY | {"speed": 9}, "speed"),
        (SPEAK, SAY | {"response_format": "midi"}, "response_format"),
        (SPEAK, SAY | {"response_format": "pcm"}, "response_format"),
        (SPEAK, SAY | {"response_format": "mp3"}, "response_format"),
        (SPEAK, SAY | {"response_format": "mp3", "stream": True}, "response_format"),
        (SPEAK, SAY | {"stream_format": "sse"}, "stream_format"),
        (DRAW, {"model": "m"}, "prompt"),
        (DRAW, {"model": "m", "prompt": "x", "n": 9}, "n"),
        (DRAW, {"model": "m", "prompt": "x", "size": "big"}, "size"),
        (DRAW, {"model": "m", "prompt": "x", "size": "9999x64"}, "size"),
        (DRAW, {"model": "m", "prompt": "x", "response_format": "url"}, "response_format"),
        (DRAW, {"model": "m", "prompt": "x", "file": "aGk="}, "file"),
        (DRAW, {"model": "m", "prompt": "x", "step": 0}, "step"),
        (DRAW, {"model": "m", "prompt": "x", "seed": "any"}, "seed"),
        (DRAW, {"model": "nobody", "prompt": "x"}, "model"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_a_wrong_field_is_named(path: str, fields: dict[str, Any], named: str) -> None:
    answer = one(path, fields)
    assert answer.status == (404 if named == "model" else 400)
    assert told(answer)["error"]["param"] == named


@pytest.mark.rule("grpc-GenerateImage")
@pytest.mark.rule("worker-14", "T-INF-7")
def test_images() -> None:
    """D-IMAGE-URL: they are inside the answer."""
    artist = Artist()
    answer = one(DRAW, {"model": "m", "prompt": "a cat|a dog", "n": 2, "size": "64x32", "seed": 7}, artist)
    assert answer.status == 200
    images = [base64.b64decode(entry["b64_json"]) for entry in told(answer)["data"]]
    assert images == [b"a cat 7", b"a cat 8"]
    assert {(call.width, call.height, call.step) for call in artist.others} == {(64, 32, 15)}
    assert {call.negative_prompt for call in artist.others} == {"a dog"}


def test_files_that_a_worker_does_not_take_send_the_request_elsewhere() -> None:
    """The engine has done nothing yet."""
    first, second = Artist(), Artist()
    first.disk.status = 500
    answer: Streamed = play(lambda: sent(SPEAK, SAY), first, second)
    assert (answer.status, answer.taken) == (200, WAV)
    assert (len(first.others), len(second.others)) == (0, 1)
    lost = Artist()
    lost.disk.status = 401
    refused = one(SPEAK, SAY, lost)
    assert (refused.status, told(refused)["error"]["code"]) == (503, "worker_files_unavailable")


@pytest.mark.parametrize(
    ("status", "ending"), [(401, "answers 401 to POST of a file"), (0, "takes and gives no files right now")]
)
def test_only_an_administrator_reads_which_node_takes_no_files(status: int, ending: str) -> None:
    """A worker that refuses files, and a node whose address may not be dialled."""

    async def scenario() -> None:
        if not status:
            await BackendNode.objects.aupdate(http_address="192.0.2.9:99")
        refused = await hot.Client(application, user_key).post(SPEAK, SAY)
        assert refused is not None
        assert (refused.status, refused.body["error"]["code"]) == (503, "worker_files_unavailable")
        assert refused.body["error"]["message"] == f"the worker of the model's node {ending}"
        shown = await hot.Client(application).post(SPEAK, SAY)
        assert shown is not None
        assert "node n0" in shown.body["error"]["message"]

    user_key = create_api_key(get_user_model().objects.create_user("ann"), "k")[1]
    artist = Artist()
    artist.disk.status = status
    play(scenario, artist)


def test_an_engine_that_writes_nothing_has_failed() -> None:
    answer = one(SPEAK, SAY, Artist(sound=b""))
    assert (answer.status, told(answer)["error"]["message"]) == (503, "no voice")


@pytest.mark.rule("R2.73")
@pytest.mark.parametrize("path", [TRANSCRIBE, SPEAK, "stream"])
def test_a_leaving_client_ends_the_engines_work(path: str) -> None:
    async def scenario() -> None:
        heard = form({"model": "m"})
        body, kind = heard if path == TRANSCRIBE else (SAY | {"stream": path == "stream"}, "application/json")
        where = SPEAK if path == "stream" else path
        async with asked(application, where, body, kind) as (answer, work):
            await until(lambda: artist.open > 0)
            answer.left.set()
            await work
            assert answer.whole is False
        await until(lambda: artist.open == 0)

    artist = Artist(pieces=[Reply(audio=b"one")] * (path == "stream") + [asyncio.Event()])
    play(scenario, artist)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_process_that_stops_answers_what_has_not_begun(stream: bool) -> None:
    async def scenario() -> Streamed:
        async with asked(application, SPEAK, SAY | {"stream": stream}) as (answer, work):
            await until(lambda: artist.open > 0)
            endpoint.cancel_all_answers()
            await work
            return answer

    artist = Artist(pieces=[asyncio.Event()])
    answer: Streamed = play(scenario, artist)
    assert (answer.status, answer.headers["retry-after"], answer.whole) == (503, "1", True)
    assert "stopping" in told(answer)["error"]["message"]


def test_a_process_that_stops_breaks_sound_off_that_has_begun() -> None:
    async def scenario() -> Streamed:
        async with asked(application, SPEAK, SAY | {"stream": True}) as (answer, work):
            while b"one" not in answer.taken:
                await answer.news()
            endpoint.cancel_all_answers()
            await work
            return answer

    answer: Streamed = play(scenario, Artist(pieces=[Reply(audio=b"one"), asyncio.Event()]))
    assert (answer.status, answer.whole) == (200, False)


def test_openais_client() -> None:
    """What it sends is understood, and what it reads."""

    async def scenario() -> None:
        async with (
            served() as url,
            openai.AsyncOpenAI(base_url=url, api_key=API_KEY, max_retries=0) as client,
        ):
            text = await client.audio.transcriptions.create(
                model="m",
                file=("talk.mp3", b"sound"),
                response_format="verbose_json",
                timestamp_granularities=["word", "segment"],
            )
            assert text.words is not None
            assert (text.text, text.words[0].word) == ("Hello there. Bye.", "Hello")
            events = [
                event
                async for event in await client.audio.transcriptions.create(
                    model="m", file=b"sound", stream=True
                )
            ]
            assert events[-1].type == "transcript.text.done"
            said = await client.audio.speech.create(model="m", voice="ann", input="Hello.")
            assert said.content == WAV
            drawn = await client.images.generate(model="m", prompt="a cat", n=1, size="512x512")
            assert drawn.data is not None
            assert base64.b64decode(drawn.data[0].b64_json or "").startswith(b"a cat")

    play(scenario, Artist(disk=Disk()))
