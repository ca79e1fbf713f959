"""Registration: a worker tells who it is and what it has (R1.22 to R1.31, `contract/http-api.md` §1.1).

One transaction for all that arrive together: identity first, then facts, figures, labels, replicas. A claim
that does not fit is recorded and refused after the commit, so that the conflict is there to be seen.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q

from localai_cluster import addresses, errors, logs, names
from localai_cluster.accounts import actors, principals
from localai_cluster.messaging.credentials import Credentials
from localai_cluster.messaging.messages import process_key
from nodes.models import BackendNode, NodeConflict, NodeModel, NodeType, Phase
from nodes.registry import (
    agents,
    budget,
    bus_credentials,
    claims,
    dialling,
    file_port,
    joining,
    pending,
    states,
)
from nodes.registry.change import ENGINES_UNKNOWN, Change, facts_of, save_all
from nodes.registry.fleet import lock_in_order
from nodes.registry.labels import reported_labels
from nodes.registry.registration_claim import Claim, Registration, claim
from nodes.registry.states import Event
from nodes.replicas import retire
from nodes.replicas.lifecycle import engine_of
from nodes.scheduling.cooldowns import clear_cooldowns

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
class Registered:
    """A registered node, an approved one with its credentials for the bus; an approved agent's API token.

    Token and credentials exist nowhere else.
    """

    node: BackendNode
    api_token: str = ""
    credentials: Credentials | None = None


RegistrationOutcome = Registered | errors.Conflict
"""What became of a claim. A Conflict was recorded for an admin."""


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

    Raises Forbidden for a revoked secret, TokenRefused for a join token that was spent meanwhile, Conflict
    for what cannot be recorded and TooManyPending; then none of them counts. A join token costs one statement
    more, a new node that must be approved two.
    With `patience` it gives up (OperationalError) when another transaction holds a row for so many seconds.
    """
    with transaction.atomic():
        if patience:
            _be_patient(patience)
        held = _rows(made, now)
        # After the locks: a revocation holds the lock of its node.
        if claims.any_revoked(one.fingerprint for one in made):
            raise errors.Forbidden(
                "this secret was revoked; generate a new one", field="X-LocalAI-Node-Secret"
            )
        judged = [_judged(rows, one) for rows, one in zip(held, made, strict=True)]
        fitting = [(node, one) for (node, kind), one in zip(judged, made, strict=True) if kind is None]
        joining.spend(_newcomers(fitting), now)
        if not auto_approve:
            pending.check_limits([node for node, one in fitting if not node.revision and one.ticket is None])
        admitted = {node.id: found for node, found in _admit_all(fitting, now, auto_approve)}
        return [
            admitted[node.id] if kind is None else _note(node, kind, one, now)
            for (node, kind), one in zip(judged, made, strict=True)
        ]


