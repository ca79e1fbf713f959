"""Streamed responses: events, audio and files on the wire; slow clients, silent engines, a stopping process.

The engine's replies pass through a `Pipe` to the sender. The size of the pipe bounds the memory for a slow
client. Most responses fit into the pipe, so a slow client does not block the engine. A client that reads
nothing for the time that an engine may be silent counts as disconnected.

Status and headers are sent with the first delta: until then a failure is an ordinary error response. If an
engine is silent for `KEEP_ALIVE_SECONDS`, the client gets a 200 and keep-alives, so that no proxy closes the
connection; later failures are an event of the dialect. After the first byte of audio or a file a failure
cannot be reported: the connection ends without the end of the body.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import IO

from localai_cluster.kit.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, Header, Outgoing, Send
from nodes.gateway import generate
from nodes.gateway.endpoint import CancelOnStop
from nodes.gateway.generation import Dialect, Events, Head, Pipe, TextDelta
from nodes.gateway.request import InferenceRequest, Replica, node_header

KEEP_ALIVE_SECONDS = 5.0
"""Seconds without a byte to the client after which a keep-alive is sent."""
# Proxies must not buffer the pieces.
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

StoreResponse = Callable[[Head, Sequence[TextDelta]], Awaitable[None]]
"""Stores the deltas of a response before the client gets the last delta."""


class EventStream:
    """One streamed response; `play` reads its deltas and sends the events."""

    def __init__(
        self, request: InferenceRequest, events: Events, deltas: AsyncGenerator[TextDelta, None]
    ) -> None:
        self._request = request
        self._events = events
        self._deltas = deltas
        self._pipe = Pipe()
        self._is_quiet = False
        self._quiet_replica: Replica | None = None
        self._has_started = False

    async def play(self, send: Send) -> tuple[int, bytes]:
        """Send the events. Return the final status and the last piece of the body.

        Raise an error that occurs before the first byte. Raise Disconnected if the client stops reading.
        """
        producer = asyncio.create_task(self._read_deltas())
        self._check_silence()
        try:
            with Outgoing(send) as client:
                return await self._send_all(client, producer)
        finally:
            self._ticker.cancel()
            producer.cancel()
            # This also reads its exception, which asyncio would log if the client has left.
            await asyncio.gather(producer, return_exceptions=True)

    async def _send_all(self, client: Outgoing, producer: "asyncio.Task[None]") -> tuple[int, bytes]:
        last = await self._send_deltas(client)
        try:
            await producer
        except ClusterError as error:
            if not self._has_started:
                raise
            return error.status, last + self._events.render_failure(error)
        await self._send_head(client)
        return 200, last + self._events.done

    async def _read_deltas(self) -> None:
        try:
            with CancelOnStop():
                async with aclosing(self._deltas) as deltas:
                    async for delta in deltas:
                        # From here on no other replica may restart the response.
                        self._request.has_begun = True
                        await self._pipe.put(delta)
        finally:
            self._pipe.close()

    def _check_silence(self) -> None:
        """Wake the sender if nothing was sent for `KEEP_ALIVE_SECONDS`. Schedule the next check."""
        if self._is_quiet:
            self._pipe.wake_reader()
        self._is_quiet = True
        self._ticker = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._check_silence)

    async def _send_deltas(self, client: Outgoing) -> bytes:
        """Send deltas until there are no more. Return the events of the last deltas."""
        while True:
            deltas = await self._pipe.take()
            is_last = self._pipe.ended
            if deltas:
                self._is_quiet = False
                await self._send_head(client)
                events = self._events.render(deltas)
                if is_last:
                    return events
                await client.body(events)
            elif is_last:
                return b""
            else:
                await self._keep_alive(client)

    async def _keep_alive(self, client: Outgoing) -> None:
        """Send a keep-alive if a replica is working. Before that, an error can still set the status."""
        if not self._has_started and (
            self._request.replica is None or self._quiet_replica != self._request.replica
        ):
            self._quiet_replica = self._request.replica
            return
        await self._send_head(client)
        await client.body(self._events.keep_alive)

    async def _send_head(self, client: Outgoing) -> None:
        if not self._has_started:
            self._has_started = True
            kind = (b"content-type", self._events.kind)
            await client.head([kind, *STREAM_HEADERS, *node_header(self._request)])


PIECE_BYTES = 256 * 1024


class FileAnswer:
    """A response whose body is a file. The file is closed after it is sent or sending fails."""

    def __init__(self, file: IO[bytes], kind: bytes, headers: tuple[Header, ...] = ()) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        self._headers = [(b"content-type", kind), (b"content-length", str(self._size).encode()), *headers]

    async def play(self, send: Send) -> tuple[int, bytes]:
        """Send the file; return the status and an empty last piece."""
        self._file.seek(0)
        with self._file, Outgoing(send) as client:
            await client.head(self._headers)
            while piece := await asyncio.to_thread(self._file.read, PIECE_BYTES):
                await client.body(piece)
        return 200, b""


async def respond(
    request: InferenceRequest, dialect: Dialect, head: Head, keep: StoreResponse | None = None
) -> Answer | EventStream:
    """Return the response to a parsed request, complete or streamed."""
    request.body = b""  # it may be large, and generation takes long
    if head.generation.stream:
        deltas = generate.stream(request, head.generation)
        if keep is not None:
            deltas = _store_after_last_delta(deltas, head, keep)
        return EventStream(request, dialect.events(head), deltas)
    response = await generate.generate(request, head.generation)
    if keep is not None:
        await keep(head, response)
    return Answer(dialect.render_response(head, response), headers=tuple(node_header(request)))


async def _store_after_last_delta(
    deltas: AsyncGenerator[TextDelta, None], head: Head, keep: StoreResponse
) -> AsyncGenerator[TextDelta, None]:
    seen = []
    async with aclosing(deltas):
        async for delta in deltas:
            seen.append(delta)
            if delta.finish:
                await keep(head, seen)
            yield delta


class ByteStream:
    """A response whose bytes are sent while they are produced. `headers` is called at the first piece."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Callable[[], list[Header]]) -> None:
        self._pieces = pieces
        self._headers = headers

    async def play(self, send: Send) -> tuple[int, bytes]:
        """Send the bytes. Return the status and an empty last piece.

        Before the first byte every error is raised. After the first byte an error raises Disconnected, which
        ends the response early.
        """
        has_started = False
        with Outgoing(send) as client:
            try:
                with CancelOnStop():
                    async with aclosing(self._pieces) as pieces:
                        async for piece in pieces:
                            if not has_started:
                                has_started = True
                                await client.head(self._headers())
                            await client.body(piece)
            except ClusterError:
                if has_started:
                    raise wire.Disconnected from None
                raise
        return 200, b""
