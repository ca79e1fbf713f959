"""What uvicorn's connections are held to: bounded headers, requests that arrive in time, and websockets whose
clients only watch.

uvicorn bounds bodies in flight and makes an application wait that sends to a client who does not read. It
bounds no headers, waits forever for the rest of a request, and keeps or answers what a websocket's client
sends.
"""

# Only the names of uvicorn's classes are typed, not what they call back.
# mypy: disallow-subclassing-any=false

import asyncio
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from localai_cluster import clock

LARGEST_HEAD = 64 * 1024
"""Bytes of a request line with its headers. More is refused as 400."""
HEAD_SECONDS = 20.0
"""Within which the headers of a request arrive, and within which a new connection begins to send."""
BODY_SECONDS, BODY_PIECE = 20.0, 10_000
"""A body is whole, or brings at least so many bytes, every so many seconds that we read it."""

_TOO_SLOW = b"The request did not arrive in time."
_REQUEST_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n"
    b"connection: close\r\n\r\n%b" % (len(_TOO_SLOW), _TOO_SLOW)
)


class BoundedHead(HttpToolsProtocol):
    """A connection whose requests have bounded headers and arrive in time.

    There is a timer only while part of a request is missing: one that comes in one piece costs none.
    """

    _awaited: Literal["", "anything", "head", "body"] = ""
    """What is missing; nothing between two requests, which uvicorn limits itself."""
    _since = 0.0
    """When this part, or this piece of the body, began to be missing."""
    _piece = 0
    _timer: asyncio.TimerHandle | None = None

    _unread = 0
    """Bytes received since the parser last had something to pass on; it keeps an unfinished header."""
    _head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first byte."""
        super().connection_made(transport)
        self._await("anything")
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._await("")
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then refuse headers that are too long and have no end, also those after a chunked body."""
        self._unread += len(data)
        if not self._awaited:
            self._await("anything")  # a blank line begins no request
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread > LARGEST_HEAD:
            self.send_400_response("The headers are too large.")
        elif self._awaited and self._timer is None:
            self._set_timer()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._await("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, and leave out the one that would end a handshake before we know who asks."""
        self._count(len(name) + len(value))
        if name.lower() != b"sec-websocket-protocol":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._unread = 0
        self._await("body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, which the parser does not keep."""
        self._unread = 0
        self._piece += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is the head of another request."""
        self._unread, self._head = 0, 0
        self._await("")
        super().on_message_complete()

    def _count(self, more: int) -> None:
        self._head += more
        if self._head > LARGEST_HEAD:
            raise ValueError("headers too large")  # the parser makes it a 400

    def _await(self, part: Literal["", "anything", "head", "body"]) -> None:
        self._awaited, self._since, self._piece = part, clock.monotonic(), 0

    def _left(self) -> float:
        """Seconds for which the missing part may still be missing."""
        limit = BODY_SECONDS if self._awaited == "body" else HEAD_SECONDS
        return self._since + limit - clock.monotonic()

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(max(self._left(), 0.0), self._look)

    def _look(self) -> None:
        """End what does not arrive. A client whom we do not read, or who brings enough, gets more time."""
        self._timer = None
        if not self._awaited or self.transport.is_closing():
            return
        more_time = self.flow.read_paused or (self._left() <= 0 and self._piece >= BODY_PIECE)
        if self._awaited == "body" and more_time:
            self._await("body")
        if self._left() > 0:
            self._set_timer()
            return
        answered = self._awaited == "body" and self.cycle.response_started
        if self._awaited != "anything" and not answered:
            self.transport.write(_REQUEST_TIMEOUT)
        self.transport.close()


class WatchingSocket(WebSocketsSansIOProtocol):
    """A websocket whose client watches: what it says costs no memory, what it does not read not for long."""

    async def run_asgi(self) -> None:
        """Run the application; afterwards what the client does not read is given up."""
        try:
            await super().run_asgi()
        finally:
            self.loop.call_later(self.close_timeout, self.transport.abort)

    def keepalive_timeout(self) -> None:
        """End the connection at once: closing would wait for a client that may never read."""
        super().keepalive_timeout()
        self.transport.abort()

    def handle_text(self, event: Any) -> None:
        """Forget it: uvicorn would keep it until the application has looked at it."""

    def handle_bytes(self, event: Any) -> None:
        """Forget it."""

    def handle_cont(self, event: Any) -> None:
        """Forget it."""

    def handle_ping(self) -> None:
        """Return, unless earlier answers are not read."""
        answers = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(answers)
