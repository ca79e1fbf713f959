"""Five hundred pages that watch two hundred parts move: how late a report of a worker is, and at what memory.

`python -m tests.benchmarks.bench_watchers [--sockets 500] [--parts 200] [--seconds 60]` starts servers, a web
process, a controller and planted nodes, and installs a backend on all of them. Each report that a worker
publishes names its time as its file; a page notes when a frame with it comes. The pages share two processes
of the generator. Everything shares this machine: late includes how late the generator itself was, which is
printed too.
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
"""Seconds between two reports of a part, as of a worker."""
READS = 25
"""One page in so many reads what it is told."""
OPENING = 20
"""Pages that open at a time."""


async def page(
    url: str, gate: asyncio.Semaphore, opened: Any, late: list[float] | None, sizes: list[int]
) -> None:
    """One page; without `late` it only counts what comes, or the generator would be the slowest of all."""
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
    """Pages until `stop`; then what they noted, one in so many of the latencies."""
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
    """A process of pages."""
    uvloop.run(pages(url, count, opened, stop, told))


async def report(simulated: Fleet, op_id: str, seconds: float) -> None:
    """Every worker reports four times a second; the reports are spread evenly."""
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
    """Opens the pages, then has the parts move."""
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
    """A line every ten seconds."""
    while True:
        (used, _), began = cost(web), clock.monotonic()
        await asyncio.sleep(10)
        after, megabytes = cost(web)
        share = 100 * (after - used) / (clock.monotonic() - began)
        print(f"web: {share:.0f} % of a core, {megabytes:.1f} MB", flush=True)


def main() -> None:
    """Runs the whole benchmark."""
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
