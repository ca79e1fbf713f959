"""Our HTTP/2 client and an engine that may send anything: it never fails, hangs or grows (no network)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import clock
from localai_cluster.kit.addresses import Address
from localai_cluster.rpc import http2
from localai_cluster.rpc.messages import Reply
from localai_cluster.rpc.stream_client import StreamCall, StreamChannel
from tests.conftest import until
from tests.support import http2_peer as wire
from tests.support.http2_peer import FINE, FRAMES, RESPONSE, block, frame, message, number

pytestmark = pytest.mark.rule("grpc-PredictStream")
PATIENCE = 600.0
REQUEST = b"request" * 10


class Transport(asyncio.Transport):
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.output = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.output += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class Engine:
    """The other end of a channel's first connection; every later one is refused."""

    def __init__(self) -> None:
        self.channel = StreamChannel(Address("engine.example", 1), ())
        self.transport = Transport()
        self.connection: http2.Connection | None = None
        self.failures: list[dict[str, Any]] = []
        self._dialled = asyncio.Event()

    def call(self, request: bytes, timeout: float | None) -> StreamCall[Reply]:
        """A stream."""
        return StreamCall(self.channel, "PredictStream", Reply.FromString, request, timeout)

    async def dial(self, factory: Any, host: str, port: int) -> tuple[Transport, http2.Connection]:
        """Stand in for the loop's `create_connection`."""
        if self.connection is not None:
            raise ConnectionRefusedError("refused")
        self.connection = factory()
        self.connection.connection_made(self.transport)
        self._dialled.set()
        return self.transport, self.connection

    async def dialled(self) -> http2.Connection:
        """The client's connection."""
        await self._dialled.wait()
        assert self.connection is not None
        return self.connection

    async def send(self, data: bytes) -> None:
        """Let the client read these bytes, and its tasks run."""
        connection = await self.dialled()
        if not self.transport.is_closed:
            connection.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def playing() -> AsyncIterator[Engine]:
    """An engine; at its end nothing may be left, and nothing may have failed on the way."""
    loop, engine = asyncio.get_running_loop(), Engine()
    loop.set_exception_handler(lambda _, context: engine.failures.append(context))
    loop.create_connection = engine.dial  # type: ignore[method-assign,assignment]
    yield engine
    if engine.connection is not None:
        engine.connection.connection_lost(None)
    await engine.channel.close(PATIENCE)
    assert not engine.channel._calls
    assert not engine.channel._queue
    assert engine.failures == []


async def read(call: StreamCall[Reply], most: int = 10**9) -> list[Reply] | grpc.StatusCode:
    """The replies of a call, at most so many; the status if it fails."""
    replies: list[Reply] = []
    try:
        async for reply in call:
            replies.append(reply)
            if len(replies) == most:
                break
    except grpc.aio.AioRpcError as error:
        return error.code()
    return replies


async def survive(begins: bool, pieces: Sequence[bytes]) -> None:
    """Three calls, of which one reads just once, and an engine that sends these pieces."""
    async with playing() as engine:
        calls = [engine.call(REQUEST, None) for _ in range(3)]
        readers = [
            asyncio.create_task(read(call, most)) for call, most in zip(calls, (10**9, 1, 10**9), strict=True)
        ]
        connection = await engine.dialled()
        if begins:
            await engine.send(wire.settings())
        for piece in pieces:
            await engine.send(piece)
            for call in calls:
                held = len(call._buffer)
                assert held <= http2.STREAM_WINDOW + (10**6 + 5 if call._waiter is not None else 0)
            assert len(engine.transport.output) < 10_000 + 40 * sum(map(len, pieces))
        for reader in readers[1:]:
            reader.cancel()
        connection.connection_lost(None)
        outcomes = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), PATIENCE)
        assert all(isinstance(one, list | grpc.StatusCode | asyncio.CancelledError) for one in outcomes)
        calls[1].cancel()