def _be_patient(seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{round(1000 * seconds)}ms"])


def _newcomers(fitting: Iterable[tuple[BackendNode, Claim]]) -> list[tuple[joining.JoinTicket, str]]:
    """The join tokens to spend: of those whose secret is not bound to their node yet."""
    return [
        (one.ticket, one.told.name)
        for node, one in fitting
        if one.ticket is not None and not _is_bound(node, one)
    ]


def _is_bound(node: BackendNode, made: Claim) -> bool:
    return node.revision > 0 and principals.same(made.fingerprint, node.fingerprint)


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
    if named and not kind and claims.has_moved(named, made.source_address, made.told.address):
        kind = NodeConflict.Mismatch.ADDRESS
    if other is not None and kind is None:
        return other, NodeConflict.Mismatch.NAME
    assert named is not None
    return named, kind


def _claimed(kind: NodeConflict.Mismatch, made: Claim) -> str:
    if kind == NodeConflict.Mismatch.NAME:
        return principals.hash_secret(made.told.name)
    if kind == NodeConflict.Mismatch.TOKEN:
        return made.source_address
    if kind == NodeConflict.Mismatch.ADDRESS:
        return principals.hash_secret(f"{made.source_address} {made.told.address}")
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
    routine = {node.id for node, made in fitting if _is_routine(node, made)}
    changes = [_admit(node, made, now, auto_approve, node.id in routine) for node, made in fitting]
    reports = [(change, made.told.labels) for change, (_, made) in zip(changes, fitting, strict=True)]
    reported_labels(reports, actors.WORKER)
    news = [(node, made.told) for node, made in fitting if node.id not in routine]
    _drop_absent(news, now)
    tokens = [_agent_token(change) for change in changes]
    save_all(changes)
    issued = bus_credentials.issue([change.node for change in changes], now)
    if news:
        clear_cooldowns(now)
    return [
        (change.node, Registered(change.node, token, issued.get(change.node.id)))
        for change, token in zip(changes, tokens, strict=True)
    ]


def _is_routine(node: BackendNode, made: Claim) -> bool:
    """Whether the same process is there once more: it wants new credentials, or waits for its approval.

    That is no news. It says nothing about replicas either: its list was made before loads that have ended
    since, and does not name engines that are still to be started.
    """
    same = made.instance == node.instance and made.fingerprint == node.fingerprint
    told = made.told
    moved = (told.address, told.http_address) != (node.address, node.http_address)
    return node.revision > 0 and bool(made.instance) and same and not moved


def _admit(node: BackendNode, made: Claim, now: datetime, auto_approve: bool, routine: bool) -> Change:
    told = made.told
    if node.revision and node.node_type != told.node_type:
        # An agent gets a user's key: an approval as one thing is none as the other.
        raise errors.Conflict(
            f"the node is registered as {node.node_type}: an administrator must remove it first",
            field="node_type",
        )
    change = Change(node, now, made.request_id)
    restarted = made.instance != node.instance or not made.instance
    if made.ticket is not None or not _is_bound(node, made):
        change.set(**_joined(made.ticket))
    claims.bind(change, made.fingerprint, made.instance)
    detail = {"source_address": made.source_address, "address": told.address}
    if made.ticket is not None:
        detail |= {"join_token": str(made.ticket.id), "join_note": made.ticket.note}
    cause = (
        "first registration"
        if node.revision == 0
        else "worker restarted"
        if restarted
        else "registered again"
    )
    change.happen(Event.REGISTERED, actors.WORKER, reason=cause, detail=detail, routine=routine)
    if auto_approve and not isinstance(states.apply(Event.AUTO_APPROVED, facts_of(node)), states.Refusal):
        change.happen(Event.AUTO_APPROVED, actors.AUTO_APPROVAL)
    if node.drained_at is not None and restarted:
        change.set(**ENGINES_UNKNOWN)
    change.set(last_heartbeat=now, source_address=made.source_address, node_type=told.node_type)
    figures = _figures(node, told) | {"vram_read_at": now}
    if routine:
        # A registration tells the memory of a machine without engines; heartbeats know better.
        del figures["available_vram"], figures["gpus"], figures["vram_read_at"]
    change.set(engine_token=told.engine_token, **figures)
    if not routine:
        soon = now + timedelta(seconds=LISTS_AFTER)
        change.set(inventory_due_at=soon, **{**file_port.UNCHECKED, "file_port_next_check_at": soon})
    return change


def _joined(ticket: joining.JoinTicket | None) -> dict[str, Any]:
    """How the node came in: the ticket, and what is still known of it when its row is gone."""
    if ticket is None:
        return {"joined_with": None, "joined_note": "", "joined_by": ""}
    return {"joined_with": ticket.id, "joined_note": ticket.note, "joined_by": ticket.created_by}


def _agent_token(change: Change) -> str:
    """R1.31: an approved agent gets a new user and key at every registration."""
    if change.node.node_type == NodeType.AGENT and change.node.approved_at is not None:
        return agents.provision(change)
    return ""


def _drop_absent(registered: Sequence[tuple[BackendNode, Registration]], now: datetime) -> None:
    """Take away the replicas that a worker does not list; a listed one at another address is another process.

    Those that cannot run any more end. The others depart: controllers stop them, as also those that departed
    earlier and are listed now. A stock worker lists nothing, and registers again for new credentials while
    its engines run on: a controller asks it for them (`nodes/backends/inventory.py`).
    """
    old = [node.id for node, _ in registered if node.revision > 0]
    rows: dict[UUID, list[NodeModel]] = defaultdict(list)
    for row in NodeModel.engines.filter(node_id__in=old) if old else ():
        rows[row.node_id].append(row)
    for node, told in registered:
        keep = [row.pk for row in rows[node.id] if _still_runs(row, told, node.weak_identity)]
        ended = [row.pk for row in rows[node.id] if _has_ended(row, told, now)]
        if len(keep) < len(rows[node.id]):
            retire.depart(node.id, now=now, keep=keep, ended=ended)


def _still_runs(row: NodeModel, told: Registration, weak: bool) -> bool:
    if told.node_type == NodeType.AGENT or row.phase == Phase.DEPARTED:
        return False
    if row.address and not dialling.permitted(
        row.address, name=told.name, registered=(told.address, told.http_address)
    ):
        return False
    if told.running_processes is None:
        return weak
    address = _listed(row, told)
    return address is not None and _is_same(address, row.address)


def _has_ended(row: NodeModel, told: Registration, now: datetime) -> bool:
    """Return True if the worker's list proves that the engine does not run and will not start."""
    if told.running_processes is None or engine_of(row).may_still_start(now):
        return False
    address = _listed(row, told)
    return address is None or not _is_same(address, row.address)


def _listed(row: NodeModel, told: Registration) -> str | None:
    """Return the address of the listed process with the key of the row, "" if it names none."""
    listed = {one.process_key: one.address for one in told.running_processes or ()}
    return listed.get(process_key(row.model_name, row.replica_index))


def _is_same(listed: str, address: str) -> bool:
    return not listed or not address or addresses.same(listed, address)


def _figures(node: BackendNode, reported: Registration) -> dict[str, Any]:
    """R1.23 to R1.25, R1.50: zero and empty keep the stored value, except where they mean something."""
    columns: dict[str, Any] = {
        name: getattr(reported, name) or getattr(node, name) for name in _KEPT_IF_EMPTY
    }
    columns |= {"total_disk": reported.total_disk, "available_disk": reported.available_disk}
    columns |= {"worker_version": reported.version, "gpus": list(reported.gpus)}
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
