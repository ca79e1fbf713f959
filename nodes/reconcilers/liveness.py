"""The liveness pass: observe, plan (pure), apply.

R5.2 to R5.8 with their "Port:" lines: heartbeat age alone decides; pending nodes are not judged; a silent
node goes offline, also a draining or unhealthy one; its replicas stop counting.

A node that sends a heartbeat after it fell silent recovers through that heartbeat, not here. A node that was
marked unhealthy, because nothing listened for its commands, is healthy again after a heartbeat and a reply on
the bus. A heartbeat alone proves nothing about the bus, and work would be retried there endlessly (H7).

A worker that was killed is detected sooner: a controller probes nodes on the bus whose heartbeat is late or
whose connection has ended (`BusProbes`). Several probes in a row that find no listener make the node
unhealthy, and offline once it is silent for `CLUSTER_NODE_GONE_AFTER`.

A web process that stopped refreshing its row is dead; its running requests are subtracted from the replicas.
Nodes that fall silent in masses are held for some time, while a controller pings each
of them on the bus.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import connection, transaction
from django.db.models import Count, F, Min, Q

from localai_cluster.accounts.actors import CONTROLLER, task
from localai_cluster.kit import clock, conf
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging.bus import Bus
from nodes.backends import inventory
from nodes.commands.commands import SETTLED_AFTER, Worker
from nodes.commands.outcomes import BusDown, NoResponders
from nodes.models import BackendNode, BusCredential, NodeModel, ReplicaUse, WebProcess
from nodes.registry import change, lifecycle, mass_silence
from nodes.replicas import statements
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

SMALLEST_FLEET = 20
"""Number of nodes, the silent ones included, from which on silent nodes may be held."""
HEALING_TIME = timedelta(seconds=30)
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
    heals, the nodes are heard one after another, so the last few are held for `HEALING_TIME` longer.
    """
    if not counts.silent or not seconds:
        return None
    massive = _is_massive(counts.silent + counts.nearly, counts.of)
    if hold is None:
        return MassHold(now, now + timedelta(seconds=seconds)) if massive else None
    if not massive:
        hold = MassHold(hold.since, min(hold.until, now + HEALING_TIME))
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
    """Apply the parts of the plan that still hold; return the numbers of lost nodes and processes."""
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


LATE = timedelta(seconds=12)
"""Silence from which a node is probed: one heartbeat of ten seconds is missing."""
PROBES = 4
"""Probes in a row without a listener that make a node unhealthy."""
MOST_PROBES = 64
"""Most probes in one pass of a controller."""
LONGEST_GAP = 10.0
"""Seconds between two probes after which they are not in a row: this process slept, or had no database."""
ANSWERED_FOR = 10.0
"""Seconds after a reply for which a node is not probed again."""
_PROBE_TIMEOUT, _GATHER = 2.0, 0.5


@dataclass(frozen=True)
class Absence:
    """Probes in a row that found no listener; monotonic times of the first and the last."""

    since: float
    last: float
    probes: int = 1

    def after(self, at: float) -> "Absence":
        """Return the absence after one more probe without a listener."""
        if at - self.last > LONGEST_GAP:
            return Absence(at, at)
        return Absence(self.since, at, self.probes + 1)


@dataclass(frozen=True)
class LateNode:
    """A node to probe: its last heartbeat, or its approval if that is later."""

    id: UUID
    name: str
    heard_at: datetime
    is_unhealthy: bool


@dataclass(frozen=True)
class LateNodes:
    """The nodes to probe, the longest silent first.

    `hearing_since`: the time since which a web process could hear them; None without one.
    """

    nodes: Sequence[LateNode]
    hearing_since: datetime | None


def absent_nodes(
    late: LateNodes, absences: Mapping[UUID, Absence], now: datetime, *, doubt: float, gone: float
) -> tuple[list[UUID], list[UUID]]:
    """Return the nodes to mark unhealthy and offline, after `doubt` and `gone` seconds. Pure.

    An offline node was silent for `gone` seconds in which a web process could hear it, and absent from the
    bus for half of them.
    """
    unhealthy, offline = [], []
    for node in late.nodes:
        absence, silence = absences.get(node.id), now - node.heard_at
        if absence is None or absence.probes < PROBES or silence < timedelta(seconds=doubt):
            continue
        lasted = absence.last - absence.since
        audible = late.hearing_since is not None and now - late.hearing_since > timedelta(seconds=gone)
        if audible and silence > timedelta(seconds=gone) and lasted >= gone / 2:
            offline.append(node.id)
        elif lasted >= doubt and not node.is_unhealthy:
            unhealthy.append(node.id)
    return unhealthy, offline


