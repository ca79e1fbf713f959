"""The output of a node's engines through a web process: REST and websocket, real and hostile workers."""

import asyncio
import json
import os
import re
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
import websockets
from django.contrib.auth import get_user_model
from websockets.asyncio.client import ClientConnection, connect
from websockets.utils import accept_key

from localai_cluster.accounts import principals
from nodes.backends import worker_logs
from nodes.models import BackendNode
from tests.integration.wiring.test_serve import ADMIN, serving
from tests.support import api, worker_http
from tests.support.environment import REGISTRATION_TOKEN
from tests.support.worker_http import ENGINE_TOKEN, Served, answers, silent, trickling

pytestmark = pytest.mark.django_db(transaction=True)

_CLOSE = b"\x88"


def node_of(served: Served, name: str = "gpu-a", **fields: Any) -> BackendNode:
    """A node whose worker listens there."""
    given = {"address": "127.0.0.1:51100", "http_address": served.address, "engine_token": ENGINE_TOKEN}
    return api.make_node(name, **given | fields)


def logs_of(node: BackendNode, model: str = "") -> str:
    name = f"/{quote(model, safe='')}" if model else ""
    return f"/api/nodes/{node.id}/backend-logs{name}"


@pytest.mark.rule("T-LOG-11", "T-LOG-12", "T-LOG-6", "http-2.13")
def test_the_list_and_the_lines_through_a_web_process() -> None:
    with worker_http.worker() as served:
        at = node_of(served)
        read = api.admin().get
        assert read(logs_of(at)).json() == []
        served.prints("org/model#0", "hello ü", "<b>&")
        served.prints("org/model#1", "again", stream="stderr")
        assert read(logs_of(at)).json() == ["org/model"]
        lines = read(logs_of(at, "org/model"))
        assert lines["Content-Type"] == "application/json"
        shown = [(line["stream"], line["text"]) for line in lines.json()]
        assert shown == [("stdout", "hello ü"), ("stdout", "<b>&"), ("stderr", "again")]
        assert [line["text"] for line in read(logs_of(at, "org/model#1")).json()] == ["again"]
        assert read(logs_of(at, "zz")).json() == []
        assert read(logs_of(at, "m" * 513)).status_code == 400


@pytest.mark.rule("http-2.13")
def test_the_answers_have_the_recorded_shape() -> None:
    """What was recorded with the reference: the list, the lines, and `[]` for an unknown model."""
    nothing, one_model, lines, unknown = api.examples("logs")
    with worker_http.worker() as served:
        at = node_of(served)
        assert api.admin().get(logs_of(at)).json() == nothing["body"]
        served.prints("mock#0", lines["body"][0]["text"])
        assert api.admin().get(logs_of(at)).json() == one_model["body"]
        (told,) = api.admin().get(logs_of(at, "mock")).json()
        (recorded,) = lines["body"]
        assert told.keys() == recorded.keys()
        assert (told["stream"], told["text"]) == (recorded["stream"], recorded["text"])
        assert told["timestamp"].endswith("Z")
        assert api.admin().get(logs_of(at, "zz")).json() == unknown["body"]


@pytest.mark.rule("T-LOG-13", "http-2.13")
def test_nodes_that_cannot_be_asked() -> None:
    """Unknown 404, without an address 502, not approved 409: no stranger names what a web process dials."""
    for path in ("", "/m"):
        for unknown in (uuid4(), "nonsense"):
            assert api.admin().get(f"/api/nodes/{unknown}/backend-logs{path}").status_code == 404
        agent = api.make_node(f"agent{len(path)}", node_type="agent", address="")
        answer = api.admin().get(f"/api/nodes/{agent.id}/backend-logs{path}")
        assert (answer.status_code, api.message(answer)) == (502, "node has no HTTP address")
    with worker_http.worker(answers("200 OK", b"[]")) as served:
        pending = node_of(served, "pending", approved=False)
        answer = api.admin().get(logs_of(pending))
        assert answer.status_code == 409
        assert "not approved" in api.message(answer)
        moved = node_of(served, "moved")
        BackendNode.objects.filter(pk=moved.pk).update(address="10.0.0.9:51100")
        answer = api.admin().get(logs_of(moved))
        assert answer.status_code == 502
        assert "CLUSTER_NODE_HOSTS" in api.message(answer)
        assert served.requests == []


