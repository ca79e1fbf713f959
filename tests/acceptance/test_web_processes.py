"""64 mixed clients on two web processes of one address, while one is killed every ten seconds."""

import asyncio
import http.client
import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from localai_cluster.kit import clock
from localai_cluster.rpc.messages import EmbeddingResult, PredictOptions
from tests.benchmarks.bench_gateway import insert_rows, serving
from tests.conftest import eventually
from tests.support.cluster import ADMIN, Cluster, Process, running_cluster
from tests.support.effort import swept
from tests.support.scripted import Scripted, Step, running, words
from tests.sweep import SHOWN

CLIENTS, KILLS, SECONDS = 64, 6, 10.0
MODEL = "echo"
COUNTED = "SELECT coalesce(sum(in_flight), 0) FROM node_models"


@dataclass
class Recorder(Scripted):
    """An engine that repeats the id of each request, in a few pieces, and keeps all ids that it received."""

    received: "Counter[str]" = field(default_factory=Counter)

    def script_for(self, request: PredictOptions) -> Sequence[Step]:
        """What this call plays."""
        identifier = request.Messages[-1].content
        self.received[identifier] += 1
        return [step for word in words(f"{identifier} a b c") for step in (word, 0.01)]

    async def Embedding(self, request: PredictOptions, context: Any) -> EmbeddingResult:
        self.received[request.Embeddings] += 1
        return await super().Embedding(request, context)


@dataclass
class Clients:
    """Threads that send requests on connections of their own, which they keep."""

    port: int
    answered: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """Port of the connection that broke, by the id of the request."""
    wrong: list[Any] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Send one request after the other, of each kind in turn."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        for turn in itertools.count():
            if self.stopping.is_set():
                link.close()
                return
            identifier, own_port = f"{number}-{turn}", 0
            try:
                if link.sock is None:
                    link.connect()
                own_port = link.sock.getsockname()[1]
                status, text = self._send(link, identifier, (number + turn) % 3)
            except (OSError, http.client.HTTPException):
                self.failed[identifier] = own_port
                link.close()
                continue
            if status == 200 and ((number + turn) % 3 == 0 or identifier in text):
                self.answered.append(identifier)
            else:
                self.wrong.append((identifier, status, text[:300]))

    def _send(self, link: http.client.HTTPConnection, identifier: str, kind: int) -> tuple[int, str]:
        messages = [{"role": "user", "content": identifier}]
        bodies = (
            {"model": MODEL, "input": identifier},
            {"model": MODEL, "messages": messages},
            {"model": MODEL, "messages": messages, "stream": True},
        )
        path = "/v1/chat/completions" if kind else "/v1/embeddings"
        headers = {**ADMIN, "Content-Type": "application/json"}
        link.request("POST", path, json.dumps(bodies[kind]), headers)
        response = link.getresponse()
        text = response.read().decode()
        assert kind < 2 or "data: [DONE]" in text, text
        return response.status, text


def kill_one(cluster: Cluster, web: Process, due: float) -> set[int]:
    """Kill the web process that has served longest, when it is time; return the ports of its clients."""
    eventually(lambda: clock.monotonic() > due, seconds=SECONDS, what="ten seconds have passed")
    children = psutil.Process(web.child.pid).children()
    victim = min(children, key=psutil.Process.create_time)
    victim.suspend()  # from here on it accepts nothing
    eventually(lambda: victim.status() == psutil.STATUS_STOPPED, what="it stands still")
    links = [link for link in victim.net_connections("tcp") if link.raddr]
    ports = {link.raddr.port for link in links if link.laddr.port == web.port}
    victim.kill()
    eventually(lambda: two_serve(cluster, web) and not victim.is_running(), seconds=60, what="another one")
    return ports


def two_serve(cluster: Cluster, web: Process) -> bool:
    """Whether both web processes have registered."""
    children = {child.pid for child in psutil.Process(web.child.pid).children()}
    return len(children & {pid for (pid,) in cluster.rows("SELECT pid FROM web_processes")}) == 2


@swept
@pytest.mark.rule("I8")
def test_only_requests_of_a_killed_process_fail() -> None:
    """Issue 22: none is lost or doubled; the engine has received every id once at most."""

    async def scenario(cluster: Cluster) -> None:
        engine, threads = Recorder(), ThreadPoolExecutor(CLIENTS)
        async with running(engine) as address:
            insert_rows(cluster, MODEL, address)
            # The node has no worker. With its last heartbeat ahead, nobody probes it on the bus.
            cluster.execute("UPDATE backend_nodes SET last_heartbeat = '2100-01-01'")
            web = await asyncio.to_thread(serving, cluster, MODEL, CLUSTER_WEB_PROCESSES="2")
            await asyncio.to_thread(cluster.controller)
            await asyncio.to_thread(cluster.tasks)
            await asyncio.to_thread(eventually, lambda: two_serve(cluster, web), seconds=60, what="two")
            engine.received.clear()
            clients, killed = Clients(web.port), set[int]()
            loop = asyncio.get_running_loop()
            sending = [loop.run_in_executor(threads, clients.run, number) for number in range(CLIENTS)]
            try:
                for _ in range(KILLS):
                    due = clock.monotonic() + SECONDS
                    killed |= await asyncio.to_thread(kill_one, cluster, web, due)
            finally:
                clients.stopping.set()
                await asyncio.gather(*sending)
            told = f"answered {len(clients.answered)}  cut {len(clients.failed)}  wrong {len(clients.wrong)}"
            print(f"{SHOWN}web processes, kills {KILLS}  {told}")
            assert not clients.wrong
            assert set(clients.failed.values()) <= killed
            assert set(engine.received.values()) == {1}
            assert set(clients.answered) <= set(engine.received)
            assert set(engine.received) <= {*clients.answered, *clients.failed}
            await asyncio.to_thread(
                eventually, lambda: cluster.rows(COUNTED) == [(0,)], seconds=60, what="the counts are true"
            )

    with running_cluster() as cluster:
        asyncio.run(scenario(cluster))
