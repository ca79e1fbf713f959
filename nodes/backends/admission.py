"""How operations on backends come to be: one operation, one part a node, one intent a part.

`ask` is one transaction: it looks at the intents of the nodes concerned, joins what is the same, puts what is
different behind them (`precedence.py`), and writes operation, parts and intents. `cancel` is its counterpart.
What may be asked: `wishes.py`.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from datetime import datetime
from uuid import UUID, uuid4

from django.db import IntegrityError, connection

from localai_cluster import errors
from localai_cluster.accounts import audit
from localai_cluster.commits import committed
from localai_cluster.locks import stand_in_line
from nodes.backends import intents, one_node, one_part, waits, wave_requests, waves
from nodes.backends.precedence import RequestOrder
from nodes.backends.wishes import DELETE, KINDS, Asked, Wish, refuse_unlisted, unlisted
from nodes.models import BackendNode, PendingBackendOp
from operations import targets
from operations.changes.announce import announce
from operations.ledger import admission, parts
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus, Waves

_RACES = ("operation_one_active_a_key", "intent_once")
_TRIES = 5


class _Raced(Exception):
    """A wave has opened for one of the nodes; its intent is to be seen, and locked, before operations are."""


def ask(wish: Wish, asked: Asked, *, now: datetime) -> admission.Admission:
    """Make the operation, or join the active one that wants the same on the same nodes (A38, O34).

    A different request on the same backend runs first. Raise Conflict, which names the operation, if the same
    is in progress with other options, or is in progress and followed by a different request; Conflict for an
    upgrade of what a node does not list; NotFound if a node was removed meanwhile.
    """
    for _ in range(_TRIES):
        try:
            with committed("backends.ask"):
                return _ask(wish, asked, now)
        except IntegrityError as error:
            # Somebody was faster: what they made is seen at the next try.
            if not any(race in str(error) for race in _RACES):
                raise
        except _Raced:
            continue
    raise errors.Unavailable(f"operations on {wish.backend} are too frequent", retry_after=1)


def _key(wish: Wish, nodes: Sequence[BackendNode]) -> str:
    if len(nodes) == 1:
        return one_node.key(nodes[0].id, wish.backend)
    ids = hashlib.sha256(b"".join(sorted(node.id.bytes for node in nodes))).hexdigest()
    return f"nodes:{ids[:32]}:{one_node.subject(wish.backend)}"


def _ask(wish: Wish, asked: Asked, now: datetime) -> admission.Admission:
    # Requests for overlapping sets of nodes would wait for each other's keys and intents in a circle.
    stand_in_line(wish.backend)
    ids = [node.id for node in asked.nodes]
    _keep(asked.nodes)
    found = PendingBackendOp.objects.filter(node__in=ids, backend=wish.backend).order_by("id")
    rows = list(found.select_for_update(no_key=True))
    order = RequestOrder.of(wish, rows)
    order.refuse(wish, {node.id: node.name for node in asked.nodes}, is_load=asked.parent is not None)
    refuse_unlisted(wish, [node for node in asked.nodes if node.id not in order.same])
    key = _key(wish, asked.nodes or asked.concerned)
    active = Operation.objects.active().filter(key=key, kind=wish.kind).first() if asked.nodes else None
    if active is not None and wish.is_that_of_operation(active) and order.can_join(_open_nodes(active)):
        _refuse_other_waves(active, asked)
        _refresh(wish, order, now)
        return admission.Admission(active, created=False)
    id = uuid4()
    # Parts that give way end first: what they own is free then. The news leaves last.
    reason = f"superseded by {wish.kind} of {wish.element} (operation {id})"
    end = parts.end(TargetStatus.SUPERSEDED, reason=reason)
    replaced = _replace(_held(wish, ids, active), _taken_over(active, order, end), end, now)
    known = [row.id for row in rows]
    if PendingBackendOp.objects.filter(node__in=ids, backend=wish.backend).exclude(pk__in=known).exists():
        raise _Raced
    if active is not None:
        _refuse_unless_ended(active)
    operation, superseded = admission.made(_request(wish, asked, key), now, by_parts=True, id=id)
    _refresh(wish, order, now)
    _write_parts(operation, wish, asked, order, now)
    announce([*replaced.operations, *superseded, operation])
    return admission.Admission(operation, created=True)


def _open_nodes(operation: Operation) -> set[UUID]:
    left = OperationTarget.objects.filter(operation=operation).exclude(status__in=targets.ENDED)
    return set(left.values_list("node_id", flat=True))


def _write_parts(operation: Operation, wish: Wish, asked: Asked, order: RequestOrder, now: datetime) -> None:
    """The parts of a new operation, and intents for those whose turn is now."""
    turns = wave_requests.plan_for(wish.backend, asked.nodes, asked.waves) if asked.waves else {}
    if turns:
        operation.waves, operation.open_wave = Waves.RUNNING, min(turns.values())
    beginning = {node.id for node in asked.nodes if turns.get(node.id) == operation.open_wave}
    spares = bool(operation.waves) or asked.drains
    carried_by = _carriers(operation, wish, order, beginning, spares, now)
    made = [
        _part(operation, node, carried_by.get(node.id), order, turns.get(node.id), now)
        for node in asked.nodes
    ]
    made += [one.part(operation, now) for one in asked.left_out]
    wave_requests.wait_for_turns(list(filter(targets.held, made)), made, now)
    OperationTarget.objects.bulk_create(made)
    targets.adopt(operation, made, now)
    operation.save()


def _refuse_unless_ended(active: Operation) -> None:
    if Operation.objects.active().filter(pk=active.pk).exists():
        raise errors.Conflict(
            f"{active.kind} of {active.element} on these nodes has not ended (operation {active.id})",
            operation=active.id,
            kind=active.kind,
            state=active.status,
        )


def _refuse_other_waves(active: Operation, asked: Asked) -> None:
    if wave_requests.options_of(active) != asked.waves:
        raise errors.Conflict(
            f"the same is in progress with other waves (operation {active.id})", operation=active.id
        )


def _request(wish: Wish, asked: Asked, key: str) -> admission.OperationRequest:
    alone = asked.concerned[0] if len(asked.concerned) == 1 and not asked.all_nodes else None
    return admission.OperationRequest(
        wish.kind,
        key=key,
        element=wish.element[:255],
        payload=asdict(wish) | asked.payload(),
        actor=asked.actor,
        node=(alone.id, alone.name) if alone else None,
        request_id=asked.request_id,
        client_address=asked.client_address,
        parent=asked.parent,
    )


def _carriers(
    operation: Operation,
    wish: Wish,
    order: RequestOrder,
    node_ids: Set[UUID],
    spares: bool,
    now: datetime,
) -> dict[UUID, PendingBackendOp]:
    """The intents of these nodes: those that do the same already, and new ones for the others."""
    found = {id: intent for id, intent in order.same.items() if id in node_ids}
    requested_at = order.end(now)
    if spares:
        waiting = PendingBackendOp.objects.resting().filter(pk__in=[intent.id for intent in found.values()])
        waiting.filter(unanswered_since__isnull=True).update(spares_requests=True)
    new = [
        PendingBackendOp(
            node_id=id,
            operation_id=operation.id,
            spares_requests=spares,
            next_retry_at=now,
            requested_at=requested_at,
            created_at=now,
            **wish.columns(),
        )
        for id in sorted(node_ids - found.keys())
    ]
    PendingBackendOp.objects.bulk_create(new)
    return found | {intent.node_id: intent for intent in new}


def _keep(nodes: Sequence[BackendNode]) -> None:
    """Keeps the nodes from being removed until the request is recorded; raises NotFound for one that is gone.

    A removal locks the node before its intents, so this does too. Nothing but a removal waits for it.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM backend_nodes WHERE id = ANY(%s) ORDER BY id FOR KEY SHARE",
            [[node.id for node in nodes]],
        )
        there = {id for (id,) in cursor.fetchall()}
    if gone := [node.name for node in nodes if node.id not in there]:
        raise errors.NotFound(f"node {', '.join(gone)} is no longer registered")


