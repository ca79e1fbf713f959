"""Upgrades and installs in waves: the transaction that ends the last target of a wave opens the next one.

If the request has a pause between waves, the scheduled `catch_up` opens the next wave after the pause.

A target whose wave is not open has no intent, so no work on it can begin. When every target of the open wave
has ended, the targets of the next one get their intents. When as many targets failed as the request allows,
or a target was cancelled, no more waves open until an operator has decided (`wave_requests.py`).

The canary tests the upgrade on a node whose loss has the least effect. Nodes with the last replica of a model
follow after the other reachable nodes. Unreachable nodes would delay all others, so they come last.

Locks: intents, then operations, both in the order of their ids. Then intents are deleted and created, the new
ones in the order of nodes and backends; a locked row of a node is skipped. The counter of changes comes last.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from django.db import connection

from localai_cluster.kit.leases import update_rows
from localai_cluster.kit.transactions import committed
from nodes.models import BackendNode, PendingBackendOp
from operations import targets
from operations.changes import events
from operations.changes.events import emit
from operations.ledger import target_changes
from operations.models import (
    ACTIVE,
    WAVES_IN_PROGRESS,
    Operation,
    OperationTarget,
    Status,
    TargetStatus,
    Waves,
)

CANARY = 0
"""Number of the canary wave; the other waves count from 1."""
MAX_NAMED = 5
"""Names in the question after a failed wave."""


@dataclass(frozen=True)
class Options:
    """Options of a request for waves."""

    max_unavailable: int | str = 1
    """Number of nodes at a time, at least 1, or a percentage of the request's nodes such as "25%"."""
    canary: bool = True
    pause_seconds: int = 0
    """Pause between the end of a wave and the next one."""
    stop_at_failures: int = 1
    """Number of failed nodes, in all waves, from which on each failure needs an operator's choice."""

    @classmethod
    def of(cls, operation: Operation) -> "Options | None":
        """Parse the operation's payload; None without waves."""
        stored = operation.payload.get("waves")
        if not stored:
            return None
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__ if name in stored})


