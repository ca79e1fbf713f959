"""Both clients of `PredictStream` against an engine played frame by frame; ours against hostile ones."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from localai_cluster.rpc import errors, http2
from localai_cluster.rpc.client import GRPC, HTTP2, BackendClient
from localai_cluster.rpc.messages import PredictOptions
from nodes.gateway.generation import Pipe, TextDelta
from tests.support import http2_peer as wire
from tests.support.effort import EFFORT
from tests.support.http2_peer import FINE, FRAMES, RESPONSE, Peer, Script, frame, message, number, serving
from tests.support.ports import free_port

pytestmark = pytest.mark.rule("grpc-PredictStream")
PATIENCE = 600.0
"""Seconds; only for hangs."""
PROMPT = PredictOptions(Prompt="p" * 100)


@pytest.fixture(params=[HTTP2, GRPC])
def stream_client(request: pytest.FixtureRequest) -> str:
    """Each implementation."""
    return str(request.param)


@asynccontextmanager
async def calling(stream_client: str, script: Script, *more: Script) -> AsyncIterator[BackendClient]:
    """A client of an engine that plays a script."""
    async with serving(script, *more) as address:
        client = BackendClient(address, counted=True, stream_client=stream_client)
        yield client
        await client.close()


async def texts(client: BackendClient) -> list[str]:
    """The pieces of one stream."""
    return [reply.message.decode() async for reply in client.predict_stream(PROMPT)]


async def repeated(client: BackendClient) -> list[str]:
    """The same, repeated once, as callers do: grpc.aio may begin a call on a connection that is leaving."""
    try:
        return await texts(client)
    except errors.Lost:
        return await texts(client)


async def rest(peer: Peer) -> None:
    """Stay until the client closes the connection."""
    while True:
        await peer.read()


def answering(*parts: bytes, **headers: str) -> Script:
    """A script that answers each request with headers and these bytes, for stream 1."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        await peer.request()
        peer.send(peer.headers(1, RESPONSE | headers), *parts)
        await rest(peer)

    return script


TRAILERS = frame(wire.HEADERS, wire.END | wire.END_HEADERS, 1, b"\x00\x0bgrpc-status\x010")
A = frame(wire.DATA, 0, 1, message("a"))


@pytest.mark.rule("grpc-Predict")
@pytest.mark.parametrize("parts", [[TRAILERS], [A, A, TRAILERS], [A, A]], ids=["none", "two", "no end"])
async def test_a_response_of_one_message_has_one(parts: list[bytes]) -> None:
    async with calling(HTTP2, answering(*parts)) as client:
        with pytest.raises(errors.BackendFailed, match="message"):
            _ = [reply async for reply in client.predict(PROMPT)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        *(([A, frame(wire.RST, 0, 1, number(code))], errors.BackendFailed) for code in (0, 1, 2, 3, 5, 99)),
        ([A, frame(wire.RST, 0, 1, number(7))], errors.Lost),
        ([A, frame(wire.RST, 0, 1, number(8))], errors.Cancelled),
        ([A, frame(wire.RST, 0, 1, number(11))], errors.Busy),
        ([A, frame(wire.DATA, wire.END, 1)], errors.BackendFailed),
        ([A, frame(wire.DATA, 0, 1, message("b", compressed=1)), TRAILERS], errors.BackendFailed),
    ],
)
async def test_a_stream_that_ends_wrongly(
    stream_client: str, parts: list[bytes], expected: type[errors.BackendError]
) -> None:
    """By a reset, without a status, with a compressed message."""
    async with calling(stream_client, answering(*parts)) as client:
        with pytest.raises(errors.BackendError) as caught:
            await texts(client)
        assert type(caught.value) is expected


