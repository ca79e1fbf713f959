"""gRPC calls for text over our own HTTP/2 (`docs/decisions/0026-streams-over-http2.md`).

`grpc.aio` wakes its reader once per message; here a reader takes all messages that have arrived in one turn
of the event loop. A `StreamCall` has the part of `grpc.aio.UnaryStreamCall` that `client.Replies` uses and
raises its errors; a `UnaryCall` is awaited, as `grpc.aio.UnaryUnaryCall` is.

A call holds at most `http2.STREAM_WINDOW` bytes that its reader has not taken. Only while the reader waits
for a longer message does it hold more, at most `MAX_MESSAGE_BYTES`.
"""

import asyncio
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar
from urllib.parse import unquote_to_bytes

import grpc.aio
from google.protobuf.message import DecodeError
from grpc import StatusCode

from localai_cluster.kit import clock
from localai_cluster.kit.addresses import Address
from localai_cluster.rpc import http2

SERVICE_PATH = "/backend.Backend/"
MAX_MESSAGE_BYTES = 50 * 1024 * 1024
CONNECT_TIMEOUT_SECONDS = 20.0
"""Seconds in which the engine's SETTINGS must arrive on a new connection, as in gRPC."""
_MESSAGE_PREFIX_STRUCT = struct.Struct(">BI")
_MAX_TIMEOUT = 10**8 - 1
"""Maximum number in `grpc-timeout`, which has at most eight digits."""
_STATUS_BY_CODE = {str(status.value[0]): status for status in StatusCode}
_STATUS_BY_HTTP_STATUS = {
    **{"400": StatusCode.INTERNAL, "401": StatusCode.UNAUTHENTICATED, "403": StatusCode.PERMISSION_DENIED},
    **{"404": StatusCode.UNIMPLEMENTED, "429": StatusCode.UNAVAILABLE, "502": StatusCode.UNAVAILABLE},
    **{"503": StatusCode.UNAVAILABLE, "504": StatusCode.UNAVAILABLE},
}
_STATUS_BY_RESET_CODE = {
    http2.REFUSED_STREAM: StatusCode.UNAVAILABLE,
    http2.CANCEL: StatusCode.CANCELLED,
    http2.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
}


Response = TypeVar("Response")
Parse = Callable[[bytes], Response]


