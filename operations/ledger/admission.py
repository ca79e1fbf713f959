"""Admission and user actions on operations: create, join, extend the need, cancel, dismiss a failure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any
from uuid import UUID, uuid4

from django.db import IntegrityError
from django.db.models import Q

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.gallery_index import public_url
from localai_cluster.kit import errors
from localai_cluster.kit.commit_hooks import committed
from localai_cluster.kit.leases import update_rows
from localai_cluster.kit.locks import lock_name
from localai_cluster.kit.quantities import counted
from operations import targets
from operations.changes.events import emit
from operations.models import (
    ACTIVE,
    QUEUED,
    SHARE,
    Operation,
    OperationTarget,
    Status,
    TargetStatus,
    owner_of,
)

NO_SUCH_OPERATION = "no operation has this id"


_LONGEST_ACTOR = 150
LONGEST_COMMENT = 500


DISMISSAL = ("dismissed_at", "dismissed_by", "dismissed_comment")
ONE_ACTIVE = "operation_one_active_a_key"


@dataclass(frozen=True)
class Admission:
    """The operation that serves the request; `created` is True if this request created it."""

    operation: Operation
    created: bool


@dataclass(frozen=True)
class Requester:
    """The user who requests something, for the record."""

    actor: str
    request_id: str = ""
    client_address: str = ""


@dataclass(frozen=True)
class OperationRequest:
    """A request for an operation: its immutable columns."""

    kind: str
    key: str
    element: str
    by: Requester
    payload: Mapping[str, Any] = field(default_factory=dict)
    node: tuple[UUID, str] | None = None
    targets: Sequence[tuple[UUID, str]] = ()
    needed_until: datetime | None = None
    parent: Operation | None = None


def admit(request: OperationRequest, *, now: datetime) -> Admission:
    """Create the operation, or join the active one of the same key and kind (O34).

    Raises Conflict if an operation of another kind is active on the key, or on another suffix of its owner.
    """
    for _ in range(3):
        existing = Operation.objects.active().filter(key=request.key).first()
        if existing is not None:
            return _join(existing, request)
        try:
            return Admission(_create(request, now), created=True)
        except IntegrityError as error:
            if ONE_ACTIVE not in str(error):
                raise
            # A concurrent request was faster: join its operation, unless that has ended meanwhile.
    raise errors.Unavailable(f"operations on {request.key} are too frequent", retry_after=1)


def admit_one_more(request: OperationRequest, *, now: datetime) -> Operation:
    """Create the operation in addition to the active ones of its kind on the same owner; never join one.

    It gets the lowest free key suffix from 1: the request's own suffix is for requests that join. Raises
    Conflict if an operation of another kind is active on the owner.
    """
    return _create(request, now, one_more=True)


def exclusion_error(existing: Operation) -> errors.Conflict:
    """Return the error for a request that an active operation excludes."""
    return errors.Conflict(
        f"{existing.kind} of {existing.element} is in progress (operation {existing.id}, {existing.status})",
        operation=existing.id,
        kind=existing.kind,
        state=existing.status,
    )


def _join(existing: Operation, request: OperationRequest) -> Admission:
    if existing.kind != request.kind:
        raise exclusion_error(existing)
    if request.needed_until is not None:
        need_until([existing.id], request.needed_until)
    return Admission(existing, created=False)


def _create(request: OperationRequest, now: datetime, *, one_more: bool = False) -> Operation:
    with committed("ledger.admit"):
        used_keys = _shares(request)
        if one_more:
            shares = (f"{owner_of(request.key)}{SHARE}{number}" for number in count(1))
            request = replace(request, key=next(share for share in shares if share not in used_keys))
        operation, superseded = made(request, now)
        OperationTarget.objects.bulk_create(
            OperationTarget(operation=operation, node_id=node_id, node_name=name)
            for node_id, name in request.targets
        )
        emit([*superseded, operation])
    return operation


def _shares(request: OperationRequest) -> set[str]:
    """Lock the key's owner until the commit; return the keys of its active operations.

    Raises Conflict if one of them is of another kind.
    """
    owner = owner_of(request.key)
    if not owner:
        return set()
    # The database has no constraint for "all of one kind": creating an operation locks the owner first.
    lock_name(owner)
    active = Operation.objects.active().sharing(request.key, request.element).order_by("created_at")
    active = active.only("id", "kind", "key", "element", "status")
    for operation in active:
        if operation.kind != request.kind:
            raise exclusion_error(operation)
    return {operation.key for operation in active}


def made(
    request: OperationRequest, now: datetime, *, by_parts: bool = False, id: UUID | None = None
) -> tuple[Operation, list[Operation]]:
    """Create the operation, and dismiss the failures of the same key that it supersedes; return both.

    A step of the caller's transaction: the caller emits all of them. The failures leave the live list and
    stay in the history. `by_parts`: see `Operation`.
    """
    operation = new_operation(request, now, by_parts=by_parts, id=id)
    operation.save(force_insert=True)
    failures = Operation.objects.filter(key=request.key, status=Status.FAILED, dismissed_at__isnull=True)
    superseded = list(failures.order_by("pk").select_for_update(no_key=True))
    for failure in superseded:
        supersede(failure, operation, request.by.actor, now)
    Operation.objects.bulk_update(superseded, DISMISSAL)
    audit.record(audit_entry("asked", operation), at=now)
    return operation, superseded


def new_operation(
    request: OperationRequest, now: datetime, *, by_parts: bool = False, id: UUID | None = None
) -> Operation:
    """Return the operation of a request, which is not saved."""
    return Operation(
        id=id or uuid4(),
        kind=request.kind,
        key=request.key,
        element=request.element,
        payload=dict(request.payload),
        node_id=request.node[0] if request.node else None,
        node_name=request.node[1] if request.node else "",
        parent=request.parent,
        **asdict(request.by),
        needed_until=request.needed_until,
        message=QUEUED,
        phase=QUEUED,
        by_parts=by_parts,
        next_attempt_at=now,
        created_at=now,
        updated_at=now,
    )


def supersede(failure: Operation, successor: Operation, actor: str, now: datetime) -> None:
    """Dismiss the failure, which is not saved, because another operation does the same."""
    failure.dismissed_at, failure.dismissed_by = now, actor
    failure.dismissed_comment = retry_comment(successor)


def retry_comment(successor: Operation) -> str:
    """Return the comment of a dismissed failure that another operation repeats."""
    return f"tried again as operation {successor.id}"


def audit_entry(did: str, operation: Operation, detail: str = "") -> Change:
    """Return the audit entry of a user's action on an operation."""
    where = f" on {operation.node_name}" if operation.node_name else ""
    # The query of a URL may be a signature, and the audit outlives the history.
    element = public_url(operation.element) if "://" in operation.element else operation.element
    subject = f"{operation.kind.replace('_', ' ')} of {element}{where}"
    return Change(f"operation.{did}", subject, str(operation.id), detail)


