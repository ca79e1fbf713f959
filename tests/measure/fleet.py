"""Turns: what 1,000 nodes cost, memory and start, and how soon a dead worker is noticed."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable

import uvloop

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.benchmarks.raw import Answer, Connection, percentile
from tests.benchmarks.registering import AT_ONCE, BEAT_EVERY, Fleet, secret
from tests.conftest import eventually, until
from tests.measure import load
from tests.measure.sides import PROGRAMS, Side, costs
from tests.measure.table import Goal, Rows
from tests.support.cluster import ADMIN
from tests.support.simulator import Act, Script

NODES = int(os.environ.get("NODES") or 1000)
LISTS, BEATS, PACED_SECONDS, OPERATIONS = 40, 4000, 4.0, 3
SETTLED_SECONDS = 15.0
"""Seconds after the start at which memory is read."""
DETECTION_LIMIT = 120.0
_DUE = ("last_heartbeat", "inventory_due_at", "engines_due_at", "file_port_next_check_at")
"""Columns of a node by which a controller asks its worker."""
_ENDED = ("completed", "failed", "cancelled")
GOALS = (
    Goal("registration, 16 at a time", "web + PostgreSQL ms", 2.0),
    Goal("list of 1,000 nodes", "web + PostgreSQL ms", 15),
    Goal("list of 1,000 nodes", "p99 ms", 38),
    Goal("heartbeat, closed loop", "web + PostgreSQL ms", 0.2),
    Goal("heartbeat, 100/s", "web + PostgreSQL ms", 0.5),
    Goal("operation on 1,000 nodes", "longest answer ms", 100),
    Goal("operation on 1,000 nodes", "all commanded s", 1.5),
    Goal("1,000 nodes deleted by one operation", "s", 1.5),
    Goal("1,000 nodes deleted one by one", "s", 1.5),
)
MEMORY_GOALS = (
    Goal("ready, servers up and data there", "s", 3),
    Goal("memory 15 s after the start", "all MB", 220),
    Goal("memory after load", "all MB", 300),
)
DETECTION_GOALS = (Goal("a worker is killed", "in doubt s", 5), Goal("a worker is killed", "offline s", 30))


def run(side: Side) -> Rows:
    """Measure 1,000 nodes from registration to deletion: by one operation, and one by one."""
    return uvloop.run(_Turn(side).run())


class _Turn:
    """One turn: the fleet, and the figures so far."""

    def __init__(self, side: Side) -> None:
        self.side, self.rows, self.fleet = side, Rows(), Fleet(side.web)

    async def run(self) -> Rows:
        await self.register()
        await self.list_nodes()
        await self.beat()
        self.settle()
        await self.operate()
        await self.delete_together()
        await self.register()
        await self.delete_each()
        return self.rows

    def note(self, row: str, before: dict[str, float], count: int, **more: float) -> None:
        """Store the cost of `count` requests since `before`, and other figures by their columns."""
        named = {name.replace("_", " "): value for name, value in more.items()}
        spent = costs(before, self.side.spent(), count)
        del spent["engine ms"]
        front = {"web + PostgreSQL ms": spent["web ms"] + spent["PostgreSQL ms"]}
        self.rows[row] = named | front | spent

    async def each(self, work: Callable[[Connection], object], count: int) -> list[Answer]:
        """Run so many requests, 16 at a time on connections of their own."""
        left, answers = iter(range(count)), list[Answer]()

        async def client() -> None:
            connection = Connection("127.0.0.1", self.side.web.port)
            for _ in left:
                answers.append(await work(connection))  # type: ignore[misc]
            connection.close()

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        return answers

    async def register(self) -> None:
        before, self.fleet = self.side.spent(), Fleet(self.side.web)
        seconds = await self.fleet.register(range(NODES))
        failed = sum(answer.status != 201 for answer in self.fleet.answers)
        self.note("registration, 16 at a time", before, NODES, per_second=NODES / seconds, errors=failed)
        self.settle()

    def settle(self) -> None:
        """Leave controllers nothing to ask these nodes: their workers listen for installs only."""
        due = ", ".join(f"{column} = '2100-01-01'" for column in _DUE)
        known = "inventory_at = created_at, inventory_error = '', unhealthy_at = NULL"
        # A controller writes these rows too, in the order of their ids: in another order the two deadlock.
        rows = "SELECT id FROM backend_nodes WHERE name LIKE 'gpu-%' ORDER BY id FOR UPDATE"
        self.side.cluster.execute(
            f"WITH mine AS MATERIALIZED ({rows}) UPDATE backend_nodes SET {due}, {known}"
            " WHERE id IN (TABLE mine)"
        )

    async def list_nodes(self) -> None:
        connection, answers, before = (
            Connection("127.0.0.1", self.side.web.port),
            list[Answer](),
            self.side.spent(),
        )
        for _ in range(LISTS):
            answers.append(await connection.request("GET", "/api/nodes", ADMIN, limit=60))
        connection.close()
        assert all(answer.status == 200 for answer in answers)
        times = [answer.seconds for answer in answers]
        shown = {"p50_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99)}
        self.note(f"list of {NODES:,} nodes", before, LISTS, **shown)

    async def beat(self) -> None:
        ids, turn = self.fleet.ids, iter(range(BEATS))

        async def send(connection: Connection) -> Answer:
            number = next(turn)
            node, figures = number % NODES, {"available_vram": 2**30 + number, "available_ram": 2**30}
            headers = {"Authorization": f"Bearer {secret(node)}"}
            return await connection.request("POST", f"/api/node/{ids[node]}/heartbeat", headers, figures)

        before, begun = self.side.spent(), clock.monotonic()
        answers = await self.each(send, BEATS)
        rate = BEATS / (clock.monotonic() - begun)
        failed = sum(answer.status != 200 for answer in answers)
        self.note("heartbeat, closed loop", before, BEATS, per_second=rate, errors=failed)
        before = self.side.spent()
        answers = await self.fleet.beat(PACED_SECONDS)
        failed = sum(answer.status != 200 for answer in answers)
        rate = len(answers) / PACED_SECONDS
        self.note(
            f"heartbeat, {NODES / BEAT_EVERY:.0f}/s", before, len(answers), per_second=rate, errors=failed
        )

    async def operate(self) -> None:
        """Install on all nodes, some times; their simulated workers answer at once."""
        ids, cluster, web = list(self.fleet.ids.values()), self.side.cluster, self.side.web
        script, times, before = Script({"backend.install": Act()}), list[tuple[float, ...]](), {}
        async with planted.listening(cluster, ids, [""] * len(ids), script) as simulated:
            before = self.side.spent()
            for _ in range(OPERATIONS):
                sent, begun = simulated.count("backend.install"), clock.monotonic()
                path = f"/api/backends/install/{time.monotonic_ns()}"
                answer = await asyncio.to_thread(cluster.post, web, path, {"nodes": ids})
                answered = clock.monotonic()
                assert answer.status_code < 300, answer.text
                await until(lambda sent=sent: simulated.count("backend.install") - sent >= len(ids))  # type: ignore[misc]
                commanded = max(one.at for one in simulated.received("backend.install")[-len(ids) :])
                await self.ended(answer.json()["jobID"])
                times.append((answered - begun, commanded - answered, clock.monotonic() - answered))
        answers, commanded_after, ended_after = zip(*times, strict=True)
        self.note(
            f"operation on {NODES:,} nodes", before, OPERATIONS,
            longest_answer_ms=1000 * max(answers), all_commanded_s=max(commanded_after),
            all_ended_s=max(ended_after),
        )  # fmt: skip

    async def ended(self, job: str) -> None:
        """Wait for the operation's end."""
        query = "SELECT status FROM operations WHERE id = %s"
        await until(lambda: self.side.cluster.rows(query, job)[0][0] in _ENDED)

    async def delete_together(self) -> None:
        body = {"verb": "remove", "ids": list(self.fleet.ids.values())}
        before, begun = self.side.spent(), clock.monotonic()
        answer = await asyncio.to_thread(self.side.cluster.post, self.side.web, "/api/nodes/bulk", body)
        assert answer.status_code == 202, answer.text
        await self.ended(answer.json()["jobID"])
        self.note(f"{NODES:,} nodes deleted by one operation", before, NODES, s=clock.monotonic() - begun)

    async def delete_each(self) -> None:
        left = iter(self.fleet.ids.values())
        before, begun = self.side.spent(), clock.monotonic()
        answers = await self.each(
            lambda connection: connection.request("DELETE", f"/api/nodes/{next(left)}", ADMIN, limit=60),
            NODES,
        )
        failed = sum(answer.status >= 300 for answer in answers)
        seconds = clock.monotonic() - begun
        self.note(f"{NODES:,} nodes deleted one by one", before, NODES, s=seconds, errors=failed)


