"""All nodes as the pages see them: one view of the database, the same few queries for any number of nodes.

A look is made every second while somebody watches, and most nodes have not changed since the last one. So a
node comes as the raw values of the queries, which compare at the speed of C; only what differs is made into
the object of the wire (`shapes.py` describes it). Every key is always there, so that a change is said by the
keys that changed.
"""

from typing import Any, NamedTuple

import orjson
from django.db.models import Aggregate, Count, F, TextField
from django.db.models.functions import JSONObject

from nodes.models import BackendNode, NodeBackend, NodeConflict, NodeLabel, NodeModel
from nodes.models.node import COUNTED_IN_FLIGHT
from nodes.registry.node_rows import COLUMNS, LabelsOf, Time, text

LiveNode = dict[str, Any]

_FACTS = {
    "rejected": ("rejected_at", "rejected_by", "reject_reason"),
    "revoked": ("revoked_at", "revoked_by", "revoke_reason"),
    "drained": ("drained_at", "drained_by", "drain_reason"),
    "offline": ("offline_at", "offline_by", "offline_reason"),
    "unhealthy": ("unhealthy_at", "unhealthy_by", "unhealthy_reason"),
}
_SHOWN = {name: column for name, column in COLUMNS.items() if name != "updated_at"} | {
    **{name: F(name) for name in ("fingerprint", "source_address", "revision")},
    **{name: Time(name) for name in ("inventory_at", "rotation_requested_at")},
}
"""Columns that leave as they are."""
_BEHIND = {
    **{name: Time(name) if name.endswith("_at") else F(name) for fact in _FACTS.values() for name in fact},
    "drain_is_own": F("drain_is_own"),
    "drain_deadline": Time("drain_deadline"),
    "engines_gone_at": Time("engines_gone_at"),
    "engines_error": F("engines_error"),
}
"""Columns behind the status."""
_REPLICA = {
    "id": text("id"),
    **{name: F(name) for name in ("model_name", "replica_index", "state", "in_flight", "backend_type")},
    "last_used": Time("last_used"),
}


class _InOrder(Aggregate):
    """A group as one JSON text, in a fixed order: what did not change reads the same."""

    function = "jsonb_agg"
    output_field = TextField()


class _ReplicasOf(_InOrder):
    template = "%(function)s(%(expressions)s ORDER BY model_name, replica_index)"


class _NamesOf(_InOrder):
    template = "%(function)s(%(expressions)s ORDER BY name)"


class Raw(NamedTuple):
    """One node as the queries answer it; texts are JSON, empty for nothing."""

    columns: tuple[Any, ...]
    labels: str
    replicas: str
    backends: str
    open_conflicts: int


def read() -> dict[str, Raw]:
    """Every node by id, in the order of names; five queries, which the caller makes see one moment."""
    found = BackendNode.objects.order_by("name").values_list(*_SHOWN.values(), *_BEHIND.values())
    labels, replicas, backends, conflicts = _labels(), _replicas(), _backends(), _conflicts()
    return {
        (node := columns[0]): Raw(
            columns,
            labels.get(node, ""),
            replicas.get(node, ""),
            backends.get(node, ""),
            conflicts.get(node, 0),
        )
        for columns in found
    }


def _labels() -> dict[str, str]:
    grouped = NodeLabel.objects.order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=LabelsOf(F("key"), F("value"))))


def _replicas() -> dict[str, str]:
    grouped = NodeModel.objects.order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=_ReplicasOf(JSONObject(**_REPLICA))))


def _backends() -> dict[str, str]:
    grouped = NodeBackend.objects.order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=_NamesOf(F("name"))))


def _conflicts() -> dict[str, int]:
    grouped = NodeConflict.objects.filter(state="open").order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=Count("pk")))


def shown(raw: Raw) -> LiveNode:
    """The node as it leaves."""
    node: LiveNode = dict(zip(_SHOWN, raw.columns, strict=False))
    behind = dict(zip(_BEHIND, raw.columns[len(_SHOWN) :], strict=True))
    facts = {name: _fact(behind, columns) for name, columns in _FACTS.items()}
    reason, since = why(node, facts, behind["drain_is_own"], raw.open_conflicts)
    models = orjson.loads(raw.replicas) if raw.replicas else []
    busy = (one["in_flight"] for one in models if one["state"] in COUNTED_IN_FLIGHT)
    return node | {
        "reason": reason,
        "since": since,
        "labels": orjson.loads(raw.labels) if raw.labels else {},
        "models": models,
        "model_count": sum(one["state"] == "loaded" for one in models),
        "in_flight_count": sum(busy),
        "backends": orjson.loads(raw.backends) if raw.backends else [],
        "rejected": facts["rejected"],
        "revoked": facts["revoked"],
        "drain": _drain(facts["drained"], behind),
        "open_conflicts": raw.open_conflicts,
    }


def _fact(behind: dict[str, Any], columns: tuple[str, str, str]) -> dict[str, str] | None:
    at, by, reason = (behind[column] for column in columns)
    return {"at": at, "by": by, "reason": reason} if at else None


def _drain(fact: dict[str, str] | None, behind: dict[str, Any]) -> dict[str, Any] | None:
    if fact is None:
        return None
    shown = {"since": fact["at"], "by": fact["by"], "reason": fact["reason"]}
    return shown | {
        "own": behind["drain_is_own"],
        "deadline": behind["drain_deadline"],
        "engines_gone_at": behind["engines_gone_at"],
        "engines_error": behind["engines_error"],
    }


def why(
    node: LiveNode, facts: dict[str, dict[str, str] | None], own: bool, conflicts: int
) -> tuple[str, str | None]:
    """Why the node has its status, in words, and since when; neither for a healthy one."""
    status = node["status"]
    if status == "pending":
        return _why_pending(node, facts, conflicts)
    fact = facts.get("drained" if status == "draining" else status)
    if fact is None:
        return "", None
    if status == "draining":
        return _said("drained by its worker" if own else f"drained by {fact['by']}", fact), fact["at"]
    return fact["reason"], fact["at"]


def _why_pending(
    node: LiveNode, facts: dict[str, dict[str, str] | None], conflicts: int
) -> tuple[str, str | None]:
    if (revoked := facts["revoked"]) is not None:
        return _said(f"its secret was revoked by {revoked['by']}", revoked), revoked["at"]
    if (rejected := facts["rejected"]) is not None:
        return _said(f"rejected by {rejected['by']}", rejected), rejected["at"]
    if conflicts:
        claims = "somebody else claims" if conflicts == 1 else f"{conflicts} others claim"
        return f"waits for approval; {claims} to be this node", node["created_at"]
    return "waits for approval", node["created_at"]


def _said(what: str, fact: dict[str, str]) -> str:
    return f"{what}: {fact['reason']}" if fact["reason"] else what
