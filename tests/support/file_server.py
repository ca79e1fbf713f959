"""A worker's file server according to worker.md §12, with planned faults and a record of its requests."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from localai_cluster.kit.addresses import parse
from nodes.registry.dial_targets import Contact, HttpServer

TOKEN = "t" * 32
_WORDS = {200: "OK", 308: "Permanent Redirect", 401: "Unauthorized", 404: "Not Found", 416: "Bad Range"}


@dataclass(frozen=True)
class Asked:
    """One received request."""

    method: str
    key: str
    headers: dict[str, str]
    status: int


@dataclass(frozen=True)
class Cut:
    """The connection breaks after `after` bytes of a body."""

    after: int


@dataclass(frozen=True)
class Says:
    """An answer to a PUT instead of the right one, sent before its body is read."""

    status: int
    text: str = ""
    headers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hangs:
    """The server stops reading after `after` bytes until the test ends."""

    after: int = 0


@dataclass
class FileServer:
    """Serves `folder`; each of `faults` is applied to one PUT, in order."""

    folder: Path
    faults: list[Cut | Says | Hangs] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    hides: frozenset[str] = frozenset()
    """Headers of answers that a proxy removes."""
    address: str = ""
    token: str = TOKEN
    most: int = 0
    """The maximum of parallel uploads so far."""
    _now: int = 0
    _connections: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def server(self) -> HttpServer:
        """The server's address and token for the control plane."""
        return HttpServer("gpu", "healthy", Contact(str(parse(self.address)), self.token))

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Return method and status of each request."""
        return [(one.method, one.status) for one in self.asked]

    def file(self, key: str) -> Path:
        """Return the path of a key."""
        return self.folder / key

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a new connection."""
        self._connections.add(asyncio.create_task(self.handle(reader, writer)))

    async def close(self) -> None:
        """End all connections."""
        for one in self._connections:
            one.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
                key = unquote(path.removeprefix("/v1/files/"))
                answer = await self._answer(method, key, headers, reader)
                self.asked.append(Asked(method, key, headers, answer[0]))
                if answer[0] == 0:
                    break
                writer.write(self._encoded(method, *answer))
                await writer.drain()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _encoded(self, method: str, status: int, body: str, more: dict[str, Any]) -> bytes:
        content = "" if method == "HEAD" else body
        headers = {"Content-Length": len(content), **more}
        lines = [f"{name}: {value}" for name, value in headers.items() if name not in self.hides]
        return "\r\n".join([f"HTTP/1.1 {status} {_WORDS.get(status, 'X')}", *lines, "", content]).encode()

    async def _answer(
        self, method: str, key: str, headers: dict[str, str], reader: asyncio.StreamReader
    ) -> tuple[int, str, dict[str, Any]]:
        if headers.get("authorization") != f"Bearer {self.token}":
            return 401, "unauthorized", {"Connection": "close"}
        assert ".." not in key
        assert key.startswith("models/")
        return self._head(key) if method == "HEAD" else await self._put(key, headers, reader)

    def _head(self, key: str) -> tuple[int, str, dict[str, Any]]:
        file = self.file(key)
        if not file.exists():
            return 404, "", {}
        content, target = file.read_bytes(), self._target(file)
        said = (
            {"X-Target-SHA256": target.read_text()}
            if target.exists()
            else {"X-Content-SHA256": hashlib.sha256(content).hexdigest()}
        )
        size = len(content)
        return 200, "", {"Content-Length": size, "X-File-Size": size, "X-Local-Path": file, **said}

    @staticmethod
    def _target(file: Path) -> Path:
        return file.with_name(file.name + ".sha256.target")

    async def _put(
        self, key: str, headers: dict[str, str], reader: asyncio.StreamReader
    ) -> tuple[int, str, dict[str, Any]]:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Says):
            more = dict(one.split(": ") for one in fault.headers)
            await reader.readexactly(int(headers["content-length"]))
            return fault.status, fault.text, more
        file = self.file(key)
        if refused := self._begin(file, headers):
            await reader.readexactly(int(headers["content-length"]))
            return refused
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if not await self._receive(file, headers, reader, fault):
                return 0, "", {}
        finally:
            self._now -= 1
        total = int(headers.get("content-range", "/0").partition("/")[2])
        if (size := file.stat().st_size) < total:
            return 308, "", {"Range": f"bytes=0-{size - 1}", "X-File-Size": size}
        return self._end(file, headers)

    def _begin(self, file: Path, headers: dict[str, str]) -> tuple[int, str, dict[str, Any]] | None:
        """Return the refusal of the upload; prepare its file and return None if there is none."""
        target, sha256 = self._target(file), headers.get("x-content-sha256", "")
        size = file.stat().st_size if file.exists() else 0
        ranged = headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
        if ranged == "" or (int(ranged) == 0 and not self._same(file, sha256)):
            file.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            size = 0
        if ranged and int(ranged) != size:
            total = headers["content-range"].partition("/")[2]
            text = f"Content-Range start {ranged} does not match current file size {size}"
            return 416, text, {"Content-Range": f"bytes */{total}", "X-File-Size": size}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        if ranged and sha256:
            target.write_text(sha256)
        return None

    def _same(self, file: Path, sha256: str) -> bool:
        target = self._target(file)
        if not file.exists() or not sha256:
            return False
        known = target.read_text() if target.exists() else hashlib.sha256(file.read_bytes()).hexdigest()
        return known == sha256

    async def _receive(
        self, file: Path, headers: dict[str, str], reader: asyncio.StreamReader, fault: Cut | Hangs | None
    ) -> bool:
        left, got = int(headers["content-length"]), 0
        limit = fault.after if fault is not None else left
        with file.open("ab") as out:
            while left:
                if fault is not None and got >= limit:
                    if isinstance(fault, Hangs):
                        await asyncio.Event().wait()
                    return False
                piece = await reader.read(min(left, max(limit - got, 1), 65536))
                if not piece:
                    return False
                out.write(piece)
                out.flush()
                left, got = left - len(piece), got + len(piece)
        return True

    def _end(self, file: Path, headers: dict[str, str]) -> tuple[int, str, dict[str, Any]]:
        found, wanted = hashlib.sha256(file.read_bytes()).hexdigest(), headers.get("x-content-sha256")
        self._target(file).unlink(missing_ok=True)
        if wanted and found != wanted:
            file.unlink()
            return 400, f"sha256 mismatch: expected {wanted} got {found}", {}
        return 200, json.dumps({"local_path": str(file)}), {}


@asynccontextmanager
async def file_server(folder: Path) -> AsyncIterator[FileServer]:
    """Run a server on a free port, in the running loop."""
    made = FileServer(folder)
    server = await asyncio.start_server(made.begin, "127.0.0.1", 0, limit=2**20)
    made.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield made
    finally:
        server.close()
        await made.close()
        await server.wait_closed()
