"""Growth: what a list, a pass, a decision or an operation costs at 100, 1,000 and 5,000 nodes.

Each work runs in this process on a PostgreSQL of its own. Every node has three replicas, labels and backends,
every tenth a rule. `tests/integration/test_growth.py` asserts that the statements do not grow.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.benchmarks.processor import spent
from tests.support.cluster import running_cluster

SIZES = (100, 1000, 5000)
TURNS = 3
REPLICAS, LABELS, BACKENDS = 3, ("tier", "zone", "node.replica-slots"), ("llama-cpp", "whisper", "minilm")
GPU = 24 * 2**30
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
AGO = timedelta(minutes=3)
"""Age of every sign of life of a replica: all are due for a check."""


def plant(count: int) -> None:
    """Replace all nodes by `count` healthy ones with GPUs, labels, backends, replicas and rules."""
    from django.db import connection

    from nodes.models import BackendNode, ModelSchedulingConfig, NodeBackend, NodeLabel, NodeModel
    from operations.models import Operation

    for model in (NodeModel, BackendNode, ModelSchedulingConfig, Operation):
        model.objects.all().delete()
    ids, now, models = planted.plant(planted.processes(count)), clock.now(), max(count // 10, 1)
    long_ago, chance = now - AGO, random.Random(1)
    BackendNode.objects.update(
        total_vram=GPU, available_vram=GPU, vram_read_at=now, total_disk=2**41, available_disk=2**40,
        max_replicas_per_model=4, gpu_vendor="nvidia", engines_due_at=now + timedelta(hours=1),
    )  # fmt: skip
    NodeModel.objects.bulk_create(
        (
            NodeModel(
                node_id=id, model_name=f"m{(number + 7 * turn) % models}", replica_index=turn, address="a:1",
                phase="serving", last_used=long_ago, loaded_at=long_ago, updated_at=long_ago,
                vram_needed=chance.randrange(2**30),
            )
            for number, id in enumerate(ids)
            for turn in range(REPLICAS)
        ),
        batch_size=2000,
    )  # fmt: skip
    NodeLabel.objects.bulk_create(NodeLabel(node_id=id, key=key, value="x") for id in ids for key in LABELS)
    NodeBackend.objects.bulk_create(NodeBackend(node_id=id, name=name) for id in ids for name in BACKENDS)
    ModelSchedulingConfig.objects.bulk_create(
        ModelSchedulingConfig(model_name=f"m{number}", min_replicas=5) for number in range(models)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def beat(turn: int) -> None:
    """Record a heartbeat of a tenth of the nodes, as a second of heartbeats every ten seconds does."""
    from nodes.models import BackendNode

    ids = list(BackendNode.objects.order_by("pk").values_list("pk", flat=True))[turn % 10 :: 10]
    now = clock.now()
    BackendNode.objects.filter(pk__in=ids).update(
        last_heartbeat=now, vram_read_at=now, available_vram=GPU - turn - 1
    )


@dataclass
class Works:
    """Everything that is measured, with what it carries from one turn to the next."""

    key: str
    """API key of an administrator."""
    turn: int = 0
    claimed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        from nodes.decisions.fleet_cache import FleetCache
        from nodes.live.watch import NodeFeed
        from nodes.placement.choose import Need
        from nodes.placement.explain import FleetView

        self.feed, self.fleet, self.view = NodeFeed(), FleetCache(), FleetView((), Need(vram=2**30))

    def all(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each work with its name; those of an operation continue the one before."""
        from nodes.reconcilers import replicas, tasks

        yield "list of nodes (`GET /api/nodes`)", self.list_nodes
        yield "live feed: a tenth of the nodes has beaten", self.look
        yield "replica pass", lambda: replicas.run_pass(tick=True)
        yield "liveness pass", tasks.liveness
        yield "state pass", tasks.state_pass
        yield "placement decision with its record, a tenth has beaten", self.decide
        yield "figures: a sample of all nodes", self.sample
        yield "operation on all nodes: the request", self.request_installs
        yield "operation on all nodes: claimed by a controller", self.claim_installs
        yield "operation on all nodes: outcomes recorded", self.end_installs

    def prepare(self) -> None:
        """Change rows as workers do between two turns."""
        self.turn += 1
        beat(self.turn)

    def list_nodes(self) -> None:
        """Answer the list as the web process does, middleware included."""
        from django.test import Client

        headers = {"Authorization": f"Bearer {self.key}"}
        answer = Client(SERVER_NAME="127.0.0.1", headers=headers).get("/api/nodes")
        assert answer.status_code == 200, answer.content

    def sample(self) -> None:
        """Store a sample of all nodes, at a time that is far from a new partition."""
        from nodes.figures import store

        now = NOON + timedelta(seconds=10 * self.turn)
        store.store_samples(heard_since=NOON - timedelta(days=999), now=now)

    def look(self) -> None:
        """Read the rows for all pages, find what has changed, and write the message."""
        self.feed._apply(*self.feed._compare())
        self.feed._message(max(self.feed.history.number - 1, 0))

    def decide(self) -> None:
        """Choose a node for a model that is loaded nowhere, and store the reasons."""
        from nodes.decisions import decision_log
        from nodes.loading.load_snapshots import encode_load
        from nodes.placement.load_decision import LoadQuestion, decide_load

        load, now = uuid4(), clock.now()
        view, decision = self.fleet.decide("new", self.view)
        question = LoadQuestion(view)
        seen = decision_log.store_snapshot(encode_load(str(load), "new", question), now=now)
        reasons = decision_log.DecisionRecord("new", load, decide_load(question, decision), seen)
        decision_log.record(reasons, now=now)

    def request_installs(self) -> None:
        """Admit an install on all nodes."""
        from nodes.backends import admission
        from nodes.backends.backend_requests import INSTALL, BackendRequest, RequestScope
        from nodes.models import BackendNode
        from operations.ledger.admission import Requester

        scope = RequestScope(list(BackendNode.objects.all()), by=Requester("growth"))
        admission.admit(BackendRequest(INSTALL, f"b{self.turn}"), scope, now=clock.now())

    def claim_installs(self) -> None:
        """Claim all of them at once."""
        from nodes.backends import intents
        from nodes.models import BackendNode

        limit = BackendNode.objects.count()
        self.claimed = intents.claim("growth", now=clock.now(), lease=600, limit=limit)
        assert len(self.claimed) == limit

    def end_installs(self) -> None:
        """Record that all of them are done."""
        from nodes.backends import intents

        done = {(intent.id, intent.fence): (intents.Ended(), ()) for intent in self.claimed}
        assert not intents.record_outcomes(done, now=clock.now())


