"""Upgrades in waves: the transaction that ends the last part of a wave opens the next one.

A part whose wave is not open has no intent, so nothing of it can begin. When every part of the open wave has
ended well, the parts of the next get theirs. When one failed or was cancelled, nothing more opens until an
operator has said what becomes of the rest (`wave_requests.py`).

Locks: intents, then operations, both in the order of their ids. Then intents go and come, those that come in
the order of nodes and backends, and no row of a node is waited for. The counter of changes comes last.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from django.db import connection

from localai_cluster.commits import committed
from nodes.models import BackendNode, PendingBackendOp
from operations import targets
from operations.changes import events
from operations.changes.announce import announce
from operations.ledger import parts
from operations.ledger.progress import update
from operations.models import ACTIVE, GOING_ON, Operation, OperationTarget, Status, TargetStatus, Waves

STATE = [*parts.STATE, "waves", "open_wave"]
WISHED = ("backend", "gallery", "uri", "name", "alias", "galleries", "force")
"""What the operation says of the work on each node."""
LOOK_AGAIN = timedelta(seconds=15)
"""After this time a part is looked at again whose node is busy with the same backend (`catch_up`)."""

Turn = tuple[Operation, Sequence[OperationTarget]]
"""An operation, and the parts whose wave opens."""


def conclude(changes: Mapping[UUID, parts.Change], *, ended: Collection[UUID], now: datetime) -> None:
    """Lets the changes happen to the parts of these intents, removes what has ended, and opens what follows.

    The last step of a transaction that has locked the intents.
    """
    with committed("waves.conclude"):
        changed = parts.change(changes, now=now)
        if ended:
            PendingBackendOp.objects.filter(pk__in=ended).delete()
        go_on(changed, now=now)
        announce(changed.operations, changed.parts, changed.moved)


def go_on(changed: parts.Changed, *, now: datetime) -> None:
    """Opens the next wave of each of these locked operations whose open one ended; the caller announces."""
    waiting: Sequence[Operation] = changed.operations
    while waiting:
        turns = [turn for one in waiting if (turn := _turn(one, changed.parts[one.id], now)) is not None]
        attach(turns, changed.parts, now=now)
        # A wave whose nodes are all gone has ended as soon as it opens.
        waiting = [operation for operation, _ in turns]


def _turn(operation: Operation, all_parts: Sequence[OperationTarget], now: datetime) -> Turn | None:
    """What opens now; None if nothing does. Says so where an operator is asked."""
    if operation.waves not in GOING_ON or operation.status not in ACTIVE:
        return None
    opened = [part for part in all_parts if part.wave == operation.open_wave]
    if any(part.status not in targets.ENDED for part in opened):
        return None
    named = {
        status: [part.node_name for part in opened if part.status == status]
        for status in (TargetStatus.ERROR, TargetStatus.CANCELLED)
    }
    if not any(named.values()):
        return next_turn(operation, all_parts)
    operation.waves = Waves.ASKS
    words = {TargetStatus.ERROR: "failed", TargetStatus.CANCELLED: "was cancelled"}
    ended = [f"{words[status]} on {', '.join(names)}" for status, names in named.items() if names]
    reason = f"the upgrade {' and '.join(ended)}: continue with the next wave, or stop"
    left = [part for part in all_parts if targets.held(part)]
    for part in left:
        parts.rest(reason, until=None)(part, now)
    _save([operation], {operation.id: all_parts}, left, now)
    return None


def next_turn(operation: Operation, all_parts: Sequence[OperationTarget]) -> Turn | None:
    """Makes the next wave the open one; None if there is none."""
    left = [part.wave for part in all_parts if part.wave is not None and targets.held(part)]
    if not left:
        return None
    operation.open_wave = min(left)
    return operation, [part for part in all_parts if part.wave == operation.open_wave and targets.held(part)]


def attach(
    turns: Sequence[Turn], all_parts: Mapping[UUID, Sequence[OperationTarget]], *, now: datetime
) -> None:
    """Gives these parts of locked operations their intents; the caller announces.

    A part waits on where the node already has an intent on the backend, and ends where the node is gone.
    """
    if not turns:
        return
    nodes = _nodes({part.node_id for _, opening in turns for part in opening})
    # An insert beside an intent that someone is changing would wait for them, and they for our operations.
    busy = set(PendingBackendOp.objects.filter(node__in=nodes).values_list("node_id", "backend"))
    wanted = [
        (part, _intent(operation, part, now))
        for operation, opening in turns
        for part in opening
        if part.node_id in nodes and (part.node_id, operation.payload["backend"]) not in busy
    ]
    wanted.sort(key=lambda one: (one[1].node_id, one[1].backend))
    PendingBackendOp.objects.bulk_create([intent for _, intent in wanted], ignore_conflicts=True)
    ids = [intent.id for _, intent in wanted]
    made = set(PendingBackendOp.objects.filter(pk__in=ids).values_list("id", flat=True))
    by_part = {part.pk: intent for part, intent in wanted if intent.id in made}
    moved = [part for _, opening in turns for part in opening]
    there = set(BackendNode.objects.filter(pk__in={p.node_id for p in moved}).values_list("id", flat=True))
    for part in moved:
        if (intent := by_part.get(part.pk)) is not None:
            part.intent_id = intent.id
            status = nodes[part.node_id]
            reason = "queued" if status == "healthy" else f"node {part.node_name} is {status}"
            parts.rest(reason, until=now, node=status != "healthy")(part, now)
        elif part.node_id in there:
            reason = f"other work on this backend has not ended on {part.node_name}"
            parts.rest(reason, until=now + LOOK_AGAIN)(part, now)
        else:
            parts.end(TargetStatus.ERROR, error=f"node {part.node_name} was removed")(part, now)
    _save([operation for operation, _ in turns], all_parts, moved, now)
    events.notify(events.OPERATIONS, f"* {Status.PENDING}")


def _nodes(ids: Collection[UUID]) -> dict[UUID, str]:
    """The states of these nodes, which stay until the commit; one that is being removed is left out."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id, status FROM backend_nodes WHERE id = ANY(%s) ORDER BY id FOR KEY SHARE SKIP LOCKED",
            [sorted(ids)],
        )
        return dict(cursor.fetchall())


