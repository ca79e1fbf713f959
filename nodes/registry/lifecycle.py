"""Approval, rejection, absence and removal of a node."""

import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import F

from localai_cluster.accounts import actors
from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors
from nodes.models import BackendNode, NodeType
from nodes.registry import agents
from nodes.registry.change import Change, changing, locked
from nodes.registry.fleet import happen_to_all, lock_in_order
from nodes.registry.states import Event
from nodes.scheduling.passes import clear_cooldowns

DEREGISTERED = "deregistered by the worker"


@dataclass(frozen=True)
class Approved:
    """An approved node, and an agent's API token, which is stored nowhere else; "" for other nodes."""

    node: BackendNode
    api_token: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a bulk action for one node; `error` is empty on success."""

    id: UUID
    name: str = ""
    status: str = ""
    error: str = ""
    api_token: str = ""
    """API token of an agent, as in `Approved`."""


def approve(
    node_id: UUID, *, actor: Actor, now: datetime, reason: str = "", fingerprint: str | None = None
) -> Approved:
    """Approve a pending node (R1.15, R1.31). Raise NotFound, or InvalidInput naming its state.

    With the `fingerprint` that the user compared, "" for none, raises Conflict if it has changed.
    """
    with transaction.atomic():
        change = Change(locked(node_id), now)
        if fingerprint is not None and fingerprint != change.node.fingerprint:
            raise errors.Conflict("the fingerprint has changed; review the node again", field="fingerprint")
        try:
            change.happen(Event.APPROVED, actor, reason=reason)
        except errors.Conflict as refusal:
            raise errors.InvalidInput(
                f"{refusal.message}; only a pending node can be approved", field="status"
            ) from None
        token = ""
        if change.node.node_type == NodeType.AGENT and change.node.auth_user_id is None:
            token = agents.provision(change)
        change.save()
        clear_cooldowns(now)
    return Approved(change.node, token)


def approve_many(
    node_ids: Sequence[UUID],
    *,
    actor: Actor,
    now: datetime,
    fingerprints: Mapping[UUID, str] = types.MappingProxyType({}),
) -> list[Outcome]:
    """Approve each node on its own, in the given order: an error of one does not stop the others.

    `fingerprints` are those that the user compared, as in `approve`.
    """
    return [_approve_node(node_id, actor, now, fingerprints.get(node_id)) for node_id in node_ids]


def _approve_node(node_id: UUID, actor: Actor, now: datetime, fingerprint: str | None) -> Outcome:
    try:
        approved = approve(node_id, actor=actor, now=now, fingerprint=fingerprint)
    except errors.ClusterError as refusal:
        return Outcome(node_id, error=refusal.message)
    return Outcome(node_id, approved.node.name, approved.node.status, api_token=approved.api_token)


def reject(node_id: UUID, *, actor: Actor, now: datetime, reason: str) -> BackendNode:
    """Reject a pending node: it stays pending, and registering again does not approve it."""
    with changing(node_id, now) as change:
        change.happen(Event.REJECTED, actor, reason=reason)
    return change.node


def deactivate(
    node_id: UUID, *, actor: Actor = actors.WORKER, now: datetime, reason: str = DEREGISTERED
) -> None:
    """Take the node offline because its worker leaves: its replicas end, the record stays (R1.20)."""
    with changing(node_id, now) as change:
        change.happen(Event.DEACTIVATED, actor, reason=reason)


def deregister(node_id: UUID, *, actor: Actor, now: datetime) -> None:
    """Remove the record with labels, intents, conflicts and an agent's user (R1.21, R1.38, R1.39)."""
    with transaction.atomic():
        change = Change(locked(node_id, removing=True), now)
        change.happen(Event.DEREGISTERED, actor)
        agents.revoke(change)
        change.save()
        change.node.delete()


def mark_unhealthy(node_id: UUID, *, actor: Actor, now: datetime, reason: str) -> None:
    """Mark the node unhealthy because it did not answer; its replicas stay (R1.17)."""
    with changing(node_id, now) as change:
        change.happen(Event.MARKED_UNHEALTHY, actor, reason=reason)


def mark_healthy(node_id: UUID, *, actor: Actor, now: datetime, reason: str = "") -> None:
    """Revert `mark_unhealthy` and nothing else (R1.18, R5.5)."""
    with changing(node_id, now) as change:
        change.happen(Event.MARKED_HEALTHY, actor, reason=reason)


def lose_contact(*, actor: Actor, now: datetime, reason: str) -> int:
    """Declare every node silent until its next heartbeat; return how many were not before.

    Their replicas leave. A constant number of statements for any number of nodes.
    """
    with transaction.atomic():
        nodes = lock_in_order(BackendNode.objects.all())
        return len(happen_to_all(nodes, Event.FELL_SILENT, actor, lambda node: (reason, {}), now=now))


def fell_silent(
    node_ids: Collection[UUID], *, limit: float, actor: Actor, now: datetime, detail: str = ""
) -> int:
    """Take those of the nodes offline that are still silent for `limit` seconds; return their number (R5.4).

    `detail` is appended to the reason. A constant number of statements for any number of nodes.
    """
    if not node_ids:
        return 0
    silent = BackendNode.objects.silent(since=now - timedelta(seconds=limit)).filter(pk__in=node_ids)
    reason = f"no heartbeat for more than {limit:.0f} s{detail}"
    with transaction.atomic():
        nodes = lock_in_order(silent)
        return len(happen_to_all(nodes, Event.FELL_SILENT, actor, lambda node: (reason, {}), now=now))


def recovered(node_ids: Collection[UUID], *, actor: Actor, now: datetime) -> int:
    """Mark those of the nodes healthy that sent a heartbeat since they became unhealthy (R5.5).

    Returns their number. A constant number of statements for any number of nodes.
    """
    if not node_ids:
        return 0
    responsive = BackendNode.objects.filter(pk__in=node_ids, last_heartbeat__gt=F("unhealthy_at"))
    with transaction.atomic():
        nodes = lock_in_order(responsive)
        return len(
            happen_to_all(nodes, Event.MARKED_HEALTHY, actor, lambda node: ("contact restored", {}), now=now)
        )
