"""Finders of nodes and replicas: each is one query (§1I, §1J).

`only` restricts a finder to these nodes; empty it restricts nothing (R1.64, R1.74). The order of nodes is
that of `nodes/placement/choose.py`, which chooses for loads. Effectively free is here what R1.51 says,
available minus reserved; only the choice for loads knows what they have reserved beside that column.
"""

from collections.abc import Collection
from uuid import UUID

from django.db.models import (
    BigIntegerField,
    Case,
    Count,
    Exists,
    ExpressionWrapper,
    F,
    IntegerField,
    Min,
    OuterRef,
    Q,
    Sum,
    Value,
    When,
)
from django.db.models.functions import Coalesce, Greatest

from nodes.models import BackendNode, NodeModel
from nodes.models.node import BackendNodeQuerySet
from nodes.models.replica import NodeModelQuerySet

_BUSY = Exists(NodeModel.objects.loaded().filter(node=OuterRef("pk")))
"""Whether a replica is loaded on the node."""
_REQUESTS = Coalesce(Sum("replicas__in_flight"), 0)
"""R1.73 [S]: the requests of all its replicas."""


def with_vram(least: int, only: Collection[UUID] = ()) -> BackendNodeQuerySet:
    """R1.70: nodes with `least` bytes effectively free: idle ones, then by requests; most memory first."""
    # Without its own field Django takes the difference for 32 bits, and finds nothing from 2 GiB on.
    free = ExpressionWrapper(F("available_vram") - F("reserved_vram"), BigIntegerField())
    waiting = Case(When(busy=True, then=F("requests")), default=Value(0), output_field=IntegerField())
    nodes = BackendNode.objects.placeable(only).annotate(busy=_BUSY, requests=_REQUESTS, free_vram=free)
    return nodes.filter(free_vram__gte=least).order_by("busy", waiting, "-free_vram", "name")


def idle(only: Collection[UUID] = ()) -> BackendNodeQuerySet:
    """R1.71: nodes without a loaded replica, most available memory first; reservations do not count."""
    return BackendNode.objects.placeable(only).filter(~_BUSY).order_by("-available_vram", "name")


def least_loaded(only: Collection[UUID] = ()) -> BackendNodeQuerySet:
    """R1.72: nodes with the fewest requests first, then most available memory."""
    nodes = BackendNode.objects.placeable(only).annotate(requests=_REQUESTS)
    return nodes.order_by("requests", "-available_vram", "name")


def _taken(model_name: str) -> Count:
    """R1.62 [S]: the model's replicas in every state; one in `unloading` keeps its slot (R1.67)."""
    ended = Q(replicas__phase="departed") | Q(replicas__phase="stopping", replicas__reason="load_failed")
    return Count("replicas", filter=Q(replicas__model_name=model_name) & ~ended)


def with_free_slot(model_name: str, only: Collection[UUID] = ()) -> BackendNodeQuerySet:
    """R1.64: nodes that may have one more replica of the model."""
    nodes = BackendNode.objects.placeable(only).annotate(taken=_taken(model_name))
    return nodes.filter(taken__lt=F("max_replicas_per_model")).order_by("name")


def capacity(model_name: str, only: Collection[UUID] = ()) -> int:
    """R1.65: how many more replicas of the model the nodes may have; those that load count as there."""
    free = Greatest(F("max_replicas_per_model") - _taken(model_name), 0)
    nodes = BackendNode.objects.placeable(only).annotate(free=free)
    total: int = nodes.aggregate(all=Coalesce(Sum("free"), 0))["all"]
    return total


def loaded_count(model_name: str) -> int:
    """R1.66: loaded replicas of the model, whatever the status of their nodes."""
    return NodeModel.objects.of(model_name).loaded().count()


def with_model(model_name: str, only: Collection[UUID] = ()) -> BackendNodeQuerySet:
    """R1.76: healthy nodes with a loaded replica of the model, each once, by the fewest requests on one."""
    serving = Q(replicas__model_name=model_name, replicas__state="loaded")
    least = Min("replicas__in_flight", filter=serving)
    nodes = BackendNode.objects.placeable(only).annotate(requests=least)
    return nodes.filter(requests__isnull=False).order_by("requests", "name")


def least_recently_used(only: Collection[UUID] = ()) -> NodeModelQuerySet:
    """R1.75: loaded replicas without requests on healthy backend nodes, the longest unused first."""
    unused = NodeModel.objects.serving().filter(in_flight=0, node__node_type="backend")
    return (unused.filter(node__in=only) if only else unused).order_by("last_used", "id")