class StreamCall(http2.Stream, Generic[Response]):
    """A call whose reply is a stream of messages.

    The call starts when its first message is awaited, and so does its `timeout` in seconds. A status or
    `cancel` ends it.
    """

    def __init__(
        self,
        channel: "StreamChannel",
        method: str,
        parse: Parse[Response],
        request: bytes,
        timeout: float | None,
    ) -> None:
        super().__init__()
        self.method = method
        self._channel = channel
        self._parse_message = parse
        self._request = _MESSAGE_PREFIX_STRUCT.pack(0, len(request)) + request
        self._timeout = timeout
        self._expiry = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._buffer, self._begin = bytearray(), 0
        self._status: tuple[StatusCode, str] | None = None
        self._is_cancelled = self._has_begun = self._has_moved = self._has_headers = False
        self._trailers: Mapping[str, str] = {}

    def __aiter__(self) -> "StreamCall[Response]":
        return self

    async def __anext__(self) -> Response:
        """Return the next message. Wait only if none has arrived."""
        while True:
            buffer, begin = self._buffer, self._begin + _MESSAGE_PREFIX_STRUCT.size
            if len(buffer) >= begin:
                is_compressed, length = _MESSAGE_PREFIX_STRUCT.unpack_from(buffer, self._begin)
                if len(buffer) >= begin + length and not is_compressed:
                    self._begin = begin + length
                    try:
                        return self._parse_message(bytes(buffer[begin : self._begin]))
                    except DecodeError:
                        self._abort(StatusCode.INTERNAL, "Exception deserializing response!")
                        self._raise_end(StatusCode.INTERNAL, "Exception deserializing response!")
                self._check_prefix(is_compressed, length)
            if self._status is not None:
                self._raise_end(*self._status)
            await self._wait()

    def _check_prefix(self, is_compressed: int, length: int) -> None:
        if is_compressed:
            self._abort(StatusCode.INTERNAL, "a message is compressed, which was not offered")
        elif length > MAX_MESSAGE_BYTES:
            text = f"Received message larger than max ({length} vs. {MAX_MESSAGE_BYTES})"
            self._abort(StatusCode.RESOURCE_EXHAUSTED, text)

    def _raise_end(self, status: StatusCode, details: str) -> NoReturn:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if status is StatusCode.OK and not self._buffer[self._begin :]:
            raise StopAsyncIteration
        if status is StatusCode.OK:
            status, details = StatusCode.INTERNAL, "the last message is incomplete"
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async def _wait(self) -> None:
        """Wait for data or the end of the call. Extend the flow-control window by the bytes read."""
        del self._buffer[: self._begin]
        self._begin = 0
        if not self._has_begun:
            self._start()
        elif self.connection is not None:
            self.connection.grant(self)
        if self._status is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _start(self) -> None:
        self._has_begun = True
        size = len(self._request) - _MESSAGE_PREFIX_STRUCT.size
        if size > MAX_MESSAGE_BYTES:
            text = f"Sent message larger than max ({size} vs. {MAX_MESSAGE_BYTES})"
            return self.finish(StatusCode.RESOURCE_EXHAUSTED, text)
        if self._timeout is not None:
            self._expiry = clock.monotonic() + self._timeout
            expired = StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._abort, *expired)
        self._channel.submit(self)

    def open(self, connection: http2.Connection, headers: bytes) -> None:
        """Send the request on a connection. `headers` are the encoded headers that all calls share."""
        if self._timeout is not None:
            limit = max(math.ceil(self._timeout * 1000), 1)
            is_short = limit <= _MAX_TIMEOUT
            text = f"{limit}m" if is_short else f"{min(limit // 1000, _MAX_TIMEOUT)}S"
            headers += http2.encode_short_header("grpc-timeout", text)
        connection.open(self, headers, self._request)

    def move(self) -> None:
        """Restart on another connection, at most once, and only if no response has begun."""
        if self._has_moved or self._has_headers:
            return self.finish(StatusCode.UNAVAILABLE, "GOAWAY received")
        self._has_moved = True
        self._channel.submit(self)

    def add_data(self, data: bytes) -> None:
        """Store a piece of the response and wake the reader."""
        if not self._has_headers:
            return self._abort(StatusCode.INTERNAL, "the engine sent data before headers")
        self._buffer += data
        self._wake()

    def add_headers(self, headers: Mapping[str, str], *, is_last: bool) -> None:
        """Check the headers of the response. Trailers end the call."""
        status = headers.get(":status", "200" if self._has_headers else "")
        if is_last:
            self._trailers = headers
            self.finish(*_final_status(headers, status))
        elif self._has_headers:
            self._abort(StatusCode.INTERNAL, "the engine sent headers twice")
        elif status == "200" and headers.get("content-type", "").startswith("application/grpc"):
            self._has_headers = True
        elif not status.startswith("1"):
            self._abort(*_final_status(headers, status))

    def end_without_status(self, reason: str, *, reset: int | None = None, is_lost: bool = False) -> None:
        """End the call with the status that gRPC defines for this cause."""
        status = StatusCode.UNAVAILABLE if is_lost else StatusCode.INTERNAL
        if reset is not None:
            status = _STATUS_BY_RESET_CODE.get(reset, status)
        if reset == http2.CANCEL and clock.monotonic() >= self._expiry:
            # The engine knows the deadline, and may have been a moment earlier than the timer.
            status = StatusCode.DEADLINE_EXCEEDED
        self.finish(status, reason)

    def finish(self, status: StatusCode, details: str, *, is_reset: bool = False) -> None:
        """Set the final status. The reader gets it after all received data; a second status has no effect."""
        if self._status is not None:
            return
        self._status = status, details
        if self._timer is not None:
            self._timer.cancel()
        self._channel.remove(self)
        if self.connection is not None:
            self.connection.remove(self, is_reset=is_reset)
        self._request = b""
        self._wake()

    def _abort(self, status: StatusCode, details: str) -> None:
        """End the call at once: drop received data and reset the stream."""
        if self._status is None:
            self.finish(status, details, is_reset=True)
            self._buffer.clear()
            self._begin = 0

    def cancel(self) -> None:
        """Cancel the call; its reader gets CancelledError."""
        if self._status is None:
            self._is_cancelled = True
            self._abort(StatusCode.CANCELLED, "")

    async def trailing_metadata(self) -> Mapping[str, str]:
        """Return the trailers of the response, empty before the end of the call."""
        return self._trailers

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UnaryCall(StreamCall[Response]):
    """A call with one reply message, which is returned when the final status has arrived."""

    def __await__(self) -> Generator[Any, None, Response]:
        return self._receive().__await__()

    async def _receive(self) -> Response:
        try:
            async for message in self:
                async for _ in self:
                    self._raise_end(StatusCode.INTERNAL, "a second message in a response of one")
                return message
            self._raise_end(StatusCode.INTERNAL, "the response has no message")
        finally:
            self.cancel()


