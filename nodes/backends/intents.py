"""Intent rows: claim them under leases, record outcomes, return them to the queue, cancel them.

Every function is one short transaction with a constant number of statements for any number of intents. It
locks intents in the order of their ids, applies the same change to the targets that share them
(`ledger/target_changes.py`), and deletes the intents that ended in the same transaction (`waves.conclude`).

An intent is claimed while its node is healthy. A cancelled intent is claimed in any state of its node, so
that its worker gets the command to stop. The targets of an ended intent always have an outcome or a reason.

This module also has the time limit for work that waits for an offline or unhealthy node. A worker that sends
heartbeats but does not listen on the bus stays unhealthy. Its last heartbeat is always recent, so its time
counts from the mark.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connection
from django.db.models import Count
from django.db.models.functions import Lower

from localai_cluster.kit import backoff, conf, leases
from localai_cluster.kit.leases import Attempt, LeaseLost, update_rows
from localai_cluster.kit.transactions import Lock, committed, try_lock
from nodes.backends import waves
from nodes.backends.installed import Build
from nodes.models import BackendNode, NodeBackend, NodeStatus, PendingBackendOp
from nodes.models.inventory import PendingBackendOpQuerySet
from operations.changes import events
from operations.changes.events import emit
from operations.ledger import target_changes
from operations.ledger.progress import BATCH_LOCK_TIMEOUT, Tick
from operations.models import Status, TargetStatus, storable

_ABSENT_STATUSES = (NodeStatus.OFFLINE, NodeStatus.UNHEALTHY)
_NOT_LISTENING_TEXT = "it sends heartbeats, but does not answer on the bus"


def gives_up_at(node: BackendNode) -> datetime | None:
    """Return the end of the wait for this absent node; None without a wait: it never sent a heartbeat.

    R1.118: the time counts from the last heartbeat, or from an earlier mark that the node still has.
    """
    if node.last_heartbeat is None:
        return None
    since: datetime = node.last_heartbeat
    for marked_at in (node.offline_at, node.unhealthy_at):
        since = since if marked_at is None else min(since, marked_at)
    return since + timedelta(seconds=conf.cluster().install_wait)


def sends_heartbeats(node: BackendNode) -> bool:
    """Return True if an unhealthy node has sent a heartbeat since it was marked unhealthy."""
    if node.status != NodeStatus.UNHEALTHY or node.unhealthy_at is None:
        return False
    return node.last_heartbeat is not None and node.last_heartbeat > node.unhealthy_at


def reason_to_wait(node: BackendNode, *, now: datetime) -> str:
    """Return why a target waits for its node, and until when."""
    text = f"node {node.name} is {node.status}"
    if sends_heartbeats(node):
        text += f": {_NOT_LISTENING_TEXT}"
    until = gives_up_at(node)
    if node.status not in _ABSENT_STATUSES or until is None:
        return text
    if until <= now:
        return f"{text}; CLUSTER_INSTALL_WAIT is over"
    return f"{text}; it waits until {until:%Y-%m-%d %H:%M:%S} UTC"


def reason_to_give_up(node: BackendNode) -> str:
    """Return why work for the node ended without success after the time limit."""
    text = f"node {node.name} is {node.status}"
    if sends_heartbeats(node):
        text += f" since {node.unhealthy_at:%Y-%m-%d %H:%M:%S} UTC: {_NOT_LISTENING_TEXT}"
    elif node.last_heartbeat is not None:
        text += f"; its last heartbeat was at {node.last_heartbeat:%Y-%m-%d %H:%M:%S} UTC"
    return f"given up: {text} (CLUSTER_INSTALL_WAIT)"


log = logging.getLogger(__name__)

MAX_ATTEMPTS = 10
"""R4.30, O76: an intent whose 10th attempt fails ends."""
PARALLEL_PER_NODE = 4
"""Maximum number of intents of one node that run at the same time."""
_REQUEUE_COLUMNS = [
    *leases.LEASE_COLUMNS, "next_retry_at", "attempts", "last_error", "drain_until", "unanswered_since",
]  # fmt: skip
_NODE_COLUMNS = [
    "id", "name", "instance", "source_address", "fingerprint", "weak_identity", "inventory_due_at",
]  # fmt: skip
"""The columns of a node that sending a command reads; a node has seventy columns."""
_NO_LIMITS: Mapping[str, float] = {}
_EXTRA_ROWS_READ = 64
"""Number of due intents that a claim reads in addition to four for each intent of its limit.

