"""A source of models with the behaviour and the faults of real sources.

Files are redirected to signed addresses of a second server, as the hub and registries do. `requests` has
every request with its range and credential. The source may require a token, be busy, end bodies early, state
wrong lengths, replace a file, ignore ranges, or be slow.
"""

import hashlib
import io
import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from localai_cluster.kit.outbound import Outbound, SourceBody

if TYPE_CHECKING:
    # A story plays without Django.
    from nodes.sources.plans import SourceFile

PIECE = 256 * 1024
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Refusal:
    """A response in place of a file."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True)
class Request:
    """A request to the source (`part` is `files`) or to its storage (`storage`)."""

    part: str
    path: str
    authorization: str
    range: str
    host: str


@dataclass
class Source:
    """The two servers; `started` runs them."""

    files: dict[str, bytes | Path] = field(default_factory=dict)
    redirects: bool = True
    ranges: bool = True
    etags: bool = True
    lifetime: int = 1
    """Requests for which a signed address is valid; 0 = no limit."""
    tokens: dict[str, str] = field(default_factory=dict)
    """By prefix of a path: the required value of `Authorization`."""
    refusals: list[Refusal] = field(default_factory=list)
    """Responses to the next requests, instead of a file or a redirect."""
    storage_refusals: list[Refusal] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    """Bytes after which the next bodies end."""
    extra_length: int = 0
    """Bytes that headers state in addition to the true length."""
    rate: int = 0
    """Bytes per second of a body; 0 = unlimited."""
    pause_at: int = -1
    """Byte of a body at which the source waits for `released`; -1 = no pause."""
    released: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)
    sent: int = 0
    """Bytes of bodies that were sent."""
    location: str = ""
    """Another redirect target; "" = the storage."""
    context: ssl.SSLContext | None = None
    """TLS context with which the first server speaks HTTPS; None = HTTP."""

    def start(self, port: int = 0) -> None:
        self._signatures: dict[str, int] = {}
        self._stopping = threading.Event()
        self._servers = [self._serve("files", port), self._serve("storage", 0)]
        self.host, self.storage = (f"127.0.0.1:{server.server_port}" for server in self._servers)

    def stop(self) -> None:
        """End both servers and every connection, as the end of their process would."""
        self._stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def hold(self, at: int) -> None:
        """Send files up to this byte; the rest comes after `release`."""
        self.paused.clear()
        self.released.clear()
        self.pause_at = at

    def release(self) -> None:
        """Send bodies to their ends again."""
        self.pause_at = -1
        self.released.set()

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def seen(self, part: str) -> list[Request]:
        return [request for request in self.requests if request.part == part]

    def sent_to(self, path: str) -> list[str]:
        """Return the ranges of a file that were requested from the storage."""
        part = "storage" if self.redirects else "files"
        return [request.range for request in self.seen(part) if request.path == path]

    def _serve(self, part: str, port: int) -> ThreadingHTTPServer:
        source = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                source.requests.append(
                    Request(
                        part,
                        parts.path,
                        self.headers.get("Authorization", ""),
                        self.headers.get("Range", ""),
                        self.headers.get("Host", ""),
                    )
                )
                if part == "files":
                    source._answer(self, parts.path)
                else:
                    source._answer_signed(self, parts.path, parse_qs(parts.query).get("signature", [""])[0])

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign] # a client that has gone
        if self.context and part == "files":
            server.socket = self.context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def _answer(self, request: BaseHTTPRequestHandler, path: str) -> None:
        needed = next((token for start, token in self.tokens.items() if path.startswith(start)), "")
        given = request.headers.get("Authorization", "")
        if self.refusals:
            _refuse(request, self.refusals.pop(0))
        elif needed and given != needed:
            words = (("X-Error-Code", "GatedRepo"), ("X-Error-Message", "Access is restricted: sign in."))
            _refuse(request, Refusal(403 if given else 401, words))
        elif path not in self.files:
            _refuse(request, Refusal(404, (), b'{"error": "Entry not found"}'))
        elif self.redirects:
            signature = secrets.token_hex(8)
            self._signatures[signature] = self.lifetime or -1
            target = self.location or f"http://{self.storage}{path}?signature={signature}"
            _refuse(request, Refusal(302, (("Location", target),)))
        else:
            self._send(request, path)

    def _answer_signed(self, request: BaseHTTPRequestHandler, path: str, signature: str) -> None:
        uses = self._signatures.get(signature, 0)
        if self.storage_refusals:
            _refuse(request, self.storage_refusals.pop(0))
        elif not uses:
            _refuse(request, Refusal(403, (), b"<Error><Code>AccessDenied</Code></Error>"))
        else:
            self._signatures[signature] = uses - 1
            self._send(request, path)

    def _send(self, request: BaseHTTPRequestHandler, path: str) -> None:
        data = self.files[path]
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        start, end, asked = 0, size, request.headers.get("Range", "")
        if self.ranges and asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else size, size)
            if start >= size:
                _refuse(request, Refusal(416, (("Content-Range", f"bytes */{size}"),)))
                return
        request.send_response(206 if self.ranges and asked else 200)
        if self.ranges and asked:
            request.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        request.send_header("Content-Length", str(end - start + self.extra_length))
        if self.etags:
            name = sha256_of(data) if isinstance(data, bytes) else str(data.stat().st_mtime_ns)
            request.send_header("ETag", f'"{name}"')
        request.end_headers()
        if request.command == "HEAD":
            return
        limit = self.drops.pop(0) if self.drops else end - start
        with open(data, "rb") if isinstance(data, Path) else io.BytesIO(data) as file:
            file.seek(start)
            self._send_body(request, file, start, min(end, start + limit))
        request.close_connection = request.close_connection or limit < end - start or self.extra_length > 0

    def _send_body(self, request: BaseHTTPRequestHandler, file: Any, at: int, end: int) -> None:
        piece_size = max(1024, self.rate // 20) if self.rate else PIECE
        try:
            while at < end and not self._stopping.is_set():
                if 0 <= self.pause_at <= at:
                    self.paused.set()
                    self.released.wait(60)
                elif at < self.pause_at < end:
                    piece_size = min(piece_size, self.pause_at - at)
                piece = file.read(min(piece_size, end - at))
                request.wfile.write(piece)
                at += len(piece)
                self.sent += len(piece)
                if self.rate:
                    self._stopping.wait(len(piece) / self.rate)
        except OSError:
            pass
        if at < end:
            request.close_connection = True


def _refuse(request: BaseHTTPRequestHandler, refusal: Refusal) -> None:
    request.send_response(refusal.status)
    for name, value in refusal.headers:
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(refusal.body)))
    request.send_header("Date", formatdate(usegmt=True))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(refusal.body)


class WebOpener:
    """Opens files by their web address, even on this machine."""

    def __init__(self) -> None:
        self._outbound = Outbound(["127.0.0.1"])

    def open(
        self, file: "SourceFile", offset: int = 0, length: int | None = None
    ) -> AbstractAsyncContextManager[SourceBody]:
        return self._outbound.open_range(file.url, offset, length)


@contextmanager
def started(**options: Any) -> Iterator[Source]:
    """Run a source until the end of the block."""
    source = Source(**options)
    source.start()
    try:
        yield source
    finally:
        source.released.set()
        source.stop()
