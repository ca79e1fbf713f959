"""Drained nodes whose engines are to be stopped, and what is known of them.

A drain is over when the node has no replica and no engine of a former one. From then on a controller looks at
what runs there until nothing does. What it finds is written only while the same drain lasts: a resumed
node is no longer its business.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from localai_cluster.kit import names
from localai_cluster.kit.rows import claim_rows
from nodes.models import BackendNode, NodeModel
from nodes.models.node import BackendNodeQuerySet
from operations.changes import events

_CLAIMED_FOR = 45.0
"""Seconds; longer than one look at one node takes."""
_ERROR_LENGTH = 255


@dataclass(frozen=True)
class DrainedNode:
    """A node without replicas under one drain."""

    id: UUID
    name: str
    node_type: str
    drained_at: datetime


def claim_due(limit: int, *, now: datetime) -> list[DrainedNode]:
    """Nodes that are due, for this caller alone; the longest drained first."""
    due = BackendNode.objects.filter(
        Q(engines_due_at__isnull=True) | Q(engines_due_at__lte=now),
        ~Exists(NodeModel.engines.filter(node=OuterRef("pk"))),
        status="draining",
        engines_gone_at__isnull=True,
    )
    columns = ("id", "name", "node_type", "drained_at")
    nodes = claim_rows(
        due.order_by("drained_at").only(*columns),
        limit=limit,
        engines_due_at=now + timedelta(seconds=_CLAIMED_FOR),
    )
    return [DrainedNode(*(getattr(node, column) for column in columns)) for node in nodes]


def is_same_drain(node: DrainedNode) -> bool:
    """Whether the same drain lasts: engines of a resumed node must not be stopped."""
    return _same_drain(node).exists()


def confirm_empty(node: DrainedNode, *, now: datetime) -> None:
    """Nothing runs there: it is safe to power off."""
    with transaction.atomic():
        if _same_drain(node).update(engines_gone_at=now, engines_error="", engines_due_at=None):
            events.notify(events.NODES, str(node.id))


def schedule_check(node: DrainedNode, error: str, *, due_at: datetime) -> None:
    """Something may still run there; `error` says why that is not known, empty while engines are stopping."""
    error = names.plain(error[:_ERROR_LENGTH])
    nodes = _same_drain(node)
    with transaction.atomic():
        if nodes.exclude(engines_error=error).update(engines_error=error):
            events.notify(events.NODES, str(node.id))
        nodes.update(engines_due_at=due_at)


def _same_drain(node: DrainedNode) -> BackendNodeQuerySet:
    return BackendNode.objects.filter(pk=node.id, drained_at=node.drained_at, engines_gone_at__isnull=True)
