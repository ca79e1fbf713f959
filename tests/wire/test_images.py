"""Backends from images in a registry (worker.md §18.5, §18.6)."""

import asyncio
import gzip
import json
import os
import platform
from collections.abc import Callable, Iterator

import pytest

from tests.wire.conftest import OpenNode
from tests.wire.node import Node, alive
from tests.wire.real_registry import REPLIES, challenge, exchange, push
from tests.wire.registry import PASSWORD, USER, Registry, digest_of, entry, layer, layer_of
from tests.wire.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = "linux/" + {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


@pytest.fixture
def registry() -> Iterator[Registry]:
    fake = Registry(with_tokens=True)
    fake.start()
    yield fake
    fake.stop()


async def test_the_registry_answers_as_a_real_one(registry: Registry) -> None:
    """As `tests/wire/real_registry.py` has recorded it; `make sweep` holds the real one to the same."""
    recorded = json.loads(REPLIES.read_text())
    registry.with_tokens, registry.realm = True, f"http://{registry.host}/token"
    replies = await asyncio.to_thread(challenge, registry.host, "token wanted")
    registry.with_tokens, registry.basic = False, True
    replies |= await asyncio.to_thread(challenge, registry.host, "password wanted")
    registry.basic = registry.redirects = False
    replies |= await asyncio.to_thread(exchange, registry.host)
    assert replies == recorded


@pytest.mark.rule("worker-18.6")
@pytest.mark.parametrize("pack", ["gzip", "zstd", "none"])
async def test_what_the_example_pushes_is_installed(node: Node, registry: Registry, pack: str) -> None:
    """`examples/gallery/image.py`: an image laid out as LocalAI's, its libraries in layers of their own."""
    name = f"pushed-{pack}"
    folder = node.source(name)
    (folder / "lib").mkdir()
    for number in range(2):
        (folder / "lib" / f"lib{number}.so").write_bytes(os.urandom(100_000))
    (folder / "lib" / "libengine.so").symlink_to("lib0.so")
    registry.with_tokens = False
    image = f"{registry.host}/backends/{name}:v1"
    digest = await asyncio.to_thread(push, folder, image, "--pack", pack, "--layers", "2")
    reply = await node.install(name, uri=f"oci://{image}", install_only=True)
    assert reply["success"], reply
    assert (await node.listed())[name]["digest"] == digest
    installed = node.backends / name / "lib"
    assert (installed / "libengine.so").read_bytes() == (folder / "lib" / "lib0.so").read_bytes()
    assert len(registry.seen("storage")) == 3
    await node.ask("backend.delete", {"backend": name})


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


@pytest.mark.rule("worker-18.6")
async def test_a_worker_killed_at_any_stage_goes_on_at_its_byte(
    open_node: OpenNode, registry: Registry
) -> None:
    """Before the first layer, within and between layers, and while it unpacks: nothing half-installed.

    The next attempt asks for each layer from the byte after those that lie on the disk.
    """
    node = await open_node()
    folder = node.source("stubborn")
    first = layer(entry("lib/one", os.urandom(2_000_000)))
    second = layer(entry("lib/two", os.urandom(4_000_000)))
    registry.push("a/stubborn", [first, second, layer_of(folder)])

    def sent(data: bytes, count: int) -> Callable[[], bool]:
        return lambda: registry.sent.get(digest_of(data), 0) >= count

    def written() -> list[int]:
        return sorted(size for path in node.backends.glob(".partial-*") if (size := path.stat().st_size))

    def resumed() -> list[int]:
        """The first byte that was asked for, of each layer."""
        firsts = {request.path: request.range for request in reversed(registry.seen("storage"))}
        return sorted(int(text[6:-1]) for text in firsts.values() if text)

    def unpacking() -> bool:
        return bool(list(node.backends.glob("*.install-tmp")) or (node.backends / "stubborn").exists())

    registry.rate = 3_000_000
    stages = [
        lambda: bool(registry.seen("registry")),
        sent(first, 1_200_000),
        sent(second, 1),
        sent(second, 2_500_000),
        unpacking,
    ]
    continued: list[int] = []
    for stage in stages:
        parts = written()
        registry.requests.clear()
        attempt = asyncio.create_task(
            node.install("stubborn", uri=f"oci://{registry.host}/a/stubborn", install_only=True)
        )
        await until(stage, "the worker reaches the stage", 30)
        asked = resumed()
        assert asked == parts[: len(asked)]
        continued += asked
        await node.kill_and_start()
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        listed = await node.listed()
        assert (
            "stubborn" not in listed
            or (node.backends / "stubborn" / "lib" / "two").stat().st_size == 4_000_000
        )
        assert not list(node.backends.glob("*.install-tmp"))
    registry.rate = 0
    parts = [] if "stubborn" in await node.listed() else written()
    registry.requests.clear()
    reply = await node.install("stubborn", uri=f"oci://{registry.host}/a/stubborn", model_id="s")
    assert reply["success"], reply
    assert await node.healthy(reply["address"])
    assert resumed() == parts
    assert max(continued) >= 1_000_000


@pytest.mark.rule("worker-18.6")
async def test_a_password_reaches_the_registry_alone(open_node: OpenNode, registry: Registry) -> None:
    """LOCALAI_REGISTRIES; neither the log nor the list has the password."""
    registry.private = True
    settings = [
        {
            "host": registry.host,
            "username": USER,
            "password": PASSWORD,
            "realm": f"http://{registry.host}/token",
        }
    ]
    node = await open_node(LOCALAI_REGISTRIES=json.dumps(settings))
    registry.push("a/private", [layer_of(node.source("private"))])
    uri = f"oci://{registry.host}/a/private"
    reply = await node.install("private", uri=uri, install_only=True)
    assert reply["success"], reply
    assert {request.authorization for request in registry.seen("storage")} == {""}
    assert PASSWORD not in json.dumps(await node.listed())
    assert PASSWORD not in (node.folder / "worker.log").read_text()
