"""The liveness pass: observe, plan (pure), apply.

R5.2 to R5.8 with their "Port:" lines: only the age of the heartbeat counts; pending nodes are skipped; a
silent node becomes offline, also a draining or unhealthy one; its replicas stop counting.

A silent node that sends a heartbeat recovers through that heartbeat, not in this pass. A node that was marked
unhealthy, because nothing listened for its commands, is healthy again after a heartbeat and a reply on the
bus. A heartbeat alone proves nothing about the bus, and work would be retried there endlessly (H7).

A killed worker is detected sooner: a controller probes nodes on the bus whose heartbeat is late or whose
connection has ended (`BusProbes`). Several consecutive probes without a listener make the node unhealthy, and
offline once it is silent for `CLUSTER_NODE_GONE_AFTER`.

A web process that stops refreshing its row is dead; its running requests are subtracted from the replicas. If
very many nodes fall silent together, they are held for some time, while a controller pings each of them on
the bus.
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
from django.db.models import Count, DateTimeField, ExpressionWrapper, F, Min, Q, Value

from localai_cluster.accounts.actors import CONTROLLER, task
from localai_cluster.kit import clock, conf
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging.bus import Bus
from nodes.backends import inventory
from nodes.commands.commands import RECONNECT_GRACE, Worker
from nodes.commands.outcomes import BusDown, NoResponders
from nodes.models import BackendNode, BusCredential, NodeModel, ReplicaUse, WebProcess
from nodes.models.node import MIN_LATE_AFTER
from nodes.registry import change, lifecycle, mass_silence
from nodes.replicas import statements
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

MIN_FLEET_SIZE = 20
"""Minimum number of nodes, including silent nodes, for a mass-disruption hold."""
HEALING_TIME = timedelta(seconds=30)
"""Time by which a hold is extended while silent nodes recover: three heartbeat intervals of ten seconds."""
NEARLY_SILENT_FRACTION = 0.75
"""Part of the silence limit after which a node counts as nearly silent: four heartbeats are missing."""


@dataclass(frozen=True)
class MassHold:
    """Start and end of a mass-disruption hold."""

    since: datetime
    until: datetime


def decide_hold(
    hold: MassHold | None, now: datetime, seconds: float, *, silent: int, nearly: int, of: int
) -> MassHold | None:
    """Return the mass-disruption hold that applies now, or None.

    `seconds` is the duration of a new hold, 0 = no holds. `nearly` is the number of nearly silent nodes, and
    `of` that of all nodes.

    After an expired hold no new hold begins in the same pass: its nodes become offline. While a network
    failure is repaired, the nodes return one after another, so the last few are held for `HEALING_TIME`
    longer.
    """
    if not silent or not seconds:
        return None
    massive = _is_massive(silent + nearly, of)
    if hold is None:
        return MassHold(now, now + timedelta(seconds=seconds)) if massive else None
    if not massive:
        hold = MassHold(hold.since, min(hold.until, now + HEALING_TIME))
    return hold if now < hold.until else None


@dataclass(frozen=True)
class Limits:
    """Limits of silence in seconds, for nodes and web processes, and the duration of a hold."""

    node: float
    web: float
    hold: float = 0.0
    """Seconds of the mass-disruption hold; 0 = no hold."""


@dataclass(frozen=True)
class NodeLiveness:
    """When a node was last heard of: `at` is its last heartbeat, None if it never sent one.

    `unhealthy_at` is the time since which it is marked unhealthy, `answered_at` that of its last reply on the
    bus.
    """

    id: UUID
    at: datetime | None
    unhealthy_at: datetime | None = None
    answered_at: datetime | None = None

    @property
    def is_back(self) -> bool:
        """True if a heartbeat came after the node was marked unhealthy."""
        return self.at is not None and self.unhealthy_at is not None and self.at > self.unhealthy_at

    @property
    def has_answered(self) -> bool:
        """True if the node has replied on the bus after it was marked unhealthy."""
        marked = self.unhealthy_at
        return marked is not None and self.answered_at is not None and self.answered_at > marked


@dataclass(frozen=True)
class WebLiveness:
    """A web process: `at` is its last sign of life, `hearing_since` the start of its uninterrupted run."""

    id: UUID
    at: datetime
    hearing_since: datetime


@dataclass(frozen=True)
class LivenessSnapshot:
    """Approved nodes that are not offline, web processes, and the active mass-disruption hold."""

    nodes: Sequence[NodeLiveness]
    processes: Sequence[WebLiveness]
    hold: MassHold | None = None


@dataclass(frozen=True)
class Plan:
    """The changes of one pass: nodes and web processes that are gone, recovered nodes, and nodes on hold."""

    nodes: list[UUID]
    processes: list[UUID]
    recovered: list[UUID] = field(default_factory=list)
    doubtful: list[UUID] = field(default_factory=list)
    """Unhealthy nodes that send heartbeats again but have not replied on the bus: they are probed."""
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


def plan_liveness(observed: LivenessSnapshot, now: datetime, limits: Limits) -> Plan:
    """Return the changes for nodes whose silence is longer than the limit, or over (R5.4).

    Silence counts only while a web process runs. After an outage of the web processes or the database every
    node seems silent, so no node is declared gone before a web process has run for the full limit (I12).
    """
    web, node = timedelta(seconds=limits.web), timedelta(seconds=limits.node)
    dead = [process.id for process in observed.processes if now - process.at > web]
    living = (process for process in observed.processes if process.id not in dead)
    since = min((process.hearing_since for process in living), default=now)
    ages = {heard.id: now - max(heard.at or since, since) for heard in observed.nodes}
    silent = [id for id, age in ages.items() if age > node]
    nearly = sum(node * NEARLY_SILENT_FRACTION < age <= node for age in ages.values())
    hold = decide_hold(observed.hold, now, limits.hold, silent=len(silent), nearly=nearly, of=len(ages))
    silent_ids = frozenset(silent)
    returned = [heard for heard in observed.nodes if heard.is_back and heard.id not in silent_ids]
    return Plan(
        nodes=[] if hold else silent,
        processes=dead,
        recovered=[heard.id for heard in returned if heard.has_answered],
        doubtful=[heard.id for heard in returned if not heard.has_answered],
        held=silent if hold else [],
        of=len(ages),
        hold=hold,
        released=observed.hold is not None and hold is None,
    )


_LIVENESS_COLUMNS = ("id", "last_heartbeat", "unhealthy_at", "inventory_at")


def observe() -> LivenessSnapshot:
    """Read the snapshot in three queries."""
    held = mass_silence.current_hold()
    nodes = BackendNode.objects.filter(approved_at__isnull=False, offline_at__isnull=True)
    return LivenessSnapshot(
        nodes=[NodeLiveness(*row) for row in nodes.values_list(*_LIVENESS_COLUMNS)],
        processes=[
            WebLiveness(*row) for row in WebProcess.objects.values_list("id", "seen_at", "hearing_since")
        ],
        hold=MassHold(held.since, held.until) if held else None,
    )


def apply(plan: Plan, now: datetime, limits: Limits) -> tuple[int, int]:
    """Apply the parts of the plan that are still true. Return the numbers of lost nodes and web processes."""
    if plan.is_empty:
        return 0, 0
    actor = task("liveness")
    with transaction.atomic():
        if plan.released:
            mass_silence.release()
        if plan.hold:
            hold = plan.hold
            mass_silence.hold(plan.held, since=hold.since, until=hold.until, of=plan.of, actor=actor, now=now)
        locked = _lock_rows(plan)
        lifecycle.mark_recovered(plan.recovered, actor=actor, now=now)
        nodes_gone = lifecycle.mark_silent(plan.nodes, limit=limits.node, actor=actor, now=now)
        processes_gone = _drop_dead_processes(plan.processes, locked, now, limits.web)
    # After all waits for locks: this one waits for none.
    if in_question := [*plan.doubtful, *plan.held]:
        inventory.wake(in_question, older_than=0.0, now=now)
    return nodes_gone, processes_gone


def _lock_rows(plan: Plan) -> list[UUID]:
    """Lock all rows that the plan changes; return the ids of the locked replicas.

    The order is nodes by id, then replicas by id, as for heartbeats and picks. Locking in steps would hold a
    later replica while it waits for an earlier one.
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


