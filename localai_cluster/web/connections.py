"""What uvicorn's connections are held to: bounded headers, and websockets whose clients only watch.

uvicorn bounds bodies in flight and makes an application wait that sends to a client who does not read. It
bounds no headers, and it keeps or answers what a websocket's client sends.
"""

# Only the names of uvicorn's classes are typed, not what they call back.
# mypy: disallow-subclassing-any=false

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

LARGEST_HEAD = 64 * 1024
"""Bytes of a request line with its headers. More is refused as 400."""


class BoundedHead(HttpToolsProtocol):
    """A connection whose requests have bounded headers."""

    _unread = 0
    """Bytes received since the parser last had something to pass on; it keeps an unfinished header."""
    _head = 0

    def data_received(self, data: bytes) -> None:
        """Parses, then refuses headers that are too long and have no end, also those after a chunked body."""
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LARGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")

    def on_url(self, url: bytes) -> None:
        """Counts a piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, and leaves out the one that would end a handshake before we know who asks."""
        self._count(len(name) + len(value))
        if name.lower() != b"sec-websocket-protocol":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body, which the parser does not keep."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is the head of another request."""
        self._unread, self._head = 0, 0
        super().on_message_complete()

    def _count(self, more: int) -> None:
        self._head += more
        if self._head > LARGEST_HEAD:
            raise ValueError("headers too large")  # the parser makes it a 400


class WatchingSocket(WebSocketsSansIOProtocol):
    """A websocket whose client watches: what it says costs no memory."""

    def handle_text(self, event: Any) -> None:
        """Forgets it: uvicorn would keep it until the application has looked at it."""

    def handle_bytes(self, event: Any) -> None:
        """Forgets it."""

    def handle_cont(self, event: Any) -> None:
        """Forgets it."""

    def handle_ping(self) -> None:
        """Answers, unless earlier answers are not read."""
        answers = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(answers)