@pytest.mark.rule("http-2.13")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (answers("401 Unauthorized", b"unauthorized"), "refuses our token"),
        (answers("404 Not Found", b""), "has no logs"),
        (answers("500 Internal Server Error", b"secret of the worker"), "answers 500"),
        (answers("302 Found", b"", "Location: http://127.0.0.1:1/"), "answers 302"),
        (answers("200 OK", b"<html>"), "is no log"),
        (answers("200 OK", b'{"a": []}'), "is no log"),
        (answers("200 OK", b"[" * 100_000), "is no log"),
        (answers("200 OK", b'[{"timestamp": 1, "stream": "x", "text": []}]'), "is no log"),
        (answers("200 OK", b'[{"timestamp": "now", "stream": "stdout", "text": ""}]'), "is no log"),
        (answers("200 OK", b"\x1f\x8b\x08", "Content-Encoding: gzip"), "is no log"),
        (answers("200 OK", b" " * (worker_logs.MAX_REPLY_BYTES + 1)), "over 16 MiB"),
        (answers("nonsense", b""), "does not answer at"),
    ],
)
def test_an_answer_that_is_no_log_is_a_502_with_the_reason(script: Any, reason: str) -> None:
    with worker_http.worker(script) as served:
        at = node_of(served)
        for path in (logs_of(at), logs_of(at, "m")):
            answer = api.admin().get(path)
            assert answer.status_code == 502
            assert reason in api.message(answer)
            assert "secret" not in api.message(answer)


@pytest.mark.rule("http-2.13")
def test_a_worker_that_is_away_or_late_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_http.worker() as served:
        gone = served.address
    at = api.make_node("gone", address="127.0.0.1:51100", http_address=gone)
    answer = api.admin().get(logs_of(at))
    assert answer.status_code == 502
    assert f"does not answer at {gone} (connection refused)" in api.message(answer)
    api.mark(at, "silent")
    assert api.message(api.admin().get(logs_of(at))).endswith("The node is offline.")
    assert worker_logs.ANSWER_LIMIT == 15
    monkeypatch.setattr(worker_logs, "ANSWER_LIMIT", 0.3)
    for script in (silent, trickling):
        with worker_http.worker(script) as served:
            answer = api.admin().get(logs_of(node_of(served, script.__name__)))
            assert answer.status_code == 504
            assert "has not answered within 0.3 s" in api.message(answer)


@pytest.mark.rule("http-2.13")
def test_each_worker_is_sent_its_own_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registration token goes to stock workers, which expect it; no proxy of the environment is asked."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:1")
    with worker_http.worker(answers("200 OK", b"[]")) as served:
        ours, stock = node_of(served), node_of(served, "stock", engine_token="")
        BackendNode.objects.filter(pk=stock.pk).update(weak_identity=True, fingerprint="")
        for node, sent in ((ours, ENGINE_TOKEN), (stock, REGISTRATION_TOKEN)):
            assert api.admin().get(logs_of(node)).json() == []
            assert f"Authorization: Bearer {sent}\r\n".encode() in served.requests.pop()


def test_too_many_readers_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs.READERS, "most", 0)
    with worker_http.worker() as served:
        answer = api.admin().get(logs_of(node_of(served)))
    assert (answer.status_code, answer["Retry-After"]) == (503, "5")


def follow(tmp_path: Path, scenario: Callable[[Callable[..., connect]], Coroutine[Any, Any, None]]) -> None:
    """Plays a scenario against a real web process; it opens sockets by node and model."""
    with serving(tmp_path) as (_, url):

        def tail(node: Any, model: str = "m", headers: Any = ADMIN, **more: Any) -> connect:
            path = f"/ws/nodes/{node}/backend-logs/{quote(model, safe='')}"
            address = url.replace("http", "ws", 1) + path
            return connect(address, additional_headers=headers, proxy=None, close_timeout=0.5, **more)

        asyncio.run(scenario(tail))
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


async def texts_of(link: ClientConnection, count: int) -> list[str]:
    """The texts of the next lines."""
    frames = [json.loads(await asyncio.wait_for(link.recv(), 60)) for _ in range(count)]
    assert {frame["type"] for frame in frames} == {"line"}
    return [frame["line"]["text"] for frame in frames]


async def ended(link: ClientConnection) -> tuple[int, str]:
    """Code and reason of the close."""
    await asyncio.wait_for(link.wait_closed(), 60)
    assert link.close_code is not None
    return link.close_code, str(link.close_reason)


@pytest.mark.rule("T-LOG-14", "T-LOG-15", "T-LOG-9", "http-2.13")
def test_the_socket_is_proxied_end_to_end(tmp_path: Path) -> None:
    """First the lines there are, then what comes; what the client says is ignored."""
    with worker_http.worker() as served:
        node = node_of(served)
        served.prints("org/m#0", "old")
        served.prints("other#0", "of another model")

        async def scenario(tail: Callable[..., connect]) -> None:
            async with tail(node.id, "org/m#0") as link:
                initial = json.loads(await link.recv())
                assert initial["type"] == "initial"
                assert [line["text"] for line in initial["lines"]] == ["old"]
                await link.send("ignored")
                await asyncio.to_thread(served.prints, "org/m#0", *map(str, range(50)))
                assert await texts_of(link, 50) == [str(number) for number in range(50)]
                async with tail(node.id, "org/m") as leaves:
                    await leaves.recv()
                    leaves.transport.abort()
                await asyncio.to_thread(served.prints, "org/m#0", "still there")
                assert await texts_of(link, 1) == ["still there"]
            for unknown in (uuid4(), "nonsense"):
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await tail(unknown)
                assert refused.value.response.status_code == 404
                assert json.loads(refused.value.response.body)["error"]["message"] == "node not found"

        follow(tmp_path, scenario)