PROBES_UNTIL_UNHEALTHY = 4
"""Number of consecutive probes without a listener that make a node unhealthy."""
MAX_PROBES = 64
"""Maximum number of probes in one pass of a controller."""
MAX_PROBE_GAP = 10.0
"""Maximum seconds between two consecutive probes. After a longer gap (this process slept, or lacked the
database) the count begins again."""
ANSWER_VALID_SECONDS = 10.0
"""Seconds after a reply during which a node is not probed again."""
_PROBE_TIMEOUT = 2.0
"""Seconds within which a worker must reply to a probe."""
_GATHER_SECONDS = 0.5
"""Seconds for which ended connections are gathered into one pass."""


@dataclass(frozen=True)
class Absence:
    """A series of probes without a listener: their number, and the monotonic times of the first and last."""

    since: float
    last: float
    probes: int = 1

    def after(self, at: float) -> "Absence":
        """Return the series with one more probe at `at`; a new series if the gap was too long."""
        if at - self.last > MAX_PROBE_GAP:
            return Absence(at, at)
        return Absence(self.since, at, self.probes + 1)


@dataclass(frozen=True)
class LateNode:
    """A node to probe. `heard_at` is its last heartbeat, or its approval if that is later.

    `late_after` is the silence after which its next heartbeat is late.
    """

    id: UUID
    name: str
    heard_at: datetime
    is_unhealthy: bool
    late_after: timedelta = MIN_LATE_AFTER