def _part(
    operation: Operation,
    node: BackendNode,
    intent: PendingBackendOp | None,
    order: RequestOrder,
    wave: int | None,
    now: datetime,
) -> OperationTarget:
    part = OperationTarget(operation=operation, node_id=node.id, node_name=node.name, wave=wave)
    if intent is None:
        return part
    part.intent_id = intent.id
    if intent.lease_until is not None:
        parts.begin(part, now)
    elif node.status != "healthy":
        parts.rest(f"node {node.name} is {node.status}", until=None, node=True)(part, now)
    elif (first := order.before(intent)) is not None:
        reason = f"waits for the {waits.in_words(first.op)} of {first.backend} on {node.name}"
        parts.rest(reason, until=None)(part, now)
    else:
        parts.rest(intent.last_error or "queued", until=intent.next_retry_at, attempts=intent.attempts)(
            part, now
        )
    return part


def refusals_by_node(wish: Wish, nodes: Sequence[BackendNode]) -> dict[UUID, str]:
    """Return for each of these nodes whose present work contradicts the request the reason."""
    names = {node.id: node.name for node in nodes}
    refusals: dict[UUID, str] = {}
    rows: dict[UUID, list[PendingBackendOp]] = {}
    for intent in PendingBackendOp.objects.filter(node__in=names, backend=wish.backend):
        rows.setdefault(intent.node_id, []).append(intent)
    for node_id, intents_there in rows.items():
        try:
            RequestOrder.of(wish, intents_there).refuse(wish, names, is_load=False)
        except errors.Conflict as refusal:
            refusals[node_id] = refusal.message
    return refusals