async def test_a_cancellation_found_after_the_deadline_is_the_deadline(stream_client: str) -> None:
    """An engine in Go cancels the call at its deadline, and may be earlier than the client's own timer."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        await peer.request()
        peer.send(peer.headers(1, RESPONSE), frame(wire.RST, 0, 1, number(http2.CANCEL)))
        over = clock.monotonic() + 0.3
        while clock.monotonic() < over:
            """Keep the event loop busy past the deadline."""
        await rest(peer)

    async with calling(stream_client, script) as client:
        with pytest.raises(errors.DeadlineExceeded):
            _ = [reply async for reply in client.predict_stream(PROMPT, 0.2)]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({":status": "200", **RESPONSE, "grpc-status": "5", "grpc-message": "gone"}, errors.BackendFailed),
        ({":status": "200", **RESPONSE, "grpc-status": "99"}, errors.BackendFailed),
        ({":status": "200", **RESPONSE, "grpc-status": "x"}, errors.BackendFailed),
        ({":status": "401"}, errors.Unauthenticated),
        ({":status": "404"}, errors.Unimplemented),
        ({":status": "503"}, errors.Busy),
        ({":status": "500"}, errors.BackendFailed),
        ({":status": "302"}, errors.BackendFailed),
    ],
)
async def test_an_answer_of_headers_alone(
    stream_client: str, headers: dict[str, str], expected: type[errors.BackendError]
) -> None:
    """Trailers only, and the statuses of a server that speaks no gRPC."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        stream = await peer.request()
        peer.send(peer.headers(stream, headers, wire.END))
        await rest(peer)

    async with calling(stream_client, script) as client:
        with pytest.raises(errors.BackendError) as caught:
            await texts(client)
        assert type(caught.value) is expected


@pytest.mark.parametrize(
    "parts",
    [
        [A, frame(wire.DATA, 0, 1, b"\0\0\0\0\2\xff\xff"), TRAILERS],
        [A, frame(wire.DATA, 0, 1, message("b")[:-1]), TRAILERS],
        [A, frame(wire.HEADERS, 4, 1, b"\x88")],
    ],
    ids=["no reply", "half a message", "headers twice"],
)
async def test_a_stream_of_nonsense(parts: list[bytes]) -> None:
    """Ours only: grpc.aio passes None for what is no reply."""
    async with calling(HTTP2, answering(*parts)) as client:
        with pytest.raises(errors.BackendFailed):
            await texts(client)


async def test_frames_may_be_cut_interleaved_and_unknown(stream_client: str) -> None:
    """Whatever HTTP/2 allows, also one byte at a time; padding, which gRPC's core refuses, to ours only."""
    padded = wire.PADDED if stream_client == HTTP2 else 0

    def pad(payload: bytes) -> bytes:
        return b"\x03" + payload + bytes(3) if padded else payload

    async def script(peer: Peer) -> None:
        await peer.begin({1: 4096, 6: 100_000, 999: 1})
        stream = await peer.request()
        block = peer.encoder.encode([*RESPONSE.items(), ("x-long", "ä" * 3000)])
        begin = struct.pack(">IB", 0, 10) + block[:100]
        body = b"".join(message(text) for text in ("one", "", "three" * 50))
        sent = [
            frame(wire.PRIORITY, 0, stream, bytes(5)),
            frame(wire.HEADERS, padded | wire.PRIORITIZED, stream, pad(begin)),
            frame(wire.CONTINUATION, 0, stream, block[100:200]),
            frame(wire.CONTINUATION, wire.END_HEADERS, stream, block[200:]),
            frame(200, 255, stream, b"unknown"),
            frame(wire.DATA, 0, stream),
            *(frame(wire.DATA, padded, stream, pad(body[at : at + 3])) for at in range(0, len(body), 3)),
            frame(wire.WINDOW, 0, stream, number(5)),
            peer.headers(stream, FINE, wire.END),
        ]
        for byte in b"".join(sent):
            peer.send(bytes([byte]))
            await peer.writer.drain()
        peer.send(peer.answer(await peer.request(), "next"))
        await rest(peer)

    async with calling(stream_client, script) as client:
        assert await texts(client) == ["one", "", "three" * 50]
        assert await texts(client) == ["next"]


