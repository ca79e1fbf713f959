"""Creation and cancellation of operations on backends: a target per node, an intent per target.

`admit` is one transaction: it reads the intents of the nodes, joins equal requests, queues different requests
behind them (`backend_requests.py`), and writes operation, targets and intents. `cancel` is the counterpart of
`admit`. If a target is cancelled while its wave is open, the next wave opens only after an operator's choice
(`waves.py`).
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import asdict, replace
from datetime import datetime
from uuid import UUID, uuid4

from django.db import IntegrityError, connection

from localai_cluster.accounts import audit
from localai_cluster.kit import errors
from localai_cluster.kit.leases import as_array, insert_rows, update_rows
from localai_cluster.kit.transactions import committed, lock_name
from nodes.backends import intents, node_commands, wait_reasons, wave_requests, waves
from nodes.backends.backend_requests import (
    DELETE,
    KINDS,
    UPGRADE,
    BackendRequest,
    RequestOrder,
    RequestScope,
    nodes_without_backend,
    refuse_by_name,
    refuse_unlisted,
)
from nodes.backends.waves import Options
from nodes.models import BackendNode, PendingBackendOp
from operations import targets
from operations.changes import events
from operations.changes.events import emit
from operations.ledger import admission as ledger
from operations.ledger import target_changes
from operations.ledger.admission import Admission
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus, Waves, facts_of

_RETRIED_CONSTRAINTS = ("operation_one_active_a_key", "intent_once")
_MAX_ADMISSION_ATTEMPTS = 5


class _WaveOpened(Exception):
    """A wave has opened for a node meanwhile; retry, so that its intent is locked before the operations."""


def admit(request: BackendRequest, scope: RequestScope, *, now: datetime) -> Admission:
    """Create the operation, or join the active operation with an equal request and the same nodes (A38, O34).

    Earlier different requests on the same backend run first. Raise Conflict with the operation if the same op
    is in progress with other options, or is in progress and followed by a different request. Raise Conflict
    for an upgrade of a backend that a node does not list, and NotFound if a node was removed meanwhile.
    """
    for _ in range(_MAX_ADMISSION_ATTEMPTS):
        try:
            with committed("backends.ask"):
                return _admit_once(request, scope, now)
        except IntegrityError as error:
            # Another transaction was faster; the next try reads its rows.
            if not any(race in str(error) for race in _RETRIED_CONSTRAINTS):
                raise
        except _WaveOpened:
            continue
    raise errors.Unavailable(f"operations on {request.backend} are too frequent", retry_after=1)


def _key(request: BackendRequest, nodes: Sequence[BackendNode]) -> str:
    if len(nodes) == 1:
        return node_commands.key(nodes[0].id, request.backend)
    ids = hashlib.sha256(b"".join(sorted(node.id.bytes for node in nodes))).hexdigest()
    return f"nodes:{ids[:32]}:{node_commands.subject(request.backend)}"


def _admit_once(request: BackendRequest, scope: RequestScope, now: datetime) -> Admission:
    # Requests for overlapping sets of nodes would wait for each other's keys and intents in a circle.
    lock_name(request.backend)
    ids = [node.id for node in scope.nodes]
    _lock_nodes(scope.nodes)
    current = PendingBackendOp.objects.filter(node__in=as_array(ids), backend=request.backend)
    rows = list(current.order_by("id").select_for_update(no_key=True, of=("self",)))
    order = RequestOrder.of(request, rows)
    order.refuse(request, {node.id: node.name for node in scope.nodes}, is_load=scope.parent is not None)
    refuse_unlisted(request, [node for node in scope.nodes if node.id not in order.same])
    key = _key(request, scope.nodes or scope.concerned)
    operation_request = _operation_request(request, scope, key)
    active = Operation.objects.active().filter(key=key, kind=request.kind).first()
    if (
        active is not None
        and scope.nodes
        and request.matches_operation(active)
        and order.can_join(_open_nodes(active))
    ):
        _refuse_other_waves(active, scope)
        _make_due(request, order, now)
        joined = Admission(active, created=False)
        emit(ledger.record_admissions([(operation_request, joined)], now))
        return joined
    id = uuid4()
    # Targets that are replaced end first, which frees their keys. Events are published last.
    reason = f"superseded by {request.kind} of {request.element} (operation {id})"
    end = target_changes.end(TargetStatus.SUPERSEDED, reason=reason)
    replaced = _replace(
        _unopened_targets_to_replace(request, ids, active), _changes_to_replaced(active, order, end), end, now
    )
    if current.exclude(pk__in=as_array(row.id for row in rows)).exists():
        raise _WaveOpened
    if active is not None:
        _refuse_unless_ended(active)
    operation = ledger.new_operation(operation_request, now, by_parts=True, id=id)
    admission = Admission(operation, created=True)
    *dismissed, _ = ledger.record_admissions([(operation_request, admission)], now)
    _make_due(request, order, now)
    new_targets = _write_targets(operation, request, scope, order, now)
    ended = [*replaced.operations, *dismissed]
    emit([*ended, operation], (targets.of(ended) if ended else {}) | {operation.id: new_targets})
    return admission


def _open_nodes(operation: Operation) -> set[UUID]:
    open_targets = OperationTarget.objects.filter(operation=operation, status__in=targets.UNFINISHED)
    return set(open_targets.values_list("node_id", flat=True))


def _write_targets(
    operation: Operation, request: BackendRequest, scope: RequestScope, order: RequestOrder, now: datetime
) -> list[OperationTarget]:
    """Write and return the targets of a new operation, and the intents of the targets that begin now."""
    turns = wave_requests.plan_for(request.backend, scope.nodes, scope.waves) if scope.waves else {}
    if turns:
        operation.waves, operation.open_wave = Waves.RUNNING, min(turns.values())
    beginning = {node.id for node in scope.nodes if turns.get(node.id) == operation.open_wave}
    spares = (bool(operation.waves) and request.kind == UPGRADE) or scope.drains
    intents_by_node = _join_or_create_intents(operation, request, order, beginning, spares, now)
    ready: OperationTarget | None = None
    new_targets = []
    for node in scope.nodes:
        intent = intents_by_node.get(node.id)
        is_ready = intent and node.status == "healthy" and node.id not in order.nodes and not turns
        if intent and is_ready and ready:
            target = copy(ready)
            target.node_id, target.node_name, target.intent_id = node.id, node.name, intent.id
        else:
            target = _new_target(operation, node, intent, order, turns.get(node.id), now)
            ready = target if is_ready else ready
        new_targets.append(target)
    new_targets += [left_out.ended_target(operation, now) for left_out in scope.left_out]
    wave_requests.wait_for_turns(list(filter(targets.awaits_wave, new_targets)), new_targets, now)
    new_targets.sort(key=lambda target: target.node_name)
    insert_rows(new_targets)
    targets.set_derived_state(operation, new_targets, now)
    operation.save()
    return new_targets


def _refuse_unless_ended(active: Operation) -> None:
    if Operation.objects.active().filter(pk=active.pk).exists():
        raise errors.Conflict(
            f"{active.kind} of {active.element} on these nodes has not ended (operation {active.id})",
            operation=active.id,
            kind=active.kind,
            state=active.status,
        )


def _refuse_other_waves(active: Operation, scope: RequestScope) -> None:
    if Options.of(active) != scope.waves:
        raise errors.Conflict(
            f"the same request runs with other wave options (operation {active.id}):"
            " wait for it, or cancel it",
            operation=active.id,
        )


def _operation_request(request: BackendRequest, scope: RequestScope, key: str) -> ledger.OperationRequest:
    only_node = scope.concerned[0] if len(scope.concerned) == 1 and not scope.all_nodes else None
    return ledger.OperationRequest(
        request.kind,
        key=key,
        element=request.element[:255],
        payload=asdict(request) | scope.payload(),
        by=scope.by,
        node=(only_node.id, only_node.name) if only_node else None,
        targets=[(node.id, node.name) for node in scope.nodes],
        parent=scope.parent,
        repeats=scope.repeats,
    )


def _join_or_create_intents(
    operation: Operation,
    request: BackendRequest,
    order: RequestOrder,
    node_ids: Set[UUID],
    spares: bool,
    now: datetime,
) -> dict[UUID, PendingBackendOp]:
    """Return the intents of these nodes: existing intents of an equal request, otherwise new intents."""
    joined = {id: intent for id, intent in order.same.items() if id in node_ids}
    requested_at = order.end(now)
    if spares:
        waiting = PendingBackendOp.objects.resting().filter(pk__in=[intent.id for intent in joined.values()])
        waiting.filter(unanswered_since__isnull=True).update(spares_requests=True)
    pattern = PendingBackendOp(
        operation_id=operation.id,
        spares_requests=spares,
        next_retry_at=now,
        requested_at=requested_at,
        created_at=now,
        **request.columns(),
    )
    # A copy takes a quarter of the constructor's time.
    new = [copy(pattern) for _ in node_ids - joined.keys()]
    for intent, node_id in zip(new, sorted(node_ids - joined.keys()), strict=True):
        intent.id, intent.node_id = uuid4(), node_id
    insert_rows(new)
    return joined | {intent.node_id: intent for intent in new}


def _lock_nodes(nodes: Sequence[BackendNode]) -> None:
    """Prevent the removal of the nodes until the request is recorded. Raise NotFound for a removed node.

    Nodes are locked before intents, as in a removal. Only a removal waits for this lock.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM backend_nodes WHERE id = ANY(%s) ORDER BY id FOR KEY SHARE",
            [[node.id for node in nodes]],
        )
        registered_ids = {id for (id,) in cursor.fetchall()}
    if removed := [node.name for node in nodes if node.id not in registered_ids]:
        raise errors.NotFound(f"node {', '.join(removed)} is no longer registered")


