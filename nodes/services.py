"""The verbs of the registry: every write to a node that means something.

Each verb is one short transaction that takes `now`, writes by compare-and-set (the row count tells whether
the precondition held) and leaves its news as a NOTIFY inside the transaction, so that it goes out exactly at
commit. Heartbeats are written in batches by `beats.py`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from localai_cluster import conf, errors
from nodes import budget, identity, states
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel, NodeType
from nodes.states import Event
from operations import events

log = logging.getLogger(__name__)

PLACEHOLDER_ADDRESS = "unregistered"
"""Address of an enrolled node until its worker registers; the node is offline for as long."""
AUTO_APPROVAL = "auto-approval"

_GIB = 1024**3
_KEPT_IF_EMPTY = (
    "address",
    "http_address",
    "gpu_vendor",
    "gpu_compute_capability",
    "capability",
    "total_vram",
    "total_ram",
    "available_ram",
)


@dataclass(frozen=True)
class Registration:
    """What a worker says of itself (`contract/http-api.md` §1.1); sizes in bytes."""

    name: str = ""
    node_type: str = NodeType.BACKEND.value
    address: str = ""
    http_address: str = ""
    total_vram: int = 0
    available_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    capability: str = ""
    max_replicas_per_model: int = 1
    vram_budget: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def register(
    registration: Registration, *, secret: str, source_address: str, now: datetime, auto_approve: bool
) -> BackendNode:
    """R1.10 to R1.30: makes or refreshes the node of that name and returns it.

    The first registration binds the worker's own `secret`; afterwards the name belongs to it. Raises
    Forbidden without a secret (unless shared-token nodes are admitted) and Conflict with another one.
    """
    fingerprint = _fingerprint(secret)
    with transaction.atomic():
        node = _locked_row(registration, fingerprint, now)
        columns = states.changes(Event.REGISTERED, now=now)
        columns |= {
            "last_heartbeat": now,
            "source_address": source_address,
            "node_type": registration.node_type,
        }
        columns |= _identity(node, fingerprint) | _figures(node, registration)
        if node.drained_by == states.SELF:
            columns |= {"drained_at": None, "drained_by": "", "drain_reason": ""}
        for name, value in columns.items():
            setattr(node, name, value)
        if auto_approve and node.approved_at is None:
            node.approved_at, node.approved_by = now, AUTO_APPROVAL
        node.save()
        _merge_labels(node, registration.labels)
        drop_replicas(node.id)
        _clear_cooldowns(now)
        events.notify(events.NODES, str(node.id))
    node.refresh_from_db(fields=["status"])
    log.info("node %s registered from %s: %s", node.name, source_address, node.status)
    return node


def approve(node_id: UUID, *, actor: str, now: datetime) -> BackendNode:
    """R1.15: pending → healthy. Raises NotFound, or InvalidInput naming the state it is in."""
    with transaction.atomic():
        columns = states.changes(Event.APPROVED, now=now, actor=actor)
        if not _update(node_id, Event.APPROVED, columns):
            status = BackendNode.objects.filter(pk=node_id).values_list("status", flat=True).first()
            if status is None:
                raise errors.NotFound("node not found")
            raise errors.InvalidInput(
                f"node is {status}, only a pending node can be approved", field="status"
            )
        _clear_cooldowns(now)
        events.notify(events.NODES, str(node_id))
    log.info("node %s approved by %s", node_id, actor)
    return BackendNode.objects.get(pk=node_id)


def drain(node_id: UUID, *, actor: str, reason: str = "", now: datetime) -> None:
    """R1.19: nothing new is placed or routed there, what runs goes on; a standing drain keeps its author."""
    columns = states.changes(Event.DRAINED, now=now, actor=actor, reason=reason)
    with transaction.atomic():
        if BackendNode.objects.filter(pk=node_id, drained_at__isnull=True).update(**columns):
            events.notify(events.NODES, str(node_id))
        elif not BackendNode.objects.filter(pk=node_id).exists():
            raise errors.NotFound("node not found")


def deactivate(node_id: UUID, *, reason: str = states.DEREGISTERED, now: datetime) -> None:
    """R1.20: the worker leaves: offline, replicas gone, the record stays; raises NotFound."""
    columns = states.changes(Event.DEACTIVATED, now=now, reason=reason)
    with transaction.atomic():
        if not _update(node_id, Event.DEACTIVATED, columns):
            raise errors.NotFound("node not found")
        drop_replicas(node_id)
        events.notify(events.NODES, str(node_id))
    log.info("node %s is offline: %s", node_id, reason)


def drop_replicas(*node_ids: UUID) -> None:
    """Removes all replicas of these nodes, locked in the order of the hot path (`routing/statements.py`)."""
    rows = NodeModel.objects.filter(node_id__in=node_ids).order_by("id").select_for_update(of=("self",))
    NodeModel.objects.filter(pk__in=list(rows.values_list("pk", flat=True))).delete()


def enrol(name: str, fingerprint: str, *, actor: str, now: datetime) -> BackendNode:
    """Approves beforehand the worker that will register as `name` and prove itself by `fingerprint`.

    Until it does, the row is offline. Repeating it changes nothing; another fingerprint replaces the old one,
    because whoever enrols already rules the database.
    """
    with transaction.atomic():
        node = BackendNode.objects.select_for_update().filter(name=name).first()
        if node is None:
            return BackendNode.objects.create(
                name=name,
                address=PLACEHOLDER_ADDRESS,
                fingerprint=fingerprint,
                approved_at=now,
                approved_by=actor,
                offline_at=now,
                offline_reason=states.ENROLLED,
                created_at=now,
                updated_at=now,
            )
        if node.fingerprint != fingerprint or node.approved_at is None:
            node.fingerprint, node.weak_identity = fingerprint, False
            node.approved_at, node.approved_by, node.updated_at = now, actor, now
            node.save()
            events.notify(events.NODES, str(node.id))
        return node


def _fingerprint(secret: str) -> str:
    if secret:
        return identity.check_node_secret(secret)
    if conf.cluster().allow_shared_token_nodes:
        return ""
    raise errors.Forbidden(
        "a worker must prove an identity of its own: send X-LocalAI-Node-Secret, or admit stock workers by "
        "LOCALAI_ALLOW_SHARED_TOKEN_NODES=true",
        field="X-LocalAI-Node-Secret",
    )


def _locked_row(registration: Registration, fingerprint: str, now: datetime) -> BackendNode:
    """R1.22: the row of that name, locked; made first if the name is new, by whichever caller is first."""
    rows = BackendNode.objects.select_for_update()
    node = rows.filter(name=registration.name).first()
    if node is not None:
        return node
    fresh = BackendNode(
        name=registration.name,
        node_type=registration.node_type,
        address=registration.address,
        fingerprint=fingerprint,
        weak_identity=not fingerprint,
        created_at=now,
        updated_at=now,
    )
    BackendNode.objects.bulk_create([fresh], ignore_conflicts=True)
    return rows.get(name=registration.name)


def _identity(node: BackendNode, fingerprint: str) -> dict[str, Any]:
    """Keeps, or binds, the node's identity; a name that was only weakly known needs a new approval."""
    if identity.same(fingerprint, node.fingerprint) or (node.weak_identity and not fingerprint):
        return {}
    if node.fingerprint:
        raise errors.Conflict(f"the name {node.name!r} belongs to a worker with another secret", field="name")
    return {
        "fingerprint": fingerprint,
        "weak_identity": not fingerprint,
        "approved_at": None,
        "approved_by": "",
    }


