"""Keeps what is known of nodes that fell silent together, and tells it: the only writer of `MassSilence`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from localai_cluster.accounts.actors import Actor
from nodes.models import BackendNode, MassSilence, NodeEvent
from nodes.registry import timeline
from nodes.registry.lifecycle import fell_silent
from nodes.registry.timeline import Entry


@dataclass(frozen=True)
class Held:
    """So many of so many nodes are silent, and kept."""

    since: datetime
    until: datetime
    silent: int
    of: int

    def __str__(self) -> str:
        return f"{self.silent} of {self.of} nodes fell silent at once; kept until {self.until:%H:%M} UTC"


def standing() -> Held | None:
    """What holds now; one query."""
    row = MassSilence.objects.first()
    return None if row is None else Held(row.since, row.until, len(row.nodes), row.of)


def hold(
    nodes: Sequence[UUID], *, since: datetime, until: datetime, of: int, actor: Actor, now: datetime
) -> None:
    """Keeps these silent nodes; those that were not kept yet have it in their timeline.

    Needs a transaction, in which no one else decides. A constant number of statements.
    """
    silent = sorted(map(str, nodes))
    former = MassSilence.objects.first()
    if former is not None and (former.nodes, former.of, former.until) == (silent, of, until):
        return
    MassSilence.objects.update_or_create(
        id=MassSilence.ONLY, defaults={"since": since, "until": until, "nodes": silent, "of": of}
    )
    known = frozenset(former.nodes if former else ())
    fresh = [node for node in nodes if str(node) not in known]
    if fresh:
        _tell(fresh, Held(since, until, len(silent), of), actor, now)


def give_up(node_id: UUID, *, limit: float, actor: Actor, now: datetime) -> bool:
    """Declare a kept node gone that has no listener on the bus either; return True if it was kept until now.

    The question left through a live connection, so we are not cut off from this node. A node that was heard
    within `limit` seconds stays.
    """
    row = MassSilence.objects.first()
    if row is None or str(node_id) not in row.nodes:
        return False
    detail = ", and nothing listens for it on the bus"
    return fell_silent([node_id], limit=limit, actor=actor, now=now, detail=detail) > 0


def release() -> None:
    """Nothing is kept any more."""
    MassSilence.objects.all().delete()


def _tell(nodes: Collection[UUID], held: Held, actor: Actor, now: datetime) -> None:
    rows = BackendNode.objects.filter(pk__in=nodes).order_by("id").values_list("id", "name", "status")
    kind = NodeEvent.Kind.SILENCE_HELD
    entries = [Entry(id, name, kind, actor, str(held), status, status) for id, name, status in rows]
    timeline.record(*entries, at=now)
