"""Replicas that an upgrade has taken out of the picks: no new requests go there, and those that run may end.

Such a row is `unloading` and carries the upgrade's intent, so that it can be put back whatever becomes of the
upgrade: when the attempt ends, and otherwise by `put_back_forgotten`. A row that an unload has taken over
meanwhile (`loading_by`) stays out.
"""

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet, Sum

from nodes.models import NodeModel, PendingBackendOp, ReplicaState
from operations.changes import events


@dataclass(frozen=True)
class Withdrawal:
    """What became of it: out, with so many requests left to end; or nothing, because models would go."""

    running: int = 0
    last_of: tuple[str, ...] = ()
    """Models that no other node serves, and whose last replica may not go."""


def last_replicas(backend: str, node_ids: Collection[UUID]) -> dict[UUID, set[str]]:
    """By node, the models that only its replicas of this backend serve."""
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


def withdraw(node_id: UUID, backend: str, *, intent_id: UUID, confirmed: Collection[str]) -> Withdrawal:
    """Takes the node's replicas of this backend out of the picks, or none of them if a model's last would go.

    Two nodes never go at once as the last two of a model: all its loaded rows are locked.
    """
    mine = NodeModel.objects.filter(node_id=node_id).of_backend(backend)
    with transaction.atomic():
        models = mine.loaded().values_list("model_name", flat=True)
        loaded = NodeModel.objects.loaded().filter(model_name__in=list(models)).order_by("id")
        rows = list(loaded.select_related("node").select_for_update(of=("self",)))
        elsewhere = {r.model_name for r in rows if r.node_id != node_id and r.node.status == "healthy"}
        stopping = set(mine.loaded().values_list("pk", flat=True))
        going = [row for row in rows if row.pk in stopping]
        last_of = {row.model_name for row in going} - elsewhere - set(confirmed)
        if last_of:
            return Withdrawal(last_of=tuple(sorted(last_of)))
        if going:
            NodeModel.objects.filter(pk__in=[row.pk for row in going]).update(
                state=ReplicaState.UNLOADING, withdrawn_for=intent_id
            )
            events.notify(events.NODES, str(node_id))
    out = mine.filter(withdrawn_for=intent_id).aggregate(running=Sum("in_flight"))
    return Withdrawal(out["running"] or 0)


def put_back(intent_id: UUID, fence: int) -> None:
    """The attempt is over: what is left of its replicas serves again, unless a later attempt has them."""
    if PendingBackendOp.objects.filter(pk=intent_id, fence=fence).exists():
        _put_back(NodeModel.objects.filter(withdrawn_for=intent_id))


def put_back_forgotten() -> int:
    """Has replicas serve again whose upgrade is over or rests, and answers how many: its controller died."""
    at_it = Q(lease_until__isnull=False) | Q(unanswered_since__isnull=False) | Q(cancelled_at__isnull=False)
    intent = PendingBackendOp.objects.filter(at_it, pk=OuterRef("withdrawn_for"))
    return _put_back(NodeModel.objects.filter(withdrawn_for__isnull=False).exclude(Exists(intent)))


def _put_back(rows: QuerySet[NodeModel]) -> int:
    with transaction.atomic():
        found = list(rows.order_by("id").select_for_update(of=("self",)))
        serving = [r.pk for r in found if r.state == ReplicaState.UNLOADING and not r.loading_by]
        NodeModel.objects.filter(pk__in=serving).update(state=ReplicaState.LOADED)
        NodeModel.objects.filter(pk__in=[row.pk for row in found]).update(withdrawn_for=None)
        if found:
            events.notify(events.NODES, *sorted({str(row.node_id) for row in found}))
    return len(found)
