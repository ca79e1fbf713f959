"""Nodes as the wire shows them (`contract/http-api.md` §2.1, §2.3).

Rows become JSON objects without model instances and without a serializer's work for each field: the Nodes
page asks for all of them every five seconds. A constant number of queries for any number of nodes.
`node_shapes.py` describes the same objects for the API document; a test holds the two together.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from itertools import chain
from typing import Any
from uuid import UUID

import orjson
from django.db.models import (
    Aggregate,
    Case,
    CharField,
    Count,
    F,
    Func,
    Q,
    QuerySet,
    Sum,
    TextField,
    Value,
    When,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast

from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeLabel, NodeModel
from nodes.models.node import COUNTED_IN_FLIGHT, BackendNodeQuerySet

Row = dict[str, Any]
ZERO_TIME = "0001-01-01T00:00:00Z"


class Time(Func):
    """A time as the wire has it, made by the database: cheaper than thousands of `datetime`s."""

    function = "to_char"
    template = """%(function)s(%(expressions)s AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
    output_field = CharField()


class LabelsOf(Aggregate):
    """The labels of a group as one JSON text."""

    function = "jsonb_object_agg"
    output_field = TextField()


def text(column: str) -> Cast:
    return Cast(column, TextField())


COLUMNS: Mapping[str, Combinable] = {
    "id": text("id"),
    **{
        name: F(name)
        for name in (
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
        )
    },
    **{name: Time(name) for name in ("last_heartbeat", "created_at", "updated_at")},
}
_FACT = ("at", "by", "reason")
_REFUSALS: Mapping[str, tuple[Combinable, ...]] = {
    "rejected": (Time("rejected_at"), F("rejected_by"), F("reject_reason")),
    "revoked": (Time("revoked_at"), F("revoked_by"), F("revoke_reason")),
}
"""Why a pending node is not simply waiting."""
OMITTED_IF_EMPTY = ("capability", "vram_budget", "vram_budget_bytes", "weak_identity")


def elements(nodes: BackendNodeQuerySet, *, whole: bool = False) -> list[Row]:
    """The list elements of these nodes, in their order; `whole` says that no node is left out."""
    found = nodes.values_list(*COLUMNS.values(), *chain.from_iterable(_REFUSALS.values()))
    rows = [_element(values) for values in found]
    among = None if whole else [row["id"] for row in rows]
    counts, labels, conflicts = _counts(among), _labels(among), _open_conflicts(among)
    for row in rows:
        node = row["id"]
        row["model_count"], row["in_flight_count"] = counts.get(node, (0, 0))
        if node in labels:
            row["labels"] = orjson.loads(labels[node])
        if node in conflicts:
            row["open_conflicts"] = conflicts[node]
    return rows


def _element(values: tuple[Any, ...]) -> Row:
    """What the node's own row says, without what is empty (§0.5)."""
    row: Row = dict(zip(COLUMNS, values, strict=False))
    for name in OMITTED_IF_EMPTY:
        if not row[name]:
            del row[name]
    row["last_heartbeat"] = row["last_heartbeat"] or ZERO_TIME
    for number, name in enumerate(_REFUSALS):
        first = len(COLUMNS) + number * len(_FACT)
        if values[first]:
            row[name] = dict(zip(_FACT, values[first : first + len(_FACT)], strict=True))
    return row


def _of(rows: QuerySet[Any], among: Collection[str] | None) -> QuerySet[Any]:
    """Grouped by the node's id."""
    rows = rows if among is None else rows.filter(node_id__in=among)
    return rows.order_by().values("node_id").values_list(text("node_id"))


def _counts(among: Collection[str] | None) -> dict[str, tuple[int, int]]:
    rows = _of(NodeModel.objects.filter(state__in=COUNTED_IN_FLIGHT), among)
    counted = rows.annotate(loaded=Count("pk", filter=Q(state="loaded")), running=Sum("in_flight"))
    return {node: (loaded, running) for node, loaded, running in counted}


def _labels(among: Collection[str] | None) -> dict[str, str]:
    return dict(_of(NodeLabel.objects.all(), among).annotate(labels=LabelsOf(F("key"), F("value"))))


def _open_conflicts(among: Collection[str] | None) -> dict[str, int]:
    return dict(_of(NodeConflict.objects.filter(state="open"), among).annotate(claims=Count("pk")))


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
    shown: Row = {"labels": {}} | rows[0] | _facts(node)
    identity = _identity(node) | {"open_conflicts": shown.get("open_conflicts", 0)}
    return shown | {
        "revision": node.revision,
        "identity": identity,
        "overrides": _overrides(node),
        "label_sources": dict(NodeLabel.objects.filter(node=node).values_list("key", "source")),
        "inventory": {"at": node.inventory_at, "error": node.inventory_error},
    }


_OVERRIDES = ("max_replicas_per_model", "vram_budget")


def _overrides(node: BackendNode) -> Row:
    """What an admin says instead of the worker: by whom and since when, as far as it is still known."""
    told = NodeEvent.objects.filter(node_id=node.id, kind=NodeEvent.Kind.OVERRIDE)
    told = told.annotate(
        what=Case(*(When(detail__has_key=name, then=Value(name)) for name in _OVERRIDES), default=Value(""))
    )
    latest = told.order_by("what", "-id").distinct("what").values_list("what", "actor", "at")
    known = {what: {"by": by, "at": at} for what, by, at in latest}
    held = (name for name in _OVERRIDES if getattr(node, f"{name}_manually_set"))
    return {name: known.get(name, {"by": "", "at": None}) for name in held}


def _facts(node: BackendNode) -> Row:
    """The facts that hold."""
    known = {
        "approval": (node.approved_at, node.approved_by, node.approval_reason),
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
    if node.drain_deadline is not None:
        shown["deadline"] = node.drain_deadline
    if node.engines_gone_at is not None:
        shown["engines_gone_at"] = node.engines_gone_at
    if node.engines_error:
        shown["engines_error"] = node.engines_error
    return shown


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
