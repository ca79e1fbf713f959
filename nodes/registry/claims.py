"""Claims to a node's identity: enrolment, conflicts, rotation and revocation of secrets.

The first registration binds a secret to a name; enrolment approves a worker in advance. A worker with another
secret is refused, and its claim is recorded as a conflict for an administrator; the node is unaffected. Only
an administrator resolves a conflict.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Case, F, QuerySet, Value, When

from localai_cluster.accounts import actors, principals
from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import addresses, errors, names
from localai_cluster.web.shapes import (
    EXAMPLE_FINGERPRINT,
    EXAMPLE_NODE_ID,
    EXAMPLE_TIME,
    TEXT,
    TIME,
    Shape,
    column,
    count,
    enum,
)
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.models import BackendNode, NodeConflict, NodeEvent, RevokedSecret
from nodes.registry import identity, lifecycle, states, timeline
from nodes.registry.change import Change, node_change
from nodes.registry.states import Event
from nodes.registry.timeline import Entry

REVOKED_SECRET_MESSAGE = "this secret was revoked; generate a new one"
MAX_CONFLICTS = 32
"""Maximum conflicts stored for a node; each further claim only raises the count of the latest conflict."""
MAX_INSTANCES = 16

Kind = NodeConflict.Mismatch
_REFUSAL_TEXT_BY_KIND = {
    Kind.SECRET: "the name {name!r} belongs to a worker with another secret; an admin must accept this one",
    Kind.WEAK: "the name {name!r} is known by the shared token; an admin must accept this secret",
    Kind.TOKEN: "the name {name!r} belongs to a worker with a secret; the shared token is not enough",
    Kind.INSTANCE: "another process has since registered with this secret; its data folder may be a copy",
    Kind.NAME: "this secret belongs to the node {name!r}: an administrator must accept the new name",
    Kind.ADDRESS: "the node {name!r} is known by the shared token at another address; an administrator must"
    " accept this one",
}
UNACCEPTABLE_KINDS = {
    Kind.TOKEN: "a node with a secret cannot fall back to the shared token; deregister it instead",
    Kind.INSTANCE: "stop one of the two processes, or revoke the secret",
}
"""Kinds of conflicts that an administrator cannot accept, each with the action to take instead."""


def _claim(*kinds: Kind) -> Case:
    return Case(When(kind__in=kinds, then=F("claim")), default=Value(""))


CONFLICT_SHAPE = Shape(
    "Conflict",
    "A claim to the identity of a node.",
    [
        column("id", UUID_SCHEMA, example="0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44"),
        column("node_id", UUID_SCHEMA, example=EXAMPLE_NODE_ID),
        column("node_name", TEXT, example="gpu-a", source=F("node__name")),
        column("kind", enum("ConflictKindEnum", Kind).ref, example="secret"),
        column("state", enum("ConflictStateEnum", NodeConflict.State).ref, example="open"),
        column(
            "fingerprint",
            TEXT,
            "Fingerprint of the secret that the other machine sent.",
            example=EXAMPLE_FINGERPRINT,
            source=_claim(Kind.SECRET, Kind.WEAK),
            optional=True,
        ),
        column("instance", TEXT, "The process that called.", source=_claim(Kind.INSTANCE), optional=True),
        column("claimed_name", TEXT, optional=True),
        column("source_address", TEXT, "Where the claim came from.", example="10.1.0.9"),
        column("advertised_address", TEXT, example="10.1.0.9:50051", optional=True),
        column("node_source_address", TEXT, "Where the node itself was seen.", example="10.1.0.4"),
        column("count", count(1), example=3),
        column("first_at", TIME, example=EXAMPLE_TIME),
        column("last_at", TIME, example=EXAMPLE_TIME),
        column("decided_at", TIME, optional=True),
        column("decided_by", TEXT, optional=True),
    ],
)


def find_mismatch(node: BackendNode, fingerprint: str, instance: str) -> NodeConflict.Mismatch | None:
    """Return why a bearer of `fingerprint` may not register as `node`; None if it may.

    An empty `fingerprint` stands for the shared token.
    """
    if principals.secrets_equal(fingerprint, node.fingerprint):
        return Kind.INSTANCE if instance and instance in node.former_instances else None
    if node.fingerprint:
        return Kind.SECRET if fingerprint else Kind.TOKEN
    if not fingerprint:
        return Kind.TOKEN if node.bound_at else None
    return Kind.WEAK if node.weak_identity else None


def has_moved(node: BackendNode, source_address: str, address: str) -> bool:
    """Return True if an approved node without a secret registers from, or names, a different host.

    Only the address distinguishes such a node's worker from other workers with the shared token. Another port
    of the same host means that the worker was restarted.
    """
    if not node.weak_identity or node.approved_at is None:
        return False
    if not addresses.same_host(source_address, node.source_address):
        return True
    return bool(address and node.address) and not addresses.same_host(
        addresses.host_of(address), addresses.host_of(node.address)
    )


def bind(change: Change, fingerprint: str, instance: str) -> None:
    """Bind the node's identity to the secret of `fingerprint`, and its instance to process `instance`."""
    node = change.node
    if fingerprint != node.fingerprint or bool(fingerprint) is node.weak_identity:
        change.set(fingerprint=fingerprint, weak_identity=not fingerprint)
    if fingerprint and node.bound_at is None:
        change.set(bound_at=change.now)
    if instance != node.instance:
        former = [node.instance, *node.former_instances] if node.instance else node.former_instances
        change.set(instance=instance, former_instances=former[:MAX_INSTANCES])