async def test_pings_and_settings_are_answered(stream_client: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.begin()
        stream = await peer.request()
        peer.send(frame(wire.PING, payload=b"12345678"), frame(wire.PING, wire.ACK, payload=b"unwanted"))
        while (found := await peer.read()).kind != wire.PING or not found.flags & wire.ACK:
            pass
        assert found.payload == b"12345678"
        peer.send(wire.settings({3: 10}))
        while (found := await peer.read()).kind != wire.SETTINGS or not found.flags & wire.ACK:
            pass
        peer.send(peer.answer(stream, "a"))
        await rest(peer)

    async with calling(stream_client, script) as client:
        assert await texts(client) == ["a"]


async def test_a_request_keeps_to_the_engines_windows(stream_client: str) -> None:
    """Those of stream and connection, which may shrink under way, and to the size of its frames."""
    large = PredictOptions(Prompt="p" * 200_000)

    async def script(peer: Peer) -> None:
        await peer.begin({4: 10})
        stream = (await peer.find(wire.HEADERS)).stream
        size = len((await peer.find(wire.DATA)).payload)
        assert size == 10
        peer.send(wire.settings({4: 5}), frame(wire.WINDOW, 0, stream, number(20)))
        size += len((await peer.find(wire.DATA)).payload)
        assert size == 25
        peer.send(wire.settings({4: 2**31 - 100}))
        while size < 65_535:
            found = await peer.find(wire.DATA)
            size += len(found.payload)
            assert len(found.payload) <= 16_384
        assert size == 65_535
        peer.send(frame(wire.WINDOW, 0, 0, number(1_000_000)))
        while not found.flags & wire.END:
            found = await peer.find(wire.DATA)
            size += len(found.payload)
        assert size == len(large.SerializeToString()) + 5
        peer.send(peer.answer(stream, "a"))
        await rest(peer)

    async with calling(stream_client, script) as client:
        assert [reply.message async for reply in client.predict_stream(large)] == [b"a"]


async def test_an_answer_before_the_request_is_sent_ends_the_call(stream_client: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.begin({4: 0})
        stream = (await peer.find(wire.HEADERS)).stream
        peer.send(peer.answer(stream, "early"))
        await peer.find(wire.RST, stream)
        peer.send(wire.settings({4: 65_535}))
        peer.send(peer.answer(await peer.request(), "next"))
        await rest(peer)

    async with calling(stream_client, script) as client:
        assert await texts(client) == ["early"]
        assert await texts(client) == ["next"]


async def test_a_connection_that_goes_away_finishes_its_streams(stream_client: str) -> None:
    """The next call goes to another connection."""

    async def leaving(peer: Peer) -> None:
        await peer.begin()
        stream = await peer.request()
        peer.send(wire.goaway(2**31 - 1), wire.goaway(stream), peer.answer(stream, "a"))
        await rest(peer)

    async def staying(peer: Peer) -> None:
        await peer.begin()
        peer.send(peer.answer(await peer.request(), "b"))
        await rest(peer)

    async with calling(stream_client, leaving, staying) as client:
        assert await texts(client) == ["a"]
        assert await (texts(client) if stream_client == HTTP2 else repeated(client)) == ["b"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", wire.goaway(0)])
async def test_a_connection_that_never_becomes_http2_is_refused(stream_client: str, answer: bytes) -> None:
    """The request did not leave, so another replica may take it."""

    async def script(peer: Peer) -> None:
        peer.send(answer)
        await peer.writer.drain()

    async with calling(stream_client, script) as client:
        with pytest.raises(errors.Refused):
            await texts(client)
    closed = BackendClient(f"127.0.0.1:{free_port()}", counted=True, stream_client=stream_client)
    with pytest.raises(errors.Refused):
        await texts(closed)
    await closed.close()


async def test_what_a_leaving_engine_skips_goes_to_its_next_connection_once() -> None:
    """Ours only: grpc.aio fails such a call. What waits for a place moves too."""

    async def leaving(peer: Peer) -> None:
        await peer.begin({3: 1})
        await peer.request()
        peer.send(wire.goaway(0))
        await rest(peer)

    async def staying(peer: Peer) -> None:
        await peer.begin()
        for _ in range(2):
            peer.send(peer.answer(await peer.request(), "moved"))
        await rest(peer)

    async with calling(HTTP2, leaving, staying) as client:
        assert [*await asyncio.gather(texts(client), texts(client))] == [["moved"], ["moved"]]
    async with calling(HTTP2, leaving) as client:
        with pytest.raises(errors.Lost, match="GOAWAY"):
            await texts(client)


async def test_a_burst_reaches_the_client_in_one_piece_and_a_lone_token_at_once() -> None:
    """The sender of a response takes from its pipe as often as messages arrive, and not for each of them."""
    is_seen = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.begin()
        stream = await peer.request()
        burst = [frame(wire.DATA, 0, stream, message("b")) for _ in range(36)]
        peer.send(peer.headers(stream, RESPONSE), *burst)
        await is_seen.wait()
        is_seen.clear()
        peer.send(frame(wire.DATA, 0, stream, message("alone")))
        await is_seen.wait()
        peer.send(peer.headers(stream, FINE, wire.END))
        await rest(peer)

    pipe, sizes = Pipe(), []

    async def produce(client: BackendClient) -> None:
        async for reply in client.predict_stream(PROMPT):
            await pipe.put(TextDelta(0, reply.message.decode()))
        pipe.close()

    async with calling(HTTP2, script) as client:
        producer = asyncio.create_task(produce(client))
        while not pipe.ended:
            if deltas := await pipe.take():
                sizes.append(len(deltas))
                is_seen.set()
        await producer
    assert sizes == [36, 1]


def flood(*parts: bytes) -> Script:
    """A script that repeats bytes without an end, and reads nothing."""

    async def script(peer: Peer) -> None:
        await peer.begin()
        await peer.request()
        peer.send(peer.headers(1, RESPONSE))
        while True:
            peer.send(*parts * 1000)
            await peer.writer.drain()

    return script


HOSTILE = {
    "larger frame": answering(frame(wire.DATA, 0, 1, bytes(16_385))),
    "more than the window": flood(frame(wire.DATA, 0, 1, bytes(15_000))),
    "data on a stream to come": answering(frame(wire.DATA, 0, 3, b"x")),
    "data on no stream": answering(frame(wire.DATA, 0, 0, b"x")),
    "headers on its own stream": answering(frame(wire.HEADERS, 4, 2)),
    "a push": answering(frame(wire.PUSH, 4, 1, number(2))),
    "padding longer than the frame": answering(frame(wire.DATA, wire.PADDED, 1, b"\x05abc")),
    "an empty padded frame": answering(frame(wire.DATA, wire.PADDED, 1)),
    "a continuation alone": answering(frame(wire.CONTINUATION, 4, 1)),
    "data within a header block": answering(frame(wire.HEADERS, 0, 1), frame(wire.DATA, 0, 1)),
    "a short ping": answering(frame(wire.PING, payload=b"1")),
    "a ping on a stream": answering(frame(wire.PING, 0, 1, bytes(8))),
    "a short reset": answering(frame(wire.RST, 0, 1, b"1")),
    "a short goaway": answering(frame(wire.GOAWAY, payload=b"1")),
    "settings with a wrong size": answering(frame(wire.SETTINGS, payload=b"1")),
    "settings with a wrong window": answering(wire.settings({4: 2**31})),
    "settings with a wrong frame size": answering(wire.settings({5: 1})),
    "an empty window update": answering(frame(wire.WINDOW, 0, 1, number(0))),
    "a window that overflows": answering(frame(wire.WINDOW, 0, 0, number(2**31 - 1))),
    "headers that are none": answering(frame(wire.HEADERS, 5, 1, b"\xff\xff\xff\xff")),
    "a header bomb": answering(
        frame(wire.HEADERS, 4, 1, b"\x40\x01x\x7f\xa1\x1e" + b"v" * 4000),
        frame(wire.HEADERS, 5, 1, b"\xbe" * 16_000),
    ),
    "header blocks without an end": flood(
        *(frame(kind, 0, 1, bytes(100)) for kind in (wire.HEADERS, *[wire.CONTINUATION] * 40))
    ),
    "empty continuations": flood(frame(wire.HEADERS, 0, 1), *(frame(wire.CONTINUATION, 0, 1),) * 40),
}


@pytest.mark.parametrize("script", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_engine_gets_an_error(script: Script) -> None:
    """The next call gets its own, and nothing is left open."""
    async with calling(HTTP2, script) as client:
        for _ in range(2):
            with pytest.raises(errors.BackendFailed, match="the engine"):
                await texts(client)
        assert client._streams is not None
        assert not client._streams._calls


@settings(max_examples=25 * EFFORT)
@given(frames=st.lists(FRAMES | st.binary(max_size=30), max_size=30))
def test_whatever_an_engine_sends_the_call_ends(frames: list[bytes]) -> None:
    """With replies or with an error that its caller knows; then the engine closes the connection.

    Only over our client: some of these frames abort the process of grpcio 1.85.1.
    """

    async def script(peer: Peer) -> None:
        await peer.begin()
        await peer.request()
        peer.send(*frames)
        await peer.writer.drain()

    async def scenario() -> None:
        async with calling(HTTP2, script) as client:
            for _ in range(2):
                with suppress(errors.BackendError):
                    await asyncio.wait_for(texts(client), PATIENCE)

    asyncio.run(scenario())


@pytest.mark.parametrize("claimed", [2**32 - 1, 50 * 2**20 + 1])
async def test_the_claimed_length_of_a_message_is_limited(claimed: int) -> None:
    """Before anything of it is stored; nothing is granted to a stream whose reader does not wait."""
    async with calling(HTTP2, answering(frame(wire.DATA, 0, 1, message("a", length=claimed)))) as client:
        with pytest.raises(errors.BackendFailed, match="larger than max"):
            await texts(client)


async def test_a_stream_that_is_not_read_holds_no_more_than_its_window() -> None:
    """Also if its messages are empty, or one message is larger than the window."""
    sent = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.begin()
        stream = await peer.request()
        peer.send(peer.headers(stream, RESPONSE), frame(wire.DATA, 0, stream, message("a")))
        left = http2.STREAM_WINDOW - len(message("a"))
        block = bytes(5) * 3000
        while left:
            peer.send(frame(wire.DATA, 0, stream, block[:left]))
            left -= min(left, len(block))
        peer.send(frame(wire.PING, payload=bytes(8)))
        while (found := await peer.read()).kind != wire.PING:
            assert found.kind != wire.WINDOW
        sent.set()
        granted = struct.unpack(">I", (await peer.find(wire.WINDOW, stream)).payload)[0]
        assert granted <= http2.STREAM_WINDOW
        peer.send(frame(wire.DATA, 0, stream, bytes(-(http2.STREAM_WINDOW - len(message("a"))) % 5)))
        peer.send(peer.headers(stream, FINE, wire.END))
        await rest(peer)

    async with calling(HTTP2, script) as client:
        replies = aiter(client.predict_stream(PROMPT))
        assert (await anext(replies)).message == b"a"
        await sent.wait()
        assert len([reply async for reply in replies]) == -(-(http2.STREAM_WINDOW - len(message("a"))) // 5)
