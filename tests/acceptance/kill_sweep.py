"""The kill sweep: a real process is killed at every point (`tests/checks/points.py`), and nothing is lost.

A `Round` names a point, who is killed there and what makes it pass. `kill` starts the victim, does that, sees
it die, starts a controller in its place, and checks what must hold: what was accepted can be found for
ever, work has one living owner or a stated reason and next look, a fence has one effect at most, everything
ends in time, progress never falls within an attempt, and what has ended stays as it ended.
"""

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import psycopg

from localai_cluster.kit import clock
from localai_cluster.kit.failpoints import KILL_AT_VARIABLE, KILL_MESSAGE_PREFIX, KILL_TEST_VARIABLE
from localai_cluster.messaging.messages import InstalledBackend
from tests.conftest import eventually
from tests.support.cluster import ADMIN, Cluster, Process
from tests.support.simulator import Act, Fleet
from tests.support.sources import Source
from tests.wire.registry import Registry

VISITED_WITHIN = 6.0
"""Seconds within which the victim must come to its point; several times that on a busy machine."""
ENDED_WITHIN = 10.0
"""Seconds after the restart within which everything must have ended, likewise."""
LATE = 15.0
"""Seconds by which a lease may have run out, or a look be late: a restart and a reaper's turn."""
INSTALLED = 40
"""Backends that are there for upgrades and deletions."""
_TERMINAL = ("completed", "failed", "cancelled")
_START = re.compile(r"\((\S+)\): start, fence (\d+)")
_OF = re.compile(r"\[(\S+)\] .*: start, fence \d+")

_LOOK = """
    SELECT o.id::text, o.status, o.by_parts, o.message, o.next_attempt_at, o.lease_until, o.fence, o.progress,
        t.id, t.status, t.reason, t.percentage, t.current_bytes, t.file_name,
        i.id::text, i.fence, i.lease_until, coalesce(i.next_retry_at, t.next_check_at),
        t.wave IS NOT NULL AND i.id IS NULL, o.parent_id IS NOT NULL
    FROM operations o LEFT JOIN operation_targets t ON t.operation_id = o.id
    LEFT JOIN pending_backend_ops i ON i.id = t.intent_id
    WHERE o.created_at >= %s"""


