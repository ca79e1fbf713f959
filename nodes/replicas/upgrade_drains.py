"""Replicas that an upgrade takes out of the picks: no new requests go there, and those that run may end.

Such a row drains and belongs to the intent of the upgrade. It returns when the attempt ends, and otherwise by
`return_forgotten`. An unload that takes it over owns it from then on.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet, Sum

from nodes.models import NodeModel, OwnerKind, PendingBackendOp, Phase, PhaseReason
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import lifecycle
from nodes.replicas.states import ReplicaEvent
from operations.changes import events


@dataclass(frozen=True)
class UpgradeDrain:
    """The result: the requests that still run there, or the models whose last replica would go."""

    running: int = 0
    last_of: tuple[str, ...] = ()
    """Models that no other node serves, and whose last replica may not go."""


def last_replicas(backend: str, node_ids: Collection[UUID]) -> dict[UUID, set[str]]:
    """Return, by node, the models that only its replicas of this backend serve."""
    concerned = NodeModel.objects.loaded().filter(node__in=node_ids).of_backend(backend)
    serving = NodeModel.objects.reached().filter(model_name__in=concerned.values("model_name"))
    nodes: dict[str, set[UUID]] = {}
    for model, node_id in serving.values_list("model_name", "node_id"):
        nodes.setdefault(model, set()).add(node_id)
    found: dict[UUID, set[str]] = {}
    for model, node_id in concerned.values_list("model_name", "node_id"):
        if nodes.get(model, set()) == {node_id}:
            found.setdefault(node_id, set()).add(model)
    return found


def drain_for_upgrade(
    node_id: UUID, backend: str, *, intent_id: UUID, confirmed: Collection[str], deadline: datetime
) -> UpgradeDrain:
    """Take the node's replicas of this backend out of the picks, or none of them if a model's last would go.

    Two nodes never go at once as the last two of a model: all its serving rows are locked.
    """
    mine = NodeModel.objects.filter(node_id=node_id).of_backend(backend)
    with transaction.atomic():
        models = mine.loaded().values_list("model_name", flat=True)
        loaded = NodeModel.objects.loaded().filter(model_name__in=list(models)).order_by("id")
        rows = list(loaded.select_related("node").select_for_update(of=("self",)))
        elsewhere = {r.model_name for r in rows if r.node_id != node_id and r.node.status == "healthy"}
        stopping = set(mine.loaded().values_list("pk", flat=True))
        draining = [row for row in rows if row.pk in stopping]
        last_of = {row.model_name for row in draining} - elsewhere - set(confirmed)
        if last_of:
            return UpgradeDrain(last_of=tuple(sorted(last_of)))
        if draining:
            lifecycle.apply_event(
                NodeModel.objects.filter(pk__in=[row.pk for row in draining]),
                ReplicaEvent.DRAINED,
                **lifecycle.owned_by(OwnerKind.INTENT, intent_id),
                **lifecycle.drain_until(deadline),
                reason=PhaseReason.UPGRADE,
            )
            events.notify(events.NODES, str(node_id))
    out = mine.filter(phase=Phase.DRAINING, owner_id=intent_id).aggregate(running=Sum("in_flight"))
    return UpgradeDrain(out["running"] or 0)


def end_upgrade(intent_id: UUID, fence: int) -> None:
    """The attempt is over: what is left of its replicas serves again, unless a later attempt has them."""
    if PendingBackendOp.objects.filter(pk=intent_id, fence=fence).exists():
        _return_drained(NodeModel.objects.filter(owner_id=intent_id))


def return_without_upgrade() -> int:
    """Return replicas to the picks whose upgrade is over or rests: its controller died. Return how many."""
    return _return_drained(
        NodeModel.objects.exclude(Exists(_active_upgrades().filter(pk=OuterRef("owner_id"))))
    )


def hand_to_upgrade(rows: Sequence[NodeModel]) -> set[UUID]:
    """Hand the locked, draining rows to the upgrade that is about to stop their engines; return those."""
    kept: set[UUID] = set()
    busy = _active_upgrades().filter(node__in={row.node_id for row in rows}, spares_requests=True)
    for intent in busy if rows else ():
        mine = NodeModel.objects.filter(pk__in=[row.pk for row in rows], node_id=intent.node_id)
        ids = set(mine.of_backend(intent.backend).values_list("pk", flat=True))
        lifecycle.apply_event(
            NodeModel.objects.filter(pk__in=ids),
            ReplicaEvent.HANDED_BACK,
            **lifecycle.owned_by(OwnerKind.INTENT, intent.pk),
            reason=PhaseReason.UPGRADE,
        )
        kept |= ids
    return kept


def _active_upgrades() -> QuerySet[PendingBackendOp]:
    at_it = Q(lease_until__isnull=False) | Q(unanswered_since__isnull=False) | Q(cancelled_at__isnull=False)
    return PendingBackendOp.objects.filter(at_it)


def _return_drained(rows: NodeModelQuerySet) -> int:
    draining = rows.filter(phase=Phase.DRAINING, owner_kind=OwnerKind.INTENT)
    with transaction.atomic():
        found = list(draining.order_by("id").select_for_update(of=("self",)))
        lifecycle.apply_event(
            NodeModel.objects.filter(pk__in=[row.pk for row in found]),
            ReplicaEvent.RETURNED,
            **lifecycle.SERVES,
        )
        if found:
            events.notify(events.NODES, *sorted({str(row.node_id) for row in found}))
    return len(found)
