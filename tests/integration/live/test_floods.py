"""What a websocket's client sends is never read: a flood of it costs a web process no memory."""

import base64
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.wiring.test_serve import ADMIN, serving

pytestmark = pytest.mark.django_db(transaction=True)

MASK = b"\0\0\0\0"


def frame(opcode: int, payload: bytes) -> bytes:
    """One short, final frame of a client."""
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + MASK + payload


@contextmanager
def opened(url: str, path: str) -> Iterator[socket.socket]:
    """A websocket of an admin who reads no more than the answer to the handshake."""
    with asked(url, path, ADMIN) as link:
        assert b" 101 " in link.recv(4096)
        yield link


@contextmanager
def asked(url: str, path: str, more: dict[str, str]) -> Iterator[socket.socket]:
    """A connection on which a handshake was sent."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect((host, int(port)))
        key = base64.b64encode(os.urandom(16)).decode()
        headers = {
            "Host": "x",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": key,
            "Sec-WebSocket-Version": "13",
            **more,
        }
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        link.sendall("\r\n".join(lines).encode("latin-1"))
        yield link


FLOODS = {
    "texts": frame(1, b"x") * 300_000,
    "binaries": frame(2, b"\xff") * 300_000,
    "pings": frame(9, b"p" * 125) * 300_000,
    "pongs": frame(10, b"") * 300_000,
}
CLOSE = frame(8, b"\x03\xe8")


def most_memory(process: "subprocess.Popen[bytes]") -> float:
    """The most that a process has ever had, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_frames_costs_no_memory(tmp_path: Path, kind: str) -> None:
    """Messages are not read, so none are kept; pings are not answered to who does not read."""
    with serving(tmp_path) as (process, url), opened(url, "/ws/feed") as link:
        before = most_memory(process)
        link.sendall(FLOODS[kind] + CLOSE)
        while link.recv(65536):
            """The end comes when everything was looked at."""
        grown = most_memory(process) - before
    assert grown < 20


def test_a_handshake_that_cannot_be_read_is_refused_as_any_other(tmp_path: Path) -> None:
    """Of anybody, and without a traceback in the log."""
    with serving(tmp_path) as (_, url):
        with asked(url, "/ws/feed", {"Sec-WebSocket-Protocol": "\xff\xfe"}) as link:
            assert link.recv(4096).startswith(b"HTTP/1.1 403 ")
        with opened(url, "/ws/feed"):
            """The process goes on."""
    assert b"Traceback" not in (tmp_path / "log").read_bytes()
