"""Ending replicas of whole nodes, and telling whoever keeps something about them (R1.101 to R1.103)."""

from collections import Counter
from collections.abc import Collection
from uuid import UUID

from django.db import transaction
from django.dispatch import Signal

from nodes.models import NodeModel

ALL_REPLICAS = -1
replicas_removed = Signal()
"""Sent after commit with `model_name`, `node_id` and `replica_index` (-1 = all of the model on the node)."""


def drop_replicas(*node_ids: UUID, keep: Collection[UUID] = ()) -> int:
    """Removes the replicas of these nodes but those in `keep`; answers how many.

    The rows are locked in the order of the hot path (`routing/statements.py`). Each distinct model of a node
    is reported once, after commit.
    """
    rows = NodeModel.objects.filter(node_id__in=node_ids).exclude(pk__in=keep).order_by("id")
    gone = list(rows.select_for_update(of=("self",)).values_list("pk", "node_id", "model_name"))
    if not gone:
        return 0
    NodeModel.objects.filter(pk__in=[pk for pk, _, _ in gone]).delete()
    removed = sorted({(model, str(node)) for _, node, model in gone})
    transaction.on_commit(lambda: _report(removed))
    return len(gone)


def in_flight(*node_ids: UUID) -> dict[UUID, int]:
    """Requests that run on those of the nodes that have replicas.

    Their rows stay locked, so the answer stays true in this transaction.
    """
    rows = NodeModel.objects.filter(node_id__in=node_ids).order_by("id").select_for_update(of=("self",))
    counts: Counter[UUID] = Counter()
    for node_id, count in rows.values_list("node_id", "in_flight"):
        counts[node_id] += count
    return dict(counts)


def _report(removed: list[tuple[str, str]]) -> None:
    for model_name, node_id in removed:
        replicas_removed.send_robust(
            sender=NodeModel, model_name=model_name, node_id=UUID(node_id), replica_index=ALL_REPLICAS
        )
