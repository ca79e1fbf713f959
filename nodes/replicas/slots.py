"""The rows of a load: what placement sees, the slot it takes, and how a slot becomes a replica.

A row in `loading` belongs to the attempt whose mark it carries. Publishing and dropping name that mark, so an
attempt that was overtaken changes nothing (I3).
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Count, F, Q, Sum
from django.db.models.functions import Coalesce

from nodes.models import BackendNode, EngineStart, ModelLoadInfo, NodeModel
from nodes.placement.choose import NodeView


@dataclass(frozen=True)
class Slot:
    """A reserved place for one replica."""

    id: UUID
    node_id: UUID
    node_name: str
    replica_index: int


def serving(model_name: str) -> bool:
    """Whether a replica exists that a request could be sent to now."""
    return bool(NodeModel.objects.of(model_name).serving().exists())


def fleet(model_name: str, *, only: Collection[UUID] | None = None) -> list[NodeView]:
    """Every node, or only these, as placement sees them; two queries for any number."""
    taken: dict[UUID, set[int]] = {}
    for node_id, index in NodeModel.objects.of(model_name).values_list("node_id", "replica_index"):
        taken.setdefault(node_id, set()).add(index)
    asked = BackendNode.objects.all() if only is None else BackendNode.objects.filter(pk__in=only)
    nodes = asked.annotate(
        loaded=Count("replicas", filter=Q(replicas__state="loaded")),
        busy=Coalesce(Sum("replicas__in_flight"), 0),
        free_vram=F("available_vram") - F("reserved_vram"),
    )
    columns = ("id", "name", "node_type", "status", "max_replicas_per_model", "free_vram", "loaded", "busy")
    return [
        NodeView(
            id=row["id"],
            name=row["name"],
            node_type=row["node_type"],
            status=row["status"],
            free_vram=row["free_vram"],
            loaded=row["loaded"],
            in_flight=row["busy"],
            taken=frozenset(taken.get(row["id"], ())),
            slots=row["max_replicas_per_model"],
        )
        for row in nodes.values(*columns)
    ]


def reserve(
    view: NodeView, model_name: str, index: int, *, mark: str, backend: str, now: datetime
) -> Slot | None:
    """Takes the slot; None when somebody else has it, or the node went away or is not healthy any more."""
    try:
        with transaction.atomic():
            # Under the node's lock: a drain either sees this slot or keeps it from being taken.
            healthy = BackendNode.objects.filter(pk=view.id, status="healthy")
            if healthy.select_for_update(no_key=True).first() is None:
                return None
            row = NodeModel.objects.create(
                node_id=view.id,
                model_name=model_name,
                replica_index=index,
                state="loading",
                loading_by=mark,
                backend_type=backend,
                last_used=now,
                created_at=now,
                updated_at=now,
            )
    except IntegrityError:
        return None
    return Slot(row.id, view.id, view.name, index)


def leftovers(model_name: str, *, mark: str) -> list[Slot]:
    """Removes and answers the slots of earlier attempts: only one load of a model is active at a time.

    Locked in the order of their ids, as by whoever ends the replicas of several nodes.
    """
    stale = NodeModel.objects.of(model_name).filter(state="loading").exclude(loading_by=mark)
    with transaction.atomic():
        rows = list(stale.order_by("id").select_for_update(of=("self",)).select_related("node"))
        NodeModel.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return [Slot(row.id, row.node_id, row.node.name, row.replica_index) for row in rows]


def exists(slot: Slot) -> bool:
    """Whether the slot's row is still there: it goes when its node falls silent, leaves or starts anew."""
    return NodeModel.objects.filter(pk=slot.id).exists()


def drop(slot: Slot, *, mark: str) -> None:
    """Gives the slot back."""
    NodeModel.objects.filter(pk=slot.id, loading_by=mark, state="loading").delete()


def publish(
    slot: Slot,
    *,
    mark: str,
    address: str,
    backend: str,
    options: dict[str, Any],
    revision: str,
    now: datetime,
) -> bool:
    """Makes the slot a replica that receives traffic; False when the slot is no longer this attempt's."""
    with transaction.atomic():
        published = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state="loading").update(
            state="loaded",
            loading_by="",
            address=address,
            model_options=options,
            config_revision=revision,
            in_flight=0,
            last_used=now,
            updated_at=now,
        )
        if published:
            # From here on the replica accounts for the engine.
            EngineStart.objects.filter(mark=mark).delete()
            model_name = NodeModel.objects.values_list("model_name", flat=True).get(pk=slot.id)
            ModelLoadInfo.objects.update_or_create(
                model_name=model_name,
                defaults={"backend_type": backend, "model_options": options, "updated_at": now},
            )
    return bool(published)
