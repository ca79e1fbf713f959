"""What people ask about upgrades in waves: the plan for their nodes, last replicas, continue or stop."""

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from django.db.models import Count

from localai_cluster import errors
from localai_cluster.accounts import audit
from localai_cluster.commits import committed
from nodes.backends import intents, waves
from nodes.backends.wave_plan import Member, Options, plan
from nodes.models import BackendNode, NodeModel, PendingBackendOp
from nodes.replicas import upgrade_drains
from operations import targets
from operations.changes.announce import announce
from operations.ledger import admission, parts
from operations.ledger.progress import update
from operations.models import ACTIVE, Operation, OperationTarget, TargetStatus, Waves

CONTINUE, STOP = "continue", "stop"
CHOICES = (CONTINUE, STOP)


def options_of(operation: Operation) -> Options | None:
    """As they were asked for; None without waves."""
    asked = operation.payload.get("waves")
    return Options(asked["max_unavailable"], asked["canary"]) if asked else None


def confirmed_in(operation: Operation) -> Sequence[str]:
    """The models whose last replica may go."""
    return tuple(operation.payload.get("waves", {}).get("last_replicas", ()))


def refuse_last_replicas(backend: str, nodes: Sequence[BackendNode], confirmed: Collection[str]) -> None:
    """Raises Conflict, which names the models, if a last replica would go that no one has confirmed.

    What is so now may be otherwise when the wave opens: then the part waits for a confirmation (`sparing`).
    """
    last = upgrade_drains.last_replicas(backend, [node.id for node in nodes])
    if missing := sorted(set().union(*last.values()) - set(confirmed)):
        raise errors.Conflict(
            f"the upgrade would stop the last replica of {', '.join(missing)}; confirm in last_replicas",
            field="last_replicas",
            last_replicas=missing,
        )


def plan_for(backend: str, nodes: Sequence[BackendNode], options: Options) -> dict[UUID, int]:
    """The wave of each node, as its replicas are now. Three queries."""
    ids = [node.id for node in nodes]
    mine = NodeModel.objects.loaded().filter(node__in=ids).of_backend(backend)
    counted = mine.order_by().values_list("node_id").annotate(replicas=Count("pk"))
    replicas, last = dict(counted), upgrade_drains.last_replicas(backend, ids)
    return plan(
        (
            Member(node.id, node.name, replicas.get(node.id, 0), node.id in last, node.status == "healthy")
            for node in nodes
        ),
        options,
    )


def choose(
    operation_id: UUID, choice: str, *, last_replicas: Collection[str] = (), actor: str, now: datetime
) -> Operation:
    """An operator's choice after a wave that failed, or a confirmation of last replicas while one waits.

    "continue" opens the next wave; "stop" ends the parts whose wave is not open as cancelled, also while
    nothing has failed. Raises NotFound and Conflict.
    """
    with committed("waves.decide"):
        # Intents before operations. A part that waits for this confirmation is looked at now.
        open_parts = OperationTarget.objects.filter(operation_id=operation_id, intent_id__isnull=False)
        if last_replicas:
            carried = open_parts.exclude(status__in=targets.ENDED).values_list("intent_id", flat=True)
            ids = [id for id in carried if id is not None]
            # An attempt that is about to be put back is settled before this, or after the choice is there.
            list(PendingBackendOp.objects.filter(pk__in=ids).order_by("id").select_for_update(no_key=True))
            intents.nudge(ids, now=now)
        operation = admission.locked(operation_id)
        _refuse(operation, choice, last_replicas)
        all_parts = list(OperationTarget.objects.filter(operation=operation))
        asked = operation.payload["waves"]
        said = {"choice": choice, "by": actor, "at": now.isoformat(), "last_replicas": sorted(last_replicas)}
        confirmed = sorted({*asked.get("last_replicas", ()), *last_replicas})
        choices = [*asked.get("choices", ()), said]
        operation.payload = operation.payload | {
            "waves": asked | {"last_replicas": confirmed, "choices": choices}
        }
        if choice == STOP:
            _stop(operation, all_parts, actor, now)
        elif operation.waves == Waves.ASKS:
            _continue(operation, all_parts, now)
        operation.updated_at = now
        operation.save()
        did = "stopped" if choice == STOP else "continued"
        confirmed_now = f"last replicas: {', '.join(sorted(last_replicas))}" if last_replicas else ""
        audit.record(admission.changed(did, operation, confirmed_now), at=now)
        announce([operation])
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
    left = [part for part in all_parts if targets.held(part)]
    for part in left:
        parts.end(TargetStatus.CANCELLED, reason=f"stopped by {actor}")(part, now)
    update(left, parts.PART)
    targets.adopt(operation, all_parts, now)


def _continue(operation: Operation, all_parts: Sequence[OperationTarget], now: datetime) -> None:
    operation.waves = Waves.CONTINUED
    left = [part for part in all_parts if targets.held(part)]
    wait_for_turns(left, all_parts, now)
    update(left, parts.PART)
    by_operation = {operation.id: all_parts}
    turn = waves.next_turn(operation, all_parts)
    waves.attach([turn] if turn else [], by_operation, now=now)
    waves.go_on(parts.Changed([operation], by_operation), now=now)


def wait_for_turns(
    held: Sequence[OperationTarget], all_parts: Sequence[OperationTarget], now: datetime
) -> None:
    """Their waves are not open yet."""
    words = targets.waves_in_words(all_parts)
    for part in held:
        assert part.wave is not None
        parts.rest(f"waits for {words[part.wave]}", until=None)(part, now)