def _figures(node: BackendNode, reported: Registration) -> dict[str, Any]:
    """R1.23 to R1.25, R1.50: zero and empty keep the stored value, except where they mean something."""
    columns: dict[str, Any] = {
        name: getattr(reported, name) or getattr(node, name) for name in _KEPT_IF_EMPTY
    }
    columns |= {"total_disk": reported.total_disk, "available_disk": reported.available_disk}
    if not node.max_replicas_per_model_manually_set:
        columns["max_replicas_per_model"] = max(reported.max_replicas_per_model, 1)
    text = node.vram_budget if node.vram_budget_manually_set else reported.vram_budget
    limit = budget.ceiling_or_none(text, columns["total_vram"])
    available = reported.available_vram
    if node.vram_budget_manually_set:
        available = available or node.available_vram
    columns |= {
        "vram_budget": text,
        "vram_budget_bytes": limit,
        "available_vram": budget.cap(available, limit),
    }
    return columns


def auto_labels(node: BackendNode) -> dict[str, str]:
    """R1.41, R1.42: what the registry itself says of a node."""
    labels = {"node.name": node.name, "node.replica-slots": str(max(node.max_replicas_per_model, 1))}
    if node.gpu_vendor:
        labels["gpu.vendor"] = node.gpu_vendor
    if node.total_vram > 0:
        labels["gpu.vram"] = _vram_bucket(node.total_vram)
    return labels


def _vram_bucket(total: int) -> str:
    gib = total // _GIB
    floor = next((step for step in (80, 48, 24, 16, 8) if gib >= step), gib)
    return "80GB+" if floor == 80 else f"{floor}GB"


def _merge_labels(node: BackendNode, reported: Mapping[str, str]) -> None:
    """R1.30, R1.41: the worker's labels join the set, an admin's stay, automatic ones win over both."""
    held = set(
        NodeLabel.objects.filter(node=node, source=NodeLabel.Source.ADMIN).values_list("key", flat=True)
    )
    automatic = auto_labels(node)
    rows = [
        NodeLabel(node=node, key=key, value=value, source=NodeLabel.Source.WORKER)
        for key, value in reported.items()
        if key not in held and key not in automatic
    ]
    rows += [NodeLabel(node=node, key=k, value=v, source=NodeLabel.Source.AUTO) for k, v in automatic.items()]
    NodeLabel.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["node", "key"], update_fields=["value", "source"]
    )


def _clear_cooldowns(now: datetime) -> None:
    """R1.28, R1.87: a new or changed node may satisfy what could not be placed before."""
    waiting = Q(unsatisfiable_until__isnull=False) | Q(unsatisfiable_ticks__gt=0)
    ModelSchedulingConfig.objects.filter(waiting).update(
        unsatisfiable_until=None, unsatisfiable_ticks=0, updated_at=now
    )


def _update(node_id: UUID, event: Event, columns: Mapping[str, Any]) -> int:
    """Compare-and-set: writes only if the node is in a status from which `event` is allowed."""
    allowed = states.TRANSITIONS[event].allowed
    return BackendNode.objects.filter(pk=node_id, status__in=allowed).update(**columns)
