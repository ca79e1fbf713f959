"""`manage.py serve` as a process: it says why it cannot start, and it stops without losing a request or a
count."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from django.db import connection

from localai_cluster.kit import conf
from nodes.models import NodeModel, WebProcess
from operations.models import Operation
from tests.conftest import eventually
from tests.support import backends, forking, hot
from tests.support.environment import API_KEY
from tests.support.ports import free_port

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[3]
ADMIN = {"Authorization": f"Bearer {API_KEY}"}


def environment(port: int, models: Path) -> dict[str, str]:
    url = conf.cluster().database_url.replace("/cluster?", f"/{connection.settings_dict['NAME']}?")
    return {
        **os.environ,
        "DATABASE_URL": url,
        "PORT": str(port),
        "LOCALAI_MODELS_PATH": str(models),
    }


@contextmanager
def serving(models: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A web process on the test database, and its URL."""
    (models / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = forking.Fork(
        (*forking.MANAGE, "serve"), env=environment(port, models), cwd=ROOT, log=models / "log"
    )
    try:
        eventually(
            lambda: WebProcess.objects.filter(pid=process.pid).exists(),
            seconds=60,
            what="the process announces itself",
        )
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    """A start that fails says what to do in one line, without a traceback, and exits with 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port: int = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "manage.py", "serve"],
            cwd=ROOT,
            env=environment(port, tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        f"CommandError: port {port} on 127.0.0.1 is in use; set PORT to a free one"
    ]


def test_a_stop_lets_requests_end_and_gives_counts_back(tmp_path: Path) -> None:
    """SIGTERM: no new connections, the running request is answered, counts and the process's row go, exit
    0."""

    async def scenario(process: "subprocess.Popen[bytes]", url: str) -> httpx.Response:
        slow = backends.running_backend("echo", model="echo", options=("delay_ms:1500",))
        async with slow as engine, httpx.AsyncClient(base_url=url, headers=ADMIN, timeout=120) as client:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            asked = asyncio.create_task(client.post("/v1/embeddings", json={"model": "echo", "input": "a"}))
            await hot.in_thread(
                lambda: eventually(lambda: sum(hot.counts().values()) == 1, what="the request is in flight")
            )
            process.send_signal(signal.SIGTERM)
            await hot.in_thread(lambda: eventually(lambda: refuses(url), what="nothing new is accepted"))
            return await asked

    with serving(tmp_path) as (process, url):
        answered = asyncio.run(scenario(process, url))
        assert answered.status_code == 200
        assert process.wait(timeout=90) == 0
    assert b"Traceback" not in (tmp_path / "log").read_bytes()
    assert set(hot.counts().values()) == {0}
    assert not WebProcess.objects.exists()


def test_a_stop_answers_who_waits_for_a_load(tmp_path: Path) -> None:
    """SIGTERM: a wait that outlasts the drain ends as 503 with Retry-After, not as a cut connection.

    Also if the request's body arrives only after the drain.
    """
    waiting: list[httpx.Response] = []

    def ask(url: str) -> None:
        body = {"model": "echo", "input": "a"}
        waiting.append(httpx.post(f"{url}/v1/embeddings", json=body, headers=ADMIN, timeout=180))

    with serving(tmp_path) as (process, url):
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        eventually(lambda: Operation.objects.exists(), what="the request waits for a load")
        with slow_post(url, b'{"model": "echo", "input": "a"}') as (link, rest):
            process.send_signal(signal.SIGTERM)
            asking.join(180)
            link.sendall(rest)
            late = link.makefile("rb").read()
        assert process.wait(timeout=180) == 0
    assert late.startswith(b"HTTP/1.1 503 "), late
    assert [(answer.status_code, answer.headers["Retry-After"]) for answer in waiting] == [(503, "1")]


def test_a_huge_body_is_refused_without_being_kept(tmp_path: Path) -> None:
    """An oversized body is a 400 that names the limit, no matter its size; the process goes on."""
    with serving(tmp_path) as (_, url), httpx.Client(base_url=url, headers=ADMIN, timeout=360) as client:
        huge = json.dumps({"model": "echo", "input": "x" * 20_000_000}).encode()
        answered = client.post("/v1/embeddings", content=huge)
        assert answered.status_code == 400
        assert answered.json()["error"]["param"] == "input"
        assert [one["id"] for one in client.get("/v1/models/").json()["data"]] == ["echo"]
    assert not NodeModel.objects.exists()


@pytest.mark.parametrize("end", ["", "\r\n\r\n"], ids=["endless", "whole"])
def test_huge_headers_are_refused(tmp_path: Path, end: str) -> None:
    """A head without end, or too large a one, is a 400: it would be memory that anybody may take."""
    with serving(tmp_path) as (_, url), socket.socket() as link:
        host, _, port = url.removeprefix("http://").partition(":")
        link.connect((host, int(port)))
        head = f"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: {'x' * 200_000}{end}"
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            link.sendall(head.encode())
        assert link.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(f"{url}/healthz", timeout=20).status_code == 200


def test_headers_of_usual_size_pass_on_one_connection(tmp_path: Path) -> None:
    """The limit is for one request, not for all of a connection."""
    with serving(tmp_path) as (_, url), httpx.Client(base_url=url, timeout=20) as client:
        answers = [client.get("/healthz", headers={"X-Long": "x" * 40_000}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4


@contextmanager
def slow_post(url: str, body: bytes) -> Iterator[tuple[socket.socket, bytes]]:
    """A request whose route waits for the last byte of its body, and that byte."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
    head += f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as link:
        link.sendall(head.encode() + body[:-1])
        assert link.recv(4096).startswith(b"HTTP/1.1 100 ")
        yield link, body[-1:]


def refuses(url: str) -> bool:
    """Whether a new connection is no longer accepted."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
