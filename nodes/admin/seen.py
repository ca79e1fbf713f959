"""What an admin saw when a page was made, and what has happened to the node since.

A page carries the node's revision and its newest event. A decision on an older revision
than the row's writes nothing and names what happened in between.
"""

from collections.abc import Sequence
from uuid import UUID

from django.db.models import OuterRef, Subquery, Value
from django.db.models.functions import Coalesce
from django.utils.text import Truncator

from nodes.admin import words
from nodes.models import NodeEvent

_MOST_TOLD = 5
_LONGEST_WHY = 200


def newest_event(node_ref: str = "pk") -> Coalesce:
    """Annotation: the id of the node's newest event, 0 if it has none; `node_ref` is the node's id.

    In the statement that reads the row, so that the two belong together.
    """
    events = NodeEvent.objects.filter(node_id=OuterRef(node_ref)).order_by("-id")
    return Coalesce(Subquery(events.values("id")[:1]), Value(0))


def since(node_id: UUID, event_id: int) -> str:
    """What has happened to the node after that event, in a sentence; claims that changed nothing left out."""
    claims = NodeEvent.Kind.CONFLICT
    events = NodeEvent.objects.filter(node_id=node_id, id__gt=event_id).exclude(kind=claims).order_by("id")
    told = [_line(event) for event in events[: _MOST_TOLD + 1]]
    if not told:
        return "the node was changed in the meantime"
    return "changed in the meantime: " + _joined(told)


def _joined(told: Sequence[str]) -> str:
    more = "; and more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more


def _line(event: NodeEvent) -> str:
    why = "; ".join(filter(None, (event.cause, words.detail(event.detail))))
    told = f"{event.get_kind_display().lower()} by {event.actor} at {words.plain_time(event.at)}"
    return f"{told} ({Truncator(why).chars(_LONGEST_WHY)})" if why else told
