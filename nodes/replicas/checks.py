"""Liveness checks of loaded replicas: suspects, claims of controllers, and results.

A loaded replica is suspect after two minutes of silence (C3), or at once when its worker reports that the
engine has ended (`report_exits`). `request_checks` wakes the controllers; `claim_suspects` assigns each row
to one controller, for the longest duration of a check; `record_results` writes the results. No lock is held
between the claim and the result: a result names row, address and claim, so it does not apply to a row that
was replaced or claimed since.
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
from nodes.replicas.evidence import CheckResult
from nodes.replicas.statements import StatementRunner
from operations.changes import events

CHANNEL = "cluster_replica_checks"
"""NOTIFY channel: some engines are suspect and must be checked."""
SILENCE_LIMIT = timedelta(seconds=120)
"""Time without an update of a replica's row after which the replica is suspect (C3)."""
CLAIM_DURATION = timedelta(seconds=20)
"""Time for which a controller has a suspect to itself: longer than a check, shorter than the pause between
two passes."""
_RESULT_COLUMNS = ["missed_reports", "missed_probes", "exit_reported"]
_SUSPECT_COLUMNS = (
    *("node", "model_name", "replica_index", "address", *_RESULT_COLUMNS),
    *("node__name", "node__engine_token", "node__weak_identity"),
)


@dataclass(frozen=True)
class ExitReport:
    """A worker's report that an engine process has ended by itself: its key, and the address that it had."""

    process_key: str
    address: str


def request_checks(*, heartbeat_since: datetime, now: datetime) -> bool:
    """Wake the controllers if any engine is suspect; return True if so.

    The function also resets the counts of misses of replicas that are no longer suspect (R4.35).
    """
    suspects = _suspects(heartbeat_since, now)
    with transaction.atomic():
        missed = NodeModel.objects.filter(Q(missed_reports__gt=0) | Q(missed_probes__gt=0))
        # The holder of a locked row is using or removing it; the next pass comes soon enough.
        cleared = missed.exclude(pk__in=suspects.values("pk")).order_by("id")
        claim_rows(cleared.only("pk"), missed_reports=0, missed_probes=0)
        has_suspects = bool(suspects.exists())
        if has_suspects:
            events.notify(CHANNEL, "")
    return has_suspects


def claim_suspects(*, heartbeat_since: datetime, now: datetime) -> list[NodeModel]:
    """Claim and return the suspects, with their nodes, that no other controller is checking.

    Two statements. The rows have only `_SUSPECT_COLUMNS` and the time of this claim.
    """
    free = Q(checked_at__isnull=True) | Q(checked_at__lt=now - CLAIM_DURATION)
    suspects = _suspects(heartbeat_since, now).filter(free).order_by("id")
    rows = claim_rows(suspects.select_related("node").only(*_SUSPECT_COLUMNS), checked_at=now)
    for row in rows:
        row.checked_at = now
    return rows


def record_results(results_by_suspect: Mapping[NodeModel, CheckResult], *, now: datetime) -> list[NodeModel]:
    """Store the results of checks in unchanged rows; return the replicas that no longer serve.

    If the worker did not report the end itself, the engine is stopped before its row is removed. The number
    of statements is constant. Most engines are alive: one statement in a transaction of its own updates their
    rows, because picks wait while rows are locked.
    """
    _refresh([suspect for suspect, result in results_by_suspect.items() if result.alive], now)
    missed = {suspect.id: suspect for suspect, result in results_by_suspect.items() if not result.alive}
    if not missed:
        return []
    with transaction.atomic():
        rows = NodeModel.objects.loaded().filter(pk__in=missed).order_by("id").defer("model_options")
        pairs = [(row, missed[row.pk]) for row in rows.select_for_update(of=("self",))]
        results = [
            (row, results_by_suspect[suspect])
            for row, suspect in pairs
            if (row.address, row.checked_at) == (suspect.address, suspect.checked_at)
        ]
        for row, result in results:
            row.missed_reports, row.missed_probes = result.missed_reports, result.missed_probes
            row.exit_reported = result.exit_reported
        update_rows([row for row, result in results if not result.gone], _RESULT_COLUMNS)
        ended_rows = [row for row, result in results if result.gone]
        engines.end_confirmed([row for row, result in results if result.gone and result.confirmed])
        if silent := [row.pk for row, result in results if result.gone and not result.confirmed]:
            terminations.lose_all(silent, now=now)
    return [missed[row.pk] for row in ended_rows]


def _refresh(alive: Sequence[NodeModel], now: datetime) -> None:
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
        cursor.execute(_REFRESH_SQL, values)


_REFRESH_SQL = """
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
"""Statement that updates the rows of engines that are alive. If a pick has updated a row since the start of
the check, the later time stays."""


async def report_exits(database: StatementRunner, node_id: UUID, ended: Sequence[ExitReport]) -> int:
    """Mark the replicas of these processes as suspect at once; return their number. One statement.

    No replica is removed, because a late report may name a key and port that another engine has now. The next
    check requests the worker's current list, which decides (`evidence.judge`).
    """
    named = json.dumps([vars(report) for report in ended])
    values = {"node": node_id, "named": named, "loaded": ReplicaState.LOADED, "channel": CHANNEL}
    return len(await database.fetch_rows(_RECORD_EXITS_SQL, values))


_RECORD_EXITS_SQL = """
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
"""Statement that marks the rows of ended processes as suspect. It sets `checked_at` to NULL, so that a
running check loses its claim: its list of processes may be older than the engine's end."""


def _suspects(heartbeat_since: datetime, now: datetime) -> NodeModelQuerySet:
    """Return the suspects (R4.33, R4.37).

    Nodes without a recent heartbeat are left out: the liveness pass takes the whole node offline.
    """
    stale = Q(node__status="healthy", updated_at__lt=now - SILENCE_LIMIT)
    return NodeModel.objects.loaded().filter(
        stale | Q(exit_reported=True),
        node__node_type="backend",
        node__last_heartbeat__gte=heartbeat_since,
    )
