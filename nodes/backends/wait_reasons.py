"""The reason why each waiting operation waits, and its position in the queue, at the time of the read.

A position changes whenever other work proceeds, so it is no column: this module computes positions when
operations are read. Two statements suffice for any number of operations.

A node runs `intents.PARALLEL_PER_NODE` intents at a time, the longest due first; its other due intents have a
position in its queue. Operations that are leased as one unit (loads, unloads) share one queue for all
controllers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection

from nodes.backends.intents import HELD_BACK_CONDITION, PARALLEL_PER_NODE, RUNS_FIRST_CONDITION
from operations.models import ACTIVE

_WAITING_TARGETS_SQL = f"""
    WITH asked AS (
        SELECT t.operation_id, t.node_id, t.node_name, t.intent_id, o.payload->>'backend' AS backend
        FROM operation_targets t JOIN operations o ON o.id = t.operation_id
        WHERE t.operation_id = ANY(%(ids)s) AND t.status = 'queued'
            AND (t.intent_id IS NOT NULL OR t.wave = o.open_wave) AND o.by_parts
    ), due AS (
        SELECT i.id, row_number() OVER (PARTITION BY i.node_id ORDER BY i.next_retry_at, i.id) AS place
        FROM pending_backend_ops i
        WHERE i.node_id IN (SELECT node_id FROM asked) AND i.lease_until IS NULL
            AND i.next_retry_at <= %(now)s AND NOT {HELD_BACK_CONDITION}
    ), running AS (
        SELECT node_id, count(*) AS number FROM pending_backend_ops
        WHERE node_id IN (SELECT node_id FROM asked) AND lease_until IS NOT NULL GROUP BY node_id
    )
    SELECT asked.operation_id, asked.node_id, asked.node_name, n.status,
        CASE n.status WHEN 'offline' THEN n.offline_at WHEN 'unhealthy' THEN n.unhealthy_at
            WHEN 'draining' THEN n.drained_at END,
        due.place, coalesce(running.number, 0), other.op, other.backend, first.actor
    FROM asked
    JOIN backend_nodes n ON n.id = asked.node_id
    LEFT JOIN due ON due.id = asked.intent_id
    LEFT JOIN running ON running.node_id = asked.node_id
    LEFT JOIN pending_backend_ops i ON i.id = asked.intent_id
    LEFT JOIN LATERAL (
        SELECT o.op, o.backend, o.operation_id FROM pending_backend_ops o
        WHERE o.node_id = asked.node_id AND o.backend = asked.backend
            AND (i.id IS NULL OR o.id <> i.id AND {RUNS_FIRST_CONDITION})
        ORDER BY o.lease_until IS NULL, o.requested_at, o.id LIMIT 1
    ) other ON true
    LEFT JOIN operations first ON first.id = other.operation_id"""

_WAITING_OPERATIONS_SQL = """
    WITH due AS (
        SELECT id, row_number() OVER (ORDER BY next_attempt_at, id) AS place FROM operations
        WHERE status = 'pending' AND next_attempt_at <= %(now)s AND NOT by_parts
    )
    SELECT o.id, due.place, child.kind, child.element, child.node_name, child.actor
    FROM operations o
    LEFT JOIN due ON due.id = o.id
    LEFT JOIN operations child ON child.parent_id = o.id
        AND child.status IN ('pending', 'processing', 'waiting_for_nodes')
    WHERE o.id = ANY(%(ids)s) AND NOT o.by_parts AND (due.id IS NOT NULL OR child.id IS NOT NULL)"""

_NOUN_BY_OP = {"install": "install", "upgrade": "upgrade", "delete": "removal"}


def in_words(op: str) -> str:
    """Return the noun for an op of `PendingBackendOp`."""
    return _NOUN_BY_OP.get(op, op)


@dataclass(frozen=True)
class Wait:
    """The reason why an operation or a target waits."""

    text: str
    since: datetime | None = None
    place: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the API."""
        fields = {"waitsFor": self.text, "waitsSince": self.since and self.since.isoformat()}
        return {name: value for name, value in fields.items() if value} | (
            {"queuePlace": self.place} if self.place else {}
        )


def ordinal(number: int) -> str:
    """Return the English ordinal: `1st`, `2nd`, `11th`, `23rd`."""
    teens = 10 <= number % 100 <= 20
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def target_wait(
    name: str,
    status: str,
    since: datetime | None,
    place: int | None,
    running: int,
    blocker: tuple[str, str, str] | None,
) -> Wait | None:
    """Return the wait of a queued target.

    None if the target already has a reason, such as a pause after a failure. `blocker`: the op that the node
    runs on the same backend, the backend, and the requester.
    """
    if status != "healthy":
        return Wait(f"waits for node {name}, which is {status}", since=since)
    if blocker is not None:
        op, backend, actor = blocker
        return Wait(f"waits for the {in_words(op)} of {backend} by {actor} on {name}")
    if place is None:
        return None
    if place + running <= PARALLEL_PER_NODE:
        return Wait("waits for a controller")
    busy = f"{running} of {PARALLEL_PER_NODE} running" if running else f"{PARALLEL_PER_NODE} at a time"
    return Wait(f"{ordinal(place)} in the queue of node {name} ({busy})", place=place)


def annotate(entries: Sequence[dict[str, Any]], *, now: datetime) -> None:
    """Add the wait reasons to operations in the form of the API, and to their targets."""
    ids = [entry["jobID"] for entry in entries if entry["status"] in ACTIVE]
    if not ids:
        return
    waits_by_target = {
        (str(row[0]), str(row[1])): _wait_of_target(row) for row in _rows(_WAITING_TARGETS_SQL, ids, now)
    }
    waits_by_operation = {
        str(row[0]): _wait_of_operation(row) for row in _rows(_WAITING_OPERATIONS_SQL, ids, now)
    }
    for entry in entries:
        _add_wait(entry, waits_by_operation.get(entry["jobID"]))
        nodes = entry.get("nodes", ())
        for target in nodes:
            wait = waits_by_target.get((entry["jobID"], target["node_id"]))
            _add_wait(target, wait)
            if len(nodes) == 1:
                _add_wait(entry, wait)


def _rows(statement: str, ids: Iterable[str], now: datetime) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, {"ids": list(ids), "now": now})
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def _wait_of_target(row: tuple[Any, ...]) -> Wait | None:
    _, _, name, status, since, place, running, op, backend, actor = row
    return target_wait(
        name, status, since, place, running, (op, backend, actor or "somebody") if op else None
    )


def _wait_of_operation(row: tuple[Any, ...]) -> Wait:
    _, place, kind, element, node, actor = row
    if kind is None:
        return Wait(f"{ordinal(place)} in the queue of the controllers", place=place)
    suffix = f" on {node}" if node else ""
    word = kind.removeprefix("backend_")
    return Wait(f"waits for the {_NOUN_BY_OP.get(word, kind)} of {element} by {actor}{suffix}")


def _add_wait(entry: dict[str, Any], wait: Wait | None) -> None:
    if wait is not None:
        entry.update(wait.fields())
