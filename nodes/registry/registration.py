"""Registration: a worker reports its identity and resources (R1.22 to R1.31, `contract/http-api.md` §1.1).

`claim` makes the checks that need no row. One transaction handles all registrations that arrive together:
identity first, then facts, figures, labels and replicas. A mismatching claim is recorded, and refused after
the commit, so that an administrator can see the conflict.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from localai_cluster.accounts import actors, principals
from localai_cluster.kit import addresses, conf, errors, logs, names
from localai_cluster.kit.transactions import limit_lock_wait
from localai_cluster.messaging.servers import Credentials
from nodes.models import BackendNode, JoinToken, NodeConflict, NodeModel, NodeType, Phase
from nodes.registry import (
    bus_credentials,
    claims,
    dial_targets,
    file_port,
    identity,
    joining,
    lifecycle,
    pending,
    resources,
    states,
)
from nodes.registry.change import ENGINES_UNKNOWN_COLUMNS, Change, lock_in_order, save_all
from nodes.registry.labels import check_labels, merge_reported_labels
from nodes.registry.states import Event, facts_of
from nodes.replicas import engines
from nodes.replicas.states import UNANSWERED_START_LIMIT
from nodes.scheduling.passes import clear_cooldowns


@dataclass(frozen=True)
class Running:
    """An engine process that a worker reports as running; `address` may be empty."""

    process_key: str
    address: str = ""


@dataclass(frozen=True)
class Registration:
    """The facts that a worker reports about itself (`contract/http-api.md` §1.1); sizes in bytes."""

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
    gpus: Sequence[Mapping[str, Any]] = ()
    """The GPUs as `resources.parse_gpus` returns them; empty if the worker does not report GPUs."""
    capability: str = ""
    max_replicas_per_model: int = 1
    vram_budget: str = ""
    system: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the machine, as `resources.parse_system` returns them."""
    version: str = ""
    """Version of our worker; stock workers send none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    engine_token: str = field(default="", repr=False)
    """The bearer token that the worker's engines expect; empty if they expect the registration token."""
    running_processes: Collection[Running] | None = None
    """None if the worker does not report its processes: then all its replicas end (R1.12 to R1.14). A stock
    worker's replicas stay."""


@dataclass(frozen=True)
class Claim:
    """A registration with what identifies its sender: the secret's fingerprint, the process and the address.

    An empty fingerprint stands for the shared token. `ticket`: the join token, if it was sent instead of the
    registration token.
    """

    registration: Registration
    fingerprint: str
    instance: str
    source_address: str
    ticket: JoinToken | None = None
    request_id: str = field(default_factory=logs.request_id.get)


def claim(
    registration: Registration,
    *,
    secret: str,
    instance: str = "",
    source_address: str,
    ticket: JoinToken | None = None,
) -> Claim:
    """Check a registration and return the claim.

    Raises InvalidInput for an invalid name, label or address, Forbidden without a secret (unless shared-token
    nodes are admitted, and never with a join token).
    """
    names.check_name(registration.name)
    check_labels(registration.labels)
    dial_targets.check_registered(
        registration.name, registration.address, registration.http_address, source_address
    )
    return Claim(registration, _fingerprint(secret, ticket), instance, source_address, ticket)


def _fingerprint(secret: str, ticket: JoinToken | None) -> str:
    if secret:
        return identity.check_node_secret(secret)
    if ticket is not None:
        raise errors.Forbidden(
            "a join token admits no worker without a secret of its own: send X-LocalAI-Node-Secret",
            field="X-LocalAI-Node-Secret",
        )
    if conf.cluster().allow_shared_token_nodes:
        return ""
    raise errors.Forbidden(
        "a worker must prove an identity of its own: send X-LocalAI-Node-Secret, or admit stock workers by "
        "LOCALAI_ALLOW_SHARED_TOKEN_NODES=true",
        field="X-LocalAI-Node-Secret",
    )