def _intent(operation: Operation, part: OperationTarget, now: datetime) -> PendingBackendOp:
    return PendingBackendOp(
        id=uuid4(),
        node_id=part.node_id,
        op=PendingBackendOp.Op.UPGRADE,
        operation_id=operation.id,
        spares_requests=True,
        next_retry_at=now,
        created_at=now,
        **{name: operation.payload[name] for name in WISHED},
    )


def _save(
    operations: Sequence[Operation],
    all_parts: Mapping[UUID, Sequence[OperationTarget]],
    moved: Sequence[OperationTarget],
    now: datetime,
) -> None:
    for operation in operations:
        targets.adopt(operation, all_parts[operation.id], now)
    update(moved, parts.PART)
    update(operations, STATE)


def catch_up(*, now: datetime) -> int:
    """Opens parts whose node was busy when their wave opened; answers how many were looked at."""
    left = OperationTarget.objects.filter(operation__waves__in=GOING_ON, operation__status__in=ACTIVE)
    left = left.filter(intent_id__isnull=True, next_look_at__lte=now).exclude(status__in=targets.ENDED)
    ids = set(left.values_list("operation_id", flat=True))
    if not ids:
        return 0
    with committed("waves.catch_up"):
        rows = Operation.objects.filter(pk__in=ids, status__in=ACTIVE, waves__in=GOING_ON)
        operations = list(rows.order_by("pk").select_for_update(no_key=True))
        found = targets.of(operations)
        turns = []
        for one in operations:
            due = [part for part in found[one.id] if targets.held(part) and part.wave == one.open_wave]
            turns += [(one, due)] if due else []
        attach(turns, found, now=now)
        changed = [operation for operation, _ in turns]
        go_on(parts.Changed(changed, found), now=now)
        announce(changed, found)
    return sum(len(due) for _, due in turns)
