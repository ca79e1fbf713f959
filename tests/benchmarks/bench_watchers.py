"""Five hundred pages that watch the progress of two hundred targets: delay of reports, and memory.

`python -m tests.benchmarks.bench_watchers [--sockets 500] [--parts 200] [--seconds 60]` starts servers, a web
process, a controller and planted nodes, and installs a backend on all of them. Each published report contains
its time as its file name; a page records when a frame with the report arrives. The pages share two processes
of the generator. All processes share this machine: the delay includes the delay of the generator itself,
which is printed too.
"""

import argparse
import asyncio
import multiprocessing
import os
from typing import Any

import orjson
import uvloop
from websockets.asyncio.client import connect

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import encode
from tests.benchmarks import planted
from tests.benchmarks.bench_events import cost
from tests.benchmarks.raw import percentile
from tests.support.cluster import ADMIN, Cluster, Process, running_cluster
from tests.support.simulator import Act, Fleet, Script

EVERY = 0.25
"""Seconds between two reports of a target, as of a worker."""
READS = 25
"""One page in this many parses the frames that it receives."""
OPENING = 20
"""Maximum pages that open at the same time."""


async def page(
    url: str, gate: asyncio.Semaphore, opened: Any, late: list[float] | None, sizes: list[int]
) -> None:
    """Open one page; without `late` it only counts frames, because parsing would slow down the generator."""
    async with gate:
        link = await connect(url, additional_headers=ADMIN, proxy=None, max_size=None, open_timeout=120)
    with opened.get_lock():
        opened.value += 1
    known: dict[str, str] = {}
    async with link:
        async for text in link:
            now = clock.now().timestamp()
            if not str(text[:28]).startswith('{"type":"operations.delta"'):
                continue
            sizes.append(len(text))
            if late is None:
                continue
            for operation in orjson.loads(text)["operations"]:
                for part in operation.get("nodes", ()):
                    said = part.get("file_name", "")
                    if said.startswith("at ") and known.get(part["node_id"]) != said:
                        known[part["node_id"]] = said
                        late.append(now - float(said[3:]))


async def pages(url: str, count: int, opened: Any, stop: Any, told: Any) -> None:
    """Run pages until `stop`; then send their measurements, with a sample of the delays."""
    late: list[float] = []
    sizes: list[int] = []
    lag: list[float] = []
    gate = asyncio.Semaphore(OPENING)
    running = [
        asyncio.create_task(page(url, gate, opened, None if number % READS else late, sizes))
        for number in range(count)
    ]
    while not stop.is_set():
        due = clock.monotonic() + 0.05
        await asyncio.sleep(0.05)
        lag.append(clock.monotonic() - due)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    told.put((late, sizes, lag))


def generate(url: str, count: int, opened: Any, stop: Any, told: Any) -> None:
    """Run a process of pages."""
    uvloop.run(pages(url, count, opened, stop, told))


async def report(simulated: Fleet, op_id: str, seconds: float) -> None:
    """Send four reports a second for every worker, evenly spread."""
    began = clock.monotonic()
    total, turn = 10**9, 0
    while clock.monotonic() - began < seconds:
        for number, worker in enumerate(simulated.workers):
            turn += 1
            event = m.ProgressEvent(
                op_id, worker.node_id, "b", file_name=f"at {clock.now().timestamp()}", phase="downloading",
                current_bytes=turn, total_bytes=total, percentage=100 * turn / total,
            )  # fmt: skip
            await worker.bus.publish(messages.install_progress(worker.node_id, op_id), encode(event))
            if number % 10 == 9:
                await asyncio.sleep(EVERY * 10 / len(simulated.workers))


async def run(cluster: Cluster, chosen: argparse.Namespace, ids: list[str], instances: list[str]) -> None:
    """Open the pages, then start the reports."""
    web = await asyncio.to_thread(cluster.web)
    await asyncio.to_thread(cluster.controller)
    spawning = multiprocessing.get_context("spawn")
    opened, stop, told = spawning.Value("i", 0), spawning.Event(), spawning.Queue()
    url = web.url.replace("http", "ws", 1) + "/ws/feed"
    share = (url, chosen.sockets // 2, opened, stop, told)
    generators = [spawning.Process(target=generate, args=share) for _ in range(2)]
    script = Script({"backend.install": Act(seconds=3600)})
    async with planted.listening(cluster, ids, instances, script) as simulated:
        began, before = clock.monotonic(), cost(web)
        for one in generators:
            one.start()
        async with asyncio.timeout(600):
            while opened.value < 2 * (chosen.sockets // 2):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.2)
        print(
            f"{opened.value} pages open after {clock.monotonic() - began:.0f} s;"
            f" load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        print(f"web: {before[1]:.1f} MB before, {cost(web)[1]:.1f} MB with the pages", flush=True)
        answer = await asyncio.to_thread(cluster.post, web, "/api/backends/install/b", {"nodes": ids})
        op_id = answer.json()["jobID"]
        async with asyncio.timeout(300):
            while simulated.count("backend.install") < len(ids):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.2)
        watching = asyncio.create_task(memory(web))
        await report(simulated, op_id, chosen.seconds)
        watching.cancel()
        stop.set()
    late: list[float] = []
    sizes: list[int] = []
    lag: list[float] = []
    for _ in generators:
        some = await asyncio.to_thread(told.get)
        late, sizes, lag = late + some[0], sizes + some[1], lag + some[2]
    print(
        f"{len(late)} reports seen in {len(sizes)} frames of {sum(sizes) / max(len(sizes), 1) / 1024:.1f} KB:"
        f" p50 {percentile(late, 0.5):.0f} ms, p95 {percentile(late, 0.95):.0f} ms,"
        f" p99 {percentile(late, 0.99):.0f} ms; generator late by p50 {percentile(lag, 0.5):.0f} ms,"
        f" p95 {percentile(lag, 0.95):.0f} ms; load {os.getloadavg()[0]:.1f}"
    )


async def memory(web: Process) -> None:
    """Print the memory of the web process every ten seconds."""
    while True:
        (used, _), began = cost(web), clock.monotonic()
        await asyncio.sleep(10)
        after, megabytes = cost(web)
        share = 100 * (after - used) / (clock.monotonic() - began)
        print(f"web: {share:.0f} % of a core, {megabytes:.1f} MB", flush=True)


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures many pages.")
    options.add_argument("--sockets", type=int, default=500)
    options.add_argument("--parts", type=int, default=200)
    options.add_argument("--seconds", type=float, default=60.0)
    chosen = options.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        instances = planted.processes(chosen.parts)
        uvloop.run(run(cluster, chosen, planted.plant(instances), instances))


if __name__ == "__main__":
    main()
