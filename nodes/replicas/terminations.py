"""Replicas that terminate without an operation: evicted, replaced, lost, or serving the wrong model.

No request picks them any more. A controller stops their engines as soon as no request runs on them, at the
latest at the deadline (`stops.py`). A lost replica drains: it serves again if its engine answers the
controller's check.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from localai_cluster.kit import clock, conf
from nodes.models import ModelSchedulingConfig, NodeModel, OwnerKind, Phase, PhaseReason
from nodes.replicas import engines, statements
from nodes.replicas.states import REPORTED_STOP_REASONS, ReplicaEvent
from operations.changes import events


def evict(ids: Collection[UUID], *, now: datetime, are_busy: bool = False) -> None:
    """Terminate these locked replicas for a load that takes their memory.

    Their running requests may finish.
    """
    deadline = _requests_end(now) if are_busy else now
    _terminate(ids, ReplicaEvent.EVICTED, PhaseReason.EVICTED, deadline=deadline, now=now)


def replace(ids: Collection[UUID], *, now: datetime) -> None:
    """Terminate these locked replicas of an earlier definition revision.

    Their running requests may finish.
    """
    _terminate(ids, ReplicaEvent.REPLACED, PhaseReason.REPLACED, deadline=_requests_end(now), now=now)


def _requests_end(now: datetime) -> datetime:
    return now + timedelta(seconds=conf.cluster().request_timeout)


def lose_all(ids: Collection[UUID], *, now: datetime) -> None:
    """Drain these locked replicas at once, because they did not answer."""
    _terminate(ids, ReplicaEvent.LOST, PhaseReason.LOST, deadline=now, now=now)


def _terminate(
    ids: Collection[UUID], event: ReplicaEvent, reason: PhaseReason, *, deadline: datetime, now: datetime
) -> None:
    rows = NodeModel.objects.filter(pk__in=ids)
    columns = {**engines.CONTROLLER_OWNER_COLUMNS, **engines.drain_columns(deadline)}
    engines.apply_event(rows, event, **columns, reason=reason, updated_at=now)
    events.notify(events.NODES, *map(str, rows.values_list("node_id", flat=True).distinct()))


async def lose(
    database: statements.StatementRunner, replica_id: UUID, address: str, *, reason: PhaseReason
) -> bool:
    """Drain a replica that did not answer a request; return True if it was serving.

    Only the row that was picked changes. The function is for the hot path, which has no ORM.
    """
    now = clock.now()
    values = {
        "replica": replica_id,
        "address": address,
        "phase": Phase.DRAINING if reason == PhaseReason.LOST else Phase.TERMINATING,
        "reason": reason,
        "deadline": now + timedelta(seconds=conf.cluster().unload_grace),
        "now": now,
        "channel": events.NODES,
    }
    return bool(await database.fetch_rows(statements.LOSE, values))


def restore_lost(engine: NodeModel) -> bool:
    """Return a lost replica to service because its engine answers, unless an operation owns it now."""
    rows = NodeModel.objects.filter(
        pk=engine.id, reason=PhaseReason.LOST, owner_kind=OwnerKind.CONTROLLERS, stop_attempts=0
    )
    with transaction.atomic():
        returned = engines.apply_event(rows, ReplicaEvent.RETURNED, **engines.SERVING_COLUMNS)
        if returned:
            events.notify(events.NODES, str(engine.node_id))
    return bool(returned)


def overdue_stops(*, now: datetime) -> list[NodeModel]:
    """Return replicas, with their nodes, whose stop is unconfirmed past its deadline and has no operation."""
    rows = NodeModel.objects.filter(
        phase=Phase.STOPPING,
        owner_kind=OwnerKind.CONTROLLERS,
        reason__in=REPORTED_STOP_REASONS,
        deadline__lte=now,
    ).exclude(stop_error="")
    return list(rows.select_related("node").order_by("id"))


def lock_serving(replica_id: UUID) -> NodeModel | None:
    """Lock and return the replica if it serves. Needs a transaction."""
    return NodeModel.objects.loaded().filter(pk=replica_id).select_for_update(of=("self",)).first()


def lock_idle(replica_id: UUID, *, idle_since: datetime) -> NodeModel | None:
    """Lock and return the replica if it serves and had no request after `idle_since`. Needs a transaction.

    Until the transaction ends, no request picks the replica and no other transaction drains it.
    """
    rows = NodeModel.objects.loaded().filter(pk=replica_id, in_flight=0).select_for_update(of=("self",))
    row = rows.select_related("node").first()
    return row if row is not None and row.idle_since <= idle_since else None


def has_other_replica(row: NodeModel) -> bool:
    """Return True if requests can reach another replica of the model."""
    return NodeModel.objects.of(row.model_name).reached().exclude(pk=row.pk).exists()


def keeps_minimum(row: NodeModel) -> bool:
    """Return True if the model has enough serving replicas for its rule without this locked replica.

    The function locks the rule. Evictions count replicas under the same lock, so an eviction and the caller
    never take the last replicas together.
    """
    rules = ModelSchedulingConfig.objects.filter(model_name=row.model_name).select_for_update(no_key=True)
    least = rules.values_list("min_replicas", flat=True).first() or 0
    return NodeModel.objects.of(row.model_name).reached().exclude(pk=row.pk).count() >= max(least, 1)