@dataclass
class Watch:
    """Looks at the rows all the time and writes down what must not be."""

    url: str
    since: Any
    wrong: list[str] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)
    asked_for: set[str] = field(default_factory=set)
    """Those that are no step of another one."""
    left: int = 0
    """Intents that there are."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._reached: dict[tuple[Any, ...], tuple[float, int]] = {}
        self._thread = threading.Thread(target=self._run, name="watch")
        self._thread.start()

    def close(self) -> list[str]:
        """Ends; what was wrong."""
        self._stop.set()
        self._thread.join()
        return self.wrong

    def ended(self) -> bool:
        """Whether there is an operation, all of them have ended, and no intent is left."""
        over = all(status in _TERMINAL for status in self.statuses.values())
        return bool(self.statuses) and over and not self.left

    def _run(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as link:
            while not self._stop.wait(0.05):
                with link.transaction():
                    link.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    rows = link.execute(_LOOK, (self.since,)).fetchall()
                    counted = link.execute("SELECT count(*) FROM pending_backend_ops").fetchone()
                self._look(rows)
                self.left = counted[0] if counted else 0

    def _look(self, rows: Sequence[tuple[Any, ...]]) -> None:
        now, found = clock.now(), {row[0]: row[1] for row in rows}
        for id in self.statuses.keys() - found.keys():
            self._note(f"operation {id} cannot be found any more")
        for id, status in self.statuses.items():
            if status in _TERMINAL and found.get(id, status) != status:
                self._note(f"operation {id} had ended as {status} and is {found[id]}")
        self.statuses |= found
        self.asked_for |= {row[0] for row in rows if not row[-1]}
        for row in rows:
            (id, status, by_parts, message, look, lease, fence, progress, part, part_status, reason, share,
             size, file, _, intent_fence, intent_lease, retry, held, _) = row  # fmt: skip
            if status in _TERMINAL:
                continue
            if by_parts:
                if part_status in ("queued", "downloading", "running_on_worker"):
                    # A part whose wave is not open is looked at when the one before has ended.
                    look = now if held else retry
                    self._owned(f"part {part} of {id}", intent_lease, reason, look, now)
                    self._grows((part, intent_fence), share, size if file else 0)
            else:
                self._owned(f"operation {id}", lease, message, look, now)
                self._grows((id, fence), progress, 0)

    def _owned(self, what: str, lease: Any, reason: str, look: Any, now: Any) -> None:
        if lease is not None:
            if (now - lease).total_seconds() > LATE:
                self._note(f"{what}: the lease ran out at {lease} and no executor has taken it back")
        elif not reason or look is None:
            self._note(f"{what} has no owner, and says {reason!r} and looks again at {look}")

    def _grows(self, attempt: tuple[Any, ...], share: float, size: int) -> None:
        before = self._reached.get(attempt, (0.0, 0))
        if share < before[0] or size < before[1]:
            self._note(f"{attempt}: progress fell from {before} to {(share, size)}")
        self._reached[attempt] = (share, size)

    def _note(self, text: str) -> None:
        if text not in self.wrong:
            self.wrong.append(text)


@dataclass
class Sweep:
    """A cluster of simulated workers with a web process that lives."""

    cluster: Cluster
    web: Process
    fleet: Fleet
    loop: asyncio.AbstractEventLoop | None = None
    """Where the workers live."""
    controllers: list[Process] = field(default_factory=list)
    worker: Process | None = None
    """The real one, for loads."""
    count: int = 0
    opened: bool = False
    registry: Registry = field(default_factory=Registry)
    """Images for the real worker."""
    source: Source = field(default_factory=Source)
    """A source of models, whose host the cluster's settings name."""
    asked: str = ""
    """Where an operator's choice of this round goes."""

    def __post_init__(self) -> None:
        self.registry.start()
        self.gate = self.cluster.home / "gate"
        self.installed = [f"old-{number}" for number in range(INSTALLED)]
        for worker in self.fleet.workers:
            worker.machine.backends |= {
                name: InstalledBackend(name=name, version="1.0.0", uri=f"/srv/gallery/{name}")
                for name in self.installed
            }

    def open_gate(self) -> None:
        """From now on the victim may die."""
        self.gate.touch()
        self.opened = True

    @property
    def killed(self) -> bool:
        """Whether it has."""
        return self.opened and not self.gate.exists()

    @property
    def nodes(self) -> list[str]:
        """The ids of the two workers that most rounds use."""
        return [worker.node_id for worker in self.fleet.workers[:2]]

    def old(self) -> str:
        """A backend that all workers have and no other round uses."""
        return self.installed.pop()

    def script(self, **acts: Act) -> None:
        """What the workers do from now on: `install=Act(…)`."""
        for worker in self.fleet.workers:
            worker.script.acts = {f"backend.{verb}": act for verb, act in acts.items()}

    def name(self) -> str:
        """A backend that no other round uses."""
        self.count += 1
        return f"backend-{self.count}"

    def post(self, path: str, body: Any = None, *, web: Process | None = None) -> None:
        """As an admin; the answer is a success, or says that it is so already."""
        answer = self.cluster.post(web or self.web, path, {} if body is None else body, timeout=20)
        assert answer.status_code in (200, 201, 202, 409), answer.text

    def controller(self, **env: str) -> Process:
        """A controller, ready or dead."""
        started = self.cluster.spawn("controller", "manage.py", "controller", env=env)
        self.controllers.append(started)
        eventually(
            lambda: not started.alive or "is ready" in started.output(),
            seconds=30,
            what=f"controller: {started.log}",
        )
        return started

    def end_controllers(self) -> None:
        """Kills those that are left."""
        for one in self.controllers:
            one.kill()

    def starts(self) -> Counter[tuple[str, str]]:
        """(intent, fence) that controllers of this round have begun, and how often."""
        return Counter(found for one in self.controllers for found in _START.findall(one.output()))

    def running(self, name: str) -> None:
        """Waits until a worker is at it, or the victim is dead."""
        query = (
            "SELECT 1 FROM operation_targets t JOIN operations o ON o.id = t.operation_id"
            " WHERE o.element = %s AND t.status = 'downloading'"
        )
        eventually(
            lambda: self.killed or self.cluster.rows(query, name), seconds=10, what="a worker is at it"
        )

    def until(self, name: str, status: str) -> None:
        """Waits until the operation has come to this."""
        query = "SELECT 1 FROM operations WHERE element = %s AND status = %s"
        eventually(lambda: self.cluster.rows(query, name, status), seconds=30, what=f"{name} is {status}")

    def wait(self, query: str, *values: Any, what: str) -> None:
        """Until the rows say so."""
        eventually(lambda: self.cluster.rows(query, *values), seconds=10, what=what)

    def until_failed_once(self, name: str) -> None:
        """Waits until an attempt has failed and is over, or nothing is left to be tried again."""
        query = (
            "SELECT 1 FROM pending_backend_ops WHERE backend = %s AND attempts > 0 AND lease_until IS NULL"
            " UNION ALL SELECT 1 WHERE NOT EXISTS (SELECT FROM pending_backend_ops)"
        )
        self.wait(query, name, what="an attempt has failed")

    def clean(self) -> None:
        """Runs the task that ends intents without a future."""
        task = self.clean_intents()
        eventually(lambda: not task.alive, seconds=30, what="the task has run")

    def shell(self, code: str) -> None:
        """Runs Python in a process of the cluster, to its end."""
        task = self.cluster.spawn("task", "manage.py", "shell", "--no-imports", "-c", code, env={})
        eventually(lambda: not task.alive, seconds=30, what=f"the code has run: {task.log}")
        assert task.child.returncode == 0, task.story()

    def clean_intents(self, **env: str) -> Process:
        """Start a process that runs that task."""
        code = "from nodes.reconcilers.tasks import clean_intents; clean_intents()"
        return self.cluster.spawn("task", "manage.py", "shell", "--no-imports", "-c", code, env=env)

    def delete(self, path: str, web: Process) -> None:
        """As an admin."""
        httpx.delete(web.url + path, headers=ADMIN, timeout=20)

    def registered(self) -> bool:
        """Whether every simulated worker has a node; one whose node was removed comes back as another."""
        found = self.cluster.rows("SELECT id::text FROM backend_nodes")
        return {worker.node_id for worker in self.fleet.workers} <= {id for (id,) in found}

    def id_of(self, name: str) -> str:
        """The newest operation on a backend or model."""
        query = "SELECT id::text FROM operations WHERE element = %s ORDER BY created_at DESC LIMIT 1"
        return str(self.cluster.rows(query, name)[0][0])

    def execute(self, query: str, *values: Any) -> None:
        """Changes rows: what would take hours to come about."""
        with psycopg.connect(self.cluster.postgres.url) as link:
            link.execute(query, values)

    def serve(self, number: int, model: str, backend: str = "echo") -> None:
        """Has a simulated worker serve a model."""
        worker = self.fleet.workers[number]
        address, now = f"127.0.0.1:{10000 + self.count}", clock.now()
        worker.machine.engines[f"{model}#0"] = (backend, address)
        row = {
            "id": uuid4(),
            "node_id": worker.node_id,
            "model_name": model,
            "replica_index": 0,
            "address": address,
            "phase": "serving",
            "backend_type": backend,
            "in_flight": 0,
            "model_options": "{}",
            **dict.fromkeys(("config_revision", "effective_options_hash"), ""),
            **dict.fromkeys(("last_used", "created_at", "updated_at"), now),
        }
        columns = ", ".join(row)
        self.execute(
            f"INSERT INTO node_models ({columns}) VALUES ({', '.join(['%s'] * len(row))})", *row.values()
        )

    def start_worker(self, **env: str) -> Process:
        """A real worker `one`; a former one leaves first."""
        self.stop_worker()
        query = "SELECT instance FROM backend_nodes WHERE name = 'one' AND status = 'healthy'"
        before = self.cluster.rows("SELECT instance FROM backend_nodes WHERE name = 'one'")
        self.worker = self.cluster.worker("one", self.web, wait=False, **env)
        eventually(lambda: self.cluster.rows(query) not in ([], before), what="the worker has registered")
        return self.worker

    @property
    def real_node(self) -> str:
        """The id of the node of the real worker."""
        return str(self.cluster.rows("SELECT id::text FROM backend_nodes WHERE name = 'one'")[0][0])

    def stop_worker(self) -> None:
        """The real worker leaves."""
        if self.worker is not None and self.worker.alive:
            self.worker.child.terminate()
            self.worker.child.wait(30)

    def ready_files(self) -> None:
        """Sees to it that the real worker has `echo`."""
        former = self.controller()
        self.post("/api/backends/install/echo", {"nodes": [self.real_node]})
        query = "SELECT 1 FROM operations WHERE id = %s AND status = 'completed'"
        id = self.id_of("echo")
        eventually(lambda: self.cluster.rows(query, id), what="echo is installed")
        former.kill()

    def ask(self, name: str, web: Process | None = None) -> None:
        """One request for a model in a thread of its own; what becomes of it does not matter."""

        def request() -> None:
            with contextlib.suppress(httpx.HTTPError):
                self.cluster.embed(web or self.web, model=name, timeout=60)

        threading.Thread(target=request, daemon=True).start()

    def loading(self, name: str) -> None:
        """Waits until the engine of a load runs, or the victim is dead."""
        query = "SELECT 1 FROM operations WHERE element = %s AND phase = 'loading'"
        eventually(lambda: self.killed or self.cluster.rows(query, name), what="the engine loads")

    def restart_worker(self, number: int) -> None:
        """One simulated worker ends and comes back as another process."""
        assert self.loop is not None
        again = self.fleet.workers[number].restart()
        asyncio.run_coroutine_threadsafe(again, self.loop).result(30)


