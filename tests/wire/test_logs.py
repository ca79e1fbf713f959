"""An engine's output as a control plane reads it: lists, lines, and the websocket (worker.md §11, §12)."""

import json
from typing import Any

import pytest

from tests.wire.node import Node
from tests.wire.servers import WebSocket, get, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.rule("worker-11", "worker-12", "T-LOG-1", "T-LOG-2", "T-LOG-3", "T-LOG-6")
async def test_the_output_of_an_engine_is_listed_and_read(node: Node) -> None:
    """Of both streams; the output of a replica alone, and of all merged by time."""
    await node.load("printer", "org/talks", lines=["one", "zwei ü"])
    await node.load("printer", "org/talks", 1)

    async def said() -> bool:
        return len(await lines(node, "org%2Ftalks")) == 4

    await until(said, "both engines have printed", 30)
    status, listed = await get(node.http, "/v1/backend-logs", node.engine_token)
    assert (status, "org/talks" in listed) == (200, True)
    assert listed == sorted(listed)
    merged = await lines(node, "org%2Ftalks")
    assert [line["timestamp"] for line in merged] == sorted(line["timestamp"] for line in merged)
    assert {line["stream"] for line in merged} == {"stdout", "stderr"}
    one = await lines(node, "org%2Ftalks%230")
    assert sorted((line["stream"], line["text"]) for line in one) == [("stderr", "zwei ü"), ("stdout", "one")]
    assert await lines(node, "unheard-of") == await lines(node, "org%2Ftalks%237") == []


@pytest.mark.rule("worker-12", "T-LOG-4", "T-LOG-5", "T-LOG-8")
async def test_nobody_reads_it_without_the_token(node: Node) -> None:
    for token in ("", "wrong", node.engine_token[:-1]):
        for path in ("/v1/backend-logs", "/v1/backend-logs/m"):
            assert (await get(node.http, path, token))[0] == 401
        async with WebSocket(node.http, "/v1/backend-logs/m/ws", token) as socket:
            assert socket.status == 401
    async with WebSocket(
        node.http, "/v1/backend-logs/m/ws", node.engine_token, Origin="http://evil.example"
    ) as socket:
        assert socket.status == 403


@pytest.mark.rule("worker-11", "worker-12.7", "T-LOG-7", "T-LOG-9", "T-LOG-10")
async def test_the_websocket_follows_a_model_through_a_restart(node: Node) -> None:
    """First what there is, then what comes; the lines of an engine that has ended stay."""
    await node.load("follower", "followed", lines=["first out", "first err"])
    await node.load("follower", "another", lines=["of another model"])

    async def said() -> bool:
        return len(await lines(node, "followed")) == 2

    await until(said, "the engine has printed", 30)
    async with (
        WebSocket(node.http, "/v1/backend-logs/followed/ws", node.engine_token) as leaves,
        WebSocket(node.http, "/v1/backend-logs/followed/ws", node.engine_token) as socket,
    ):
        assert (leaves.status, socket.status) == (101, 101)
        assert (await leaves.message())["type"] == "initial"
        leaves.leave()
        initial = await socket.message()
        assert initial["type"] == "initial"
        assert {line["text"] for line in initial["lines"]} == {"first out", "first err"}
        await node.publish_stop({"backend": "followed#0"})
        await until(lambda: len(node.alive("follower")) == 1, "the engine has ended", 60)
        await node.load("follower", "followed")
        found: list[Any] = []
        while sum("first" in text for text in found) < 2:
            message = await socket.message()
            assert message["type"] == "line"
            found.append(message["line"]["text"])
        assert "of another model" not in found
    assert len(await lines(node, "followed")) >= 4


async def lines(node: Node, name: str) -> list[dict[str, Any]]:
    """The lines of a model, each with the recorded keys."""
    status, found = await get(node.http, f"/v1/backend-logs/{name}", node.engine_token)
    assert status == 200
    assert all(set(line) == {"timestamp", "stream", "text"} for line in found), json.dumps(found)
    return list(found)
