"""A claim among ten thousand waiting and a thousand running rows, of operations and of intents.

`python -m tests.benchmarks.bench_claim [--waiting 10000] [--running 1000]` starts one PostgreSQL and fills
the tables (a tenth as many nodes as intents). For claims of 1, 16 and 256 rows it prints milliseconds, the
processor time of this process, and statements; with `--plans` also PostgreSQL's query plans.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.support.cluster import running_cluster

TURNS = 9
LEASE = timedelta(hours=1)


def fill_operations(waiting: int, running: int) -> None:
    """Insert loads: most are due, the others are running."""
    from operations.models import Operation, Status

    now = clock.now()
    rest = {"status": Status.PENDING, "next_attempt_at": now - timedelta(seconds=5)}
    busy = {"status": Status.PROCESSING, "lease_owner": "x", "lease_until": now + LEASE, "fence": 1}
    rows = [
        Operation(kind="model_load", key=f"model:{number}", element=f"m{number}", **state)
        for number, state in enumerate([rest] * waiting + [busy] * running)
    ]
    Operation.objects.bulk_create(rows, batch_size=2000)


def fill_intents(waiting: int, running: int) -> None:
    """Insert installs of ten backends on each node, each with its own operation."""
    from nodes.models import PendingBackendOp
    from operations.models import Operation, OperationTarget, Status, TargetStatus

    now, count = clock.now(), waiting + running
    nodes = planted.plant(planted.processes(count // 10))
    operations, parts, intents = [], [], []
    for number in range(count):
        node, busy = nodes[number % len(nodes)], number >= waiting
        status = Status.PROCESSING if busy else Status.PENDING
        operation = Operation(
            kind="backend_install", key=f"{number}", element="b", status=status, by_parts=True
        )
        lease: dict[str, Any] = {"lease_owner": "x", "lease_until": now + LEASE, "fence": 1} if busy else {}
        intent = PendingBackendOp(
            id=uuid4(), node_id=node, backend=f"b{number}", op="install", operation_id=operation.id,
            next_retry_at=now - timedelta(seconds=5), **lease,
        )  # fmt: skip
        state = TargetStatus.RUNNING_ON_WORKER if busy else TargetStatus.QUEUED
        operations.append(operation)
        intents.append(intent)
        parts.append(
            OperationTarget(
                operation=operation, node_id=node, node_name=node, status=state, intent_id=intent.id
            )
        )
    Operation.objects.bulk_create(operations, batch_size=2000)
    OperationTarget.objects.bulk_create(parts, batch_size=2000)
    PendingBackendOp.objects.bulk_create(intents, batch_size=2000)


def measure(what: str, claim: Callable[..., Sequence[object]]) -> None:
    """Print the cost of claims of several sizes; claimed rows stay claimed."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    for limit in (1, 16, 256):
        times, cpu = [], []
        for _ in range(TURNS):
            began, used = clock.monotonic(), time.process_time()
            found = claim("bench", now=clock.now(), lease=3600, limit=limit)
            times.append(1000 * (clock.monotonic() - began))
            cpu.append(1000 * (time.process_time() - used))
            assert len(found) == limit
        with CaptureQueriesContext(connection) as queries:
            claim("bench", now=clock.now(), lease=3600, limit=limit)
        print(
            f"claim of {limit:>3} {what}: median {statistics.median(times):6.1f} ms,"
            f" least {min(times):6.1f} ms, processor {statistics.median(cpu):5.1f} ms,"
            f" {len(queries)} statements",
            flush=True,
        )


def plans() -> None:
    """Print the query plans of a claim."""
    from django.db import connection

    from nodes.backends import intents
    from operations.models import Operation

    due = Operation.objects.due(at=clock.now()).order_by("next_attempt_at")[:16]
    print(due.explain(analyze=True))
    with connection.cursor() as cursor:
        values: dict[str, Any] = {"now": clock.now(), "limit": 16, "looked_at": intents._EXTRA_ROWS_READ + 64}
        cursor.execute(f"EXPLAIN ANALYZE {intents._DUE_INTENTS_SQL}", values)
        print("\n".join(line for (line,) in cursor.fetchall()))


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures claims.")
    options.add_argument("--waiting", type=int, default=10_000)
    options.add_argument("--running", type=int, default=1_000)
    options.add_argument("--plans", action="store_true")
    chosen = options.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        from django.db import connection, connections

        from nodes.backends import intents
        from operations.ledger import attempts

        fill_operations(chosen.waiting, chosen.running)
        fill_intents(chosen.waiting, chosen.running)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
        if chosen.plans:
            plans()
        measure("operations", attempts.claim)
        measure("intents", intents.claim)
        connections.close_all()


if __name__ == "__main__":
    main()
