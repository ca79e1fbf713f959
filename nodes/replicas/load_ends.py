"""The ends of loads that publish no replica: the slot is free at once, or when its engine has ended."""

from datetime import datetime

from django.db import transaction
from django.db.models import Q

from nodes.models import BEING_LOADED, LOADING_PHASES, NodeModel, Phase, PhaseReason
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import lifecycle, retire
from nodes.replicas.lifecycle import AttemptId, Engine
from nodes.replicas.slots import Slot
from nodes.replicas.states import ReplicaEvent
from operations.changes import events


def end_attempt(slot: Slot, *, attempt: AttemptId, now: datetime) -> Engine | None:
    """End an attempt without a replica; return its engine if it may have one, which is to be stopped now."""
    with transaction.atomic():
        ended = _end_loads(NodeModel.objects.filter(lifecycle.of_attempt(attempt), pk=slot.id), now)
    return next((lifecycle.engine_of(row) for row in ended if row.phase == Phase.STOPPING), None)


def end_abandoned_loads(model_name: str | None = None, *, now: datetime) -> list[NodeModel]:
    """End the loads, of one model or all, whose attempt does not run any more or is too old; return their
    rows.

    A killed attempt leaves its row, and so does one whose reservation was committed after its operation was
    cancelled. Rows that may have an engine are stopped by the controllers.
    """
    rows = NodeModel.objects.all() if model_name is None else NodeModel.objects.of(model_name)
    abandoned = rows.filter(Q(deadline__lte=now) | ~Q(lifecycle.has_running_attempt()))
    if not abandoned.filter(phase__in=LOADING_PHASES).exists():
        return []
    with transaction.atomic():
        return _end_loads(abandoned.filter(state__in=BEING_LOADED), now)


def _end_loads(loads: NodeModelQuerySet, now: datetime) -> list[NodeModel]:
    """Free the slots of these loads, and have the engines stopped that may exist. Needs a transaction."""
    rows = list(loads.order_by("id").select_for_update(of=("self",)).select_related("node"))
    started = [row for row in rows if row.phase == Phase.STARTING]
    lifecycle.apply_event(
        NodeModel.objects.filter(pk__in=[row.pk for row in started]),
        ReplicaEvent.LOAD_ENDED,
        **lifecycle.CONTROLLERS,
        **lifecycle.stop_from(now),
        reason=PhaseReason.LOAD_FAILED,
    )
    for row in started:
        row.phase, row.reason = Phase.STOPPING, PhaseReason.LOAD_FAILED
    retire.end_rows([row for row in rows if row not in started])
    if started:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in started}))
    return rows
