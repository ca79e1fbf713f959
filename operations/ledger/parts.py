"""Parts that are carried out on their own: what happens to an intent happens to every part that shares it.

`happen` is one short transaction, or a step of the caller's, with a constant number of statements for any
number of intents: it locks the operations in the order of their ids, changes their parts, brings each
operation to the state of its parts, and lets the news leave at commit. A caller that also writes intents
locks those first. An operation that has ended takes no part in it, so its end is final (A84).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import connection
from django.db.models import Q

from localai_cluster.commits import committed
from operations import targets
from operations.changes.announce import announce
from operations.ledger.progress import Tick, move_part, update
from operations.models import ACTIVE, Operation, OperationTarget, TargetStatus, storable

Change = Callable[[OperationTarget, datetime], None]
"""What happens to a part at a time."""
PART = [
    "intent_id", "status", "phase", "percentage", "current_bytes", "total_bytes", "file_name", "error",
    "reason", "attempts", "next_look_at", "waits_for_node", "overdue_since", "started_at", "finished_at",
    "last_progress_at", "time_limit_at",
]  # fmt: skip
STATE = [
    "status", "message", "error", "phase", "progress", "attempts", "current_bytes",
    "total_bytes", "next_attempt_at", "updated_at", "started_at", "finished_at",
    "last_progress_at", "time_limit_at",
]  # fmt: skip


@dataclass(frozen=True)
class Changed:
    """Operations that were changed and locked, with all their parts; they are yet to be announced."""

    operations: Sequence[Operation]
    parts: Mapping[UUID, Sequence[OperationTarget]]
    moved: Sequence[OperationTarget] = ()
    """Those of the parts that the changes happened to."""


def happen(changes: Mapping[UUID, Change], *, now: datetime, lock_timeout: str = "0") -> None:
    """Lets each change happen to the running parts of its intent, and announces the operations.

    Raises OperationalError when a lock takes longer than `lock_timeout`; 0 waits for as long as it takes.
    """
    with committed("ledger.happen"):
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [lock_timeout])
        changed = change(changes, now=now)
        announce(changed.operations, changed.parts, changed.moved)


def change(
    changes: Mapping[UUID, Change], *, now: datetime, held: Mapping[int, Change] | None = None
) -> Changed:
    """As `happen`, but the caller announces, as the last thing in its transaction.

    `held`: what happens to parts without an intent, by their ids.
    """
    by_id = held or {}
    wanted = Q(intent_id__in=changes) | Q(pk__in=by_id, intent_id__isnull=True)
    named = OperationTarget.objects.filter(wanted).exclude(status__in=targets.ENDED)
    ids = set(named.values_list("operation_id", flat=True)) if changes or by_id else set()
    if not ids:
        return Changed((), {})
    rows = Operation.objects.filter(pk__in=ids, status__in=ACTIVE).order_by("pk")
    operations = list(rows.select_for_update(no_key=True))
    parts = targets.of(operations)
    moved = []
    for operation in operations:
        for part in parts[operation.id]:
            happens = changes.get(part.intent_id) if part.intent_id else by_id.get(part.pk)
            if happens is not None and part.status not in targets.ENDED:
                happens(part, now)
                moved.append(part)
        targets.adopt(operation, parts[operation.id], now)
    update(moved, PART)
    update(operations, STATE)
    return Changed(operations, parts, moved)


def begin(part: OperationTarget, now: datetime) -> None:
    """A controller takes it up: a new attempt, unless a worker may still be busy with the former one."""
    part.status = TargetStatus.RUNNING_ON_WORKER
    part.started_at = part.started_at or now
    part.next_look_at, part.waits_for_node = None, False
    if part.overdue_since is not None:
        return
    part.phase = "resolving"
    part.last_progress_at, part.time_limit_at = now, None
    part.percentage, part.file_name, part.current_bytes, part.total_bytes = 0, "", 0, 0
    part.reason, part.error = f"contacting {part.node_name}", ""


def begin_within(seconds: float) -> Change:
    """A controller takes it up and sends the command now; an answer is due within `seconds`."""
    return both(begin, time_limit(seconds))


def time_limit(seconds: float) -> Change:
    """The command is sent now; an answer is due within `seconds`."""

    def happens(part: OperationTarget, now: datetime) -> None:
        part.time_limit_at = now + timedelta(seconds=seconds)

    return happens


def report(ticks: Collection[Tick]) -> Change:
    """The worker says how far it is."""

    def happens(part: OperationTarget, now: datetime) -> None:
        for tick in ticks:
            move_part(part, tick, now)
            part.reason = storable(tick.message) or part.reason

    return happens


def overdue(reason: str, since: datetime) -> Change:
    """Its time limit is over; the worker may still be busy with it (O19)."""

    def happens(part: OperationTarget, now: datetime) -> None:
        part.status, part.reason, part.overdue_since = TargetStatus.RUNNING_ON_WORKER, storable(reason), since

    return happens


def rest(
    reason: str,
    *,
    until: datetime | None,
    node: bool = False,
    attempts: int | None = None,
    worker_gone: bool = False,
) -> Change:
    """It waits: for its node, or until its next attempt. A worker that is gone is busy with it no more."""

    def happens(part: OperationTarget, now: datetime) -> None:
        part.status, part.phase, part.time_limit_at = TargetStatus.QUEUED, "", None
        part.reason, part.next_look_at, part.waits_for_node = storable(reason), until, node
        part.attempts = part.attempts if attempts is None else attempts
        part.overdue_since = None if worker_gone else part.overdue_since

    return happens


def end(status: TargetStatus, *, error: str = "", reason: str = "", attempts: int | None = None) -> Change:
    """It ends; what it had reached stays (O70)."""

    def happens(part: OperationTarget, now: datetime) -> None:
        part.status, part.phase, part.time_limit_at = status, "", None
        part.percentage = targets.share(part)
        part.error, part.reason = storable(error), storable(reason)
        part.attempts = part.attempts if attempts is None else attempts
        part.next_look_at, part.waits_for_node, part.overdue_since = None, False, None
        part.finished_at = now

    return happens


def both(first: Change, then: Change) -> Change:
    """One after the other."""

    def happens(part: OperationTarget, now: datetime) -> None:
        first(part, now)
        then(part, now)

    return happens


def note(notes: Mapping[UUID, str], *, now: datetime) -> None:
    """A step of the caller's transaction: says of cancelled parts what their workers did about it.

    Nothing else of an ended operation changes.
    """
    found = OperationTarget.objects.filter(intent_id__in=notes, status=TargetStatus.CANCELLED)
    ids = set(found.values_list("operation_id", flat=True))
    operations = list(Operation.objects.filter(pk__in=ids).order_by("pk").select_for_update(no_key=True))
    if not operations:
        return
    parts = list(found.select_for_update(no_key=True))
    for part in parts:
        part.reason = storable(notes[part.intent_id]) if part.intent_id else part.reason
    update(parts, ["reason"])
    announce(operations)