Deed = Callable[[Sweep, str, Any], None]
"""What somebody does: with the sweep, the name of a backend or model for this round, and the victim."""


def nothing(sweep: Sweep, name: str, victim: Any) -> None:
    """Nothing is to be done."""


@dataclass(frozen=True)
class Round:
    """One kill. `act` makes the victim pass `point`; `first` happens before the victim starts.

    `again` is what an operator does after the kill, such as asking once more.
    """

    point: str
    victim: str
    what: str
    act: Deed = nothing
    first: Deed = nothing
    again: Deed = nothing
    outcome: str = "completed"
    also: str = ""
    """How another operation may end that follows from it."""
    env: tuple[tuple[str, str], ...] = ()
    early: bool = False
    """Whether the victim may come to its point while it starts."""
    forgets: bool = False
    """Whether the record is cleared on purpose."""

    def __str__(self) -> str:
        return f"{self.point} ({self.what})"


class NotVisited(AssertionError):
    """The victim has not come to the point."""


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    round: Round
    outcome: str
    seconds: float
    wrong: tuple[str, ...] = ()
    visited: bool = True
    """Whether the victim came to the point."""

    def __str__(self) -> str:
        told = "; ".join(self.wrong) or self.outcome
        return f"| `{self.round.point}` | {self.round.victim} | {self.round.what} | {told} |"


