"""Streamed responses: their silence limit, the buffer for slow clients, events, audio and files on the wire.

The engine's replies pass through a `Pipe` to the sender. Its size is bounded, so a slow client costs no more
than that; most responses fit in, so it does not block the engine. A client that reads nothing for as long as
an engine may be silent counts as disconnected.

Status and headers are sent with the first delta: until then a failure is an ordinary error response. If an
engine is silent for longer than `QUIET`, the client gets a 200 and keep-alives, so that no proxy closes the
connection; later failures are an event of the dialect. After the first byte of audio or a file a failure
cannot be reported: the connection ends without the end of the body.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import ClusterError, Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Header, Send
from nodes.gateway.endpoint import until_stop
from nodes.gateway.generation import Sink, StreamFormat, TextDelta
from nodes.gateway.request import InferenceRequest, Replica


class SilenceLimit:
    """The silence limit, as the limited work controls it."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, first: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._until = clock.monotonic() + max(first, 0)
        self._set_timer()

    def begin(self) -> None:
        """Restart the limit: silence counts from now on."""
        self._until = clock.monotonic() + self._seconds

    def pause(self) -> None:
        """Suspend the limit until `begin`."""
        self._until = math.inf

    def _set_timer(self) -> None:
        remaining = max(self._until - clock.monotonic(), 0)
        self.timer = asyncio.get_running_loop().call_later(min(remaining, self._seconds), self._check)

    def _check(self) -> None:
        if clock.monotonic() >= self._until:
            self._limit.reschedule(0)  # expired
        else:
            self._set_timer()


@asynccontextmanager
async def silence_limit(seconds: float, first: float) -> AsyncIterator[SilenceLimit]:
    """Raise TimeoutError after `first` seconds of silence, or after `seconds` following a `begin`."""
    async with asyncio.timeout(None) as limit:
        silence_limit = SilenceLimit(limit, seconds, first)
        try:
            yield silence_limit
        finally:
            silence_limit.timer.cancel()


QUIET = 5.0
"""Seconds of silence after which a keep-alive is sent."""
LARGEST_PIPE = 256 * 1024
"""Approximate limit on the bytes of queued deltas; beyond it the engine is blocked."""
# Proxies must not buffer the pieces.
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


Work = Callable[[Sink], Awaitable[None]]
"""Produces a response: sends its deltas to a sink."""


class Pipe:
    """A bounded queue of deltas from an engine to a client, both on one event loop."""

    def __init__(self) -> None:
        self._queue: list[TextDelta] = []
        self._size = 0
        self._closed = False
        self._ready, self._has_space = asyncio.Event(), asyncio.Event()

    @property
    def ended(self) -> bool:
        """True if the pipe is closed and empty."""
        return self._closed and not self._queue

    async def put(self, delta: TextDelta) -> None:
        """Add a delta; wait while the pipe is full."""
        while self._size > LARGEST_PIPE:
            self._has_space.clear()
            await self._has_space.wait()
        self._queue.append(delta)
        self._size += delta.size
        self._ready.set()

    def close(self) -> None:
        """Mark the end: no further delta follows the queued ones."""
        self._closed = True
        self._ready.set()

    def nudge(self) -> None:
        """Wake the reader without a delta."""
        self._ready.set()

    async def take(self) -> list[TextDelta]:
        """Return all queued deltas; none if the pipe was closed or the reader was nudged."""
        await self._ready.wait()
        deltas, self._queue, self._size = self._queue, [], 0
        if not self._closed:
            self._ready.clear()
        self._has_space.set()
        return deltas


