"""The registry under load: a fleet registers, beats, and is listed.

`python -m tests.benchmarks.bench_registry [--workers 1000] [--seconds 60]` starts servers and one web
process, then prints: registrations a second (16 at a time, by the stock worker's rules), latency of
heartbeats from a fleet that beats every 10 s with the statements they cost, and the list of nodes at several
sizes as a multiple of the bare SQL fetch of the same rows in the same run. The figures beside ours are the
reference's, measured on a like machine. Load generator and servers share this machine: compare figures of
one run only.
"""

import argparse
import asyncio
import hashlib
import itertools
import statistics
from collections import Counter
from collections.abc import Awaitable, Iterator
from urllib.parse import quote

import psycopg
import uvloop

from localai_cluster.kit import clock
from tests.benchmarks.counting import StatementCounter
from tests.benchmarks.raw import Answer, Connection, percentile
from tests.support.cluster import ADMIN, TOKEN, Cluster, Process, running_cluster

AT_ONCE = 16
BEAT_EVERY = 10.0
LOOKS = 7
SIZES = (100, 1000, 5000)
_REFERENCE = {"register": 237, "beat_p50": 5.0, "beat_p99": 12.0}
_FETCH = (
    "SELECT * FROM backend_nodes ORDER BY name",
    "SELECT node_id, count(*), sum(in_flight) FROM node_models WHERE state = 'loaded' GROUP BY node_id",
    "SELECT node_id, key, value FROM node_labels ORDER BY node_id, key",
)


def secret(number: int) -> str:
    """The secret of worker number so-and-so."""
    return hashlib.sha256(f"worker {number}".encode()).hexdigest()


def registration(number: int) -> dict[str, object]:
    """What a worker with one GPU tells."""
    return {
        "name": f"gpu-{number:05d}",
        "address": f"10.0.{number // 250}.{number % 250}:50051",
        "http_address": f"10.0.{number // 250}.{number % 250}:50050",
        "token": TOKEN,
        "total_vram": 24 * 1024**3,
        "available_vram": 24 * 1024**3,
        "total_ram": 64 * 1024**3,
        "available_ram": 48 * 1024**3,
        "total_disk": 500 * 1024**3,
        "available_disk": 200 * 1024**3,
        "gpu_vendor": "nvidia",
        "gpu_compute_capability": "8.9",
        "capability": "nvidia-cuda-12",
        "max_replicas_per_model": 2,
        "labels": {"tier": "fast", "zone": f"z{number % 8}", "node.replica-slots": "2"},
    }


class Fleet:
    """Workers that register and beat against one web process."""

    def __init__(self, web: Process) -> None:
        self._port = web.port
        self.ids: dict[int, str] = {}
        self.answers: list[Answer] = []

    async def register(self, numbers: range) -> float:
        """Registers these workers, 16 at a time, each trying again from 2 s on; answers the seconds."""
        began, todo = clock.monotonic(), iter(numbers)
        await asyncio.gather(*(self._registrar(todo) for _ in range(AT_ONCE)))
        return clock.monotonic() - began

    async def _registrar(self, numbers: Iterator[int]) -> None:
        connection = Connection("127.0.0.1", self._port)
        for number in numbers:
            pause = 2.0
            while not await self._register_one(connection, number):
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
        connection.close()

    async def _register_one(self, connection: Connection, number: int) -> bool:
        headers = {"Authorization": f"Bearer {TOKEN}", "X-LocalAI-Node-Secret": secret(number)}
        answer = await connection.request("POST", "/api/node/register", headers, registration(number))
        self.answers.append(answer)
        if answer.status != 201:
            return False
        self.ids[number] = str(answer.json()["id"])
        return True

    async def beat(self, seconds: float) -> list[Answer]:
        """Every worker beats every 10 s, spread evenly, for so many seconds; answers all answers."""
        answers: list[Answer] = []
        until = clock.monotonic() + seconds
        step = BEAT_EVERY / len(self.ids)
        await asyncio.gather(
            *(self._heart(number, place * step, until, answers) for place, number in enumerate(self.ids))
        )
        return answers

    async def _heart(self, number: int, offset: float, until: float, answers: list[Answer]) -> None:
        connection = Connection("127.0.0.1", self._port)
        headers = {"Authorization": f"Bearer {secret(number)}"}
        path = f"/api/node/{self.ids[number]}/heartbeat"
        due = clock.monotonic() + offset
        for count in itertools.count():
            if due >= until:
                break
            await asyncio.sleep(max(due - clock.monotonic(), 0))
            figures = {"available_vram": 20 * 1024**3 - count, "available_ram": 40 * 1024**3}
            answers.append(await connection.request("POST", path, headers, figures))
            due += BEAT_EVERY
        connection.close()