def _new_target(
    operation: Operation,
    node: BackendNode,
    intent: PendingBackendOp | None,
    order: RequestOrder,
    wave: int | None,
    now: datetime,
) -> OperationTarget:
    target = OperationTarget(operation_id=operation.id, node_id=node.id, node_name=node.name, wave=wave)
    if intent is None:
        return target
    target.intent_id = intent.id
    if intent.lease_until is not None:
        target_changes.begin(target, now)
    elif node.status != "healthy":
        target_changes.queue_again(f"node {node.name} is {node.status}", until=None, node=True)(target, now)
    elif (preceding := order.preceding_row(intent)) is not None:
        reason = f"waits for the {wait_reasons.in_words(preceding.op)} of {preceding.backend} on {node.name}"
        target_changes.queue_again(reason, until=None)(target, now)
    else:
        target_changes.queue_again(
            intent.last_error or "queued", until=intent.next_retry_at, attempts=intent.attempts
        )(target, now)
    return target


def _unopened_targets_to_replace(
    request: BackendRequest, node_ids: Sequence[UUID], active: Operation | None
) -> list[int]:
    """Return the ids of targets that the request replaces and whose wave has not opened."""
    upgrades = Operation.objects.active().filter(waves__gt="", payload__backend=request.backend)
    # A deletion replaces the targets of all upgrades, any other request those of `active` only.
    if request.kind != DELETE:
        upgrades = upgrades.filter(pk__in=[active.pk] if active else [])
    unopened = OperationTarget.objects.filter(operation__in=upgrades, intent_id__isnull=True)
    replaced = unopened.filter(node_id__in=node_ids, status__in=targets.UNFINISHED)
    return list(replaced.values_list("pk", flat=True))


