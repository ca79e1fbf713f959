"""Seeded nodes: rows in every state, with hardware and labels of a mixed fleet, and their heartbeats.

Rows are inserted in bulk. Actions of an admin or a task use the registry's verbs, so that the timelines
contain them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from uuid import UUID

from django.db import connection, transaction

from localai_cluster.accounts import actors, principals
from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import errors
from localai_cluster.kit import names as node_names
from nodes.models import BackendNode, NodeBackend, NodeLabel, NodeModel
from nodes.registry import lifecycle, overrides
from nodes.registry.registration import Registration
from tests.support.fleet import register_as
from tests.support.replicas import columns
from tests.support.seeding import hostile

GIB = 1024**3
ANNA = Actor(ActorKind.USER, "anna")
FAR = timedelta(days=30)
"""Delay that keeps tasks from contacting the nonexistent workers for backends or file ports."""
BEAT_EVERY = 10
"""Seconds between two beats of one node."""
OTHER_SECRET = "c" * 64


@dataclass(frozen=True)
class Hardware:
    """One kind of machine; sizes in GiB."""

    prefix: str
    vendor: str
    vram: int
    ram: int
    disk: int
    capability: str
    compute: str = ""


FLEET = (
    Hardware("gpu-a100", "nvidia", 80, 512, 3840, "nvidia-cuda-12", "8.0"),
    Hardware("gpu-h100", "nvidia", 160, 1024, 7680, "nvidia-cuda-13", "9.0"),
    Hardware("gpu-4090", "nvidia", 24, 128, 1920, "nvidia-cuda-12", "8.9"),
    Hardware("mi300", "amd", 192, 768, 3840, "amd"),
    Hardware("arc", "intel", 16, 64, 960, "intel"),
    Hardware("cpu", "", 0, 256, 960, "default"),
    Hardware("edge-orin", "nvidia", 32, 32, 256, "nvidia-l4t-cuda-12", "8.7"),
)
MODELS = ("llama-3.3-70b", "qwen3-32b", "mistral-small", "bge-m3", "whisper-large-v3", "gemma-3-27b")
BACKENDS = ("llama-cpp", "vllm", "whisper", "transformers", "stablediffusion", "piper")
SITES = ("berlin", "frankfurt", "oslo", "porto")


def names(count: int, *, tame: bool = False) -> Iterator[tuple[str, Hardware]]:
    """Yield names, each with its kind of machine: hostile names first unless `tame`, then ordinary names."""
    harmful = 0 if tame else min(len(hostile.NAMES), count // 4)
    for number in range(count):
        kind = FLEET[number % len(FLEET)]
        yield (hostile.NAMES[number] if number < harmful else f"{kind.prefix}-{number:03d}"), kind


def write(count: int, random: Random, now: datetime, *, tame: bool = False) -> list[UUID]:
    """Create `count` nodes with labels, replicas and backends; return their ids in order of creation."""
    named = enumerate(names(count, tame=tame))
    rows = [_row(number, name, kind, random, now) for number, (name, kind) in named]
    with transaction.atomic():
        BackendNode.objects.bulk_create(rows)
        NodeLabel.objects.bulk_create([label for row in rows for label in _labels(row, random)])
        NodeModel.objects.bulk_create([one for row in rows for one in _replicas(row, random, now)])
        NodeBackend.objects.bulk_create([one for row in rows for one in _backends(row, random, now)])
    _live(rows, now)
    return [row.id for row in rows]


def _row(number: int, name: str, kind: Hardware, random: Random, now: datetime) -> BackendNode:
    pending = number % 40 == 21
    return BackendNode(
        name=name,
        name_key=node_names.key(name),
        address=f"10.{number // 200}.{number % 200}.7:50051",
        http_address=f"10.{number // 200}.{number % 200}.7:50050",
        fingerprint=principals.hash_secret(f"seeded {name}"),
        bound_at=now,
        source_address=f"10.{number // 200}.{number % 200}.7",
        approved_at=None if pending else now - timedelta(days=random.randint(1, 90)),
        approved_by="" if pending else "anna",
        created_at=now
        - timedelta(minutes=random.randint(1, 50) if pending else random.randint(130_000, 290_000)),
        last_heartbeat=now - timedelta(seconds=random.uniform(0, BEAT_EVERY)),
        total_vram=kind.vram * GIB,
        available_vram=int(kind.vram * GIB * random.uniform(0.05, 0.95)),
        reserved_vram=kind.vram * GIB // 10 if number % 9 == 0 else 0,
        total_ram=kind.ram * GIB,
        available_ram=int(kind.ram * GIB * random.uniform(0.1, 0.9)),
        total_disk=kind.disk * GIB,
        available_disk=int(kind.disk * GIB * random.uniform(0.02, 0.8)),
        gpu_vendor=kind.vendor,
        gpu_compute_capability=kind.compute,
        capability=kind.capability,
        max_replicas_per_model=1 + number % 3,
        inventory_at=now,
        inventory_due_at=now + FAR,
        file_port_next_check_at=now + FAR,
        revision=1,
    )


def _labels(row: BackendNode, random: Random) -> Iterator[NodeLabel]:
    worker, auto = NodeLabel.Source.WORKER, NodeLabel.Source.AUTO
    yield NodeLabel(node=row, key="site", value=random.choice(SITES), source=worker)
    yield NodeLabel(node=row, key="gpu.vendor", value=row.gpu_vendor or "none", source=auto)
    if random.random() < 0.3:
        yield NodeLabel(node=row, key="tier", value=random.choice(("gold", "silver")))


def _replicas(row: BackendNode, random: Random, now: datetime) -> Iterator[NodeModel]:
    if row.approved_at is None or random.random() < 0.35:
        return
    for index, model in enumerate(random.sample(MODELS, random.randint(1, 3))):
        yield NodeModel(
            node=row,
            model_name=model,
            **columns(
                "loading" if random.random() < 0.05 else "loaded",
                address=f"{row.source_address}:{50100 + index}",
            ),
            in_flight=random.choice((0, 0, 1, 4)),
            backend_type=random.choice(BACKENDS),
            last_used=now - timedelta(seconds=random.randint(0, 7200)),
        )


def _backends(row: BackendNode, random: Random, now: datetime) -> Iterator[NodeBackend]:
    if row.approved_at is not None:
        for name in random.sample(BACKENDS, random.randint(0, 4)):
            yield NodeBackend(node=row, name=name, version="1.0.0", installed_at=now.isoformat())


def _live(rows: Sequence[BackendNode], now: datetime) -> None:
    """Apply events to some nodes, and let strangers claim to be two of them."""
    task = actors.task("liveness")
    verbs: dict[int, Callable[[BackendNode], object]] = {
        3: lambda row: lifecycle.drain(row.id, actor=ANNA, now=now, reason="new memory"),
        8: lambda row: lifecycle.mark_unhealthy(
            row.id, actor=task, now=now, reason="its engines do not answer"
        ),
        13: lambda row: lifecycle.deactivate(row.id, now=now),
        17: lambda row: overrides.set_replica_cap(row.id, 4, actor=ANNA, now=now),
    }
    for number, row in enumerate(rows):
        verb = verbs.get(number % 25)
        if verb and row.approved_at is not None:
            verb(row)
    for row in [row for row in rows if row.approved_at is not None][14:16]:
        _claim(row, now)


def _claim(row: BackendNode, now: datetime) -> None:
    registration = Registration(name=row.name, address="192.0.2.66:50051")
    try:
        register_as(
            registration,
            secret=principals.hash_secret(OTHER_SECRET + row.name),
            source_address="192.0.2.66",
            now=now,
            auto_approve=False,
        )
    except errors.Conflict:
        return  # it is recorded, as it should be


_BEAT = """
UPDATE backend_nodes SET last_heartbeat = %(now)s,
  available_vram = greatest(0, least(total_vram,
    available_vram + ((random() - 0.5) * 0.06 * total_vram)::bigint)),
  available_ram = greatest(0, least(total_ram, available_ram + ((random() - 0.5) * 0.06 * total_ram)::bigint))
WHERE id = ANY(%(ids)s) AND offline_at IS NULL
"""
_USE = (
    "UPDATE node_models SET in_flight = floor(random() * 6) WHERE node_id = ANY(%(ids)s) AND state = 'loaded'"
)


def beat(ids: Sequence[UUID], second: int, now: datetime) -> None:
    """Write one second of heartbeats: a tenth of the nodes, another tenth each second, and their replicas."""
    due = list(ids[second % BEAT_EVERY :: BEAT_EVERY])
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_BEAT, {"now": now, "ids": due})
        cursor.execute(_USE, {"ids": due[::3]})
