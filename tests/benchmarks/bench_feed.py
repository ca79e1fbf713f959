"""The shared look of `/ws/feed` at several sizes: reading, comparing, telling.

`python -m tests.benchmarks.bench_feed` starts one PostgreSQL and prints milliseconds, medians of several
looks: the first look of a process, one in which nothing has changed, one after a tenth of the nodes have
beaten (what a second of heartbeats every ten seconds is), and the snapshot's size. Three labels, two replicas
and three backends a node.
"""

import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from localai_cluster.kit import clock
from tests.support.cluster import running_cluster

SIZES = (500, 5000)
LOOKS = 7


def seed(size: int) -> None:
    """That many nodes."""
    from localai_cluster.kit import names
    from nodes.models import BackendNode, NodeBackend, NodeLabel, NodeModel

    first, now = BackendNode.objects.count(), clock.now()
    nodes = [
        BackendNode(
            name=f"gpu-{number:05d}",
            name_key=names.key(f"gpu-{number:05d}"),
            address=f"10.0.{number // 250}.{number % 250}:50051",
            fingerprint=f"{number:064x}",
            approved_at=now,
            last_heartbeat=now,
            total_vram=24 * 1024**3,
            gpu_vendor="nvidia",
        )
        for number in range(first, size)
    ]
    BackendNode.objects.bulk_create(nodes)
    labels = ("tier", "zone", "node.replica-slots")
    NodeLabel.objects.bulk_create(
        NodeLabel(node=node, key=key, value="x") for node in nodes for key in labels
    )
    NodeModel.objects.bulk_create(
        NodeModel(node=node, model_name=f"m{number}", phase="serving", address="10.0.0.1:1")
        for node in nodes
        for number in range(2)
    )
    NodeBackend.objects.bulk_create(
        NodeBackend(node=node, name=name) for node in nodes for name in ("llama-cpp", "whisper", "minilm")
    )


def beat(turn: int) -> None:
    """A tenth of the nodes beats."""
    from nodes.models import BackendNode

    ids = list(BackendNode.objects.values_list("pk", flat=True))[turn % 10 :: 10]
    at = clock.now() + timedelta(seconds=turn)
    BackendNode.objects.filter(pk__in=ids).update(last_heartbeat=at, available_vram=turn)


def milliseconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    began = clock.monotonic()
    work()
    return 1000 * (clock.monotonic() - began)


def measure(size: int) -> None:
    """Prints the figures of one size."""
    from nodes.live import watch

    feed = watch.NodeFeed()

    def whole() -> None:
        feed._take(*feed._compare())

    def line(what: str, value: float) -> None:
        print(f"{size:>6} nodes  {what:<42} {value:8.1f} ms")

    line("first look", milliseconds(whole))
    line("reading alone", statistics.median(milliseconds(watch.read_snapshot) for _ in range(LOOKS)))
    line("look, nothing has changed", statistics.median(milliseconds(whole) for _ in range(LOOKS)))
    found = []
    for turn in range(1, LOOKS + 1):
        beat(turn)
        found.append(milliseconds(whole))
    line("look, a tenth has beaten", statistics.median(found))
    line("the change as text", milliseconds(lambda: feed._message(feed.history.number - 1)))
    line("the snapshot as text", milliseconds(lambda: feed._message(None)))
    print(f"{size:>6} nodes  snapshot {len(feed._message(None)) / 1e6:.2f} MB")


def main() -> None:
    """Runs the whole benchmark."""
    with running_cluster() as cluster:
        os.environ.update({**cluster.environment, "DJANGO_SETTINGS_MODULE": "localai_cluster.settings"})
        import django

        django.setup()
        for size in SIZES:
            seed(size)
            measure(size)
        from django.db import connections

        connections.close_all()


if __name__ == "__main__":
    main()
