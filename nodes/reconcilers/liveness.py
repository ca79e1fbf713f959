"""The liveness pass: observe, plan (pure), apply.

R5.2 to R5.8 with their "Port:" lines: heartbeat age alone decides; pending nodes are not judged; a silent
node goes offline, also a draining or unhealthy one; its replicas stop counting.

A node that sends a heartbeat after it fell silent recovers through that heartbeat, not here. A node that was
marked unhealthy, because nothing listened for its commands, is healthy again after a heartbeat and a reply on
the bus. A heartbeat alone proves nothing about the bus, and work would be retried there endlessly (H7).

A web process that stopped refreshing its row is dead; its running requests are subtracted from the replicas.
Nodes that fall silent in masses are held for some time, while a controller pings each
of them on the bus.
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
from nodes.registry import change, lifecycle, mass_silence
from nodes.replicas import statements

SMALLEST_FLEET = 20
"""Number of nodes, the silent ones included, from which on silent nodes may be held."""
HEALING = timedelta(seconds=30)
"""Three heartbeat intervals of ten seconds."""
NEARLY = 0.75
"""Fraction of the limit after which a node is nearly silent: four heartbeats of ten seconds are missing."""


@dataclass(frozen=True)
class MassHold:
    """The start and the end of a hold on silent nodes."""

    since: datetime
    until: datetime


@dataclass(frozen=True)
class Silence:
    """The numbers of nodes beyond the limit, of nearly silent nodes, and of all nodes."""

    silent: int
    nearly: int
    of: int


def decide_hold(counts: Silence, hold: MassHold | None, now: datetime, seconds: float) -> MassHold | None:
    """Return the hold from now on, or None; `seconds` is the duration of a new one, 0 = holds are off.

    An expired hold is not followed by another one in the same pass: its nodes are given up. While a cut
    heals, the nodes are heard one after another, so the last few are held for `HEALING` longer.
    """
    if not counts.silent or not seconds:
        return None
    massive = counts.of >= SMALLEST_FLEET and (counts.silent + counts.nearly) * 3 > counts.of
    if hold is None:
        return MassHold(now, now + timedelta(seconds=seconds)) if massive else None
    if not massive:
        hold = MassHold(hold.since, min(hold.until, now + HEALING))
    return hold if now < hold.until else None


@dataclass(frozen=True)
class Limits:
    """Seconds of silence after which a node or a web process counts as gone."""

    node: float
    web: float
    hold: float = 0.0
    """Seconds of the mass-disruption hold; 0 = no hold."""


@dataclass(frozen=True)
class NodeSigns:
    """Signs of life of a node: its last heartbeat (None = never), and since when it is marked unhealthy.

    `answered_at` is the time of the last request on the bus that it replied to.
    """

    id: UUID
    at: datetime | None
    unhealthy_at: datetime | None = None
    answered_at: datetime | None = None

    @property
    def is_back(self) -> bool:
        """True if a heartbeat came after the mark."""
        return self.at is not None and self.unhealthy_at is not None and self.at > self.unhealthy_at

    @property
    def hears(self) -> bool:
        """True if it has replied on the bus after the mark."""
        marked = self.unhealthy_at
        return marked is not None and self.answered_at is not None and self.answered_at > marked


@dataclass(frozen=True)
class WebSigns:
    """A web process: its last sign of life, and the start of its present uninterrupted run."""

    id: UUID
    at: datetime
    hearing_since: datetime


@dataclass(frozen=True)
class Observed:
    """Approved nodes that are not offline, web processes, and the active mass-disruption hold."""

    nodes: Sequence[NodeSigns]
    processes: Sequence[WebSigns]
    hold: MassHold | None = None


@dataclass(frozen=True)
class Plan:
    """The nodes and web processes to declare gone, the recovered nodes, and the silent nodes on hold."""

    nodes: list[UUID]
    processes: list[UUID]
    recovered: list[UUID] = field(default_factory=list)
    doubtful: list[UUID] = field(default_factory=list)
    """Nodes with heartbeats but no reply on the bus yet; they are queried."""
    held: list[UUID] = field(default_factory=list)
    of: int = 0
    """Number of observed nodes."""
    hold: MassHold | None = None
    released: bool = False
    """True if the active hold is over."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to apply."""
        changes = self.nodes or self.processes or self.recovered or self.doubtful or self.held
        return not (changes or self.released)


