"""A real registry (github.com/distribution/distribution), and what it answers.

`WIRE_REGISTRY` names the program; otherwise it is Debian's `docker-registry`, or `go install` builds it once.
`python -m tests.wire.real_registry` prints its replies, which `tests/data/registry/replies.json` keeps.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.wire.registry import INDEX, LAYER, MANIFEST, digest_of, entry, layer

MODULE = "github.com/distribution/distribution/v3/cmd/registry@v3.1.2"
BUILT = Path(__file__).parents[2] / "build" / "registry"
REPLIES = Path(__file__).parents[1] / "data" / "registry" / "replies.json"
PUSH = Path(__file__).parents[2] / "examples" / "gallery" / "image.py"


def push(folder: Path, image: str, *options: str) -> str:
    """Pushes a folder with the example; the digest of the image."""
    command = [sys.executable, str(PUSH), str(folder), f"http://{image}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def program() -> str:
    """The path of the registry; skips the test, with the reason, where there is none."""
    named = os.environ.get("WIRE_REGISTRY") or shutil.which("docker-registry")
    if named or (BUILT / "registry").exists():
        return named or str(BUILT / "registry")
    if not (go := shutil.which("go")):
        pytest.skip("no registry: neither WIRE_REGISTRY, nor Debian's docker-registry, nor Go to build one")
    build = subprocess.run(
        [go, "install", MODULE], env={**os.environ, "GOBIN": str(BUILT)}, capture_output=True, text=True
    )
    if build.returncode:
        pytest.skip(f"no registry: go install: {build.stderr.strip()[-200:]}")
    return str(BUILT / "registry")


def configured(folder: Path, address: str, auth: str = "") -> list[str]:
    """Writes a configuration; the command that starts the registry with it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nhttp: {{addr: '{address}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n{auth}"
    )
    return [program(), "serve", str(config)]


@contextlib.contextmanager
def running(folder: Path, auth: str = "") -> Iterator[str]:
    """A registry on this machine; its host and port."""
    address = f"127.0.0.1:{free_port()}"
    command = configured(folder, address, auth)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OTEL_TRACES_EXPORTER": "none"}
        )
    try:
        deadline = time.monotonic() + 60
        while not answers(address):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    """Whether something speaks HTTP there."""
    try:
        urllib.request.urlopen(f"http://{address}/v2/", timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def observed(address: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server before a registry that notes each request for a blob: its digest and its range."""
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if "/blobs/" in self.path:
                seen.append((self.path.rpartition("/")[2], self.headers.get("Range", "")))
            upstream = http.client.HTTPConnection(address)
            upstream.request("GET", self.path, headers=dict(self.headers))
            with contextlib.closing(upstream), upstream.getresponse() as reply:
                self.send_response_only(reply.status)
                for name, value in reply.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    shutil.copyfileobj(reply, self.wfile, 256 * 1024)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


_KEPT = (
    *("Accept-Ranges", "Content-Length", "Content-Range", "Content-Type", "Docker-Content-Digest"),
    *("Docker-Distribution-Api-Version", "Location", "WWW-Authenticate"),
)
"""What clients read. A date, or a header of one version of a server, is no part of the protocol."""
_ACCEPT = {"Accept": f"{INDEX}, {MANIFEST}"}
NONE: Mapping[str, str] = {}
_NAME = "/v2/a/recorded"
_TOKENS = "{{token: {{realm: 'http://HOST/token', service: test, issuer: test, jwks: {folder}/keys.json}}}}"
_PASSWORDS = "{{htpasswd: {{realm: test, path: {folder}/passwords}}}}"


class Recorder:
    """Sends requests to a registry and keeps its replies by a name, without what differs each time."""

    def __init__(self, address: str) -> None:
        self.replies: dict[str, dict[str, Any]] = {}
        self._address = address

    def ask(
        self, name: str, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] = NONE
    ) -> str:
        """Sends one request; the path that the reply names as its location."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, target, body or None, dict(headers))
            reply = connection.getresponse()
            data = reply.read()
        kept = {key: self._steady(reply.headers[key]) for key in _KEPT if key in reply.headers}
        if reply.status >= 400:
            kept.pop("Content-Length", None)  # that of a text
        is_json = "json" in kept.get("Content-Type", "")
        self.replies[name] = {
            "request": " ".join([method, self._steady(target), headers.get("Range", "")]).strip(),
            "status": reply.status,
            "headers": kept,
            "body": _without_texts(json.loads(data))
            if is_json
            else len(data)
            if reply.status < 400
            else None,
        }
        location = reply.headers.get("Location", "")
        return location.partition(self._address)[2] or location

    def _steady(self, text: str) -> str:
        return re.sub(r"uploads/[^&]+", "uploads/ID", text.replace(self._address, "HOST"))


def _without_texts(body: Any) -> Any:
    """The body; of errors only the codes, as their texts are for people."""
    return (
        [error["code"] for error in body["errors"]] if isinstance(body, dict) and "errors" in body else body
    )


def exchange(address: str) -> dict[str, dict[str, Any]]:
    """Pushes an image and reads it, with mistakes in between; the replies."""
    record = Recorder(address)
    content, other = layer(entry("run.sh", b"#!/bin/sh\n")), digest_of(b"other")
    digest, size = digest_of(content), len(content)
    record.ask("ping", "GET", "/v2/")
    location = record.ask("start of an upload", "POST", f"{_NAME}/blobs/uploads/")
    record.ask("upload with another digest", "PUT", f"{location}&digest={other}", content)
    location = record.ask("start again", "POST", f"{_NAME}/blobs/uploads/")
    record.ask("upload", "PUT", f"{location}&digest={digest}", content)
    described = {"mediaType": LAYER, "digest": digest, "size": size}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": [described]}
    body = json.dumps(manifest).encode()
    by_digest = f"{_NAME}/manifests/{digest_of(body)}"
    record.ask("manifest put", "PUT", by_digest, body, {"Content-Type": MANIFEST})
    platform = {"os": "linux", "architecture": "amd64"}
    build = {"mediaType": MANIFEST, "digest": digest_of(body), "size": len(body), "platform": platform}
    body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [build]}).encode()
    record.ask("list put", "PUT", f"{_NAME}/manifests/v1", body, {"Content-Type": INDEX})
    record.ask("list", "GET", f"{_NAME}/manifests/v1", headers=_ACCEPT)
    record.ask("manifest", "GET", by_digest, headers=_ACCEPT)
    record.ask("unknown tag", "GET", f"{_NAME}/manifests/v2", headers=_ACCEPT)
    record.ask("blob", "GET", f"{_NAME}/blobs/{digest}")
    record.ask("rest of a blob", "GET", f"{_NAME}/blobs/{digest}", headers={"Range": f"bytes={size - 100}-"})
    record.ask("behind a blob", "GET", f"{_NAME}/blobs/{digest}", headers={"Range": f"bytes={size}-"})
    record.ask("unknown blob", "GET", f"{_NAME}/blobs/{other}")
    return record.replies


def challenge(address: str, name: str) -> dict[str, dict[str, Any]]:
    """The reply to a request without a credential."""
    record = Recorder(address)
    record.ask(name, "GET", f"{_NAME}/manifests/v1", headers=_ACCEPT)
    return record.replies


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """The replies of the real registry: open, with passwords, and with tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "keys.json").write_text('{"keys": [{"kty": "oct", "kid": "x", "k": "eHh4eHh4"}]}')
    (folder / "passwords").write_text("nobody:$2y$05$" + "a" * 53 + "\n")
    with running(folder / "open") as address:
        replies = exchange(address)
    for name, auth in (("password wanted", _PASSWORDS), ("token wanted", _TOKENS)):
        with running(folder / name, "auth: " + auth.format(folder=folder)) as address:
            replies |= challenge(address, name)
    return replies


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(recorded(Path(temporary)), indent=1))
