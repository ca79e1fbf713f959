"""Callers of one web process's picker, without the web: the measured process of `bench_picks`.

`python -m tests.benchmarks.picking '<json>'` with `url`, `model`, `callers`, `seconds`, `plain` and
`by_prefix` prints a line when it is warm and begins with the next line of its input, so that several
processes begin together. At the end it prints one JSON line. With `by_prefix` each caller has its own long
prompt, whose last block is new every time. `plain` uses the textbook solution instead of the picker: a
transaction that locks a replica and counts it in, and a statement that counts it out, on a connection for
each caller, with the server's own durability. It shows the capacity of the machine at that moment.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
import uvloop

from localai_cluster.kit import clock


@dataclass(frozen=True)
class Figures:
    """One run in one process; times in milliseconds, processor time in seconds."""

    pairs: int
    seconds: float
    statements: int
    cpu: float
    p50: float
    p99: float


Pair = Callable[[int], Awaitable[None]]
"""Picks and releases a replica for the caller of this number."""

FIND = """
SELECT r.id FROM node_models r JOIN backend_nodes n ON n.id = r.node_id
 WHERE r.model_name = %s AND r.state = 'loaded' AND n.status = 'healthy'
 ORDER BY r.in_flight, r.last_used, n.available_vram DESC, r.id LIMIT 1 FOR UPDATE OF r
"""
COUNT_IN = "UPDATE node_models SET in_flight = in_flight + 1, last_used = %s, updated_at = %s WHERE id = %s"
COUNT_OUT = "UPDATE node_models SET in_flight = greatest(in_flight - 1, 0), updated_at = %s WHERE id = %s"


@asynccontextmanager
async def textbook(url: str, model: str, callers: int) -> AsyncIterator[tuple[Pair, Callable[[], int]]]:
    """Yield the plain solution, and a counter of its statements without BEGIN and COMMIT."""
    connect = psycopg.AsyncConnection[tuple[Any, ...]].connect
    links = [await connect(url, autocommit=True, prepare_threshold=0) for _ in range(callers)]
    made = 0

    async def pair(caller: int) -> None:
        nonlocal made
        link, now = links[caller], clock.now()
        async with link.transaction():
            row = await (await link.execute(FIND, (model,))).fetchone()
            assert row is not None
            await link.execute(COUNT_IN, (now, now, row[0]))
        await link.execute(COUNT_OUT, (clock.now(), row[0]))
        made += 3

    yield pair, lambda: made
    for link in links:
        await link.close()


BLOCKS = 64
"""Blocks of a prompt for callers by prefix: the longest chain."""


@asynccontextmanager
async def picker(
    url: str, model: str, by_prefix: bool = False
) -> AsyncIterator[tuple[Pair, Callable[[], int]]]:
    """Yield the picker of a web process, and a counter of its statements."""
    from localai_cluster.kit.database_pool import DedicatedConnection, Pool
    from nodes.gateway.picks import Picker
    from nodes.gateway.prefix_routing import PrefixRouter
    from nodes.gateway.request import InferenceRequest

    class Counting(DedicatedConnection):
        """A connection that counts its statements."""

        executed = 0

        async def fetch_rows(self, statement: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
            """Counts, then runs."""
            self.executed += 1
            return await super().fetch_rows(statement, parameters)

    async def pair(caller: int) -> None:
        request = InferenceRequest(model=model)
        if by_prefix:
            request.chain = (*beginnings[caller], next(ends))
        prefixes.set_preferred_replica(request)
        replica = await ours.acquire(request)
        prefixes.record_pick(request)
        assert replica is not None
        ours.release(replica)

    pool, connection, ends = Pool(url), Counting(url), itertools.count(10**9)
    beginnings = [tuple(range(number * BLOCKS, (number + 1) * BLOCKS - 1)) for number in range(64)]
    await pool.open()
    prefixes = PrefixRouter(300.0, lambda news: None)
    ours = Picker(pool, connection, prefixes.weights)
    await ours.settle()
    yield pair, lambda: connection.executed
    await ours.unregister()
    await pool.close()


async def measure(
    url: str, model: str, callers: int, seconds: float, plain: bool = False, by_prefix: bool = False
) -> Figures:
    """Return the figures of `callers` parallel callers."""
    times: list[float] = []

    async def call(number: int, until: float, times: list[float]) -> None:
        began = clock.monotonic()
        while began < until:
            await pair(number)
            ended = clock.monotonic()
            times.append(ended - began)
            began = ended

    way = textbook(url, model, callers) if plain else picker(url, model, by_prefix)
    async with way as (pair, made):
        await asyncio.gather(*(call(number, clock.monotonic() + 0.3, []) for number in range(callers)))
        print("warm", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        before, began, used = made(), clock.monotonic(), time.process_time()
        await asyncio.gather(*(call(number, began + seconds, times) for number in range(callers)))
        took, used, statements = clock.monotonic() - began, time.process_time() - used, made() - before
    times.sort()
    p50, p99 = 1000 * times[len(times) // 2], 1000 * times[len(times) * 99 // 100]
    return Figures(len(times), took, statements, used, p50, p99)


if __name__ == "__main__":
    import django

    django.setup()
    print(json.dumps(asdict(uvloop.run(measure(**json.loads(sys.argv[1]))))))