_MAX_TRIES = 3
"""Attempts to create and lock the rows of nodes: one may be removed between insert and lock."""
INVENTORY_DELAY = 3.0
"""Seconds after a registration until the worker listens on the bus and can answer an inventory request."""
_PRESERVED_IF_EMPTY = (
    *("address", "http_address", "gpu_vendor", "gpu_compute_capability", "capability"),
    *("total_vram", "total_ram", "available_ram"),
)


@dataclass(frozen=True)
class Registered:
    """A registered node, with bus credentials if it is approved, and the API token of an approved agent.

    Credentials and token are stored nowhere else.
    """

    node: BackendNode
    api_token: str = ""
    credentials: Credentials | None = None


RegistrationOutcome = Registered | errors.Conflict
"""The registered node, or a Conflict that is already recorded for an administrator."""


def register_one(new_claim: Claim, *, now: datetime, auto_approve: bool) -> Registered:
    """Create or update the node with the name of the claim (R1.10 to R1.31).

    Raises Conflict for a mismatching claim, and the errors of `register_all`.
    """
    (outcome,) = register_all([new_claim], now=now, auto_approve=auto_approve)
    if isinstance(outcome, errors.Conflict):
        raise outcome
    return outcome


def register_all(
    new_claims: Sequence[Claim], *, now: datetime, auto_approve: bool, patience: float = 0.0
) -> list[RegistrationOutcome]:
    """Register claims of different names and secrets in one transaction, in a constant number of queries.

    Raises Forbidden for a revoked secret, TokenRefused for a join token that was used up meanwhile, Conflict
    for a claim that cannot be recorded, and TooManyPending. After an error no claim is registered. A join
    token costs one more statement, a new node that must be approved two. With `patience`, raises
    OperationalError if another transaction holds a row for that many seconds.
    """
    with transaction.atomic():
        if patience:
            limit_lock_wait(patience)
        locked_rows = _lock_or_create(new_claims, now)
        # After the locks: a revocation holds the lock of its node.
        if claims.any_revoked(new_claim.fingerprint for new_claim in new_claims):
            raise errors.Forbidden(claims.REVOKED_SECRET_MESSAGE, field="X-LocalAI-Node-Secret")
        matches = [
            _match_node(rows, new_claim) for rows, new_claim in zip(locked_rows, new_claims, strict=True)
        ]
        fitting = [
            (node, new_claim)
            for (node, kind), new_claim in zip(matches, new_claims, strict=True)
            if kind is None
        ]
        joining.spend_uses(_unbound_tickets(fitting), now)
        if not auto_approve:
            pending.check_limits(
                [node for node, new_claim in fitting if not node.revision and new_claim.ticket is None]
            )
        admitted = {node.id: registered for node, registered in _admit_all(fitting, now, auto_approve)}
        return [
            admitted[node.id] if kind is None else _record_conflict(node, kind, new_claim, now)
            for (node, kind), new_claim in zip(matches, new_claims, strict=True)
        ]


def _unbound_tickets(fitting: Iterable[tuple[BackendNode, Claim]]) -> list[tuple[JoinToken, str]]:
    """Return the join tokens to spend: those of claims whose secret is not yet bound to the claimed node."""
    return [
        (new_claim.ticket, new_claim.registration.name)
        for node, new_claim in fitting
        if new_claim.ticket is not None and not _is_bound(node, new_claim)
    ]


def _is_bound(node: BackendNode, new_claim: Claim) -> bool:
    return node.revision > 0 and principals.secrets_equal(new_claim.fingerprint, node.fingerprint)


def _record_conflict(
    node: BackendNode, kind: NodeConflict.Mismatch, new_claim: Claim, now: datetime
) -> errors.Conflict:
    """Record the mismatching claim, and return the error."""
    with logs.with_request_id(new_claim.request_id):
        return claims.record_conflict(
            node,
            kind,
            _claimed_value(kind, new_claim),
            now=now,
            source_address=new_claim.source_address,
            advertised_address=new_claim.registration.address,
            claimed_name=new_claim.registration.name,
        )


