"""Requests about operations in waves: the plan for the nodes, last replicas, and continue or stop."""

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from django.db.models import Count

from localai_cluster.accounts import audit
from localai_cluster.kit import errors
from localai_cluster.kit.leases import update_rows
from localai_cluster.kit.transactions import committed
from nodes.backends import intents, waves
from nodes.backends.waves import Member, Options, plan
from nodes.models import BackendNode, NodeModel, PendingBackendOp
from nodes.replicas import drains
from operations import targets
from operations.changes.events import emit
from operations.ledger import admission, target_changes
from operations.models import ACTIVE, Operation, OperationTarget, TargetStatus, Waves

CONTINUE, STOP = "continue", "stop"
CHOICES = (CONTINUE, STOP)


def confirmed_in(operation: Operation) -> Sequence[str]:
    """Return the models whose last replica may stop."""
    return tuple(operation.payload.get("waves", {}).get("last_replicas", ()))


def refuse_last_replicas(backend: str, nodes: Sequence[BackendNode], confirmed: Collection[str]) -> None:
    """Raise Conflict, which names the models, if a last replica would stop without a confirmation.

    The state may change until the wave opens: then the target waits for a confirmation (`intent_queue.py`).
    """
    last = drains.last_replicas(backend, [node.id for node in nodes])
    if missing := sorted(set().union(*last.values()) - set(confirmed)):
        raise errors.Conflict(
            f"the upgrade would stop the last replica of {', '.join(missing)}; confirm in last_replicas",
            field="last_replicas",
            last_replicas=missing,
        )


def plan_for(backend: str, nodes: Sequence[BackendNode], options: Options) -> dict[UUID, int]:
    """Return the wave of each node, based on its present replicas. Three queries."""
    ids = [node.id for node in nodes]
    loaded = NodeModel.objects.loaded().filter(node__in=ids).of_backend(backend)
    counts = loaded.order_by().values_list("node_id").annotate(replicas=Count("pk"))
    replicas, last = dict(counts), drains.last_replicas(backend, ids)
    members = [
        Member(node.id, node.name, replicas.get(node.id, 0), node.id in last, node.status == "healthy")
        for node in nodes
    ]
    return plan(members, options)


def choose(
    operation_id: UUID, choice: str, *, last_replicas: Collection[str] = (), actor: str, now: datetime
) -> Operation:
    """Apply an operator's choice after a failed wave, or the confirmation that last replicas may stop.

    "continue" opens the next wave; "stop" ends the targets whose wave is not open as cancelled, also without
    a failure. Raise NotFound and Conflict.
    """
    with committed("waves.decide"):
        # Intents before operations. A target that waits for this confirmation is due now.
        open_parts = OperationTarget.objects.filter(operation_id=operation_id, intent_id__isnull=False)
        if last_replicas:
            unfinished = open_parts.filter(status__in=targets.UNFINISHED)
            ids = [id for id in unfinished.values_list("intent_id", flat=True) if id is not None]
            # An attempt that is about to be put back is settled before this, or after the choice is stored.
            list(PendingBackendOp.objects.filter(pk__in=ids).order_by("id").select_for_update(no_key=True))
            intents.make_due(ids, now=now)
        operation = admission.lock_operation(operation_id)
        _refuse(operation, choice, last_replicas)
        all_parts = list(OperationTarget.objects.filter(operation=operation))
        waves_payload = operation.payload["waves"]
        entry = {"choice": choice, "by": actor, "at": now.isoformat(), "last_replicas": sorted(last_replicas)}
        confirmed = sorted({*waves_payload.get("last_replicas", ()), *last_replicas})
        choices = [*waves_payload.get("choices", ()), entry]
        operation.payload = operation.payload | {
            "waves": waves_payload | {"last_replicas": confirmed, "choices": choices}
        }
        if choice == STOP:
            _stop(operation, all_parts, actor, now)
        elif operation.waves == Waves.ASKS:
            _continue(operation, all_parts, now)
        operation.updated_at = now
        operation.save()
        verb = "stopped" if choice == STOP else "continued"
        confirmed_now = f"last replicas: {', '.join(sorted(last_replicas))}" if last_replicas else ""
        audit.record(admission.audit_entry(verb, operation, confirmed_now), at=now)
        emit([operation])
    return operation


def _refuse(operation: Operation, choice: str, last_replicas: Collection[str]) -> None:
    if not operation.waves:
        raise errors.Conflict("the operation does not go in waves", field="choice")
    if operation.status not in ACTIVE:
        raise errors.Conflict(f"the operation is {operation.status}", field="status")
    if operation.waves == Waves.STOPPED and not (choice == CONTINUE and last_replicas):
        raise errors.Conflict("the operation was stopped: only the open wave goes on", field="choice")
    if choice == CONTINUE and operation.waves != Waves.ASKS and not last_replicas:
        raise errors.Conflict("no wave has failed: the operation goes on by itself", field="choice")


def _stop(operation: Operation, all_parts: Sequence[OperationTarget], actor: str, now: datetime) -> None:
    operation.waves = Waves.STOPPED
    unopened = [target for target in all_parts if targets.awaits_wave(target)]
    for target in unopened:
        target_changes.end(TargetStatus.CANCELLED, reason=f"stopped by {actor}")(target, now)
    update_rows(unopened, target_changes.TARGET_COLUMNS)
    targets.set_derived_state(operation, all_parts, now)


def _continue(operation: Operation, all_parts: Sequence[OperationTarget], now: datetime) -> None:
    operation.waves = Waves.CONTINUED
    unopened = [target for target in all_parts if targets.awaits_wave(target)]
    wait_for_turns(unopened, all_parts, now)
    update_rows(unopened, target_changes.TARGET_COLUMNS)
    by_operation = {operation.id: all_parts}
    turn = waves.next_turn(operation, all_parts)
    waves.attach([turn] if turn else [], by_operation, now=now)
    waves.open_next_waves(target_changes.ChangedOperations([operation], by_operation), now=now)


def wait_for_turns(
    held: Sequence[OperationTarget], all_parts: Sequence[OperationTarget], now: datetime
) -> None:
    """Set the wait reason of targets whose wave is not open yet."""
    words = targets.wave_texts(all_parts)
    for target in held:
        assert target.wave is not None
        target_changes.queue_again(f"waits for {words[target.wave]}", until=None)(target, now)