@dataclass(frozen=True)
class LateNodes:
    """The nodes to probe, beginning with the longest silent one.

    `hearing_since` is the start of the uninterrupted run of the web processes; None without a web process.
    """

    nodes: Sequence[LateNode]
    hearing_since: datetime | None


def absent_nodes(
    late: LateNodes, absences: Mapping[UUID, Absence], now: datetime, *, doubt: float, gone: float
) -> tuple[list[UUID], list[UUID]]:
    """Return the nodes that probes show as absent: to mark unhealthy, and to take offline. Pure.

    A node becomes unhealthy after `doubt` seconds without a listener. It goes offline if it was silent for
    `gone` seconds of the web processes' run, and absent from the bus for half of them, and its heartbeat is
    late.
    """
    unhealthy, offline = [], []
    for node in late.nodes:
        absence, silence = absences.get(node.id), now - node.heard_at
        if absence is None or absence.probes < PROBES_UNTIL_UNHEALTHY or silence < timedelta(seconds=doubt):
            continue
        lasted = absence.last - absence.since
        audible = late.hearing_since is not None and now - late.hearing_since > timedelta(seconds=gone)
        is_silent = silence > max(timedelta(seconds=gone), node.late_after)
        if audible and is_silent and lasted >= gone / 2:
            offline.append(node.id)
        elif lasted >= doubt and not node.is_unhealthy:
            unhealthy.append(node.id)
    return unhealthy, offline