def nodes_at_once(limit: int | str, nodes: int) -> int:
    """Return the number of nodes at a time for a limit such as 3 or "25%", rounded down; at least 1."""
    return limit if isinstance(limit, int) else max(nodes * int(limit.removesuffix("%")) // 100, 1)


@dataclass(frozen=True)
class Member:
    """One node and its loaded replicas of the backend; `last`: the node has a model's last replica."""

    id: UUID
    name: str
    replicas: int = 0
    last: bool = False
    present: bool = True


def plan(members: Collection[Member], options: Options) -> dict[UUID, int]:
    """Return the wave of each node."""
    at_once = nodes_at_once(options.max_unavailable, len(members))
    order: Sequence[Member] = sorted(members, key=lambda m: (not m.present, m.last, m.replicas, m.name, m.id))
    first = min(1, len(order)) if options.canary else 0
    waves = {member.id: CANARY for member in order[:first]}
    for place, member in enumerate(order[first:]):
        waves[member.id] = 1 + place // at_once
    return waves


def confirmed_models(intent_ids: Collection[UUID]) -> dict[UUID, frozenset[str] | None]:
    """Return the models whose last replica may stop, by intent: those confirmed in its active operations.

    None = any model: an operation that only drains protects no last replica.
    """
    sharing = OperationTarget.objects.filter(intent_id__in=intent_ids, operation__status__in=ACTIVE)
    unfinished = sharing.filter(status__in=targets.UNFINISHED)
    confirmed: dict[UUID, frozenset[str] | None] = dict.fromkeys(intent_ids, frozenset())
    for id, payload in unfinished.values_list("intent_id", "operation__payload"):
        assert id is not None
        before = confirmed[id]
        if payload.get("drains") or before is None:
            confirmed[id] = None
        else:
            confirmed[id] = before | set(payload.get("waves", {}).get("last_replicas", ()))
    return confirmed


OPERATION_COLUMNS = [*target_changes.OPERATION_COLUMNS, "waves", "open_wave"]
INTENT_COLUMNS = ("backend", "gallery", "uri", "name", "alias", "galleries", "force")
"""Payload keys of the operation that become columns of each node's intent."""
RECHECK_AFTER = timedelta(seconds=15)
"""Time until the next check of a target whose node is busy with the same backend (`catch_up`)."""

Turn = tuple[Operation, Sequence[OperationTarget]]
"""An operation, and its targets whose wave opens."""


def conclude(
    changes: Mapping[UUID, target_changes.Change], *, ended: Collection[UUID], now: datetime
) -> None:
    """Apply the changes to the targets of these intents, delete the ended intents, and open the next waves.

    The last step of a transaction that has locked the intents. Operations in waves are published with all
    targets, because a wave that opens changes other targets too.
    """
    with committed("waves.conclude"):
        changed = target_changes.apply_changes(changes, now=now)
        if ended:
            PendingBackendOp.objects.filter(pk__in=ended).delete()
        open_next_waves(changed, now=now)
        in_waves = [operation.id for operation in changed.operations if operation.waves]
        moved = [target for target in changed.moved if target.operation_id not in in_waves]
        moved += [target for id in in_waves for target in changed.parts[id]]
        emit(changed.operations, changed.parts, moved)


def open_next_waves(changed: target_changes.ChangedOperations, *, now: datetime) -> None:
    """Open the next wave of each locked operation whose open wave has ended; the caller emits."""
    waiting: Sequence[Operation] = changed.operations
    while waiting:
        turns = [
            turn
            for operation in waiting
            if (turn := _decide_turn(operation, changed.parts[operation.id], now)) is not None
        ]
        attach(turns, changed.parts, now=now)
        # A wave whose nodes were all removed has ended as soon as it opens.
        waiting = [operation for operation, _ in turns]


def _decide_turn(operation: Operation, all_parts: Sequence[OperationTarget], now: datetime) -> Turn | None:
    """Return the wave to open; None while a wave or the pause before the next wave runs.

    If too many targets failed, or a target was cancelled, write the question to the operator instead.
    """
    if operation.waves not in WAVES_IN_PROGRESS or operation.status not in ACTIVE:
        return None
    opened = [target for target in all_parts if target.wave == operation.open_wave]
    if any(target.status not in targets.ENDED for target in opened):
        return None
    names_by_status = {
        status: [target.node_name for target in opened if target.status == status]
        for status in (TargetStatus.ERROR, TargetStatus.CANCELLED)
    }
    options = Options.of(operation) or Options()
    failures = sum(target.status == TargetStatus.ERROR and target.wave is not None for target in all_parts)
    has_failed = names_by_status[TargetStatus.ERROR] and failures >= options.stop_at_failures
    if not has_failed and not names_by_status[TargetStatus.CANCELLED]:
        return _turn_after_pause(operation, all_parts, options, now)
    operation.waves = Waves.ASKS
    words = {TargetStatus.ERROR: "failed", TargetStatus.CANCELLED: "was cancelled"}
    ended = [
        f"{words[status]} on {_shortened_names(names)}" for status, names in names_by_status.items() if names
    ]
    what = operation.kind.removeprefix("backend_")
    reason = f"the {what} {' and '.join(ended)}: continue with the next wave, or stop"
    unopened = [target for target in all_parts if targets.awaits_wave(target)]
    for target in unopened:
        target_changes.queue_again(reason, until=None)(target, now)
    _save([operation], {operation.id: all_parts}, unopened, now)
    return None


def _shortened_names(names: Sequence[str]) -> str:
    """Return the first names and the number of the others: each unopened target stores the text."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def _turn_after_pause(
    operation: Operation, all_parts: Sequence[OperationTarget], options: Options, now: datetime
) -> Turn | None:
    """Return the next wave if the pause before it is over; otherwise begin the pause if necessary.

    The targets of the next wave hold the end of the pause as their next check (`catch_up`).
    """
    opening = _next_wave(all_parts)
    pause_ends = [target.next_check_at for target in opening if target.next_check_at is not None]
    if options.pause_seconds and opening and not pause_ends:
        until = now + timedelta(seconds=options.pause_seconds)
        reason = f"pause between two waves, until {until:%H:%M:%S} UTC"
        for target in opening:
            target_changes.queue_again(reason, until=until)(target, now)
        _save([operation], {operation.id: all_parts}, opening, now)
        return None
    return None if any(until > now for until in pause_ends) else next_turn(operation, all_parts)


def next_turn(operation: Operation, all_parts: Sequence[OperationTarget]) -> Turn | None:
    """Make the next wave the open wave and return it; None if there is no further wave."""
    opening = _next_wave(all_parts)
    if not opening:
        return None
    operation.open_wave = opening[0].wave
    return operation, opening


def _next_wave(all_parts: Sequence[OperationTarget]) -> list[OperationTarget]:
    """Return the targets of the first wave that has not opened."""
    unopened = [target for target in all_parts if targets.awaits_wave(target)]
    first = min((target.wave for target in unopened if target.wave is not None), default=None)
    return [target for target in unopened if target.wave == first]


def attach(
    turns: Sequence[Turn], all_parts: Mapping[UUID, Sequence[OperationTarget]], *, now: datetime
) -> None:
    """Create the intents of these targets of locked operations; the caller emits.

    A target waits if the node already has an intent on the backend, and ends if the node was removed.
    """
    if not turns:
        return
    nodes = _lock_statuses({target.node_id for _, targets_to_open in turns for target in targets_to_open})
    # An insert beside an intent that another transaction changes would deadlock: each waits for the other.
    busy = set(PendingBackendOp.objects.filter(node__in=nodes).values_list("node_id", "backend"))
    new_intents = [
        (target, _new_intent(operation, target, now))
        for operation, targets_to_open in turns
        for target in targets_to_open
        if target.node_id in nodes and (target.node_id, operation.payload["backend"]) not in busy
    ]
    new_intents.sort(key=lambda pair: (pair[1].node_id, pair[1].backend))
    PendingBackendOp.objects.bulk_create([intent for _, intent in new_intents], ignore_conflicts=True)
    ids = [intent.id for _, intent in new_intents]
    created_ids = set(PendingBackendOp.objects.filter(pk__in=ids).values_list("id", flat=True))
    intents_by_target = {target.pk: intent for target, intent in new_intents if intent.id in created_ids}
    opening_targets = [target for _, targets_to_open in turns for target in targets_to_open]
    registered_ids = set(
        BackendNode.objects.filter(pk__in={p.node_id for p in opening_targets}).values_list("id", flat=True)
    )
    for target in opening_targets:
        if (intent := intents_by_target.get(target.pk)) is not None:
            target.intent_id = intent.id
            status = nodes[target.node_id]
            reason = "queued" if status == "healthy" else f"node {target.node_name} is {status}"
            target_changes.queue_again(reason, until=now, node=status != "healthy")(target, now)
        elif target.node_id in registered_ids:
            reason = f"other work on this backend has not ended on {target.node_name}"
            target_changes.queue_again(reason, until=now + RECHECK_AFTER)(target, now)
        else:
            target_changes.end(TargetStatus.ERROR, error=f"node {target.node_name} was removed")(target, now)
    _save([operation for operation, _ in turns], all_parts, opening_targets, now)
    events.notify(events.OPERATIONS, f"* {Status.PENDING}")


def _lock_statuses(ids: Collection[UUID]) -> dict[UUID, str]:
    """Return the status of these nodes, and prevent their removal until the commit.

    Nodes that are being removed are left out.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id, status FROM backend_nodes WHERE id = ANY(%s) ORDER BY id FOR KEY SHARE SKIP LOCKED",
            [sorted(ids)],
        )
        return dict(cursor.fetchall())


