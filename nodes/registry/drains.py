"""Drains: an admin's and a worker's own, what remains of one, and how it ends.

A draining node gets nothing new and keeps its replicas until nothing runs on them or the deadline passes, so
that a stopping worker can wait for its last requests (`contract/worker.md` §19).
"""

from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Max, Q, Sum

from localai_cluster.accounts import actors
from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import conf, errors, names
from nodes.decisions.fleet_queries import in_flight
from nodes.models import BackendNode, NodeEvent, NodeModel
from nodes.registry.change import Change, changing
from nodes.registry.fleet import happen_to_all, lock_in_order
from nodes.registry.states import Event

WAITING = "resumed, waiting for its next heartbeat"
OWN_DEADLINE = 60.0
"""Seconds a stopping worker has for its whole way out (§0.6)."""
LONGEST_DEADLINE = 30 * 86400.0


def drain(
    node_id: UUID, *, actor: Actor, now: datetime, reason: str = "", deadline: float | None = None
) -> BackendNode:
    """R1.19: nothing new goes there, what runs goes on, for `deadline` seconds at most.

    Without one the settings say how long, up to 30 days. Draining again keeps author and time, and takes over
    a new reason or deadline. Raises InvalidInput for a deadline that is negative or beyond 30 days.
    """
    usual = min(conf.cluster().drain_deadline, LONGEST_DEADLINE)
    seconds = usual if deadline is None else deadline
    if not 0 <= seconds <= LONGEST_DEADLINE:
        raise errors.InvalidInput(
            f"deadline_seconds must be between 0 and {LONGEST_DEADLINE:.0f}", field="deadline_seconds"
        )
    with changing(node_id, now) as change:
        if change.happen(Event.DRAINED, actor, reason=reason, detail={"deadline_seconds": seconds}):
            change.set(drain_deadline=now + timedelta(seconds=seconds))
        else:
            _drain_again(change, actor, names.plain(reason), deadline)
    return change.node


def _drain_again(change: Change, actor: Actor, reason: str, deadline: float | None) -> None:
    detail = {}
    if reason:
        change.set(drain_reason=reason[:255])
    if deadline is not None:
        change.set(drain_deadline=change.now + timedelta(seconds=deadline))
        detail = {"deadline_seconds": deadline}
    if reason or detail:
        change.tell(NodeEvent.Kind.DRAINED, actor, reason, detail)


def drain_itself(node_id: UUID, *, now: datetime, reason: str = "its worker is stopping") -> None:
    """§1.3: the worker stops; an admin's drain that stands already keeps its author and deadline."""
    with changing(node_id, now) as change:
        if change.happen(Event.DRAINED_ITSELF, actors.WORKER, reason=reason):
            change.set(drain_deadline=now + timedelta(seconds=OWN_DEADLINE))


def resume(node_id: UUID, *, actor: Actor, now: datetime, reason: str = "") -> BackendNode:
    """R1.18: ends any drain and takes "unhealthy" back; Conflict unless there is something to resume from."""
    with changing(node_id, now) as change:
        absent = change.node.offline_at is not None
        change.happen(Event.RESUMED, actor, reason=reason or (WAITING if absent else ""))
    return change.node


def resume_itself(node_id: UUID, *, now: datetime) -> None:
    """§1.4: the worker takes its own drain back; Conflict for an admin's."""
    with changing(node_id, now) as change:
        change.happen(Event.RESUMED_ITSELF, actors.WORKER)


def finish_drains(*, now: datetime) -> int:
    """Ends the drains on which nothing runs or whose deadline has passed; answers how many nodes.

    One query when nothing is due, else a constant number of statements.
    """
    due = _due(now)
    if not due:
        return 0
    with transaction.atomic():
        nodes = lock_in_order(BackendNode.objects.filter(pk__in=due, status="draining"))
        left = in_flight(*(node.id for node in nodes))
        over = [node for node in nodes if node.id in left and (not left[node.id] or _late(node, now))]
        ended = happen_to_all(
            over, Event.DRAIN_ENDED, actors.task("drains"), lambda node: _why(left[node.id]), now=now
        )
    return len(ended)


def _due(now: datetime) -> list[UUID]:
    """Draining nodes that have replicas and no reason to keep them."""
    draining = NodeModel.objects.filter(node__status="draining").values("node_id")
    counted = draining.annotate(running=Sum("in_flight"), deadline=Max("node__drain_deadline"))
    return list(counted.filter(Q(running=0) | Q(deadline__lte=now)).values_list("node_id", flat=True))


def _late(node: BackendNode, now: datetime) -> bool:
    return node.drain_deadline is not None and node.drain_deadline <= now


def _why(running: int) -> tuple[str, dict[str, int]]:
    cause = f"the deadline has passed with {running} running" if running else "nothing runs any more"
    return cause, {"in_flight": running}