def read_late_nodes(
    watched: Collection[UUID], users: Collection[str], *, web: float, now: datetime
) -> LateNodes:
    """Read the nodes to probe: late nodes, `watched` nodes, and the nodes of these bus users.

    Returns no node if so many are late that their network is the likely cause. One query without a late node,
    otherwise three.
    """
    disconnected = BusCredential.objects.filter(public_key__in=users).values("node_id")
    late_since = ExpressionWrapper(Value(now) - F("heartbeat_late_after"), DateTimeField())
    unheard = Q(last_heartbeat__lt=late_since) | Q(last_heartbeat__isnull=True)
    chosen = unheard | Q(pk__in=watched) | Q(pk__in=disconnected)
    counts = inventory.contactable_nodes().aggregate(of=Count("pk"), late=Count("pk", filter=chosen))
    if not counts["late"] or _is_massive(counts["late"], counts["of"]):
        return LateNodes([], None)
    rows = inventory.contactable_nodes().filter(chosen).order_by(F("last_heartbeat").asc(nulls_first=True))
    living = WebProcess.objects.filter(seen_at__gte=now - timedelta(seconds=web))
    return LateNodes(
        [
            LateNode(id, name, max(approved, heard or approved), unhealthy is not None, late_after)
            for id, name, heard, approved, unhealthy, late_after in rows.values_list(
                "id", "name", "last_heartbeat", "approved_at", "unhealthy_at", "heartbeat_late_after"
            )
        ],
        living.aggregate(since=Min("hearing_since"))["since"],
    )


def _is_massive(late: int, of: int) -> bool:
    """Return True if so many nodes are late that the network or the servers are the more likely cause."""
    return of >= MIN_FLEET_SIZE and late * 3 > of


class BusProbes(PeriodicTask):
    """The periodic task of a controller that probes nodes with late heartbeats on the bus.

    Its results are in memory only: another controller starts again, which only costs time. The lack of a
    listener proves nothing if this process was disconnected, has just connected, or slept.
    """

    def __init__(self, bus: Bus) -> None:
        # Well within `MAX_PROBE_GAP`, whatever the setting: else no two probes would be in a row.
        period = min(conf.cluster().node_doubt_after / (PROBES_UNTIL_UNHEALTHY - 1), MAX_PROBE_GAP / 2)
        interval = max(period - _GATHER_SECONDS, 0.0)
        super().__init__(
            "bus probes", self.run_pass, interval=interval, gather=_GATHER_SECONDS, retry_on=(DatabaseError,)
        )
        self._bus = bus
        self._users: set[str] = set()
        self._absences: dict[UUID, Absence] = {}
        self._answered: dict[UUID, float] = {}

    def disconnected(self, user: str) -> None:
        """Probe the node of this bus user soon, because its connection has ended."""
        self._users.add(user)
        self.wake()

    async def run_pass(self) -> None:
        """Probe late nodes once, and mark the absent nodes."""
        users, self._users = self._users, set()
        if not (self._bus.connected and clock.monotonic() - self._bus.connected_since >= RECONNECT_GRACE):
            self._absences.clear()
            return
        cluster = conf.cluster()
        late = await in_thread(
            read_late_nodes, list(self._absences), users, web=cluster.web_stale_after, now=clock.now()
        )
        await self._probe_nodes(late.nodes)
        limits = {"doubt": cluster.node_doubt_after, "gone": cluster.node_gone_after}
        unhealthy, offline = absent_nodes(late, self._absences, clock.now(), **limits)
        if unhealthy or offline:
            await in_thread(_mark_absent, unhealthy, offline, now=clock.now(), **limits)

    async def _probe_nodes(self, nodes: Sequence[LateNode]) -> None:
        ids, now = {node.id for node in nodes}, clock.monotonic()
        self._answered = {id: at for id, at in self._answered.items() if now - at < ANSWER_VALID_SECONDS}
        due = [node for node in nodes if node.id not in self._answered]
        due.sort(key=lambda node: absence.last if (absence := self._absences.get(node.id)) else 0.0)
        chosen = due[:MAX_PROBES]
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
        """Return True if the node listens on the bus; None if this process lost the bus during the probe."""
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
    """Correct the in-flight counts that differ from the sum over processes; return their number."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(statements.LOCK_MISCOUNTED)
        ids = [id for (id,) in cursor.fetchall()]
        if not ids:
            return 0
        cursor.execute(statements.RECOUNT, {"ids": ids})
        return int(cursor.rowcount)
