"""Nodes as the wire shows them (`contract/http-api.md` §2.1, §2.3).

Rows become JSON objects without model instances and without a serializer's work for each field: the Nodes
page asks for all of them every five seconds. A constant number of queries for any number of nodes.
`node_shapes.py` describes the same objects for the API document; a test holds the two together.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from django.db.models import Aggregate, Count, F, Q, QuerySet, Sum, TextField

from nodes.models import BackendNode, NodeConflict, NodeLabel, NodeModel
from nodes.querysets import COUNTED_IN_FLIGHT, BackendNodeQuerySet

ZERO_TIME = "0001-01-01T00:00:00Z"
Row = dict[str, Any]

COLUMNS = (
    "id",
    "name",
    "node_type",
    "address",
    "http_address",
    "status",
    "total_vram",
    "available_vram",
    "reserved_vram",
    "total_ram",
    "available_ram",
    "total_disk",
    "available_disk",
    "gpu_vendor",
    "gpu_compute_capability",
    "capability",
    "max_replicas_per_model",
    "max_replicas_per_model_manually_set",
    "vram_budget",
    "vram_budget_bytes",
    "vram_budget_manually_set",
    "weak_identity",
    "last_heartbeat",
    "created_at",
    "updated_at",
)
OMITTED_IF_EMPTY = ("capability", "vram_budget", "vram_budget_bytes", "weak_identity")
_REJECTED = ("rejected_at", "rejected_by", "reject_reason")
_NONE_LOADED = (0, 0)


class _LabelsOf(Aggregate):
    """The labels of a group as one JSON text."""

    function = "jsonb_object_agg"
    template = "%(function)s(%(expressions)s)"
    output_field = TextField()


def elements(nodes: BackendNodeQuerySet, *, whole: bool = False) -> list[Row]:
    """The list elements of these nodes, in their order; `whole` says that no node is left out."""
    rows = list(nodes.values(*COLUMNS, *_REJECTED))
    among = None if whole else [row["id"] for row in rows]
    counts, labels, conflicts = _counts(among), _labels(among), _open_conflicts(among)
    for row in rows:
        node = row["id"]
        _shorten(row)
        row["model_count"], row["in_flight_count"] = counts.get(node, _NONE_LOADED)
        if found := labels.get(node):
            row["labels"] = orjson.loads(found)
        if claims := conflicts.get(node):
            row["open_conflicts"] = claims
    return rows


def _shorten(row: Row) -> None:
    """Leaves out what is empty and gives what is not its form (§0.5)."""
    for name in OMITTED_IF_EMPTY:
        if not row[name]:
            del row[name]
    if row["last_heartbeat"] is None:
        row["last_heartbeat"] = ZERO_TIME
    at, by, reason = (row.pop(name) for name in _REJECTED)
    if at is not None:
        row["rejected"] = _fact(at, by, reason)


def _of(rows: QuerySet[Any], among: Collection[UUID] | None) -> QuerySet[Any]:
    return rows if among is None else rows.filter(node_id__in=among)


def _counts(among: Collection[UUID] | None) -> dict[UUID, tuple[int, int]]:
    rows = _of(NodeModel.objects.filter(state__in=COUNTED_IN_FLIGHT), among).order_by().values_list("node_id")
    counted = rows.annotate(loaded=Count("pk", filter=Q(state="loaded")), running=Sum("in_flight"))
    return {node: (loaded, running) for node, loaded, running in counted}


def _labels(among: Collection[UUID] | None) -> dict[UUID, str]:
    rows = _of(NodeLabel.objects.all(), among).order_by().values_list("node_id")
    return dict(rows.annotate(labels=_LabelsOf(F("key"), F("value"))))


def _open_conflicts(among: Collection[UUID] | None) -> dict[UUID, int]:
    rows = _of(NodeConflict.objects.filter(state="open"), among).order_by().values_list("node_id")
    return dict(rows.annotate(claims=Count("pk")))


def _fact(at: datetime, by: str, reason: str) -> Row:
    """When, who and why."""
    return {"at": at, "by": by, "reason": reason}


def detail(node_id: UUID) -> Row | None:
    """The node on its own, None if there is none: the list element and what lies behind its status.

    `labels` is always an object (R1.107).
    """
    node = BackendNode.objects.filter(pk=node_id).first()
    if node is None:
        return None
    rows = elements(BackendNode.objects.filter(pk=node_id))
    if not rows:
        return None  # removed meanwhile
    shown = {"labels": {}} | rows[0] | _facts(node)
    identity = _identity(node) | {"open_conflicts": shown.get("open_conflicts", 0)}
    return shown | {"revision": node.revision, "identity": identity}


def _facts(node: BackendNode) -> Row:
    """The facts that hold."""
    known = {
        "approval": (node.approved_at, node.approved_by, node.approval_reason),
        "revoked": (node.revoked_at, node.revoked_by, node.revoke_reason),
        "offline": (node.offline_at, node.offline_by, node.offline_reason),
        "unhealthy": (node.unhealthy_at, node.unhealthy_by, node.unhealthy_reason),
    }
    shown: Row = {name: _fact(at, by, reason) for name, (at, by, reason) in known.items() if at is not None}
    if node.drained_at is not None:
        shown["drain"] = _drain(node)
    return shown


def _drain(node: BackendNode) -> Row:
    """What remains of a drain."""
    left = NodeModel.objects.filter(node=node).aggregate(replicas=Count("pk"), running=Sum("in_flight"))
    shown = {
        "since": node.drained_at,
        "by": node.drained_by,
        "reason": node.drain_reason,
        "own": node.drain_is_own,
        "in_flight": left["running"] or 0,
        "replicas": left["replicas"],
    }
    return shown | ({} if node.drain_deadline is None else {"deadline": node.drain_deadline})


def _identity(node: BackendNode) -> Row:
    """Who the node proves to be, for whoever decides about it."""
    shown = {
        "weak": node.weak_identity,
        "fingerprint": node.fingerprint,
        "source_address": node.source_address,
        "first_seen": node.created_at,
        "bound_at": node.bound_at,
        "instance": node.instance,
        "rotation_requested_at": node.rotation_requested_at,
    }
    return {name: value for name, value in shown.items() if value or name in ("weak", "first_seen")}