def _replace(
    held: Sequence[int],
    taken_over: Mapping[UUID, target_changes.Change],
    end: target_changes.Change,
    now: datetime,
) -> target_changes.ChangedOperations:
    """End targets whose wave has not opened, and the targets of the operation that the new one replaces."""
    changed = target_changes.apply_changes(taken_over, held=dict.fromkeys(held, end), now=now)
    waves.open_next_waves(changed, now=now)
    return changed


def _changes_to_replaced(
    active: Operation | None, order: RequestOrder, end: target_changes.Change
) -> dict[UUID, target_changes.Change]:
    """Return the changes that end the targets of an equal operation on these nodes, which owns the key.

    A different request follows this operation on at least one node. Its intents continue for the new
    operation.
    """
    if active is None:
        return {}

    def end_if_active(target: OperationTarget, now: datetime) -> None:
        if target.operation_id == active.id:
            end(target, now)

    return {intent.id: end_if_active for intent in order.same.values()}


def _make_due(request: BackendRequest, order: RequestOrder, now: datetime) -> None:
    """Make the rows of the requested op due now; move rows that a different request follows to the end."""
    intents.make_due([intent.id for intent in order.same.values()], now=now, galleries=request.galleries)
    followed, last = order.followed_rows(), order.end(now)
    for intent in followed:
        intent.requested_at = last
    PendingBackendOp.objects.bulk_update(followed, ["requested_at"])


