"""Object stores: what the library may dial (`docs/security.md`, sources of models)."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from localai_cluster.kit import conf
from localai_cluster.kit.outbound import SourceError
from nodes.sources import objects


class Server(HTTPServer):
    """A server that sends an object, or a redirect to `target`, and records the requested paths."""

    def __init__(self, target: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.paths = target, list[str]()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        body = b"" if self.server.target else b"data"
        self.send_response(302 if self.server.target else 200)
        if self.server.target:
            self.send_header("Location", self.server.target)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(target: str = "") -> Iterator[Server]:
    server = Server(target)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def read(endpoint: str) -> bytes:
    """The object `bucket/key` of the store at this address."""
    store = await objects.store(replace(conf.cluster(), s3_endpoint=endpoint), "bucket")
    body = await objects.read(store, "s3://bucket/key", "key", 0, None)
    return b"".join([piece async for piece in body.pieces])


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