def statements(work: Callable[[], object]) -> int:
    """Run it; return the number of its statements, without the database's own."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as queries:
        work()
    return len(queries)


def measure(count: int, key: str, postgres: int) -> dict[str, tuple[int, float]]:
    """Return statements and milliseconds of CPU, PostgreSQL's included: the least of some turns."""
    plant(count)
    works, found = Works(key), dict[str, list[tuple[int, float]]]()
    for _ in range(TURNS + 1):
        works.prepare()
        for name, work in works.all():
            before = time.process_time() + spent(postgres)
            number = statements(work)
            cost = 1000 * (time.process_time() + spent(postgres) - before)
            found.setdefault(name, []).append((number, cost))
    # The first turn reads what later ones remember.
    return {name: (turns[-1][0], min(cost for _, cost in turns[1:])) for name, turns in found.items()}


def table(found: dict[int, dict[str, tuple[int, float]]]) -> list[list[str]]:
    """Return the rows; the exponent is that of the growth between the two largest sizes, 1 = linear."""
    *_, small, large = found
    rows = []
    for name in found[large]:
        numbers = dict.fromkeys(str(figures[name][0]) for figures in found.values())
        costs = [figures[name][1] for figures in found.values()]
        exponent = math.log(costs[-1] / costs[-2]) / math.log(large / small)
        rows.append([name, ", ".join(numbers), *(f"{cost:.1f}" for cost in costs), f"{exponent:.2f}"])
    return rows


def run() -> tuple[list[str], list[list[str]]]:
    """Measure all sizes; return the table's head and rows."""
    with running_cluster() as cluster:
        planted.set_up(cluster)
        from django.db import connections

        key, postgres = os.environ["LOCALAI_API_KEY"], cluster.postgres.pid
        found = {count: measure(count, key, postgres) for count in SIZES}
        connections.close_all()
    head = ["work", "statements", *(f"ms of CPU at {count:,} nodes" for count in SIZES), "exponent"]
    return head, table(found)


if __name__ == "__main__":
    for row in run()[1]:
        print(row)
