"""Of nodes that are equal for a load, those that have the model's backend come first.

Nearly every node of a fleet may have it, so nodes are only told apart by it where nothing else does: the
standing order of nodes (`placement/ranking.py`) stays the same for all models.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from uuid import UUID

from nodes.models import NodeBackend
from nodes.placement.choose import Candidate, Decision, equal_to_best, free_index
from nodes.placement.explain import SHOWN, FleetView


def prefer(view: FleetView, decision: Decision, backend: str) -> tuple[FleetView, Decision]:
    """Return the view and the decision with the backend as the last term among equally good nodes.

    One query, and only if there are several. Enough of them are marked for every one that an explanation
    names.
    """
    equal = equal_to_best(decision, view.need, view.setbacks)
    if len(equal) < 2:
        return view, decision
    having = _having(backend, [node.id for node in equal])
    first = [replace(node, has_backend=True) for node in equal if node.id in having][: SHOWN + 1]
    if not first:
        return view, decision
    marked = {node.id: node for node in first}
    ranked = [*first, *(node for node in decision.ranked if node.id not in marked)]
    seen = replace(view, nodes=[marked.get(node.id, node) for node in view.nodes])
    index = free_index(first[0]) or 0
    return seen, replace(decision, node=first[0], replica_index=index, ranked=ranked)


def mark(nodes: Sequence[Candidate], backend: str) -> list[Candidate]:
    """Return all of these nodes, marked where the backend is installed; one query."""
    having = _having(backend, [node.id for node in nodes]) if backend else frozenset()
    return [replace(node, has_backend=True) if node.id in having else node for node in nodes]


def _having(backend: str, node_ids: Collection[UUID]) -> frozenset[UUID]:
    rows = NodeBackend.objects.named(backend).filter(node__in=node_ids)
    return frozenset(rows.values_list("node_id", flat=True))