def record_conflict(
    node: BackendNode,
    kind: NodeConflict.Mismatch,
    claim: str,
    *,
    now: datetime,
    source_address: str,
    advertised_address: str = "",
    claimed_name: str = "",
) -> errors.Conflict:
    """Record the claim as a conflict, or count a repeated claim; return the error.

    The caller holds the node's lock, commits, then raises the error.
    """
    columns = {
        "source_address": source_address,
        "advertised_address": advertised_address,
        "node_source_address": node.source_address,
        "last_at": now,
    }
    existing = NodeConflict.objects.filter(node=node, kind=kind, claim=claim)
    if not existing.update(**columns, count=F("count") + 1):
        _add_conflict(node, kind, claim, {**columns, "first_at": now, "claimed_name": claimed_name})
    _reopen_accepted(existing)
    entry = Entry(
        node.id,
        node.name,
        NodeEvent.Kind.CONFLICT,
        actors.WORKER,
        kind.label,
        node.status,
        node.status,
        {"kind": kind.value, "source_address": source_address, "advertised_address": advertised_address},
    )
    timeline.record(entry, at=now)
    return errors.Conflict(_REFUSAL_TEXT_BY_KIND[kind].format(name=node.name), field="name")


def _reopen_accepted(matching: "QuerySet[NodeConflict]") -> None:
    """Reopen an accepted conflict whose claim was made again: an administrator must decide again."""
    matching.filter(state=NodeConflict.State.ACCEPTED).update(
        state=NodeConflict.State.OPEN, decided_at=None, decided_by=""
    )


def record_other_process(node_id: UUID, instance: str, *, source_address: str, now: datetime) -> None:
    """Record a conflict: a request had the node's secret, but the instance id of another process."""
    with transaction.atomic():
        node = BackendNode.objects.select_for_update(no_key=True).filter(pk=node_id).first()
        if node is not None:
            record_conflict(node, Kind.INSTANCE, instance[:32], now=now, source_address=source_address)


def _add_conflict(
    node: BackendNode, kind: NodeConflict.Mismatch, claim: str, columns: dict[str, Any]
) -> None:
    open_conflicts = NodeConflict.objects.filter(node=node, state=NodeConflict.State.OPEN)
    if open_conflicts.count() < MAX_CONFLICTS:
        NodeConflict.objects.create(node=node, kind=kind, claim=claim, **columns)
        return
    newest = open_conflicts.order_by("-last_at").values_list("pk", flat=True)[:1]
    NodeConflict.objects.filter(pk__in=list(newest)).update(count=F("count") + 1, last_at=columns["last_at"])


def accept_conflict(
    conflict_id: UUID, *, node_id: UUID | None = None, actor: Actor, now: datetime
) -> BackendNode:
    """Make the claimant the worker of the node; the previous worker is refused from now on.

    Raises NotFound, and Conflict if the conflict is already accepted or cannot be accepted. A refused
    conflict can still be accepted.
    """
    conflict = _find_conflict(conflict_id, node_id)
    if conflict.kind in UNACCEPTABLE_KINDS:
        raise errors.Conflict(UNACCEPTABLE_KINDS[Kind(conflict.kind)], field="kind")
    with node_change(conflict.node_id, now) as change:
        _decide(conflict, NodeConflict.State.ACCEPTED, actor, now)
        if conflict.kind == Kind.NAME:
            _rename(change, conflict.claimed_name)
        if conflict.kind == Kind.ADDRESS:
            _change_address(change, conflict, actor)
        elif conflict.kind == Kind.NAME or conflict.claim == change.node.fingerprint:
            change.record_event(
                NodeEvent.Kind.CONFLICT_ACCEPTED, actor, Kind(conflict.kind).label, _event_detail(conflict)
            )
        else:
            _hand_over(change, conflict, actor)
    return change.node


