"""Stops of engines: which ones are due, who sends them, and what follows until the worker confirms the end.

An unload stops its own engines. All others, also those that an ended operation has left, are claimed here by
one controller at a time. Each outcome names the row of the engine, so it says nothing about another engine
that has the same slot later.
"""

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Case, F, Q, Value, When

from localai_cluster.kit import backoff, names
from localai_cluster.kit.rows import claim_rows
from nodes.models import NodeModel, OwnerKind, Phase, PhaseReason
from nodes.replicas import drains, lifecycle, states
from nodes.replicas.lifecycle import Engine
from nodes.replicas.states import ReplicaEvent
from operations.changes import events

_LONGEST_ERROR = 240
_LONGEST_PAUSE = 300.0
_CLAIMED_FOR = timedelta(seconds=60)
"""Longer than one stop of one engine takes."""
_REACHABLE = ("healthy", "unhealthy", "draining")
"""The statuses of nodes whose worker can be sent a stop."""
_STOPPABLE = (Phase.STOPPING, Phase.DEPARTED)
_NO_UNLOADS = (PhaseReason.LOAD_FAILED, PhaseReason.NODE_LEFT)
"""The reasons of engines that no unload is about: they are no replicas."""


def claim_due(limit: int, *, now: datetime) -> list[Engine]:
    """Return engines whose stop is due and that no operation stops, for this caller alone."""
    is_quiet = Q(in_flight=0) | Q(deadline__lte=now)
    is_lost = Q(phase=Phase.DRAINING, owner_kind=OwnerKind.CONTROLLERS)
    is_departed = Q(phase=Phase.DEPARTED, node__status__in=_REACHABLE)
    due = ((Q(phase=Phase.TERMINATING) | is_lost) & is_quiet) | (
        (Q(phase=Phase.STOPPING) | is_departed) & (Q(next_stop_at__isnull=True) | Q(next_stop_at__lte=now))
    )
    is_free = Q(claimed_until__isnull=True) | Q(claimed_until__lte=now)
    is_left = Q(reason__in=_NO_UNLOADS) | drains.has_no_operation()
    engines = NodeModel.engines.filter(due, is_free, is_left).order_by("id")
    claimed = claim_rows(engines, limit=limit, **lifecycle.CONTROLLERS, claimed_until=now + _CLAIMED_FOR)
    return [lifecycle.engine_of(row) for row in claimed]


def record_sent(engine: Engine, *, now: datetime) -> bool:
    """Record that a stop is about to be sent; False when the engine has ended, serves or has departed."""
    first = now + states.REPORTED_AFTER
    deadline = Case(When(phase__in=_STOPPABLE, then=F("deadline")), default=Value(first))
    seen = NodeModel.engines if engine.phase == Phase.DEPARTED else NodeModel.objects
    engines = seen.filter(pk=engine.id)
    attempts = F("stop_attempts") + 1
    return bool(
        lifecycle.apply_event(engines, ReplicaEvent.STOP_SENT, stop_attempts=attempts, deadline=deadline)
    )


def is_due(engine: Engine) -> bool:
    """Return True while the end of the engine is not confirmed: nothing else has its slot."""
    return NodeModel.engines.filter(pk=engine.id, phase__in=_STOPPABLE).exists()


def record_failure(engine: Engine, error: str, *, now: datetime) -> None:
    """The engine may still run: keep the reason, and the time of the next stop."""
    with transaction.atomic():
        engines = NodeModel.engines.filter(pk=engine.id)
        row = engines.filter(phase__in=_STOPPABLE).select_for_update(of=("self",)).first()
        if row is None:
            return
        pause = backoff.delay(row.stop_attempts + 1, first=1.0, longest=_LONGEST_PAUSE)
        lifecycle.apply_event(
            engines,
            ReplicaEvent.STOP_FAILED,
            stop_error=names.plain(error[:_LONGEST_ERROR]),
            next_stop_at=now + timedelta(seconds=pause),
            claimed_until=None,
        )
        events.notify(events.NODES, str(row.node_id))
