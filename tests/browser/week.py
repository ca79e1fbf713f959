"""A week of figures of one node with eight GPUs, written as the product packs them."""

import json
import random
from datetime import datetime, timedelta

from nodes.figures import series
from nodes.figures.partitions import PartitionedTable
from nodes.figures.series import DAY, HOUR
from tests.support.cluster import Cluster

GPUS, DAYS = 8, 8
GIB = 2**30
DRIVER = "550.54.15, CUDA 12.4"
_TABLE = PartitionedTable("figure_days", 32 * DAY, kept=365 * DAY)
_GPUS = """UPDATE backend_nodes
SET gpus = %s, total_vram = %s, available_vram = %s, revision = revision + 1 WHERE id = %s"""


def plant(cluster: Cluster, node: str, now: datetime) -> None:
    """Give the node eight GPUs, one of them failing, and their figures for each hour up to `now`."""
    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "name": "NVIDIA H100 80GB HBM3",
            "total_vram": 80 * GIB,
            "free_vram": 30 * GIB,
            "utilization": 80,
            "temperature": 60,
            "power": 500,
            "power_limit": 700,
            "ecc_errors": 3 * (index == 5),
            "driver": DRIVER,
        }
        for index in range(GPUS)
    ]
    cluster.execute(_GPUS, json.dumps(gpus), GPUS * 80 * GIB, GPUS * 30 * GIB, node)
    today, chance = series.floor_to_step(now, DAY), random.Random(7)
    for age in range(DAYS):
        start = today - age * DAY
        _create_partition(cluster, start)
        hours = min(24, (now - start) // HOUR)
        block = series.pack(
            {
                name: [chance.randrange(*bounds) if hour < hours else None for hour in range(24)]
                for name, bounds in _BOUNDS.items()
            }
        )
        # After midnight the cluster may have packed its own figures of yesterday.
        cluster.execute(
            "INSERT INTO figure_days (at, subject, body) VALUES (%s, %s, %s)"
            " ON CONFLICT (at, subject) DO UPDATE SET body = excluded.body",
            start,
            f"node/{node}",
            block,
        )


_OF_GPU = {"vram_used": (20_000, 80_000), "busy": (0, 101), "temperature": (40, 90), "power": (60, 700)}
# Memory and disk stay below what any machine has that runs the tests.
_BOUNDS = {"ram_used": (500, 1000), "disk_used": (5_000, 6_000)} | {
    f"gpu{index}.{name}": bounds for index in range(GPUS) for name, bounds in _OF_GPU.items()
}


def _create_partition(cluster: Cluster, at: datetime) -> None:
    start = series.floor_to_step(at, _TABLE.width)
    end: datetime = start + timedelta(days=32)
    cluster.execute(
        f"CREATE TABLE IF NOT EXISTS {_TABLE.partition(at)} PARTITION OF figure_days"
        f" FOR VALUES FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
    )