def _match_node(
    rows: Collection[BackendNode], new_claim: Claim
) -> tuple[BackendNode, NodeConflict.Mismatch | None]:
    """Return the node of the claim and the mismatch, if any; the node with the claim's name comes first."""
    named = next((row for row in rows if row.name == new_claim.registration.name), None)
    secret_node = next((row for row in rows if row is not named), None)
    kind = claims.find_mismatch(named, new_claim.fingerprint, new_claim.instance) if named else None
    if (
        named
        and not kind
        and claims.has_moved(named, new_claim.source_address, new_claim.registration.address)
    ):
        kind = NodeConflict.Mismatch.ADDRESS
    if secret_node is not None and kind is None:
        return secret_node, NodeConflict.Mismatch.NAME
    assert named is not None
    return named, kind


def _claimed_value(kind: NodeConflict.Mismatch, new_claim: Claim) -> str:
    if kind == NodeConflict.Mismatch.NAME:
        return principals.hash_secret(new_claim.registration.name)
    if kind == NodeConflict.Mismatch.TOKEN:
        return new_claim.source_address
    if kind == NodeConflict.Mismatch.ADDRESS:
        return principals.hash_secret(f"{new_claim.source_address} {new_claim.registration.address}")
    return new_claim.instance if kind == NodeConflict.Mismatch.INSTANCE else new_claim.fingerprint


def _lock_or_create(new_claims: Sequence[Claim], now: datetime) -> list[list[BackendNode]]:
    """Lock, for each claim, the rows with its name or secret; create the row of a new name (R1.22).

    Raises Conflict for a name that cannot be distinguished from another node's name.
    """
    for _ in range(_MAX_TRIES):
        existing = _lock_existing(new_claims)
        matching_rows = [_matching_rows(new_claim, existing) for new_claim in new_claims]
        missing = [new_claim for new_claim, rows in zip(new_claims, matching_rows, strict=True) if not rows]
        if not missing:
            return matching_rows
        # Sorted by name in every process, so that two processes that create the same nodes do not deadlock.
        new_nodes = sorted(
            (_new_node(new_claim, now) for new_claim in missing), key=lambda node: node.name_key
        )
        BackendNode.objects.bulk_create(new_nodes, ignore_conflicts=True)
    raise errors.Conflict("the node is being re-created; try again", field="name")


def _matching_rows(new_claim: Claim, existing: Sequence[BackendNode]) -> list[BackendNode]:
    rows = [
        row
        for row in existing
        if row.name == new_claim.registration.name
        or (new_claim.fingerprint and row.fingerprint == new_claim.fingerprint)
    ]
    if not rows and any(row.name_key == names.key(new_claim.registration.name) for row in existing):
        raise errors.Conflict(
            f"a node with a name too similar to {new_claim.registration.name!r} exists", field="name"
        )
    return rows


def _lock_existing(new_claims: Sequence[Claim]) -> list[BackendNode]:
    """Lock and return the nodes with these names, with similar names, or with these secrets."""
    claimed_names = [new_claim.registration.name for new_claim in new_claims]
    condition = Q(name_key__in=[names.key(name) for name in claimed_names]) | Q(name__in=claimed_names)
    if secrets := [new_claim.fingerprint for new_claim in new_claims if new_claim.fingerprint]:
        condition |= Q(fingerprint__in=secrets)
    return lock_in_order(BackendNode.objects.filter(condition))


def _new_node(new_claim: Claim, now: datetime) -> BackendNode:
    return BackendNode(
        name=new_claim.registration.name,
        name_key=names.key(new_claim.registration.name),
        node_type=new_claim.registration.node_type,
        address=new_claim.registration.address,
        fingerprint=new_claim.fingerprint,
        weak_identity=not new_claim.fingerprint,
        bound_at=now if new_claim.fingerprint else None,
        source_address=new_claim.source_address,
        created_at=now,
        updated_at=now,
    )


