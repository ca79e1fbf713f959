"""A client's HTTP/2 connection to an engine (RFC 9113), as far as `stream_client.py` needs it.

The engine is not trusted: frames, header blocks, windows and unread answers are limited, and a violation of
HTTP/2's rules ends the connection.
"""

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol, cast

from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple

from localai_cluster.kit import clock

STREAM_WINDOW = 65_535
"""Flow-control window of a stream in bytes; HTTP/2's initial value."""
CONNECTION_WINDOW = 1024 * 1024
"""Flow-control window of the connection in bytes, extended when data arrives.

The windows of the streams limit the unread bytes.
"""
MAX_FRAME_BYTES = 16_384
MAX_HEADER_BYTES = 65_536
"""Maximum bytes of a header block, both compressed and decompressed."""
MAX_CONTINUATION_FRAMES = 16
MAX_FRAMES_PER_TURN = 64
"""Maximum number of frames with request bodies that are sent in one turn of the event loop."""
MAX_UNREAD_ANSWERS = 1000
"""Maximum number of our answers to PING and SETTINGS that the engine has not read."""
IDLE_SECONDS = 1800.0
"""Seconds without a stream after which a connection is closed instead of used again, as in gRPC."""
CLOSE_SECONDS = 1.0
"""Seconds in which the last bytes must be sent when this side closes a connection."""
MAX_UINT31 = 2**31 - 1

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW, _CONTINUATION = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9),
)
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 1, 3, 6, 7
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 8, 9, 11
_ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADER_LIST = 2, 3, 4, 5, 6
_LIMITS_BY_SETTING = {
    _ENABLE_PUSH: (0, 0),
    _INITIAL_WINDOW: (0, MAX_UINT31),
    _MAX_FRAME: (MAX_FRAME_BYTES, 2**24 - 1),
}
_SIZE_BY_FRAME_TYPE = {_RST_STREAM: 4, _PING: 8, _WINDOW: 4}
_FRAME_STRUCT, _NUMBER_STRUCT, _SETTING_STRUCT = (
    struct.Struct(">IBI"),
    struct.Struct(">I"),
    struct.Struct(">HI"),
)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_TABLE_INSTRUCTION = b"\x20"
"""HPACK instruction that empties the dynamic table. Our header blocks do not use the table."""


class Http2Error(Exception):
    """The engine violated a rule of HTTP/2; `code` is the error code for the GOAWAY frame."""

    def __init__(self, text: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


class Stream(ABC):
    """One request and its response. The connection sends `body` as far as the engine's windows allow."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.id = self.send_window = 0
        self.window = STREAM_WINDOW
        self.body = memoryview(b"")

    @abstractmethod
    def add_headers(self, headers: Mapping[str, str], *, is_last: bool) -> None:
        """Process a header block of the response. The one with `is_last` ends the stream."""

    @abstractmethod
    def add_data(self, data: bytes) -> None:
        """Process a piece of the response body."""

    @abstractmethod
    def move(self) -> None:
        """Restart the request on another connection, because the engine has not processed it."""

    @abstractmethod
    def end_without_status(self, reason: str, *, reset: int | None = None, is_lost: bool = False) -> None:
        """End the stream without a gRPC status, and call `Connection.remove`.

        The cause is RST_STREAM with the code `reset`, or the loss of the connection (`is_lost`), or an error
        of the engine.
        """


class Owner(Protocol):
    """Interface of the channel that owns connections."""

    def dispatch(self) -> None:
        """Open a stream for a waiting call, because the connection has capacity."""

    def retire(self, connection: "Connection") -> None:
        """Stop opening streams on this connection."""

    def forget(self, connection: "Connection") -> None:
        """Forget a connection that has ended."""


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode headers without HPACK's table, so that the bytes are valid on any connection."""
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in headers])


def encode_short_header(name: str, value: str) -> bytes:
    """Encode one header, ten times as fast as `encode_headers`. Name and value need less than 127 bytes."""
    return b"\x10%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())


