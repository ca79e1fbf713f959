"""Figures over time: bytes of a node and hour in each table, and the processor time of sampling and
packing.

`python -m tests.benchmarks.bench_figures [--nodes 1000]` starts one PostgreSQL, plants so many nodes with
eight GPUs, and measures samples of all of them. Then it writes a whole hour and a day of 50 nodes whose
figures wander as real ones do, packs them, and computes what 1,000 nodes keep in the steady state. It
prints the sizes of two forms of a packed hour, and the time to read a week of eight GPUs.
"""

import argparse
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.benchmarks.processor import spent
from tests.support.cluster import running_cluster

GPUS, FEW, TURNS = 8, 50, 20
GIB = 2**30
START = datetime(2026, 8, 22, tzinfo=UTC)


def plant(nodes: int) -> None:
    """Insert nodes with eight GPUs and a current heartbeat."""
    from nodes.models import BackendNode

    planted.plant(planted.processes(nodes))
    readings = {
        "total_vram": 80 * GIB,
        "free_vram": 30 * GIB,
        "utilization": 87,
        "temperature": 61,
        "power": 540,
    }
    names = {"uuid": "GPU-5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11", "name": "NVIDIA H100 80GB HBM3"}
    rest = {"ecc_errors": 0, "driver": "550.54.15, CUDA 12.4"}
    BackendNode.objects.update(
        gpus=[{"index": index} | names | readings | rest for index in range(GPUS)],
        total_vram=640 * GIB,
        available_vram=240 * GIB,
        total_ram=1024 * GIB,
        available_ram=700 * GIB,
        total_disk=2**43,
        available_disk=2**42,
        last_heartbeat=clock.now() + timedelta(hours=1),
    )


def wander(chance: random.Random, count: int) -> Iterator[list[int]]:
    """Yield the numbers of a node's samples: memory changes with loads, all others change constantly."""
    node = [400_000, 300_000, 4_000_000]
    gpus = [[index, 50_000, 80, 60, 500] for index in range(GPUS)]
    for _ in range(count):
        node[1] += chance.randrange(-200, 201)
        node[2] += chance.random() < 0.02 and chance.randrange(5000)
        for gpu in gpus:
            if chance.random() < 0.01:
                gpu[1] = chance.randrange(80_000)
            gpu[1] += chance.randrange(-40, 41)
            gpu[2] = min(max(gpu[2] + chance.randrange(-15, 16), 0), 100)
            gpu[3] = min(max(gpu[3] + chance.randrange(-1, 2), 30), 90)
            gpu[4] = min(max(gpu[4] + chance.randrange(-40, 41), 60), 700)
        node[0] = sum(gpu[1] for gpu in gpus)
        yield [*node, *(number for gpu in gpus for number in gpu)]


def write_hour(start: datetime) -> None:
    """Write samples of one hour for some nodes."""
    from django.db import connection

    from nodes.figures import partitions, store

    partitions.create_missing(
        (table, at) for table in store.TABLES for at in (start, start + timedelta(hours=1))
    )
    series = [wander(random.Random(number), 360) for number in range(FEW)]
    with connection.cursor() as cursor, cursor.copy("COPY figure_samples FROM STDIN") as copy:
        for turn in range(360):
            for number, numbers in enumerate(series):
                subject = f"node/5b1d1f1e-8a58-4f2f-9d0b-{number:012d}"
                copy.write_row((subject, start + timedelta(seconds=10 * turn), next(numbers)))


def cost(postgres: int) -> tuple[float, float]:
    """Return the processor seconds of this process, and of PostgreSQL."""
    return time.process_time(), spent(postgres)


def size(table: str) -> int:
    """Return the bytes of a table with indexes and large values."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits WHERE inhparent = %s::regclass",
            [table],
        )
        return int(cursor.fetchone()[0])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    nodes = parser.parse_args().nodes
    with running_cluster() as cluster:
        planted.set_up(cluster)
        from django.db import connections

        plant(nodes)
        measure(nodes, cluster.postgres.pid)
        connections.close_all()


def measure(nodes: int, postgres: int) -> None:
    """Sample, pack and read; print the cost."""
    from django.db import connection

    from nodes.figures import store
    from nodes.figures.store import Span

    base = clock.now()
    before = cost(postgres)
    for turn in range(TURNS):
        at = base + timedelta(seconds=10 * turn)
        assert store.store_samples(heard_since=base - timedelta(days=1), now=at) == nodes + 1
    own, theirs = ((after - began) / TURNS for after, began in zip(cost(postgres), before, strict=True))
    print(f"sample of {nodes:,} nodes: {1000 * own:.1f} ms of the process ({10 * own:.3f} % of its time),")
    print(f"  {1000 * theirs:.1f} ms of PostgreSQL")
    for table in store.TABLES:
        table.drop(before=START + timedelta(days=9999))
    bytes_of, packing = dict[str, float](), 0.0
    for hour in range(24):
        write_hour(START + timedelta(hours=hour))
        if not hour:
            bytes_of["samples"] = size("figure_samples") / FEW
        began = time.process_time()
        assert store.maintain(now=START + timedelta(hours=hour + 1) + store.LATE_SAMPLES_GRACE, limit=600)
        packing += time.process_time() - began
    bytes_of["hours"], bytes_of["days"] = size("figure_hours") / FEW / 24, size("figure_days") / FEW
    print("bytes of a node: " + ", ".join(f"{name} {number:,.0f}" for name, number in bytes_of.items()))
    total = nodes * (2.1 * bytes_of["samples"] + 72 * bytes_of["hours"] + 397 * bytes_of["days"])
    print(f"{nodes:,} nodes at most (2.1 hours, 3 days, 397 days): {total / 1e9:.2f} GB")
    all_nodes = packing / 24 * nodes / FEW
    print(f"packing an hour of {nodes:,} nodes: {all_nodes:.1f} s of the process ({all_nodes / 36:.3f} %)")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO figure_days SELECT at - n * interval '1 day', subject, body"
            " FROM figure_days, generate_series(1, 6) AS n"
        )
        began = time.process_time()
        week = Span(START - timedelta(days=6), timedelta(hours=1), 170)
        for _ in range(TURNS):
            columns = store.read(["node/5b1d1f1e-8a58-4f2f-9d0b-000000000001"], week)
        took = (time.process_time() - began) / TURNS
        assert all(len(subject) == 3 + 4 * GPUS for subject in columns.values())
        print(f"a week of a node: {1000 * took:.1f} ms of the process")
        print(f"packed hour of minutes: {column(cursor, 'body', 'figure_hours'):,.0f} bytes")
        cursor.execute(
            "CREATE TEMP TABLE arrays AS SELECT array_agg(number ORDER BY place, at) AS numbers"
            " FROM figure_samples, unnest(numbers) WITH ORDINALITY AS n(number, place)"
            " WHERE extract(second FROM at) = 0 GROUP BY subject, date_trunc('hour', at)"
        )
        print(f"  as an array of PostgreSQL: {column(cursor, 'numbers', 'arrays'):,.0f} bytes")


def column(cursor: Any, name: str, table: str) -> float:
    """Return the mean size of a column."""
    cursor.execute(f"SELECT avg(pg_column_size({name})) FROM {table}")
    return float(cursor.fetchone()[0] or 0)


if __name__ == "__main__":
    main()