def dismiss(
    operation_id: UUID, *, actor: str, now: datetime, comment: str = "", nodes: Collection[UUID] = ()
) -> Operation:
    """Acknowledge a failure, which leaves every live list (O52); a dismissed failure is not changed.

    With `nodes` only the failures on these: the operation is dismissed with the last of them. Raises
    NotFound, InvalidInput for nodes on which it has not failed, and Conflict with the status of an operation
    that has not failed.
    """
    with committed("ledger.dismiss"):
        operation = locked(operation_id)
        if operation.status != Status.FAILED:
            raise errors.Conflict(only_failures(operation), field="status")
        if operation.dismissed_at is not None:
            return operation
        if nodes and _dismiss_targets(operation, nodes, now):
            audit.record(
                audit_entry("dismissed_part", operation, f"on {counted(len(nodes), 'node')}: {comment}"),
                at=now,
            )
        else:
            _dismiss([operation], actor, now, comment)
        emit([operation])
    return operation


def only_failures(operation: Operation) -> str:
    """Return the reason why an operation that has not failed cannot be dismissed."""
    return f"the operation is {operation.status}: only a failure can be dismissed"


def dismiss_many(
    operation_ids: Collection[UUID], *, actor: str, now: datetime, comment: str = ""
) -> Sequence[Operation]:
    """Dismiss those of these operations that have failed; return all that exist.

    One transaction with a constant number of statements.
    """
    with committed("ledger.dismiss_many"):
        rows = Operation.objects.select_for_update(no_key=True).filter(pk__in=operation_ids)
        operations = list(rows.order_by("pk"))
        failures = [row for row in operations if row.status == Status.FAILED and row.dismissed_at is None]
        _dismiss(failures, actor, now, comment)
        emit(failures)
    return operations


