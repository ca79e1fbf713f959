"""Callers of one web process's picker, without the web: the other side of `bench_picks`.

`python -m tests.benchmarks.picking '<json>'` with `url`, `model`, `callers` and `seconds` prints one JSON
line.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import uvloop

from localai_cluster import clock

if TYPE_CHECKING:
    from nodes.routing.picks import Picker


@dataclass(frozen=True)
class Figures:
    """One run in one process; times in milliseconds."""

    pairs: int
    seconds: float
    statements: int
    cpu: float
    p50: float
    p99: float


async def measure(url: str, model: str, callers: int, seconds: float) -> Figures:
    """As many pairs as so many callers get."""
    from nodes.routing.picks import Picker
    from nodes.routing.pool import DedicatedConnection, Pool

    class Counting(DedicatedConnection):
        """Counts its statements."""

        executed = 0

        async def rows(self, statement: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
            """Counts, then runs."""
            self.executed += 1
            return await super().rows(statement, parameters)

    pool, connection = Pool(url), Counting(url)
    await pool.open()
    picker = Picker(pool, connection)
    await picker.settle()
    times: list[float] = []
    await asyncio.gather(*(_call(picker, model, clock.monotonic() + 0.3, []) for _ in range(callers)))
    before, began, used = connection.executed, clock.monotonic(), time.process_time()
    await asyncio.gather(*(_call(picker, model, began + seconds, times) for _ in range(callers)))
    took, used = clock.monotonic() - began, time.process_time() - used
    statements = connection.executed - before
    await picker.sign_off()
    await pool.close()
    times.sort()
    p50, p99 = 1000 * times[len(times) // 2], 1000 * times[len(times) * 99 // 100]
    return Figures(len(times), took, statements, used, p50, p99)


async def _call(picker: "Picker", model: str, until: float, times: list[float]) -> None:
    from nodes.routing.request import InferenceRequest

    began = clock.monotonic()
    while began < until:
        replica = await picker.acquire(InferenceRequest(model=model))
        assert replica is not None
        picker.release(replica)
        ended = clock.monotonic()
        times.append(ended - began)
        began = ended


if __name__ == "__main__":
    import django

    django.setup()
    print(json.dumps(asdict(uvloop.run(measure(**json.loads(sys.argv[1]))))))
