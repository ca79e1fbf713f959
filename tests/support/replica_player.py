"""A history of replicas: numbers decide the order of actions of controllers, workers, requests and people.

Each number is one step, and the invariants hold after each step. At the end the faults stop, and the state
converges: only serving replicas are left, each with its engine.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any
from uuid import UUID

from localai_cluster.kit.errors import ClusterError
from nodes.decisions import decision_log
from nodes.models import (
    BackendNode,
    NodeModel,
    PendingBackendOp,
)
from operations.models import Operation
from tests.support.postgres import cleaner
from tests.support.replica_histories import SKEWS, Actor, Worker, World, played, wait
from tests.support.replica_invariants import Invariants
from tests.support.replica_jobs import LEASE, Cluster

STEPS = 50
PRESENT = 3
"""Number of replicas at the start."""
MAX_SLEEP = 1000
MOMENT = 0.001
"""Seconds after a reading: a replica that is loaded at the same moment counts as included."""
ROUNDS = 40
"""Passes of a controller after the end of the faults."""
WEEK = 8 * 86_400
"""Seconds, longer than `states.DEPARTED_ENGINE_LIMIT`."""

CONTROLLERS = ["works"] * 6 + ["stops"] * 4 + ["upgrades"] * 2 + ["recovers", "checks", "compares"]
"""Next jobs of an idle controller, by frequency; a busy controller usually continues its job."""
BESIDE_ANOTHER = [*CONTROLLERS, *["recovers"] * 6, "reaps"]
"""Next jobs while the other controller is stopped in a job: its lease may have expired."""
OUTSIDE = (
    ["asks_for_load"] * 6
    + ["picks"] * 8
    + ["releases"] * 4
    + ["asks_for_unload", "loses", "cancels"] * 3
    + ["time_passes", "a_lease_is_lost"] * 4
    + ["asks_for_upgrade", "messages_arrive", "clock_steps"]
    + ["web_process_stops", *["web_process_is_silent"] * 3, "settles", "recounts"]
    + ["beats", "falls_silent", "crashes", "deregisters", "drains", "resumes", "comes_back"]
    + ["engine_dies", "reports_an_exit", *["registers_late"] * 2]
    + ["a_note_comes_late"] * 6
)
OF_WORKERS = ("beats", "falls_silent", "deregisters", "drains", "resumes")
OF_NAMED_CONTROLLERS = ("works", "upgrades")
NOTES = (
    *[("stops", "restore_lost")] * 4,
    *[("works", "publish")] * 3,
    *(("stops", "record_sent"), ("stops", "confirm"), ("stops", "record_failure")),
    *(("works", "end_attempt"), ("works", "end_at_address"), ("checks", "record_results")),
    *(("compares", "end_unlisted"), ("upgrades", "end_stopped")),
)
"""Jobs, and the calls in which they record what the controller has observed or decided before."""
CAUSES = {"stops": "loses", "works": "asks_for_load", "upgrades": "asks_for_upgrade"}
"""By job: the action that gives a controller work for it."""
MEANWHILE = ["falls_silent", "crashes", *["asks_for_unload", "asks_for_load", ""] * 2]
"""Actions before a late record is written; empty: the lease expires."""
BEFORE_A_LOAD_ENDS = ["falls_silent", "", "", "cancels"]
MAX_JOB = 120
"""Maximum points of a job."""


class History:
    """The database, the workers and the reference model."""

    def __init__(self, everybody: list[Actor]) -> None:
        self.everybody, self.controllers, self.web = everybody, everybody[:2], everybody[2]
        self.world = World()
        self.cluster = Cluster(self.world)
        self.naps = 0
        self.was_blocked = False
        for actor in everybody:
            actor.skew = timedelta()
        cleaner.run()
        decision_log.start_new_base()  # its rows are gone
        self.invariants = Invariants(self.world, self.cluster)

    def play(self, numbers: Sequence[int]) -> None:
        """Play a history to its end."""
        with played(self.world):
            try:
                self.begin()
                self.world.faults = Random(sum(numbers)).choice([0.1, 0.4, 0.8])
                for number in numbers:
                    self.step(number)
                    self.check()
                self.converge()
            except AssertionError as error:
                raise AssertionError("\n".join([str(error), *self.world.trace])) from error
            finally:
                self.kill_all()

    def begin(self) -> None:
        """Register two workers."""
        for number, name in enumerate(("alpha", "beta")):
            worker = Worker(number, name, UUID(int=number), "1".zfill(32))
            self.act(partial(self.cluster.registers, worker))
        self.world.passes(MOMENT)
        self.world.are_faults_on, first = False, self.controllers[0]
        first.runs_through = lambda point: None
        for number in range(PRESENT):
            self.act(partial(self.cluster.asks_for_load, Random(number)))
            self.go(first, partial(self.cluster.works, first.name))
        first.runs_through, self.world.are_faults_on = None, True
        self.check()

    def check(self) -> None:
        """Check the invariants that hold after each step."""
        is_committing = any(actor.point.endswith(":committed") for actor in self.controllers)
        self.invariants.check(is_committing=is_committing, was_blocked=self.was_blocked)
        self.was_blocked = False

    # --- steps

    def step(self, number: int) -> None:
        """Execute the step that this number determines."""
        dice = self.world.dice = Random(number)
        self.world.passes(1)
        if dice.random() < 0.6:
            self.controller_goes_on(dice.choice(self.controllers), dice)
        else:
            self.somebody_acts(dice.choice(OUTSIDE), dice)

    def controller_goes_on(self, actor: Actor, dice: Random) -> None:
        """Begin a job, continue to a later point of the job, or be killed there."""
        if actor.is_idle:
            is_alone = all(other.is_idle for other in self.controllers)
            self.begins(actor, dice.choice(CONTROLLERS if is_alone else BESIDE_ANOTHER))
            if dice.random() < 0.4:
                self.finishes(actor)
        elif dice.random() < 0.1:
            self.kill(actor)
        else:
            self.goes_on(actor, dice)

    def begins(self, actor: Actor, name: str) -> None:
        """Begin a job and continue to its first point."""
        actor.job = name
        self.world.note(f"{actor.name} {name}")
        job = getattr(self.cluster, name)
        self.go(actor, partial(job, actor.name) if name in OF_NAMED_CONTROLLERS else job)

    def goes_on(self, actor: Actor, dice: Random) -> None:
        """Continue to a later point."""
        for _ in range(dice.choice([1, 2, 4, 10, 30, 60])):
            if actor.is_idle:
                break
            actor.stops_inside = dice.random() < 0.2
            self.go(actor)
        self.world.note(f"{actor.name} at {actor.point or 'the end of its job'}")

    def finishes(self, actor: Actor) -> None:
        """Continue to the end of the job unless it must wait."""
        while not actor.is_idle and actor.point != "sleep":
            self.go(actor)

    def a_lease_is_lost(self, worker: Worker, dice: Random) -> None:
        """Stop a controller for too long, while the other controller takes over."""
        slow, other = dice.sample(self.controllers, 2)
        if slow.is_idle:
            return
        if not other.is_idle:
            self.finishes(other)
        if other.is_idle:
            self.pass_seconds(LEASE + 2)
            self.world.note(f"{slow.name} stands still at {slow.point}")
            for job in dice.choice([["recovers"], ["recovers", "works"], ["reaps", "works"]]):
                self.check()
                if other.is_idle:
                    self.begins(other, job)
                    self.finishes(other)

    def a_note_comes_late(self, worker: Worker, dice: Random) -> None:
        """Stop a controller before it records an observation, and let something else happen first."""
        slow, other = dice.sample(self.controllers, 2)
        job, note = dice.choice(NOTES)
        notes = {note} if slow.is_idle else {note for _, note in NOTES}
        if slow.is_idle:
            if job in CAUSES:
                self.act(partial(getattr(self.cluster, CAUSES[job]), dice))
            self.begins(slow, job)
        for _ in range(MAX_JOB):
            if slow.is_idle or slow.point in notes:
                break
            self.go(slow)
        self.check()
        if slow.is_idle:
            return
        self.world.note(f"{slow.name} stands still at {slow.point}")
        if what := dice.choice(BEFORE_A_LOAD_ENDS if slow.job == "works" else MEANWHILE):
            self.somebody_acts(what, dice, self.cluster.busy_worker(dice))
        else:
            self.pass_seconds(LEASE + 2)
        self.check()
        for job in dice.choice([["reaps", "works", "works"], ["recovers"], ["recovers", "works"]]):
            self.finishes(other)
            if other.is_idle:
                self.begins(other, job)
        self.finishes(other)
        self.check()
        self.finishes(slow)

    def registers_late(self, worker: Worker, dice: Random) -> None:
        """Register a worker while controllers continue, so that its list of engines is outdated."""
        if not (worker.is_registered and worker.is_reachable):
            return
        if (starter := next((actor for actor in self.controllers if actor.is_idle), None)) is not None:
            self.act(partial(self.cluster.asks_for_load, dice))
            self.begins(starter, "works")
            for _ in range(MAX_JOB):
                if starter.is_idle or starter.point == "send backend.install":
                    break
                self.go(starter)
            self.check()
        running = worker.running()
        self.world.note(f"{worker.name} sends a registration with {running}")
        for actor in self.controllers:
            self.goes_on(actor, dice)
        self.check()
        self.world.note(f"it arrives at {worker.name}")
        self.act(partial(self.cluster.registers, worker, running))
        self.world.passes(MOMENT)

    def kill(self, actor: Actor) -> None:
        """Kill the process at its point; another process replaces it."""
        self.world.note(f"{actor.name} is killed at {actor.point}")
        if actor.point.endswith(":committed"):
            self.invariants.killed_after_commit()
        actor.is_dead = True
        self.go(actor)

    def somebody_acts(self, what: str, dice: Random, worker: Worker | None = None) -> None:
        """Execute an action outside of the controllers."""
        worker = worker or dice.choice(list(self.world.workers.values()))
        if not (worker.is_reachable and worker.is_registered) and dice.random() < 0.3:
            what = "comes_back"
        if what in OF_WORKERS:
            self.world.note(f"{worker.name} {what}")
            self.act(partial(getattr(self.cluster, what), worker))
            if what == "beats" and worker.is_registered:
                self.invariants.reading(worker.id)
                self.world.passes(MOMENT)
        elif hasattr(self, what):
            getattr(self, what)(worker, dice)
        else:
            self.world.note(what)
            self.act(partial(getattr(self.cluster, what), dice))

    def time_passes(self, worker: Worker, dice: Random) -> None:
        """Let some seconds pass; or keep unreachable machines off for a week."""
        self.pass_seconds(dice.choice([5, 5, 20, 20, 50, 70, 70, 150, 400, WEEK]))

    def pass_seconds(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.world.note(f"{seconds} s pass")
        for actor in self.controllers:
            # It does not stand still for so long before it sends a start.
            if seconds == WEEK or (
                actor.sending and (self.world.time - actor.sending).total_seconds() + seconds >= 55
            ):
                self.kill_if_busy(actor)
        if seconds == WEEK:
            away = NodeModel.engines.filter(phase="departed").values_list("node_id", flat=True)
            for each in self.world.workers.values():
                if not each.is_reachable or each.id in away:
                    each.crash()
        self.world.passes(seconds)

    def kill_if_busy(self, actor: Actor) -> None:
        """Kill the process if it has a job."""
        if not actor.is_idle:
            self.kill(actor)

    def clock_steps(self, worker: Worker, dice: Random) -> None:
        """Correct the clock of a controller."""
        actor, skew = dice.choice(self.controllers), dice.choice(SKEWS)
        self.world.note(f"the clock of {actor.name} is wrong by {skew} s")
        actor.skew = timedelta(seconds=skew)

    def messages_arrive(self, worker: Worker, dice: Random) -> None:
        """Deliver the delayed messages."""
        self.world.note(f"messages arrive at {worker.name}")
        worker.arrive()

    def engine_dies(self, worker: Worker, dice: Random) -> None:
        """End an engine without a stop."""
        if worker.processes:
            key = dice.choice(sorted(worker.processes))
            self.world.note(f"{key} on {worker.name} dies")
            worker.ends_by_itself(key)

    def crashes(self, worker: Worker, dice: Random) -> None:
        """Restart a worker."""
        self.world.note(f"{worker.name} crashes")
        worker.crash()

    def comes_back(self, worker: Worker, dice: Random | None = None) -> None:
        """Make the worker reachable; register it if necessary."""
        self.world.note(f"{worker.name} comes back with {worker.running()}")
        self.act(partial(self.cluster.registers, worker))
        self.act(partial(self.cluster.beats, worker))
        self.invariants.reading(worker.id)
        self.world.passes(MOMENT)

    def act(self, job: Callable[[], Any]) -> None:
        """Let people, web processes or workers act; forbidden actions are refused."""

        def allowed() -> None:
            try:
                job()
            except (ClusterError, BackendNode.DoesNotExist) as refusal:
                self.world.note(f"  refused: {refusal}")

        self.go(self.web, allowed)

    def go(self, actor: Actor, job: Callable[[], Any] | None = None) -> None:
        """Let the actor begin a job or continue, and wait until it stops."""
        if job is None:
            actor.resume()
        else:
            actor.begin(job)
        self.was_blocked |= wait(actor, self.everybody)
        for each in self.everybody:
            if (error := each.error) is not None:
                each.error = None
                raise AssertionError(f"{each.name}: {error!r}") from error

    def kill_all(self) -> None:
        """Kill all processes that are stopped at a point."""
        for actor in self.controllers:
            actor.runs_through = None
            while not actor.is_idle:
                actor.is_dead = True
                actor.resume()
                wait(actor, self.everybody)
            actor.error = None

    # --- the end

    def converge(self) -> None:
        """End the faults; after some passes no work may be left."""
        self.world.note("faults stop")
        self.world.are_faults_on = False
        for actor in self.controllers:
            actor.runs_through, actor.stops_inside = self.pass_by, False
            while not actor.is_idle:
                self.go(actor)
        for worker in list(self.world.workers.values()):
            self.comes_back(worker)
            self.act(partial(self.cluster.resumes, worker))
        for _ in range(ROUNDS):
            if not (left := self.unsettled()):
                break
            self.run_passes()
        assert not left, f"not settled after {ROUNDS} passes: {left}"

    def pass_by(self, point: str) -> None:
        """Continue at each point without a stop; time passes during a sleep."""
        if point == "sleep":
            self.naps += 1
            assert self.naps < MAX_SLEEP, "something is waited for forever"
            self.world.passes(2)

    def run_passes(self) -> None:
        """Run the passes of controllers, and the requests that find no engine, of the next minutes."""
        first = self.controllers[0]
        self.world.passes(100)
        self.go(first, self.cluster.recovers)
        while Operation.objects.due(at=self.world.now()).exists():
            self.go(first, partial(self.cluster.works, first.name))
            self.check()
        self.go(first, partial(self.cluster.upgrades, first.name))
        self.act(self.cluster.loses_dead)
        self.go(first, self.cluster.stops)
        self.check()

    def unsettled(self) -> list[str]:
        """Return all work in progress, and all rows that must not exist."""
        rows = list(NodeModel.engines.all())
        left = [f"{row} {row.phase} {row.reason} {row.stop_error}" for row in rows if row.phase != "serving"]
        left += [f"{one.kind} {one.status}" for one in Operation.objects.active()]
        left += [f"{one} {one.last_error}" for one in PendingBackendOp.objects.all()]
        serving = {(row.node_id, str(row), row.address) for row in rows}
        running = {(worker.id, *each) for worker in self.world.workers.values() for each in worker.running()}
        return left + [f"{one}: no engine or no row" for one in serving ^ running]


def numbers_of(seed: int) -> list[int]:
    """Return the numbers of the history with this seed."""
    dice = Random(seed)
    return [dice.getrandbits(32) for _ in range(STEPS)]


def failure(actors: list[Actor], seed: int) -> str:
    """Return why the history of this seed fails; "" if it does not."""
    try:
        History(actors).play(numbers_of(seed))
    except AssertionError as error:
        return str(error)
    return ""
