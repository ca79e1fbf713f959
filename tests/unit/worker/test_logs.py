"""An engine's output on the worker: what is kept of it, and who may read it how, over real sockets."""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import websockets
from websockets.asyncio.client import connect

from localai_cluster.kit import processes
from localai_cluster.kit.connections import serving
from localai_cluster.metrics import registries
from localai_cluster.worker import http_server
from localai_cluster.worker.config import InvalidSettings, build
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.engines import EngineSupervisor, StartFailed
from localai_cluster.worker.files.keys import Folders
from localai_cluster.worker.files.routes import FileServer
from localai_cluster.worker.http_server import WorkerApplication
from localai_cluster.worker.log_rings import (
    DEFAULT_RING_BYTES,
    DEFAULT_RING_LINES,
    MAX_ENDED_RINGS,
    MAX_LINE_LENGTH,
    LogLine,
    LogRings,
    clean_line,
)
from localai_cluster.worker.ports import PortAllocator
from tests.conftest import until
from tests.support.worker_http import fetches

TOKEN, SCRAPER = "5" * 64, "a-token-for-scrapers"
BEGIN = datetime(2026, 11, 21, 0, 12, 20, 31436, UTC)


def line(text: str, second: float = 0, stream: str = "stdout") -> LogLine:
    return LogLine(BEGIN + timedelta(seconds=second), stream, text)


def texts(lines: list[LogLine]) -> list[str]:
    return [one.text for one in lines]


@pytest.mark.rule("worker-11")
def test_a_ring_holds_the_last_lines_and_replicas_are_merged_by_time() -> None:
    rings = LogRings()
    for number in range(DEFAULT_RING_LINES + 5):
        rings.append("m#0", line(str(number), 10))
    rings.append("m#1", line("between", 5, "stderr"))
    rings.append("other#0", line("x"))
    assert len(rings.lines("m#0")) == DEFAULT_RING_LINES
    assert rings.lines("m#0")[0].text == "5"
    assert texts(rings.lines("m"))[:2] == ["between", "5"]
    assert texts(rings.lines("m#1")) == ["between"]
    assert rings.lines("nobody") == rings.lines("m#2") == []
    assert rings.models() == ["m", "other"]


@pytest.mark.rule("worker-11")
def test_a_ring_is_bounded_in_bytes_too() -> None:
    rings = LogRings(lines=100, size=1000)
    for number in range(50):
        rings.append("m#0", line(f"{number:02}" + "ü" * 49))
    assert texts(rings.lines("m#0")) == [f"{number:02}" + "ü" * 49 for number in range(40, 50)]
    rings.append("m#0", line("x" * 5000))
    assert [len(text) for text in texts(rings.lines("m#0"))] == [5000]


@pytest.mark.rule("worker-11")
def test_the_output_of_engines_that_ended_stays_for_a_while() -> None:
    """The engine that ended first goes first; one that runs, or runs again, keeps its lines."""
    rings = LogRings()
    for number in range(MAX_ENDED_RINGS + 2):
        rings.append(f"m{number}#0", line("last words"))
    rings.append("runs#0", line("first"))
    rings.mark_ended("m0#0")
    rings.append("m0#0", line("started again"))
    for number in range(1, MAX_ENDED_RINGS + 2):
        rings.mark_ended(f"m{number}#0")
    assert rings.lines("m1#0") == []
    assert texts(rings.lines("m2#0")) == ["last words"]
    assert texts(rings.lines("m0#0")) == ["last words", "started again"]
    assert texts(rings.lines("runs")) == ["first"]


@pytest.mark.rule("worker-11")
async def test_a_slow_follower_keeps_nothing_and_learns_what_it_missed() -> None:
    rings = LogRings(lines=10)
    for number in range(12):
        rings.append("m#0", line(str(number)))
    with rings.follow("m") as place:
        # What was gone before it came is not missing.
        assert place.take_unread() == (rings.lines("m#0"), 0)
        assert not place.news.is_set()
        for number in range(12, 37):
            rings.append("m#0", line(str(number)))
        rings.append("other#0", line("x"))
        lines, lost = place.take_unread()
        assert (texts(lines), lost) == ([str(number) for number in range(27, 37)], 15)
        assert place.take_unread() == ([], 0)
        rings.append("m#1", line("a replica that came later"))
        assert texts(place.take_unread()[0]) == ["a replica that came later"]


