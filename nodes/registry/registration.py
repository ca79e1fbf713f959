"""Registration: a worker tells who it is and what it has (R1.22 to R1.31, `contract/http-api.md` §1.1).

One transaction for all that arrive together: identity first, then facts, figures, labels, replicas. A claim
that does not fit is recorded and refused after the commit, so that the conflict is there to be seen.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q

from localai_cluster import conf, errors, logs, names
from localai_cluster.accounts import actors, principals
from localai_cluster.messaging.messages import process_key
from nodes.models import BackendNode, NodeConflict, NodeModel, NodeType
from nodes.registry import agents, budget, claims, identity, states
from nodes.registry.change import ENGINES_UNKNOWN, Change, facts_of, save_all
from nodes.registry.cooldowns import clear_cooldowns
from nodes.registry.fleet import lock_in_order
from nodes.registry.labels import check_labels, reported_labels
from nodes.registry.states import Event
from nodes.replicas.retire import retire_of_nodes

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
class Claim:
    """A registration and who sends it: fingerprint of its secret ("" = shared token), process, address."""

    told: Registration
    fingerprint: str
    instance: str
    source_address: str
    request_id: str = field(default_factory=logs.request_id.get)


RegistrationOutcome = Registered | errors.Conflict
"""What became of a claim. A Conflict was recorded for an admin."""


def claim(registration: Registration, *, secret: str, instance: str = "", source_address: str) -> Claim:
    """A claim that is well formed.

    Raises InvalidInput for a name or label that cannot be, Forbidden without a secret (unless shared-token
    nodes are admitted).
    """
    names.check_name(registration.name)
    check_labels(registration.labels)
    return Claim(registration, _fingerprint(secret), instance, source_address)


def register(
    registration: Registration,
    *,
    secret: str,
    instance: str = "",
    source_address: str,
    now: datetime,
    auto_approve: bool,
) -> Registered:
    """R1.10 to R1.31: makes or refreshes the node of that name. Raises like `claim` and `register_all`."""
    made = claim(registration, secret=secret, instance=instance, source_address=source_address)
    return register_one(made, now=now, auto_approve=auto_approve)


def register_one(made: Claim, *, now: datetime, auto_approve: bool) -> Registered:
    """Registers one claim; raises Conflict for one that does not fit, and as `register_all` does."""
    (found,) = register_all([made], now=now, auto_approve=auto_approve)
    if isinstance(found, errors.Conflict):
        raise found
    return found


def register_all(
    made: Sequence[Claim], *, now: datetime, auto_approve: bool, patience: float = 0.0
) -> list[RegistrationOutcome]:
    """Registers claims, no two of one name or secret, in one transaction and a constant number of statements.

    Raises Forbidden for a revoked secret and Conflict for what cannot be recorded; then none of them counts.
    With `patience` it gives up (OperationalError) when another transaction holds a row for so many seconds.
    """
    with transaction.atomic():
        if patience:
            _be_patient(patience)
        held = _rows(made, now)
        # After the locks: whoever revokes a secret holds its node's.
        if claims.any_revoked(one.fingerprint for one in made):
            raise errors.Forbidden(
                "this secret was revoked; generate a new one", field="X-LocalAI-Node-Secret"
            )
        judged = [_judged(rows, one) for rows, one in zip(held, made, strict=True)]
        fitting = [(node, one) for (node, kind), one in zip(judged, made, strict=True) if kind is None]
        admitted = {node.id: found for node, found in _admit_all(fitting, now, auto_approve)}
        return [
            admitted[node.id] if kind is None else _note(node, kind, one, now)
            for (node, kind), one in zip(judged, made, strict=True)
        ]


def _be_patient(seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{round(1000 * seconds)}ms"])


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


def _note(node: BackendNode, kind: NodeConflict.Mismatch, made: Claim, now: datetime) -> errors.Conflict:
    """Records the claim that does not fit; answers the refusal."""
    with logs.of_request(made.request_id):
        return claims.note(
            node,
            kind,
            _claimed(kind, made),
            now=now,
            source_address=made.source_address,
            advertised_address=made.told.address,
            claimed_name=made.told.name,
        )


def _judged(rows: Collection[BackendNode], made: Claim) -> tuple[BackendNode, NodeConflict.Mismatch | None]:
    """Whose node this is about, and what does not fit: of the name's node first, then of the secret's."""
    named = next((row for row in rows if row.name == made.told.name), None)
    other = next((row for row in rows if row is not named), None)
    kind = claims.judge(named, made.fingerprint, made.instance) if named else None
    if other is not None and kind is None:
        return other, NodeConflict.Mismatch.NAME
    assert named is not None
    return named, kind


def _claimed(kind: NodeConflict.Mismatch, made: Claim) -> str:
    if kind == NodeConflict.Mismatch.NAME:
        return principals.hash_secret(made.told.name)
    if kind == NodeConflict.Mismatch.TOKEN:
        return made.source_address
    return made.instance if kind == NodeConflict.Mismatch.INSTANCE else made.fingerprint


def _rows(made: Sequence[Claim], now: datetime) -> list[list[BackendNode]]:
    """R1.22: for each claim the rows of that name and of that secret, locked; the first claim makes one.

    Raises Conflict for a name that cannot be told from another node's.
    """
    for _ in range(_TRIES):
        found = _existing(made)
        held = [_held(one, found) for one in made]
        missing = [one for one, rows in zip(made, held, strict=True) if not rows]
        if not missing:
            return held
        # In one order in every process, so that two that make the same nodes do not deadlock.
        fresh = sorted((_fresh(one, now) for one in missing), key=lambda node: node.name_key)
        BackendNode.objects.bulk_create(fresh, ignore_conflicts=True)
    raise errors.Conflict("the node is being re-created; try again", field="name")


def _held(made: Claim, found: Sequence[BackendNode]) -> list[BackendNode]:
    rows = [
        row
        for row in found
        if row.name == made.told.name or (made.fingerprint and row.fingerprint == made.fingerprint)
    ]
    if not rows and any(row.name_key == names.key(made.told.name) for row in found):
        raise errors.Conflict(f"a node with a name too similar to {made.told.name!r} exists", field="name")
    return rows


def _existing(made: Sequence[Claim]) -> list[BackendNode]:
    """The nodes of these names, of those that look like them, and of these secrets; locked."""
    called = [one.told.name for one in made]
    wanted = Q(name_key__in=[names.key(name) for name in called]) | Q(name__in=called)
    if secrets := [one.fingerprint for one in made if one.fingerprint]:
        wanted |= Q(fingerprint__in=secrets)
    return lock_in_order(BackendNode.objects.filter(wanted))


def _fresh(made: Claim, now: datetime) -> BackendNode:
    return BackendNode(
        name=made.told.name,
        name_key=names.key(made.told.name),
        node_type=made.told.node_type,
        address=made.told.address,
        fingerprint=made.fingerprint,
        weak_identity=not made.fingerprint,
        bound_at=now if made.fingerprint else None,
        source_address=made.source_address,
        created_at=now,
        updated_at=now,
    )


def _admit_all(
    fitting: Sequence[tuple[BackendNode, Claim]], now: datetime, auto_approve: bool
) -> list[tuple[BackendNode, Registered]]:
    if not fitting:
        return []
    changes = [_admit(node, made, now, auto_approve) for node, made in fitting]
    reports = [(change, made.told.labels) for change, (_, made) in zip(changes, fitting, strict=True)]
    reported_labels(reports, actors.WORKER)
    _drop_absent([(node, made.told) for node, made in fitting])
    tokens = [_agent_token(change) for change in changes]
    save_all(changes)
    clear_cooldowns(now)
    return [
        (change.node, Registered(change.node, token)) for change, token in zip(changes, tokens, strict=True)
    ]


def _admit(node: BackendNode, made: Claim, now: datetime, auto_approve: bool) -> Change:
    told = made.told
    if node.revision and node.node_type != told.node_type:
        # An agent gets a user's key: an approval as one thing is none as the other.
        raise errors.Conflict(
            f"the node is registered as {node.node_type}: an administrator must remove it first",
            field="node_type",
        )
    change = Change(node, now, made.request_id)
    restarted = made.instance != node.instance or not made.instance
    claims.bind(change, made.fingerprint, made.instance)
    detail = {"source_address": made.source_address, "address": told.address}
    cause = (
        "first registration"
        if node.revision == 0
        else "worker restarted"
        if restarted
        else "registered again"
    )
    change.happen(Event.REGISTERED, actors.WORKER, reason=cause, detail=detail)
    if auto_approve and not isinstance(states.apply(Event.AUTO_APPROVED, facts_of(node)), states.Refusal):
        change.happen(Event.AUTO_APPROVED, actors.AUTO_APPROVAL)
    if node.drained_at is not None and restarted:
        change.set(**ENGINES_UNKNOWN)
    change.set(last_heartbeat=now, source_address=made.source_address, node_type=told.node_type)
    change.set(inventory_due_at=now + timedelta(seconds=LISTS_AFTER), **_figures(node, told))
    return change


def _agent_token(change: Change) -> str:
    """R1.31: an approved agent gets a new user and key at every registration."""
    if change.node.node_type == NodeType.AGENT and change.node.approved_at is not None:
        return agents.provision(change)
    return ""


def _drop_absent(registered: Sequence[tuple[BackendNode, Registration]]) -> None:
    """Replicas that a worker does not list go; a listed one at another address is another process."""
    old = [node.id for node, _ in registered if node.revision > 0]
    rows: dict[UUID, list[NodeModel]] = defaultdict(list)
    for row in NodeModel.objects.filter(node_id__in=old) if old else ():
        rows[row.node_id].append(row)
    for node, told in registered:
        keep = [row.pk for row in rows[node.id] if _still_runs(row, told)]
        if len(keep) < len(rows[node.id]):
            retire_of_nodes(node.id, keep=keep)


def _still_runs(row: NodeModel, told: Registration) -> bool:
    if told.running_processes is None or told.node_type == NodeType.AGENT:
        return False
    listed = {one.process_key: one.address for one in told.running_processes}
    address = listed.get(process_key(row.model_name, row.replica_index))
    return address is not None and (not address or not row.address or address == row.address)


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
