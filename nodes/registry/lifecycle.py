"""The life of a node: approval, rejection, drains, absence, removal, and the user of an agent.

A draining node gets no new requests and keeps its replicas until nothing runs on them or the deadline passes,
so that a stopping worker can wait for its last requests (`contract/worker.md` §19). The user and API key of
an agent node exist as long as the node (R1.26, R1.31, R1.38): every approved registration replaces both,
deregistration and a revoked secret remove both. The key is returned once and stored nowhere.
"""

import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import transaction
from django.db.models import F, Max, Q, Sum

from localai_cluster.accounts import actors, principals
from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import conf, errors, names
from nodes.models import BackendNode, NodeEvent, NodeModel, NodeType
from nodes.models.node import BackendNodeQuerySet
from nodes.registry.change import (
    Change,
    apply_to_all,
    lock_in_order,
    lock_node,
    node_change,
    remove_all,
)
from nodes.registry.states import Event
from nodes.replicas.fleet_queries import lock_in_flight_counts
from nodes.scheduling.passes import clear_cooldowns

_AGENT_GROUP = "collections"
_MAX_USERNAME_LENGTH = 150


def provision_agent(change: Change) -> str:
    """Create a new user and key for the agent in place of any earlier ones; return the key's plaintext."""
    revoke_agent(change)
    users = get_user_model()
    user = users.objects.create_user(username=_username(change.node))
    user.groups.add(Group.objects.get_or_create(name=_AGENT_GROUP)[0])
    key, plain = principals.create_agent_key(user, change.node.name)
    change.set(auth_user_id=user.pk, api_key_id=key.pk)
    return plain


def revoke_agent(change: Change) -> None:
    """Remove the agent's user, and with it the key; do nothing if there is no user."""
    user_id = change.node.auth_user_id
    if user_id is None:
        return
    change.set(auth_user_id=None, api_key_id=None)
    get_user_model().objects.filter(pk=user_id).delete()


def _username(node: BackendNode) -> str:
    """Return the agent's username `agent-worker:<node's name>`.

    The node's id replaces the name if that is too long or taken.
    """
    users = get_user_model()
    name = users.normalize_username(f"agent-worker:{node.name}")
    is_taken = users.objects.filter(username=name).exists()
    return f"agent-worker:{node.id}" if is_taken or len(name) > _MAX_USERNAME_LENGTH else name


DEREGISTERED_REASON = "deregistered by the worker"


@dataclass(frozen=True)
class Approval:
    """The result of an approval: the node and, for an agent, its API token, which is stored nowhere else."""

    node: BackendNode
    api_token: str = ""


@dataclass(frozen=True)
class ApprovalResult:
    """The result of a bulk action for one node; `error` is empty on success."""

    id: UUID
    name: str = ""
    status: str = ""
    error: str = ""
    api_token: str = ""
    """API token of an agent, as in `Approval`."""


def approve(
    node_id: UUID, *, actor: Actor, now: datetime, reason: str = "", fingerprint: str | None = None
) -> Approval:
    """Approve a pending node (R1.15, R1.31). Raise NotFound, or InvalidInput with the state of the node.

    `fingerprint` is the fingerprint that the user compared, "" for none; raises Conflict if it has changed.
    """
    with transaction.atomic():
        change = Change(lock_node(node_id), now)
        if fingerprint is not None and fingerprint != change.node.fingerprint:
            raise errors.Conflict(FINGERPRINT_CHANGED_MESSAGE, field="fingerprint")
        try:
            change.apply(Event.APPROVED, actor, reason=reason)
        except errors.Conflict as refusal:
            raise errors.InvalidInput(
                f"{refusal.message}; only a pending node can be approved", field="status"
            ) from None
        token = ""
        if change.node.node_type == NodeType.AGENT and change.node.auth_user_id is None:
            token = provision_agent(change)
        change.save()
        clear_cooldowns(now)
    return Approval(change.node, token)


def approve_many(
    node_ids: Sequence[UUID],
    *,
    actor: Actor,
    now: datetime,
    fingerprints: Mapping[UUID, str] = types.MappingProxyType({}),
) -> list[ApprovalResult]:
    """Approve each node on its own, in the given order: an error of one does not stop the others.

    `fingerprints` are the fingerprints that the user compared, as in `approve`.
    """
    return [_approve_node(node_id, actor, now, fingerprints.get(node_id)) for node_id in node_ids]


