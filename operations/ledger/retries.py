"""Retries of operations that run as a whole: any number of them in one transaction.

The number of statements does not depend on the number of operations. Each retry creates an operation, joins
an active one, or is refused; it then dismisses the failure that it repeats. Locks are taken in one order: the
owners of the keys by their hashes, then the rows by their ids.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from django.db import IntegrityError
from django.db.models import Q

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit import errors
from localai_cluster.kit.commit_hooks import committed
from localai_cluster.kit.leases import insert_rows, update_rows
from localai_cluster.kit.locks import lock_names
from localai_cluster.kit.quantities import counted
from operations.changes.events import emit
from operations.ledger import admission
from operations.ledger.admission import DISMISSAL, ONE_ACTIVE, Admission, OperationRequest
from operations.models import SHARE, Operation, OperationTarget, Status, TargetStatus, owner_of

_TRIES = 3


@dataclass(frozen=True)
class Retry:
    """An operation that has ended, and the request that repeats it on the targets of the request."""

    operation: Operation
    request: OperationRequest


Outcome = Admission | errors.ClusterError
"""What became of a retry: the operation that serves it, or why it is refused."""


def retry_many(retries: Sequence[Retry], *, now: datetime) -> list[Outcome]:
    """Create or join an operation for each retry; return the outcomes in their order."""
    for _ in range(_TRIES):
        try:
            with committed("ledger.retry"):
                return _retry(retries, now)
        except IntegrityError as error:
            if ONE_ACTIVE not in str(error):
                raise
            # A concurrent request was faster: the next try joins its operation.
    busy = errors.Unavailable("requests for these operations are too frequent", retry_after=1)
    return [busy for _ in retries]


def _retry(retries: Sequence[Retry], now: datetime) -> list[Outcome]:
    lock_names({owner_of(retry.request.key) for retry in retries} - {""})
    active = _ActiveOperations.read([retry.request for retry in retries])
    outcomes = [active.admit(retry.request, now) for retry in retries]
    pairs = [(retry, it) for retry, it in zip(retries, outcomes, strict=True) if isinstance(it, Admission)]
    created = [(retry.request, it.operation) for retry, it in pairs if it.created]
    created.sort(key=lambda pair: pair[1].key)  # two batches wait for each other's keys in one order
    successors = {retry.operation.id: it.operation for retry, it in pairs}
    locked = _lock_rows(successors, [operation.key for _, operation in created])
    _extend_need(pairs)
    insert_rows([operation for _, operation in created])
    insert_rows(
        [
            OperationTarget(operation=operation, node_id=node_id, node_name=name)
            for request, operation in created
            for node_id, name in request.targets
        ]
    )
    superseded = _supersede([operation for _, operation in created], locked, now)
    changed = _dismiss_retried([retry for retry, _ in pairs], successors, locked, now)
    update_rows([*superseded, *changed], DISMISSAL)
    asked = [admission.audit_entry("asked", operation) for _, operation in created]
    audit.record(*asked, *changed.values(), at=now)
    emit([*superseded, *changed, *(operation for _, operation in created)])
    return outcomes


@dataclass
class _ActiveOperations:
    """The active operations that concern some requests, with those that this transaction creates."""

    by_key: dict[str, Operation] = field(default_factory=dict)
    by_element: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, requests: Sequence[OperationRequest]) -> "_ActiveOperations":
        """Read them; one query."""
        owned = {request.element for request in requests if owner_of(request.key)}
        concerned = Q(key__in={request.key for request in requests}) | Q(element__in=owned)
        active = cls()
        for operation in Operation.objects.active().filter(concerned).order_by("created_at"):
            active._add(operation)
        return active

    def admit(self, request: OperationRequest, now: datetime) -> Outcome:
        """Return the operation that the request joins or a new one, which is not saved; or the refusal."""
        existing = self.by_key.get(request.key)
        if existing is not None and existing.kind == request.kind:
            return Admission(existing, created=False)
        excluding = existing or self._of_another_kind(request)
        if excluding is not None:
            return admission.exclusion_error(excluding)
        operation = admission.new_operation(request, now)
        self._add(operation)
        return Admission(operation, created=True)

    def _add(self, operation: Operation) -> None:
        self.by_key.setdefault(operation.key, operation)
        self.by_element[operation.element].append(operation)

    def _of_another_kind(self, request: OperationRequest) -> Operation | None:
        owner = owner_of(request.key)
        if not owner:
            return None
        sharing = (
            operation
            for operation in self.by_element[request.element]
            if operation.key == owner or operation.key.startswith(owner + SHARE)
        )
        return next((operation for operation in sharing if operation.kind != request.kind), None)


def _lock_rows(successors: Mapping[UUID, Operation], created_keys: Sequence[str]) -> dict[UUID, Operation]:
    """Lock the failures that are repeated or superseded, and the operations that serve them."""
    undismissed = Q(key__in=created_keys, status=Status.FAILED, dismissed_at__isnull=True)
    ids = {*successors, *(operation.id for operation in successors.values())}
    rows = Operation.objects.filter(undismissed | Q(pk__in=ids))
    return {row.id: row for row in rows.order_by("pk").select_for_update(no_key=True)}


def _extend_need(pairs: Sequence[tuple[Retry, Admission]]) -> None:
    """Extend the time until which the joined operations are needed; retries have one time for all."""
    needed = {it.operation.id: retry.request.needed_until for retry, it in pairs if not it.created}
    if until := max(filter(None, needed.values()), default=None):
        admission.need_until([id for id, time in needed.items() if time], until)


def _supersede(
    created: Sequence[Operation], locked: Mapping[UUID, Operation], now: datetime
) -> list[Operation]:
    """Dismiss the failures with the keys of the new operations, as `admission.made` does."""
    by_key = {operation.key: operation for operation in created}
    failures = [
        row
        for row in locked.values()
        if row.key in by_key and row.status == Status.FAILED and row.dismissed_at is None
    ]
    for failure in failures:
        admission.supersede(failure, by_key[failure.key], by_key[failure.key].actor, now)
    return failures


def _dismiss_retried(
    retries: Sequence[Retry],
    successors: Mapping[UUID, Operation],
    locked: Mapping[UUID, Operation],
    now: datetime,
) -> dict[Operation, Change]:
    """Dismiss the failures that are repeated; return the changed operations with their audit entries.

    Of several targets those that are repeated are dismissed. A failure on another node still needs a
    decision.
    """
    rows = {id: row for id in successors if (row := locked.get(id)) and row.status == Status.FAILED}
    open_rows = {id: row for id, row in rows.items() if row.dismissed_at is None}
    failed: dict[UUID, list[OperationTarget]] = defaultdict(list)
    for target in OperationTarget.objects.filter(operation__in=open_rows, status=TargetStatus.ERROR):
        failed[target.operation_id].append(target)
    dismissed, changes = list[OperationTarget](), dict[Operation, Change]()
    for retry in retries:
        row = open_rows.pop(retry.operation.id, None)
        if row is None:
            continue
        repeated = {node_id for node_id, _ in retry.request.targets}
        tried = [target for target in failed[row.id] if target.node_id in repeated]
        if failed[row.id] and not tried:
            continue
        remaining = [t for t in failed[row.id] if t not in tried and t.dismissed_at is None]
        dismissed += [target for target in tried if target.dismissed_at is None]
        comment = admission.retry_comment(successors[row.id])
        if remaining:
            detail = f"on {counted(len(tried), 'node')}: {comment}"
            changes[row] = admission.audit_entry("dismissed_part", row, detail)
        else:
            admission.supersede(row, successors[row.id], retry.request.by.actor, now)
            changes[row] = admission.audit_entry("dismissed", row, comment)
    for target in dismissed:
        target.dismissed_at = now
    update_rows(dismissed, ["dismissed_at"])
    return changes