def plan_liveness(observed: Observed, now: datetime, limits: Limits) -> Plan:
    """R5.4: silence strictly longer than the limit, counted only while a web process could hear the node.

    After an outage of the web processes or the database every node looks silent; none is judged before a web
    process has listened for a full limit (I12).
    """
    web, node = timedelta(seconds=limits.web), timedelta(seconds=limits.node)
    dead = [process.id for process in observed.processes if now - process.at > web]
    living = (process for process in observed.processes if process.id not in dead)
    since = min((process.hearing_since for process in living), default=now)
    ages = {heard.id: now - max(heard.at or since, since) for heard in observed.nodes}
    silent = [id for id, age in ages.items() if age > node]
    nearly = sum(node * NEARLY < age <= node for age in ages.values())
    hold = decide_hold(Silence(len(silent), nearly, len(ages)), observed.hold, now, limits.hold)
    silent_ids = frozenset(silent)
    returned = [heard for heard in observed.nodes if heard.is_back and heard.id not in silent_ids]
    return Plan(
        nodes=[] if hold else silent,
        processes=dead,
        recovered=[heard.id for heard in returned if heard.hears],
        doubtful=[heard.id for heard in returned if not heard.hears],
        held=silent if hold else [],
        of=len(ages),
        hold=hold,
        released=observed.hold is not None and hold is None,
    )


_HEARD = ("id", "last_heartbeat", "unhealthy_at", "inventory_at")


def observe() -> Observed:
    """Read the snapshot in three queries."""
    held = mass_silence.current_hold()
    nodes = BackendNode.objects.filter(approved_at__isnull=False, offline_at__isnull=True)
    return Observed(
        nodes=[NodeSigns(*row) for row in nodes.values_list(*_HEARD)],
        processes=[
            WebSigns(*row) for row in WebProcess.objects.values_list("id", "seen_at", "hearing_since")
        ],
        hold=MassHold(held.since, held.until) if held else None,
    )


def apply(plan: Plan, now: datetime, limits: Limits) -> tuple[int, int]:
    """Apply the plan where it still holds; return how many are gone (nodes, processes)."""
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
        lifecycle.mark_recovered(plan.recovered, actor=actor, now=now)
        nodes_gone = lifecycle.mark_silent(plan.nodes, limit=limits.node, actor=actor, now=now)
        return nodes_gone, _drop_dead_processes(plan.processes, locked, now, limits.web)


def _lock(plan: Plan) -> list[UUID]:
    """Lock all rows that the plan changes; return the replicas.

    Nodes by id, then replicas by id, as heartbeats and the hot path do. Locking in steps would hold a later
    replica while it waits for an earlier one.
    """
    change.lock_in_order(BackendNode.objects.filter(pk__in=[*plan.nodes, *plan.recovered]))
    used = ReplicaUse.objects.filter(process_id__in=plan.processes).values("replica_id")
    touched = NodeModel.objects.filter(Q(node_id__in=plan.nodes) | Q(pk__in=used))
    return list(touched.order_by("id").select_for_update(of=("self",)).values_list("pk", flat=True))


def _drop_dead_processes(ids: Sequence[UUID], locked: Sequence[UUID], now: datetime, limit: float) -> int:
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


def recount() -> int:
    """Sets the counts that are not the sum of their shares; answers how many. Two statements."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statements.LOCK_MISCOUNTED)
        ids = [id for (id,) in cursor.fetchall()]
        if not ids:
            return 0
        cursor.execute(statements.RECOUNT, {"ids": ids})
        return int(cursor.rowcount)
