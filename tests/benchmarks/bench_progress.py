"""Progress of many targets at four reports a second: a transaction for each report, compared with batches.

`python -m tests.benchmarks.bench_progress [--parts 200 1000] [--seconds 10]` starts servers and two
processes. One is a controller whose attempts report, first through `services.progress`, then through the
recorder, with one target in each operation and with all targets in one operation. The other process writes
one change every 100 ms and measures its duration, because the change needs the same counter. The delay is the
time from a report to the commit that contains it, or a newer report of the same target. All processes share
this machine.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from localai_cluster.kit import clock
from tests.benchmarks.raw import percentile
from tests.support.cluster import running_cluster

EVERY = 0.25
"""Seconds between two reports of a target."""
PROBE_EVERY = 0.1


@dataclass
class Run:
    """The measurements of one run; times in seconds."""

    name: str
    seconds: float = 0.0
    taken: int = 0
    written: int = 0
    writes: int = 0
    cpu: float = 0.0
    late: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Return one line of the table."""
        each = self.seconds or 1.0
        return (
            f"{self.name}: {self.taken / each:.0f} reports/s, {self.writes / each:.1f} transactions/s with"
            f" {self.written / each:.0f} changes/s; late p50 {percentile(self.late, 0.5):.0f} ms,"
            f" p99 {percentile(self.late, 0.99):.0f} ms; another writer p50"
            f" {percentile(self.others, 0.5):.0f} ms, p99 {percentile(self.others, 0.99):.0f} ms;"
            f" controller {100 * self.cpu / each:.0f} % of a core"
        )


def set_up(environment: dict[str, str]) -> None:
    """Set up Django in a separate process."""
    os.environ.update(environment | {"DJANGO_SETTINGS_MODULE": "localai_cluster.settings"})
    import django

    django.setup()


def probe(environment: dict[str, str], stop: Any, took: Any) -> None:
    """Change an operation again and again, as another controller would."""
    set_up(environment)
    from operations.ledger import admission, attempts
    from operations.ledger.progress import record

    admission.admit(
        admission.OperationRequest("probe", key="probe", element="p", by=admission.Requester("b")),
        now=clock.now(),
    )
    (mine,) = attempts.claim("probe", now=clock.now(), lease=3600, limit=1)
    while not stop.wait(PROBE_EVERY):
        began = clock.monotonic()
        record({(mine.id, mine.fence): [_tick()]}, now=clock.now())
        took.put(clock.monotonic() - began)
    took.put(None)


def _tick(node: Any = None, done: int = 0) -> Any:
    from operations.ledger.progress import Tick

    return Tick("downloading", str(clock.monotonic()), done, 10**6, done / 10**4, "file", node)


def claimed(parts: int, *, together: bool) -> list[tuple[Any, Any]]:
    """Return operation and node of each target."""
    from uuid import uuid4

    from operations.ledger import admission, attempts

    nodes = [(uuid4(), f"node-{number}") for number in range(parts)]
    by = admission.Requester("bench")
    for number, targets in enumerate([nodes] if together else [[node] for node in nodes]):
        asked = admission.OperationRequest(
            "backend_install", key=f"{uuid4()}{number}", element="x", by=by, targets=targets
        )
        admission.admit(asked, now=clock.now())
    mine = attempts.claim("bench", now=clock.now(), lease=3600, limit=parts)
    return [(operation, target.node_id) for operation in mine for target in operation.targets.all()]


async def report(parts: list[tuple[Any, Any]], seconds: float, tell: Callable[..., Awaitable[None]]) -> None:
    """Report four times a second for every target until the time is over."""

    async def one(number: int, operation: Any, node: Any) -> None:
        due = clock.monotonic() + EVERY * number / len(parts)
        for done in itertools.count():
            await asyncio.sleep(max(due - clock.monotonic(), 0))
            due += EVERY
            await tell(operation, _tick(node, done))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(one(number, *part) for number, part in enumerate(parts)))


async def one_each(parts: list[tuple[Any, Any]], seconds: float, run: Run) -> None:
    """Write each report in its own transaction, and wait for it: the former way."""
    from operations.executor.work import in_thread
    from operations.ledger.progress import record

    async def tell(operation: Any, tick: Any) -> None:
        await in_thread(record, {(operation.id, operation.fence): [tick]}, now=clock.now())
        run.late.append(clock.monotonic() - float(tick.message))

    await report(parts, seconds, tell)
    run.writes = run.taken = run.written = len(run.late)


async def batches(parts: list[tuple[Any, Any]], seconds: float, run: Run) -> None:
    """Write the latest reports of all targets together through the recorder: the current way."""
    from operations.executor.work import write_batch
    from operations.ledger.progress import Batch, Recorder

    async def write(batch: Batch) -> Any:
        lost = await write_batch(batch)
        run.writes, run.written = run.writes + 1, run.written + len(batch)
        run.late += [clock.monotonic() - float(tick.message) for ticks in batch.values() for tick in ticks]
        return lost

    recorder = Recorder(write)

    async def tell(operation: Any, tick: Any) -> None:
        run.taken += 1
        recorder.add((operation.id, operation.fence), [tick])

    await report(parts, seconds, tell)
    recorder.close()


def statements(parts: list[tuple[Any, Any]]) -> int:
    """Return the SQL statements of one batch with a report of every target."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from operations.ledger import progress

    batch: dict[Any, list[Any]] = {}
    for operation, node in parts:
        batch.setdefault((operation.id, operation.fence), []).append(_tick(node))
    with CaptureQueriesContext(connection) as queries:
        progress.record(batch, now=clock.now())
    return len(queries)


def controller(environment: dict[str, str], options: argparse.Namespace, took: Any) -> None:
    """Run every shape both ways and print a line for each."""
    set_up(environment)
    for count in options.parts:
        for together in (False, True):
            parts = claimed(count, together=together)
            shape = f"{count} parts of one operation" if together else f"{count} operations"
            late = {}
            for way in (one_each, batches):
                run = Run(f"{shape}, {way.__name__}")
                _drain(took)
                began, cpu = clock.monotonic(), time.process_time()
                asyncio.run(way(parts, options.seconds, run))
                run.seconds, run.cpu = clock.monotonic() - began, time.process_time() - cpu
                run.others = _drain(took)
                late[way.__name__] = percentile(run.late, 0.99)
                print(run.line(), flush=True)
            print(
                f"{shape}: late p99 {late['one_each'] / late['batches']:.1f} times shorter in batches;"
                f" one batch of all parts: {statements(parts)} statements",
                flush=True,
            )


def _drain(took: Any) -> list[float]:
    found = []
    while not took.empty():
        found.append(took.get())
    return found


@contextmanager
def other_writer(environment: dict[str, str]) -> Iterator[Any]:
    """Run the probe; yield the queue with the durations of its changes."""
    spawning = multiprocessing.get_context("spawn")
    stop, took = spawning.Event(), spawning.Queue()
    running = spawning.Process(target=probe, args=(environment, stop, took))
    running.start()
    try:
        yield took
    finally:
        stop.set()
        while took.get() is not None:
            continue
        running.join()


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures progress in batches.")
    options.add_argument("--parts", type=int, nargs="+", default=[200, 1000])
    options.add_argument("--seconds", type=float, default=10.0)
    chosen = options.parse_args()
    with running_cluster() as cluster, other_writer(cluster.environment) as took:
        spawning = multiprocessing.get_context("spawn")
        running = spawning.Process(target=controller, args=(cluster.environment, chosen, took))
        running.start()
        running.join()


if __name__ == "__main__":
    main()
