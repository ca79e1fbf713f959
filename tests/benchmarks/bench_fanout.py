"""One operation on a thousand nodes: the time until all commands are sent, and the cost.

`python -m tests.benchmarks.bench_fanout [--nodes 100 1000] [--seconds 5] [--ticks 20]` starts servers, a web
process, a controller and simulated workers, with one open page. For each number of nodes it installs a
backend. It prints when the first and the last command arrived after the response, when all commands had
ended, the statements and processor seconds, and the amount of data that the page received. At last it removes
all nodes in one operation. Simulator and servers share this machine: compare figures of one run only.
"""

import argparse
import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import uvloop
from websockets.asyncio.client import connect

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.benchmarks.counting import StatementCounter
from tests.conftest import until
from tests.support.cluster import ADMIN, Cluster, Process, running_cluster
from tests.support.simulator import Act, Fleet, Script

_TICK = os.sysconf("SC_CLK_TCK")
_ENDED = ("completed", "failed", "cancelled")


@dataclass
class Counted:
    """A process whose statements are counted on the way to PostgreSQL."""

    process: Process
    counter: StatementCounter

    def now(self) -> tuple[int, float]:
        """Return the statements and processor seconds so far."""
        stat = Path(f"/proc/{self.process.child.pid}/stat").read_text().rpartition(")")[2].split()
        return self.counter.statements, (int(stat[11]) + int(stat[12])) / _TICK


def counted(cluster: Cluster, name: str, start: Callable[..., Process]) -> Counted:
    """Start a process with its own statement counter."""
    server, folder = cluster.postgres.sockets, cluster.home / f"count-{name}"
    folder.mkdir()
    counter = StatementCounter(folder, server)
    counter.__enter__()
    url = cluster.postgres.url.replace(quote(str(server), safe=""), quote(str(folder), safe=""))
    return Counted(start(DATABASE_URL=url), counter)


async def page(web: Process, told: list[int]) -> None:
    """Open a page; record the size of each frame about operations."""
    url = web.url.replace("http", "ws", 1) + "/ws/feed"
    async with connect(url, additional_headers=ADMIN, proxy=None, max_size=None) as link:
        async for text in link:
            if str(text[:24]).startswith('{"type":"operations'):
                told.append(len(text))


async def install(
    cluster: Cluster, web: Counted, controller: Counted, simulated: Fleet, count: int, told: list[int]
) -> None:
    """Install one backend on `count` nodes and print the figures."""
    ids = [worker.node_id for worker in simulated.workers[:count]]
    sent = simulated.count("backend.install")
    before, told[:] = (web.now(), controller.now()), []
    asked = clock.monotonic()
    answer = await asyncio.to_thread(
        cluster.post, web.process, f"/api/backends/install/bench-{count}", {"nodes": ids}
    )
    answered = clock.monotonic()
    assert answer.status_code < 300, answer.text
    asking = web.now()
    await until(lambda: simulated.count("backend.install") - sent >= count)
    flying = controller.now()
    job = answer.json()["jobID"]
    await until(lambda: state(cluster, job) in _ENDED)
    ended, after = clock.monotonic(), (web.now(), controller.now())
    at = [one.at - answered for one in simulated.received("backend.install")[-count:]]
    print(
        f"{count} nodes: answer after {answered - asked:.2f} s; then first command {min(at):.2f} s,"
        f" half {sorted(at)[count // 2]:.2f} s, all in flight {max(at):.2f} s,"
        f" all ended {ended - answered:.2f} s ({state(cluster, job)})\n"
        f"  statements: request {asking[0] - before[0][0]}, controller until all in flight"
        f" {flying[0] - before[1][0]}, until all ended {after[1][0] - before[1][0]}"
        f" ({(after[1][0] - before[1][0]) / count:.2f} a node)\n"
        f"  processor: request {asking[1] - before[0][1]:.2f} s, web {after[0][1] - before[0][1]:.2f} s,"
        f" controller until all in flight {flying[1] - before[1][1]:.2f} s,"
        f" until all ended {after[1][1] - before[1][1]:.2f} s\n"
        f"  page: {len(told)} frames, {sum(told) / 1024:.0f} KB, largest"
        f" {max(told, default=0) / 1024:.0f} KB",
        flush=True,
    )


async def remove(cluster: Cluster, web: Counted, controller: Counted, ids: list[str]) -> None:
    """Remove the nodes in one operation and print the figures."""
    before, began = (web.now(), controller.now()), clock.monotonic()
    body = {"verb": "remove", "ids": ids}
    answer = await asyncio.to_thread(cluster.post, web.process, "/api/nodes/bulk", body)
    answered, job = clock.monotonic(), answer.json()["jobID"]
    await until(lambda: state(cluster, job) in _ENDED)
    ended, after = clock.monotonic(), (web.now(), controller.now())
    print(
        f"{len(ids)} nodes removed: answer after {answered - began:.2f} s, all ended {ended - began:.2f} s"
        f" ({state(cluster, job)}); statements: web {after[0][0] - before[0][0]}, controller"
        f" {after[1][0] - before[1][0]}; processor: web {after[0][1] - before[0][1]:.2f} s, controller"
        f" {after[1][1] - before[1][1]:.2f} s",
        flush=True,
    )


def state(cluster: Cluster, job: str) -> str:
    """Return the operation's status."""
    return str(cluster.rows("SELECT status FROM operations WHERE id = %s", job)[0][0])


async def run(cluster: Cluster, chosen: argparse.Namespace, ids: list[str], instances: list[str]) -> None:
    """Run all sizes, one after the other."""
    web = await asyncio.to_thread(counted, cluster, "web", cluster.web)
    controller = await asyncio.to_thread(counted, cluster, "controller", cluster.controller)
    script = Script({"backend.install": Act(seconds=chosen.seconds, ticks=chosen.ticks)})
    told: list[int] = []
    async with planted.listening(cluster, ids, instances, script) as simulated:
        watching = asyncio.create_task(page(web.process, told))
        for count in chosen.nodes:
            print(f"load {os.getloadavg()[0]:.1f}", flush=True)
            await install(cluster, web, controller, simulated, count, told)
        await remove(cluster, web, controller, ids)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures the fan-out of one operation.")
    options.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--ticks", type=int, default=20)
    chosen = options.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        instances = planted.processes(max(chosen.nodes))
        ids = planted.plant(instances)
        uvloop.run(run(cluster, chosen, ids, instances))


if __name__ == "__main__":
    main()