The query omits intents of nodes that already run `PARALLEL_PER_NODE` intents, so a busy node cannot hide the
intents of other nodes for longer than one claim.
"""

RUNS_FIRST_CONDITION = """
    (o.lease_until IS NOT NULL
        OR (o.unanswered_since IS NULL AND o.cancelled_at IS NULL, o.requested_at, o.id)
            < (i.unanswered_since IS NULL AND i.cancelled_at IS NULL, i.requested_at, i.id))"""
"""SQL: row `o` runs before the unleased row `i` of the same node and backend; see `PendingBackendOp.turn`."""
HELD_BACK_CONDITION = f"""
    EXISTS (SELECT FROM pending_backend_ops o
        WHERE o.node_id = i.node_id AND o.backend = i.backend AND o.id <> i.id AND {RUNS_FIRST_CONDITION})"""
"""SQL: another row of the same node and backend runs before row `i`."""
_ONE_AT_A_TIME_CONSTRAINT = "intent_one_at_a_time"
_DUE_INTENTS_SQL = f"""
    WITH busy AS (
        SELECT node_id, count(*) AS number FROM pending_backend_ops
        WHERE lease_until IS NOT NULL GROUP BY node_id
    )
    SELECT id FROM (
        SELECT due.id, due.next_retry_at,
            row_number() OVER (PARTITION BY due.node_id ORDER BY due.next_retry_at, due.id)
            + coalesce(busy.number, 0) AS place
        FROM (
            SELECT i.id, i.node_id, i.next_retry_at
            FROM pending_backend_ops i JOIN backend_nodes n ON n.id = i.node_id
            WHERE i.lease_until IS NULL AND i.next_retry_at <= %(now)s
                AND (i.cancelled_at IS NOT NULL OR (n.status = 'healthy' AND n.node_type = 'backend'))
                AND i.node_id <> ALL (ARRAY(SELECT node_id FROM busy WHERE number >= {PARALLEL_PER_NODE}))
                AND NOT {HELD_BACK_CONDITION}
            ORDER BY i.next_retry_at LIMIT %(looked_at)s
        ) due LEFT JOIN busy ON busy.node_id = due.node_id
    ) placed WHERE place <= {PARALLEL_PER_NODE} ORDER BY next_retry_at LIMIT %(limit)s"""


@dataclass(frozen=True)
class Intent:
    """One claimed intent, with the rows that its execution needs."""

    row: PendingBackendOp
    node: BackendNode
    listed_build: Build | None
    """The build that the node listed before this attempt; None if the node listed none."""

    @property
    def id(self) -> UUID:
        return self.row.id

    @property
    def fence(self) -> int:
        """Number of the attempt, the fencing token of its lease."""
        return self.row.fence

    def __str__(self) -> str:
        return f"{self.row} on {self.node.name}"


@dataclass(frozen=True)
class Ended:
    """The end of the intent: success, or final failure if `error` is set; `reason` is a further remark."""

    error: str = ""
    reason: str = ""
    attempts: int | None = None

    def __str__(self) -> str:
        return f"failed: {self.error}" if self.error else "done"

    @property
    def change(self) -> target_changes.Change:
        """The change that ends the targets of the intent."""
        status = TargetStatus.ERROR if self.error else TargetStatus.SUCCESS
        return target_changes.end(status, error=self.error, reason=self.reason, attempts=self.attempts)


@dataclass(frozen=True)
class Failed:
    """The attempt failed and counts; another attempt follows unless this was the last (R1.112, R4.30)."""

    error: str

    def __str__(self) -> str:
        return f"this attempt failed: {self.error}"


@dataclass(frozen=True)
class PutBack:
    """The attempt ended without a reply: it does not count, and the intent is queued again (R1.113)."""

    reason: str
    seconds: float = 0.0
    busy: bool = False
    """True if the worker may still be running the command."""
    confirmed: frozenset[str] | None = None
    """If a last replica blocks it, the models that were confirmed; with more of them it is due at once."""

    def __str__(self) -> str:
        return f"put back: {self.reason}"


Settlement = Ended | Failed | PutBack


def retry_delay(failures: int) -> float:
    """R1.116: return the seconds before the next attempt after `failures` failures."""
    return backoff.delay(failures, first=30.0, longest=900.0)


def claim(
    owner: str, *, now: datetime, lease: float, limit: int, time_limits: Mapping[str, float] = _NO_LIMITS
) -> list[Intent]:
    """Claim up to `limit` due intents for `lease` seconds, at most `PARALLEL_PER_NODE` of each node.

    For each backend on a node one intent is claimed at a time. `time_limits`: seconds within which a worker
    must reply, by `PendingBackendOp.op`.
    """
    try:
        rows = _claim(owner, now, lease, limit, time_limits)
    except IntegrityError as error:
        if _ONE_AT_A_TIME_CONSTRAINT not in str(error):
            raise
        return []  # another controller has begun a row of the same backend and node; the next claim sees it
    return _with_nodes(rows)


def _claim(
    owner: str, now: datetime, lease: float, limit: int, time_limits: Mapping[str, float]
) -> list[PendingBackendOp]:
    with committed("intents.claim"):
        with connection.cursor() as cursor:
            cursor.execute(
                _DUE_INTENTS_SQL, {"now": now, "limit": limit, "looked_at": _EXTRA_ROWS_READ + 4 * limit}
            )
            due = [id for (id,) in cursor.fetchall()]
        if not due:
            return []
        free = PendingBackendOp.objects.filter(pk__in=due, lease_until__isnull=True).order_by("id")
        rows = leases.claim(free, owner, now=now, lease=lease)
        update_rows(rows, leases.LEASE_COLUMNS)
        beginning = {row.id: _start_change(row, time_limits) for row in rows if row.cancelled_at is None}
        changed = target_changes.apply_changes(beginning, now=now)
        emit(changed.operations, changed.parts, changed.moved)
    return rows


def count_pending_by_backend() -> dict[str, int]:
    """Return the number of rows by backend in lower case, over all nodes and ops (R1.110)."""
    rows = PendingBackendOp.objects.order_by().values_list(Lower("backend"))
    return dict(rows.annotate(number=Count("pk")))


def _start_change(row: PendingBackendOp, time_limits: Mapping[str, float]) -> target_changes.Change:
    """Start the target with its deadline, unless the command must wait for running requests first."""
    if row.spares_requests or row.op not in time_limits:
        return target_changes.begin
    return target_changes.begin_within(time_limits[row.op])


def _with_nodes(rows: Sequence[PendingBackendOp]) -> list[Intent]:
    nodes = BackendNode.objects.only(*_NODE_COLUMNS).in_bulk({row.node_id for row in rows})
    listed = NodeBackend.objects.filter(node_id__in=nodes, name__in={row.backend for row in rows})
    listed_builds = {
        (node_id, name): Build(version, digest)
        for node_id, name, version, digest in listed.values_list("node_id", "name", "version", "digest")
    }
    return [
        Intent(row, nodes[row.node_id], listed_builds.get((row.node_id, row.backend)))
        for row in rows
        if row.node_id in nodes
    ]


def renew(owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
    """Extend leases, see `leases.renew`."""
    with committed("intents.renew"):
        return leases.renew(PendingBackendOp.objects.leased(), owner, ids, now=now, lease=lease)


def release(owner: str, *, now: datetime) -> int:
    """Return all intents that `owner` holds to the queue; return their number.

    The workers continue their commands, and the next controller joins these.
    """
    with committed("intents.release"):
        rows = leases.lock_owned_rows(PendingBackendOp.objects.leased(), owner)
        _return_to_queue(rows, now, "its controller stopped; another one takes over")
    return len(rows)


def reap(*, now: datetime) -> tuple[int, int]:
    """Queue intents with an expired lease again, or end them after too many; return both numbers."""
    if not leases.any_expired(PendingBackendOp.objects.leased(), now=now):
        return 0, 0
    with committed("intents.reap"), try_lock(Lock.INTENT_REAPER) as locked:
        if not locked:
            return 0, 0
        retried, hopeless = leases.lock_expired_rows(PendingBackendOp.objects.leased(), now=now)
        error = f"given up: {leases.MAX_LOST_LEASES} controllers fell silent while working on it"
        given_up = {row.id: Ended(error=error).change for row in hopeless}
        _return_to_queue(retried, now, "its controller fell silent; another one takes over", also=given_up)
    return len(retried), len(hopeless)


def _return_to_queue(
    rows: Sequence[PendingBackendOp],
    now: datetime,
    reason: str,
    *,
    also: Mapping[UUID, target_changes.Change] | None = None,
) -> None:
    for row in rows:
        row.end_lease()
        row.next_retry_at = now
    update_rows(rows, [*leases.LEASE_COLUMNS, "next_retry_at"])
    changes = {row.id: target_changes.queue_again(reason, until=now) for row in rows}
    waves.conclude(changes | dict(also or {}), ended=also or (), now=now)


def record(reports: Mapping[Attempt, Collection[Tick]], *, now: datetime) -> set[Attempt]:
    """Write progress reports; return the attempts that no longer own their intents."""
    held = PendingBackendOp.objects.filter(pk__in={id for id, _ in reports}, lease_until__isnull=False)
    mine = {(id, fence) for id, fence in held.values_list("id", "fence")}
    ticks_by_id = {id: ticks for (id, fence), ticks in reports.items() if (id, fence) in mine}
    changes = {id: target_changes.apply_reports(ticks) for id, ticks in ticks_by_id.items()}
    target_changes.record_changes(changes, now=now, lock_timeout=BATCH_LOCK_TIMEOUT)
    return reports.keys() - mine


def record_overdue(intent: Intent, reason: str, *, now: datetime) -> datetime:
    """Record that this attempt exceeded its time limit while the worker may still be running the command.

    Return the time since which the worker has not replied (O19).
    """
    with committed("intents.overdue"):
        row = _lock_owned_rows([(intent.id, intent.fence)]).get(intent.id)
        since = (row or intent.row).unanswered_since or now
        if row is not None:
            PendingBackendOp.objects.filter(pk=row.id).update(unanswered_since=since, last_error=reason)
            target_changes.record_changes({row.id: target_changes.mark_overdue(reason, since)}, now=now)
    return since


def confirm(intent: Intent) -> None:
    """Raise LeaseLost if this attempt no longer owns the intent. No locks and no writes."""
    leases.confirm(_rows_of_attempt(intent), (intent.id, intent.fence))


def record_command_sent(intent: Intent, time_limit: float, *, now: datetime) -> None:
    """Record that the command is sent now, after a wait for running requests. Raise LeaseLost."""
    confirm(intent)
    target_changes.record_changes({intent.id: target_changes.set_time_limit(time_limit)}, now=now)
    confirm(intent)  # a cancel may have held the operation's lock


def drain_until(intent: Intent, *, now: datetime) -> datetime:
    """Return the time until which this attempt may wait for running requests.

    The time starts at the first call and continues in the next attempt if a controller dies. Raise LeaseLost
    if the attempt no longer owns the intent.
    """
    until = now + timedelta(seconds=conf.cluster().upgrade_drain)
    with committed("intents.drain"):
        _rows_of_attempt(intent).filter(drain_until__isnull=True).update(drain_until=until)
    deadline = _rows_of_attempt(intent).values_list("drain_until", flat=True).first()
    if deadline is None:
        raise LeaseLost(str(intent.id))
    return deadline


def _rows_of_attempt(intent: Intent) -> PendingBackendOpQuerySet:
    mine = PendingBackendOp.objects.filter(pk=intent.id, fence=intent.fence, cancelled_at__isnull=True)
    return mine.filter(lease_until__isnull=False)


def _lock_owned_rows(attempts: Collection[Attempt]) -> dict[UUID, PendingBackendOp]:
    return leases.lock_attempt_rows(PendingBackendOp.objects.leased(), attempts)


def record_outcomes(
    outcomes: Mapping[Attempt, tuple[Settlement, Collection[Tick]]], *, now: datetime
) -> set[Attempt]:
    """Write the outcomes of attempts with their last progress reports.

    Return the attempts that no longer own their intents.
    """
    with committed("intents.settle"):
        rows = _lock_owned_rows(outcomes)
        put_back = {id: one for (id, _), (one, _) in outcomes.items() if isinstance(one, PutBack)}
        # Under the lock that a confirmation takes too (`wave_requests.choose`).
        confirmed = waves.confirmed_models([id for id, one in put_back.items() if one.confirmed is not None])
        changes: dict[UUID, target_changes.Change] = {}
        ended: list[PendingBackendOp] = []
        back: list[PendingBackendOp] = []
        for row in rows.values():
            outcome, ticks = outcomes[row.id, row.fence]
            if isinstance(outcome, PutBack) and outcome.confirmed != confirmed.get(row.id):
                outcome = replace(outcome, seconds=0.0)
            change, ends = _apply_outcome(row, outcome, now)
            changes[row.id] = target_changes.apply_both(target_changes.apply_reports(ticks), change)
            (ended if ends else back).append(row)
        update_rows(back, _REQUEUE_COLUMNS)
        waves.conclude(changes, ended=[row.id for row in ended], now=now)
    return outcomes.keys() - {(row.id, row.fence) for row in rows.values()}


def _apply_outcome(
    row: PendingBackendOp, outcome: Settlement, now: datetime
) -> tuple[target_changes.Change, bool]:
    """Return the change of the targets, and True if the intent ends.

    Update the fields of the row if the intent continues.
    """
    match outcome:
        case Ended():
            return outcome.change, True
        case Failed(error) if row.attempts + 1 >= MAX_ATTEMPTS:
            return _dead_letter(row, error).change, True
        case Failed(error):
            row.attempts, pause, reason = row.attempts + 1, retry_delay(row.attempts + 1), error
            row.unanswered_since = None  # the command died with its worker
        case PutBack(reason, pause):
            pass
    if not (isinstance(outcome, PutBack) and outcome.busy):
        row.drain_until = None
    row.end_lease()
    row.last_error, row.next_retry_at = storable(reason), now + timedelta(seconds=pause)
    worker_gone = isinstance(outcome, Failed)
    return target_changes.queue_again(
        reason, until=row.next_retry_at, attempts=row.attempts, worker_gone=worker_gone
    ), False


def record_failed_contact(node_id: UUID, reason: str, *, now: datetime) -> int:
    """Count an unanswered request on the bus as an attempt of each due intent of an unhealthy node.

    No command is sent to an unhealthy node, so the intents of a worker that sends heartbeats but does not
    listen on the bus would never reach their last attempt (A7, R4.30). Return the number of intents.
    """
    with committed("intents.settle"):
        waiting = PendingBackendOp.objects.resting().filter(node_id=node_id, node__status="unhealthy")
        due = waiting.filter(next_retry_at__lte=now).select_related("node").order_by("id")
        changes: dict[UUID, target_changes.Change] = {}
        ended: list[PendingBackendOp] = []
        back: list[PendingBackendOp] = []
        for row in due.select_for_update(no_key=True, of=("self",)):
            change, ends = _apply_outcome(row, Failed(reason), now)
            waits = target_changes.queue_again(reason_to_wait(row.node, now=now), until=None, node=True)
            changes[row.id] = change if ends else target_changes.apply_both(change, waits)
            (ended if ends else back).append(row)
        update_rows(back, _REQUEUE_COLUMNS)
        if changes:
            waves.conclude(changes, ended=[row.id for row in ended], now=now)
    return len(changes)


def _dead_letter(row: PendingBackendOp, error: str) -> Ended:
    """A7: return the end of the intent; log the failure once, at the level that operators watch."""
    attempts = row.attempts + 1
    log.error(
        "%s %s on node %s: given up after %d attempts: %s", row.op, row.backend, row.node_id, attempts, error
    )
    return Ended(error=f"given up after {attempts} attempts: {error}", attempts=attempts)


def delete_cancelled(notes: Mapping[Attempt, str], *, now: datetime) -> None:
    """Delete cancelled intents whose workers got the stop; store the notes as the targets' reasons."""
    with committed("intents.called_off"):
        rows = _lock_owned_rows(notes)
        PendingBackendOp.objects.filter(pk__in=rows).delete()
        target_changes.set_reasons({id: notes[id, row.fence] for id, row in rows.items()}, now=now)