def _final_status(headers: Mapping[str, str], http_status: str) -> tuple[StatusCode, str]:
    if (number := headers.get("grpc-status")) is not None:
        details = unquote_to_bytes(headers.get("grpc-message", "").encode("latin-1")).decode(errors="replace")
        return _STATUS_BY_CODE.get(number, StatusCode.UNKNOWN), details
    if http_status == "200":
        return StatusCode.UNKNOWN, "the engine's answer is not gRPC: it lacks the status or the content type"
    status = _STATUS_BY_HTTP_STATUS.get(http_status, StatusCode.UNKNOWN)
    return status, f"Received http2 header with status: {http_status[:20]}"


class StreamChannel:
    """Connections and calls of one engine. It connects when a call needs it, without back-off."""

    def __init__(self, address: Address, metadata: Iterable[tuple[str, str]]) -> None:
        self._address = address
        self._connection: http2.Connection | None = None
        self._connections: set[http2.Connection] = set()
        self._dial: asyncio.Task[None] | None = None
        self._calls: set[StreamCall[Any]] = set()
        self._queue: OrderedDict[StreamCall[Any], None] = OrderedDict()
        """Calls without a stream: they wait for a connection, or for the engine's limit of streams."""
        self._idle: asyncio.Event | None = None
        """Set once no call is left; None while the channel is open."""
        headers = {"te": "trailers", "content-type": "application/grpc", "user-agent": "localai-cluster"}
        headers["grpc-accept-encoding"] = "identity"
        self._common_headers = http2.encode_headers([*headers.items(), *metadata])
        self._headers: dict[str, bytes] = {}
        """The encoded headers of each method."""

    def submit(self, call: StreamCall[Any]) -> None:
        """Queue a call until the connection has capacity for its stream."""
        if self._idle is not None and call not in self._calls:
            return call.cancel()
        if self._connection is not None:
            self._connection.close_if_stale()
        self._calls.add(call)
        self._queue[call] = None
        self.dispatch()

    def remove(self, call: StreamCall[Any]) -> None:
        """Remove a call that has ended."""
        self._queue.pop(call, None)
        self._calls.discard(call)
        if self._idle is not None and not self._calls:
            self._idle.set()

    def dispatch(self) -> None:
        """Open streams for queued calls, up to the engine's limit. Connect if necessary."""
        connection = self._connection
        while connection is not None and self._queue and connection.has_capacity:
            call = self._queue.popitem(last=False)[0]
            if call.method not in self._headers:
                pseudo = {":method": "POST", ":scheme": "http", ":path": SERVICE_PATH + call.method}
                pseudo[":authority"] = str(self._address)
                self._headers[call.method] = http2.encode_headers(pseudo.items()) + self._common_headers
            call.open(connection, self._headers[call.method])
        if self._queue and self._connection is None and self._dial is None:
            self._dial = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        connection = http2.Connection(self)
        self._connections.add(connection)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                loop, host, port = asyncio.get_running_loop(), self._address.host, self._address.port
                await loop.create_connection(lambda: connection, host, port)
                await connection.ready.wait()
            reason = connection.failure
        except OSError as error:
            reason = str(error) or f"no answer within {CONNECT_TIMEOUT_SECONDS:.0f} s"
        finally:
            self._dial = None
        if reason:
            connection.close()
            self._refuse_queue(reason)
        else:
            self._connection = connection
            self.dispatch()

    def _refuse_queue(self, reason: str) -> None:
        for call in list(self._queue):
            call.finish(StatusCode.UNAVAILABLE, f"failed to connect to {self._address}: {reason}")

    def retire(self, connection: http2.Connection) -> None:
        """Use a new connection from now on; queued calls move to it."""
        if connection is self._connection:
            self._connection = None
            for call in list(self._queue):
                call.move()

    def forget(self, connection: http2.Connection) -> None:
        """Forget a connection that has ended; fail queued calls, which were never sent."""
        self._connections.discard(connection)
        if connection is self._connection:
            self._connection = None
            self._refuse_queue(connection.failure)

    async def close(self, grace: float | None) -> None:
        """Close all connections. Cancel calls that still run after `grace` seconds."""
        self._idle = asyncio.Event()
        if not self._calls:
            self._idle.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace or 0):
                    await self._idle.wait()
        finally:
            for call in list(self._calls):
                call.cancel()
            if self._dial is not None:
                self._dial.cancel()
            for connection in list(self._connections):
                connection.close()
