"""`/ws/feed` under ten thousand changes of operations a minute: delay, cost, and stability over time.

`python -m tests.benchmarks.bench_events [--seconds 60] [--sockets 3]` starts servers and one web process. A
writer changes 200 running operations, `BATCH` of them in one transaction, because a commit for each change
would measure the disk. Each change contains the time at which it was written, so each socket measures its
delay. Several changes of one operation in one message count as one. All processes share this machine.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import uvloop
from websockets.asyncio.client import connect

from localai_cluster.kit import clock
from tests.benchmarks.raw import percentile
from tests.support.cluster import ADMIN, Process, running_cluster

OPERATIONS, RATE, BATCH = 200, 10_000 / 60, 10
_TICK = os.sysconf("SC_CLK_TCK")


def write(environment: dict[str, str], stop: Any, written: Any) -> None:
    """Admit and claim the operations, then change one batch after the other."""
    os.environ.update(environment | {"DJANGO_SETTINGS_MODULE": "localai_cluster.settings"})
    import django

    django.setup()
    from django.db import transaction

    from operations.changes.events import emit
    from operations.ledger import admission, attempts
    from operations.ledger.admission import OperationRequest, Requester
    from operations.models import Operation

    for number in range(OPERATIONS):
        asked = OperationRequest(
            "backend_install", key=f"k{number}", element=f"b{number}", by=Requester("bench")
        )
        admission.admit(asked, now=clock.now())
    mine = attempts.claim("bench", now=clock.now(), lease=3600, limit=OPERATIONS)
    due = clock.monotonic()
    for first in itertools.cycle(range(0, OPERATIONS, BATCH)):
        if stop.wait(max(due - clock.monotonic(), 0)):
            return
        batch = mine[first : first + BATCH]
        with transaction.atomic():
            for operation in batch:
                operation.message = str(clock.now().timestamp())
            Operation.objects.bulk_update(batch, ["message"])
            emit(batch)
        due += BATCH / RATE
        written.value += BATCH


@contextmanager
def writer(environment: dict[str, str]) -> Iterator[Any]:
    """Write ten thousand changes a minute; yield a counter of all changes."""
    spawning = multiprocessing.get_context("spawn")
    stop, written = spawning.Event(), spawning.Value("i", 0)
    running = spawning.Process(target=write, args=(environment, stop, written))
    running.start()
    try:
        yield written
    finally:
        stop.set()
        running.join()


async def listen(url: str, late: list[float], sizes: list[int]) -> None:
    """Read as a browser does, and record the delay of each change in seconds."""
    async with connect(url, additional_headers=ADMIN, proxy=None, max_size=None) as link:
        async for text in link:
            now, message = clock.now().timestamp(), orjson.loads(text)
            if message["type"] == "operations.delta":
                sizes.append(len(text))
                said = [one["message"] for one in message["operations"]]
                late += [now - float(one) for one in said if one[:1].isdigit()]


def cost(web: Process) -> tuple[float, float]:
    """Return the CPU seconds so far and the resident MB of the web process."""
    folder = Path(f"/proc/{web.child.pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    pages = int((folder / "statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / _TICK, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(web: Process, seconds: float, sockets: int) -> None:
    """Print a line for each quarter of the time."""
    late: list[float] = []
    sizes: list[int] = []
    url = web.url.replace("http", "ws", 1) + "/ws/feed"
    listening = [asyncio.create_task(listen(url, late, sizes)) for _ in range(sockets)]
    async with asyncio.timeout(60):
        while not late:  # noqa: ASYNC110 - filled by tasks
            await asyncio.sleep(0.1)
    for _ in range(4):
        late.clear()
        sizes.clear()
        (before, _memory), began = cost(web), clock.monotonic()
        await asyncio.sleep(seconds / 4)
        (after, memory), took = cost(web), clock.monotonic() - began
        print(
            f"{sockets} sockets: {len(late) / took / sockets:.0f} changes/s and"
            f" {len(sizes) / took / sockets:.1f} messages/s each, p50 {percentile(late, 0.5):.0f} ms,"
            f" p99 {percentile(late, 0.99):.0f} ms, largest {1000 * max(late):.0f} ms;"
            f" web {100 * (after - before) / took:.0f} % of a core, {memory:.1f} MB",
            flush=True,
        )
    for one in listening:
        one.cancel()
    await asyncio.gather(*listening, return_exceptions=True)


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures the live feed.")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--sockets", type=int, default=3)
    chosen = options.parse_args()
    with running_cluster() as cluster:
        web = cluster.web()
        began = clock.monotonic()
        with writer(cluster.environment) as written:
            uvloop.run(measure(web, chosen.seconds, chosen.sockets))
            took = clock.monotonic() - began
        print(f"{written.value} changes written, {60 * written.value / took:.0f} a minute")


if __name__ == "__main__":
    main()
