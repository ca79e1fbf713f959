"""Direct gRPC calls to the echo engine, as the reference for the cluster's own path.

`python -m tests.benchmarks.bench_direct [seconds]` prints calls per second and the p50 and p99 of one call at
1, 8 and 32 parallel calls.
"""

import asyncio
import sys
from dataclasses import dataclass

from localai_cluster.kit import clock
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import PredictOptions
from tests.support.backends import TOKEN, running_backend

CONCURRENCY = (1, 8, 32)
MODEL = "echo"


@dataclass(frozen=True)
class Figures:
    """One measurement; times in milliseconds."""

    clients: int
    per_second: float
    p50: float
    p99: float


async def measure(client: BackendClient, clients: int, seconds: float, identity: str = MODEL) -> Figures:
    """Return the figures of `clients` callers that call as fast as they can."""
    request = PredictOptions(Embeddings="a cat", ModelIdentity=identity)
    times: list[float] = []
    begin = clock.monotonic()

    async def caller() -> None:
        started = clock.monotonic()
        while started < begin + seconds:
            await client.embedding(request, 10.0)
            ended = clock.monotonic()
            times.append(ended - started)
            started = ended

    await asyncio.gather(*(caller() for _ in range(clients)))
    took = clock.monotonic() - begin
    times.sort()
    return Figures(
        clients, len(times) / took, 1000 * times[len(times) // 2], 1000 * times[len(times) * 99 // 100]
    )


async def direct(seconds: float) -> list[Figures]:
    """Return the figures for every concurrency, all on one engine process."""
    async with running_backend("echo", model=MODEL) as backend:
        client = BackendClient(backend.address, TOKEN, counted=True)
        await measure(client, 8, 0.5)
        figures = [await measure(client, clients, seconds) for clients in CONCURRENCY]
        await client.close()
    return figures


def main() -> None:
    """Print one line for each concurrency."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    for line in asyncio.run(direct(seconds)):
        print(
            f"direct gRPC, {line.clients:>2} at a time: {line.per_second:6.0f} calls/s, "
            f"p50 {line.p50:.2f} ms, p99 {line.p99:.2f} ms"
        )


if __name__ == "__main__":
    main()