@pytest.mark.rule("worker-11")
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\r", "plain"),
        (b"10 %\r50 %\r100 %\r", "100 %"),
        (b"bad \xff\xfe bytes", "bad \ufffd\ufffd bytes"),
        (f"token {TOKEN}!".encode(), "token ***!"),
        (b"x" * MAX_LINE_LENGTH, "x" * MAX_LINE_LENGTH),
        (b"x" * (MAX_LINE_LENGTH + 1), "x" * (MAX_LINE_LENGTH - 6) + " [cut]"),
    ],
)
def test_a_line_as_it_is_kept(raw: bytes, text: str) -> None:
    assert clean_line(raw, TOKEN) == text


async def test_an_endless_line_is_one_line_and_tells_no_part_of_the_token(tmp_path: Path) -> None:
    """Whatever the place where it is cut. The lines after it are whole."""
    rings = LogRings()
    start = tmp_path / "run.sh"
    program = f"print('{TOKEN}' * 20000); print('after'); exit(3)"
    start.write_text(f'#!/bin/sh\nexec python3 -c "{program}"\n')
    start.chmod(0o755)
    with processes.ProcessReaper() as reaper:
        supervisor = EngineSupervisor(PortAllocator(44000, 44999), TOKEN, reaper, rings, Exits("h"))
        with pytest.raises(StartFailed):
            await supervisor.start("m#0", "b", start)
        await supervisor.close()
    first, *rest = rings.lines("m#0")
    assert set(first.text) == {"*"}
    assert len(first.text) <= MAX_LINE_LENGTH
    assert [(one.stream, one.text) for one in rest] == [
        ("stdout", "after"),
        ("stderr", "[engine ended: exit 3]"),
    ]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"log_lines": "0"}, "LOCALAI_WORKER_LOG_LINES"),
        ({"log_lines": "10001"}, "LOCALAI_WORKER_LOG_LINES"),
        ({"log_bytes": "1"}, "LOCALAI_WORKER_LOG_BYTES"),
        ({"log_bytes": "2MB"}, "LOCALAI_WORKER_LOG_BYTES"),
    ],
)
def test_wrong_bounds_are_named(given: dict[str, str], name: str) -> None:
    with pytest.raises(InvalidSettings, match=rf"{name} \(--log-.*Use .* from"):
        build({"register_to": "http://c:1", **given}, {})
    config = build({"register_to": "http://c:1", "log_lines": "10000", "log_bytes": "65536"}, {})
    assert (config.log_lines, config.log_bytes) == (10_000, 65_536)
    config = build({"register_to": "http://c:1"}, {})
    assert (config.log_lines, config.log_bytes) == (DEFAULT_RING_LINES, DEFAULT_RING_BYTES)


class Served:
    """A running server, its rings, and why it is not ready."""

    def __init__(self, rings: LogRings, scraper: str = SCRAPER) -> None:
        self.rings = rings
        self.problem = ""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.listener.getsockname())
        files = FileServer(Folders.of_worker(Path("/nowhere/models"), Path("/nowhere"), ()), fetches())
        self.application = WorkerApplication(lambda: self.problem, rings, files, lambda: TOKEN, scraper)

    async def ask(self, method: str, path: str, token: str = TOKEN) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return await client.request(method, f"http://{self.address}{path}", headers=headers)

    def tail(self, name: str, token: str = TOKEN, **more: Any) -> connect:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"ws://{self.address}/v1/backend-logs/{quote(name, safe='')}/ws"
        return connect(
            url, additional_headers=headers | more.pop("headers", {}), proxy=None, close_timeout=0.5, **more
        )


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served(LogRings())
    async with serving(one.listener, one.application):
        yield one


@pytest.mark.rule("worker-12")
async def test_probes_need_no_token(served: Served) -> None:
    for method in ("GET", "HEAD"):
        answer = await served.ask(method, "/healthz", "")
        assert (answer.status_code, answer.text) == (200, "ok" if method == "GET" else "")
        assert (await served.ask(method, "/readyz?x=1", "")).status_code == 200
    served.problem = "the bus is down"
    answer = await served.ask("GET", "/readyz", "")
    assert (answer.status_code, answer.text) == (503, "not ready: the bus is down")
    assert (await served.ask("GET", "/healthz", "")).status_code == 200
    assert (await served.ask("POST", "/healthz", "")).status_code == 405
    for path in ("/", "/v1/files", "/v1/backend-logsx", "/v1/backend-logs/"):
        assert (await served.ask("GET", path)).status_code == 404, path


