"""The liveness pass: observe, plan (pure), apply.

R5.2 to R5.8 with their "Port:" lines: heartbeat age alone decides; pending nodes are left alone; a silent
node goes offline, draining and unhealthy ones too; its replicas stop counting.
A node that was heard after it fell silent comes back by its own heartbeat, not here. One that was marked
unhealthy, because nothing listened for its commands, is healthy again once it was heard and has answered a
question on the bus. A heartbeat alone proves nothing of the bus, and work would be tried there in a circle
(H7).
A web process that stopped refreshing its row is dead; what it carried is subtracted from the replicas. Nodes
that fall silent in masses are kept for some time (`brake.py`), and a controller asks each of them on the bus.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Q

from localai_cluster.accounts.actors import task
from nodes.backends import inventory
from nodes.models import BackendNode, NodeModel, ReplicaUse, WebProcess
from nodes.reconcilers.brake import NEARLY, Hold, Silence, decide
from nodes.registry import mass_silence, services
from nodes.replicas import statements


@dataclass(frozen=True)
class Limits:
    """Silence, in seconds, after which something is gone."""

    node: float
    web: float
    hold: float = 0.0
    """How long nodes that fell silent together are kept; 0 = not at all."""


@dataclass(frozen=True)
class Heard:
    """When a node gave its last sign of life, None = never, and since when it is marked unhealthy.

    `answered_at` is the time of the last question on the bus that it has answered.
    """

    id: UUID
    at: datetime | None
    unhealthy_at: datetime | None = None
    answered_at: datetime | None = None

    @property
    def is_back(self) -> bool:
        """Whether it was heard after it had been marked."""
        return self.at is not None and self.unhealthy_at is not None and self.at > self.unhealthy_at

    @property
    def hears(self) -> bool:
        """Whether it has answered since."""
        marked = self.unhealthy_at
        return marked is not None and self.answered_at is not None and self.answered_at > marked


@dataclass(frozen=True)
class Listener:
    """A web process: its last sign of life, and since when it has been there without a gap."""

    id: UUID
    at: datetime
    hearing_since: datetime


@dataclass(frozen=True)
class Observed:
    """Approved nodes that are not offline, web processes, and the hold that stands."""

    nodes: Sequence[Heard]
    processes: Sequence[Listener]
    hold: Hold | None = None


@dataclass(frozen=True)
class Plan:
    """What is to be declared gone, which nodes are well again, and which silent ones are kept."""

    nodes: list[UUID]
    processes: list[UUID]
    recovered: list[UUID] = field(default_factory=list)
    doubtful: list[UUID] = field(default_factory=list)
    """Nodes that are back, but have not answered on the bus yet: they are to be asked."""
    held: list[UUID] = field(default_factory=list)
    of: int = 0
    """How many nodes were observed."""
    hold: Hold | None = None
    released: bool = False
    """The hold that stood is over."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        news = self.nodes or self.processes or self.recovered or self.doubtful or self.held
        return not (news or self.released)


def plan_liveness(observed: Observed, now: datetime, limits: Limits) -> Plan:
    """R5.4: silence strictly longer than the limit, counted only while somebody could have heard.

    After an outage of the web processes or the database every node looks silent; none is judged before a web
    process has listened for a whole limit (I12).
    """
    web, node = timedelta(seconds=limits.web), timedelta(seconds=limits.node)
    dead = [process.id for process in observed.processes if now - process.at > web]
    since = min((one.hearing_since for one in observed.processes if one.id not in dead), default=now)
    ages = {one.id: now - max(one.at or since, since) for one in observed.nodes}
    silent = [id for id, age in ages.items() if age > node]
    nearly = sum(node * NEARLY < age <= node for age in ages.values())
    hold = decide(Silence(len(silent), nearly, len(ages)), observed.hold, now, limits.hold)
    gone = frozenset(silent)
    back = [one for one in observed.nodes if one.is_back and one.id not in gone]
    return Plan(
        nodes=[] if hold else silent,
        processes=dead,
        recovered=[one.id for one in back if one.hears],
        doubtful=[one.id for one in back if not one.hears],
        held=silent if hold else [],
        of=len(ages),
        hold=hold,
        released=observed.hold is not None and hold is None,
    )


_HEARD = ("id", "last_heartbeat", "unhealthy_at", "inventory_at")


def observe() -> Observed:
    """Three queries."""
    held = mass_silence.standing()
    nodes = BackendNode.objects.filter(approved_at__isnull=False, offline_at__isnull=True)
    return Observed(
        nodes=[Heard(*row) for row in nodes.values_list(*_HEARD)],
        processes=[
            Listener(*row) for row in WebProcess.objects.values_list("id", "seen_at", "hearing_since")
        ],
        hold=Hold(held.since, held.until) if held else None,
    )


def apply(plan: Plan, now: datetime, limits: Limits) -> tuple[int, int]:
    """Carries the plan out, as far as it is still true; answers how many are gone (nodes, processes)."""
    if plan.is_empty:
        return 0, 0
    actor = task("liveness")
    if in_question := [*plan.doubtful, *plan.held]:
        inventory.wake(in_question, older_than=0.0, now=now)
    with transaction.atomic():
        if plan.released:
            mass_silence.release()
        if plan.hold:
            hold = plan.hold
            mass_silence.hold(plan.held, since=hold.since, until=hold.until, of=plan.of, actor=actor, now=now)
        locked = _lock(plan)
        services.recovered(plan.recovered, actor=actor, now=now)
        gone = services.fell_silent(plan.nodes, limit=limits.node, actor=actor, now=now)
        return gone, _processes_dead(plan.processes, locked, now, limits.web)


def _lock(plan: Plan) -> list[UUID]:
    """All rows that the plan touches: nodes by id, then replicas by id, as heartbeats and the hot path do.

    In steps it would hold a later replica while it waits for an earlier one. Answers the replicas.
    """
    services.lock_in_order(BackendNode.objects.filter(pk__in=[*plan.nodes, *plan.recovered]))
    used = ReplicaUse.objects.filter(process_id__in=plan.processes).values("replica_id")
    touched = NodeModel.objects.filter(Q(node_id__in=plan.nodes) | Q(pk__in=used))
    return list(touched.order_by("id").select_for_update(of=("self",)).values_list("pk", flat=True))


def _processes_dead(ids: Sequence[UUID], locked: Sequence[UUID], now: datetime, limit: float) -> int:
    if not ids:
        return 0
    parameters: dict[str, Any] = {
        "ids": list(ids),
        "locked": list(locked),
        "since": now - timedelta(seconds=limit),
        "now": now,
    }
    with connection.cursor() as cursor:
        cursor.execute(statements.DROP_DEAD_PROCESSES, parameters)
        (dead,) = cursor.fetchone()
    return int(dead)
