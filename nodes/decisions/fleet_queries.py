"""Read nodes and replicas from the rows: for placement, waiting loads and drains."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.db.models import Count, Q, Sum
from django.db.models.functions import Coalesce

from nodes.decisions import reserved_memory
from nodes.models import (
    BEING_LOADED,
    BackendNode,
    BroughtModel,
    ModelSchedulingConfig,
    NodeBackend,
    NodeLabel,
    NodeModel,
    selectors,
)
from nodes.placement.choose import ANY_NODE, Candidate, Decision, Selector, equal_to_best, free_index
from nodes.placement.explain import SHOWN, FleetView
from nodes.placement.memory import Reservation

COLUMNS = (
    *("id", "name", "node_type", "status", "max_replicas_per_model"),
    *("available_vram", "reserved_vram", "vram_read_at", "vram_budget_bytes", "gpus"),
    *("returned_vram", "returned_beside", "total_vram"),
    *("total_disk", "available_disk", "file_port_error"),
)
"""Columns of a node's row that `candidate` reads."""


def is_served(model_name: str, *, besides: Collection[UUID] = ()) -> bool:
    """Return True if a replica outside the nodes `besides` can take a request now (R2.10)."""
    rows = NodeModel.objects.of(model_name).serving().exclude(node__in=besides)
    labels = selectors_of([model_name])[model_name].labels
    if labels is None:
        return False
    for key, value in labels:
        rows = rows.filter(node__label_set__key=key, node__label_set__value=value)
    return rows.exists()


def is_being_loaded(model_name: str, *, besides: Collection[UUID] = ()) -> bool:
    """Return True if a load has a slot for the model outside the nodes `besides`."""
    loading = NodeModel.objects.of(model_name).filter(state__in=BEING_LOADED, node__status="healthy")
    return loading.exclude(node__in=besides).exists()


def loaded_revision(replica_id: UUID) -> str | None:
    """Return the revision of the definition that the replica was loaded from; None if it does not serve."""
    return NodeModel.objects.loaded().filter(pk=replica_id).values_list("config_revision", flat=True).first()


def selectors_of(model_names: Collection[str]) -> dict[str, Selector]:
    """Return the node selector of each model's scheduling rule; one query."""
    rules = ModelSchedulingConfig.objects.filter(model_name__in=model_names)
    stored = dict(rules.values_list("model_name", "node_selector"))
    labels_by_model = {name: selectors.readable(stored.get(name, {})) for name in model_names}
    return {
        name: Selector(name, None if labels is None else frozenset(labels.items()))
        for name, labels in labels_by_model.items()
    }


def read_fleet(
    model_name: str,
    *,
    selector: Selector = ANY_NODE,
    only: Collection[UUID] | None = None,
    besides: Collection[UUID] = (),
    conflicts: Collection[str] = (),
) -> list[Candidate]:
    """Return the nodes as candidates of a placement, with the labels that `selector` requires.

    `only` restricts the nodes, None = all; `besides` are excluded. `conflicts` are the models that share a
    concurrency group with this one. Four queries for any number of nodes, five with a selector, one more with
    `conflicts`.
    """
    occupied_slots: dict[UUID, set[int]] = {}
    occupying = NodeModel.objects.of(model_name).occupying()
    for node_id, index in occupying.values_list("node_id", "replica_index"):
        occupied_slots.setdefault(node_id, set()).add(index)
    labels: dict[UUID, set[tuple[str, str]]] = {}
    if selector.labels:
        required_labels = NodeLabel.objects.filter(key__in=[key for key, _ in selector.labels])
        for node_id, key, value in required_labels.values_list("node_id", "key", "value"):
            labels.setdefault(node_id, set()).add((key, value))
    conflicting_models, file_bytes = _loaded_among(conflicts), model_file_bytes(model_name)
    rows = BackendNode.objects.all() if only is None else BackendNode.objects.filter(pk__in=only)
    nodes = rows.exclude(pk__in=besides).annotate(
        loaded=Count("replicas", filter=Q(replicas__state="loaded")),
        busy=Coalesce(Sum("replicas__in_flight"), 0),
    )
    memory = reserved_memory.by_node(NodeModel.engines.all())
    return [
        replace(
            candidate(row, memory.get(row["id"], ()), loaded=row["loaded"], in_flight=row["busy"]),
            taken=frozenset(occupied_slots.get(row["id"], ())),
            labels=frozenset(labels.get(row["id"], ())),
            conflicts=frozenset(conflicting_models.get(row["id"], ())),
            brought=file_bytes.get(row["id"], 0),
        )
        for row in nodes.values(*COLUMNS, "loaded", "busy")
    ]