def _dismiss(failures: Collection[Operation], actor: str, now: datetime, comment: str) -> None:
    for failure in failures:
        failure.dismissed_at, failure.dismissed_by = now, actor[:_LONGEST_ACTOR]
        failure.dismissed_comment = comment[:LONGEST_COMMENT]
    Operation.objects.bulk_update(failures, DISMISSAL)
    audit.record(*(audit_entry("dismissed", failure, comment) for failure in failures), at=now)


def _dismiss_targets(operation: Operation, nodes: Collection[UUID], now: datetime) -> bool:
    """Dismiss the failures on these nodes; return True if others remain. Raises InvalidInput."""
    failed = OperationTarget.objects.filter(operation=operation, status=TargetStatus.ERROR)
    if strange := sorted(map(str, set(nodes) - set(failed.values_list("node_id", flat=True)))):
        raise errors.InvalidInput(f"nodes: it has not failed on {', '.join(strange[:5])}", field="nodes")
    remaining = failed.filter(dismissed_at__isnull=True)
    remaining.filter(node_id__in=nodes).update(dismissed_at=now)
    return remaining.exists()


def locked(operation_id: UUID) -> Operation:
    """Return the operation, locked until commit; raise NotFound."""
    operation = Operation.objects.select_for_update(no_key=True).filter(pk=operation_id).first()
    if operation is None:
        raise errors.NotFound(NO_SUCH_OPERATION)
    return operation


def cancel(
    operation_id: UUID, *, actor: str, now: datetime, notes: Mapping[UUID, str] | None = None
) -> Operation:
    """Cancel the operation and its targets (O54, A67); a running attempt loses its fence.

    `notes` maps an intent's id to the reason that its target shows. With several targets the message has the
    number of those cancelled now, and of those that had ended before. Raises NotFound, and Conflict if the
    operation cannot be cancelled.
    """
    with committed("ledger.cancel"):
        operation = locked(operation_id)
        if operation.status not in ACTIVE:
            raise errors.Conflict(f"the operation is {operation.status} already", field="status")
        if not operation.cancellable:
            raise errors.Conflict("a deletion that has begun cannot be cancelled", field="status")
        message = f"cancelled by {actor}"[:_LONGEST_ACTOR]
        all_parts = list(OperationTarget.objects.filter(operation=operation))
        parts = [part for part in all_parts if part.status not in targets.ENDED]
        finished = sum(part.status in (TargetStatus.SUCCESS, TargetStatus.ERROR) for part in all_parts)
        for part in parts:
            note = (notes or {}).get(part.intent_id) if part.intent_id else None
            part.status, part.phase, part.finished_at = TargetStatus.CANCELLED, "", now
            part.reason, part.next_check_at, part.waits_for_node = note or message, None, False
            part.overdue_since = None
        columns = [
            "status",
            "phase",
            "finished_at",
            "reason",
            "next_check_at",
            "waits_for_node",
            "overdue_since",
        ]
        update_rows(parts, columns)
        if finished:
            message = f"{len(parts)} cancelled, {finished} had already finished (by {actor})"
        operation.status, operation.message, operation.phase = Status.CANCELLED, message, ""
        operation.lease_owner, operation.lease_until, operation.time_limit_at = "", None, None
        operation.finished_at = operation.updated_at = now
        operation.save()
        audit.record(audit_entry("cancelled", operation), at=now)
        emit([operation])
    return operation


def need_until(operation_ids: Collection[UUID], until: datetime) -> None:
    """Extend the time until which requests need the operations; it is never shortened."""
    sooner = Q(needed_until__isnull=True) | Q(needed_until__lt=until)
    with committed("ledger.need"):
        Operation.objects.active().filter(sooner, pk__in=operation_ids).update(needed_until=until)
