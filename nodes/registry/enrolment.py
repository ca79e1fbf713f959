"""Enrolment: approve in advance the worker that will register with this name and secret."""

from datetime import datetime

from django.db import transaction

from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors, names
from nodes.models import BackendNode, NodeEvent
from nodes.registry import states
from nodes.registry.change import Change
from nodes.registry.claims import is_revoked
from nodes.registry.states import Event

PLACEHOLDER_ADDRESS = "unregistered"
"""Address of an enrolled node until its worker registers; until then the node is offline."""
ENROLLED = "enrolled, not seen yet"


def enrol(name: str, fingerprint: str, *, actor: Actor, now: datetime) -> BackendNode:
    """Approve the worker of that name and fingerprint; until it registers, its row is offline.

    Repeating it changes nothing, and it never overrides an administrator's refusal: a revoked secret is not
    bound again, and a rejected or revoked node is not approved. Another fingerprint replaces the old one,
    because the caller already controls the database. Raises Conflict for a name or a secret of another node.
    """
    names.check_name(name)
    with transaction.atomic():
        BackendNode.objects.bulk_create(
            [_enrolled_node(name, fingerprint, actor, now)], ignore_conflicts=True
        )
        node = BackendNode.objects.select_for_update(no_key=True).filter(name=name).first()
        if node is None:
            raise errors.Conflict(
                f"another node has a name similar to {name!r}, or the same secret", field="name"
            )
        change = Change(node, now)
        _bind(change, fingerprint)
        if node.revision == 0 and node.approved_at is not None:
            change.tell(NodeEvent.Kind.APPROVED, actor, "enrolled", before=states.PENDING)
        elif node.approved_at is None and not (node.rejected_at or node.revoked_at):
            change.happen(Event.APPROVED, actor, reason="enrolled")
        change.save()
    return node


def _bind(change: Change, fingerprint: str) -> None:
    if change.node.fingerprint == fingerprint or is_revoked(fingerprint):
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
        offline_reason=ENROLLED,
        created_at=now,
        updated_at=now,
    )
