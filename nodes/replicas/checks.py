"""Liveness checks of loaded replicas: suspects, claims of controllers, and results.

A loaded replica is suspect when it was silent for two minutes (C3), or at once when its worker reports that
the engine has ended (`report_exits`). `request_checks` wakes the controllers; `claim_suspects` assigns each
row to one of them, for the longest duration of a check; `record_results` writes the results. No lock is held
between the last two: a result names row, address and claim, so it does not apply to a row that was replaced
or claimed since.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q

from localai_cluster.kit.leases import claim_rows, update_rows
from nodes.models import NodeModel, ReplicaState
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import engines, terminations
from nodes.replicas.evidence import CheckResult, Suspect
from nodes.replicas.statements import StatementRunner
from operations.changes import events

CHANNEL = "cluster_replica_checks"
"""NOTIFY channel: there are suspect engines."""
STALE = timedelta(seconds=120)
"""Silence after which a replica is suspect (C3)."""
CLAIMED_FOR = timedelta(seconds=20)
"""Duration of a claim: longer than a check, shorter than the pause between two passes."""
_RESULT_COLUMNS = ["missed_reports", "missed_probes", "exit_reported"]
_COLUMNS = (
    *("node", "model_name", "replica_index", "address", *_RESULT_COLUMNS),
    *("node__name", "node__engine_token", "node__weak_identity"),
)


@dataclass(frozen=True)
class ExitReport:
    """An engine process that has ended by itself, as its worker names it: key, and address of its replies."""

    process_key: str
    address: str


def request_checks(*, heard_since: datetime, now: datetime) -> bool:
    """Wake the controllers if there are suspect engines; return True if so.

    A replica that is no longer suspect loses its streaks of misses (R4.35).
    """
    suspects = _suspects(heard_since, now)
    with transaction.atomic():
        missed = NodeModel.objects.filter(Q(missed_reports__gt=0) | Q(missed_probes__gt=0))
        # The holder of a locked row is using or removing it; the next pass comes soon enough.
        cleared = missed.exclude(pk__in=suspects.values("pk")).order_by("id")
        claim_rows(cleared.only("pk"), missed_reports=0, missed_probes=0)
        has_suspects = bool(suspects.exists())
        if has_suspects:
            events.notify(CHANNEL, "")
    return has_suspects


def claim_suspects(*, heard_since: datetime, now: datetime) -> list[Suspect]:
    """Claim and return the suspects that no other controller checks; two statements."""
    free = Q(checked_at__isnull=True) | Q(checked_at__lt=now - CLAIMED_FOR)
    suspects = _suspects(heard_since, now).filter(free).order_by("id")
    return [
        Suspect(
            *(row.id, row.node_id, row.model_name, row.replica_index, row.address, now),
            *(row.missed_reports, row.missed_probes, row.exit_reported),
            *(row.node.name, row.node.engine_token, row.node.weak_identity),
        )
        for row in claim_rows(suspects.select_related("node").only(*_COLUMNS), checked_at=now)
    ]


def record_results(findings: Mapping[Suspect, CheckResult], *, now: datetime) -> list[Suspect]:
    """Write the results of unchanged rows; return the replicas that do not serve any more.

    If the worker did not report the end itself, the engine is stopped before its row is removed.
    A constant number of statements for any number of rows. Most engines are alive: one statement in a
    transaction of its own writes their rows, because picks wait while rows are locked.
    """
    _refresh([suspect for suspect, finding in findings.items() if finding.alive], now)
    missed = {suspect.id: suspect for suspect, finding in findings.items() if not finding.alive}
    if not missed:
        return []
    with transaction.atomic():
        rows = NodeModel.objects.loaded().filter(pk__in=missed).order_by("id").defer("model_options")
        pairs = [(row, missed[row.pk]) for row in rows.select_for_update(of=("self",))]
        results = [
            (row, findings[suspect])
            for row, suspect in pairs
            if (row.address, row.checked_at) == (suspect.address, suspect.checked_at)
        ]
        for row, finding in results:
            row.missed_reports, row.missed_probes = finding.missed_reports, finding.missed_probes
            row.exit_reported = finding.exit_reported
        update_rows([row for row, finding in results if not finding.gone], _RESULT_COLUMNS)
        ended_rows = [row for row, finding in results if finding.gone]
        engines.end_confirmed([row for row, finding in results if finding.gone and finding.confirmed])
        if silent := [row.pk for row, finding in results if finding.gone and not finding.confirmed]:
            terminations.lose_all(silent, now=now)
    return [missed[row.pk] for row in ended_rows]


def _refresh(alive: Sequence[Suspect], now: datetime) -> None:
    if not alive:
        return
    values: dict[str, Any] = {
        "ids": [suspect.id for suspect in alive],
        "addresses": [suspect.address for suspect in alive],
        "claims": [suspect.checked_at for suspect in alive],
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
"""A pick may be later than the start of the check: its time stays."""


async def report_exits(database: StatementRunner, node_id: UUID, ended: Sequence[ExitReport]) -> int:
    """Mark the replicas of these processes as suspect at once; return their number. One statement.

    No replica is removed: a report may come late, when another engine has the same key and port. The check
    that follows requests the worker's current list, which decides (`evidence.judge`).
    """
    named = json.dumps([vars(report) for report in ended])
    values = {"node": node_id, "named": named, "loaded": ReplicaState.LOADED, "channel": CHANNEL}
    return len(await database.fetch_rows(_NOTE_EXITS, values))


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
"""A running check loses its claim with `checked_at`: its list may be older than the engine's end."""


def _suspects(heard_since: datetime, now: datetime) -> NodeModelQuerySet:
    """Return the suspects (R4.33, R4.37). The liveness pass handles silent nodes as a whole."""
    stale = Q(node__status="healthy", updated_at__lt=now - STALE)
    return NodeModel.objects.loaded().filter(
        stale | Q(exit_reported=True),
        node__node_type="backend",
        node__last_heartbeat__gte=heard_since,
    )