def cancel(operation_id: UUID, *, actor: str, now: datetime, node_id: UUID | None = None) -> Operation:
    """Cancel an operation on backends, and every intent that no other active operation shares.

    With `node_id`, cancel only the target on this node. A controller stops the work that a worker may have
    begun. Raise NotFound and Conflict.
    """
    for _ in range(_MAX_ADMISSION_ATTEMPTS):
        with contextlib.suppress(_WaveOpened):
            return _cancel(operation_id, node_id, actor, now)
    raise errors.Unavailable("the operation changes too often; try again", retry_after=1)


def _running_intents(operation_id: UUID, node_id: UUID | None) -> set[UUID]:
    """Return the ids of the intents of targets that have not ended, of all nodes or of `node_id`."""
    with_intent = OperationTarget.objects.filter(operation_id=operation_id, intent_id__isnull=False)
    with_intent = with_intent.filter(node_id=node_id) if node_id else with_intent
    unfinished = with_intent.filter(status__in=targets.UNFINISHED).values_list("intent_id", flat=True)
    return {id for id in unfinished if id is not None}


def _cancel(operation_id: UUID, node_id: UUID | None, actor: str, now: datetime) -> Operation:
    with committed("backends.cancel"):
        intent_ids = _running_intents(operation_id, node_id)
        rows = PendingBackendOp.objects.filter(pk__in=intent_ids).order_by("id")
        held = {intent.id: intent for intent in rows.select_for_update(no_key=True)}
        operation = ledger.lock_operation(operation_id)
        if not _running_intents(operation_id, node_id) <= intent_ids:
            raise _WaveOpened  # a wave has opened meanwhile: its intents are not locked
        other_targets = OperationTarget.objects.filter(intent_id__in=held, operation__status__in=ACTIVE)
        other_targets = other_targets.exclude(operation_id=operation_id).filter(status__in=targets.UNFINISHED)
        shared = {id for id in other_targets.values_list("intent_id", flat=True) if id is not None}
        unshared = [intent for intent in held.values() if intent.id not in shared]
        started = {
            intent.id
            for intent in unshared
            if intent.lease_until is not None or intent.unanswered_since is not None
        }
        notes = dict.fromkeys(started, "the worker is asked to stop")
        notes |= dict.fromkeys(shared, "another operation wants the same and goes on")
        PendingBackendOp.objects.filter(pk__in=started).update(
            cancelled_at=now, next_retry_at=now, lease_owner="", lease_until=None
        )
        PendingBackendOp.objects.filter(pk__in={intent.id for intent in unshared} - started).delete()
        if node_id is not None:
            # The operation's own status does not say so to the controllers.
            events.notify(events.OPERATIONS, f"* {Status.CANCELLED}")
            note = next(iter(notes.values()), "")
            return _cancel_target(operation, node_id, note=note, actor=actor, now=now)
        return ledger.cancel(operation_id, actor=actor, now=now, notes=notes)


