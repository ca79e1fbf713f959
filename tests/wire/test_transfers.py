"""A worker's file server as a control plane uses it (worker.md §12, §14, checks W27 to W31)."""

import asyncio
import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.wire.conftest import OpenNode
from tests.wire.node import Node
from tests.wire.servers import Answer, ask, request, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTENT = os.urandom(300_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


async def files(node: Node, method: str, key: str, body: bytes = b"", **headers: str) -> Answer:
    return await ask(node.http, method, f"/v1/files/{key}", node.engine_token, body, **headers)


async def part(node: Node, key: str, start: int, end: int, digest: str = DIGEST) -> Answer:
    span = f"bytes {start}-{end - 1}/{len(CONTENT)}"
    return await files(node, "PUT", key, CONTENT[start:end], Content_Range=span, X_Content_SHA256=digest)


@pytest.mark.rule("W27", "worker-12", "worker-12.1")
async def test_no_file_without_the_token_and_none_outside(node: Node) -> None:
    (node.folder / "secret").write_text("not for the network")
    (node.models / "link").symlink_to(node.folder)
    assert (await files(node, "PUT", "models/guarded/f", CONTENT)).status == 200
    for token in ("", "wrong", node.engine_token[:-1]):
        for method in ("GET", "HEAD", "PUT"):
            got = await ask(node.http, method, "/v1/files/models/guarded/f", token)
            assert (got.status, CONTENT[:9] in got.body) == (401, False), (method, token)
    keys = ("../secret", "models/../../secret", "models/%2e%2e/%2e%2e/secret", "models/link/secret")
    for key in (*keys, "models/..%2f..%2fsecret", "models//../../secret", "models/link/new", ""):
        for method in ("GET", "HEAD", "PUT"):
            got = await files(node, method, key, b"own" if method == "PUT" else b"")
            assert got.status in (301, 307, 308, 400, 404), (method, key)
            assert b"not for the network" not in got.body, key
    assert (node.folder / "secret").read_text() == "not for the network"
    assert not (node.folder / "new").exists()


@pytest.mark.rule("W28", "worker-12.2", "worker-12.3", "worker-12.4")
async def test_a_file_goes_there_and_comes_back(node: Node) -> None:
    assert (await files(node, "HEAD", "models/round/trip.bin")).status == 404
    put = await files(node, "PUT", "models/round/trip.bin", CONTENT, X_Content_SHA256=DIGEST)
    assert put.status == 200
    assert (node.models / "round" / "trip.bin").read_bytes() == CONTENT
    head = await files(node, "HEAD", "models/round/trip.bin")
    assert (head.status, head.headers["x-content-sha256"]) == (200, DIGEST)
    assert head.headers["x-file-size"] == str(len(CONTENT))
    assert head.headers["x-local-path"] == str(node.models / "round" / "trip.bin")
    assert (await files(node, "GET", "models/round/trip.bin")).body == CONTENT
    listed = await ask(node.http, "GET", "/v1/files-list/models/round", node.engine_token)
    assert b'"trip.bin"' in listed.body


@pytest.mark.rule("W29", "worker-12.3")
async def test_a_file_in_parts(node: Node) -> None:
    key, half = "models/parts/f.bin", 150_000
    got = await part(node, key, 0, half)
    assert (got.status, got.headers["x-file-size"]) == (308, str(half))
    assert "location" not in got.headers
    head = (await files(node, "HEAD", key)).headers
    assert head["x-target-sha256"] == DIGEST
    assert "x-content-sha256" not in head
    got = await part(node, key, 5, len(CONTENT))
    assert (got.status, got.headers["x-file-size"]) == (416, str(half))
    assert (await part(node, key, half, len(CONTENT))).status == 200
    assert (node.models / "parts" / "f.bin").read_bytes() == CONTENT
    other = "models/parts/g.bin"
    assert (await part(node, other, 0, half)).status == 308
    assert (await part(node, other, half, len(CONTENT), "a" * 64)).status == 409
    assert (await files(node, "HEAD", other)).status == 404
    assert (await part(node, other, 0, len(CONTENT), "a" * 64)).status == 400
    assert (await files(node, "HEAD", other)).status == 404


@pytest.mark.rule("W30", "worker-12.5")
async def test_a_temporary_file_is_fetched_by_its_name(node: Node) -> None:
    made = await files(node, "POST", "temp")
    assert made.status == 200
    path = Path(json.loads(made.body)["local_path"])
    assert await asyncio.to_thread(path.read_bytes) == b""
    await asyncio.to_thread(path.write_bytes, b"what an engine has made")
    assert (await files(node, "GET", path.name)).body == b"what an engine has made"
    assert (await files(node, "POST", "other")).status == 404


@pytest.mark.rule("W31", "worker-14")
async def test_a_model_that_was_staged_is_deleted(node: Node) -> None:
    """With its side files; a name that leads outside is refused, an unknown one is success."""
    for key in ("models/gone/sub/f.bin", "models/lone.gguf", "models/stays/f.bin"):
        assert (await files(node, "PUT", key, CONTENT)).status == 200
    for name in ("gone", "lone.gguf", "never-there"):
        assert (await node.ask("model.delete", {"model_name": name}))["success"], name
    assert not (await node.ask("model.delete", {"model_name": "../staging"}))["success"]
    assert (await files(node, "HEAD", "models/gone/sub/f.bin")).status == 404
    left = {path.name for path in node.models.iterdir()}
    assert "stays" in left
    assert not {name for name in left if name.startswith(("gone", "lone"))}


@pytest.mark.rule("W29", "worker-12.1", "worker-12.3")
async def test_a_killed_worker_goes_on_where_it_was(open_node: OpenNode) -> None:
    """What it had of an upload stays and is called unfinished; the rest completes it."""
    node = await open_node()
    key, half = "models/killed/f.bin", 150_000
    path = node.models / "killed" / "f.bin"
    _, writer = await asyncio.open_connection(*node.http.rsplit(":", 1))
    span = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "X-Content-SHA256": DIGEST}
    length = {"Content-Length": str(len(CONTENT))}
    writer.write(request(node.http, f"/v1/files/{key}", node.engine_token, span | length, "PUT"))
    writer.write(CONTENT[:half])
    await until(lambda: path.exists() and path.stat().st_size == half, "half of it is there")
    await node.kill_and_start()
    writer.close()
    head = (await files(node, "HEAD", key)).headers
    assert (head["x-file-size"], head["x-target-sha256"]) == (str(half), DIGEST)
    assert "x-content-sha256" not in head
    assert (await part(node, key, half, len(CONTENT))).status == 200
    assert (await files(node, "GET", key)).body == CONTENT