async def test_figures_are_read_with_the_token_or_the_scraper_s(served: Served) -> None:
    """The scraper's token opens nothing else; an empty one is none."""
    served.rings.append("m#0", line("secret"))
    for token in (TOKEN, SCRAPER):
        answer = await served.ask("GET", "/metrics", token)
        assert (answer.status_code, answer.headers["content-type"]) == (200, registries.CONTENT_TYPE)
        assert 'localai_cluster_build_info{process="worker"' in answer.text
    for token in ("", "wrong", SCRAPER[:-1], "\u00ff"):
        sent = [(b"Authorization", f"Bearer {token}".encode("latin-1"))] if token else []
        async with httpx.AsyncClient() as client:
            refused = await client.get(f"http://{served.address}/metrics", headers=sent)
        assert (refused.status_code, refused.text) == (401, "unauthorized")
    assert (await served.ask("POST", "/metrics", SCRAPER)).status_code == 405
    assert (await served.ask("GET", "/v1/backend-logs", SCRAPER)).status_code == 401
    with pytest.raises(websockets.InvalidStatus):
        await served.tail("m", SCRAPER)


async def test_without_a_scraper_s_token_only_the_control_plane_reads_figures() -> None:
    one = Served(LogRings(), scraper="")
    async with serving(one.listener, one.application):
        for token, status in ((TOKEN, 200), ("", 401), (SCRAPER, 401)):
            assert (await one.ask("GET", "/metrics", token)).status_code == status
        reader, writer = await asyncio.open_connection(*one.address.split(":"))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


@pytest.mark.rule("T-LOG-1", "T-LOG-2", "T-LOG-3", "T-LOG-6", "worker-11", "worker-12")
async def test_the_list_and_the_lines(served: Served) -> None:
    """As recorded with the reference, `logs.jsonl`."""
    served.rings.append("org/model:7b#0", line("hello ü"))
    served.rings.append("org/model:7b#1", line("again", 1, "stderr"))
    served.rings.append("glog#0", line("x"))
    answer = await served.ask("GET", "/v1/backend-logs")
    assert (answer.status_code, answer.json()) == (200, ["glog", "org/model:7b"])
    assert answer.headers["content-type"] == "application/json"
    first = {"timestamp": "2026-11-21T00:12:20.031436Z", "stream": "stdout", "text": "hello ü"}
    second = {"timestamp": "2026-11-21T00:12:21.031436Z", "stream": "stderr", "text": "again"}
    for name, expected in (
        ("org/model:7b", [first, second]),
        ("org/model:7b#0", [first]),
        ("org/model:7b#2", []),
        ("zz", []),
        ("\x00\x7f", []),
    ):
        answer = await served.ask("GET", f"/v1/backend-logs/{quote(name, safe='')}")
        assert (answer.status_code, answer.json()) == (200, expected), name
    assert (await served.ask("GET", "/v1/backend-logs/%ff%fe")).json() == []
    assert (await served.ask("POST", "/v1/backend-logs")).status_code == 405


