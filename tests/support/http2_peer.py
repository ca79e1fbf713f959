"""An engine that speaks HTTP/2 frame by frame according to a test's script; it may break any rule."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from hpack import Encoder
from hypothesis import strategies as st

from localai_cluster.rpc import http2
from localai_cluster.rpc.messages import Reply

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
ACK = END = 1
END_HEADERS, PADDED, PRIORITIZED = 4, 8, 32
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RESPONSE = {":status": "200", "content-type": "application/grpc"}
FINE = {"grpc-status": "0"}


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def settings(values: Mapping[int, int] | None = None) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in (values or {}).items()))


def number(value: int) -> bytes:
    """Return a payload of 32 bits."""
    return struct.pack(">I", value)


def goaway(last: int, code: int = 0) -> bytes:
    """Return a GOAWAY frame."""
    return frame(GOAWAY, payload=number(last) + number(code))


def message(text: str = "", *, length: int | None = None, compressed: int = 0) -> bytes:
    """Return a Reply in gRPC's frame; `length` replaces the true length."""
    body = Reply(message=text.encode()).SerializeToString()
    return struct.pack(">BI", compressed, len(body) if length is None else length) + body


def block(headers: Mapping[str, str]) -> bytes:
    """Return a header block that depends on no table."""
    return http2.encode_headers(headers.items())


_STREAMS = st.sampled_from([1, 1, 1, 1, 3, 3, 5, 0, 2, 7, 2**31 - 1])
_BLOCKS = st.sampled_from(
    [
        block(RESPONSE),
        block(RESPONSE),
        block(FINE),
        block({"grpc-status": "14", "grpc-message": "%C3%BC%"}),
        block({":status": "100"}),
        block({":status": "503"}),
        Encoder().encode([("a", "b")]),
        b"\xbe\xff\xff\xff\xff\xff",
    ]
)
_BODIES = st.sampled_from(
    [
        message("a"),
        message("b" * 30_000)[:16_384],
        message("c", length=10**6),
        message("", compressed=1),
        b"\0\0",
    ]
)
FRAMES = st.one_of(
    st.builds(frame, st.just(HEADERS), st.sampled_from([0, 1, 4, 4, 4, 5, 5, 12, 36]), _STREAMS, _BLOCKS),
    st.builds(frame, st.just(CONTINUATION), st.sampled_from([0, 4]), _STREAMS, _BLOCKS),
    st.builds(frame, st.just(DATA), st.sampled_from([0, 0, 0, 1, 8]), _STREAMS, _BODIES),
    st.builds(frame, st.just(RST), st.just(0), _STREAMS, st.builds(number, st.integers(0, 14))),
    st.builds(settings, st.dictionaries(st.integers(1, 6), st.sampled_from([0, 1, 100, 16_384, 2**31 - 1]))),
    st.builds(frame, st.just(PING), st.sampled_from([0, 1]), st.just(0), st.just(bytes(8))),
    st.builds(goaway, _STREAMS, st.integers(0, 13)),
    st.builds(frame, st.just(WINDOW), st.just(0), _STREAMS, st.builds(number, st.integers(0, 2**31 - 1))),
    st.builds(frame, st.integers(0, 255), st.integers(0, 255), _STREAMS, st.binary(max_size=40)),
)
"""Frames of an engine: most are valid by themselves, few are valid at their position."""


@dataclass
class Frame:
    """A frame of the client."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Peer:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.encoder = Encoder()

    def send(self, *parts: bytes) -> None:
        """Send these bytes in one piece."""
        self.writer.write(b"".join(parts))

    async def begin(self, values: Mapping[int, int] | None = None) -> None:
        """Read the client's preface and send SETTINGS."""
        assert await self._reader.readexactly(len(PREFACE)) == PREFACE
        self.send(settings(values))

    async def read(self) -> Frame:
        """Return the client's next frame."""
        head, flags, stream = struct.unpack(">IBI", await self._reader.readexactly(9))
        return Frame(head & 0xFF, flags, stream, await self._reader.readexactly(head >> 8))

    async def find(self, kind: int, stream: int | None = None) -> Frame:
        """Return the client's next frame of this kind, and of this stream if given."""
        while True:
            found = await self.read()
            is_answer = found.kind in (SETTINGS, PING) and found.flags & ACK
            if found.kind == kind and not is_answer and stream in (None, found.stream):
                return found

    async def request(self) -> int:
        """Return the stream of the client's next complete request."""
        while not (found := await self.find(DATA)).flags & END:
            pass
        return found.stream

    def headers(self, stream: int, pairs: Mapping[str, str], flags: int = 0) -> bytes:
        """Return a HEADERS frame."""
        return frame(HEADERS, flags | END_HEADERS, stream, self.encoder.encode(list(pairs.items())))

    def answer(self, stream: int, *texts: str, status: Mapping[str, str] = FINE) -> bytes:
        """Return a complete answer."""
        parts = [frame(DATA, 0, stream, message(text)) for text in texts]
        return b"".join(
            (self.headers(stream, RESPONSE), *parts, self.headers(stream, status, END)),
        )


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def serving(script: Script, *more: Script) -> AsyncIterator[str]:
    """Yield the address of an engine that plays one script per connection, the last one repeatedly.

    A connection is closed at the end of its script. The exit raises the exception of a script, if any.
    """
    scripts, failures = [script, *more], list[BaseException]()
    tasks: set[asyncio.Task[None]] = set()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        current = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await current(Peer(reader, writer))
        except BaseException as failure:
            failures.append(failure)
        writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for failure in failures:
        raise failure