def _encode_frame(kind: int, flags: int, stream_id: int, payload: bytes | memoryview = b"") -> bytes:
    return _FRAME_STRUCT.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def _strip_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise Http2Error("a frame is shorter than its padding")
    return payload[1 : len(payload) - payload[0]]


class Connection(asyncio.Protocol):
    """One HTTP/2 connection. It accepts streams after the engine's first SETTINGS, until GOAWAY."""

    def __init__(self, owner: Owner) -> None:
        self.ready = asyncio.Event()
        """Set by the engine's first SETTINGS, and by the end of the connection."""
        self.failure = ""
        """The reason of the connection's end."""
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._stream_limit, self._frame_limit = MAX_UINT31, MAX_FRAME_BYTES
        self._initial_window = self._send_window = STREAM_WINDOW
        self._owed = self._unread_answers = self._continuations = self._block_flags = self._block_stream = 0
        self._partial = self._block = b""
        self._frames: list[bytes] = []
        self._decoder = Decoder(MAX_HEADER_BYTES)
        self._is_retired = self._is_paused = False
        self._idle_since = clock.monotonic()
        self._handlers = {
            **{_HEADERS: self._on_headers, _CONTINUATION: self._on_continuation, _DATA: self._on_data},
            **{_RST_STREAM: self._on_reset, _SETTINGS: self._on_settings, _PING: self._on_ping},
            **{_GOAWAY: self._on_goaway, _WINDOW: self._on_window, _PUSH_PROMISE: self._on_push},
        }

    def close_if_stale(self) -> None:
        """Close the connection if it had no stream for `IDLE_SECONDS`.

        A device on the network path may have dropped it.
        """
        if not self._streams and clock.monotonic() - self._idle_since > IDLE_SECONDS:
            self.close()

    @property
    def has_capacity(self) -> bool:
        """True if one more stream may be opened."""
        return len(self._streams) < self._stream_limit and not (self._is_retired or self.failure)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the HTTP/2 preface and settings: no pushes, and a larger window for the whole connection."""
        self._transport = cast(asyncio.Transport, transport)
        settings = _SETTING_STRUCT.pack(_ENABLE_PUSH, 0) + _SETTING_STRUCT.pack(
            _MAX_HEADER_LIST, MAX_HEADER_BYTES
        )
        window = _NUMBER_STRUCT.pack(CONNECTION_WINDOW - STREAM_WINDOW)
        self._write(
            _PREFACE + _encode_frame(_SETTINGS, 0, 0, settings) + _encode_frame(_WINDOW, 0, 0, window)
        )

    def connection_lost(self, error: Exception | None) -> None:
        """End every stream."""
        self._end(f"Socket closed: {error}" if error else "Socket closed", is_lost=True)

    def close(self, code: int = 0, reason: str = "Socket closed") -> None:
        """Send GOAWAY and close the connection, even if the engine does not read."""
        if self._transport is not None and not self.failure:
            self._write(_encode_frame(_GOAWAY, 0, 0, _NUMBER_STRUCT.pack(0) + _NUMBER_STRUCT.pack(code)))
            self._flush()
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)
        self._end(reason, is_lost=not code)

    def _end(self, reason: str, *, is_lost: bool) -> None:
        self.failure = self.failure or reason
        self.ready.set()
        for stream in list(self._streams.values()):
            stream.end_without_status(reason, is_lost=is_lost)
        self._owner.forget(self)

    def pause_writing(self) -> None:
        """Stop sending request bodies until the engine reads."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Continue sending request bodies."""
        self._is_paused, self._unread_answers = False, 0
        self._send_bodies()

    def data_received(self, data: bytes) -> None:
        """Process each complete frame. A protocol error of the engine ends the connection."""
        try:
            self._partial = self._read_frames(self._partial + data if self._partial else data)
        except Http2Error as error:
            self.close(error.code, f"the engine broke a rule of HTTP/2: {error}")
        except HPACKError as error:
            self.close(COMPRESSION_ERROR, f"the engine's headers cannot be decoded: {error}")

    def _read_frames(self, data: bytes) -> bytes:
        position, size = 0, len(data)
        while size - position >= _FRAME_STRUCT.size and not self.failure:
            head, flags, stream_id = _FRAME_STRUCT.unpack_from(data, position)
            kind, length = head & 0xFF, head >> 8
            if length > MAX_FRAME_BYTES or length != _SIZE_BY_FRAME_TYPE.get(kind, length):
                raise Http2Error("a frame has a wrong size", FRAME_SIZE_ERROR)
            begin = position + _FRAME_STRUCT.size
            if begin + length > size:
                break
            position = begin + length
            stream_id &= MAX_UINT31
            self._check_place(kind, stream_id)
            if (handler := self._handlers.get(kind)) is not None:
                handler(flags, stream_id, data[begin:position])
        return b"" if self.failure else data[position:]

    def _check_place(self, kind: int, stream_id: int) -> None:
        """Raise Http2Error if a frame of this kind is not allowed now, or not on this stream."""
        if self._block_stream and (kind != _CONTINUATION or stream_id != self._block_stream):
            raise Http2Error("a frame interrupts a header block")
        if kind in (_SETTINGS, _PING, _GOAWAY) or (kind == _WINDOW and not stream_id):
            is_misplaced = stream_id != 0 or not (kind == _SETTINGS or self.ready.is_set())
        else:
            is_misplaced = kind in self._handlers and not (stream_id & 1 and stream_id < self._next_id)
        if is_misplaced:
            raise Http2Error("a frame comes too early or on a wrong stream")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._owed += size
        if self._owed * 2 > CONNECTION_WINDOW:
            self._write(_encode_frame(_WINDOW, 0, 0, _NUMBER_STRUCT.pack(self._owed)))
            self._owed = 0
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if size > stream.window:
            raise Http2Error("more data than the stream's window", FLOW_CONTROL_ERROR)
        stream.window -= size
        stream.add_data(_strip_padding(payload) if flags & _PADDED else payload)
        if flags & _END_STREAM and stream.connection is self:
            stream.end_without_status("the engine ended the stream without a status")

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = _strip_padding(payload) if flags & _PADDED else payload
        self._block = block[5:] if flags & _PRIORITY else block
        self._block_stream, self._block_flags, self._continuations = stream_id, flags, 0
        if flags & _END_HEADERS:
            self._end_block()

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._continuations += 1
        if not self._block_stream:
            raise Http2Error("a continuation without a header block")
        if (
            self._continuations > MAX_CONTINUATION_FRAMES
            or len(self._block) + len(payload) > MAX_HEADER_BYTES
        ):
            raise Http2Error("a header block is too long", ENHANCE_YOUR_CALM)
        self._block += payload
        if flags & _END_HEADERS:
            self._end_block()

    def _end_block(self) -> None:
        # Also for a stream that has ended: the decoder's table depends on every block.
        pairs = self._decoder.decode(self._block, raw=True)
        stream = self._streams.get(self._block_stream)
        self._block, self._block_stream = b"", 0
        if stream is not None:
            headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in pairs}
            stream.add_headers(headers, is_last=bool(self._block_flags & _END_STREAM))

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if (stream := self._streams.get(stream_id)) is not None:
            code = _NUMBER_STRUCT.unpack(payload)[0]
            stream.end_without_status(f"Stream removed (RST_STREAM with error code {code})", reset=code)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) % _SETTING_STRUCT.size or (flags & _ACK and payload):
            raise Http2Error("SETTINGS have a wrong size", FRAME_SIZE_ERROR)
        if flags & _ACK:
            return
        for name, value in _SETTING_STRUCT.iter_unpack(payload):
            least, most = _LIMITS_BY_SETTING.get(name, (0, value))
            if not least <= value <= most:
                raise Http2Error(f"setting {name} has a wrong value")
            if name == _MAX_STREAMS:
                self._stream_limit = value
            elif name == _MAX_FRAME:
                self._frame_limit = value
            elif name == _INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.send_window += value - self._initial_window
                self._initial_window = value
        self._answer(_encode_frame(_SETTINGS, _ACK, 0))
        self.ready.set()
        self._send_bodies()
        self._owner.dispatch()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & _ACK:
            self._answer(_encode_frame(_PING, _ACK, 0, payload))

    def _answer(self, frame: bytes) -> None:
        self._unread_answers += self._is_paused
        if self._unread_answers > MAX_UNREAD_ANSWERS:
            raise Http2Error("the answers to its frames are not read", ENHANCE_YOUR_CALM)
        self._write(frame)

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) < 8:
            raise Http2Error("GOAWAY has a wrong size", FRAME_SIZE_ERROR)
        last = _NUMBER_STRUCT.unpack_from(payload)[0] & MAX_UINT31
        self._retire([stream for number, stream in self._streams.items() if number > last])

    def _retire(self, skipped: list[Stream]) -> None:
        self._is_retired = True
        self._owner.retire(self)
        for stream in skipped:
            del self._streams[stream.id]
            stream.connection = None
            stream.move()
        self._close_if_unused()

    def _on_window(self, flags: int, stream_id: int, payload: bytes) -> None:
        increment = _NUMBER_STRUCT.unpack(payload)[0] & MAX_UINT31
        stream = self._streams.get(stream_id)
        if not stream_id:
            self._send_window += increment
        elif stream is not None:
            stream.send_window += increment
        if not increment or max(self._send_window, stream.send_window if stream else 0) > MAX_UINT31:
            raise Http2Error("WINDOW_UPDATE has a wrong value", FLOW_CONTROL_ERROR)
        if stream is not None:
            self._send_body(stream)
        elif not stream_id:
            self._send_bodies()

    def _on_push(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise Http2Error("pushes were forbidden")

    def open(self, stream: Stream, headers: bytes, body: bytes) -> None:
        """Open a stream and send its request as far as the engine's windows allow."""
        stream.connection, stream.id, stream.body = self, self._next_id, memoryview(body)
        stream.send_window = self._initial_window
        self._streams[stream.id] = stream
        block = headers if stream.id > 1 else _EMPTY_TABLE_INSTRUCTION + headers
        self._write(_encode_frame(_HEADERS, _END_HEADERS, stream.id, block))
        self._send_body(stream)
        self._next_id += 2
        if self._next_id > MAX_UINT31:
            self._retire([])

    def _send_bodies(self) -> None:
        for stream in self._streams.values():
            self._send_body(stream)

    def _send_body(self, stream: Stream) -> None:
        while stream.body and not self._is_paused and len(self._frames) < MAX_FRAMES_PER_TURN:
            size = min(len(stream.body), self._frame_limit, self._send_window, stream.send_window)
            if size <= 0:
                break
            piece, stream.body = stream.body[:size], stream.body[size:]
            self._send_window -= size
            stream.send_window -= size
            self._write(_encode_frame(_DATA, 0 if stream.body else _END_STREAM, stream.id, piece))

    def grant(self, stream: Stream) -> None:
        """Extend the stream's window by the bytes that its reader has consumed."""
        taken = STREAM_WINDOW - stream.window
        if taken * 2 > STREAM_WINDOW:
            stream.window += taken
            self._write(_encode_frame(_WINDOW, 0, stream.id, _NUMBER_STRUCT.pack(taken)))

    def remove(self, stream: Stream, *, is_reset: bool) -> None:
        """Remove a stream that has ended. With `is_reset`, also cancel it at the engine."""
        del self._streams[stream.id]
        if is_reset or stream.body:
            self._write(_encode_frame(_RST_STREAM, 0, stream.id, _NUMBER_STRUCT.pack(CANCEL)))
        stream.connection = None
        self._idle_since = clock.monotonic()
        self._close_if_unused()
        self._owner.dispatch()

    def _close_if_unused(self) -> None:
        if self._is_retired and not self._streams and not self.failure:
            self.close()

    def _write(self, frame: bytes) -> None:
        """Queue a frame. All frames of one turn of the event loop are sent together."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(frame)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self._transport is not None and frames and not self.failure:
            self._transport.write(b"".join(frames))
        if len(frames) >= MAX_FRAMES_PER_TURN:
            self._send_bodies()
