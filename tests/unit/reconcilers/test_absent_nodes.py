"""Killed workers are detected soon, and no living one is: probes on the bus in virtual time.

The product's own pass runs against a played bus, clock and table of nodes.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging.bus import NoResponders, NotConnected
from localai_cluster.messaging.messages import ListReply, encode
from nodes.models.node import MIN_LATE_AFTER
from nodes.reconcilers import liveness
from nodes.reconcilers.liveness import BusProbes, LateNode, LateNodes

START = datetime(2026, 11, 27, tzinfo=UTC)
PASS = 5.0 / 3
"""Seconds between two passes."""
BEAT, MAX_DELAY, MAX_RECONNECT = 10.0, 20.0, 6.0
TEN_MINUTES = 600.0


@dataclass
class PlayedWorker:
    """A worker: its last heartbeat, those under way by arrival, and since when it is on the bus."""

    id: UUID
    name: str = "w"
    heard: float = 0.0
    next_beat: float = 0.0
    on_bus_from: float = 0.0
    killed_at: float = float("inf")
    under_way: list[float] = field(default_factory=list)


class World:
    """Workers, one NATS server, web processes and one controller, all in virtual time."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.random, self.now, self.connected_since = random.Random(seed), 0.0, -60.0
        self.hearing_since, self.nats_back, self.web_back = -999.0, 0.0, 0.0
        self.longest_delay = 0.0
        self.workers = [PlayedWorker(UUID(int=number + 1)) for number in range(count)]
        for worker in self.workers:
            worker.next_beat = self.random.uniform(0, BEAT)
        self.marks: list[tuple[str, UUID, float]] = []
        self.asked: list[UUID] = []

    @property
    def connected(self) -> bool:
        return self.now >= self.nats_back

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        if not self.connected:
            raise NotConnected("no connection")
        worker = next(worker for worker in self.workers if f".{worker.id}." in subject)
        self.asked.append(worker.id)
        if self.now >= worker.killed_at or self.now < worker.on_bus_from:
            raise NoResponders(subject)
        return encode(ListReply())

    def restart_nats(self, seconds: float) -> None:
        self.nats_back = self.now + seconds
        self.connected_since = self.nats_back
        for worker in self.workers:
            worker.on_bus_from = self.nats_back + self.random.uniform(0, MAX_RECONNECT)

    def stall_web(self, seconds: float) -> None:
        self.web_back = self.hearing_since = self.now + seconds

    def play_until(self, now: float) -> None:
        """Send and deliver heartbeats: none without the bus, none to a stalled web process."""
        self.now = now
        for worker in self.workers:
            while worker.next_beat <= min(now, worker.killed_at):
                sent, worker.next_beat = worker.next_beat, worker.next_beat + BEAT
                if sent >= worker.on_bus_from and sent >= self.web_back:
                    worker.under_way.append(sent + self.random.uniform(0, self.longest_delay))
            arrived = [at for at in worker.under_way if at <= now]
            worker.under_way = [at for at in worker.under_way if at > now]
            worker.heard = max([worker.heard, *arrived])

    def late(self, watched: Any, users: Any, **_: Any) -> LateNodes:
        gone = {id for what, id, _ in self.marks if what == "offline"}
        doubted = {id for what, id, _ in self.marks if what == "unhealthy"}
        rows = [worker for worker in self.workers if worker.id not in gone]
        chosen = [
            LateNode(worker.id, worker.name, _moment(worker.heard), worker.id in doubted)
            for worker in rows
            if self.now - worker.heard > MIN_LATE_AFTER.total_seconds()
            or worker.id in watched
            or str(worker.id) in users
        ]
        if liveness._is_massive(len(chosen), len(rows)):
            return LateNodes([], None)
        return LateNodes(chosen, _moment(self.hearing_since))

    def mark(self, unhealthy: Any, offline: Any, **_: Any) -> None:
        self.marks += [("unhealthy", id, self.now) for id in unhealthy]
        self.marks += [("offline", id, self.now) for id in offline]

    def marked(self, what: str) -> dict[UUID, float]:
        return {id: at for mark, id, at in self.marks if mark == what}