@pytest.mark.rule("T-LOG-14", "http-2.13")
def test_a_socket_that_fails_says_why_by_its_close(tmp_path: Path) -> None:
    """1011 and a short reason: the worker is away, refuses, sends what is no log, or ends."""
    with worker_http.worker() as served, socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"127.0.0.1:{taken.getsockname()[1]}"
        taken.close()
        away = api.make_node("away", address="127.0.0.1:51100", http_address=gone)
        wrong = node_of(served, "wrong", engine_token="8" * 64)
        agent = api.make_node("agent", node_type="agent", address="")
        pending = node_of(served, "pending", approved=False)

        async def scenario(tail: Callable[..., connect]) -> None:
            for node, reason in (
                (away, "connection refused"),
                (wrong, "refuses our token"),
                (agent, "node has no HTTP address"),
                (pending, "not approved"),
            ):
                async with tail(node.id) as link:
                    code, said = await ended(link)
                    assert code == 1011, said
                    assert reason in said

        follow(tmp_path, scenario)
    (tmp_path / "frames").mkdir()
    with (
        worker_http.worker(answers("302 Found", b"", "Location: http://127.0.0.1:1/")) as elsewhere,
        worker_http.worker(frames(b"\x81\x05hello")) as text,
        worker_http.worker(frames(b"\x82\x02{}")) as binary,
        worker_http.worker(frames(_CLOSE + b"\x02\x03\xe8")) as ends,
    ):
        nodes = [
            (node_of(elsewhere, "elsewhere"), "answers 302"),
            (node_of(text, "text"), "is no log"),
            (node_of(binary, "binary"), "is no log"),
            (node_of(ends, "ends"), "has ended the stream"),
        ]

        async def hostile(tail: Callable[..., connect]) -> None:
            for node, reason in nodes:
                async with tail(node.id) as link:
                    code, said = await ended(link)
                    assert (code, reason in said) == (1011, True), said

        follow(tmp_path / "frames", hostile)


def frames(data: bytes) -> worker_http.Script:
    """A handshake as it should be, then these bytes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        found = re.search(rb"(?i)sec-websocket-key: (\S+)", head)
        assert found
        accept = accept_key(found[1].decode())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            + f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
            + data
        )
        await writer.drain()
        if not data.startswith(_CLOSE):
            await reader.read()

    return script


@pytest.mark.rule("http-2.13")
def test_only_admins_follow_and_only_from_our_own_pages(tmp_path: Path) -> None:
    user = get_user_model().objects.create_user("ann", password="x")
    _, plain = principals.create_api_key(user, "k")
    with worker_http.worker() as served:
        node = node_of(served)

        async def scenario(tail: Callable[..., connect]) -> None:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Bearer {REGISTRATION_TOKEN}"},
                {"Authorization": f"Bearer {ENGINE_TOKEN}"},
                {"x-api-key": plain},
                {**ADMIN, "Origin": "http://evil.example"},
            ):
                for target in (node.id, uuid4()):
                    with pytest.raises(websockets.InvalidStatus) as refused:
                        await tail(target, headers=headers)
                    assert refused.value.response.status_code == 403, headers

        follow(tmp_path, scenario)
        for caller, status in (
            (api.bearer("wrong"), 401),
            (api.bearer(REGISTRATION_TOKEN), 401),
            (api.Caller(**{"x-api-key": plain}), 403),
        ):
            for path in (logs_of(node), logs_of(node, "m")):
                assert caller.get(path).status_code == status


@pytest.mark.rule("worker-12.7")
def test_a_browser_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    """Lines go round it: the worker drops what it has no place for and says how many."""
    with worker_http.worker() as served:
        node = node_of(served)

        async def scenario(tail: Callable[..., connect]) -> None:
            async with tail(node.id, max_queue=1) as slow, tail(node.id) as quick:
                await slow.recv()
                await quick.recv()
                for number in range(60):
                    await asyncio.to_thread(
                        served.prints, "m#0", *(f"{number}.{part} " + "x" * 8000 for part in range(100))
                    )
                    assert (await texts_of(quick, 100))[-1].startswith(f"{number}.99 ")
                await asyncio.to_thread(served.prints, "m#0", "the end")
                found = [""]
                missing = False
                while found[-1] != "the end":
                    found += await texts_of(slow, 1)
                    missing = missing or "lines are missing here" in found[-1]
                assert missing
                assert len(found) < 6000

        follow(tmp_path, scenario)
