"""Registration: a worker tells who it is and what it has (R1.22 to R1.31, `contract/http-api.md` §1.1).

One transaction: identity first, then facts, figures, labels, replicas. A claim that does not fit is recorded
and refused after the commit, so that the conflict is there to be seen.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from localai_cluster import conf, errors, names
from localai_cluster.accounts import actors, principals
from localai_cluster.messaging.messages import process_key
from nodes.models import BackendNode, NodeConflict, NodeModel, NodeType
from nodes.registry import agents, budget, claims, identity, states
from nodes.registry.change import Change, facts_of
from nodes.registry.cooldowns import clear_cooldowns
from nodes.registry.fleet import lock_in_order
from nodes.registry.labels import check_labels, reported_labels
from nodes.registry.states import Event
from nodes.replicas.removals import drop_replicas

_TRIES = 3
"""Somebody may remove the node between two looks."""
LISTS_AFTER = 3.0
"""Seconds after which a registered worker listens on the bus and can be asked for its backends."""
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
class Running:
    """One engine process that a worker says it runs; `address` may be empty."""

    process_key: str
    address: str = ""


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
    running_processes: Collection[Running] | None = None
    """None: it does not say, so all replicas go (R1.12 to R1.14)."""


@dataclass(frozen=True)
class Registered:
    """A registered node; an approved agent's API token, which exists nowhere else, "" for the others."""

    node: BackendNode
    api_token: str = ""


@dataclass(frozen=True)
class Caller:
    """Who registers: fingerprint of its secret ("" = the shared token only), process id, address."""

    fingerprint: str
    instance: str
    source_address: str


def register(
    registration: Registration,
    *,
    secret: str,
    instance: str = "",
    source_address: str,
    now: datetime,
    auto_approve: bool,
) -> Registered:
    """R1.10 to R1.31: makes or refreshes the node of that name.

    Raises InvalidInput for a name or label that cannot be, Forbidden without a secret (unless shared-token
    nodes are admitted) or with a revoked one, Conflict for a claim that does not fit.
    """
    names.check_name(registration.name)
    check_labels(registration.labels)
    caller = Caller(_fingerprint(secret), instance, source_address)
    with transaction.atomic():
        found = _claim(registration, caller, now)
        if not isinstance(found, errors.Conflict):
            return _admit(found, registration, caller, now, auto_approve)
    raise found


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


def _claim(registration: Registration, caller: Caller, now: datetime) -> BackendNode | errors.Conflict:
    """The node's row, locked, if the caller may be it; otherwise the recorded conflict."""
    rows = _rows(registration, caller, now)
    # After the locks: whoever revokes a secret holds its node's.
    if claims.is_revoked(caller.fingerprint):
        raise errors.Forbidden("this secret was revoked: make a new one", field="X-LocalAI-Node-Secret")
    node, kind = _judged(rows, registration, caller)
    if kind is None:
        return node
    return claims.note(
        node,
        kind,
        _claimed(kind, registration, caller),
        now=now,
        source_address=caller.source_address,
        advertised_address=registration.address,
        claimed_name=registration.name,
    )


def _judged(
    rows: Collection[BackendNode], registration: Registration, caller: Caller
) -> tuple[BackendNode, NodeConflict.Kind | None]:
    """Whose node this is about, and what does not fit: of the name's node first, then of the secret's."""
    named = next((row for row in rows if row.name == registration.name), None)
    other = next((row for row in rows if row is not named), None)
    kind = claims.judge(named, caller.fingerprint, caller.instance) if named else None
    if other is not None and kind is None:
        return other, NodeConflict.Kind.NAME
    assert named is not None
    return named, kind


def _claimed(kind: NodeConflict.Kind, registration: Registration, caller: Caller) -> str:
    if kind == NodeConflict.Kind.NAME:
        return principals.hash_secret(registration.name)
    if kind == NodeConflict.Kind.TOKEN:
        return caller.source_address
    return caller.instance if kind == NodeConflict.Kind.INSTANCE else caller.fingerprint


