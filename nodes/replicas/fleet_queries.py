"""Queries of nodes and replicas, for placement, waiting loads and drains."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from uuid import UUID

from nodes.models import BEING_LOADED, ModelSchedulingConfig, NodeBackend, NodeModel, scheduling
from nodes.placement.choose import Candidate, Decision, Selector, equal_to_best, free_index
from nodes.placement.explain import MAX_SHOWN_NODES, FleetView


def is_served(model_name: str, *, excluded_nodes: Collection[UUID] = ()) -> bool:
    """Return True if a node outside `excluded_nodes` can take a request for the model now (R2.10)."""
    return NodeModel.objects.of(model_name).reached().exclude(node__in=excluded_nodes).exists()


def is_being_loaded(model_name: str, *, excluded_nodes: Collection[UUID]) -> bool:
    """Return True if a load has a slot for the model, on a node outside `excluded_nodes`."""
    loading = NodeModel.objects.of(model_name).filter(state__in=BEING_LOADED, node__status="healthy")
    return loading.exclude(node__in=excluded_nodes).exists()


def loaded_revision(replica_id: UUID) -> str | None:
    """Return the revision of the definition with which the replica was loaded; None if it does not serve."""
    return NodeModel.objects.loaded().filter(pk=replica_id).values_list("config_revision", flat=True).first()


def selectors_of(model_names: Collection[str]) -> dict[str, Selector]:
    """Return the node selector of each model's scheduling rule; one query."""
    selectors = {name: Selector(name) for name in model_names}
    rules = ModelSchedulingConfig.objects.filter(model_name__in=model_names)
    for name, stored in rules.values_list("model_name", "node_selector"):
        labels = scheduling.readable_selector(stored)
        selectors[name] = Selector(name, None if labels is None else frozenset(labels.items()))
    return selectors


def occupied_indices(model_names: Collection[str]) -> dict[str, dict[UUID, set[int]]]:
    """Return, by node, the indices that rows of these models have in any state (R1.62); one query."""
    indices: dict[str, dict[UUID, set[int]]] = {name: {} for name in model_names}
    rows = NodeModel.objects.filter(model_name__in=indices).occupying()
    for name, node_id, index in rows.values_list("model_name", "node_id", "replica_index"):
        indices[name].setdefault(node_id, set()).add(index)
    return indices


def lock_in_flight_counts(*node_ids: UUID) -> dict[UUID, int]:
    """Return the number of running requests of each node that has replicas.

    The rows stay locked until the end of the transaction, so the counts cannot change before.
    """
    rows = NodeModel.objects.filter(node_id__in=node_ids).order_by("id").select_for_update(of=("self",))
    counts: Counter[UUID] = Counter()
    for node_id, count in rows.values_list("node_id", "in_flight"):
        counts[node_id] += count
    return dict(counts)


def prefer_installed(view: FleetView, decision: Decision, backend: str) -> tuple[FleetView, Decision]:
    """Return view and decision with nodes that have the backend first among equally good nodes.

    One query, and only if several nodes are equally good. The nodes that an explanation names are marked by
    `mark_installed`.
    """
    equal = equal_to_best(decision, view.need, view.backoffs)
    if len(equal) < 2:
        return view, decision
    marked = mark_installed(equal, backend)
    named = {
        node.id: node for node in sorted(marked, key=lambda node: not node.has_backend)[: MAX_SHOWN_NODES + 1]
    }
    ranked = [*named.values(), *(node for node in decision.ranked if node.id not in named)]
    marked_view = replace(view, nodes=[named.get(node.id, node) for node in view.nodes])
    index = free_index(ranked[0]) or 0
    return marked_view, replace(decision, node=ranked[0], replica_index=index, ranked=ranked)


def mark_installed(nodes: Sequence[Candidate], backend: str) -> list[Candidate]:
    """Return the nodes, marked with whether they have the backend; one query, none without a backend."""
    if not backend:
        return list(nodes)
    rows = NodeBackend.objects.named(backend).filter(node__in=[node.id for node in nodes])
    having = set(rows.values_list("node_id", flat=True))
    return [replace(node, has_backend=node.id in having) for node in nodes]