async def registering(fleet: Fleet, count: int) -> None:
    """Prints the rate of registrations of so many more workers."""
    first = len(fleet.ids)
    took = await fleet.register(range(first, first + count))
    times = [answer.seconds for answer in fleet.answers]
    statuses = Counter(answer.status for answer in fleet.answers)
    print(
        f"register {count} workers, {AT_ONCE} at a time: {count / took:.0f}/s"
        f" (reference {_REFERENCE['register']}/s), p50 {percentile(times, 0.5):.0f} ms,"
        f" p99 {percentile(times, 0.99):.0f} ms, answers {dict(statuses)},"
        f" distinct ids {len(set(fleet.ids.values())) - first}"
    )


async def lateness(late: list[float]) -> None:
    """Keeps how late this very process was: on a busy machine a slow beat may be the generator's own."""
    while True:
        due = clock.monotonic() + 0.05
        await asyncio.sleep(0.05)
        late.append(clock.monotonic() - due)


async def beating(fleet: Fleet, seconds: float) -> None:
    """Prints the latency of beats, and how late the load generator itself was."""
    late: list[float] = []
    watching = asyncio.create_task(lateness(late))
    answers = await fleet.beat(seconds)
    watching.cancel()
    times = [answer.seconds for answer in answers]
    print(
        f"{len(fleet.ids)} nodes beat every {BEAT_EVERY:.0f} s for {seconds:.0f} s:"
        f" p50 {percentile(times, 0.5):.1f} ms, p99 {percentile(times, 0.99):.1f} ms"
        f" (reference with 200 nodes: {_REFERENCE['beat_p50']} and {_REFERENCE['beat_p99']} ms),"
        f" answers {dict(Counter(answer.status for answer in answers))},"
        f" generator late by p99 {percentile(late, 0.99):.1f} ms, at most {1000 * max(late):.0f} ms"
    )


async def listing(web: Process, cluster: Cluster) -> None:
    """Prints the time of the list as a multiple of the bare fetch of the same rows."""
    bare = await asyncio.to_thread(fetch, cluster)
    connection, times = Connection("127.0.0.1", web.port), []
    for _ in range(LOOKS):
        answer = await connection.request("GET", "/api/nodes", ADMIN, limit=60)
        assert answer.status == 200, answer.body
        times.append(answer.seconds)
    connection.close()
    shown, took = len(answer.json()), statistics.median(times)
    print(
        f"list of {shown} nodes: {1000 * took:.1f} ms, {took / bare:.1f} times the bare fetch"
        f" ({1000 * bare:.1f} ms), {len(answer.body) // 1024} kB"
    )


def fetch(cluster: Cluster) -> float:
    """Seconds that the rows of the list take by plain SQL, fetched and turned into Python values."""
    times = []
    with psycopg.connect(cluster.postgres.url) as link:
        for _ in range(LOOKS):
            began = clock.monotonic()
            for statement in _FETCH:
                link.execute(statement).fetchall()
            times.append(clock.monotonic() - began)
    return statistics.median(times)


async def run(cluster: Cluster, web: Process, workers: int, seconds: float) -> Fleet:
    """All parts, smallest list first."""
    fleet = Fleet(web)
    await fleet.register(range(SIZES[0]))
    await listing(web, cluster)
    fleet.answers.clear()
    await registering(fleet, workers)
    await beating(fleet, seconds)
    for size in SIZES[1:]:
        await fleet.register(range(len(fleet.ids), size))
        await listing(web, cluster)
    return fleet


async def count_statements(web: Process, fleet: Fleet, counter: StatementCounter) -> None:
    """Prints what each thing costs in statements, through a web process whose connections are counted."""
    counted = Fleet(web)
    counted.ids = dict(itertools.islice(fleet.ids.items(), 200))
    connection = Connection("127.0.0.1", web.port)

    async def shown(what: str, work: Awaitable[object], divisor: int) -> None:
        before = counter.statements
        await work
        print(f"{what}: {(counter.statements - before) / divisor:.2f} statements")

    first = max(fleet.ids) + 1
    await shown("a first registration", counted.register(range(first, first + 50)), 50)
    await shown("a registration again", counted.register(range(first, first + 50)), 50)
    await shown("a second of heartbeats from 250 nodes", counted.beat(BEAT_EVERY), int(BEAT_EVERY))
    await shown(
        f"list of {len(fleet.ids) + 50} nodes", connection.request("GET", "/api/nodes", ADMIN, limit=60), 1
    )
    connection.close()


def main() -> None:
    """Runs the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures the registry.")
    options.add_argument("--workers", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=60.0)
    chosen = options.parse_args()
    with running_cluster() as cluster:
        fleet = uvloop.run(run(cluster, cluster.web(), chosen.workers, chosen.seconds))
        server, folder = cluster.postgres.sockets, cluster.home / "count"
        folder.mkdir()
        url = cluster.postgres.url.replace(quote(str(server), safe=""), quote(str(folder), safe=""))
        with StatementCounter(folder, server) as counter:
            uvloop.run(count_statements(cluster.web(DATABASE_URL=url), fleet, counter))


if __name__ == "__main__":
    main()