def _admit_all(
    fitting: Sequence[tuple[BackendNode, Claim]], now: datetime, auto_approve: bool
) -> list[tuple[BackendNode, Registered]]:
    if not fitting:
        return []
    routine = {node.id for node, new_claim in fitting if _is_routine(node, new_claim)}
    changes = [_admit(node, new_claim, now, auto_approve, node.id in routine) for node, new_claim in fitting]
    reports = [
        (change, new_claim.registration.labels)
        for change, (_, new_claim) in zip(changes, fitting, strict=True)
    ]
    merge_reported_labels(reports, actors.WORKER)
    changed = [(node, new_claim.registration) for node, new_claim in fitting if node.id not in routine]
    _drop_unlisted_replicas(changed, now)
    tokens = [_agent_token(change) for change in changes]
    save_all(changes)
    issued = bus_credentials.issue([change.node for change in changes], now)
    if changed:
        clear_cooldowns(now)
    return [
        (change.node, Registered(change.node, token, issued.get(change.node.id)))
        for change, token in zip(changes, tokens, strict=True)
    ]


def _is_routine(node: BackendNode, new_claim: Claim) -> bool:
    """Return True if the same process registers again, for new credentials or while it waits for approval.

    Such a registration has no new facts. Its list of replicas may be outdated: loads may have ended since,
    and engines may be starting.
    """
    same = new_claim.instance == node.instance and new_claim.fingerprint == node.fingerprint
    registration = new_claim.registration
    moved = (registration.address, registration.http_address) != (node.address, node.http_address)
    return node.revision > 0 and bool(new_claim.instance) and same and not moved


def _admit(node: BackendNode, new_claim: Claim, now: datetime, auto_approve: bool, routine: bool) -> Change:
    registration = new_claim.registration
    if node.revision and node.node_type != registration.node_type:
        # An agent gets a user's key: an approval as one type is no approval as the other.
        raise errors.Conflict(
            f"the node is registered as {node.node_type}: an administrator must remove it first",
            field="node_type",
        )
    change = Change(node, now, new_claim.request_id)
    restarted = new_claim.instance != node.instance or not new_claim.instance
    if new_claim.ticket is not None or not _is_bound(node, new_claim):
        change.set(**_ticket_columns(new_claim.ticket))
    claims.bind(change, new_claim.fingerprint, new_claim.instance)
    detail = {"source_address": new_claim.source_address, "address": registration.address}
    if new_claim.ticket is not None:
        detail |= {"join_token": str(new_claim.ticket.id), "join_note": new_claim.ticket.note}
    cause = (
        "first registration"
        if node.revision == 0
        else "worker restarted"
        if restarted
        else "registered again"
    )
    change.apply(Event.REGISTERED, actors.WORKER, reason=cause, detail=detail, routine=routine)
    if auto_approve and not isinstance(states.apply(Event.AUTO_APPROVED, facts_of(node)), states.Refusal):
        change.apply(Event.AUTO_APPROVED, actors.AUTO_APPROVAL)
    if node.drained_at is not None and restarted:
        change.set(**ENGINES_UNKNOWN_COLUMNS)
    change.set(last_heartbeat=now, source_address=new_claim.source_address, node_type=registration.node_type)
    figures = _resource_columns(node, registration) | {"vram_read_at": now}
    if routine:
        # A registration reports the memory of a machine without engines; heartbeats are more accurate.
        del figures["available_vram"], figures["gpus"], figures["vram_read_at"]
    elif registration.running_processes is not None:
        # R1.33: a reading. A stock worker's is none, its engines may still run.
        figures |= {"reserved_vram": 0, "reserved_cleared_at": now}
    change.set(engine_token=registration.engine_token, **figures)
    if not routine:
        soon = now + timedelta(seconds=INVENTORY_DELAY)
        change.set(inventory_due_at=soon, **{**file_port.UNCHECKED_COLUMNS, "file_port_next_check_at": soon})
    return change


def _ticket_columns(ticket: JoinToken | None) -> dict[str, Any]:
    """Return the columns that record the join ticket; the note and creator outlive the ticket's row."""
    if ticket is None:
        return {"joined_with": None, "joined_note": "", "joined_by": ""}
    return {"joined_with": ticket.id, "joined_note": ticket.note, "joined_by": ticket.created_by}