def kill(sweep: Sweep, one: Round) -> Result:
    """Carries a round out."""
    began, since = clock.monotonic(), clock.now()
    sweep.controllers.clear()
    sweep.gate.unlink(missing_ok=True)
    sweep.opened = False
    eventually(sweep.registered, what="the workers are back from the round before")
    sweep.script(install=Act(seconds=0.6, ticks=4), upgrade=Act(seconds=0.6, ticks=4))
    watch, name, wrong, outcome = Watch(sweep.cluster.postgres.url, since), sweep.name(), [], ""
    visited = True
    try:
        _killed(sweep, one, name)
        restarted = clock.monotonic()
        if one.victim == "worker":
            sweep.start_worker()
        sweep.controller()
        one.again(sweep, name, None)
        eventually(watch.ended, seconds=ENDED_WITHIN, what="everything has ended")
        outcome = (
            f"{', '.join(sorted(set(watch.statuses.values())))} after {clock.monotonic() - restarted:.1f} s"
        )
        if {watch.statuses[id] for id in watch.asked_for} - {one.also} != {one.outcome}:
            wrong.append(f"ended as {watch.statuses}, not as {one.outcome}")
        wrong += too_often(sweep, watch)
    except (AssertionError, httpx.HTTPError) as error:
        visited = not isinstance(error, NotVisited)
        wrong.append(f"{error or type(error).__name__}; operations: {watch.statuses}")
    finally:
        wrong += [text for text in watch.close() if not (one.forgets and "cannot be found" in text)]
        sweep.end_controllers()
    return Result(one, outcome, clock.monotonic() - began, tuple(wrong), visited)


def _killed(sweep: Sweep, one: Round, name: str) -> None:
    """Starts the victim, makes it pass the point and sees it die; AssertionError if it does not."""
    one.first(sweep, name, None)
    if one.early:
        sweep.open_gate()
    victim = _victim(
        sweep, one, {KILL_AT_VARIABLE: one.point, KILL_TEST_VARIABLE: str(sweep.gate), **dict(one.env)}
    )
    if not one.early:
        sweep.open_gate()
    try:
        one.act(sweep, name, victim)
    except httpx.TransportError:
        assert one.victim == "web", "the web process that lives does not answer"
    try:
        eventually(lambda: not victim.alive, seconds=VISITED_WITHIN, what=f"{one.point} is visited")
    except AssertionError as error:
        raise NotVisited(str(error)) from None
    said = f"{KILL_MESSAGE_PREFIX}{one.point.partition('@')[0]}"
    assert said in victim.output(), f"the victim ended by itself: {victim.story()[-500:]}"


def _victim(sweep: Sweep, one: Round, env: Mapping[str, str]) -> Process:
    if one.victim == "web":
        sweep.controller()
        return sweep.cluster.web(**env)
    if one.victim == "worker":
        sweep.controller()
        return sweep.start_worker(**env)
    if one.victim == "tasks":
        return sweep.clean_intents(**env)
    return sweep.controller(**env)


def too_often(sweep: Sweep, watch: Watch) -> list[str]:
    """Intents begun more than once under one fence, and operations with more commands than attempts."""
    wrong = [
        f"intent {id} was begun {count} times under fence {fence}"
        for (id, fence), count in sweep.starts().items()
        if count > 1
    ]
    attempts = Counter(found for one in sweep.controllers for found in _OF.findall(one.output()))
    sent = Counter(
        str(command.body["op_id"])
        for verb in ("install", "upgrade")
        for command in sweep.fleet.received(f"backend.{verb}")
        if command.body.get("op_id") in watch.statuses
    )
    return wrong + [
        f"operation {id} has sent {count} commands in {attempts[id]} attempts"
        for id, count in sent.items()
        if count > attempts[id]
    ]
