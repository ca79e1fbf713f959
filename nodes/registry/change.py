"""Changes to nodes: facts, columns and timeline, written together or not at all.

A service opens a `Change` on the locked row, applies events to it and saves once. The UPDATE names the
revision that was read, so a caller that forgot the lock overwrites nothing. This module converts facts to
columns: each fact has a time, an author and a reason. `apply_to_all` applies one event to many nodes in a
constant number of statements. Nodes are locked first, in the order of their ids, as by heartbeats, and their
replicas afterwards, so that a pass over the fleet and another transaction never deadlock.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.db import IntegrityError, connection, transaction
from django.db.models import CASCADE
from psycopg.errors import UniqueViolation

from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors, logs, names
from nodes.models import BackendNode, NodeEvent
from nodes.models.node import BackendNodeQuerySet
from nodes.registry import bus_credentials, states, timeline
from nodes.registry.states import FACT_COLUMNS, Event, Facts, facts_of
from nodes.registry.timeline import Entry
from nodes.replicas import engines, fleet_queries
from operations.changes import events

log = logging.getLogger(__name__)

_KIND_BY_EVENT = {
    Event.AUTO_APPROVED: NodeEvent.Kind.APPROVED,
    Event.DRAINED_ITSELF: NodeEvent.Kind.DRAINED,
    Event.RESUMED_ITSELF: NodeEvent.Kind.RESUMED,
    Event.HANDED_OVER: NodeEvent.Kind.CONFLICT_ACCEPTED,
}
ALWAYS_RECORDED_EVENTS = frozenset(
    {Event.REGISTERED, Event.DRAIN_ENDED, Event.HANDED_OVER, Event.DEREGISTERED}
)
"""Events that are recorded even when no fact changes."""
ENGINES_UNKNOWN_COLUMNS: Mapping[str, Any] = {
    "engines_gone_at": None,
    "engines_error": "",
    "engines_due_at": None,
}
"""Columns of a drained node for which it is unknown whether engines run: a controller checks it at once."""
_MAX_REASON_LENGTH = 255
_CHANGED_MEANWHILE_MESSAGE = "the node was changed in the meantime"


def event_kind(event: Event) -> NodeEvent.Kind:
    return _KIND_BY_EVENT.get(event) or NodeEvent.Kind(event.value)


def changed_columns(before: Facts, after: Facts, actor: Actor, reason: str, now: datetime) -> dict[str, Any]:
    """Return the columns in which `after` differs from `before`, each with time, author and reason."""
    changed: dict[str, Any] = {}
    for fact, (at, by, why) in FACT_COLUMNS.items():
        value = getattr(after, fact)
        if value != getattr(before, fact):
            stamp = (now, str(actor), reason[:_MAX_REASON_LENGTH]) if value else (None, "", "")
            changed |= dict(zip((at, by, why), stamp, strict=True))
    if after.drained != before.drained:
        changed |= {"drain_is_own": after.drained == "own", "drain_deadline": None, **ENGINES_UNKNOWN_COLUMNS}
    if after.offline != before.offline:
        # An absent worker is not asked for its backends: it is due when it is back.
        changed |= {"offline_recovers": after.offline == "silent", "inventory_due_at": None}
    return changed


class Change:
    """The changes to one locked node in this transaction; `save` writes them."""

    def __init__(self, node: BackendNode, now: datetime, request: str = "") -> None:
        self.node, self.now = node, now
        self._request = request or logs.request_id.get()
        self._columns: dict[str, Any] = {}
        self._entries: list[Entry] = []
        self.replicas_depart = False
        """True if the node's replicas depart when the change is saved."""

    def apply(
        self,
        event: Event,
        actor: Actor,
        *,
        reason: str = "",
        detail: Mapping[str, Any] | None = None,
        routine: bool = False,
    ) -> bool:
        """Apply `event`; return True if a fact changed. Raise Conflict if the table does not allow the event.

        A `routine` event is recorded only if a fact changes.
        """
        before, reason = facts_of(self.node), names.to_single_line(reason)
        after = states.apply(event, before)
        if isinstance(after, states.Refusal):
            raise errors.Conflict(after.reason, field="status")
        self.set(**changed_columns(before, after, actor, reason, self.now))
        if after != before or (event in ALWAYS_RECORDED_EVENTS and not routine):
            statuses = {"before": states.status_of(before), "after": states.status_of(after)}
            self.record_event(event_kind(event), actor, reason, detail, **statuses)
        ended_replicas = states.TRANSITIONS[event].replicas
        if ended_replicas == "all" or (
            ended_replicas == "idle" and not any(fleet_queries.lock_in_flight_counts(self.node.id).values())
        ):
            self.replicas_depart = True
        return after != before

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.node, name, value)
        self._columns |= values

    def record_event(
        self,
        kind: NodeEvent.Kind,
        actor: Actor,
        cause: str = "",
        detail: Mapping[str, Any] | None = None,
        *,
        before: str = "",
        after: str = "",
    ) -> None:
        """Add an event to the timeline; `before` and `after` default to the present status."""
        status = states.status_of(facts_of(self.node))
        statuses = before or status, after or status
        self._entries.append(
            Entry(
                self.node.id,
                self.node.name,
                kind,
                actor,
                names.to_single_line(cause),
                *statuses,
                detail or {},
                self._request,
            )
        )

    def save(self) -> None:
        save_all([self])

    @property
    def has_changes(self) -> bool:
        return bool(self._columns or self._entries)

    @property
    def ends_credentials(self) -> bool:
        """True if the node's bus credentials must be revoked: it has a new identity or lost its approval."""
        is_unapproved = "approved_at" in self._columns and self.node.approved_at is None
        return "fingerprint" in self._columns or is_unapproved

    def close(self) -> tuple[frozenset[str], list[Entry]]:
        """Return the set columns with the new revision, and the events, and forget both."""
        self.set(revision=self.node.revision + 1, updated_at=self.now)
        names_set, entries = frozenset(self._columns), self._entries
        self._columns, self._entries = {}, []
        return names_set, entries


