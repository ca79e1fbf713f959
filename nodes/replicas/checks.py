"""Replicas whose engines are in question: which ones, who looks at them, and what the look has found.

A loaded replica is in question when nothing was heard of it for two minutes (C3), or at once when its worker
reports that the engine has ended (`note_exits`). `ask` tells the controllers; `claim` gives each row to one
of them, for as long as a look may take; `settle` writes what it found. No lock is held between the last two:
an outcome names row, address and claim, so it says nothing of a row that was replaced or claimed since.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q

from nodes.models import NodeModel, ReplicaState
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import retire, terminations
from nodes.replicas.evidence import Finding, Suspect
from nodes.replicas.statements import Rows
from operations.changes import events
from operations.ledger.progress import update

CHANNEL = "cluster_replica_checks"
"""NOTIFY channel: engines are in question."""
STALE = timedelta(seconds=120)
"""C3."""
CLAIMED_FOR = timedelta(seconds=20)
"""Longer than a controller looks, shorter than the pause between two passes."""
_WHICH = ("id", "node_id", "model_name", "replica_index", "address", "checked_at")
_COLUMNS = (
    *_WHICH,
    "missed_reports",
    "missed_probes",
    "exit_reported",
    "node__name",
    "node__engine_token",
    "node__weak_identity",
)
_FOUND = ["missed_reports", "missed_probes", "exit_reported"]


@dataclass(frozen=True)
class ExitReport:
    """An engine process that has ended by itself, as its worker names it: key, and address of its replies."""

    process_key: str
    address: str


def ask(*, heard_since: datetime, now: datetime) -> bool:
    """Wakes the controllers if an engine is in question; answers whether.

    R4.35: a replica that is not in question any more loses its streaks.
    """
    suspects = _suspects(heard_since, now)
    with transaction.atomic():
        missed = NodeModel.objects.filter(Q(missed_reports__gt=0) | Q(missed_probes__gt=0))
        # Who holds a row is using or removing it; the next pass comes soon enough.
        left = missed.exclude(pk__in=suspects.values("pk")).order_by("id")
        if ids := list(left.select_for_update(skip_locked=True, of=("self",)).values_list("pk", flat=True)):
            NodeModel.objects.filter(pk__in=ids).update(missed_reports=0, missed_probes=0)
        asked = bool(suspects.exists())
        if asked:
            events.notify(CHANNEL, "")
    return asked


def claim(*, heard_since: datetime, now: datetime) -> list[Suspect]:
    """The replicas in question that nobody else looks at, for this caller alone; two statements."""
    free = Q(checked_at__isnull=True) | Q(checked_at__lt=now - CLAIMED_FOR)
    with transaction.atomic():
        rows = _suspects(heard_since, now).filter(free).order_by("id")
        locked = rows.select_for_update(skip_locked=True, of=("self",))
        found = [Suspect(*row) for row in locked.values_list(*_COLUMNS)]
        if found:
            NodeModel.objects.filter(pk__in=[one.id for one in found]).update(checked_at=now)
    return [replace(one, checked_at=now) for one in found]


def settle(findings: Mapping[Suspect, Finding], *, now: datetime) -> list[Suspect]:
    """Writes what was found of rows that are still those; answers the replicas that serve no more.

    Where the worker did not say it, the engine is stopped before its row goes.
    A constant number of statements for any number of rows. Most are alive: their rows are written by one
    statement in a transaction of its own, for picks wait while rows are locked.
    """
    _refresh([suspect for suspect, finding in findings.items() if finding.alive], now)
    missed = {suspect.id: suspect for suspect, finding in findings.items() if not finding.alive}
    if not missed:
        return []
    with transaction.atomic():
        rows = NodeModel.objects.loaded().filter(pk__in=missed).order_by("id").defer("model_options")
        found = [(row, missed[row.pk]) for row in rows.select_for_update(of=("self",))]
        same = [
            (row, findings[one])
            for row, one in found
            if (row.address, row.checked_at) == (one.address, one.checked_at)
        ]
        for row, finding in same:
            row.missed_reports, row.missed_probes = finding.missed_reports, finding.missed_probes
            row.exit_reported = finding.exit_reported
        update([row for row, finding in same if not finding.gone], _FOUND)
        gone = [row for row, finding in same if finding.gone]
        retire.end_lifeless([row for row, finding in same if finding.gone and finding.confirmed])
        if silent := [row.pk for row, finding in same if finding.gone and not finding.confirmed]:
            terminations.lose_all(silent, now=now)
    return [missed[row.pk] for row in gone]


def _refresh(alive: Sequence[Suspect], now: datetime) -> None:
    if not alive:
        return
    values: dict[str, Any] = {
        "ids": [one.id for one in alive],
        "addresses": [one.address for one in alive],
        "claims": [one.checked_at for one in alive],
        "loaded": ReplicaState.LOADED,
        "now": now,
    }
    with connection.cursor() as cursor:
        cursor.execute(_REFRESH, values)


_REFRESH = """
WITH same AS (
    SELECT r.id FROM node_models AS r
      JOIN unnest(%(ids)s::uuid[], %(addresses)s::text[], %(claims)s::timestamptz[])
           AS one(id, address, checked_at) USING (id, address, checked_at)
     WHERE r.state = %(loaded)s
     ORDER BY r.id FOR UPDATE OF r
)
UPDATE node_models AS r SET
    missed_reports = 0, missed_probes = 0, exit_reported = false,
    updated_at = greatest(r.updated_at, %(now)s::timestamptz)
FROM same WHERE r.id = same.id
"""
"""A pick may have been later than the look began: its time stays."""


async def note_exits(database: Rows, node_id: UUID, ended: Sequence[ExitReport]) -> int:
    """Puts the replicas of these processes in question at once; answers how many there are. One statement.

    It removes none: a report may come late, when another engine has the same key and port. The look that
    follows asks the worker what runs now, and its word of after the report decides (`evidence.judge`).
    """
    named = json.dumps([vars(one) for one in ended])
    values = {"node": node_id, "named": named, "loaded": ReplicaState.LOADED, "channel": CHANNEL}
    return len(await database.rows(_NOTE_EXITS, values))


_NOTE_EXITS = """
WITH named AS (
    SELECT * FROM jsonb_to_recordset(%(named)s::jsonb) AS one(process_key text, address text)
), found AS (
    SELECT r.id FROM node_models AS r
     WHERE r.node_id = %(node)s AND r.state = %(loaded)s AND EXISTS (
               SELECT FROM named AS n
                WHERE n.process_key = r.model_name || '#' || r.replica_index AND n.address = r.address)
     ORDER BY r.id FOR UPDATE OF r
), marked AS (
    UPDATE node_models AS r SET exit_reported = true, checked_at = NULL FROM found
     WHERE r.id = found.id AND r.state = %(loaded)s RETURNING r.id
)
SELECT id, pg_notify(%(channel)s, '') FROM marked
"""
"""A look that is under way loses its claim with `checked_at`: it may have asked before the engine ended."""


def _suspects(heard_since: datetime, now: datetime) -> NodeModelQuerySet:
    """R4.33, R4.37. A node that is silent is judged by the liveness pass, whole."""
    stale = Q(node__status="healthy", updated_at__lt=now - STALE)
    return NodeModel.objects.loaded().filter(
        stale | Q(exit_reported=True),
        node__node_type="backend",
        node__last_heartbeat__gte=heard_since,
    )
