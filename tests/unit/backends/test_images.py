"""Digests of images, asked of a small registry over real HTTP."""

import base64
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest

from localai_cluster.registries import client
from nodes.backends import upgrade_check

INDEX = orjson.dumps({"manifests": [{"digest": f"sha256:{'1' * 64}"}, {"digest": "no digest"}]})
READER = base64.b64encode(b"reader:hidden-word").decode()
PLAIN = orjson.dumps({"config": {}})


def digest(body: bytes) -> str:
    return f"sha256:{sha256(body).hexdigest()}"


class Registry(BaseHTTPRequestHandler):
    """Tags by name: `index`, `plain` and, with a token only, `locked`; the rest is odd in its own way."""

    gate = threading.Event()

    def do_GET(self) -> None:
        host = f"http://{self.headers['Host']}"
        path, _, _ = self.path.partition("?")
        if path == "/token":
            return self._send(200, orjson.dumps({"token": f"for {self.path.partition('scope=')[2]}"}))
        tag = path.rpartition("/")[2]
        if tag == "locked" and "Authorization" not in self.headers:
            realm = f'Bearer realm="{host}/token",service="test",scope="repository:a/b:pull"'
            return self._send(401, b"", **{"WWW-Authenticate": realm})
        if tag == "private" and self.headers["Authorization"] != f"Basic {READER}":
            return self._send(401, b"", **{"WWW-Authenticate": 'Basic realm="test"'})
        if tag == "elsewhere":
            return self._send(401, b"", **{"WWW-Authenticate": 'Bearer realm="http://other.test/token"'})
        if tag == "silent":
            self.gate.wait(30)
        bodies = {
            "index": INDEX,
            "plain": PLAIN,
            "locked": PLAIN,
            "private": PLAIN,
            "long": b"x" * (client.MAX_MANIFEST_BYTES + 1),
        }
        return self._send(200 if tag in bodies else 404, bodies.get(tag, b"{}"))

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    Registry.gate.clear()
    yield f"127.0.0.1:{server.server_address[1]}/a/b"
    Registry.gate.set()
    server.shutdown()
    server.server_close()


@pytest.mark.rule("R6.34")
async def test_the_digest_of_a_tag_and_of_its_builds(registry: str) -> None:
    """With `oci://` before it or not; a registry that wants a token gets the one that it names."""
    asked = [f"{registry}:index", f"oci://{registry}:plain", f"{registry}:locked"]
    assert await upgrade_check.image_digests(asked) == {
        f"{registry}:index": (digest(INDEX), f"sha256:{'1' * 64}"),
        f"oci://{registry}:plain": (digest(PLAIN),),
        f"{registry}:locked": (digest(PLAIN),),
    }


async def test_the_credential_that_docker_login_has_written(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker finds it, without a setting."""
    auths = {registry.partition("/")[0]: {"auth": READER}}
    (tmp_path / "config.json").write_bytes(orjson.dumps({"auths": auths}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    assert await upgrade_check.image_digests([f"{registry}:private"]) == {}
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert list(await upgrade_check.image_digests([f"{registry}:private"])) == [f"{registry}:private"]


@pytest.mark.rule("R6.34")
async def test_what_cannot_be_found_out_is_left_out(registry: str) -> None:
    """Unknown tags, an answer without an end, a token from a place of its choice, no registry, no image."""
    odd = [
        f"{registry}:unknown",
        f"{registry}:long",
        f"{registry}:elsewhere",
        "127.0.0.1:1/a:b",
        "no image",
        "",
    ]
    assert await upgrade_check.image_digests([*odd, f"{registry}:plain"]) == {
        f"{registry}:plain": (digest(PLAIN),)
    }


async def test_a_silent_registry_costs_its_own_time_only(
    registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade_check, "IMAGE_LIMIT", 0.5)
    monkeypatch.setattr(upgrade_check, "CHECK_LIMIT", 0.0)
    monkeypatch.setattr(upgrade_check, "ALL_IMAGES_LIMIT", 600)
    found = await upgrade_check.image_digests([f"{registry}:silent", f"{registry}:plain"])
    assert list(found) == [f"{registry}:plain"]


async def test_the_number_of_looks_is_bounded(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade_check, "MOST", 1)
    assert list(await upgrade_check.image_digests([f"{registry}:index", f"{registry}:plain"])) == [
        f"{registry}:index"
    ]