@pytest.mark.parametrize(
    ("size", "most"),
    [
        (0, http2.MAX_CONTINUATION_FRAMES),
        (http2.MAX_FRAME_BYTES, http2.MAX_HEADER_BYTES // http2.MAX_FRAME_BYTES),
    ],
    ids=["many", "large"],
)
async def test_a_header_block_is_limited_before_it_ends(size: int, most: int) -> None:
    """CONTINUATION frames without an end: by their number, also if they are empty, and by their bytes."""
    async with playing() as engine:
        reader = asyncio.create_task(read(engine.call(REQUEST, None)))
        connection = await engine.dialled()
        await engine.send(wire.settings())
        await engine.send(frame(wire.HEADERS, 0, 1))
        failures = []
        for count in (most, 1):
            await engine.send(frame(wire.CONTINUATION, 0, 1, bytes(size)) * count)
            failures.append(connection.failure)
        assert failures == ["", "the engine broke a rule of HTTP/2: a header block is too long"]
        assert isinstance(await asyncio.wait_for(reader, PATIENCE), grpc.StatusCode)


@given(begins=st.booleans(), pieces=st.lists(st.binary(max_size=200), max_size=8))
def test_any_bytes(begins: bool, pieces: list[bytes]) -> None:
    asyncio.run(survive(begins, pieces))


@given(frames=st.lists(FRAMES, max_size=40), cuts=st.lists(st.integers(1, 20_000), max_size=40))
def test_any_frames_in_any_order(frames: list[bytes], cuts: list[int]) -> None:
    """Cut anywhere."""
    data, pieces = b"".join(frames), []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    asyncio.run(survive(True, [*pieces, data]))


@given(
    texts=st.lists(st.text(max_size=3000), max_size=20),
    cuts=st.lists(st.integers(1, 4000), max_size=20),
    size=st.integers(1, 16_384),
    status=st.sampled_from([0, 0, 5]),
)
def test_an_answer_is_the_same_however_it_is_cut(
    texts: list[str], cuts: list[int], size: int, status: int
) -> None:
    body = b"".join(message(text) for text in texts)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    data = b"".join(
        (
            frame(wire.HEADERS, 4, 1, block(RESPONSE)),
            *(frame(wire.DATA, 0, 1, part) for part in parts),
            frame(wire.HEADERS, 5, 1, block({"grpc-status": str(status)})),
        )
    )

    async def scenario() -> None:
        async with playing() as engine:
            reader = asyncio.create_task(read(engine.call(REQUEST, None)))
            rest = data
            await engine.send(wire.settings())
            for cut in cuts:
                await engine.send(rest[:cut])
                rest = rest[cut:]
            await engine.send(rest)
            outcome = await asyncio.wait_for(reader, PATIENCE)
            expected = grpc.StatusCode.NOT_FOUND if status else texts
            assert outcome == expected or [reply.message.decode() for reply in outcome] == expected  # type: ignore[union-attr]

    if len(body) <= http2.STREAM_WINDOW:
        asyncio.run(scenario())


@pytest.mark.parametrize("flood", [frame(wire.PING, payload=bytes(8)), wire.settings({3: 1})])
def test_answers_that_are_not_read_end_the_connection(flood: bytes) -> None:
    """As many as wait at most; an engine that reads may send any number."""

    async def scenario() -> None:
        async with playing() as engine:
            reader = asyncio.create_task(read(engine.call(REQUEST, None)))
            await engine.send(wire.settings())
            await engine.send(flood * (2 * http2.MAX_UNREAD_ANSWERS))
            assert not reader.done()
            (await engine.dialled()).pause_writing()
            await engine.send(flood * http2.MAX_UNREAD_ANSWERS)
            assert not reader.done()
            await engine.send(flood)
            assert await reader is grpc.StatusCode.INTERNAL

    asyncio.run(scenario())


def test_a_long_request_waits_for_an_engine_that_does_not_read() -> None:
    """No more of it is handed to the transport than fits one turn of the event loop."""

    async def scenario() -> None:
        async with playing() as engine:
            reader = asyncio.create_task(read(engine.call(bytes(10_000_000), None)))
            windows = frame(wire.WINDOW, 0, 0, number(2**30)), wire.settings({4: 2**30})
            await engine.send(b"".join((wire.settings(), *windows)))
            connection = await engine.dialled()
            connection.pause_writing()
            size = len(engine.transport.output)
            assert size < 6 * http2.MAX_FRAMES_PER_TURN * http2.MAX_FRAME_BYTES
            # What was prepared in this turn still goes.
            await engine.send(frame(wire.WINDOW, 0, 0, number(1)))
            assert len(engine.transport.output) - size < 2 * http2.MAX_FRAMES_PER_TURN * http2.MAX_FRAME_BYTES
            connection.resume_writing()

            await until(lambda: len(engine.transport.output) > 10_000_000)
            await engine.send(frame(wire.HEADERS, 5, 1, block(RESPONSE | FINE)))
            assert await reader == []

    asyncio.run(scenario())


def test_streams_go_to_a_new_connection_when_their_numbers_end() -> None:
    async def scenario() -> None:
        async with playing() as engine:
            first = asyncio.create_task(read(engine.call(REQUEST, None)))
            (await engine.dialled())._next_id = http2.MAX_UINT31
            await engine.send(wire.settings())
            assert await read(engine.call(REQUEST, None)) is grpc.StatusCode.UNAVAILABLE
            answer = frame(wire.HEADERS, 5, http2.MAX_UINT31, block(RESPONSE | FINE))
            await engine.send(answer)
            assert await first == []
            assert engine.transport.is_closed

    asyncio.run(scenario())


def test_an_engine_that_resets_a_stream_at_its_deadline_has_not_cancelled_it() -> None:
    """It knows the deadline and may be a moment earlier than our timer."""

    async def scenario() -> None:
        async with playing() as engine:
            first = asyncio.create_task(read(engine.call(REQUEST, None)))
            await engine.send(wire.settings())
            late = asyncio.create_task(read(engine.call(REQUEST, 0.001)))
            await asyncio.sleep(0)
            expiry = clock.monotonic() + 0.001
            while clock.monotonic() < expiry:
                pass
            resets = [frame(wire.RST, 0, stream, number(8)) for stream in (1, 3)]
            (await engine.dialled()).data_received(b"".join(resets))
            assert await first is grpc.StatusCode.CANCELLED
            assert await late is grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(scenario())


def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
    """What is between may have forgotten it without a word."""

    async def scenario() -> None:
        async with playing() as engine:
            for stream in (1, 3):
                reader = asyncio.create_task(read(engine.call(REQUEST, None)))
                await engine.send(wire.settings())
                await engine.send(frame(wire.HEADERS, 5, stream, block(RESPONSE | FINE)))
                assert await reader == []
            (await engine.dialled())._idle_since -= http2.IDLE_SECONDS
            assert await read(engine.call(REQUEST, None)) is grpc.StatusCode.UNAVAILABLE
            assert engine.transport.is_closed

    asyncio.run(scenario())