def refuse_conflict(
    conflict_id: UUID, *, node_id: UUID | None = None, actor: Actor, now: datetime
) -> BackendNode:
    """Close the conflict in favour of the node: its identity stays, and the claimant stays refused."""
    conflict = _find_conflict(conflict_id, node_id)
    with node_change(conflict.node_id, now) as change:
        _decide(conflict, NodeConflict.State.REFUSED, actor, now)
        change.record_event(
            NodeEvent.Kind.CONFLICT_REFUSED, actor, Kind(conflict.kind).label, _event_detail(conflict)
        )
    return change.node


def _event_detail(conflict: NodeConflict) -> dict[str, Any]:
    return {"conflict": str(conflict.pk), "source_address": conflict.source_address}


def _find_conflict(conflict_id: UUID, node_id: UUID | None) -> NodeConflict:
    conflict = NodeConflict.objects.filter(pk=conflict_id).first()
    if conflict is None or (node_id is not None and conflict.node_id != node_id):
        raise errors.NotFound("conflict not found")
    return conflict


def _decide(conflict: NodeConflict, state: NodeConflict.State, actor: Actor, now: datetime) -> None:
    """Set the conflict to `state`; raise Conflict if another caller has resolved it before.

    The caller has locked the node before, as for a claim.
    """
    decidable = [NodeConflict.State.OPEN]
    if state == NodeConflict.State.ACCEPTED:
        decidable.append(NodeConflict.State.REFUSED)
    undecided = NodeConflict.objects.filter(pk=conflict.pk, state__in=decidable)
    if not undecided.update(state=state, decided_at=now, decided_by=str(actor)):
        raise errors.Conflict("the conflict is already resolved", field="state")


def _rename(change: Change, name: str) -> None:
    is_taken = BackendNode.objects.filter(name_key=names.key(name)).exclude(pk=change.node.pk).exists()
    if is_taken:
        raise errors.Conflict(f"there is another node named {name!r}", field="name")
    change.set(name=name, name_key=names.key(name))


def _forget_worker(change: Change, **columns: Any) -> None:
    """Clear the process, the engines' token and the user of the previous worker; set these columns."""
    change.set(instance="", former_instances=[], engine_token="", **columns)
    lifecycle.revoke_agent(change)


def _hand_over(change: Change, conflict: NodeConflict, actor: Actor) -> None:
    """Bind the claimant's secret to the node, and clear the previous worker's state."""
    _replace_secret(change, conflict.claim, actor)
    _forget_worker(change)
    change.apply(Event.HANDED_OVER, actor, reason=Kind(conflict.kind).label, detail=_event_detail(conflict))


def _change_address(change: Change, conflict: NodeConflict, actor: Actor) -> None:
    """Move a node without a secret of its own to the claimed address.

    From then on registrations from the previous address are refused, and its bus credentials are revoked.
    """
    if not change.node.weak_identity:
        raise errors.Conflict("the node has a secret of its own by now", field="kind")
    _forget_worker(
        change,
        source_address=conflict.source_address,
        address=conflict.advertised_address or change.node.address,
        http_address="",
        fingerprint="",  # another identity: credentials for the bus end
    )
    change.apply(Event.HANDED_OVER, actor, reason=Kind.ADDRESS.label, detail=_event_detail(conflict))


def _replace_secret(change: Change, fingerprint: str, actor: Actor) -> None:
    """Bind the new secret to the node, and revoke the previous secret forever."""
    require_unused_secret(fingerprint)
    _store_revocation(change, actor)
    change.set(
        fingerprint=fingerprint,
        weak_identity=False,
        bound_at=change.node.bound_at or change.now,
        rotation_requested_at=None,
    )


def require_unused_secret(fingerprint: str) -> None:
    """Raise Conflict for a secret that belongs to a node or was revoked.

    The node is queried first, because the secret may be revoked between the two queries.
    """
    if BackendNode.objects.filter(fingerprint=fingerprint).exists():
        raise errors.Conflict("this secret already belongs to a node", field="secret")
    if any_revoked([fingerprint]):
        raise errors.Conflict(REVOKED_SECRET_MESSAGE, field="secret")


def any_revoked(fingerprints: Iterable[str]) -> bool:
    """Return True if any of the secrets was revoked; an empty fingerprint does not count."""
    secrets = [fingerprint for fingerprint in fingerprints if fingerprint]
    return bool(secrets) and RevokedSecret.objects.filter(pk__in=secrets).exists()