def _moment(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Play passes until a time; `each` may change the world before each pass."""

    def run(world: World, until: float, each: Callable[[BusProbes], None] = lambda probes: None) -> None:
        async def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        monkeypatch.setattr(clock, "monotonic", lambda: world.now)
        monkeypatch.setattr(clock, "now", lambda: _moment(world.now))
        monkeypatch.setattr(liveness, "in_thread", call)
        monkeypatch.setattr(liveness, "read_late_nodes", world.late)
        monkeypatch.setattr(liveness, "_mark_absent", world.mark)
        probes = BusProbes(world)  # type: ignore[arg-type]

        async def passes() -> None:
            while world.now < until:
                world.play_until(world.now + PASS)
                each(probes)
                await probes.run_pass()

        asyncio.run(passes())

    return run


@pytest.mark.rule("R5.4", "C15")
@pytest.mark.parametrize("advised", [True, False])
@pytest.mark.parametrize("count", [1, 40])
def test_a_killed_worker_is_in_doubt_after_5_s_and_offline_after_30(
    play: Callable[..., None], advised: bool, count: int
) -> None:
    """Issue 22, item 7. Without NATS's report of the lost connection the late heartbeat is the first sign."""
    world = World(count)
    killed = world.workers[0]
    killed.killed_at = 100.0

    def tell(probes: BusProbes) -> None:
        if advised and world.now - PASS < killed.killed_at <= world.now:
            probes.disconnected(str(killed.id))

    play(world, 150.0, tell)
    unhealthy, offline = world.marked("unhealthy"), world.marked("offline")
    assert set(unhealthy) == set(offline) == {killed.id}
    assert 5 <= unhealthy[killed.id] - 100 <= (5 + 2 * PASS if advised else 12 + 5 + 2 * PASS)
    assert 15 <= offline[killed.id] - 100 <= 30 + 2 * PASS
    assert offline[killed.id] - killed.heard > 30, "R5.4: silent for that long as well"


@pytest.mark.rule("R5.4", "I13")
@pytest.mark.parametrize("count", [3, 60])
@pytest.mark.parametrize("seed", range(12))
def test_no_living_worker_is_offline_in_ten_minutes_of_faults(
    play: Callable[..., None], seed: int, count: int
) -> None:
    """Stalled servers, restarts of NATS and heartbeats that take 20 s: none proves that a worker is gone."""
    world = World(count, seed)
    world.longest_delay = MAX_DELAY

    def fault(probes: BusProbes) -> None:
        match world.random.randrange(40 * (1 + seed % 4)):
            case 0:
                world.restart_nats(world.random.uniform(0, 90))
            case 1:
                world.stall_web(world.random.uniform(0, 90))
            case 2:  # the controller sleeps
                world.play_until(world.now + world.random.uniform(0, 90))
            case 3:
                probes.disconnected(str(world.random.choice(world.workers).id))

    play(world, TEN_MINUTES, fault)
    assert not world.marked("offline")
    assert len(world.asked) <= liveness.MAX_PROBES * TEN_MINUTES / PASS


@pytest.mark.rule("R5.4", "W41")
def test_a_worker_that_only_stops_its_heartbeats_keeps_the_whole_minute(play: Callable[..., None]) -> None:
    """It listens on the bus: the liveness pass alone decides, after 60 s of silence."""
    world = World(5)
    world.workers[0].next_beat = 1e9
    play(world, 200.0)
    assert not world.marks
    assert world.asked.count(world.workers[0].id) < 25, "an answer spares it for ten seconds"


def test_a_sleep_of_the_controller_and_a_new_connection_start_over(play: Callable[..., None]) -> None:
    """Only probes in a row count: misses before and after a gap say nothing about the time between."""
    world = World(1)
    world.workers[0].killed_at = 0.0
    steps = iter([*[0.0] * 10, 15.0, 0.0, 0.0])
    play(world, 36.0, lambda probes: world.play_until(world.now + next(steps, 0.0)))
    assert not world.marks
    again = World(1)
    again.workers[0].killed_at = 0.0
    play(again, 29.0, lambda probes: again.restart_nats(0.1) if 15.5 < again.now < 17 else None)
    assert not again.marks


def test_a_mass_of_late_nodes_is_not_probed(play: Callable[..., None]) -> None:
    """More than a third of a fleet: the mass-disruption hold decides, and the bus gets no flood."""
    world = World(60)
    for worker in world.workers[:30]:
        worker.killed_at = 0.0
    play(world, 60.0)
    assert not world.marks
    assert not world.asked


@pytest.mark.rule("R5.4")
@pytest.mark.parametrize(
    ("silent", "absent", "probes", "hearing", "expected"),
    [
        (31, 15, 4, 31, "offline"),
        (30, 15, 4, 31, "unhealthy"),
        (31, 14.9, 4, 31, "unhealthy"),
        (31, 15, 4, 30, "unhealthy"),
        (31, 15, 4, None, "unhealthy"),
        (31, 15, 3, 31, ""),
        (5, 5, 4, 31, "unhealthy"),
        (4.9, 5, 4, 31, ""),
        (9, 4.9, 4, 31, ""),
    ],
    ids=[
        "silent and absent",
        "not silent for long enough",
        "not absent for half as long",
        "no web process could hear it for that long",
        "no web process at all",
        "too few probes",
        "in doubt",
        "a heartbeat has come",
        "not absent for long enough",
    ],
)
def test_what_silence_and_absence_prove(
    silent: float, absent: float, probes: int, hearing: float | None, expected: str
) -> None:
    now, node = _moment(0), UUID(int=1)
    since = None if hearing is None else _moment(-hearing)
    late = LateNodes([LateNode(node, "w", _moment(-silent), False)], since)
    absences = {node: liveness.Absence(-absent, 0.0, probes)}
    unhealthy, offline = liveness.absent_nodes(late, absences, now, doubt=5, gone=30)
    assert (unhealthy, offline) == (
        [node] if expected == "unhealthy" else [],
        [node] if expected == "offline" else [],
    )


@pytest.mark.parametrize(("silent", "is_offline"), [(53.9, False), (54.1, True)])
def test_a_heartbeat_that_is_not_due_is_no_silence(silent: float, is_offline: bool) -> None:
    """One every 45 s: without a listener such a node is in doubt, but goes offline only once it is late."""
    node, late_after = UUID(int=1), timedelta(seconds=54)
    late = LateNodes([LateNode(node, "w", _moment(-silent), False, late_after)], _moment(-999))
    absences = {node: liveness.Absence(-40.0, 0.0, 9)}
    unhealthy, offline = liveness.absent_nodes(late, absences, _moment(0), doubt=5, gone=30)
    assert (unhealthy, offline) == (([], [node]) if is_offline else ([node], []))
