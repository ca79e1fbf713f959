"""What a connection refuses before any route sees it."""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from localai_cluster.accounts.session_store import SessionStore
from localai_cluster.web.connections import LARGEST_HEAD, BoundedHead

PIECE = b"a" * (LARGEST_HEAD // 2)


class _Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

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
