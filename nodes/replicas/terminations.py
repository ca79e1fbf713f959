"""Replicas that go for good without an operation: evicted, replaced, lost, or serving the wrong model.

They leave the picks at once. A controller stops their engines as soon as no request runs there, at the latest
at the deadline (`stops.py`). A lost one drains: it serves again if its engine answers when the controller
comes.
"""

from collections.abc import Collection
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from localai_cluster.kit import clock, conf
from nodes.models import ModelSchedulingConfig, NodeModel, OwnerKind, Phase, PhaseReason
from nodes.replicas import engines, statements
from nodes.replicas.engines import Engine
from nodes.replicas.states import REPORTED_REASONS, ReplicaEvent
from operations.changes import events


def evict(ids: Collection[UUID], *, now: datetime, are_busy: bool = False) -> None:
    """Terminate these locked replicas for a load that takes their memory. Requests that run there end."""
    deadline = _requests_end(now) if are_busy else now
    _terminate(ids, ReplicaEvent.EVICTED, PhaseReason.EVICTED, deadline=deadline, now=now)


def replace(ids: Collection[UUID], *, now: datetime) -> None:
    """Terminate these locked replicas of a former definition. Requests that run there end."""
    _terminate(ids, ReplicaEvent.REPLACED, PhaseReason.REPLACED, deadline=_requests_end(now), now=now)


def _requests_end(now: datetime) -> datetime:
    return now + timedelta(seconds=conf.cluster().request_timeout)


def lose_all(ids: Collection[UUID], *, now: datetime) -> None:
    """Take these locked replicas, which did not answer, out of the picks without waiting for requests."""
    _terminate(ids, ReplicaEvent.LOST, PhaseReason.LOST, deadline=now, now=now)


def _terminate(
    ids: Collection[UUID], event: ReplicaEvent, reason: PhaseReason, *, deadline: datetime, now: datetime
) -> None:
    rows = NodeModel.objects.filter(pk__in=ids)
    columns = {**engines.CONTROLLERS, **engines.drain_until(deadline)}
    engines.apply_event(rows, event, **columns, reason=reason, updated_at=now)
    events.notify(events.NODES, *map(str, rows.values_list("node_id", flat=True).distinct()))


async def lose(
    database: statements.StatementRunner,
    replica_id: UUID,
    address: str,
    *,
    reason: PhaseReason = PhaseReason.LOST,
) -> bool:
    """Take a replica that did no work out of the picks: exactly the row that was picked.

    For the hot path, which has no ORM; return True if it was in the picks.
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


def restore_lost(engine: Engine) -> bool:
    """Return a lost replica whose engine answers to the picks, unless somebody else has taken it over."""
    rows = NodeModel.objects.filter(
        pk=engine.id, reason=PhaseReason.LOST, owner_kind=OwnerKind.CONTROLLERS, stop_attempts=0
    )
    with transaction.atomic():
        returned = engines.apply_event(rows, ReplicaEvent.RETURNED, **engines.SERVES)
        if returned:
            events.notify(events.NODES, str(engine.node_id))
    return bool(returned)


def overdue_stops(*, now: datetime) -> list[NodeModel]:
    """Return the replicas without an operation whose stop stays unconfirmed past its deadline, with nodes."""
    rows = NodeModel.objects.filter(
        phase=Phase.STOPPING, owner_kind=OwnerKind.CONTROLLERS, reason__in=REPORTED_REASONS, deadline__lte=now
    ).exclude(stop_error="")
    return list(rows.select_related("node").order_by("id"))


def lock_serving(replica_id: UUID) -> NodeModel | None:
    """Return the replica, locked, if it serves. Needs a transaction."""
    return NodeModel.objects.loaded().filter(pk=replica_id).select_for_update(of=("self",)).first()


def lock_idle(replica_id: UUID, *, since: datetime) -> NodeModel | None:
    """Return the replica, locked, if it serves and nothing ran on it after `since`. Needs a transaction.

    No request comes and no other one takes it out before that ends.
    """
    rows = NodeModel.objects.loaded().filter(pk=replica_id, in_flight=0).select_for_update(of=("self",))
    row = rows.select_related("node").first()
    return row if row is not None and row.idle_since <= since else None


def has_other_replica(row: NodeModel) -> bool:
    """Return True if requests find another replica of its model."""
    return NodeModel.objects.of(row.model_name).reached().exclude(pk=row.pk).exists()


def keeps_minimum(row: NodeModel) -> bool:
    """Return True if the rule of its model, locked, has enough serving replicas without this locked one.

    An eviction counts under the same lock, so the two never take the last ones together.
    """
    rules = ModelSchedulingConfig.objects.filter(model_name=row.model_name).select_for_update(no_key=True)
    least = rules.values_list("min_replicas", flat=True).first() or 0
    return NodeModel.objects.of(row.model_name).reached().exclude(pk=row.pk).count() >= max(least, 1)
