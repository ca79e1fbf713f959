"""The timeline: one event (`NodeEvent`) for each change of a node.

Events are written inside the transaction that makes the change. Events by workers that change no status are
counted, with one row per minute for a node, kind, cause and status; every other event has its own row.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection

from localai_cluster.accounts import audit
from localai_cluster.accounts.actors import WORKER, Actor
from localai_cluster.accounts.audit import Change
from localai_cluster.kit.logs import request_id
from localai_cluster.web.shapes import (
    EXAMPLE_NODE_ID,
    EXAMPLE_TIME,
    TEXT,
    TIME,
    Row,
    Shape,
    column,
    count,
    enum,
    mapping_schema,
)
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.models import NodeEvent

_MAX_CAUSE_LENGTH = 255
_COLUMNS = ", ".join(f.column for f in NodeEvent._meta.concrete_fields if f.column and not f.primary_key)
_INSERT_SQL = f"""
INSERT INTO node_events AS event ({_COLUMNS})
SELECT {_COLUMNS} FROM jsonb_populate_recordset(NULL::node_events, %s::jsonb)
ON CONFLICT (repeat_key) DO UPDATE SET count = event.count + excluded.count,
    last_at = GREATEST(event.last_at, excluded.last_at)
"""

EVENT_SHAPE = Shape(
    "Event",
    "One thing that happened to a node.",
    [
        column("id", count(1), example=4711),
        column("node_id", UUID_SCHEMA, example=EXAMPLE_NODE_ID),
        column("node_name", TEXT, example="gpu-a"),
        column("kind", enum("EventKindEnum", NodeEvent.Kind).ref, example="drained"),
        column("at", TIME, example=EXAMPLE_TIME),
        column("last_at", TIME, "Equal events of a worker in a minute are one event.", example=EXAMPLE_TIME),
        column("count", count(1), example=1),
        column("actor_kind", TEXT, example="user"),
        column("actor", TEXT, example="ann"),
        column("cause", TEXT, example="new power supply"),
        column("status_before", TEXT, example="healthy"),
        column("status_after", TEXT, example="draining"),
        column("detail", mapping_schema({}), example={"deadline_seconds": 600}, optional=True),
        column("request_id", TEXT, optional=True),
    ],
)


@dataclass(frozen=True)
class Entry:
    """One event of a node: its kind, actor and cause, and the node's status before and after."""

    node_id: UUID
    node_name: str
    kind: NodeEvent.Kind
    actor: Actor
    cause: str = ""
    before: str = ""
    after: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = field(default_factory=request_id.get)


def record(*entries: Entry, at: datetime) -> None:
    """Write the events in the caller's transaction.

    A worker's event that changes no status has no row of its own if there is an equal one of the same
    minute, so a worker cannot fill the table.
    """
    rows: dict[str, Row] = {}
    for entry in entries:
        row = _event_row(entry, at)
        key = row["repeat_key"] or str(len(rows))
        row["count"] += rows[key]["count"] if key in rows else 0
        rows[key] = row
    if rows:
        with connection.cursor() as cursor:
            cursor.execute(_INSERT_SQL, [json.dumps(list(rows.values()), default=str)])
    by_people = [entry for entry in entries if entry.actor.kind in audit.AUDITED_ACTOR_KINDS]
    audit.record(
        *(
            Change(f"node.{entry.kind}", entry.node_name, str(entry.node_id), entry.cause)
            for entry in by_people
        ),
        at=at,
    )


def prune(*, before: datetime, limit: int) -> int:
    """Delete the oldest `limit` events from before `before`; return their number."""
    old = NodeEvent.objects.filter(at__lt=before).order_by("at", "pk").values_list("pk", flat=True)
    deleted, _ = NodeEvent.objects.filter(pk__in=list(old[:limit])).delete()
    return deleted


def _event_row(entry: Entry, at: datetime) -> Row:
    is_repeatable = entry.actor == WORKER and entry.before == entry.after
    return {
        "node_id": entry.node_id,
        "node_name": entry.node_name,
        "kind": entry.kind,
        "at": at,
        "last_at": at,
        "count": 1,
        "actor_kind": entry.actor.kind,
        "actor": str(entry.actor),
        "cause": entry.cause[:_MAX_CAUSE_LENGTH],
        "status_before": entry.before,
        "status_after": entry.after,
        "detail": dict(entry.detail),
        "request_id": "" if entry.request_id == "-" else entry.request_id,
        "repeat_key": _repeat_key(entry, at) if is_repeatable else None,
    }


def _repeat_key(entry: Entry, at: datetime) -> str:
    minute = at.strftime("%Y-%m-%dT%H:%M")
    text = "\n".join((str(entry.node_id), entry.kind, entry.after, minute, entry.cause))
    return hashlib.sha256(text.encode()).hexdigest()
