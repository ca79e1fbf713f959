"""What a connection refuses before any route sees it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from localai_cluster.accounts.sessions import SessionStore
from localai_cluster.kit.connections import (
    BODY_SECONDS,
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    BoundedHead,
    WatchingSocket,
)
from tests.conftest import until

PIECE = b"a" * (MAX_HEAD_BYTES // 2)


class _Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.writes = 0
        self.closed = False
        self.aborts = 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborts += 1

    def write(self, data: Any) -> None:
        self.sent += bytes(data)
        self.writes += 1

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _silent(scope: Any, receive: Any, send: Any) -> None:
    """Never answers, so that only the connection does."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _sent(*pieces: bytes) -> _Wire:
    config = uvicorn.Config(_silent, http=BoundedHead, lifespan="off", log_config=None)
    config.load()
    wire = _Wire()
    connection = BoundedHead(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            connection.data_received(piece)
    connection.connection_lost(ConnectionResetError())
    return wire


async def test_open_connections_are_bounded_before_a_request_arrives() -> None:
    """uvicorn answers 503 from its limit on, but only to a request: silent connections would use up all
    file descriptors."""
    config = uvicorn.Config(_silent, http=BoundedHead, lifespan="off", log_config=None, limit_concurrency=2)
    config.load()
    state = ServerState()

    def connect() -> tuple[BoundedHead, _Wire]:
        connection, wire = BoundedHead(config=config, server_state=state, app_state={}), _Wire()
        connection.connection_made(wire)
        return connection, wire

    opened = [connect() for _ in range(4)]
    assert [wire.aborts for _, wire in opened] == [0] * 4
    refused, wire = connect()
    assert wire.aborts == 1
    for connection in (refused, opened.pop()[0]):
        connection.connection_lost(ConnectionResetError())
    opened.append(connect())
    assert opened[-1][1].aborts == 0
    for connection, _ in opened:
        connection.connection_lost(ConnectionResetError())


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX: ", CHUNKED + b"0\r\nX: "], ids=["head", "trailer"])
async def test_a_header_without_an_end_is_refused(start: bytes) -> None:
    wire = await _sent(start, PIECE, PIECE, PIECE)
    assert wire.closed
    assert wire.sent.startswith(b"HTTP/1.1 400")


async def test_a_long_body_is_no_header() -> None:
    chunk = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
    wire = await _sent(CHUNKED, *[chunk] * 5, b"0\r\nX: a\r\n\r\n")
    assert not wire.closed
    assert wire.sent == b""


def test_a_session_key_that_no_text_can_hold_is_none() -> None:
    assert SessionStore("\0" + "a" * 31).session_key is None
    assert SessionStore("a1" * 16).session_key == "a1" * 16


class _Played:
    """A loop whose time is moved by hand; tasks run on the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Any, asyncio.Event]] = []
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr("localai_cluster.kit.connections.clock.monotonic", lambda: self.now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback: Any, *_: Any) -> Any:
        ended = asyncio.Event()
        self._timers.append((self.now + delay, callback, ended))
        return SimpleNamespace(cancel=ended.set)

    def pass_by(self, seconds: float) -> None:
        """Moves the time in steps and runs what is due."""
        for _ in range(round(seconds)):
            self.now += 1
            due = [timer for timer in self._timers if timer[0] <= self.now]
            self._timers = [timer for timer in self._timers if timer[0] > self.now]
            for _, callback, ended in due:
                if not ended.is_set():
                    callback()


class _Client:
    """A connection that is driven by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, app: Any = _silent) -> None:
        config = uvicorn.Config(
            app, http=BoundedHead, lifespan="off", log_config=None, timeout_keep_alive=KEEP_ALIVE
        )
        config.load()
        self.wire, self.time = _Wire(), _Played(monkeypatch)
        self.connection = BoundedHead(
            config=config, server_state=ServerState(), app_state={}, _loop=cast("Any", self.time)
        )
        self.connection.connection_made(self.wire)

    def drips(self, data: bytes, every: float, most: float) -> float:
        """Sends a byte at a time until the connection is closed; when that was, or `most`."""
        for byte in data:
            if self.wire.closed or self.time.now >= most:
                break
            self.connection.data_received(bytes([byte]))
            self.time.pass_by(every)
        return self.time.now

    def leaves(self) -> None:
        self.connection.connection_lost(None)


