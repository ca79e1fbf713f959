"""Decisions of placement on a large fleet: the chosen node, and the reason.

`python -m tests.benchmarks.bench_decisions [--nodes 1000] [--models 32]` starts one PostgreSQL with so many
nodes of eight GPUs and three replicas each. It prints decisions per second in four ways: by the plain
functions on rows that are all read again; on the fleet in memory alone, where each decision changes a node
and a tenth of the nodes is read again every second; on the rows, with the record of the decision stored; and
with the slot reserved too. The models differ in their needs. Each rate is printed with the processor time of
this process.
"""

import argparse
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.support.cluster import running_cluster

GIB = 2**30
GPUS, EACH = 8, 24 * GIB
REPLICAS = 3
SECONDS = 3.0


def plant(nodes: int) -> None:
    """Insert the fleet."""
    from django.db import connection

    from nodes.models import BackendNode, NodeModel

    now, chance, ids = clock.now(), random.Random(1), planted.plant(planted.processes(nodes))
    rows = list(BackendNode.objects.all())
    for row in rows:
        free = [chance.randrange(EACH) for _ in range(GPUS)]
        row.available_vram, row.total_vram, row.vram_read_at = sum(free), GPUS * EACH, now
        row.total_disk, row.available_disk, row.max_replicas_per_model = 2**41, 2**40, 4
        row.gpus = [
            {"index": index, "uuid": f"GPU-{index}", "name": "L4", "total_vram": EACH, "free_vram": left,
             "utilization": None}
            for index, left in enumerate(free)
        ]  # fmt: skip
    columns = ["available_vram", "total_vram", "vram_read_at", "total_disk", "available_disk", "gpus"]
    BackendNode.objects.bulk_update(rows, [*columns, "max_replicas_per_model"], batch_size=500)
    NodeModel.objects.bulk_create(
        NodeModel(
            node_id=id,
            model_name=f"other-{(number + turn) % 300}",
            address="a:1",
            phase="serving",
            last_used=now - timedelta(minutes=1),
            loaded_at=now - timedelta(minutes=1),
            vram_needed=GIB,
        )
        for number, id in enumerate(ids)
        for turn in range(REPLICAS)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def measure(what: str, decide: Callable[[], Any], threads: int = 1) -> None:
    """Print the rate, after a first round that is not counted."""
    from django.db import connection

    def again() -> int:
        count, now = 0, clock.monotonic()
        while now < until:
            decide()
            before, now = now, clock.monotonic()
            times.append(now - before)
            count += 1
        connection.close()
        return count

    decide()
    times: list[float] = []
    began, used = clock.monotonic(), time.process_time()
    until = began + SECONDS
    with ThreadPoolExecutor(threads) as pool:
        count = sum(future.result() for future in [pool.submit(again) for _ in range(threads)])
    took, used = clock.monotonic() - began, time.process_time() - used
    best = 1000 * sorted(times)[len(times) // 20]
    print(
        f"{what:<58} {count / took:6.0f} a second; one in twenty takes less than {best:.2f} ms,"
        f" the processor {1000 * used / count:.2f} ms each",
        flush=True,
    )


class Decisions:
    """One decision in each of the four ways, for the models in turn."""

    def __init__(self, models: int) -> None:
        from nodes.decisions.fleet_cache import FleetCache
        from nodes.placement.choose import Need
        from nodes.placement.explain import FleetView

        self.chance = random.Random(2)
        needs = [Need(vram=self.chance.randrange(1, 40 * GIB)) for _ in range(models)]
        self.asked = {f"m{number}": FleetView((), need) for number, need in enumerate(needs)}
        self.mirror = FleetCache()
        self.fleet = self._in_memory()
        self.beaten = clock.monotonic()

    def _in_memory(self) -> Any:
        from nodes.decisions import fleet_cache
        from nodes.placement.ranking import RankedFleet

        fleet = RankedFleet()
        for node in fleet_cache.read_fleet("any"):
            fleet.put(node)
        return fleet

    def turn(self) -> Any:
        """Return the next model, and its question."""
        name = self.chance.choice(list(self.asked))
        return name, self.asked[name]

    def plain(self) -> None:
        """Decide by reading all rows and examining all nodes."""
        from nodes.decisions import fleet_cache

        name, asked = self.turn()
        replace(asked, nodes=fleet_cache.read_fleet(name)).decide()

    def in_memory(self) -> None:
        """Decide in memory; each decision adds a request, and a tenth of the nodes changes every second."""
        _, asked = self.turn()
        _, decision = self.fleet.decide(asked)
        due = int((clock.monotonic() - self.beaten) * len(self.fleet.nodes) / 10)
        self.beaten = clock.monotonic() if due else self.beaten
        for id in [decision.node.id, *self.chance.sample(list(self.fleet.nodes), due)]:
            node = self.fleet.nodes[id]
            free = self.chance.randrange(GPUS * EACH)
            self.fleet.put(replace(node, in_flight=node.in_flight + 1, free_vram=free, available_vram=free))

    def recorded(self) -> None:
        """Decide on the rows, and store the record in a transaction of its own."""
        from nodes.decisions import decision_log
        from nodes.loading.load_snapshots import encode_load
        from nodes.placement.load_decision import LoadQuestion, decide_load

        (name, asked), load = self.turn(), uuid4()
        view, decision = self.mirror.decide(name, asked)
        question = LoadQuestion(view)
        seen = decision_log.store_snapshot(encode_load(str(load), name, question), now=clock.now())
        told = decide_load(question, decision)
        decision_log.record(decision_log.DecisionRecord(name, load, told, seen), now=clock.now())

    def taken(self) -> None:
        """Decide as a load does: slot, memory and record in one transaction."""
        from nodes.decisions import decision_log
        from nodes.loading.load_snapshots import encode_load
        from nodes.placement.load_decision import LoadQuestion, decide_load
        from nodes.replicas import slots

        (name, asked), load = self.turn(), UUID(int=self.chance.getrandbits(128))
        view, decision = self.mirror.decide(name, asked)
        assert decision.node is not None
        question = LoadQuestion(view)
        told = decide_load(question, decision)
        seen = decision_log.store_snapshot(encode_load(str(load), name, question), now=clock.now())
        slots.reserve(
            decision.node,
            name,
            attempt=(load, 1),
            backend="b",
            now=clock.now(),
            need=asked.need,
            why=decision_log.DecisionRecord(name, load, told, seen),
        )


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures decisions.")
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("--models", type=int, default=32)
    chosen = options.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        from django.db import connections

        plant(chosen.nodes)
        decisions = Decisions(chosen.models)
        print(f"{chosen.nodes} nodes of {GPUS} GPUs, {chosen.models} models", flush=True)
        measure("plain, every row read", decisions.plain)
        measure("decided, in memory", decisions.in_memory)
        for threads in (1, 4):
            measure(f"decided on the rows and recorded, {threads} at a time", decisions.recorded, threads)
            measure(f"the same with the slot taken, {threads} at a time", decisions.taken, threads)
        connections.close_all()


if __name__ == "__main__":
    main()