def request_rotation(node_id: UUID, *, actor: Actor, now: datetime) -> BackendNode:
    """Ask the node's worker to replace its secret.

    Until the worker has a new secret, the present one permits only registration and rotation.
    """
    with node_change(node_id, now) as change:
        if not change.node.fingerprint:
            raise errors.Conflict("the node has no secret of its own", field="weak_identity")
        if change.node.rotation_requested_at is None:
            change.set(rotation_requested_at=now)
            change.record_event(NodeEvent.Kind.ROTATION_REQUESTED, actor)
    return change.node


def rotate(node_id: UUID, *, old_fingerprint: str, new_secret: str, now: datetime) -> BackendNode:
    """Replace the secret of a worker, and revoke the old one forever.

    Raise NotAuthenticated if `old_fingerprint` is not the node's current one.
    """
    fingerprint = identity.check_node_secret(new_secret)
    with node_change(node_id, now) as change:
        if not principals.secrets_equal(old_fingerprint, change.node.fingerprint):
            raise errors.NotAuthenticated("invalid node credential")
        _replace_secret(change, fingerprint, actors.WORKER)
        change.record_event(NodeEvent.Kind.ROTATED, actors.WORKER)
    return change.node


def revoke(node_id: UUID, *, actor: Actor, now: datetime, reason: str = "") -> BackendNode:
    """Revoke the node's secret, under whatever name a worker presents it. The node becomes pending."""
    with node_change(node_id, now) as change:
        change.apply(Event.REVOKED, actor, reason=reason)
        _store_revocation(change, actor)
        _forget_worker(change, fingerprint="", weak_identity=False, rotation_requested_at=None)
    return change.node


def _store_revocation(change: Change, actor: Actor) -> None:
    node = change.node
    if node.fingerprint:
        RevokedSecret.objects.get_or_create(
            pk=node.fingerprint,
            defaults={
                "node_id": node.id,
                "node_name": node.name,
                "revoked_at": change.now,
                "revoked_by": str(actor),
            },
        )


PLACEHOLDER_ADDRESS = "unregistered"
"""Address of an enrolled node before its worker has registered."""
ENROLLED_MESSAGE = "enrolled, not seen yet"


def enrol(name: str, fingerprint: str, *, actor: Actor, now: datetime) -> BackendNode:
    """Approve in advance the worker with this name and fingerprint; its node is offline until it registers.

    A repeated enrolment changes nothing, and an enrolment never overrides an administrator's refusal: a
    revoked secret is not bound again, and a rejected or revoked node is not approved. Another fingerprint
    replaces the old fingerprint, because the caller already controls the database. Raises Conflict for a name
    or a secret of another node, and for a revoked secret if no node has the name.
    """
    names.check_name(name)
    with transaction.atomic():
        BackendNode.objects.bulk_create(
            [_enrolled_node(name, fingerprint, actor, now)], ignore_conflicts=True
        )
        node = BackendNode.objects.select_for_update(no_key=True).filter(name=name).first()
        if node is None:
            raise errors.Conflict(
                f"another node has a name similar to {name!r}, or the same secret: choose another name, or"
                " remove that node (`nodes list` shows it)",
                field="name",
            )
        if any_revoked([fingerprint]):  # after the lock: a revocation holds the lock of its node
            if node.fingerprint == fingerprint:  # created above
                raise errors.Conflict(REVOKED_SECRET_MESSAGE, field="secret")
            return node
        change = Change(node, now)
        _bind(change, fingerprint)
        if node.revision == 0 and node.approved_at is not None:
            change.record_event(NodeEvent.Kind.APPROVED, actor, "enrolled", before=states.PENDING)
        elif node.approved_at is None and not (node.rejected_at or node.revoked_at):
            change.apply(Event.APPROVED, actor, reason="enrolled")
        change.save()
    return node


def _bind(change: Change, fingerprint: str) -> None:
    if change.node.fingerprint == fingerprint:
        return
    change.set(
        fingerprint=fingerprint,
        weak_identity=False,
        bound_at=change.node.bound_at or change.now,
        instance="",
        former_instances=[],
    )


def _enrolled_node(name: str, fingerprint: str, actor: Actor, now: datetime) -> BackendNode:
    return BackendNode(
        name=name,
        name_key=names.key(name),
        address=PLACEHOLDER_ADDRESS,
        fingerprint=fingerprint,
        bound_at=now,
        approved_at=now,
        approved_by=str(actor),
        approval_reason="enrolled",
        offline_at=now,
        offline_by=str(actor),
        offline_reason=ENROLLED_MESSAGE,
        created_at=now,
        updated_at=now,
    )
