"""Every write to an operation that means something.

Each verb is one short transaction: lock the row, check fence and status against the table in `states.py`,
write, take the next sequence number last (so that nobody waits for a row while holding the counter), and
let the news leave at commit. A verb whose row is no longer ours returns False or raises `LeaseLost`; it
never overwrites. Row locks are `FOR NO KEY UPDATE`: a stronger one would make the foreign key of a child,
checked at its commit, wait for its parent's transaction while it holds the counter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Q

from localai_cluster import errors
from operations import events, targets
from operations.changes import announce
from operations.models import Operation, OperationTarget, Status, TargetStatus, storable
from operations.progress import REPORTED, Tick, catch_up, record
from operations.states import Event, after

MAX_LOST_LEASES = 10
NO_SUCH = "no operation has this id"
_LONGEST_ACTOR = 150
_ONE_ACTIVE = "operation_one_active_a_key"
_QUEUED = "queued"
"""O4: the phase of what nobody works on yet, or nobody at the moment."""
_CLAIMED = [
    "status", "lease_owner", "lease_until", "fence", "started_at", "updated_at",
    "phase", "message", "progress", "current_bytes", "total_bytes",
]  # fmt: skip


class LeaseLost(Exception):
    """Somebody else owns the operation now, or it has ended; whatever was about to be written is void."""


@dataclass(frozen=True)
class Admission:
    """The operation that now stands for the request, and whether this request made it."""

    operation: Operation
    created: bool


@dataclass(frozen=True)
class OperationRequest:
    """What an operation is asked to do and for whom; the columns that never change afterwards."""

    kind: str
    key: str
    element: str
    actor: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    node: tuple[UUID, str] | None = None
    targets: Sequence[tuple[UUID, str]] = ()
    request_id: str = ""
    client_address: str = ""
    wanted_until: datetime | None = None
    parent: Operation | None = None


def admit(request: OperationRequest, *, now: datetime) -> Admission:
    """Makes the operation, or joins the active one of the same key and kind (O34).

    Raises Conflict when another kind of operation is active on the key.
    """
    for _ in range(3):
        existing = Operation.objects.active().filter(key=request.key).first()
        if existing is not None:
            return _join(existing, request)
        try:
            return Admission(_create(request, now), created=True)
        except IntegrityError as error:
            if _ONE_ACTIVE not in str(error):
                raise
            # Somebody was faster: join theirs, unless it has ended meanwhile.
    raise errors.Unavailable(f"operations on {request.key} follow each other too fast", retry_after=1)


def _join(existing: Operation, request: OperationRequest) -> Admission:
    if existing.kind != request.kind:
        raise errors.Conflict(
            f"{existing.kind} of {existing.element} is under way (operation {existing.id})",
            operation=existing.id,
        )
    if request.wanted_until is not None:
        want(existing.id, request.wanted_until)
    return Admission(existing, created=False)


def _create(request: OperationRequest, now: datetime) -> Operation:
    with transaction.atomic():
        operation = Operation.objects.create(
            kind=request.kind,
            key=request.key,
            element=request.element,
            payload=dict(request.payload),
            node_id=request.node[0] if request.node else None,
            node_name=request.node[1] if request.node else "",
            parent=request.parent,
            actor=request.actor,
            request_id=request.request_id,
            client_address=request.client_address,
            wanted_until=request.wanted_until,
            message=_QUEUED,
            phase=_QUEUED,
            next_look_at=now,
            created_at=now,
            updated_at=now,
        )
        OperationTarget.objects.bulk_create(
            OperationTarget(operation=operation, node_id=node_id, node_name=name)
            for node_id, name in request.targets
        )
        # A new request supersedes the failures of the same key: they stay in the record, not on the list.
        _supersede_failures(request, now)
        announce([operation])
    return operation


def _supersede_failures(request: OperationRequest, now: datetime) -> None:
    failed = list(
        Operation.objects.select_for_update(no_key=True).filter(
            key=request.key, status=Status.FAILED, dismissed_at__isnull=True
        )
    )
    for operation in failed:
        operation.dismissed_at, operation.dismissed_by = now, request.actor
    Operation.objects.bulk_update(failed, ["dismissed_at", "dismissed_by"])
    announce(failed)


def dismiss(operation_id: UUID, *, actor: str, now: datetime) -> Operation:
    """O52: acknowledges a failure, which leaves every live list; a failure dismissed before stays as it is.

    Raises NotFound, and Conflict naming the status of an operation that has not failed.
    """
    with transaction.atomic():
        operation = Operation.objects.select_for_update(no_key=True).filter(pk=operation_id).first()
        if operation is None:
            raise errors.NotFound(NO_SUCH)
        if operation.status != Status.FAILED:
            raise errors.Conflict(
                f"the operation is {operation.status}: only a failure can be dismissed", field="status"
            )
        if operation.dismissed_at is None:
            operation.dismissed_at, operation.dismissed_by = now, actor[:_LONGEST_ACTOR]
            operation.save(update_fields=["dismissed_at", "dismissed_by"])
            announce([operation])
    return operation


def want(operation_id: UUID, until: datetime) -> None:
    """Somebody waits for it until `until`; only ever moves forward."""
    Operation.objects.active().filter(pk=operation_id).filter(
        Q(wanted_until__isnull=True) | Q(wanted_until__lt=until)
    ).update(wanted_until=until)


def claim(
    owner: str, *, now: datetime, lease: float, limit: int, children_only: bool = False
) -> list[Operation]:
    """Takes up to `limit` due operations under a lease of `lease` seconds; nobody waits for anybody's rows.

    `children_only` leaves those without a parent alone: their parents are being worked on and wait for them.
    """
    with transaction.atomic():
        eligible = Operation.objects.due(at=now)
        due = list(
            (eligible.filter(parent__isnull=False) if children_only else eligible)
            .select_for_update(skip_locked=True, no_key=True)
            .order_by("next_look_at")[:limit]
        )
        for operation in due:
            operation.status = after(Event.CLAIM, operation.status)
            operation.lease_owner, operation.lease_until = owner, now + timedelta(seconds=lease)
            operation.fence += 1
            operation.started_at = operation.started_at or now
            operation.updated_at = now
            operation.phase, operation.message = "", "starting"
            operation.progress = operation.current_bytes = operation.total_bytes = 0
        targets.begin_anew(operation for operation in due if operation.fence > 1)
        Operation.objects.bulk_update(due, _CLAIMED)
        announce(due)
    return due


def renew(owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
    """Extends the leases of `owner` on `ids`; answers id and fence of those that are still its own.

    Only what is really being worked on may be named: the others must run out. A row that is locked, because
    its progress or outcome is being written, is left out this time: one that hangs must not cost all others
    their leases. It stays the owner's, since whoever takes leases back leaves locked rows out too.
    """
    mine = Operation.objects.filter(pk__in=ids, status=Status.PROCESSING, lease_owner=owner)
    with transaction.atomic():
        free = list(mine.select_for_update(skip_locked=True, no_key=True).values_list("pk", flat=True))
        Operation.objects.filter(pk__in=free).update(lease_until=now + timedelta(seconds=lease))
    return dict(mine.values_list("id", "fence"))


def progress(operation_id: UUID, fence: int, tick: Tick, *, now: datetime) -> None:
    """Records one report of the running attempt; raises LeaseLost when it is no longer the row's."""
    if record({(operation_id, fence): [tick]}, now=now):
        raise LeaseLost(str(operation_id))


