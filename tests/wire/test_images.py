"""Backends from images in a registry (worker.md §18.5, §18.6)."""

import gzip
import platform
from collections.abc import Iterator

import pytest

from tests.wire.node import Node, alive
from tests.wire.registry import Registry, entry, layer, layer_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = "linux/" + {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


@pytest.fixture
def registry() -> Iterator[Registry]:
    fake = Registry(with_tokens=True)
    fake.start()
    yield fake
    fake.stop()


@pytest.mark.rule("worker-18.5", "worker-18.6")
async def test_an_image_is_installed_and_started(node: Node, registry: Registry) -> None:
    """Laid out as LocalAI's: libraries in one layer, `run.sh` and metadata in the next; for this platform."""
    folder = node.source("pictured")
    (folder / "metadata.json").write_text('{"name": "another"}')
    libraries = layer(entry("lib/libengine.so.1", b"\x7fELF" * 1000), entry("lib/old.so", b"old"))
    engine = layer_of(folder) + b""
    patch = layer(entry("lib/.wh.old.so"), entry("lib/new.so", b"new"))
    digest = registry.push("backends/pictured", [gzip.compress(libraries), engine, patch], HERE)
    registry.push("backends/pictured", [layer(entry("other"))], "windows/amd64")
    uri = f"oci://{registry.host}/backends/pictured:latest"
    reply = await node.ask(
        "backend.install", {"backend": "pictured", "uri": uri, "name": "pictured", "model_id": "p"}
    )
    assert reply["success"], reply
    assert await node.healthy(reply["address"])
    assert len([pid for pid in node.alive("pictured") if alive(pid)]) == 1
    installed = node.backends / "pictured"
    assert sorted(path.name for path in (installed / "lib").iterdir()) == ["libengine.so.1", "new.so"]
    listed = (await node.listed())["pictured"]
    assert (listed["digest"], listed["uri"]) == (digest, uri)
    assert not list(node.backends.glob(".*"))
    assert registry.seen("token")
    assert {request.authorization for request in registry.seen("storage")} == {""}