def _new_intent(operation: Operation, target: OperationTarget, now: datetime) -> PendingBackendOp:
    return PendingBackendOp(
        id=uuid4(),
        node_id=target.node_id,
        op=PendingBackendOp.Op(operation.kind.removeprefix("backend_")),
        operation_id=operation.id,
        spares_requests=operation.kind == "backend_upgrade",
        next_retry_at=now,
        created_at=now,
        **{name: operation.payload[name] for name in INTENT_COLUMNS},
    )


def _save(
    operations: Sequence[Operation],
    all_parts: Mapping[UUID, Sequence[OperationTarget]],
    moved: Sequence[OperationTarget],
    now: datetime,
) -> None:
    for operation in operations:
        targets.set_derived_state(operation, all_parts[operation.id], now)
    update_rows(moved, target_changes.TARGET_COLUMNS)
    update_rows(operations, OPERATION_COLUMNS)


def catch_up(*, now: datetime) -> int:
    """Open targets whose node was busy when their wave opened, and waves whose pause is over.

    Return how many targets were checked.
    """
    waiting = OperationTarget.objects.filter(
        operation__waves__in=WAVES_IN_PROGRESS, operation__status__in=ACTIVE
    )
    waiting = waiting.filter(intent_id__isnull=True, next_check_at__lte=now, status__in=targets.UNFINISHED)
    ids = list(waiting.values_list("operation_id", flat=True))
    if not ids:
        return 0
    with committed("waves.catch_up"):
        rows = Operation.objects.filter(pk__in=set(ids), status__in=ACTIVE, waves__in=WAVES_IN_PROGRESS)
        operations = list(rows.order_by("pk").select_for_update(no_key=True))
        targets_by_operation = targets.of(operations)
        turns = []
        for operation in operations:
            all_parts = targets_by_operation[operation.id]
            due = [
                target
                for target in all_parts
                if targets.awaits_wave(target) and target.wave == operation.open_wave
            ]
            turns += [(operation, due)] if due else []
        attach(turns, targets_by_operation, now=now)
        open_next_waves(target_changes.ChangedOperations(operations, targets_by_operation), now=now)
        emit(operations, targets_by_operation)
    return len(ids)
