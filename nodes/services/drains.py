"""Drains: an admin's and a worker's own, what remains of one, and how it ends.

A draining node gets nothing new and keeps its replicas until nothing runs on them or the deadline passes, so
that a stopping worker can wait for its last requests (`contract/worker.md` §19).
"""

from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Q, Sum

from localai_cluster import conf, errors
from nodes import actors
from nodes.actors import Actor
from nodes.models import BackendNode, NodeEvent
from nodes.services.change import Change, changing
from nodes.services.replicas import in_flight
from nodes.states import Event

OWN_DEADLINE = 60.0
"""Seconds a stopping worker has for its whole way out (§0.6)."""


def drain(
    node_id: UUID, *, actor: Actor, now: datetime, reason: str = "", deadline: float | None = None
) -> BackendNode:
    """R1.19: nothing new goes there, what runs goes on, for `deadline` seconds at most (default: settings).

    Draining again keeps author and time, and takes over a new reason or deadline.
    """
    seconds = conf.cluster().drain_deadline if deadline is None else deadline
    with changing(node_id, now) as change:
        fresh = change.happen(Event.DRAINED, actor, reason=reason, detail={"deadline_seconds": seconds})
        if fresh:
            change.set(drain_deadline=now + timedelta(seconds=seconds))
        elif reason or deadline is not None:
            change.set(
                drain_deadline=now + timedelta(seconds=seconds),
                drain_reason=(reason or change.node.drain_reason)[:255],
            )
            change.tell(NodeEvent.Kind.DRAINED, actor, reason, {"deadline_seconds": seconds})
    return change.node


def drain_itself(node_id: UUID, *, now: datetime, reason: str = "its worker is stopping") -> None:
    """§1.3: the worker stops; an admin's drain that stands already keeps its author and deadline."""
    with changing(node_id, now) as change:
        if change.happen(Event.DRAINED_ITSELF, actors.WORKER, reason=reason):
            change.set(drain_deadline=now + timedelta(seconds=OWN_DEADLINE))


def resume(node_id: UUID, *, actor: Actor, now: datetime, reason: str = "") -> BackendNode:
    """R1.18: ends any drain and takes "unhealthy" back; Conflict unless there is something to resume from."""
    with changing(node_id, now) as change:
        change.happen(Event.RESUMED, actor, reason=reason or "resumed, waiting for its next heartbeat")
    return change.node


def resume_itself(node_id: UUID, *, now: datetime) -> None:
    """§1.4: the worker takes its own drain back; Conflict for an admin's."""
    with changing(node_id, now) as change:
        change.happen(Event.RESUMED_ITSELF, actors.WORKER)


def finish_drains(*, now: datetime) -> int:
    """Ends the drains on which nothing runs or whose deadline has passed; answers how many nodes."""
    due = (
        BackendNode.objects.filter(status="draining", replicas__isnull=False)
        .annotate(running=Sum("replicas__in_flight"))
        .filter(Q(running=0) | Q(drain_deadline__lte=now))
        .order_by("id")
    )
    return sum(_finish(node_id, now) for node_id in due.values_list("pk", flat=True))


def _finish(node_id: UUID, now: datetime) -> int:
    try:
        with changing(node_id, now) as change:
            return _end(change, now)
    except (errors.NotFound, errors.Conflict):
        return 0  # somebody was faster: deregistered, resumed


def _end(change: Change, now: datetime) -> int:
    running = in_flight(change.node.id)
    late = change.node.drain_deadline is not None and change.node.drain_deadline <= now
    if running and not late:
        return 0
    cause = f"the deadline has passed with {running} running" if running else "nothing runs any more"
    change.happen(Event.DRAIN_ENDED, actors.task("drains"), reason=cause, detail={"in_flight": running})
    return 1