def confirm(operation_id: UUID, fence: int) -> None:
    """Raises LeaseLost when the operation is no longer this attempt's; locks and writes nothing."""
    if not Operation.objects.filter(pk=operation_id, fence=fence, status=Status.PROCESSING).exists():
        raise LeaseLost(str(operation_id))


def target_done(
    operation_id: UUID, fence: int, node_id: UUID, status: TargetStatus, error: str = "", *, now: datetime
) -> None:
    """Ends the part of one node: success, or error with the reason; what it had reached stays (O70).

    A part ends once: telling it again changes nothing. Raises LeaseLost when the attempt is no longer the
    row's, NotFound when the operation has no part on that node, ValueError for a status that is no end.
    """
    if status not in targets.ENDED:
        raise ValueError(f"{status} is no end")
    with transaction.atomic():
        operation = _owned(operation_id, fence)
        parts = list(OperationTarget.objects.filter(operation_id=operation_id))
        part = next((one for one in parts if one.node_id == node_id), None)
        if part is None:
            raise errors.NotFound(f"operation {operation_id} has no part on node {node_id}")
        if part.status in targets.ENDED:
            return
        part.status, part.error, part.phase = status, storable(error), ""
        part.percentage = targets.share(part)
        part.save()
        if len(parts) > 1:
            targets.add_up(operation, parts)
        operation.updated_at = now
        operation.save(update_fields=REPORTED)
        announce([operation])