def _approve_node(node_id: UUID, actor: Actor, now: datetime, fingerprint: str | None) -> ApprovalResult:
    try:
        approved = approve(node_id, actor=actor, now=now, fingerprint=fingerprint)
    except errors.ClusterError as refusal:
        return ApprovalResult(node_id, error=refusal.message)
    return ApprovalResult(node_id, approved.node.name, approved.node.status, api_token=approved.api_token)


def reject(node_id: UUID, *, actor: Actor, now: datetime, reason: str) -> BackendNode:
    """Reject a pending node: it stays pending, and registering again does not approve it."""
    with node_change(node_id, now) as change:
        change.apply(Event.REJECTED, actor, reason=reason)
    return change.node


def deactivate(node_id: UUID, *, now: datetime) -> None:
    """Take the node offline because its worker leaves: its replicas end, and its row stays (R1.20)."""
    with node_change(node_id, now) as change:
        change.apply(Event.DEACTIVATED, actors.WORKER, reason=DEREGISTERED_REASON)


def deregister(node_id: UUID, *, actor: Actor, now: datetime) -> None:
    """Remove the node with its labels, pending commands, conflicts and agent user; raise NotFound."""
    if not remove_all(BackendNode.objects.filter(pk=node_id), actor, now=now):
        raise errors.NotFound("node not found")


def mark_unhealthy(node_id: UUID, *, actor: Actor, now: datetime, reason: str) -> None:
    """Mark the node unhealthy because its worker did not answer; its replicas stay (R1.17)."""
    with node_change(node_id, now) as change:
        change.apply(Event.MARKED_UNHEALTHY, actor, reason=reason)


def mark_in_doubt(
    node_ids: Collection[UUID], *, limit: float, actor: Actor, now: datetime, detail: str = ""
) -> int:
    """Mark those of the nodes unhealthy that have been silent for `limit` seconds; return their number.

    `detail` is appended to the reason.
    """
    if not node_ids:
        return 0
    silent = BackendNode.objects.silent(since=now - timedelta(seconds=limit))
    in_doubt = silent.filter(pk__in=node_ids, unhealthy_at__isnull=True)
    return _apply_to_nodes(in_doubt, Event.MARKED_UNHEALTHY, actor, now, _silence(limit) + detail)


def mark_silent(
    node_ids: Collection[UUID], *, limit: float, actor: Actor, now: datetime, detail: str = ""
) -> int:
    """Take those of the nodes offline that have been silent for `limit` seconds; return their number (R5.4).

    `detail` is appended to the reason.
    """
    if not node_ids:
        return 0
    silent = BackendNode.objects.silent(since=now - timedelta(seconds=limit)).filter(pk__in=node_ids)
    return _apply_to_nodes(silent, Event.FELL_SILENT, actor, now, _silence(limit) + detail)


def mark_all_silent(*, actor: Actor, now: datetime, reason: str) -> int:
    """Take every node offline until its next heartbeat; return the number of nodes that changed.

    The replicas of these nodes depart.
    """
    return _apply_to_nodes(BackendNode.objects.all(), Event.FELL_SILENT, actor, now, reason)


def mark_recovered(node_ids: Collection[UUID], *, actor: Actor, now: datetime) -> int:
    """Mark the nodes healthy that sent a heartbeat since they became unhealthy (R1.18, R5.5).

    Changes nothing else. Returns the number of these nodes.
    """
    if not node_ids:
        return 0
    responsive = BackendNode.objects.filter(pk__in=node_ids, last_heartbeat__gt=F("unhealthy_at"))
    return _apply_to_nodes(responsive, Event.MARKED_HEALTHY, actor, now, "contact restored")


def _silence(limit: float) -> str:
    return f"no heartbeat for more than {limit:.0f} s"


def _apply_to_nodes(
    nodes: BackendNodeQuerySet, event: Event, actor: Actor, now: datetime, reason: str
) -> int:
    """Apply `event` to the nodes that allow it; return their number. A constant number of statements."""
    with transaction.atomic():
        return apply_to_all(lock_in_order(nodes), event, actor, lambda node: (reason, {}), now=now)


