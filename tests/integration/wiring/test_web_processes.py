"""`manage.py serve --processes N`: one address, one parent, and what must not depend on who answers."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from localai_cluster.embedded.nats import BusKeys, EmbeddedNats
from localai_cluster.kit import processes
from localai_cluster.management import web_processes
from localai_cluster.rpc.messages import PredictOptions
from nodes.gateway.prefix_table import prompt_chain
from nodes.models import ReplicaUse, WebProcess
from tests.conftest import eventually, until
from tests.integration.wiring.test_serve import ADMIN, ROOT, environment
from tests.support import hot
from tests.support.ports import free_port
from tests.support.scripted import Scripted, Step, running, words

CHAT = "/v1/chat/completions"


@dataclass
class Gated(Scripted):
    """An engine whose answer to "wait" comes when the gate opens."""

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()

    def script_for(self, request: PredictOptions) -> Sequence[Step]:
        """What this call plays."""
        waits = request.Messages[-1].content.startswith("wait")
        return [self.gate, *words("Yes.")] if waits else words("Yes.")

    @property
    def received(self) -> list[str]:
        """The last message of each request."""
        return sorted(request.Messages[-1].content for request in self.asked)


@dataclass
class Served:
    """The parent, and requests that choose the web process which accepts them."""

    parent: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def pids(self) -> list[int]:
        """The registered web processes that run, oldest first."""
        pids = WebProcess.objects.order_by("started_at").values_list("pid", flat=True)
        return [pid for pid in pids if processes.ProcessIdentity.of(pid)]

    @asynccontextmanager
    async def only(self, pid: int) -> AsyncIterator[None]:
        """The others stand still, so that this one accepts."""
        others = [other for other in await hot.in_thread(self.pids) if other != pid]
        for other in others:
            os.kill(other, signal.SIGSTOP)
        try:
            yield
        finally:
            for other in others:
                os.kill(other, signal.SIGCONT)

    async def chat(self, text: str, system: str = "") -> int:
        """The status of a chat on a connection of its own."""
        messages = [{"role": "system", "content": system}] if system else []
        body = {"model": "m", "messages": [*messages, {"role": "user", "content": text}]}
        async with httpx.AsyncClient(base_url=self.url, headers=ADMIN, timeout=120) as client:
            return (await client.post(CHAT, json=body)).status_code

    async def chat_at(self, pid: int, text: str, system: str = "") -> int:
        """The status of a chat that this process answers."""
        async with self.only(pid):
            return await self.chat(text, system)

    async def begin_at(self, pid: int, text: str) -> "asyncio.Task[int]":
        """Begin a chat at this process; return when it runs on a replica."""
        await hot.until(lambda: not uses().get(pid), "requests that have ended are counted out")
        async with self.only(pid):
            asked = asyncio.create_task(self.chat(text))
            await hot.until(lambda: uses().get(pid) == 1, "the request is counted in")
        return asked

    async def figures_at(self, pid: int) -> dict[str, float]:
        """What this process exposes: sums over the labels, by name."""
        client = httpx.AsyncClient(base_url=self.url, headers=ADMIN, timeout=120)
        async with client, self.only(pid):
            text = (await client.get("/metrics")).raise_for_status().text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("localai_cluster_")
                found[name] = found.get(name, 0) + sample.value
        return found

    async def exposes(self, pid: int, name: str, value: float) -> None:
        """Wait until this process exposes the value; each writes its gauges for the others once a second."""

        async def is_exposed() -> bool:
            seen.append((await self.figures_at(pid))[name])
            return seen[-1] == value

        seen: list[float] = []
        await until(is_exposed, seconds=20, what=(name, value, seen))


def uses() -> dict[int, int]:
    """Requests in flight by process."""
    return dict(ReplicaUse.objects.values_list("process__pid", "count"))


@asynccontextmanager
async def serving(folder: Path, engines: int = 1, **env: str) -> AsyncIterator[tuple[Served, list[Gated]]]:
    """Two web processes on one address, and engines of a model."""
    (folder / "m.yaml").write_text("name: m\nbackend: echo\nparameters: {model: m}\n")
    port, temporary = free_port(), folder / "tmp"
    temporary.mkdir()
    async with AsyncExitStack() as stack:
        started = [Gated() for _ in range(engines)]
        for number, engine in enumerate(started):
            address = await stack.enter_async_context(running(engine))
            await hot.in_thread(
                lambda n=number, a=address: hot.replica(hot.node(f"n{n}", id=UUID(int=n + 1)), "m", address=a)
            )
        given = {**environment(port, folder), "CLUSTER_WEB_STALE_AFTER": "3s", "TMPDIR": str(temporary)}
        with (folder / "log").open("wb") as log:
            parent = subprocess.Popen(  # noqa: ASYNC220 - it does not wait
                [sys.executable, "manage.py", "serve", "--processes", "2"],
                cwd=ROOT, env={**given, **env}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        served = Served(parent, f"http://127.0.0.1:{port}", folder / "log")
        try:
            await hot.until(lambda: len(served.pids()) == 2, "both register")
            yield served, started
        finally:
            parent.kill()
            parent.wait()
            for pid in await hot.in_thread(served.pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.django_db(transaction=True)
def test_one_that_is_killed_takes_only_its_own_requests(tmp_path: Path) -> None:
    """Issue 22: counts are exact, metrics agree and go on, another one replaces it, the stop is in order."""

    async def scenario() -> None:
        async with serving(tmp_path) as (served, [engine]):
            one, two = await hot.in_thread(served.pids)
            assert await served.chat_at(one, "first") == 200
            cut = await served.begin_at(one, "wait: cut")
            kept = await served.begin_at(two, "wait: kept")
            assert await hot.in_thread(uses) == {one: 1, two: 1}
            assert list((await hot.in_thread(hot.counts)).values()) == [2]
            await served.exposes(two, "inference_requests_in_flight", 2)
            os.kill(one, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await cut
            (three,) = await hot.until(lambda: set(served.pids()) - {one, two}, "another one replaces it")
            assert f"Web process {one} ended (signal SIGKILL), restarting in 0.5 s" in served.log.read_text()
            assert await served.chat_at(three, "second") == 200
            engine.gate.set()
            assert await kept == 200
            engine.gate.clear()
            figures = [await served.figures_at(pid) for pid in (two, three)]
            for found in figures:
                assert found["inference_requests_total"] == 3, "with what the killed one has counted"
                assert found["inference_requests_in_flight"] == 0
                assert "bus_connected" not in found, "a figure of other processes"
            assert engine.received == ["first", "second", "wait: cut", "wait: kept"]

            last = [await served.begin_at(pid, "wait: last") for pid in (two, three)]
            served.parent.send_signal(signal.SIGTERM)
            await hot.until(lambda: refuses(served.url), "nothing new is accepted")
            engine.gate.set()
            assert [await asked for asked in last] == [200, 200]
            assert await asyncio.to_thread(served.parent.wait, 90) == 0
            assert await hot.in_thread(served.pids) == []
            assert not list((tmp_path / "tmp").iterdir())
            assert "Traceback" not in served.log.read_text()

    asyncio.run(scenario())


@pytest.mark.django_db(transaction=True)
def test_a_prefix_is_known_to_both_and_nobody_outlives_the_parent(tmp_path: Path) -> None:
    """Issue 22: a prompt goes to the replica that another process has sent it to; no process is orphaned."""
    law, cooking = "You know the law. " * 60, "You cook. " * 100
    prompts = (f"system\n{system}\nuser\n{text}\n" for system, text in ((law, "one"), (cooking, "two")))
    blocks = sum(len(prompt_chain("m", prompt.encode())) for prompt in prompts)
    keys = BusKeys.generate()
    bus = {
        "LOCALAI_NATS_ACCOUNT_SEED": keys.account.seed,
        "CLUSTER_NATS_OPERATOR_SEED": keys.operator.seed,
        "CLUSTER_NATS_SYSTEM_SEED": keys.system.seed,
    }

    async def scenario(url: str) -> None:
        async with serving(tmp_path, 2, **bus, LOCALAI_NATS_URL=url) as (served, engines):
            one, two = await hot.in_thread(served.pids)
            await hot.until(lambda: served.log.read_text().count("Listening on") == 2, "both have subscribed")
            assert await served.chat_at(one, "one", law) == 200
            assert await served.chat_at(one, "two", cooking) == 200
            assert [engine.received for engine in engines] == [["one"], ["two"]]
            await served.exposes(two, "prefix_entries", 2 * blocks)
            # Without its prompt the first replica would get it: it was used before the other one.
            assert await served.chat_at(two, "three", cooking) == 200
            assert [engine.received for engine in engines] == [["one"], ["three", "two"]]

            cut = [await served.begin_at(pid, "wait") for pid in (one, two)]
            served.parent.kill()
            await hot.until(lambda: refuses(served.url), "nothing new is accepted")
            for engine in engines:
                engine.gate.set()
            assert [await asked for asked in cut] == [200, 200]
            await hot.until(lambda: not WebProcess.objects.exists(), "both sign off")
            assert "The parent of this web process is gone" in served.log.read_text()

    with EmbeddedNats(tmp_path / "nats", port=free_port(), keys=keys) as nats:
        asyncio.run(scenario(nats.url))


def refuses(url: str) -> bool:
    """Whether a new connection is no longer accepted."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


