"""Seeded operations: installs on one node and on many, loads, waiting and failing operations.

They progress by the ledger's own verbs, so that real events are published. Each lane has one key: when its
operation ends, the next one follows, and a failure is superseded. A controller that runs in parallel never
gets an operation, because an operation is admitted and claimed in the same transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from uuid import UUID

from django.db import transaction

from localai_cluster.kit.leases import Attempt, LeaseLost
from operations.ledger import admission, attempts
from operations.ledger.admission import OperationRequest, Requester
from operations.ledger.progress import Tick, record
from operations.models import Event, Operation, OperationTarget, TargetStatus
from tests.support.seeding.nodes import BACKENDS, GIB, MODELS

OWNER = "seeding"
LEASE = 24 * 3600.0
LONG_AGO = timedelta(days=3650)
"""Age that puts seeded operations first in the order of claims."""
MANY = 13
"""Nodes of an install on many nodes."""
SPEED = 0.04
"""Maximum fraction of an operation's bytes that one tick moves."""

Place = tuple[UUID, str]


@dataclass
class Lane:
    """One key and its current operation."""

    request: OperationRequest
    total: int
    waits: bool = False
    fails: bool = False
    operation: Operation | None = None
    done: float = 0.0
    ended: list[UUID] = field(default_factory=list)
    """Completed targets."""


def lanes(count: int, places: list[Place], random: Random) -> list[Lane]:
    """Return `count` lanes over these nodes; about a tenth of them operate on many nodes at once."""
    return [_lane(number, places, random) for number in range(count)]


def _lane(number: int, places: list[Place], random: Random) -> Lane:
    total = random.randint(1, 12) * GIB // 4
    waits, fails = number % 10 == 9, number % 25 == 4
    node = places[number % len(places)]
    if number % 12 == 0 and len(places) >= MANY:
        backend = random.choice(BACKENDS)
        targets = tuple(random.sample(places, MANY))
        request = OperationRequest(
            kind="backend_install",
            key=f"seeded:{number}",
            element=backend,
            by=Requester("anna"),
            targets=targets,
        )
    elif number % 5 == 1:
        model = f"{random.choice(MODELS)}-{number}"
        request = OperationRequest(
            kind="model_load", key=f"model:{model}#0", element=model, by=Requester("api key batch"), node=node
        )
    else:
        backend = f"local@{BACKENDS[number % len(BACKENDS)]}"
        request = OperationRequest(
            kind="backend_install",
            key=f"node:{node[0]}:{backend}:{number}",
            element=backend,
            by=Requester("anna"),
            node=node,
        )
    return Lane(request, total, waits=waits, fails=fails)


def begin(lane: Lane, random: Random, now: datetime) -> None:
    """Begin the lane's next operation, claimed or waiting."""
    with transaction.atomic():
        admitted = admission.admit(lane.request, now=now).operation
        Operation.objects.filter(pk=admitted.pk).update(next_attempt_at=now - LONG_AGO)
        claimed = attempts.claim(OWNER, now=now, lease=LEASE, limit=1)
        lane.operation = next((one for one in claimed if one.pk == admitted.pk), None)
        if lane.operation is not None and lane.waits:
            attempts.put_back(
                lane.operation.id,
                lane.operation.fence,
                Event.WAIT,
                now=now,
                until=now + timedelta(hours=1),
                reason=f"node {lane.request.node[1] if lane.request.node else 'arc-004'} is offline",
            )
            lane.operation = None
    lane.done, lane.ended = random.uniform(0, 0.5), []


def move(lanes: Sequence[Lane], random: Random, now: datetime) -> None:
    """Tick the operations of these lanes, or end them and begin the next ones.

    The ticks are written together, as an executor writes those of its operations.
    """
    reports: dict[Attempt, list[Tick]] = {}
    for lane in lanes:
        if lane.operation is None:
            continue
        lane.done += random.uniform(0.1, 1.0) * SPEED
        if lane.done >= 1 or (lane.fails and lane.done > 0.6):
            try:
                _end(lane, now)
                begin(lane, random, now)
            except LeaseLost:
                lane.operation = None  # somebody has cancelled it
            continue
        tick = _many(lane, lane.operation, random) if lane.request.targets else _one(lane)
        reports[lane.operation.id, lane.operation.fence] = [tick]
    lost = record(reports, now=now)
    for lane in lanes:
        if lane.operation is not None and (lane.operation.id, lane.operation.fence) in lost:
            lane.operation = None


def _one(lane: Lane) -> Tick:
    return _tick(lane, lane.done, lane.request.node)


def _many(lane: Lane, operation: Operation, random: Random) -> Tick:
    """Report that the first targets are completed, some download, the rest wait: "7 of 13 nodes"."""
    targets = lane.request.targets
    through = int(lane.done * len(targets))
    fresh = [node_id for node_id, _ in targets[:through] if node_id not in lane.ended]
    OperationTarget.objects.filter(operation=operation, node_id__in=fresh).update(
        status=TargetStatus.SUCCESS,
        percentage=100,
        phase="",
        current_bytes=lane.total,
        total_bytes=lane.total,
    )
    lane.ended += fresh
    node = random.choice(targets[through : through + 3])
    tick = _tick(lane, lane.done * len(targets) - through, node)
    return _named(tick, f"{through} of {len(targets)} nodes done", 100 * lane.done)


def _named(tick: Tick, message: str, percentage: float) -> Tick:
    return Tick(**{**tick.__dict__, "message": message, "percentage": percentage})


def _tick(lane: Lane, share: float, node: Place | None) -> Tick:
    share = min(max(share, 0.0), 1.0)
    return Tick(
        phase="downloading",
        message="lib/libengine.so",
        current_bytes=int(share * lane.total),
        total_bytes=lane.total,
        percentage=100 * share,
        file_name="lib/libengine.so",
        node_id=node[0] if node else None,
        node_name=node[1] if node else "",
    )


def _end(lane: Lane, now: datetime) -> None:
    assert lane.operation is not None
    event = Event.FAIL if lane.fails else Event.COMPLETE
    error = "cannot install: no space left on /var/lib/local-ai/backends" if lane.fails else ""
    attempts.finish(lane.operation.id, lane.operation.fence, event, now=now, error=error)
    # One failure of a lane is enough; after it the lane goes on.
    lane.fails = False
