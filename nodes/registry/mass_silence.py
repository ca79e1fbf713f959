"""The mass-disruption hold on nodes that became silent together: the only writer of `MassSilence`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from localai_cluster.accounts.actors import Actor
from nodes.models import BackendNode, MassSilence, NodeEvent
from nodes.registry import timeline
from nodes.registry.lifecycle import mark_silent
from nodes.registry.timeline import Entry


@dataclass(frozen=True)
class CurrentHold:
    """The active hold: `silent` of `of` nodes are silent and not taken offline before `until`."""

    since: datetime
    until: datetime
    silent: int
    of: int

    def __str__(self) -> str:
        return f"{self.silent} of {self.of} nodes fell silent at once; kept until {self.until:%H:%M} UTC"


def current_hold() -> CurrentHold | None:
    """Return the active hold; None if there is none. One query."""
    row = MassSilence.objects.first()
    return None if row is None else CurrentHold(row.since, row.until, len(row.nodes), row.of)


def hold(
    nodes: Sequence[UUID], *, since: datetime, until: datetime, of: int, actor: Actor, now: datetime
) -> None:
    """Start or update the hold on these silent nodes; each node that was not held before gets an event.

    Needs a transaction that excludes other decisions. A constant number of statements.
    """
    silent = sorted(map(str, nodes))
    current = MassSilence.objects.first()
    if current is not None and (current.nodes, current.of, current.until) == (silent, of, until):
        return
    MassSilence.objects.update_or_create(
        id=MassSilence.ONLY, defaults={"since": since, "until": until, "nodes": silent, "of": of}
    )
    held_ids = frozenset(current.nodes if current else ())
    newly_held = [node for node in nodes if str(node) not in held_ids]
    if newly_held:
        _record_hold(newly_held, CurrentHold(since, until, len(silent), of), actor, now)


def release_silent_node(node_id: UUID, *, limit: float, actor: Actor, now: datetime) -> bool:
    """Take a held node offline, because nothing listens for it on the bus; return True if it was held.

    The caller's request found no listener over a live connection, so the node is disconnected, and not this
    process. A node with a heartbeat within the last `limit` seconds stays online.
    """
    row = MassSilence.objects.first()
    if row is None or str(node_id) not in row.nodes:
        return False
    detail = ", and nothing listens for it on the bus"
    return mark_silent([node_id], limit=limit, actor=actor, now=now, detail=detail) > 0


def release() -> None:
    """Delete the hold, if there is one."""
    MassSilence.objects.all().delete()


def _record_hold(nodes: Collection[UUID], current_hold: CurrentHold, actor: Actor, now: datetime) -> None:
    rows = BackendNode.objects.filter(pk__in=nodes).order_by("id").values_list("id", "name", "status")
    kind = NodeEvent.Kind.SILENCE_HELD
    entries = [Entry(id, name, kind, actor, str(current_hold), status, status) for id, name, status in rows]
    timeline.record(*entries, at=now)
