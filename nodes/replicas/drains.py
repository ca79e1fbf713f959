"""Replicas that an unload takes out of the picks: they drain, and return if it ends before a stop was sent.

The row belongs to the operation that took it last. The operation stops the engine; what it leaves is the
controllers' (`stops.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Case, Exists, F, IntegerField, OuterRef, Q, QuerySet, Sum, Value, When
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Least

from localai_cluster.kit.leases import lock_free
from nodes.models import NodeModel, OwnerKind, PendingBackendOp, Phase, PhaseReason, ReplicaState
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import engines
from nodes.replicas.engines import Engine
from nodes.replicas.states import ReplicaEvent
from operations import targets
from operations.changes import events
from operations.models import ACTIVE, OperationTarget


@dataclass(frozen=True)
class UpgradeDrain:
    """The state of a drain before an upgrade: running requests, or models that would have no replica."""

    running: int = 0
    last_of: tuple[str, ...] = ()
    """Models that no other node serves, and whose last replica may not go."""


def last_replicas(backend: str, node_ids: Collection[UUID]) -> dict[UUID, set[str]]:
    """Return, by node, the models that only its replicas of this backend serve."""
    concerned = NodeModel.objects.loaded().filter(node__in=node_ids).of_backend(backend)
    serving = NodeModel.objects.reached().filter(model_name__in=concerned.values("model_name"))
    nodes: dict[str, set[UUID]] = {}
    for model, node_id in serving.values_list("model_name", "node_id"):
        nodes.setdefault(model, set()).add(node_id)
    found: dict[UUID, set[str]] = {}
    for model, node_id in concerned.values_list("model_name", "node_id"):
        if nodes.get(model, set()) == {node_id}:
            found.setdefault(node_id, set()).add(model)
    return found


def drain_for_upgrade(
    node_id: UUID, backend: str, *, intent_id: UUID, confirmed: Collection[str], deadline: datetime
) -> UpgradeDrain:
    """Take the node's replicas of this backend out of the picks, or none of them if a model's last would go.

    Two nodes never go at once as the last two of a model: all its serving rows are locked.
    """
    mine = NodeModel.objects.filter(node_id=node_id).of_backend(backend)
    with transaction.atomic():
        models = mine.loaded().values_list("model_name", flat=True)
        loaded = NodeModel.objects.loaded().filter(model_name__in=list(models)).order_by("id")
        rows = list(loaded.select_related("node").select_for_update(of=("self",)))
        elsewhere = {r.model_name for r in rows if r.node_id != node_id and r.node.status == "healthy"}
        stopping = set(mine.loaded().values_list("pk", flat=True))
        draining = [row for row in rows if row.pk in stopping]
        last_of = {row.model_name for row in draining} - elsewhere - set(confirmed)
        if last_of:
            return UpgradeDrain(last_of=tuple(sorted(last_of)))
        if draining:
            engines.apply_event(
                NodeModel.objects.filter(pk__in=[row.pk for row in draining]),
                ReplicaEvent.DRAINED,
                **engines.owned_by(OwnerKind.INTENT, intent_id),
                **engines.drain_until(deadline),
                reason=PhaseReason.UPGRADE,
            )
            events.notify(events.NODES, str(node_id))
    out = mine.filter(phase=Phase.DRAINING, owner_id=intent_id).aggregate(running=Sum("in_flight"))
    return UpgradeDrain(out["running"] or 0)


def end_upgrade(intent_id: UUID, fence: int) -> None:
    """End the attempt: its replicas that still run serve again, unless a later attempt owns them."""
    if PendingBackendOp.objects.filter(pk=intent_id, fence=fence).exists():
        _return_drained(NodeModel.objects.filter(owner_id=intent_id))


def return_without_upgrade() -> int:
    """Return replicas to the picks whose upgrade is over or rests: its controller died. Return how many."""
    return _return_drained(
        NodeModel.objects.exclude(Exists(_active_upgrades().filter(pk=OuterRef("owner_id"))))
    )


def hand_to_upgrade(rows: Sequence[NodeModel]) -> set[UUID]:
    """Hand the locked, draining rows to the upgrade that is about to stop their engines; return those."""
    kept: set[UUID] = set()
    busy = _active_upgrades().filter(node__in={row.node_id for row in rows}, spares_requests=True)
    for intent in busy if rows else ():
        mine = NodeModel.objects.filter(pk__in=[row.pk for row in rows], node_id=intent.node_id)
        ids = set(mine.of_backend(intent.backend).values_list("pk", flat=True))
        engines.apply_event(
            NodeModel.objects.filter(pk__in=ids),
            ReplicaEvent.HANDED_BACK,
            **engines.owned_by(OwnerKind.INTENT, intent.pk),
            reason=PhaseReason.UPGRADE,
        )
        kept |= ids
    return kept


def _active_upgrades() -> QuerySet[PendingBackendOp]:
    at_it = Q(lease_until__isnull=False) | Q(unanswered_since__isnull=False) | Q(cancelled_at__isnull=False)
    return PendingBackendOp.objects.filter(at_it)


def _return_drained(rows: NodeModelQuerySet) -> int:
    draining = rows.filter(phase=Phase.DRAINING, owner_kind=OwnerKind.INTENT)
    with transaction.atomic():
        found = list(draining.order_by("id").select_for_update(of=("self",)))
        _return_to_picks(found)
    return len(found)


def _return_to_picks(rows: Sequence[NodeModel]) -> None:
    returned = NodeModel.objects.filter(pk__in=[row.pk for row in rows])
    engines.apply_event(returned, ReplicaEvent.RETURNED, **engines.SERVES)
    if rows:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in rows}))


UNLOAD, DELETE, REMOVE = "model_unload", "model_delete", "definition_delete"
"""The kinds of operations that take replicas out of the picks."""
HELD = (ReplicaState.LOADED, ReplicaState.UNLOADING)
"""The states in which a replica has an engine that can be unloaded."""
_DRAIN_PHASES = (Phase.DRAINING, Phase.TERMINATING)
_DRAIN_COLUMNS = ("id", "in_flight", "phase", "deadline")


def unloadable(
    model_name: str, *, node_id: UUID | None = None, index: int | None = None
) -> NodeModelQuerySet:
    """Return the replicas that an unload of the model is about: everywhere, of one node, or exactly one."""
    rows = NodeModel.objects.of(model_name).filter(state__in=HELD).exclude(reason=PhaseReason.LOAD_FAILED)
    rows = rows if node_id is None else rows.filter(node_id=node_id)
    return rows if index is None else rows.filter(replica_index=index)


def drain_for_unload(
    model_name: str,
    node_ids: Collection[UUID],
    *,
    index: int | None,
    deadline: datetime,
    operation_id: UUID,
    now: datetime,
) -> list[Engine]:
    """Take the replicas out of the picks for an operation; return their engines.

    Those that are out already are taken over and keep an earlier deadline. Needs a transaction. A constant
    number of statements.
    """
    found = unloadable(model_name, index=index).filter(node_id__in=node_ids).order_by("id")
    rows = list(found.select_for_update(of=("self",)))
    serving = [row for row in rows if row.phase == Phase.SERVING]
    owner = engines.owned_by(OwnerKind.OPERATION, operation_id)
    mine = NodeModel.objects.filter(pk__in=[row.pk for row in rows])
    returns = Q(phase=Phase.DRAINING) & ~Q(owner_kind=OwnerKind.CONTROLLERS)
    earlier = Least(F("deadline"), Value(deadline))
    engines.apply_event(
        mine.filter(
            Q(phase__in=(Phase.TERMINATING, Phase.STOPPING))
            | Q(phase=Phase.DRAINING, reason=PhaseReason.LOST)
        ),
        ReplicaEvent.TAKEN_OVER,
        **owner,
        reason=PhaseReason.UNLOAD,
        deadline=Case(When(phase=Phase.STOPPING, then=F("deadline")), default=earlier),
    )
    engines.apply_event(
        mine.filter(returns), ReplicaEvent.DRAINED, **owner, reason=PhaseReason.UNLOAD, deadline=earlier
    )
    engines.apply_event(
        mine.filter(phase=Phase.SERVING),
        ReplicaEvent.DRAINED,
        **owner,
        **engines.drain_until(deadline),
        reason=PhaseReason.UNLOAD,
        updated_at=now,
    )
    events.notify(events.NODES, *sorted({str(row.node_id) for row in serving}))
    return [engines.engine_of(row) for row in rows]


def drain_idle(row: NodeModel, *, operation_id: UUID, now: datetime) -> None:
    """Take a locked replica on which nothing runs out of the picks for an operation."""
    engines.apply_event(
        NodeModel.objects.filter(pk=row.pk),
        ReplicaEvent.DRAINED,
        **engines.owned_by(OwnerKind.OPERATION, operation_id),
        **engines.drain_until(now),
        reason=PhaseReason.UNLOAD,
        updated_at=now,
    )
    events.notify(events.NODES, str(row.node_id))


def advance_deadline(rows: NodeModelQuerySet, *, deadline: datetime) -> None:
    """Have those of the replicas that still wait for their requests stopped at `deadline` already."""
    rows.filter(phase__in=_DRAIN_PHASES, deadline__gt=deadline).update(deadline=deadline)


def running_requests(ids: Collection[UUID]) -> dict[UUID, tuple[int, datetime | None]]:
    """Return, for those replicas that still wait, the requests that run and the deadline.

    A replica whose stop was sent already is not waited for: no deadline.
    """
    rows = NodeModel.objects.filter(pk__in=ids, state=ReplicaState.UNLOADING).values_list(*_DRAIN_COLUMNS)
    return {id: (count, until if phase in _DRAIN_PHASES else None) for id, count, phase, until in rows}


def is_in_use(engine: Engine) -> bool:
    """Return True if requests may run on the replica: it serves again, or they came before its stop."""
    return NodeModel.objects.filter(pk=engine.id, phase__in=(Phase.SERVING, *_DRAIN_PHASES)).exists()


def return_abandoned() -> list[Engine]:
    """Return the replicas to the picks whose operation has ended before a stop was sent.

    One that an upgrade is about to stop is handed to that instead: it returns after that.
    """
    abandoned = NodeModel.objects.filter(
        has_no_operation(), phase=Phase.DRAINING, owner_kind=OwnerKind.OPERATION
    )
    with transaction.atomic():
        rows = lock_free(abandoned.order_by("id"))
        kept = hand_to_upgrade(rows)
        back = [row for row in rows if row.pk not in kept]
        _return_to_picks(back)
    return [engines.engine_of(row) for row in back]


def has_no_operation() -> Q:
    """Rows that no active operation is about, neither the one that took them out last nor an earlier one.

    An operation is about the rows of its targets that have not ended.
    """
    about = OperationTarget.objects.filter(
        operation__status__in=ACTIVE,
        operation__kind__in=(UNLOAD, DELETE, REMOVE),
        operation__element=OuterRef("model_name"),
        node_id=OuterRef("node_id"),
    ).exclude(status__in=targets.ENDED)
    index = Cast(KeyTextTransform("replica_index", "operation__payload"), IntegerField())
    its_own = about.annotate(index=index).filter(Q(index=None) | Q(index=OuterRef("replica_index")))
    return Q(~Exists(its_own))