def save_all(changes: Sequence[Change]) -> None:
    """Write changes to different nodes at one time, in a constant number of statements."""
    if departed := [change.node.id for change in changes if change.replicas_depart]:
        engines.depart(*departed, now=changes[0].now)
    changes = [change for change in changes if change.has_changes]
    if not changes:
        return
    if refused := [change.node.id for change in changes if change.ends_credentials]:
        bus_credentials.revoke(refused, changes[0].now)
    closed = [change.close() for change in changes]
    nodes = [change.node for change in changes]
    entries = [entry for _, new_entries in closed for entry in new_entries]
    _write(nodes, frozenset().union(*(names_set for names_set, _ in closed)))
    timeline.record(*entries, at=changes[0].now)
    for node in nodes:
        node.status = states.status_of(facts_of(node))
    _log(entries)


def _log(entries: Sequence[Entry]) -> None:
    for entry in entries:
        with logs.with_request_id(entry.request_id):
            cause = f" ({entry.cause})" if entry.cause else ""
            log.info("node %s: %s by %s%s", entry.node_name, entry.kind, entry.actor, cause)


def _write(nodes: Sequence[BackendNode], attributes: Collection[str]) -> None:
    """Write these attributes and a NOTIFY for each node, in one statement.

    Raises Conflict if the revision of one of them is no longer the one that was read.
    """
    fields = [f for f in BackendNode._meta.concrete_fields if f.name in attributes or f.attname in attributes]
    rows = [
        {"id": node.id, **{field.column: getattr(node, field.attname) for field in fields}} for node in nodes
    ]
    assignments = ", ".join(f'"{field.column}" = new."{field.column}"' for field in fields)
    statement = f"""
        WITH written AS (
            UPDATE backend_nodes AS node SET {assignments}
            FROM jsonb_populate_recordset(NULL::backend_nodes, %s::jsonb) AS new
            WHERE node.id = new.id AND node.revision = new.revision - 1 RETURNING node.id
        ) SELECT pg_notify(%s, id::text) FROM written
    """
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement, [json.dumps(rows, default=str), events.NODES])
            written = cursor.rowcount
    except IntegrityError as error:
        if not isinstance(error.__cause__, UniqueViolation):
            raise
        raise errors.Conflict(
            "another node has taken this name or secret in the meantime", field="name"
        ) from error
    if written != len(nodes):
        raise errors.Conflict(_CHANGED_MEANWHILE_MESSAGE, field="revision")