def late_nodes(watched: Collection[UUID], users: Collection[str], *, web: float, now: datetime) -> LateNodes:
    """Read the nodes to probe: late or `watched` ones, and those of these bus users.

    Return none of them if so many are late that their network is the likely cause. One query without any
    late node, else three.
    """
    disconnected = BusCredential.objects.filter(public_key__in=users).values("node_id")
    unheard = Q(last_heartbeat__lt=now - LATE) | Q(last_heartbeat__isnull=True)
    chosen = unheard | Q(pk__in=watched) | Q(pk__in=disconnected)
    counts = inventory.contactable_nodes().aggregate(of=Count("pk"), late=Count("pk", filter=chosen))
    if not counts["late"] or _is_massive(counts["late"], counts["of"]):
        return LateNodes([], None)
    rows = inventory.contactable_nodes().filter(chosen).order_by(F("last_heartbeat").asc(nulls_first=True))
    living = WebProcess.objects.filter(seen_at__gte=now - timedelta(seconds=web))
    return LateNodes(
        [
            LateNode(id, name, max(approved, heard or approved), unhealthy is not None)
            for id, name, heard, approved, unhealthy in rows.values_list(
                "id", "name", "last_heartbeat", "approved_at", "unhealthy_at"
            )
        ],
        living.aggregate(since=Min("hearing_since"))["since"],
    )


def _is_massive(late: int, of: int) -> bool:
    """Return True if so many are late that the network or the servers are the more likely cause."""
    return of >= SMALLEST_FLEET and late * 3 > of


class BusProbes(PeriodicTask):
    """The periodic task of a controller that probes late nodes on the bus.

    What it has seen is in its memory alone: another controller starts over, which costs time only. The lack
    of a listener proves nothing while this process was disconnected, has only just connected, or slept.
    """

    def __init__(self, bus: Bus) -> None:
        # Well within `LONGEST_GAP`, whatever the setting: else no two probes would be in a row.
        period = min(conf.cluster().node_doubt_after / (PROBES - 1), LONGEST_GAP / 2)
        interval = max(period - _GATHER, 0.0)
        super().__init__(
            "bus probes", self.run_pass, interval=interval, gather=_GATHER, retry_on=(DatabaseError,)
        )
        self._bus = bus
        self._users: set[str] = set()
        self._absences: dict[UUID, Absence] = {}
        self._answered: dict[UUID, float] = {}

    def disconnected(self, user: str) -> None:
        """Probe the node of this user of the bus soon: its connection has ended."""
        self._users.add(user)
        self.wake()

    async def run_pass(self) -> None:
        """Probe late nodes once, and mark those that are absent."""
        users, self._users = self._users, set()
        if not (self._bus.connected and clock.monotonic() - self._bus.connected_since >= SETTLED_AFTER):
            self._absences.clear()
            return
        cluster = conf.cluster()
        late = await in_thread(
            late_nodes, list(self._absences), users, web=cluster.web_stale_after, now=clock.now()
        )
        await self._probe_nodes(late.nodes)
        limits = {"doubt": cluster.node_doubt_after, "gone": cluster.node_gone_after}
        unhealthy, offline = absent_nodes(late, self._absences, clock.now(), **limits)
        if unhealthy or offline:
            await in_thread(_mark_absent, unhealthy, offline, now=clock.now(), **limits)

    async def _probe_nodes(self, nodes: Sequence[LateNode]) -> None:
        ids, now = {node.id for node in nodes}, clock.monotonic()
        self._answered = {id: at for id, at in self._answered.items() if now - at < ANSWERED_FOR}
        due = [node for node in nodes if node.id not in self._answered]
        due.sort(key=lambda node: absence.last if (absence := self._absences.get(node.id)) else 0.0)
        chosen = due[:MOST_PROBES]
        heard = await asyncio.gather(*(self._has_listener(node) for node in chosen))
        at = clock.monotonic()
        self._absences = {id: absence for id, absence in self._absences.items() if id in ids}
        for node, has_listener in zip(chosen, heard, strict=True):
            if has_listener is None:
                continue
            absence = self._absences.pop(node.id, None)
            if has_listener:
                self._answered[node.id] = at
            else:
                self._absences[node.id] = absence.after(at) if absence else Absence(at, at)

    async def _has_listener(self, node: LateNode) -> bool | None:
        """Probe the node; None if this process lost the bus meanwhile."""
        match await Worker(self._bus, str(node.id), node.name).backends(_PROBE_TIMEOUT):
            case NoResponders():
                return False
            case BusDown():
                return None
        return True


def _mark_absent(
    unhealthy: Sequence[UUID], offline: Sequence[UUID], *, doubt: float, gone: float, now: datetime
) -> None:
    detail = ", and nothing listens for it on the bus"
    lifecycle.mark_in_doubt(unhealthy, limit=doubt, actor=CONTROLLER, now=now, detail=detail)
    if count := lifecycle.mark_silent(offline, limit=gone, actor=CONTROLLER, now=now, detail=detail):
        log.warning("liveness: marked %d nodes offline that nothing listens for on the bus", count)


def recount() -> int:
    """Correct in-flight counts that are not the sum over processes; return their number. Two statements."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statements.LOCK_MISCOUNTED)
        ids = [id for (id,) in cursor.fetchall()]
        if not ids:
            return 0
        cursor.execute(statements.RECOUNT, {"ids": ids})
        return int(cursor.rowcount)
