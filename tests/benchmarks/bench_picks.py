"""Find-and-lock and release: a replica is picked, counted in and counted out, without any request.

`python -m tests.benchmarks.bench_picks [--seconds N] [--nodes N]` starts one PostgreSQL and prints the pairs
per second of 1, 16 and 64 callers, through the picker of one web process and through the pickers of two. It
also prints the pairs of the textbook solution in the same run, and those of the reference's registry on a
similar machine. At last it prints the capacity of PostgreSQL: the pairs, and its processor time for each,
with 1, 4 and 16 web processes, and so the pairs per second that one core of PostgreSQL can execute.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import psutil

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.benchmarks.picking import Figures
from tests.support.cluster import ROOT, Cluster, running_cluster

REFERENCE = {1: 639, 16: 1382, 64: 1186}
"""Pairs a second on a similar machine, with a pool of 64 connections; a tenth less with 1,000 nodes."""
REPLICAS, OTHERS = 8, 3
MODEL = "m"
PROCESSES, CALLERS = (1, 4, 16), 16


def plant(nodes: int) -> None:
    """Insert healthy nodes; the first few have a replica of the model, and each has some of other models."""
    from django.db import connection

    from nodes.models import NodeModel

    used, ids = clock.now() - timedelta(minutes=1), planted.plant(planted.processes(nodes))
    own = [(id, MODEL) for id in ids[:REPLICAS]]
    others = [
        (id, f"other-{(number + OTHERS * turn) % nodes}")
        for number, id in enumerate(ids)
        for turn in range(OTHERS)
    ]
    NodeModel.objects.bulk_create(
        NodeModel(node_id=id, model_name=model, address="127.0.0.1:1", phase="serving", last_used=used)
        for id, model in own + others
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")  # as PostgreSQL itself does within a minute


def measured(cluster: Cluster, processes: int, **order: Any) -> list[Figures]:
    """Return the figures of `processes` parallel processes."""
    text = json.dumps({"url": cluster.postgres.url, "model": MODEL, **order})
    command = [sys.executable, "-m", "tests.benchmarks.picking", text]
    children = [
        subprocess.Popen(
            command, cwd=ROOT, env=dict(os.environ), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(processes)
    ]
    for child in children:
        assert child.stdout
        child.stdout.readline()
    for child in children:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    return [Figures(**json.loads(child.communicate()[0])) for child in children]


def run(cluster: Cluster, callers: int, seconds: float) -> None:
    """Print a line each for the textbook solution, one web process, one by prefix, and two web processes."""
    [plain] = measured(cluster, 1, callers=callers, seconds=seconds, plain=True)
    basis = plain.pairs / plain.seconds
    for what, found in (
        ("textbook", [plain]),
        ("one process", measured(cluster, 1, callers=callers, seconds=seconds)),
        ("by prefix", measured(cluster, 1, callers=callers, seconds=seconds, by_prefix=True)),
        ("two processes", measured(cluster, 2, callers=(callers + 1) // 2, seconds=seconds)),
    ):
        rate = sum(one.pairs / one.seconds for one in found)
        pairs = sum(one.pairs for one in found)
        print(
            f"{callers:>2} callers, {what:<13}: {rate:6.0f} pairs/s, {rate / basis:5.1f} times the textbook,"
            f" {rate / REFERENCE[callers]:5.1f} times the reference's {REFERENCE[callers]};"
            f" {sum(one.statements for one in found) / pairs:.3f} statements,"
            f" {1e6 * sum(one.cpu for one in found) / pairs:.0f} µs of processor a pair;"
            f" p50 {max(one.p50 for one in found):.2f}, p99 {max(one.p99 for one in found):.2f} ms",
            flush=True,
        )


def carry(cluster: Cluster, processes: int, seconds: float) -> None:
    """Print the pairs of `processes` web processes with 16 callers each, and their cost for PostgreSQL."""
    before = used_by(cluster)
    found = measured(cluster, processes, callers=CALLERS, seconds=seconds)
    pairs, cost = sum(one.pairs for one in found), used_by(cluster) - before
    rate = sum(one.pairs / one.seconds for one in found)
    print(
        f"{processes:>2} web processes: {rate:6.0f} pairs/s, {1e6 * cost / pairs:.0f} µs of PostgreSQL a"
        f" pair, so {pairs / cost:.0f} pairs/s on a core of it;"
        f" {sum(one.statements for one in found) / pairs:.3f} statements,"
        f" {1e6 * sum(one.cpu for one in found) / pairs:.0f} µs of the processes a pair;"
        f" p50 {max(one.p50 for one in found):.2f}, p99 {max(one.p99 for one in found):.2f} ms",
        flush=True,
    )


def used_by(cluster: Cluster) -> float:
    """Return the processor seconds of PostgreSQL, including ended connections."""
    server = psutil.Process(cluster.postgres.pid)
    used = server.cpu_times()
    running = [child.cpu_times() for child in server.children()]
    ended = used.children_user + used.children_system
    return used.user + used.system + ended + sum(child.user + child.system for child in running)


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures picks and releases.")
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--nodes", type=int, nargs="+", default=[REPLICAS, 1000])
    chosen = options.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        from django.db import connections

        from tests.support.replicas import forget_nodes

        for nodes in chosen.nodes:
            forget_nodes()
            plant(nodes)
            connections.close_all()
            print(f"{nodes} nodes in the table, {REPLICAS} replicas of the model", flush=True)
            for callers in REFERENCE:
                run(cluster, callers, chosen.seconds)
            for processes in PROCESSES:
                carry(cluster, processes, chosen.seconds)


if __name__ == "__main__":
    main()
