"""Drains of replicas: no request picks a draining replica. Unless its engine is stopped, it serves again.

A row belongs to the last operation that drained it, and this operation stops the engine. If the operation
ends before, the controllers return the replica to service or stop the engine (`stops.py`).
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
from nodes.replicas import checks, engines
from nodes.replicas.states import ReplicaEvent
from operations import targets
from operations.changes import events
from operations.models import ACTIVE, OperationTarget


@dataclass(frozen=True)
class UpgradeDrain:
    """Progress of a drain before an upgrade: the number of running requests, or what prevents the drain."""

    running: int = 0
    last_of: tuple[str, ...] = ()
    """Models that would lose their last serving replica; the drain then does not begin."""


def last_replicas(backend: str, node_ids: Collection[UUID]) -> dict[UUID, set[str]]:
    """Return, by node, the models of the backend that only this node serves."""
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
    node_id: UUID, backend: str, *, intent_id: UUID, confirmed: Collection[str] | None, deadline: datetime
) -> UpgradeDrain:
    """Drain the node's replicas of this backend; drain none if a model would lose its last replica.

    `confirmed` are models that may lose it; None = any. All serving rows of the models are locked, so two
    nodes with the last two replicas of a model never drain both. The node's draining rows are locked too:
    another process may be returning them to service. Requests on replicas that an unload or eviction drains
    count as running.
    """
    mine = NodeModel.objects.filter(node_id=node_id).of_backend(backend)
    with transaction.atomic():
        models = dict(mine.filter(phase__in=(Phase.SERVING, Phase.DRAINING)).values_list("pk", "model_name"))
        concerned = Q(state=ReplicaState.LOADED, model_name__in=set(models.values())) | Q(pk__in=models)
        locked = NodeModel.objects.filter(concerned).order_by("id").select_for_update(of=("self",))
        rows = [row for row in locked.select_related("node") if row.state == ReplicaState.LOADED]
        elsewhere = {r.model_name for r in rows if r.node_id != node_id and r.node.status == "healthy"}
        stopping = set(mine.loaded().values_list("pk", flat=True))
        draining = [row for row in rows if row.pk in stopping]
        last_of = {row.model_name for row in draining} - elsewhere - set(confirmed or ())
        if last_of and confirmed is not None:
            return UpgradeDrain(last_of=tuple(sorted(last_of)))
        if draining:
            engines.apply_event(
                NodeModel.objects.filter(pk__in=[row.pk for row in draining]),
                ReplicaEvent.DRAINED,
                **engines.owner_columns(OwnerKind.INTENT, intent_id),
                **engines.drain_columns(deadline),
                reason=PhaseReason.UPGRADE,
            )
            events.notify(events.NODES, str(node_id))
    out = mine.filter(phase__in=_DRAIN_PHASES).aggregate(running=Sum("in_flight"))
    return UpgradeDrain(out["running"] or 0)


def end_upgrade(intent_id: UUID, fence: int, is_suspect: bool = False) -> None:
    """End the attempt at an upgrade: its replicas whose engines still run serve again.

    A replica that a later attempt owns stays drained. With `is_suspect`, engines may have been stopped: they
    are checked at once, as after a worker's report of their end.
    """
    is_latest = Exists(PendingBackendOp.objects.filter(pk=intent_id, fence=fence))
    _return_drained(NodeModel.objects.filter(is_latest, owner_id=intent_id), is_suspect)


def return_without_upgrade() -> int:
    """Return drained replicas to service whose upgrade is not running any more; return their number.

    An upgrade may stop running because its controller died.
    """
    return _return_drained(
        NodeModel.objects.exclude(Exists(_active_upgrades().filter(pk=OuterRef("owner_id"))))
    )


def hand_to_upgrade(rows: Sequence[NodeModel]) -> set[UUID]:
    """Give these locked, draining rows to the upgrade that will stop their engines; return their ids."""
    kept: set[UUID] = set()
    busy = _active_upgrades().filter(node__in={row.node_id for row in rows}, spares_requests=True)
    for intent in busy if rows else ():
        mine = NodeModel.objects.filter(pk__in=[row.pk for row in rows], node_id=intent.node_id)
        ids = set(mine.of_backend(intent.backend).values_list("pk", flat=True))
        engines.apply_event(
            NodeModel.objects.filter(pk__in=ids),
            ReplicaEvent.HANDED_BACK,
            **engines.owner_columns(OwnerKind.INTENT, intent.pk),
            reason=PhaseReason.UPGRADE,
        )
        kept |= ids
    return kept


def _active_upgrades() -> QuerySet[PendingBackendOp]:
    # With `drain_until` and no lease, a controller died: its worker may be executing the command.
    at_it = Q(lease_until__isnull=False) | Q(unanswered_since__isnull=False) | Q(cancelled_at__isnull=False)
    at_it |= Q(drain_until__isnull=False)
    return PendingBackendOp.objects.filter(at_it)


def _return_drained(rows: NodeModelQuerySet, is_suspect: bool = False) -> int:
    draining = rows.filter(phase=Phase.DRAINING, owner_kind=OwnerKind.INTENT)
    with transaction.atomic():
        locked = list(draining.order_by("id").select_for_update(of=("self",)).values_list("pk", flat=True))
        # By a new statement: while this one waited for the locks, an upgrade may have begun.
        found = list(draining.filter(pk__in=locked)) if locked else []
        _return_to_picks(found, is_suspect)
    return len(found)


def _return_to_picks(rows: Sequence[NodeModel], is_suspect: bool = False) -> None:
    returned = NodeModel.objects.filter(pk__in=[row.pk for row in rows])
    suspicion = {"exit_reported": True, "checked_at": None} if is_suspect else {}
    engines.apply_event(returned, ReplicaEvent.RETURNED, **engines.SERVING_COLUMNS, **suspicion)
    if rows:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in rows}))
    if rows and is_suspect:
        events.notify(checks.CHANNEL, "")


UNLOAD_KIND, DELETE_KIND, REMOVE_DEFINITION_KIND = "model_unload", "model_delete", "definition_delete"
"""Kinds of operations that drain and stop replicas."""
UNLOADABLE_STATES = (ReplicaState.LOADED, ReplicaState.UNLOADING)
"""States of a replica in which it has an engine that an unload can stop."""
_DRAIN_PHASES = (Phase.DRAINING, Phase.TERMINATING)
_DRAIN_COLUMNS = ("id", "in_flight", "phase", "deadline")


def unloadable_replicas(
    model_name: str, *, node_id: UUID | None = None, index: int | None = None
) -> NodeModelQuerySet:
    """Return the replicas that an unload of the model stops: all, those on one node, or one."""
    rows = (
        NodeModel.objects.of(model_name)
        .filter(state__in=UNLOADABLE_STATES)
        .exclude(reason=PhaseReason.LOAD_FAILED)
    )
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
) -> list[NodeModel]:
    """Drain the replicas for an unload operation; return their rows from before.

    The operation takes over replicas that drain or terminate already; an earlier deadline of these stays.
    Needs a transaction. The number of statements is constant.
    """
    found = unloadable_replicas(model_name, index=index).filter(node_id__in=node_ids).order_by("id")
    rows = list(found.select_for_update(of=("self",)))
    serving = [row for row in rows if row.phase == Phase.SERVING]
    owner = engines.owner_columns(OwnerKind.OPERATION, operation_id)
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
        **engines.drain_columns(deadline),
        reason=PhaseReason.UNLOAD,
        updated_at=now,
    )
    events.notify(events.NODES, *sorted({str(row.node_id) for row in serving}))
    return rows


def advance_deadline(rows: NodeModelQuerySet, *, deadline: datetime) -> None:
    """Lower the deadline of these draining or terminating replicas to `deadline`; keep an earlier one."""
    rows.filter(phase__in=_DRAIN_PHASES, deadline__gt=deadline).update(deadline=deadline)


def running_requests(ids: Collection[UUID]) -> dict[UUID, tuple[int, datetime | None]]:
    """Return the number of running requests and the deadline of each unloading replica, by id.

    The deadline is None once the stop command has been sent.
    """
    rows = NodeModel.objects.filter(pk__in=ids, state=ReplicaState.UNLOADING).values_list(*_DRAIN_COLUMNS)
    return {id: (count, until if phase in _DRAIN_PHASES else None) for id, count, phase, until in rows}


def is_in_use(engine: NodeModel) -> bool:
    """Return True if the engine serves, or if it drains and requests may still be running on it."""
    return NodeModel.objects.filter(pk=engine.id, phase__in=(Phase.SERVING, *_DRAIN_PHASES)).exists()


def return_abandoned() -> list[NodeModel]:
    """Return replicas to service whose operation ended before it sent a stop; return their rows.

    If an upgrade is about to stop the engine, the upgrade gets the replica instead and returns it later.
    """
    abandoned = NodeModel.objects.filter(
        has_no_operation(), phase=Phase.DRAINING, owner_kind=OwnerKind.OPERATION
    )
    with transaction.atomic():
        rows = lock_free(abandoned.order_by("id"))
        kept = hand_to_upgrade(rows)
        back = [row for row in rows if row.pk not in kept]
        _return_to_picks(back)
    return back


def has_no_operation() -> Q:
    """Return a filter for rows that no active operation will stop: neither the owner nor an earlier one.

    An operation stops the rows of its targets that have not ended.
    """
    about = OperationTarget.objects.filter(
        operation__status__in=ACTIVE,
        operation__kind__in=(UNLOAD_KIND, DELETE_KIND, REMOVE_DEFINITION_KIND),
        operation__element=OuterRef("model_name"),
        node_id=OuterRef("node_id"),
    ).filter(status__in=targets.UNFINISHED)
    index = Cast(KeyTextTransform("replica_index", "operation__payload"), IntegerField())
    its_own = about.annotate(index=index).filter(Q(index=None) | Q(index=OuterRef("replica_index")))
    return Q(~Exists(its_own))