CHILD = """
import os, socket, sys
starts = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
os.write(starts, b".")
number = os.fstat(starts).st_size
if number in map(int, sys.argv[2].split(",")):
    sys.exit(7)
os.write(os.open(sys.argv[1] + ".served", os.O_CREAT | os.O_APPEND | os.O_WRONLY), b".")
link = socket.socket(fileno=int(sys.argv[-1]))
link.send(b"x")
link.recv(1)
"""
"""Serves until its parent is gone; the starts with these numbers fail."""


@contextmanager
def parent_of(folder: Path, number: int, failing: str) -> Iterator["subprocess.Popen[str]"]:
    """A parent of stand-ins for web processes."""
    script = folder / "child.py"
    script.write_text(CHILD)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        os.set_inheritable(listening.fileno(), True)
        command = [sys.executable, "-I", "-S", web_processes.__file__, str(listening.fileno()), str(number)]
        child = [sys.executable, "-I", "-S", str(script), str(folder / "starts"), failing]
        parent = subprocess.Popen(
            [*command, *child], pass_fds=[listening.fileno()], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
    with parent:
        try:
            yield parent
        finally:
            parent.kill()


def test_a_first_start_that_fails_ends_the_command(tmp_path: Path) -> None:
    """Not an endless loop, and no second process that fails likewise."""
    with parent_of(tmp_path, 3, "1") as parent:
        assert parent.wait(60) == 7
    assert (tmp_path / "starts").read_bytes() == b"."


def test_a_later_start_that_fails_is_tried_again_with_back_off(tmp_path: Path) -> None:
    """Of two, the second cannot start twice; a stop has status 0."""
    served = tmp_path / "starts.served"
    with parent_of(tmp_path, 2, "2,3") as parent:
        eventually(lambda: served.exists() and len(served.read_bytes()) == 2, what="both serve")
        parent.terminate()
        _, said = parent.communicate(timeout=60)
        assert parent.returncode == 0, said
    delays = [line.rpartition("restarting in ")[2] for line in said.splitlines() if "exit code 7" in line]
    assert delays == ["0.5 s", "1 s"]
    assert not list(tmp_path.glob("localai-cluster-web-*"))


@pytest.mark.parametrize(
    ("number", "server", "line"),
    [
        ("2", "uvicorn", "port {port} on 127.0.0.1 is in use; set PORT to a free one"),
        ("0", "uvicorn", "--processes must be from 1 to 64"),
        ("2", "daphne", "daphne serves with one process: use CLUSTER_SERVER=uvicorn, or --processes 1"),
    ],
)
def test_a_start_that_cannot_succeed_is_one_clear_line(number: str, server: str, line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        away = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/away"}
        done = subprocess.run(
            [sys.executable, "manage.py", "serve", "--processes", number], cwd=ROOT,
            env={**os.environ, **away, "PORT": str(port), "CLUSTER_SERVER": server},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (1, f"CommandError: {line.format(port=port)}")