def model_file_bytes(model_name: str) -> dict[UUID, int]:
    """Return the bytes of the model's files on each node that has any."""
    rows = BroughtModel.objects.filter(model_name=model_name)
    return dict(rows.values_list("node_id", "size"))


def candidate(
    row: Mapping[str, Any], reservations: Sequence[Reservation], *, loaded: int, in_flight: int
) -> Candidate:
    """Return a node as a candidate, from its columns and its replicas' sums, without any model's data."""
    return Candidate(
        id=row["id"],
        name=row["name"],
        node_type=row["node_type"],
        status=row["status"],
        free_vram=reserved_memory.effectively_free(row, reservations),
        loaded=loaded,
        in_flight=in_flight,
        taken=frozenset(),
        slots=row["max_replicas_per_model"],
        available_vram=row["available_vram"],
        most_vram=min(row["total_vram"], row["vram_budget_bytes"] or row["total_vram"]),
        total_disk=row["total_disk"],
        available_disk=row["available_disk"],
        file_port_failed=bool(row["file_port_error"]),
        gpus=reserved_memory.free_by_gpu(row, reservations),
    )


def occupied_indices(model_names: Collection[str]) -> dict[str, dict[UUID, set[int]]]:
    """Return the indices of these models' rows in any state (R1.62), by node; one query."""
    indices: dict[str, dict[UUID, set[int]]] = {name: {} for name in model_names}
    rows = NodeModel.objects.filter(model_name__in=indices).occupying()
    for name, node_id, index in rows.values_list("model_name", "node_id", "replica_index"):
        indices[name].setdefault(node_id, set()).add(index)
    return indices


def _loaded_among(model_names: Collection[str]) -> dict[UUID, set[str]]:
    """Return the names of these models that are loaded on each node."""
    names: dict[UUID, set[str]] = {}
    if model_names:
        loaded = NodeModel.objects.loaded().filter(model_name__in=model_names)
        for node_id, name in loaded.values_list("node_id", "model_name"):
            names.setdefault(node_id, set()).add(name)
    return names


def lock_in_flight_counts(*node_ids: UUID) -> dict[UUID, int]:
    """Return the number of running requests of each node that has replicas.

    The rows stay locked, so the counts stay true in this transaction.
    """
    rows = NodeModel.objects.filter(node_id__in=node_ids).order_by("id").select_for_update(of=("self",))
    counts: Counter[UUID] = Counter()
    for node_id, count in rows.values_list("node_id", "in_flight"):
        counts[node_id] += count
    return dict(counts)


def prefer_installed(view: FleetView, decision: Decision, backend: str) -> tuple[FleetView, Decision]:
    """Return the view and the decision with the backend as the last term among equally good nodes.

    One query, and only if there are several. Enough of them are marked for every one that an explanation
    names.
    """
    equal = equal_to_best(decision, view.need, view.backoffs)
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


def mark_installed(nodes: Sequence[Candidate], backend: str) -> list[Candidate]:
    """Return all of these nodes, marked where the backend is installed; one query."""
    having = _having(backend, [node.id for node in nodes]) if backend else frozenset()
    return [replace(node, has_backend=True) if node.id in having else node for node in nodes]


def _having(backend: str, node_ids: Collection[UUID]) -> frozenset[UUID]:
    rows = NodeBackend.objects.named(backend).filter(node__in=node_ids)
    return frozenset(rows.values_list("node_id", flat=True))
