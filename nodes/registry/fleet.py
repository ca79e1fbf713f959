"""Apply one event to many nodes at once, in a constant number of statements.

The nodes are locked in the order of their ids before anything else, as heartbeats do it, and their replicas
after them, so that a pass over the fleet and another transaction never wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import F

from localai_cluster.accounts.actors import Actor
from nodes.models import BackendNode
from nodes.models.node import BackendNodeQuerySet
from nodes.registry import states, timeline
from nodes.registry.change import ALWAYS_TOLD, columns, kind_of
from nodes.registry.states import Event, facts_of
from nodes.registry.timeline import Entry
from nodes.replicas import retire
from operations.changes import events

Why = Callable[[BackendNode], tuple[str, Mapping[str, Any]]]
"""Returns the cause and detail of the event for a node."""


def lock_in_order(nodes: BackendNodeQuerySet) -> list[BackendNode]:
    """Lock the rows until the transaction ends, and return them without those that no longer match."""
    return list(nodes.order_by("id").select_for_update(no_key=True, of=("self",)))


def happen_to_all(
    nodes: Sequence[BackendNode], event: Event, actor: Actor, why: Why, *, now: datetime
) -> list[UUID]:
    """Apply `event` to those of the locked nodes for which the table allows it; return their ids."""
    entries: list[Entry] = []
    updates: dict[tuple[tuple[str, Any], ...], list[UUID]] = {}
    for node in nodes:
        before = facts_of(node)
        after = states.apply(event, before)
        if isinstance(after, states.Refusal) or (after == before and event not in ALWAYS_TOLD):
            continue
        cause, detail = why(node)
        statuses = states.status_of(before), states.status_of(after)
        entries.append(Entry(node.id, node.name, kind_of(event), actor, cause, *statuses, detail))
        changed = tuple(columns(before, after, actor, cause, now).items())
        updates.setdefault(changed, []).append(node.id)
    for values, ids in updates.items():
        rows = BackendNode.objects.filter(pk__in=ids)
        rows.update(**dict(values), revision=F("revision") + 1, updated_at=now)
    _publish(entries, event, now)
    return [entry.node_id for entry in entries]


def _publish(entries: Sequence[Entry], event: Event, now: datetime) -> None:
    if not entries:
        return
    ids = [entry.node_id for entry in entries]
    if states.TRANSITIONS[event].replicas == "all":
        retire.depart(*ids, now=now)
    timeline.record(*entries, at=now)
    events.notify(events.NODES, *map(str, ids))
