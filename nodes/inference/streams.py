"""An answer that is sent while it is made: what waits for a slow reader, and the events on the wire.

The engine's replies go through a `Pipe` to what sends them. Its place is bounded, so a slow reader costs no
more than that and, as most answers fit in, does not hold the engine up. A reader who takes nothing for as
long as an engine may say nothing counts as one that has left.

Status and headers leave with the first delta: until then a failure is an ordinary refusal. An engine that
thinks longer than `QUIET` gets a 200 and comments, which keep proxies from ending the connection; what fails
after that is an event of the dialect.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from localai_cluster import conf
from localai_cluster.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Header, Send
from nodes.inference.generation import Delta, Dialect, Head, Sink
from nodes.routing.request import InferenceRequest, Replica

QUIET = 5.0
"""Seconds of silence after which a comment is sent."""
LARGEST_PIPE = 256 * 1024
"""About so many bytes of deltas wait for a reader; then the engine does."""
COMMENT = b": working\n\n"
_KIND = b"text/event-stream; charset=utf-8"
# Proxies must pass pieces on as they come.
_HEADERS = ((b"content-type", _KIND), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


Work = Callable[[Sink], Awaitable[None]]
"""Makes an answer: gives its deltas to a sink."""


class Pipe:
    """Deltas on their way from an engine to a reader, both on one loop."""

    def __init__(self) -> None:
        self._waiting: list[Delta] = []
        self._size = 0
        self._closed = False
        self._news, self._room = asyncio.Event(), asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._closed and not self._waiting

    async def put(self, delta: Delta) -> None:
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

    async def take(self, within: float) -> list[Delta]:
        """All that wait, none only if the pipe was closed; raises TimeoutError if nothing comes."""
        if not self._news.is_set():
            async with asyncio.timeout(within):
                await self._news.wait()
        taken, self._waiting, self._size = self._waiting, [], 0
        if not self._closed:
            self._news.clear()
        self._room.set()
        return taken


class EventStream:
    """One streamed answer. `work` makes it; `play` sends it, and ends with it."""

    def __init__(self, request: InferenceRequest, dialect: Dialect, head: Head, work: Work) -> None:
        self._request = request
        self._failed, self._done = dialect.failed, dialect.done
        self._told = dialect.events(head)
        self._work = work
        self._pipe = Pipe()
        self._thinking: Replica | None = None
        self._send: Send | None = None

    async def play(self, send: Send) -> int:
        """Sends the events without the end of the body; returns the status it came to.

        Raises what kept the answer from beginning, and Disconnected when the reader takes nothing.
        """
        making = asyncio.ensure_future(self._make())
        try:
            await self._tell(send)
            await making
        except ClusterError as error:
            if self._send is None:
                raise
            await self._out(self._failed(error))
            return error.status
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        await self._begin(send)
        await self._out(self._done)
        return 200

    async def _make(self) -> None:
        try:
            await self._work(self._sink)
        finally:
            self._pipe.close()

    async def _sink(self, delta: Delta) -> None:
        # From here on no other replica may begin the answer again.
        self._request.begun = True
        await self._pipe.put(delta)

    async def _tell(self, send: Send) -> None:
        """Sends deltas until the last one, or until making them has failed."""
        while not self._pipe.ended:
            try:
                deltas = await self._pipe.take(QUIET)
            except TimeoutError:
                await self._keep_alive(send)
                continue
            if deltas:
                await self._begin(send)
                await self._out(self._told(deltas))

    async def _keep_alive(self, send: Send) -> None:
        """Only while a replica works on it: before that, what happens is still told by the status."""
        if self._send is None and (self._request.replica is None or self._thinking != self._request.replica):
            self._thinking = self._request.replica
            return
        await self._begin(send)
        await self._out(COMMENT)

    async def _begin(self, send: Send) -> None:
        if self._send is None:
            self._send = send
            headers = [*_HEADERS, *node_header(self._request)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _out(self, events: bytes) -> None:
        assert self._send is not None
        try:
            async with asyncio.timeout(conf.cluster().stream_stall):
                await self._send({"type": "http.response.body", "body": events, "more_body": True})
        except TimeoutError:
            raise wire.Disconnected from None


def node_header(request: InferenceRequest) -> Sequence[Header]:
    """§6.3: which node answered, if that is told."""
    if not conf.cluster().expose_node_header or request.replica is None:
        return ()
    return ((b"x-localai-node", str(request.replica.node_id).encode()),)