def finish(
    operation_id: UUID,
    fence: int,
    event: Event,
    *,
    now: datetime,
    error: str = "",
    message: str = "",
    result: Mapping[str, Any] | None = None,
    ticks: Collection[Tick] = (),
) -> None:
    """Ends the attempt's operation: complete, fail or cancel. Raises LeaseLost when it is no longer ours.

    Parts that have ended by themselves stay as they ended. `ticks` are reports that are not written yet.
    """
    with transaction.atomic():
        operation, error = _owned(operation_id, fence), storable(error)
        catch_up(operation, ticks)
        ok = event is Event.COMPLETE
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.finished_at = operation.updated_at = now
        operation.error = error
        said = "completed" if ok else f"error: {error}" if error else event.value
        operation.message = storable(message) or said
        operation.phase = ""
        operation.progress = 100 if ok else operation.progress
        operation.result = dict(result or {})
        operation.save()
        left = OperationTarget.objects.filter(operation=operation).exclude(status__in=targets.ENDED)
        if ok:
            left.update(status=TargetStatus.SUCCESS, phase="", percentage=100)
        else:
            left.update(status=TargetStatus.ERROR, phase="", error=error or operation.message)
        announce([operation])


def put_back(
    operation_id: UUID,
    fence: int,
    event: Event,
    *,
    now: datetime,
    until: datetime,
    reason: str,
    payload: Mapping[str, Any] | None = None,
    ticks: Collection[Tick] = (),
) -> None:
    """Ends the attempt but not the operation: it says what it waits for and when it looks again (rule 4).

    The next look comes at the latest when the operation is to be given up.
    """
    with transaction.atomic():
        operation = _owned(operation_id, fence)
        catch_up(operation, ticks)
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.attempts += 1 if event is Event.POSTPONE else 0
        wanted = operation.wanted_until
        operation.next_look_at = wanted if wanted is not None and now < wanted < until else until
        operation.message = storable(reason) or operation.message
        operation.phase = _QUEUED
        operation.updated_at = now
        if payload is not None:
            operation.payload = dict(payload)
        operation.save()
        announce([operation])


def release(owner: str, *, now: datetime) -> int:
    """Hands back everything `owner` holds, at once: it is stopping. Answers how many."""
    with transaction.atomic():
        mine = list(
            Operation.objects.select_for_update(no_key=True)
            .filter(status=Status.PROCESSING, lease_owner=owner)
            .order_by("pk")
        )
        _hand_back(mine, Event.RELEASE, now, "its controller stopped; another one takes over")
    return len(mine)


def reap(*, now: datetime) -> tuple[int, int]:
    """Operations whose lease ran out go back to the queue, or fail after too many.

    Answers (requeued, failed).
    """
    with transaction.atomic():
        lost = list(Operation.objects.orphaned(at=now).select_for_update(skip_locked=True, no_key=True))
        hopeless = [operation for operation in lost if operation.lost_leases >= MAX_LOST_LEASES]
        again = [operation for operation in lost if operation.lost_leases < MAX_LOST_LEASES]
        for operation in again:
            operation.lost_leases += 1
        _hand_back(again, Event.LOSE, now, "its controller fell silent; another one takes over")
        for operation in hopeless:
            finish(
                operation.id,
                operation.fence,
                Event.FAIL,
                now=now,
                error=f"given up: {operation.lost_leases} controllers fell silent while working on it",
            )
    return len(again), len(hopeless)


def _hand_back(operations: list[Operation], event: Event, now: datetime, reason: str) -> None:
    for operation in operations:
        operation.status = after(event, operation.status)
        operation.lease_owner, operation.lease_until = "", None
        operation.next_look_at = operation.updated_at = now
        operation.message, operation.phase = reason, _QUEUED
    Operation.objects.bulk_update(
        operations,
        [
            "status",
            "lease_owner",
            "lease_until",
            "next_look_at",
            "updated_at",
            "message",
            "phase",
            "lost_leases",
        ],
    )
    announce(operations)


def wake(ids: Collection[UUID], *, now: datetime) -> int:
    """Has those of the operations that wait for nodes looked at now; answers how many.

    A back-off after a failed attempt is not cut short. The rows are locked in the order of their ids, because
    several controllers may wake the same ones.
    """
    if not ids:
        return 0
    with transaction.atomic():
        waiting = Operation.objects.filter(pk__in=ids, status=Status.WAITING, next_look_at__gt=now)
        found = list(waiting.order_by("id").select_for_update(no_key=True).values_list("id", flat=True))
        if found:
            Operation.objects.filter(pk__in=found).update(next_look_at=now)
            events.notify(events.OPERATIONS, f"* {Status.PENDING}")
    return len(found)


def _owned(operation_id: UUID, fence: int) -> Operation:
    operation = (
        Operation.objects.select_for_update(no_key=True)
        .filter(pk=operation_id, fence=fence, status=Status.PROCESSING)
        .first()
    )
    if operation is None:
        raise LeaseLost(str(operation_id))
    return operation
