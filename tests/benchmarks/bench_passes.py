"""The recurring passes at several sizes: that they are linear, and how many statements each takes.

`python -m tests.benchmarks.bench_passes [--nodes 100 1000 5000]` starts one PostgreSQL and prints for each
size, with three replicas a node and a rule for every tenth node: milliseconds on the wall and of this
process's processor (the least of three passes), and statements.
"""

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.support.cluster import running_cluster

REPLICAS = 3
AGO = timedelta(minutes=3)


def plant(nodes: int) -> None:
    """The only rows: nothing was heard of the replicas for so long that all of them are in question."""
    from django.db import connection

    from nodes.models import BackendNode, ModelSchedulingConfig, NodeModel

    for model in (NodeModel, BackendNode, ModelSchedulingConfig):
        model.objects.all().delete()
    long_ago, models = clock.now() - AGO, nodes // 10
    NodeModel.objects.bulk_create(
        [
            NodeModel(
                node_id=id,
                model_name=f"m{(number + 7 * turn) % models}",
                address="a:1",
                phase="serving",
                last_used=long_ago,
                loaded_at=long_ago,
                updated_at=long_ago,
            )
            for number, id in enumerate(planted.plant(planted.processes(nodes)))
            for turn in range(REPLICAS)
        ],
        batch_size=2000,
    )
    ModelSchedulingConfig.objects.bulk_create(
        ModelSchedulingConfig(model_name=f"m{number}", min_replicas=5) for number in range(models)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def measure(nodes: int, what: str, work: Callable[[], Any], turns: int = 3) -> None:
    """Prints the cost of one pass."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    wall, cpu = [], []
    for _ in range(turns):
        began, used = clock.monotonic(), time.process_time()
        with CaptureQueriesContext(connection) as queries:
            work()
        wall.append(1000 * (clock.monotonic() - began))
        cpu.append(1000 * (time.process_time() - used))
    print(
        f"{nodes:>6} nodes  {what:<40} {min(wall):8.1f} ms, processor {min(cpu):8.1f} ms,"
        f" {len(queries):>3} statements",
        flush=True,
    )


def run(nodes: int) -> None:
    """All passes at one size."""
    from nodes.reconcilers import replicas, tasks
    from nodes.replicas import checks
    from nodes.replicas.evidence import ALIVE
    from nodes.scheduling import passes
    from nodes.scheduling.plan import plan

    now = clock.now()
    plant(nodes)
    measure(nodes, "replica pass", lambda: replicas.run_pass(tick=True))
    rules = passes.read_desired_states()
    fleet = replicas.observe(rules, None, now)
    measure(nodes, "of that, the plan", lambda: plan(fleet, rules, now, tick=True))
    measure(nodes, "liveness", tasks.liveness)
    measure(nodes, "state pass: asking and counts", tasks.state_pass)
    claimed: list[Any] = []
    measure(
        nodes,
        "state pass: claiming all replicas",
        lambda: claimed.extend(checks.claim_suspects(heard_since=now - AGO, now=now)),
        turns=1,
    )
    assert len(claimed) == nodes * REPLICAS
    findings = dict.fromkeys(claimed, ALIVE)
    measure(
        nodes,
        "state pass: writing that all are alive",
        lambda: checks.record_results(findings, now=now),
        turns=1,
    )
    measure(nodes, "drains", tasks.finish_drains)


def main() -> None:
    """Runs the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures the recurring passes.")
    options.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 5000])
    chosen = options.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        from django.db import connections

        for nodes in chosen.nodes:
            run(nodes)
        connections.close_all()


if __name__ == "__main__":
    main()