def _rows(registration: Registration, caller: Caller, now: datetime) -> list[BackendNode]:
    """R1.22: the rows of that name and of that secret, locked; one is made by whoever is first.

    Raises Conflict for a name that cannot be told from another node's.
    """
    for _ in range(_TRIES):
        found = _existing(registration, caller)
        if rows := [row for row in found if row.name == registration.name or _has_secret(row, caller)]:
            return rows
        if found:
            raise errors.Conflict(
                f"there is a node whose name cannot be told from {registration.name!r}", field="name"
            )
        BackendNode.objects.bulk_create([_fresh(registration, caller, now)], ignore_conflicts=True)
    raise errors.Conflict("the node is being removed and made again: try again", field="name")


def _has_secret(node: BackendNode, caller: Caller) -> bool:
    return bool(caller.fingerprint) and principals.same(caller.fingerprint, node.fingerprint)


def _existing(registration: Registration, caller: Caller) -> list[BackendNode]:
    """The nodes of that name, of one that looks like it, and of that secret; locked."""
    wanted = Q(name_key=names.key(registration.name)) | Q(name=registration.name)
    if caller.fingerprint:
        wanted |= Q(fingerprint=caller.fingerprint)
    return lock_in_order(BackendNode.objects.filter(wanted))


def _fresh(registration: Registration, caller: Caller, now: datetime) -> BackendNode:
    return BackendNode(
        name=registration.name,
        name_key=names.key(registration.name),
        node_type=registration.node_type,
        address=registration.address,
        fingerprint=caller.fingerprint,
        weak_identity=not caller.fingerprint,
        bound_at=now if caller.fingerprint else None,
        source_address=caller.source_address,
        created_at=now,
        updated_at=now,
    )


def _admit(
    node: BackendNode, registration: Registration, caller: Caller, now: datetime, auto_approve: bool
) -> Registered:
    if node.revision and node.node_type != registration.node_type:
        # An agent gets a user's key: an approval as one thing is none as the other.
        raise errors.Conflict(
            f"the node is registered as {node.node_type}: an admin has to remove it first", field="node_type"
        )
    change = Change(node, now)
    restarted = caller.instance != node.instance or not caller.instance
    claims.bind(change, caller.fingerprint, caller.instance)
    detail = {"source_address": caller.source_address, "address": registration.address}
    cause = "first registration" if node.revision == 0 else "started anew" if restarted else "again"
    change.happen(Event.REGISTERED, actors.WORKER, reason=cause, detail=detail)
    if auto_approve and not isinstance(states.apply(Event.AUTO_APPROVED, facts_of(node)), states.Refusal):
        change.happen(Event.AUTO_APPROVED, actors.AUTO_APPROVAL)
    change.set(last_heartbeat=now, source_address=caller.source_address, node_type=registration.node_type)
    change.set(inventory_due_at=now + timedelta(seconds=LISTS_AFTER), **_figures(node, registration))
    reported_labels(change, registration.labels, actors.WORKER)
    _drop_absent(node, registration)
    token = _agent_token(change)
    change.save()
    clear_cooldowns(now)
    return Registered(node, token)


def _agent_token(change: Change) -> str:
    """R1.31: an approved agent gets a new user and key at every registration."""
    if change.node.node_type == NodeType.AGENT and change.node.approved_at is not None:
        return agents.provision(change)
    return ""


def _drop_absent(node: BackendNode, registration: Registration) -> None:
    """Replicas that the worker does not list go; a listed one at another address is another process."""
    if node.revision == 0:
        return  # made a moment ago
    if registration.running_processes is None or registration.node_type == NodeType.AGENT:
        drop_replicas(node.id)
        return
    listed = {one.process_key: one.address for one in registration.running_processes}
    rows = list(NodeModel.objects.filter(node=node))
    keep: list[UUID] = []
    for row in rows:
        address = listed.get(process_key(row.model_name, row.replica_index))
        if address is not None and (not address or not row.address or address == row.address):
            keep.append(row.pk)
    if len(keep) < len(rows):
        drop_replicas(node.id, keep=keep)


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
