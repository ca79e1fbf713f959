"""Enrolment: approving beforehand the worker that will register under a name and prove itself by a secret."""

from datetime import datetime

from django.db import transaction

from nodes import names
from nodes.actors import Actor
from nodes.models import BackendNode, NodeEvent
from nodes.services.change import Change
from nodes.states import Event

PLACEHOLDER_ADDRESS = "unregistered"
"""Address of an enrolled node until its worker registers; the node is offline for as long."""
ENROLLED = "enrolled, not seen yet"


def enrol(name: str, fingerprint: str, *, actor: Actor, now: datetime) -> BackendNode:
    """Approves the worker of that name and fingerprint; until it registers, the row is offline.

    Repeating it changes nothing; another fingerprint replaces the old one, because whoever enrols already
    rules the database.
    """
    with transaction.atomic():
        BackendNode.objects.bulk_create([_enrolled(name, fingerprint, actor, now)], ignore_conflicts=True)
        node = BackendNode.objects.select_for_update(no_key=True).get(name=name)
        change = Change(node, now)
        if node.fingerprint != fingerprint:
            change.set(
                fingerprint=fingerprint, weak_identity=False, bound_at=now, instance="", former_instances=[]
            )
        if node.approved_at is None:
            change.happen(Event.APPROVED, actor, reason="enrolled")
        elif node.revision == 0:
            change.tell(NodeEvent.Kind.APPROVED, actor, "enrolled")
        change.save()
    return node


def _enrolled(name: str, fingerprint: str, actor: Actor, now: datetime) -> BackendNode:
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
