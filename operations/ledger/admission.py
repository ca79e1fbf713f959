"""How an operation comes to be: asked for, joined, needed for longer, or dismissed after it failed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Q

from localai_cluster import errors
from operations.changes.announce import announce
from operations.models import QUEUED, Operation, OperationTarget, Status

NO_SUCH_OPERATION = "no operation has this id"


_LONGEST_ACTOR = 150


_ONE_ACTIVE = "operation_one_active_a_key"


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
    needed_until: datetime | None = None
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
    raise errors.Unavailable(f"operations on {request.key} are too frequent", retry_after=1)


def _join(existing: Operation, request: OperationRequest) -> Admission:
    if existing.kind != request.kind:
        raise errors.Conflict(
            f"{existing.kind} of {existing.element} is in progress (operation {existing.id})",
            operation=existing.id,
        )
    if request.needed_until is not None:
        need_until(existing.id, request.needed_until)
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
            needed_until=request.needed_until,
            message=QUEUED,
            phase=QUEUED,
            next_attempt_at=now,
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
            raise errors.NotFound(NO_SUCH_OPERATION)
        if operation.status != Status.FAILED:
            raise errors.Conflict(
                f"the operation is {operation.status}: only a failure can be dismissed", field="status"
            )
        if operation.dismissed_at is None:
            operation.dismissed_at, operation.dismissed_by = now, actor[:_LONGEST_ACTOR]
            operation.save(update_fields=["dismissed_at", "dismissed_by"])
            announce([operation])
    return operation


def need_until(operation_id: UUID, until: datetime) -> None:
    """Somebody waits for it until `until`; only ever moves forward."""
    Operation.objects.active().filter(pk=operation_id).filter(
        Q(needed_until__isnull=True) | Q(needed_until__lt=until)
    ).update(needed_until=until)