def _held(wish: Wish, node_ids: Sequence[UUID], active: Operation | None) -> list[int]:
    """Parts whose wave has not opened: those that a deletion takes over, and those of `active`."""
    upgrades = Operation.objects.active().filter(waves__gt="", payload__backend=wish.backend)
    if wish.kind != DELETE:
        upgrades = upgrades.filter(pk__in=[active.pk] if active else [])
    held = OperationTarget.objects.filter(operation__in=upgrades, intent_id__isnull=True)
    left = held.filter(node_id__in=node_ids).exclude(status__in=targets.ENDED)
    return list(left.values_list("pk", flat=True))


def _replace(
    held: Sequence[int], taken_over: Mapping[UUID, parts.Change], end: parts.Change, now: datetime
) -> parts.Changed:
    """End parts whose wave has not opened, and those of the operation that the newer one replaces."""
    changed = parts.change(taken_over, held=dict.fromkeys(held, end), now=now)
    waves.go_on(changed, now=now)
    return changed


def _taken_over(active: Operation | None, order: RequestOrder, end: parts.Change) -> dict[UUID, parts.Change]:
    """Return the ends of the parts of an equal operation on the same nodes, which owns the key.

    Different requests have followed it on some node. Its intents go on for the newer operation.
    """
    if active is None:
        return {}

    def happens(part: OperationTarget, now: datetime) -> None:
        if part.operation_id == active.id:
            end(part, now)

    return {intent.id: happens for intent in order.same.values()}


def _refresh(wish: Wish, order: RequestOrder, now: datetime) -> None:
    """Have the rows of the requested op tried now; one that a different request follows runs after it."""
    intents.nudge([intent.id for intent in order.same.values()], now=now, galleries=wish.galleries)
    followed, last = order.followed(), order.end(now)
    for intent in followed:
        intent.requested_at = last
    PendingBackendOp.objects.bulk_update(followed, ["requested_at"])