def memory(side: Side) -> Rows:
    """Start the product anew, and read its memory when idle, after load, and with 1,000 nodes."""
    side.stop()
    rows: Rows = {"ready, servers up and data there": {"s": side.start()}}
    time.sleep(SETTLED_SECONDS)
    rows[f"memory {SETTLED_SECONDS:.0f} s after the start"] = _memory(side)
    for kind in load.KINDS * 2:
        load.send(side.web.url, kind, 32, 0)
    rows["memory after load"] = _memory(side)
    uvloop.run(Fleet(side.web).register(range(NODES)))
    for _ in range(3):
        assert side.cluster.get(side.web, "/api/nodes").status_code == 200
    rows[f"memory with {NODES:,} nodes"] = _memory(side)
    side.cluster.execute("TRUNCATE backend_nodes CASCADE")
    side.insert_node()
    return rows


def _memory(side: Side) -> dict[str, float]:
    """Return the same columns for trees with other processes."""
    return {f"{name} MB": 0.0 for name in PROGRAMS} | side.memory()


def detection(side: Side) -> Rows:
    """Kill a worker; measure until its node is not healthy any more, and until it is offline."""
    cluster, web = side.cluster, side.web
    worker = cluster.worker("victim", web, LOCALAI_HEARTBEAT_INTERVAL="10s")

    def status() -> str:
        return str((cluster.node(web, "victim") or {}).get("status"))

    eventually(lambda: status() == "healthy", seconds=60, what="the worker's node is healthy")
    eventually(lambda: "connected to the message bus" in worker.output(), seconds=60, what="its bus is there")
    worker.kill()
    begun, seen = clock.monotonic(), dict[str, float]()
    columns: Iterable[tuple[str, Callable[[str], bool]]] = (
        ("in doubt s", lambda now: now != "healthy"), ("offline s", lambda now: now == "offline"),
    )  # fmt: skip
    for column, holds in columns:
        eventually(lambda holds=holds: holds(status()), seconds=DETECTION_LIMIT, what=column)  # type: ignore[misc]
        seen[column] = clock.monotonic() - begun
    cluster.processes.remove(worker)
    return {"a worker is killed": seen}
