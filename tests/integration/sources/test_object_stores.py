"""Object stores: what the library may dial (`docs/security.md`, sources of models), and ranges of objects."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from localai_cluster.kit import conf
from localai_cluster.kit.outbound import SourceBody, SourceError, read_pieces
from nodes.sources import objects
from nodes.sources.opening import SourceFileOpener
from nodes.sources.plans import SourceFile


class Server(HTTPServer):
    """A server that sends `content`, or a redirect to `target`, and records the requested paths.

    With `has_ranges` it sends requested ranges as S3 does: an empty object has none.
    """

    def __init__(self, target: str = "", content: bytes = b"data", *, has_ranges: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.content, self.has_ranges, self.paths = target, content, has_ranges, list[str]()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        body, status = (b"", 302) if self.server.target else (self.server.content, 200)
        requested, size = self.headers.get("Range", ""), len(body)
        if requested and self.server.has_ranges:
            first, _, last = requested.removeprefix("bytes=").partition("-")
            end = min(int(last or size), size - 1)
            body, status = body[int(first) : end + 1], 206 if int(first) < size else 416
        self.send_response(status)
        if self.server.target:
            self.send_header("Location", self.server.target)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{end}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(target: str = "", content: bytes = b"data", *, has_ranges: bool = False) -> Iterator[Server]:
    server = Server(target, content, has_ranges=has_ranges)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def open_object(endpoint: str, offset: int, length: int | None) -> tuple[bytes, SourceBody]:
    """The object `bucket/key` of the store at this address, from byte `offset` on."""
    store = await objects.store(replace(conf.cluster(), s3_endpoint=endpoint), "bucket")
    body = await objects.read(store, "s3://bucket/key", "key", offset, length)
    return b"".join([piece async for piece in body.pieces]), body


async def read(endpoint: str) -> bytes:
    return (await open_object(endpoint, 0, None))[0]


@pytest.mark.parametrize(
    ("content", "has_ranges", "offset", "sent"),
    [
        (b"data", True, 1, (b"at", 1, 4, True)),
        (b"data", False, 1, (b"data", 0, 4, False)),
        (b"data", True, 4, (b"data", 0, 4, False)),
        (b"", True, 0, (b"", 0, 0, False)),
        (b"", False, 0, (b"", 0, 0, False)),
    ],
)
def test_an_object_without_the_range_is_sent_whole(
    content: bytes, has_ranges: bool, offset: int, sent: tuple[bytes, int, int, bool]
) -> None:
    """An empty object, or a store that ignores ranges: the import failed after all its retries."""
    with serving(content=content, has_ranges=has_ranges) as store:
        got, body = asyncio.run(open_object(f"http://127.0.0.1:{store.server_port}", offset, 2))
    assert (got, body.offset, body.total, body.has_ranges) == sent


@pytest.mark.parametrize("offset", [0, 1])
def test_a_store_that_fails_is_asked_once(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole object in place of a range would throw away what has been downloaded."""
    with serving() as store:

        def fail(handler: Handler) -> None:
            store.paths.append(handler.path)
            handler.send_error(503)

        monkeypatch.setattr(Handler, "do_GET", fail)
        with pytest.raises(SourceError) as failed:
            asyncio.run(open_object(f"http://127.0.0.1:{store.server_port}", offset, 2))
    assert (failed.value.permanent, store.paths) == (False, ["/bucket/key"])


def test_a_store_that_stalls_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as a fault of the models folder, and ended the import."""
    released = threading.Event()

    def stall(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "4")
        handler.send_header("ETag", '"1"')
        handler.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        handler.end_headers()
        released.wait(60)

    async def read_slowly(endpoint: str) -> None:
        opener = SourceFileOpener(replace(conf.cluster(), s3_endpoint=endpoint))
        async with opener.open(SourceFile("a", "s3://bucket/key")) as body:
            async for _ in read_pieces(body.pieces, 1, 0.01):
                pass

    monkeypatch.setattr(Handler, "do_GET", stall)
    with serving() as store:
        try:
            with pytest.raises(SourceError) as failed:
                asyncio.run(read_slowly(f"http://127.0.0.1:{store.server_port}"))
        finally:
            released.set()
    assert not failed.value.permanent


def test_no_redirect_leads_to_another_host() -> None:
    """A store could have the server read what only the server reaches."""
    with serving() as inner, serving(f"http://127.0.0.1:{inner.server_port}/inner") as outer:
        with pytest.raises(SourceError):
            asyncio.run(read(f"http://localhost:{outer.server_port}"))
        assert (outer.paths, inner.paths) == (["/bucket/key"], [])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_proxies_of_the_environment_are_not_used(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy, serving() as store:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert asyncio.run(read(f"http://{host}:{store.server_port}")) == b"data"
        assert (proxy.paths, store.paths) == ([], ["/bucket/key"])