def _agent_token(change: Change) -> str:
    """Replace the user and API key of an approved agent, at each registration (R1.31); return the key."""
    if change.node.node_type == NodeType.AGENT and change.node.approved_at is not None:
        return lifecycle.provision_agent(change)
    return ""


def _drop_unlisted_replicas(registered: Sequence[tuple[BackendNode, Registration]], now: datetime) -> None:
    """End or depart the replicas whose process the worker does not list.

    A listed process at another address is another process. Replicas that cannot run any more end. All others
    depart, also a listed replica that has departed before: controllers stop their engines. A stock worker
    lists nothing, and registers again for new credentials while its engines run: a controller requests its
    list (`nodes/backends/inventory.py`).
    """
    old = [node.id for node, _ in registered if node.revision > 0]
    rows: dict[UUID, list[NodeModel]] = defaultdict(list)
    for row in NodeModel.engines.filter(node_id__in=old) if old else ():
        rows[row.node_id].append(row)
    for node, registration in registered:
        if all(_still_runs(row, registration, node.weak_identity) for row in rows[node.id]):
            continue
        # The rows as they are now: a start may have been recorded since, and then its engine may start.
        current = engines.lock_rows(NodeModel.engines.filter(node=node))
        keep = [row.pk for row in current if _still_runs(row, registration, node.weak_identity)]
        ended = [row.pk for row in current if _has_ended(row, registration, now)]
        engines.depart(node.id, now=now, keep=keep, ended=ended)


def _still_runs(row: NodeModel, registration: Registration, weak: bool) -> bool:
    if registration.node_type == NodeType.AGENT or row.phase == Phase.DEPARTED:
        return False
    if row.address and not dial_targets.is_permitted(
        row.address, name=registration.name, registered=(registration.address, registration.http_address)
    ):
        return False
    if registration.running_processes is None:
        return weak
    return _is_listed(registration, row)


def _has_ended(row: NodeModel, registration: Registration, now: datetime) -> bool:
    """Return True if the worker's list proves that the engine does not run and will not start.

    An engine that was started a moment ago may have started after the worker created the list.
    """
    if registration.running_processes is None:
        return False
    if row.started_at is not None and now < row.started_at + UNANSWERED_START_LIMIT:
        return False
    return not _is_listed(registration, row)


def _is_listed(registration: Registration, row: NodeModel) -> bool:
    """Return True if the worker lists the replica's process; the list or the row may lack the address."""
    listed = {process.process_key: process.address for process in registration.running_processes or ()}
    address = listed.get(row.process_key)
    return address is not None and (
        not address or not row.address or addresses.is_same_address(address, row.address)
    )


def _resource_columns(node: BackendNode, reported: Registration) -> dict[str, Any]:
    """Return the columns of the reported figures (R1.23 to R1.25, R1.50).

    A zero or empty figure keeps the stored value, except where zero has a meaning.
    """
    columns: dict[str, Any] = {
        name: getattr(reported, name) or getattr(node, name) for name in _PRESERVED_IF_EMPTY
    }
    columns |= {"total_disk": reported.total_disk, "available_disk": reported.available_disk}
    columns |= {
        "worker_version": reported.version,
        "gpus": list(reported.gpus),
        "system": dict(reported.system),
    }
    if not node.max_replicas_per_model_manually_set:
        columns["max_replicas_per_model"] = max(reported.max_replicas_per_model, 1)
    text = node.vram_budget if node.vram_budget_manually_set else reported.vram_budget
    limit = resources.budget_ceiling_or_none(text, columns["total_vram"])
    available = reported.available_vram
    if node.vram_budget_manually_set:
        available = available or node.available_vram
    columns |= {"vram_budget": text, "vram_budget_bytes": limit}
    columns["available_vram"] = resources.cap_to_ceiling(available, limit)
    return columns
