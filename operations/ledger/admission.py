"""Admission and user actions on operations: create, join, extend the need, cancel, dismiss a failure.

Any number of requests is admitted in one transaction with a constant number of statements. Locks are taken in
one order: the owners of the keys by their hashes, the keys of new operations, then rows by their ids.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any
from uuid import UUID, uuid4

from django.db import IntegrityError, connection
from django.db.models import Q

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.gallery_index import public_url
from localai_cluster.kit import errors
from localai_cluster.kit.leases import insert_rows, update_rows
from localai_cluster.kit.quantities import counted
from localai_cluster.kit.transactions import committed, lock_names
from operations import targets
from operations.changes.events import emit
from operations.models import (
    ACTIVE,
    QUEUED,
    SUFFIX_SEPARATOR,
    UNDISMISSED_FAILURE,
    Operation,
    OperationQuerySet,
    OperationTarget,
    Status,
    TargetStatus,
    owner_of,
)

NO_SUCH_OPERATION = "no operation has this id"


_MAX_ACTOR_LENGTH = 150
MAX_COMMENT_LENGTH = 500


DISMISSAL_COLUMNS = ("dismissed_at", "dismissed_by", "dismissed_comment")
_ONE_ACTIVE_CONSTRAINT = "operation_one_active_a_key"
_MAX_TRIES = 3


@dataclass(frozen=True)
class Admission:
    """The operation that serves a request; `created` is False if the request joined an active operation."""

    operation: Operation
    created: bool


Outcome = Admission | errors.ClusterError
"""The result of a request: the operation that serves it, or the error with which it was refused."""


@dataclass(frozen=True)
class Requester:
    """Who requests an operation: user, request id and client address, for the history."""

    actor: str
    request_id: str = ""
    client_address: str = ""


@dataclass(frozen=True)
class OperationRequest:
    """A request for an operation: the values of its columns that never change."""

    kind: str
    key: str
    element: str
    by: Requester
    payload: Mapping[str, Any] = field(default_factory=dict)
    node: tuple[UUID, str] | None = None
    targets: Sequence[tuple[UUID, str]] = ()
    needed_until: datetime | None = None
    parent: Operation | None = None
    joins: bool = True
    """True if the request may join an active operation.

    False: it creates a new operation with the lowest free key suffix from 1, because the suffix in its key is
    for requests that join.
    """
    repeats: Operation | None = None
    """The failed operation that the request repeats.

    Its failures on the request's targets are dismissed in the same transaction.
    """


def admit(request: OperationRequest, *, now: datetime) -> Admission:
    """Create the operation, or join the active operation of the same key and kind (O34).

    Raises Conflict if an operation of another kind is active on the key, or on the key with another suffix.
    """
    (outcome,) = admit_many([request], now=now)
    return require(outcome)


def require(outcome: Outcome) -> Admission:
    """Return the admission. Raise the error of a refused request."""
    if isinstance(outcome, errors.ClusterError):
        raise outcome
    return outcome


def admit_many(requests: Sequence[OperationRequest], *, now: datetime) -> list[Outcome]:
    """Admit the requests in their order, as `admit` does. Return the outcomes in the same order.

    Requests that only join wait for no lock of other requests.
    """
    for _ in range(_MAX_TRIES):
        keys = {request.key for request in requests if request.joins}
        active = _ActiveOperations(Operation.objects.filter(key__in=keys))
        joined = [active.join(request) for request in requests]
        try:
            return _admit(requests, joined, now)
        except IntegrityError as error:
            if _ONE_ACTIVE_CONSTRAINT not in str(error):
                raise
            # A concurrent request was faster: join its operation, unless that has ended meanwhile.
    return [
        errors.Unavailable(f"operations on {request.key} are too frequent", retry_after=1)
        for request in requests
    ]


def exclusion_error(existing: Operation) -> errors.Conflict:
    """Return the error for a request that cannot start because this operation is active."""
    return errors.Conflict(
        f"{existing.kind} of {existing.element} is in progress (operation {existing.id}, {existing.status})",
        operation=existing.id,
        kind=existing.kind,
        state=existing.status,
    )


def _admit(
    requests: Sequence[OperationRequest], joined: Sequence[Outcome | None], now: datetime
) -> list[Outcome]:
    """Admit the requests that need the locks, because they cannot join, and write all changes."""
    rest = [request for request, outcome in zip(requests, joined, strict=True) if outcome is None]
    only_joins = not rest and not any(request.repeats for request in requests)
    with nullcontext() if only_joins else committed("ledger.admit"):
        active = _ActiveOperations(_lock_owners(rest))
        outcomes: list[Outcome] = []
        served: list[tuple[OperationRequest, Admission]] = []
        for request, outcome in zip(requests, joined, strict=True):
            outcomes.append(outcome or active.admit(request, now))
            if isinstance(outcomes[-1], Admission):
                served.append((request, outcomes[-1]))
        if only_joins:
            extend_need(_needs(served))
        else:
            emit(record_admissions(served, now))
    return outcomes


def _lock_owners(requests: Sequence[OperationRequest]) -> OperationQuerySet:
    """Lock the owners of the keys until the commit. Return the operations with these keys or elements."""
    if not requests:
        return Operation.objects.none()
    # The database has no constraint for "all of one kind": creating an operation locks the owner first.
    lock_names({owner_of(request.key) for request in requests} - {""})
    owned = {request.element for request in requests if owner_of(request.key)}
    return Operation.objects.filter(Q(key__in={request.key for request in requests}) | Q(element__in=owned))


class _ActiveOperations:
    """The active operations that the requests may join or conflict with, and those created so far."""

    def __init__(self, operations: OperationQuerySet) -> None:
        self._by_key: dict[str, Operation] = {}
        self._by_element: dict[str, list[Operation]] = defaultdict(list)
        for operation in operations.active():
            self._by_key[operation.key] = operation
            self._by_element[operation.element].append(operation)

    def join(self, request: OperationRequest) -> Outcome | None:
        """Return the active operation that serves the request, the refusal, or None if neither exists."""
        existing = self._by_key.get(request.key) if request.joins else None
        if existing is None:
            return None
        same = existing.kind == request.kind
        return Admission(existing, created=False) if same else exclusion_error(existing)

    def admit(self, request: OperationRequest, now: datetime) -> Outcome:
        """Return the operation that the request joins, a new unsaved operation, or the refusal."""
        joined = self.join(request)
        if joined is not None:
            return joined
        owner = owner_of(request.key)
        of_element = self._by_element[request.element] if owner else ()
        # Like `OperationQuerySet.sharing`.
        sharing = [operation for operation in of_element if owner in (operation.key, owner_of(operation.key))]
        others = [operation for operation in sharing if operation.kind != request.kind]
        if others:
            return exclusion_error(min(others, key=lambda operation: (operation.created_at, operation.key)))
        if not request.joins:
            keys = {operation.key for operation in sharing}
            shares = (f"{owner}{SUFFIX_SEPARATOR}{number}" for number in count(1))
            request = replace(request, key=next(share for share in shares if share not in keys))
        operation = self._by_key[request.key] = new_operation(request, now)
        self._by_element[request.element].append(operation)
        return Admission(operation, created=True)


def record_admissions(served: Sequence[tuple[OperationRequest, Admission]], now: datetime) -> list[Operation]:
    """Save the new operations, and the changes of operations that they join or replace.

    Return all changed operations, new ones last. The caller emits them at the end of its transaction, and
    saves the targets of an operation that runs by its targets. A failure with the key of a new operation is
    superseded, and a repeated failure is dismissed: both leave the live list and stay in the history.
    """
    created = {it.operation.key: it.operation for _, it in served if it.created}
    # Two transactions wait for each other's keys in one order.
    insert_rows([created[key] for key in sorted(created)])
    insert_rows(
        [
            OperationTarget(operation=it.operation, node_id=node_id, node_name=name)
            for request, it in served
            if it.created and not it.operation.by_parts
            for node_id, name in request.targets
        ]
    )
    needs, repeated = _needs(served), {request.repeats.id for request, _ in served if request.repeats}
    failures = UNDISMISSED_FAILURE & Q(key__in=created)
    rows = Operation.objects.filter(failures | Q(pk__in=needs.keys() | repeated)).order_by("pk")
    locked_rows = list(rows.select_for_update(no_key=True))
    extend_need(needs)
    open_failures = [row for row in locked_rows if row.status == Status.FAILED and row.dismissed_at is None]
    return [*_dismiss_repeated(served, open_failures, now), *created.values()]


def _needs(served: Sequence[tuple[OperationRequest, Admission]]) -> dict[UUID, datetime]:
    """Return, for each joined operation, the latest time until which a request needs it."""
    needs: dict[UUID, datetime] = {}
    for request, admission in served:
        if request.needed_until is not None and not admission.created:
            id = admission.operation.id
            needs[id] = max(needs.get(id, request.needed_until), request.needed_until)
    return needs


def _dismiss_repeated(
    served: Sequence[tuple[OperationRequest, Admission]], failures: Sequence[Operation], now: datetime
) -> list[Operation]:
    """Dismiss the superseded and repeated failures, and write their audit entries.

    Return the dismissed operations. If an operation has several targets, only the repeated targets are
    dismissed: a failure on another node still needs a decision.
    """
    by_id, by_key = {row.id: row for row in failures}, defaultdict[str, list[Operation]](list)
    for row in failures:
        by_key[row.key].append(row)
    failed = defaultdict[UUID, list[OperationTarget]](list)
    ids = {request.repeats.id for request, _ in served if request.repeats} & by_id.keys()
    for target in OperationTarget.objects.filter(operation__in=ids, status=TargetStatus.ERROR):
        failed[target.operation_id].append(target)
    dismissed, parts, entries = dict[Operation, None](), list[OperationTarget](), list[Change]()
    for request, admission in served:
        comment = f"tried again as operation {admission.operation.id}"
        if admission.created:
            entries.append(audit_entry("asked", admission.operation))
            for row in by_key.pop(admission.operation.key, ()):
                if row.dismissed_at is None:
                    set_dismissed(row, request.by.actor, comment, now)
                    dismissed[row] = None
        repeated = by_id.get(request.repeats.id) if request.repeats else None
        if repeated is None or repeated.dismissed_at is not None:
            continue
        nodes = {node_id for node_id, _ in request.targets}
        tried = [target for target in failed[repeated.id] if target.node_id in nodes]
        if tried or not failed[repeated.id]:
            parts += tried
            entries.append(_dismiss_on(repeated, failed[repeated.id], tried, request.by.actor, now, comment))
            dismissed[repeated] = None
    update_rows(list(dismissed), DISMISSAL_COLUMNS)
    update_rows(parts, ["dismissed_at"])
    audit.record(*entries, at=now)
    return list(dismissed)


def new_operation(
    request: OperationRequest, now: datetime, *, by_parts: bool = False, id: UUID | None = None
) -> Operation:
    """Return a new unsaved operation for the request. `by_parts`: see `Operation`."""
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


def audit_entry(did: str, operation: Operation, detail: str = "") -> Change:
    """Return the audit entry for what a user did to an operation."""
    where = f" on {operation.node_name}" if operation.node_name else ""
    # The query of a URL may be a signature, and the audit outlives the history.
    element = public_url(operation.element) if "://" in operation.element else operation.element
    subject = f"{operation.kind.replace('_', ' ')} of {element}{where}"
    return Change(f"operation.{did}", subject, str(operation.id), detail)


def dismiss(
    operation_id: UUID, *, actor: str, now: datetime, comment: str = "", nodes: Collection[UUID] = ()
) -> Operation:
    """Dismiss a failure, so that it leaves all live lists (O52). A dismissed failure stays unchanged.

    With `nodes`, dismiss only the failures on these nodes; when the last target is dismissed, so is the
    operation. Raises NotFound, InvalidInput for nodes without a failure, and Conflict with the status of an
    operation that has not failed.
    """
    with committed("ledger.dismiss"):
        operation = lock_operation(operation_id)
        if operation.status != Status.FAILED:
            raise errors.Conflict(undismissable_reason(operation), field="status")
        if operation.dismissed_at is not None:
            return operation
        failed = OperationTarget.objects.filter(operation=operation, status=TargetStatus.ERROR)
        parts = list(failed) if nodes else []
        if strange := sorted(map(str, set(nodes) - {part.node_id for part in parts})):
            raise errors.InvalidInput(f"nodes: it has not failed on {', '.join(strange[:5])}", field="nodes")
        chosen = [part for part in parts if part.node_id in nodes]
        change = _dismiss_on(operation, parts, chosen, actor, now, comment)
        update_rows(chosen, ["dismissed_at"])
        update_rows([operation], DISMISSAL_COLUMNS)
        audit.record(change, at=now)
        emit([operation])
    return operation


def undismissable_reason(operation: Operation) -> str:
    """Return why the operation cannot be dismissed: it has not failed."""
    return f"the operation is {operation.status}: only a failure can be dismissed"


def dismiss_many(
    operation_ids: Collection[UUID], *, actor: str, now: datetime, comment: str = ""
) -> Sequence[Operation]:
    """Dismiss the failures among these operations. Return all operations that exist.

    One transaction with a constant number of statements.
    """
    with committed("ledger.dismiss_many"):
        rows = Operation.objects.filter(pk__in=operation_ids).order_by("pk")
        operations = {row.id: row for row in rows}
        # A request that replaces an active operation holds it, and waits for the failures that it dismisses.
        open_rows = rows.filter(UNDISMISSED_FAILURE)
        failures = list(open_rows.select_for_update(no_key=True))
        for failure in failures:
            set_dismissed(failure, actor, comment, now)
        audit.record(*(audit_entry("dismissed", failure, comment) for failure in failures), at=now)
        update_rows(failures, DISMISSAL_COLUMNS)
        emit(failures)
    return list((operations | {row.id: row for row in failures}).values())


def _dismiss_on(
    failure: Operation,
    failed: Collection[OperationTarget],
    chosen: Collection[OperationTarget],
    actor: str,
    now: datetime,
    comment: str,
) -> Change:
    """Dismiss the chosen targets of a failed operation, and the operation with its last target.

    The caller saves the rows, and records the returned audit entry.
    """
    for target in chosen:
        target.dismissed_at = target.dismissed_at or now
    if any(target.dismissed_at is None for target in failed):
        return audit_entry("dismissed_part", failure, f"on {counted(len(chosen), 'node')}: {comment}")
    set_dismissed(failure, actor, comment, now)
    return audit_entry("dismissed", failure, comment)


def set_dismissed(failure: Operation, actor: str, comment: str, now: datetime) -> None:
    """Dismiss the failure; the caller saves `DISMISSAL_COLUMNS`."""
    failure.dismissed_at, failure.dismissed_by = now, actor[:_MAX_ACTOR_LENGTH]
    failure.dismissed_comment = comment[:MAX_COMMENT_LENGTH]


def lock_operation(operation_id: UUID) -> Operation:
    """Lock the operation until the commit and return it. Raise NotFound."""
    operation = Operation.objects.select_for_update(no_key=True).filter(pk=operation_id).first()
    if operation is None:
        raise errors.NotFound(NO_SUCH_OPERATION)
    return operation


def cancel(
    operation_id: UUID, *, actor: str, now: datetime, notes: Mapping[UUID, str] | None = None
) -> Operation:
    """Cancel the operation and its targets (O54, A67). A running attempt can write nothing any more.

    `notes` maps an intent's id to the reason that its target shows. With several targets the message has the
    numbers of targets that are cancelled now and that had ended before. Raises NotFound, and Conflict if the
    operation cannot be cancelled.
    """
    with committed("ledger.cancel"):
        operation = lock_operation(operation_id)
        if operation.status not in ACTIVE:
            raise errors.Conflict(f"the operation is {operation.status} already", field="status")
        if not operation.cancellable:
            raise errors.Conflict("a deletion that has begun cannot be cancelled", field="status")
        message = f"cancelled by {actor}"[:_MAX_ACTOR_LENGTH]
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


def extend_need(times: Mapping[UUID, datetime]) -> None:
    """Store until when requests need these operations; a stored time is never shortened."""
    if not times:
        return
    with committed("ledger.need"), connection.cursor() as cursor:
        cursor.execute(
            "UPDATE operations SET needed_until = v.until"
            " FROM unnest(%s::uuid[], %s::timestamptz[]) AS v (id, until) WHERE operations.id = v.id"
            " AND status = ANY(%s) AND (needed_until IS NULL OR needed_until < v.until)",
            [list(times), list(times.values()), [status.value for status in ACTIVE]],
        )
