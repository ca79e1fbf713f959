"""Limits of uvicorn's connections, and a small HTTP server for a process with another main task (`serving`).

uvicorn bounds bodies in flight, and applies back-pressure to an application whose client does not read. It
does not bound headers, waits forever for an incomplete request, and buffers or answers the messages of a
websocket's client.
"""

# Only the names of uvicorn's classes are typed, not their callbacks.
# mypy: disallow-subclassing-any=false

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any, Literal, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from localai_cluster.kit import clock
from localai_cluster.kit.addresses import Address

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request line with its headers. A larger request gets 400."""
HEAD_SECONDS = 20.0
"""Seconds for the headers of a request to arrive, and for the first byte of a new connection."""
BODY_SECONDS, BODY_PIECE = 20.0, 10_000
"""A client must send `BODY_PIECE` bytes of a body, or its end, within every `BODY_SECONDS`."""

_TOO_SLOW_TEXT = b"The request did not arrive in time."
_TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n"
    b"connection: close\r\n\r\n%b" % (len(_TOO_SLOW_TEXT), _TOO_SLOW_TEXT)
)


class _JoinedHead:
    """A transport that sends the head of a response together with the first bytes of its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the bytes, but keep a head until its body: uvicorn writes both in one turn of the loop."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush_if_open)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send a head without a body, then close."""
        self._flush()
        self._transport.close()

    def _flush_if_open(self) -> None:
        if not self.is_closing():  # the client may have left meanwhile
            self._flush()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._transport.write(head)


class BoundedHead(HttpToolsProtocol):
    """A connection whose requests have bounded headers and must arrive in time.

    A timer runs only while a part of a request is missing; a request that arrives at once needs no timer.
    """

    _missing_part: Literal["", "anything", "head", "body"] = ""
    """The part of a request that is missing; "" between two requests, where uvicorn has its own limit."""
    _missing_since = 0.0
    """Monotonic time since which the missing part, or the next chunk of a body, has not arrived."""
    _body_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    _unparsed_bytes = 0
    """Bytes received since the last callback of the parser, which buffers an unfinished header."""
    _head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first byte of a request, or abort a connection that is too many.

        From its limit on, uvicorn answers requests with 503; connections without a request count too.
        """
        super().connection_made(_JoinedHead(transport, self.loop))  # type: ignore[arg-type]
        if self.limit_concurrency and len(self.connections) > 2 * self.limit_concurrency:
            self.transport.abort()
            return
        self._start_waiting_for("anything")
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        self._start_waiting_for("")
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then refuse unfinished headers that are too long, including trailers of a chunked body."""
        self._unparsed_bytes += len(data)
        if not self._missing_part:
            self._start_waiting_for("anything")  # a blank line begins no request
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The headers are too large.")
        elif self._missing_part and self._timer is None:
            self._set_timer()

    def on_message_begin(self) -> None:
        """Start to wait for the headers, at the first byte of a request."""
        self._start_waiting_for("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line."""
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header; drop `Sec-WebSocket-Protocol`.

        The dropped header could fail the handshake before the caller is authenticated.
        """
        self._count_head_bytes(len(name) + len(value))
        if name.lower() != b"sec-websocket-protocol":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to wait for the body."""
        self._unparsed_bytes = 0
        self._start_waiting_for("body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a chunk of the body, which the parser does not buffer."""
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop waiting; the next bytes are the head of another request."""
        self._unparsed_bytes, self._head = 0, 0
        self._start_waiting_for("")
        super().on_message_complete()

    def _count_head_bytes(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD_BYTES:
            raise ValueError("headers too large")  # the parser makes it a 400

    def _start_waiting_for(self, part: Literal["", "anything", "head", "body"]) -> None:
        self._missing_part, self._missing_since, self._body_bytes = part, clock.monotonic(), 0

    def _seconds_left(self) -> float:
        """Return the seconds until the missing part times out."""
        limit = BODY_SECONDS if self._missing_part == "body" else HEAD_SECONDS
        return self._missing_since + limit - clock.monotonic()

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(max(self._seconds_left(), 0.0), self._check_time)

    def _check_time(self) -> None:
        """Close the connection if the missing part of a request is late.

        A body gets more time while we do not read, or if the client has sent enough bytes.
        """
        self._timer = None
        if not self._missing_part or self.transport.is_closing():
            return
        gets_more_time = self.flow.read_paused or (
            self._seconds_left() <= 0 and self._body_bytes >= BODY_PIECE
        )
        if self._missing_part == "body" and gets_more_time:
            self._start_waiting_for("body")
        if self._seconds_left() > 0:
            self._set_timer()
            return
        has_response = self._missing_part == "body" and self.cycle.response_started
        if self._missing_part != "anything" and not has_response:
            self.transport.write(_TIMEOUT_RESPONSE)
        self.transport.close()


class WatchingSocket(WebSocketsSansIOProtocol):
    """A websocket whose client only receives: its messages are dropped, and a stalled client is cut off."""

    async def run_asgi(self) -> None:
        """Run the application; afterwards close the connection even if the client does not read."""
        try:
            await super().run_asgi()
        finally:
            self.loop.call_later(self.close_timeout, self.transport.abort)

    def keepalive_timeout(self) -> None:
        """Abort the connection: a close would wait for a client that may never read."""
        super().keepalive_timeout()
        self.transport.abort()

    def handle_text(self, event: Any) -> None:
        """Drop the message: uvicorn would buffer it until the application reads it."""

    def handle_bytes(self, event: Any) -> None:
        """Drop the message."""

    def handle_cont(self, event: Any) -> None:
        """Drop the message."""

    def handle_ping(self) -> None:
        """Answer the ping, unless the client has not read earlier answers."""
        answers = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(answers)


log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Open connections from which on requests get 503; twice as many may be open."""
PING_INTERVAL_SECONDS, PONG_TIMEOUT = 30.0, 90.0
SHUTDOWN_TIMEOUT = 1.0
"""Seconds for running responses to end at the shutdown."""
MAX_MESSAGE_BYTES = 4096
"""Maximum bytes of a websocket client's message; its content is ignored."""
LISTEN_RETRY_SECONDS = 30.0
"""Seconds until the next attempt to listen on an address that is in use."""


def server_config(application: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings for our connections, with further `options`; uvicorn logs no requests."""
    return uvicorn.Config(
        application,
        http=BoundedHead,
        ws=WatchingSocket,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        **options,
    )


@contextlib.asynccontextmanager
async def serving(listener: socket.socket, application: Any) -> AsyncIterator[None]:
    """Serve an ASGI application on `listener` within the block, then end all connections."""
    config = server_config(
        application,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=PING_INTERVAL_SECONDS,
        ws_ping_timeout=PONG_TIMEOUT,
        lifespan="off",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedHead(config=config, server_state=state, app_state={}), sock=listener
    )
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=SHUTDOWN_TIMEOUT)
        for task in list(state.tasks):
            task.cancel()
        for connection in list(state.connections):
            connection.transport.abort()


async def serve(address: Address, application: Any, again: float = LISTEN_RETRY_SECONDS) -> NoReturn:
    """Serve on an address until cancelled.

    While the address cannot be used, the process runs without this server and retries every `again` seconds.
    """
    while True:
        try:
            # A host name is resolved, which may block.
            listener = await asyncio.to_thread(_create_listener, address)
        except OSError as error:
            log.warning("cannot listen on %s, again in %.0f s: %s", address, again, error)
            await asyncio.sleep(again)
            continue
        async with serving(listener, application):
            log.info("listening on http://%s", address)
            await asyncio.Event().wait()


def _create_listener(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family)