class EventStream:
    """One streamed response. `work` produces it; `play` sends it and ends with it."""

    def __init__(self, request: InferenceRequest, rendering: StreamFormat, work: Work) -> None:
        self._request = request
        self._rendering = rendering
        self._work = work
        self._pipe = Pipe()
        self._is_quiet = True
        self._quiet_replica: Replica | None = None
        self._has_started = self._is_stopped = False
        self._producer: asyncio.Future[None] | None = None

    async def play(self, send: Send) -> int:
        """Send the events without the end of the body; return the final status.

        Raises errors before the first byte, and Disconnected when the client stops reading.
        """
        producer = self._producer = asyncio.ensure_future(self._produce())
        ticker = asyncio.ensure_future(self._tick())
        _playing.add(self)
        try:
            async with silence_limit(conf.cluster().stream_stall, math.inf) as limit:
                return await self._send_all(Outgoing(send, limit), producer)
        except TimeoutError:
            raise wire.Disconnected from None
        finally:
            _playing.discard(self)
            ticker.cancel()
            producer.cancel()
            await asyncio.gather(producer, ticker, return_exceptions=True)

    async def _send_all(self, reader: "Outgoing", producer: "asyncio.Future[None]") -> int:
        try:
            await self._send_deltas(reader)
            await producer
        except ClusterError as error:
            if not self._has_started:
                raise
            await reader.body(self._rendering.events.render_failure(error))
            return error.status
        await self._begin(reader)
        await reader.body(self._rendering.done)
        return 200

    def stop(self) -> None:
        """End the response at this point with an error."""
        if self._producer is not None:
            self._is_stopped = True
            self._producer.cancel()

    async def _produce(self) -> None:
        try:
            await self._work(self._sink)
        except asyncio.CancelledError:
            if self._is_stopped:
                raise Unavailable("this web process is stopping", retry_after=1) from None
            raise
        finally:
            self._pipe.close()

    async def _sink(self, delta: TextDelta) -> None:
        # From here on no other replica may restart the response.
        self._request.begun = True
        await self._pipe.put(delta)

    async def _tick(self) -> None:
        """Wake the sender when nothing has been sent for `QUIET` seconds."""
        while True:
            self._is_quiet = True
            await asyncio.sleep(QUIET)
            if self._is_quiet:
                self._pipe.nudge()

    async def _send_deltas(self, reader: "Outgoing") -> None:
        """Send deltas until the last one, or until their production has failed."""
        while not self._pipe.ended:
            deltas = await self._pipe.take()
            if deltas:
                self._is_quiet = False
                await self._begin(reader)
                await reader.body(self._rendering.events.render(deltas))
            elif not self._pipe.ended:
                await self._keep_alive(reader)

    async def _keep_alive(self, reader: "Outgoing") -> None:
        """Send a keep-alive if a replica is working; until then errors still set the status."""
        if not self._has_started and (
            self._request.replica is None or self._quiet_replica != self._request.replica
        ):
            self._quiet_replica = self._request.replica
            return
        await self._begin(reader)
        await reader.body(self._rendering.keep_alive)

    async def _begin(self, reader: "Outgoing") -> None:
        if not self._has_started:
            self._has_started = True
            kind = (b"content-type", self._rendering.kind)
            await reader.head([kind, *_HEADERS, *node_header(self._request)])


_playing: set[EventStream] = set()


def end_all() -> None:
    """End the streams of this process with an error event, because it is about to stop."""
    for stream in list(_playing):
        stream.stop()


class Outgoing:
    """The connection to the client; each message must be consumed within the silence limit."""

    def __init__(self, send: Send, limit: SilenceLimit) -> None:
        self._send = send
        self._limit = limit

    async def head(self, headers: list[Header]) -> None:
        """Send status and headers."""
        await self._send_message({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, events: bytes) -> None:
        """Send a piece of the body."""
        await self._send_message({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_message(self, message: dict[str, Any]) -> None:
        self._limit.begin()
        await self._send(message)
        self._limit.pause()


def node_header(request: InferenceRequest) -> Sequence[Header]:
    """Return the header with the replica's node (§6.3); () if it is disabled or no replica was picked."""
    is_exposed = request.names_node or conf.cluster().expose_node_header
    if not is_exposed or request.replica is None:
        return ()
    return ((b"x-localai-node", str(request.replica.node_id).encode()),)


PIECE = 256 * 1024

ByteSink = Callable[[bytes], Awaitable[None]]
"""Consumer of pieces; it may block the producer."""


class FileAnswer:
    """A file as the response. It is closed when it has been sent, or sending has failed."""

    def __init__(self, file: IO[bytes], kind: bytes, headers: tuple[Header, ...] = ()) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        self._headers = [(b"content-type", kind), (b"content-length", str(self._size).encode()), *headers]

    async def play(self, send: Send) -> int:
        """Send the file without the end of the body; return the status."""
        self._file.seek(0)
        with self._file:
            async with _reader(send) as out:
                await out.head(self._headers)
                while piece := await asyncio.to_thread(self._file.read, PIECE):
                    await out.body(piece)
        return 200


class ByteStream:
    """Bytes sent while `work` produces them. `headers` is called at the first piece."""

    def __init__(
        self, work: Callable[[ByteSink], Awaitable[None]], headers: Callable[[], list[Header]]
    ) -> None:
        self._work = work
        self._headers = headers
        self._has_started = False

    async def play(self, send: Send) -> int:
        """Send the bytes without the end of the body; return the status.

        Before the first byte every error is raised; after it, Disconnected ends the response early.
        """
        async with _reader(send) as out:

            async def sink(piece: bytes) -> None:
                if not self._has_started:
                    self._has_started = True
                    await out.head(self._headers())
                await out.body(piece)

            try:
                with until_stop():
                    await self._work(sink)
            except ClusterError:
                if self._has_started:
                    raise wire.Disconnected from None
                raise
        return 200


@contextlib.asynccontextmanager
async def _reader(send: Send) -> AsyncIterator[Outgoing]:
    try:
        async with silence_limit(conf.cluster().stream_stall, math.inf) as limit:
            yield Outgoing(send, limit)
    except TimeoutError:
        raise wire.Disconnected from None