KEEP_ALIVE = 75
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 500
WITH_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize("kept", [b"", b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second"])
async def test_headers_that_drip_end(kept: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every 5 s was never closed: 408 after the time for headers, of each request of a connection."""
    client = _Client(monkeypatch, _brief)
    if kept:
        client.connection.data_received(kept)
        await _answered(client)
        client.time.pass_by(60)
        assert not client.wire.closed
        client.wire.sent = b""
    began = client.time.now
    assert client.drips(HEAD, 5, began + 600) - began <= HEAD_SECONDS + 5
    assert client.wire.sent.startswith(b"HTTP/1.1 408")
    client.leaves()


async def test_a_connection_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer: browsers open connections in advance and would take it for that of a request."""
    client = _Client(monkeypatch)
    client.time.pass_by(HEAD_SECONDS + 1)
    assert (client.wire.closed, client.wire.sent) == (True, b"")
    client.leaves()


async def test_blank_lines_keep_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests any byte ends the pause that is granted there."""
    client = _Client(monkeypatch, _brief)
    client.connection.data_received(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
    await _answered(client)
    assert client.drips(b"\r\n" * 500, 5, 600) <= HEAD_SECONDS + 5
    client.leaves()


@pytest.mark.parametrize("before", [b"", b"x" * 500_000], ids=["from the start", "after half of it"])
async def test_a_body_that_drips_ends(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before does not pay for what does not come."""
    client = _Client(monkeypatch)
    client.connection.data_received(WITH_BODY + before)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.drips(b"x" * 500, 5, 600) <= 2 * BODY_SECONDS + 5
    assert client.wire.sent.startswith(b"HTTP/1.1 408")
    client.leaves()


async def test_a_body_that_drips_after_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused caller keeps no connection by going on with the body that was not read."""
    client = _Client(monkeypatch, _brief)
    client.connection.data_received(WITH_BODY)
    await _answered(client)
    assert client.drips(b"x" * 500, 5, 600) <= BODY_SECONDS + 5
    assert b" 408 " not in client.wire.sent
    client.leaves()


async def test_a_slow_and_steady_body_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte at a kilobyte a second takes a quarter of an hour and arrives."""
    client = _Client(monkeypatch, _brief_after_body)
    client.connection.data_received(WITH_BODY)
    for _ in range(1000):
        client.connection.data_received(b"x" * 1000)
        client.time.pass_by(1)
        await asyncio.sleep(0)
    await _answered(client)
    assert client.wire.sent.startswith(b"HTTP/1.1 200")
    assert not client.wire.closed
    client.leaves()


async def test_a_response_leaves_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and body are one write; a head without a body leaves all the same, also before a close."""
    whole = _Client(monkeypatch, _brief_after_body)
    whole.connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
    await _answered(whole)
    assert (whole.wire.writes, whole.wire.sent[:12]) == (1, b"HTTP/1.1 200")
    for end in (asyncio.sleep(0), None):
        client = _Client(monkeypatch)
        client.connection.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        if end is None:
            client.connection.transport.close()
        else:
            await end
        assert client.wire.sent == b"HTTP/1.1 200 OK\r\n\r\n"
        client.leaves()
    whole.leaves()


async def test_a_body_that_we_do_not_read_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the application is busy the client is not asked for more."""
    client = _Client(monkeypatch, _busy)
    client.connection.data_received(WITH_BODY + b"x" * 200_000)
    client.time.pass_by(10 * BODY_SECONDS)
    assert not client.wire.closed
    client.leaves()


async def test_a_request_that_is_whole_may_be_worked_on_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are those of sending, not of the answer."""
    client = _Client(monkeypatch)
    client.connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.time.pass_by(3600)
    assert not client.wire.closed
    client.leaves()


async def _busy(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


async def _brief(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _brief_after_body(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await _brief(scope, receive, send)


async def _answered(client: _Client) -> None:
    await until(lambda: client.connection.cycle.response_complete)


_HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("stays", [True, False], ids=["no pong", "the application ends"])
async def test_a_websocket_that_nobody_reads_is_cut(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    """Closing would wait until the client has read everything, which may be never."""
    accepted = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        accepted.set()
        if stays:
            await asyncio.Event().wait()

    config = uvicorn.Config(
        app, ws=WatchingSocket, lifespan="off", log_config=None, ws_ping_interval=20, ws_ping_timeout=30
    )
    config.load()
    wire, time = _Wire(), _Played(monkeypatch)
    state = ServerState()
    connection = WatchingSocket(config, state, {}, cast("Any", time))
    connection.connection_made(wire)
    connection.data_received(_HANDSHAKE)
    await accepted.wait()
    connection.pause_writing()
    if not stays:
        await asyncio.wait(state.tasks)
    time.pass_by(9 if not stays else 49)
    assert wire.aborts == 0
    time.pass_by(2)
    assert wire.aborts == 1
    connection.connection_lost(None)
    for task in list(state.tasks):
        task.cancel()
