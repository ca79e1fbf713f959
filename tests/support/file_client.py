"""A client of a worker's files that can send invalid requests: any path, any header, a partial body."""

import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker_http import ENGINE_TOKEN, Served, worker

PATIENCE = 120.0
BEARER = {"Authorization": f"Bearer {ENGINE_TOKEN}"}


@dataclass(frozen=True)
class Got:
    """An answer; status 0 if the connection ended without an answer."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    @property
    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.body)


def sha256(content: bytes) -> str:
    """Return the hash in hex."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Files:
    """The files of the worker at `address`."""

    address: str

    def connect(self) -> socket.socket:
        """Open a connection."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE)

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Got:
        """Send one request on its own connection; `headers` replace the default, the bearer token."""
        with self.connect() as link:
            self.send_head(link, method, path, BEARER if headers is None else headers)
            with contextlib.suppress(ConnectionError):
                link.sendall(body)
            return answered(link, method)

    def send_head(self, link: socket.socket, method: str, path: str, headers: dict[str, str]) -> None:
        """Send the head of a request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        link.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def head(self, key: str) -> Got:
        """Send HEAD."""
        return self.ask("HEAD", f"/v1/files/{key}")

    def get(self, key: str, wanted: str = "") -> Got:
        """Send GET; `wanted` is a Range."""
        return self.ask("GET", f"/v1/files/{key}", BEARER | ({"Range": wanted} if wanted else {}))

    def put(self, key: str, content: bytes, digest: str | None = None, **more: str) -> Got:
        """Send PUT with a whole file; `more` are headers."""
        return self.ask("PUT", f"/v1/files/{key}", _headers(content, digest, more), content)

    def put_part(self, key: str, content: bytes, start: int, end: int, digest: str | None = None) -> Got:
        """Send PUT with the bytes from `start` up to, but not including, `end`."""
        span = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
        return self.ask(
            "PUT", f"/v1/files/{key}", _headers(content[start:end], digest, span), content[start:end]
        )

    def cut(self, key: str, content: bytes, start: int, after: int, *, reset: bool) -> None:
        """Upload the rest from `start`; end the connection after `after` bytes of the body."""
        rest = content[start:]
        span = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        with self.connect() as link:
            self.send_head(link, "PUT", f"/v1/files/{key}", _headers(rest, sha256(content), span))
            link.sendall(rest[:after])
            if reset:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def stage(self, key: str, content: bytes, tries: int = 20) -> int:
        """Send a file by the rules of §13, without pauses; return the number of PUTs."""
        digest = sha256(content)
        if self.head(key).headers.get("x-content-sha256") == digest:
            return 0
        for count in range(1, tries + 1):
            seen = self.head(key).headers
            size = int(seen.get("x-file-size", 0))
            resumes = 0 < size < len(content) and seen.get("x-target-sha256") == digest
            start = size if resumes else 0
            if content:
                got = self.put_part(key, content, start, len(content), digest)
            else:
                got = self.put(key, content, digest)
            if got.status == 200:
                return count
            assert got.status in (0, 308, 416), got
            if self.head(key).headers.get("x-content-sha256") == digest:
                return count
        raise AssertionError(f"not there after {tries} uploads: {got}")


def answered(link: socket.socket, method: str) -> Got:
    """Return the answer to the request that was sent."""
    response = HTTPResponse(link, method=method)
    try:
        response.begin()
        body = response.read()
    except (ConnectionError, ValueError):
        return Got(0)
    except Exception as error:
        if type(error).__name__ in ("RemoteDisconnected", "BadStatusLine", "IncompleteRead"):
            return Got(0)
        raise
    return Got(response.status, body, {name.lower(): value for name, value in response.getheaders()})


def _headers(body: bytes, digest: str | None, more: dict[str, str]) -> dict[str, str]:
    given = {"X-Content-SHA256": digest} if digest else {}
    return BEARER | {"Content-Length": str(len(body))} | given | more


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Yield one real server for the tests of a module."""
    with worker() as one:
        yield one


@pytest.fixture
def files(served: Served) -> Files:
    """Return a client of the server's files."""
    return Files(served.address)


def on_disk(served: Served, key: str) -> Path:
    """Return the path of a file of `models/`."""
    return served.folders.models / key.removeprefix("models/")