def _cancel_target(operation: Operation, node_id: UUID, *, note: str, actor: str, now: datetime) -> Operation:
    """Cancel the target of a locked operation on this node; the operation continues on the other nodes.

    `note` describes what happens to the intent of the target. The caller holds the locks of `cancel`. Raise
    NotFound for a node without a target, and Conflict if the target cannot be cancelled.
    """
    all_parts = list(OperationTarget.objects.filter(operation=operation))
    target = next((target for target in all_parts if target.node_id == node_id), None)
    if target is None:
        raise errors.NotFound("the operation is not for this node", field="node_id")
    if operation.status not in ACTIVE:
        raise errors.Conflict(f"the operation is {operation.status} already", field="status")
    if target.status in targets.ENDED:
        raise errors.Conflict(
            f"the part on {target.node_name} has ended already: {target.status}", field="status"
        )
    if facts_of(operation.kind).is_deletion and target.status != TargetStatus.QUEUED:
        raise errors.Conflict("a deletion that has begun cannot be cancelled", field="status")
    reason = f"cancelled by {actor}"
    target_changes.end(TargetStatus.CANCELLED, reason=note or reason)(target, now)
    targets.set_derived_state(operation, all_parts, now)
    if operation.status == Status.CANCELLED:
        operation.message = reason
    update_rows([target], target_changes.TARGET_COLUMNS)
    update_rows([operation], target_changes.OPERATION_COLUMNS)
    audit.record(ledger.audit_entry("cancelled_part", operation, f"on {target.node_name}"), at=now)
    changed = target_changes.ChangedOperations([operation], {operation.id: all_parts})
    waves.open_next_waves(changed, now=now)
    emit(changed.operations, changed.parts)
    return operation


def retry(
    operation_id: UUID, *, only: Sequence[UUID] = (), asked_by: RequestScope, now: datetime
) -> Admission:
    """Repeat the targets that failed or were cancelled, on the nodes `only` or on all that did not succeed.

    If the operation still waits, it is made due at once instead. Otherwise a new operation repeats the
    targets, and the failure of the old operation is dismissed with the id of the new one, unless other nodes
    keep it failed. Raise NotFound, and Conflict if the operation has nothing to repeat.
    """
    operation = Operation.objects.filter(pk=operation_id, kind__in=KINDS).first()
    if operation is None:
        raise errors.NotFound(ledger.NO_SUCH_OPERATION)
    chosen = OperationTarget.objects.filter(operation=operation).exclude(status=TargetStatus.SUCCESS)
    # Without a choice of nodes, targets that a newer request has replaced stay replaced.
    # The same applies to failures that were dismissed or tried again.
    chosen = (
        chosen.filter(node_id__in=only)
        if only
        else chosen.exclude(status=TargetStatus.SUPERSEDED).filter(dismissed_at__isnull=True)
    )
    ids = {target.intent_id for target in chosen if target.intent_id and target.status not in targets.ENDED}
    if operation.status in ACTIVE and ids:
        with committed("backends.retry"):
            intents.make_due(ids, now=now)
            audit.record(ledger.audit_entry("tried_at_once", operation), at=now)
        return Admission(operation, created=False)
    nodes = BackendNode.objects.filter(pk__in=[target.node_id for target in chosen]).order_by("name")
    possible = [node for node in nodes if not node_commands.refusal(node)]
    if not only:
        lacking = nodes_without_backend(BackendRequest.of(operation), possible)
        possible = [node for node in possible if node not in lacking] or possible
    if operation.status in ACTIVE or not possible:
        raise errors.Conflict("no part of this operation can be tried again", field="nodes")
    scope = replace(
        asked_by,
        nodes=possible,
        waves=Options.of(operation),
        last_replicas=wave_requests.confirmed_in(operation),
        drains=operation.payload.get("drains", False),
        repeats=operation,
    )
    return admit(BackendRequest.of(operation), scope, now=now)


def admit_on_nodes(request: BackendRequest, scope: RequestScope, *, field: str, now: datetime) -> Admission:
    """Admit one operation for the chosen nodes of the scope, or join the active one.

    For several nodes, raise NodesRefused with the nodes that cannot take the request; nothing has started
    then. `field` is the field of the request that has the nodes.
    """
    try:
        return admit(request, scope, now=now)
    except (errors.Conflict, errors.NotFound):
        if len(scope.nodes) > 1:
            refuse_by_name(request, [node.id for node in scope.nodes], field=field)
        raise
