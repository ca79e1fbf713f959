"""An answer that is sent while it is made: what waits for a slow reader, and the events on the wire.

The engine's replies go through a `Pipe` to what sends them. Its place is bounded, so a slow reader costs no
more than that and, as most answers fit in, does not hold the engine up. A reader who takes nothing for as
long as an engine may say nothing counts as one that has left.

Status and headers leave with the first delta: until then a failure is an ordinary refusal. An engine that
thinks longer than `QUIET` gets a 200 and keep-alives, so that no proxy ends the connection; what fails after
that is an event of the dialect.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from localai_cluster import conf
from localai_cluster.errors import ClusterError, Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Header, Send
from nodes.inference.generation import Sink, Telling, TextDelta
from nodes.inference.limits import SilenceLimit, silence
from nodes.routing.request import InferenceRequest, Replica

QUIET = 5.0
"""Seconds of silence after which a keep-alive is sent."""
LARGEST_PIPE = 256 * 1024
"""About so many bytes of deltas wait for a reader; then the engine does."""
# Proxies must pass pieces on as they come.
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


Work = Callable[[Sink], Awaitable[None]]
"""Makes an answer: gives its deltas to a sink."""


class Pipe:
    """Deltas on their way from an engine to a reader, both on one loop."""

    def __init__(self) -> None:
        self._waiting: list[TextDelta] = []
        self._size = 0
        self._closed = False
        self._news, self._room = asyncio.Event(), asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._closed and not self._waiting

    async def put(self, delta: TextDelta) -> None:
        """Adds one, once there is room."""
        while self._size > LARGEST_PIPE:
            self._room.clear()
            await self._room.wait()
        self._waiting.append(delta)
        self._size += delta.size
        self._news.set()

    def close(self) -> None:
        """Nothing comes after what is there."""
        self._closed = True
        self._news.set()

    def nudge(self) -> None:
        """Lets the reader take nothing."""
        self._news.set()

    async def take(self) -> list[TextDelta]:
        """All that wait; none if the pipe was closed or the reader was nudged."""
        await self._news.wait()
        taken, self._waiting, self._size = self._waiting, [], 0
        if not self._closed:
            self._news.clear()
        self._room.set()
        return taken


class EventStream:
    """One streamed answer. `work` makes it; `play` sends it, and ends with it."""

    def __init__(self, request: InferenceRequest, telling: Telling, work: Work) -> None:
        self._request = request
        self._telling = telling
        self._work = work
        self._pipe = Pipe()
        self._quiet = True
        self._thinking: Replica | None = None
        self._begun = self._stopped = False
        self._making: asyncio.Future[None] | None = None

    async def play(self, send: Send) -> int:
        """Sends the events without the end of the body; returns the status it came to.

        Raises what kept the answer from beginning, and Disconnected when the reader takes nothing.
        """
        making = self._making = asyncio.ensure_future(self._make())
        ticking = asyncio.ensure_future(self._tick())
        _playing.add(self)
        try:
            async with silence(conf.cluster().stream_stall, math.inf) as limit:
                return await self._told_to(Outgoing(send, limit), making)
        except TimeoutError:
            raise wire.Disconnected from None
        finally:
            _playing.discard(self)
            ticking.cancel()
            making.cancel()
            await asyncio.gather(making, ticking, return_exceptions=True)

    async def _told_to(self, reader: "Outgoing", making: "asyncio.Future[None]") -> int:
        try:
            await self._tell(reader)
            await making
        except ClusterError as error:
            if not self._begun:
                raise
            await reader.body(self._telling.events.failed(error))
            return error.status
        await self._begin(reader)
        await reader.body(self._telling.done)
        return 200

    def stop(self) -> None:
        """Ends the answer where it is, by an error."""
        if self._making is not None:
            self._stopped = True
            self._making.cancel()

    async def _make(self) -> None:
        try:
            await self._work(self._sink)
        except asyncio.CancelledError:
            if self._stopped:
                raise Unavailable("this web process is stopping", retry_after=1) from None
            raise
        finally:
            self._pipe.close()

    async def _sink(self, delta: TextDelta) -> None:
        # From here on no other replica may begin the answer again.
        self._request.begun = True
        await self._pipe.put(delta)

    async def _tick(self) -> None:
        """Wakes the reader's side when nothing has been sent for a while."""
        while True:
            self._quiet = True
            await asyncio.sleep(QUIET)
            if self._quiet:
                self._pipe.nudge()

    async def _tell(self, reader: "Outgoing") -> None:
        """Sends deltas until the last one, or until making them has failed."""
        while not self._pipe.ended:
            deltas = await self._pipe.take()
            if deltas:
                self._quiet = False
                await self._begin(reader)
                await reader.body(self._telling.events.told(deltas))
            elif not self._pipe.ended:
                await self._keep_alive(reader)

    async def _keep_alive(self, reader: "Outgoing") -> None:
        """Only while a replica works on it: before that, what happens is still told by the status."""
        if not self._begun and (self._request.replica is None or self._thinking != self._request.replica):
            self._thinking = self._request.replica
            return
        await self._begin(reader)
        await reader.body(self._telling.keep_alive)

    async def _begin(self, reader: "Outgoing") -> None:
        if not self._begun:
            self._begun = True
            kind = (b"content-type", self._telling.kind)
            await reader.head([kind, *_HEADERS, *node_header(self._request)])


_playing: set[EventStream] = set()


def end_all() -> None:
    """Ends the streams of this process, which is about to stop, so that their clients read an error."""
    for stream in list(_playing):
        stream.stop()


class Outgoing:
    """The client's end: what is sent has to be taken in time."""

    def __init__(self, send: Send, limit: SilenceLimit) -> None:
        self._send = send
        self._limit = limit

    async def head(self, headers: list[Header]) -> None:
        """Begins the answer."""
        await self._out({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, events: bytes) -> None:
        """A piece of it."""
        await self._out({"type": "http.response.body", "body": events, "more_body": True})

    async def _out(self, message: dict[str, Any]) -> None:
        self._limit.begin()
        await self._send(message)
        self._limit.pause()


def node_header(request: InferenceRequest) -> Sequence[Header]:
    """§6.3: which node answered, if that is told."""
    told = request.names_node or conf.cluster().expose_node_header
    if not told or request.replica is None:
        return ()
    return ((b"x-localai-node", str(request.replica.node_id).encode()),)
