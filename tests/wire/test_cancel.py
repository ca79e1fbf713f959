"""`backend.cancel`, an extension of ours (contract/README.md): what ends, what answers, what is left."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from tests.wire.conftest import OpenNode
from tests.wire.node import Node, archive
from tests.wire.servers import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = "400000"
"""Bytes a second that all copies of the worker may take together."""
SIZE = 20_000_000
LIMIT = 5.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(open_node: OpenNode) -> Node:
    """A worker whose downloads and copies take minutes."""
    return await open_node(LOCALAI_WORKER_DOWNLOAD_RATE=SLOW)


async def cancelled(node: Node, op_id: str, found: bool = True) -> None:
    """Cancels, and the answer comes in time."""
    begin = time.monotonic()
    assert await node.ask("backend.cancel", {"op_id": op_id}) == {"success": True, "found": found}
    assert time.monotonic() - begin < PATIENCE * LIMIT


def begun(node: Node, name: str) -> Callable[[], Any]:
    """Whether a part of the backend has arrived, wherever it is staged."""

    def look() -> bool:
        staged = node.backends / f"{name}.install-tmp"
        parts = [*staged.glob("*"), *node.backends.glob(".partial-*"), *node.backends.glob(".*partial*")]
        return any(part.is_file() and part.stat().st_size for part in parts)

    return look


def left(node: Node) -> list[str]:
    """What lies in the folder of backends that `backend.list` does not name."""
    return sorted(path.name for path in node.backends.iterdir() if not (path / "run.sh").is_file())


def packed(node: Node, name: str, size: int = SIZE) -> bytes:
    """An archive that does not shrink."""
    return archive(node.source(name, size))


def sources(node: Node) -> dict[str, Callable[[str], dict[str, Any]]]:
    """The ways a backend comes to a worker, each as the fields of a request for it."""

    def listed(name: str, uri: str, **more: str) -> dict[str, Any]:
        return {"backend_galleries": node.gallery(name, {"name": name, "uri": uri, **more})}

    def download(name: str) -> dict[str, Any]:
        return {"uri": node.control_plane.serve(f"{name}.tar.gz", packed(node, name)), "name": name}

    def hashed(name: str) -> dict[str, Any]:
        content = packed(node, name)
        uri = node.control_plane.serve(f"{name}.tar.gz", content)
        return listed(name, uri, sha256=hashlib.sha256(content).hexdigest())

    def folder(name: str) -> dict[str, Any]:
        return {"uri": str(node.source(name, SIZE)), "name": name}

    def local(name: str) -> dict[str, Any]:
        path = node.sources / f"{name}.tar.gz"
        path.write_bytes(packed(node, name))
        return {"uri": str(path), "name": name}

    return {"download": download, "hashed": hashed, "folder": folder, "local": local}


@pytest.mark.rule("nats-4", "worker-8")
@pytest.mark.parametrize("way", ["download", "hashed", "folder", "local"])
@pytest.mark.parametrize("command", ["install", "upgrade"])
async def test_a_cancel_ends_it_and_leaves_nothing(slow: Node, way: str, command: str) -> None:
    """D-CANCEL: downloads with and without a hash, a copied folder, an archive of the machine."""
    name, op_id = f"{way}-{command}", f"op.{way}.{command}"
    request = {"backend": name, "op_id": op_id, **sources(slow)[way](name)}
    if command == "install":
        request["install_only"] = True
    running = asyncio.create_task(slow.ask(f"backend.{command}", request))
    await until(begun(slow, name), "the first bytes have arrived")
    await cancelled(slow, op_id)
    # Its own answer was sent before the one to the cancel.
    reply = await running
    assert reply["success"] is False
    assert reply["error"].startswith("cancelled")
    assert left(slow) == []
    assert name not in await slow.listed()
    await cancelled(slow, op_id, found=False)
    small = slow.source(f"{name}-small")
    again = await slow.ask("backend.install", {"backend": name, "uri": str(small), "name": name})
    assert again["success"], again
    assert f"{name}#0" in await slow.running()


async def test_a_download_whose_server_is_silent_is_cancelled(slow: Node) -> None:
    async with silent_server() as url:
        request = {"backend": "mute", "uri": f"{url}/mute.tar.gz", "op_id": "op.mute", "install_only": True}
        running = asyncio.create_task(slow.ask("backend.install", request))
        await until(begun(slow, "mute"), "the first bytes have arrived")
        await cancelled(slow, "op.mute")
        assert (await running)["error"].startswith("cancelled")
        assert left(slow) == []


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Promises a long file, sends a little of it and then nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 90000000\r\n\r\n" + os.urandom(100_000))
        await writer.drain()
        await reader.read()  # until the worker hangs up
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def test_one_that_waits_for_its_turn_is_cancelled_alone(slow: Node) -> None:
    """The first goes on; the one behind the cancelled one is next."""
    request = {"backend": "queue", "uri": str(slow.source("queue", SIZE)), "install_only": True}
    first, second = (
        asyncio.create_task(slow.ask("backend.install", {**request, "op_id": f"op.q{number}"}))
        for number in range(2)
    )
    await until(begun(slow, "queue"), "the first copies")
    upgrade = {"backend": "any@queue", "uri": str(slow.source("queue2")), "name": "queue", "op_id": "op.q2"}
    third = asyncio.create_task(slow.ask("backend.upgrade", upgrade))
    await slow.ask("backend.list", {})
    await cancelled(slow, "op.q1")
    assert (await second)["error"].startswith("cancelled")
    assert not first.done()
    await cancelled(slow, "op.q0")
    assert (await first)["error"].startswith("cancelled")
    assert (await third)["success"]
    assert left(slow) == []


async def test_an_engine_that_starts_is_ended_with_its_command(node: Node) -> None:
    """Its port is free after the usual quarantine and its key is gone; the files were in place before."""
    source = node.source("starter", gate=str(node.folder / "never"))
    request = {"backend": "starter", "uri": str(source), "model_id": "st", "op_id": "op.st"}
    running = asyncio.create_task(node.ask("backend.install", request))
    await until(lambda: node.notes("starter", "started"), "the engine starts")
    await cancelled(node, "op.st")
    assert (await running) == {"success": False, "error": "cancelled"}
    assert node.alive("starter") == []
    assert "st#0" not in await node.running()
    (node.folder / "never").touch()
    again = await node.install("starter", model_id="st")
    assert again["success"], again
    assert await node.healthy(again["address"])


async def test_a_cancelled_upgrade_keeps_the_old_version_and_reports_what_it_stopped(slow: Node) -> None:
    await slow.load("kept", "kept-model")
    request = {"backend": "kept", "uri": str(slow.source("newer", SIZE)), "name": "kept", "op_id": "op.kept"}
    running = asyncio.create_task(slow.ask("backend.upgrade", request))
    await until(begun(slow, "kept"), "the new version is copied")
    await cancelled(slow, "op.kept")
    reply = await running
    assert (reply["success"], reply["error"]) == (False, "cancelled")
    assert (reply["reports_stopped_processes"], reply["stopped_process_keys"]) == (True, ["kept-model#0"])
    assert left(slow) == []
    again = await slow.install("kept", model_id="kept-model")
    assert again["success"], again


async def test_a_command_sent_twice_is_cancelled_once_for_both(slow: Node) -> None:
    request = {
        "backend": "twice",
        "uri": str(slow.source("twice", SIZE)),
        "op_id": "op.tw",
        "install_only": True,
    }
    both = [asyncio.create_task(slow.ask("backend.install", request)) for _ in range(2)]
    await until(begun(slow, "twice"), "it copies")
    await asyncio.gather(cancelled(slow, "op.tw"), cancelled(slow, "op.tw"))
    assert [reply["error"] for reply in await asyncio.gather(*both)] == ["cancelled"] * 2
    assert left(slow) == []


async def test_what_is_not_there_cannot_be_found(node: Node) -> None:
    """An unknown id, one that has ended, and none at all: installs without an id are no operation's."""
    done = await node.install("ended", node.source("ended"), op_id="op.ended")
    assert done["success"], done
    for op_id in ("op.unknown", "op.ended", ""):
        await cancelled(node, op_id, found=False)
    assert (await node.ask("backend.cancel", b"")) == {"success": True, "found": False}
    refused = await node.ask("backend.cancel", b'{"op_id": 7}')
    assert (refused["success"], refused["found"]) == (False, False)
    assert "op_id" in refused["error"]