@pytest.mark.rule("T-LOG-4", "T-LOG-5", "T-LOG-8", "worker-12", "worker-12.7")
async def test_nobody_reads_without_the_token(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """401 in plain text for REST, before the upgrade for the websocket; compared in constant time."""
    compared: list[tuple[bytes, bytes]] = []
    honest = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return honest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    served.rings.append("m#0", line("secret"))
    wrong = ("wrong", TOKEN[:-1], TOKEN + "5", "\u00ff")
    for token in wrong:
        sent = [(b"Authorization", f"Bearer {token}".encode("latin-1"))]
        for path in ("/v1/backend-logs", "/v1/backend-logs/m"):
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://{served.address}{path}", headers=sent)
            assert (answer.status_code, answer.text) == (401, "unauthorized")
    assert len(compared) == 2 * len(wrong)
    assert (await served.ask("GET", "/v1/backend-logs", "")).status_code == 401
    for token in ("", "wrong"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await served.tail("m", token)
        assert refused.value.response.status_code == 401
    async with httpx.AsyncClient() as client:
        basic = await client.get(f"http://{served.address}/v1/backend-logs", auth=("Bearer", TOKEN))
    assert basic.status_code == 401


@pytest.mark.rule("T-LOG-7", "T-LOG-10", "worker-12.7")
async def test_the_socket_sends_what_there_is_then_what_comes(served: Served) -> None:
    served.rings.append("m#0", line("old"))
    served.rings.append("other#0", line("of another model"))
    async with served.tail("m") as whole, served.tail("m#1") as one:
        assert json.loads(await whole.recv()) == {
            "type": "initial",
            "lines": [{"timestamp": "2026-11-21T00:12:20.031436Z", "stream": "stdout", "text": "old"}],
        }
        assert json.loads(await one.recv()) == {"type": "initial", "lines": []}
        served.rings.append("other#0", line("of another model"))
        served.rings.append("m#0", line("new"))
        served.rings.append("m#1", line("newer", 1))
        for socket_, expected in ((whole, ["new", "newer"]), (one, ["newer"])):
            got = [json.loads(await socket_.recv()) for _ in expected]
            assert [(frame["type"], frame["line"]["text"]) for frame in got] == [
                ("line", text) for text in expected
            ]


@pytest.mark.rule("worker-12.7")
async def test_a_new_token_ends_the_readers_who_came_with_the_former_one(served: Served) -> None:
    """D-LOG-TOKEN: the worker serves another kind of server now."""
    async with served.tail("m") as reader:
        await reader.recv()
        served.application.close_log_sockets()
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await reader.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == http_server.TOKEN_CHANGED_CLOSE_CODE
    async with served.tail("m") as reader:
        assert json.loads(await reader.recv())["type"] == "initial"


@pytest.mark.rule("T-LOG-9", "worker-12.7")
async def test_a_reader_that_leaves_or_talks_does_no_harm(served: Served) -> None:
    """What a reader says is ignored; over 4096 bytes it is cut off."""
    async with served.tail("m") as stays:
        await stays.recv()
        async with served.tail("m") as leaves:
            await leaves.recv()
            leaves.transport.abort()
        async with served.tail("m") as talks:
            await talks.recv()
            await talks.send("x" * 4096)
            served.rings.append("m#0", line("still there"))
            assert "still there" in str(await talks.recv())
            await talks.send("x" * 4097)
            with pytest.raises(websockets.ConnectionClosed):
                await talks.recv()
        assert "still there" in str(await stays.recv())
        await until(lambda: len(served.application._readers) == 1)
    await until(lambda: served.rings._following == {})


@pytest.mark.rule("worker-12.7")
async def test_pages_of_another_host_and_too_many_readers_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_LOG_FOLLOWERS", 1)
    async with served.tail("m", headers={"Origin": f"http://{served.address}"}):
        for origin, status in (("http://evil.example", 403), ("http://[", 403), (None, 503)):
            headers = {} if origin is None else {"Origin": origin}
            with pytest.raises(websockets.InvalidStatus) as refused:
                await served.tail("m", headers=headers)
            assert refused.value.response.status_code == status


@pytest.mark.rule("worker-12.7")
async def test_a_reader_that_does_not_read_is_dropped_and_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "WRITE_TIMEOUT", 0.3)
    served = Served(LogRings(lines=1000, size=64 * 1024))
    async with (
        serving(served.listener, served.application),
        served.tail("m", max_queue=1) as stuck,
        served.tail("m") as reads,
    ):
        await stuck.recv()
        await reads.recv()
        count = 0
        while len(served.application._readers) == 2:
            served.rings.append("m#0", line(f"{count} " + "x" * 8000))
            count += 1
            # This reader keeps pace; the other one has stopped.
            while not json.loads(await reads.recv())["line"]["text"].startswith(f"{count - 1} "):
                pass
        assert count > 8


async def test_a_burst_tells_that_lines_are_missing(served: Served) -> None:
    async with served.tail("m") as reads:
        await reads.recv()
        for number in range(DEFAULT_RING_LINES + 7):
            served.rings.append("m#0", line(str(number)))
        first, second = [json.loads(await reads.recv())["line"] for _ in range(2)]
        assert (first["stream"], first["text"]) == (
            "stderr",
            "[7 lines are missing here: they came faster than they were read]",
        )
        assert second["text"] == "7"


async def test_the_end_of_the_server_ends_its_readers() -> None:
    served = Served(LogRings())
    async with serving(served.listener, served.application):
        reader = await served.tail("m")
        await reader.recv()
    with pytest.raises(websockets.ConnectionClosed) as ended:
        await reader.recv()
    assert ended.value.rcvd is not None
    assert ended.value.rcvd.code == 1012
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(served.address.rpartition(":")[2]))
