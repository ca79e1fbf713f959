"""What recurs does not read the history: 90 days keep 100,000 operations, each with a target per node."""

import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from localai_cluster import scraping
from localai_cluster.kit import clock
from nodes.backends import admission, intents
from nodes.loading import load_request
from nodes.reconcilers import wake_ups
from nodes.reconcilers.intents import end_stale_intents
from nodes.replicas import drains, slots, stops
from operations.api import history
from operations.changes import feed
from operations.ledger import attempts
from operations.ledger.progress import Tick
from operations.models import Operation
from tests.measure import growth
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db(transaction=True)

_ENDED_SQL = """
    INSERT INTO operations (
        id, kind, key, element, payload, result, by_parts, waves, status, phase, message, error, progress,
        current_bytes, total_bytes, actor, client_address, request_id, attempts, next_attempt_at, seq,
        created_at, finished_at, dismissed_by, dismissed_comment, updated_at, node_name, lost_leases,
        lease_owner, fence
    ) SELECT
        gen_random_uuid(), CASE mod(n, 2) WHEN 0 THEN 'backend_upgrade' ELSE 'model_load' END, 'k' || n,
        'm' || n, '{}', '{}', mod(n, 2) = 0, '',
        CASE mod(n, 50) WHEN 0 THEN 'cancelled' ELSE 'completed' END, '', '', '', 100,
        0, 0, 'a', '', '', 0, day, 0, day, day, '', '', day, '', 0, '', 0
    FROM generate_series(1, 6000) n CROSS JOIN (SELECT %s::timestamptz AS day) d
"""
_TARGETS_SQL = """
    INSERT INTO operation_targets (
        operation_id, node_id, node_name, status, phase, percentage, current_bytes, total_bytes, file_name,
        error, reason, attempts, waits_for_node, intent_id, finished_at
    ) SELECT
        id, gen_random_uuid(), 'n', CASE status WHEN 'completed' THEN 'success' ELSE 'cancelled' END, '', 100,
        0, 0, '', '', '', 0, false, gen_random_uuid(), finished_at
    FROM operations, generate_series(1, 3)
"""
_FULL_SCAN = re.compile(r"Seq Scan on (?:operations|operation_targets)\b")


def _plant_history() -> None:
    with connection.cursor() as cursor:
        cursor.execute(_ENDED_SQL, [growth.NOON])
        cursor.execute(_TARGETS_SQL)
        cursor.execute("ANALYZE")


class _Statements:
    """The statements on operations that ran, each with the first work that ran it."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[str, Any]] = {}
        self.work = ""

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)\b", sql) and "operation" in sql:
            self.first.setdefault(sql, (self.work, params))
        return execute(sql, params, many, context)

    def reading_all(self) -> list[tuple[str, str]]:
        """Return the works with a statement whose plan reads all operations or targets."""
        found = []
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
            for sql, (work, params) in self.first.items():
                cursor.execute(f"EXPLAIN {sql}", params or None)
                if _FULL_SCAN.search("\n".join(line for (line,) in cursor.fetchall())):
                    found.append((work, sql))
        return found


def _cancel_installs(works: growth.Works) -> None:
    """Cancel an operation on all nodes whose commands were sent, as its controller sees it."""
    works.turn += 1
    works.request_installs()
    works.claim_installs()
    reports = {(intent.id, intent.fence): [Tick("downloading")] for intent in works.claimed}
    assert not intents.record(reports, now=clock.now())
    row = works.claimed[0].row
    intents.record_failed_contact(row.node_id, "silent", now=clock.now())
    admission.cancel(row.operation_id, actor="a", now=clock.now())
    cancelled = intents.claim("c", now=clock.now(), lease=600, limit=len(works.claimed))
    assert cancelled
    intents.delete_cancelled(
        {(intent.id, intent.fence): "it stopped" for intent in cancelled}, now=clock.now()
    )


def _attempt_load() -> None:
    (claimed,) = attempts.claim("c", now=clock.now(), lease=60, limit=5)
    attempts.renew("c", [claimed.id], now=clock.now(), lease=60)
    attempts.reap(now=clock.now())
    attempts.release("c", now=clock.now())


def _read_history_of_node(node: UUID) -> None:
    history.read_after(history.matching_operations({"node": node}), None, 50)


def test_no_recurring_statement_reads_the_history() -> None:
    """Passes, claims, reports and outcomes use an index of what is active (architecture: rows hold state)."""
    growth.plant(20)
    _plant_history()
    works, statements = growth.Works(API_KEY), _Statements()
    load = load_request.request_scale_up("m1", allowed_nodes=None, actor="a", reason="r")
    Operation.objects.filter(pk=load.id).update(status="waiting_for_nodes")
    recurring: list[tuple[str, Callable[[], object]]] = [
        *works.all(),
        ("an operation is cancelled", lambda: _cancel_installs(works)),
        ("an attempt of a load", _attempt_load),
        ("stale intents", lambda: end_stale_intents(now=clock.now())),
        ("a node has changed", lambda: wake_ups.wake_waiting_work(None)),
        ("nodes of older loads", lambda: load_request.nodes_claimed_before(clock.now(), clock.now())),
        ("abandoned loads", lambda: slots.end_abandoned_loads(now=clock.now())),
        ("abandoned unloads", drains.return_abandoned),
        ("due stops", lambda: stops.claim_due(16, now=clock.now())),
        ("live list of operations", feed.snapshot),
        ("metrics", lambda: scraping.read_metrics(clock.now())),
        ("history of a node", lambda: _read_history_of_node(load.id)),
    ]
    works.prepare()
    with connection.execute_wrapper(statements):
        for statements.work, work in recurring:
            work()
    assert statements.reading_all() == []