def cancel(operation_id: UUID, *, actor: str, now: datetime, node_id: UUID | None = None) -> Operation:
    """Ends an operation on backends for good, and every intent that no other active operation shares.

    With `node_id` only its part on that node. A controller calls off what a worker may have begun.
    Raises NotFound and Conflict.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(_Raced):
            return _cancel(operation_id, node_id, actor, now)
    raise errors.Unavailable("the operation changes too often; try again", retry_after=1)


def _running(operation_id: UUID, node_id: UUID | None) -> set[UUID]:
    """The intents of the parts that have not ended, or of the one on this node."""
    carried = OperationTarget.objects.filter(operation_id=operation_id, intent_id__isnull=False)
    carried = carried.filter(node_id=node_id) if node_id else carried
    left = carried.exclude(status__in=targets.ENDED).values_list("intent_id", flat=True)
    return {id for id in left if id is not None}


def _cancel(operation_id: UUID, node_id: UUID | None, actor: str, now: datetime) -> Operation:
    with committed("backends.cancel"):
        wanted = _running(operation_id, node_id)
        found = PendingBackendOp.objects.filter(pk__in=wanted).order_by("id").select_for_update(no_key=True)
        held = {intent.id: intent for intent in found}
        operation = admission.locked(operation_id)
        if not _running(operation_id, node_id) <= wanted:
            raise _Raced  # a wave has opened meanwhile: its intents are not locked
        others = OperationTarget.objects.filter(intent_id__in=held, operation__status__in=ACTIVE)
        others = others.exclude(operation_id=operation_id).exclude(status__in=targets.ENDED)
        shared = {id for id in others.values_list("intent_id", flat=True) if id is not None}
        mine = [intent for intent in held.values() if intent.id not in shared]
        begun = {one.id for one in mine if one.lease_until is not None or one.unanswered_since is not None}
        notes = dict.fromkeys(begun, "the worker is asked to stop")
        notes |= dict.fromkeys(shared, "another operation wants the same and goes on")
        PendingBackendOp.objects.filter(pk__in=begun).update(
            cancelled_at=now, next_retry_at=now, lease_owner="", lease_until=None
        )
        PendingBackendOp.objects.filter(pk__in={one.id for one in mine} - begun).delete()
        if node_id is not None:
            note = next(iter(notes.values()), "")
            return one_part.cancel(operation, node_id, note=note, actor=actor, now=now)
        return admission.cancel(operation_id, actor=actor, now=now, notes=notes)


def retry(
    operation_id: UUID, *, only: Sequence[UUID] = (), asked_by: Asked, now: datetime
) -> admission.Admission:
    """Asks again for what failed or was cancelled, on those nodes or on all whose part did not succeed.

    An operation that still waits is tried at once instead. The failure is dismissed and names its successor,
    unless it stays the failure of nodes that are not tried again.
    Raises NotFound, and Conflict where there is nothing to ask again.
    """
    operation = Operation.objects.filter(pk=operation_id, kind__in=KINDS).first()
    if operation is None:
        raise errors.NotFound(admission.NO_SUCH_OPERATION)
    chosen = OperationTarget.objects.filter(operation=operation).exclude(status=TargetStatus.SUCCESS)
    # Without a choice, a newer wish has its way where it took a part over.
    chosen = chosen.filter(node_id__in=only) if only else chosen.exclude(status=TargetStatus.SUPERSEDED)
    ids = {part.intent_id for part in chosen if part.intent_id and part.status not in targets.ENDED}
    if operation.status in ACTIVE and ids:
        with committed("backends.retry"):
            intents.nudge(ids, now=now)
            audit.record(admission.changed("tried_at_once", operation), at=now)
        return admission.Admission(operation, created=False)
    nodes = BackendNode.objects.filter(pk__in=[part.node_id for part in chosen]).order_by("name")
    possible = [node for node in nodes if not one_node.refusal(node)]
    if not only:
        lacking = unlisted(Wish.of(operation), possible)
        possible = [node for node in possible if node not in lacking] or possible
    if operation.status in ACTIVE or not possible:
        raise errors.Conflict("no part of this operation can be tried again", field="nodes")
    asked = replace(
        asked_by,
        nodes=possible,
        waves=wave_requests.options_of(operation),
        last_replicas=wave_requests.confirmed_in(operation),
        drains=operation.payload.get("drains", False),
    )
    result = ask(Wish.of(operation), asked, now=now)
    failed = OperationTarget.objects.filter(operation=operation, status=TargetStatus.ERROR)
    # A failure on another node still waits for a decision.
    left = failed.exclude(node_id__in=[node.id for node in possible])
    if operation.status == Status.FAILED and not left.exists():
        said = f"tried again as operation {result.operation.id}"
        admission.dismiss(operation.id, actor=asked_by.actor, now=now, comment=said)
    return result