def retry_cancellation(intent: Intent, *, seconds: float, now: datetime) -> None:
    """Schedule another attempt to cancel the command of a worker that could not be reached."""
    with committed("intents.call_off_later"):
        for row in _lock_owned_rows([(intent.id, intent.fence)]).values():
            row.end_lease()
            row.next_retry_at = now + timedelta(seconds=seconds)
            update_rows([row], [*leases.LEASE_COLUMNS, "next_retry_at"])


def end(outcomes: Mapping[UUID, Ended], *, now: datetime) -> int:
    """End intents that no controller is running, with the outcome of their targets; return their number."""
    with committed("intents.end"):
        resting = PendingBackendOp.objects.resting().filter(pk__in=outcomes).order_by("id")
        free = list(resting.select_for_update(no_key=True).values_list("id", flat=True))
        waves.conclude({id: outcomes[id].change for id in free}, ended=free, now=now)
    return len(free)


def make_due(ids: Collection[UUID], *, now: datetime, **columns: Any) -> None:
    """Make these intents due now; keep their attempts and last error (R1.108, A14)."""
    active = PendingBackendOp.objects.filter(pk__in=ids, cancelled_at__isnull=True)
    resting = active.filter(lease_until__isnull=True).order_by("id").select_for_update(no_key=True)
    due = list(resting.values_list("id", flat=True))
    PendingBackendOp.objects.filter(pk__in=due).update(next_retry_at=now, **columns)
    if due:
        events.notify(events.OPERATIONS, f"* {Status.PENDING}")