FINGERPRINT_CHANGED_MESSAGE = "the fingerprint has changed; review the node again"
RESUMED_OFFLINE_MESSAGE = "resumed, waiting for its next heartbeat"
WORKER_DRAIN_SECONDS = 60.0
"""Seconds that a stopping worker waits for running requests after it has drained its node (§0.6)."""
MAX_DRAIN_SECONDS = 30 * 86400.0


def drain(
    node_id: UUID, *, actor: Actor, now: datetime, reason: str = "", deadline: float | None = None
) -> BackendNode:
    """Drain the node (R1.19): it gets no new requests, and running requests have `deadline` seconds.

    Without `deadline` the time is a setting. Draining a draining node keeps author and time, and replaces
    reason or deadline. Raises InvalidInput for a deadline that is negative or beyond 30 days.
    """
    usual = min(conf.cluster().drain_deadline, MAX_DRAIN_SECONDS)
    seconds = usual if deadline is None else deadline
    if not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise errors.InvalidInput(
            f"deadline_seconds must be between 0 and {MAX_DRAIN_SECONDS:.0f}", field="deadline_seconds"
        )
    with node_change(node_id, now) as change:
        if change.apply(Event.DRAINED, actor, reason=reason, detail={"deadline_seconds": seconds}):
            change.set(drain_deadline=now + timedelta(seconds=seconds))
        else:
            _update_drain(change, actor, names.to_single_line(reason), deadline)
    return change.node


def _update_drain(change: Change, actor: Actor, reason: str, deadline: float | None) -> None:
    detail = {}
    if reason:
        change.set(drain_reason=reason[:255])
    if deadline is not None:
        change.set(drain_deadline=change.now + timedelta(seconds=deadline))
        detail = {"deadline_seconds": deadline}
    if reason or detail:
        change.record_event(NodeEvent.Kind.DRAINED, actor, reason, detail)


def drain_by_worker(node_id: UUID, *, now: datetime) -> None:
    """Drain the node because its worker stops (§1.3); a drain by an admin keeps its author and deadline."""
    with node_change(node_id, now) as change:
        if change.apply(Event.DRAINED_ITSELF, actors.WORKER, reason="its worker is stopping"):
            change.set(drain_deadline=now + timedelta(seconds=WORKER_DRAIN_SECONDS))


def resume(node_id: UUID, *, actor: Actor, now: datetime, reason: str = "") -> BackendNode:
    """End any drain and the state "unhealthy" (R1.18); raise Conflict if the node has neither."""
    with node_change(node_id, now) as change:
        absent = change.node.offline_at is not None
        change.apply(Event.RESUMED, actor, reason=reason or (RESUMED_OFFLINE_MESSAGE if absent else ""))
    return change.node


def resume_by_worker(node_id: UUID, *, now: datetime) -> None:
    """End the drain that the worker started (§1.4); raise Conflict for a drain by an admin."""
    with node_change(node_id, now) as change:
        change.apply(Event.RESUMED_ITSELF, actors.WORKER)


def finish_drains(*, now: datetime) -> int:
    """End the drains that have no running requests or are past their deadline; return their number.

    One query if no drain is due, otherwise a constant number of statements.
    """
    due = _due_drains(now)
    if not due:
        return 0
    with transaction.atomic():
        nodes = lock_in_order(BackendNode.objects.filter(pk__in=due, status="draining"))
        running = lock_in_flight_counts(*(node.id for node in nodes))
        ended_nodes = [
            node for node in nodes if node.id in running and (not running[node.id] or _is_overdue(node, now))
        ]
        return apply_to_all(
            ended_nodes,
            Event.DRAIN_ENDED,
            actors.task("drains"),
            lambda node: _drain_end_cause(running[node.id]),
            now=now,
        )


def _due_drains(now: datetime) -> list[UUID]:
    draining = NodeModel.objects.filter(node__status="draining").values("node_id")
    counted = draining.annotate(running=Sum("in_flight"), deadline=Max("node__drain_deadline"))
    return list(counted.filter(Q(running=0) | Q(deadline__lte=now)).values_list("node_id", flat=True))


def _is_overdue(node: BackendNode, now: datetime) -> bool:
    return node.drain_deadline is not None and node.drain_deadline <= now


def _drain_end_cause(running: int) -> tuple[str, dict[str, int]]:
    cause = f"the deadline has passed with {running} running" if running else "nothing runs any more"
    return cause, {"in_flight": running}