def lock_node(node_id: UUID, revision: int | None = None) -> BackendNode:
    """Lock the node's row until the transaction ends, and return it; raise NotFound.

    `revision` is the revision on which the caller's decision is based. Raises Conflict (field `revision`) if
    the node has changed since.
    """
    node = BackendNode.objects.select_for_update(no_key=True).filter(pk=node_id).first()
    if node is None:
        raise errors.NotFound("node not found")
    if revision is not None and node.revision != revision:
        raise errors.Conflict(_CHANGED_MEANWHILE_MESSAGE, field="revision")
    return node


@contextmanager
def node_change(node_id: UUID, now: datetime, revision: int | None = None) -> Iterator[Change]:
    """Lock the node, yield one change to it, and save the change at the end of the transaction.

    Raises like `lock_node`.
    """
    with transaction.atomic():
        change = Change(lock_node(node_id, revision), now)
        yield change
        change.save()


EventReason = Callable[[BackendNode], tuple[str, Mapping[str, Any]]]
"""Function that returns the cause and the detail of the event for one node."""


def lock_in_order(nodes: BackendNodeQuerySet) -> list[BackendNode]:
    """Lock the rows until the transaction ends, and return those that still match the query."""
    return list(nodes.order_by("id").select_for_update(no_key=True, of=("self",)))


def apply_to_all(
    nodes: Sequence[BackendNode], event: Event, actor: Actor, why: EventReason, *, now: datetime
) -> int:
    """Apply `event` to those locked nodes for which the table allows it; return their number."""
    changes: list[Change] = []
    for node in nodes:
        change = Change(node, now)
        reason, detail = why(node)
        with suppress(errors.Conflict):
            change.apply(event, actor, reason=reason, detail=detail)
        if change.has_changes:
            changes.append(change)
    save_all(changes)
    return len(changes)


def remove_all(nodes: BackendNodeQuerySet, actor: Actor, *, now: datetime, reason: str = "") -> set[UUID]:
    """Remove the nodes and all rows that belong to them (R1.21, R1.38, R1.39); return their ids.

    A constant number of statements. The lock also keeps out new rows that refer to a node.
    """
    with transaction.atomic():
        removed = list(nodes.order_by("id").select_for_update(of=("self",)))
        ids = [node.id for node in removed]
        if not ids:
            return set()
        engines.forget_nodes(*ids)
        bus_credentials.revoke(ids, now)
        if users := [node.auth_user_id for node in removed if node.auth_user_id is not None]:
            get_user_model().objects.filter(pk__in=users).delete()
        statuses = [states.status_of(facts_of(node)) for node in removed]
        entries = [
            Entry(
                node.id,
                node.name,
                NodeEvent.Kind.DEREGISTERED,
                actor,
                names.to_single_line(reason),
                status,
                status,
            )
            for node, status in zip(removed, statuses, strict=True)
        ]
        timeline.record(*entries, at=now)
        _delete(ids)
    _log(entries)
    return set(ids)


def _delete(ids: Sequence[UUID]) -> None:
    """Delete the nodes and the rows that Django would cascade to, with a NOTIFY for each, in one statement.

    Rows are locked in the order of their ids, as in all transactions that change many intents.
    """
    cascading = [rel for rel in BackendNode._meta.related_objects if rel.on_delete is CASCADE]
    tables = ["backend_nodes", *(rel.related_model._meta.db_table for rel in cascading)]
    columns = ["id", *(rel.field.column for rel in cascading)]
    deletions = ", ".join(
        f'd{number} AS (DELETE FROM "{table}" WHERE id IN (SELECT id FROM "{table}"'
        f' WHERE "{column}" = ANY(%(ids)s) ORDER BY id FOR UPDATE) RETURNING id)'
        for number, (table, column) in enumerate(zip(tables, columns, strict=True))
    )
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH {deletions} SELECT pg_notify(%(channel)s, id::text) FROM d0",
            {"ids": list(ids), "channel": events.NODES},
        )
