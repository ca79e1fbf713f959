"""The life of replicas against a small model: two controllers, workers and requests, in any order.

Nothing here is derived from the product's statements. A history is a list of numbers, each of which decides
one step. After each step no slot has two engines, each engine that was started has its row, reserved memory
and counts of requests are what the model says, and each row has the owner and the deadline that the table of
phases names. Once faults stop, everything converges: only replicas that serve are left, each with its engine.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit.errors import ClusterError
from nodes.models import (
    BackendNode,
    ModelLoadInfo,
    NodeConflict,
    NodeEvent,
    NodeModel,
    Phase,
    PlacementRecord,
    ReplicaUse,
    WebProcess,
)
from nodes.replicas.states import PHASES
from operations.models import Operation, OperationTarget
from tests.support.effort import swept
from tests.support.replica_histories import Actor, Worker, World, played, wait
from tests.support.replica_jobs import Cluster
from tests.support.replica_mutants import MUTANTS, QUICK
from tests.support.replicas import forget_nodes

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A process that is killed while it prepares its stops leaves them.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

HISTORIES = 50
STEPS = 50
PRESENT = 4
"""Replicas that are there at first."""
LONGEST_SLEEP = 1000
MOST = 50
"""Histories that a planted defect may stay hidden."""
MANY = 2000
"""Histories of `make sweep`."""
ROUNDS = 40
"""Looks of a controller after the faults."""

CONTROLLERS = ["works"] * 6 + ["stops"] * 4 + ["reaps"]
"""What a controller does next; one that is at a job mostly goes on with it."""
OUTSIDE = (
    ["asks_for_load"] * 6
    + ["picks"] * 4
    + ["releases"] * 3
    + ["asks_for_unload", "loses", "time_passes"] * 3
    + ["cancels", "web_process_dies", "messages_arrive"]
    + ["beats", "falls_silent", "crashes", "deregisters", "drains", "resumes", "comes_back", "engine_dies"]
)
OF_WORKERS = ("beats", "falls_silent", "deregisters", "drains", "resumes")


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Actor]]:
    """Two controllers, and one actor for everybody else, who never stops at a point."""
    everybody = [Actor("c1"), Actor("c2"), Actor("web")]
    everybody[2].runs_through = lambda point: None
    yield everybody
    for actor in everybody:
        actor.end()


class History:
    """The database, the workers and the model beside them."""

    def __init__(self, everybody: list[Actor]) -> None:
        self.everybody, self.controllers, self.web = everybody, everybody[:2], everybody[2]
        self.world = World()
        self.cluster = Cluster(self.world)
        self.reserved: dict[UUID, dict[UUID, int]] = {}
        """By node, what loads have added to its column since its last reading."""
        self.last: dict[UUID, NodeModel] = {}
        self.is_unsure = False
        """True if a process was killed between a commit and what follows it: a reading makes up for that."""
        self.naps = 0
        _forget_everything()

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
        """Two workers register."""
        for number, name in enumerate(("alpha", "beta")):
            worker = Worker(number, name, UUID(int=number), "1".zfill(32))
            self.act(partial(self.cluster.registers, worker))
        self.world.are_faults_on, first = False, self.controllers[0]
        first.runs_through = lambda point: None
        for number in range(PRESENT):
            self.act(partial(self.cluster.asks_for_load, Random(number)))
            self.go(first, partial(self.cluster.works, first.name))
        first.runs_through, self.world.are_faults_on = None, True
        self.check()

    # --- steps

    def step(self, number: int) -> None:
        """Take the step that this number decides."""
        dice = self.world.dice = Random(number)
        self.world.passes(1)
        if dice.random() < 0.65:
            self.controller_goes_on(dice.choice(self.controllers), dice)
        else:
            self.somebody_acts(dice.choice(OUTSIDE), dice)

    def controller_goes_on(self, actor: Actor, dice: Random) -> None:
        """Begin a job, go on to some later point of it, or be killed there."""
        if actor.is_idle:
            actor.job = dice.choice(CONTROLLERS)
            self.world.note(f"{actor.name} {actor.job}")
            job = getattr(self.cluster, actor.job)
            self.go(actor, partial(job, actor.name) if actor.job == "works" else job)
        elif dice.random() < 0.1:
            self.kill(actor)
        else:
            self.goes_on(actor, dice)

    def goes_on(self, actor: Actor, dice: Random) -> None:
        """Go on to some later point."""
        for _ in range(dice.choice([1, 2, 4, 10, 30, 60])):
            if actor.is_idle:
                break
            actor.stops_inside = dice.random() < 0.2
            self.go(actor)
        self.world.note(f"{actor.name} at {actor.point or 'the end of its job'}")

    def kill(self, actor: Actor) -> None:
        """End the process where it is; another one takes its place."""
        self.world.note(f"{actor.name} is killed at {actor.point}")
        self.is_unsure |= actor.point == "unload.gone:committed"
        actor.is_dead = True
        self.go(actor)

    def somebody_acts(self, what: str, dice: Random) -> None:
        """Something happens outside of the controllers."""
        worker = dice.choice(list(self.world.workers.values()))
        if not (worker.is_reachable and worker.is_registered) and dice.random() < 0.3:
            what = "comes_back"
        if what in OF_WORKERS:
            self.world.note(f"{worker.name} {what}")
            self.act(partial(getattr(self.cluster, what), worker))
            if what == "beats" and worker.is_registered:
                self.reading(worker)
        elif what == "time_passes":
            self.time_passes(dice.choice([5, 20, 50, 70, 150, 400]))
        elif what == "messages_arrive":
            worker.arrive()
        elif what == "engine_dies":
            if worker.processes:
                del worker.processes[dice.choice(sorted(worker.processes))]
        elif what == "crashes":
            self.world.note(f"{worker.name} crashes")
            worker.crash()
        elif what == "comes_back":
            self.comes_back(worker)
        else:
            self.world.note(what)
            self.act(partial(getattr(self.cluster, what), dice))

    def comes_back(self, worker: Worker) -> None:
        """The worker can be reached and registers, if it must."""
        self.world.note(f"{worker.name} comes back with {worker.running()}")
        self.act(partial(self.cluster.registers, worker))
        self.act(partial(self.cluster.beats, worker))
        self.reading(worker)

    def time_passes(self, seconds: float) -> None:
        """Time passes; a process that stands still before it sends a start does not live that long."""
        self.world.note(f"{seconds} s pass")
        for actor in self.controllers:
            if actor.sending and (self.world.time - actor.sending).total_seconds() + seconds >= 59:
                self.kill(actor)
        self.world.passes(seconds)

    def reading(self, worker: Worker) -> None:
        """The node's column is empty again."""
        self.learn_reserved({row.pk: row for row in NodeModel.engines.all()})
        if BackendNode.objects.filter(pk=worker.id, vram_read_at=self.world.time).exists():
            self.reserved[worker.id] = {}

    def act(self, job: Callable[[], Any]) -> None:
        """Let people, web processes or workers do something; what they must not do is refused."""

        def allowed() -> None:
            try:
                job()
            except (ClusterError, BackendNode.DoesNotExist) as refusal:
                self.world.note(f"  refused: {refusal}")

        self.go(self.web, allowed)

    def go(self, actor: Actor, job: Callable[[], Any] | None = None) -> None:
        """Let the actor begin a job or go on, and wait until it stops."""
        if job is None:
            actor.resume()
        else:
            actor.begin(job)
        wait(actor, self.everybody)
        for each in self.everybody:
            if (error := each.error) is not None:
                each.error = None
                raise AssertionError(f"{each.name}: {error!r}") from error

    def kill_all(self) -> None:
        """Leave no process at a point."""
        for actor in self.controllers:
            actor.runs_through = None
            while not actor.is_idle:
                actor.is_dead = True
                actor.resume()
                wait(actor, self.everybody)
            actor.error = None

    # --- what must hold

    def check(self) -> None:
        """Compare the rows with the model."""
        rows = {row.pk: row for row in NodeModel.engines.all()}
        self.engines_have_rows(rows)
        self.rows_have_owners(rows)
        self.requests_are_counted(rows)
        self.memory_is_reserved(rows)

    def engines_have_rows(self, rows: dict[UUID, NodeModel]) -> None:
        """Each engine that was started has its row until its end is confirmed."""
        for worker in self.world.workers.values():
            for process in worker.processes.values():
                row = rows.get(process.row)
                assert row is not None, f"{process.key} at {process.address} runs and has no row"
                assert row.phase not in ("reserved", "staging"), f"{row} runs before it was started"
                same = row.address in ("", process.address)
                assert same, f"{row} at {process.address} is written as {row.address}"

        for id in self.world.stopped & rows.keys():
            assert rows[id].phase in ("stopping", "departed"), (
                f"{rows[id]} was stopped and is {rows[id].phase}"
            )

    def rows_have_owners(self, rows: dict[UUID, NodeModel]) -> None:
        """Each row has the owner, the deadline and the reason that the table names."""
        for row in rows.values():
            rules = PHASES[Phase(row.phase)]
            said = f"{row} {row.phase} {row.owner_kind} {row.owner_id} {row.deadline} {row.reason}"
            assert row.owner_kind in rules.owners if rules.owners else not row.owner_kind, said
            assert (row.owner_id is not None) == (row.owner_kind in ("operation", "intent")), said
            assert (row.deadline is not None) == bool(rules.deadline), said
            assert row.reason in rules.reasons if rules.reasons else not row.reason, said

    def requests_are_counted(self, rows: dict[UUID, NodeModel]) -> None:
        """Counts are those of the requests that run."""
        held = [one for one in self.cluster.requests if one[1] in rows and rows[one[1]].phase != "departed"]
        self.cluster.requests = held
        counts = Counter(replica for _, replica in held)
        for row in rows.values():
            assert row.in_flight == counts[row.pk], f"{row} counts {row.in_flight} of {counts[row.pk]}"

    def memory_is_reserved(self, rows: dict[UUID, NodeModel]) -> None:
        """A node's column is the sum over the loads that have added to it since its last reading."""
        self.learn_reserved(rows)
        healthy = BackendNode.objects.filter(status="healthy").order_by()
        for pk, name, reserved in healthy.values_list("pk", "name", "reserved_vram"):
            amount = sum(self.reserved.get(pk, {}).values())
            assert reserved == amount or self.is_unsure, f"{name} has {reserved} reserved, its loads {amount}"

    def learn_reserved(self, rows: dict[UUID, NodeModel]) -> None:
        """See which loads have begun and which have ended without a replica."""
        for id, row in rows.items():
            if id not in self.last and row.vram_on_node:
                self.reserved.setdefault(row.node_id, {})[id] = row.vram_needed
        for id, row in self.last.items():
            if id not in rows and row.loaded_at is None:
                self.reserved.get(row.node_id, {}).pop(id, None)
        self.last = rows

    # --- the end

    def converge(self) -> None:
        """Faults stop; after some looks nothing is left to be done."""
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
            self.look()
        assert not left, f"not settled after {ROUNDS} looks: {left}"

    def pass_by(self, point: str) -> None:
        """Nobody stops any more, and time goes on where somebody sleeps."""
        if point == "sleep":
            self.naps += 1
            assert self.naps < LONGEST_SLEEP, "something is waited for forever"
            self.world.passes(2)

    def look(self) -> None:
        """What controllers, and requests that find no engine, do in the next minutes."""
        first = self.controllers[0]
        self.world.passes(100)
        self.go(first, self.cluster.reaps)
        while Operation.objects.due(at=self.world.time).exists():
            self.go(first, partial(self.cluster.works, first.name))
            self.check()
        self.act(self.cluster.loses_dead)
        self.go(first, self.cluster.stops)
        self.check()

    def unsettled(self) -> list[str]:
        """Return what is still under way, or should not be there."""
        rows = list(NodeModel.engines.all())
        left = [f"{row} {row.phase} {row.reason} {row.stop_error}" for row in rows if row.phase != "serving"]
        left += [f"{one.kind} {one.status}" for one in Operation.objects.active()]
        serving = {(row.node_id, str(row), row.address) for row in rows}
        running = {(worker.id, *each) for worker in self.world.workers.values() for each in worker.running()}
        return left + [f"{one}: no engine or no row" for one in serving ^ running]


def _forget_everything() -> None:
    forget_nodes()
    for model in (
        *(ReplicaUse, WebProcess, OperationTarget, Operation, NodeConflict, NodeEvent),
        *(PlacementRecord, ModelLoadInfo),
    ):
        model.objects.all().delete()


def numbers_of(seed: int) -> list[int]:
    """Return the numbers of the history with this seed."""
    dice = Random(seed)
    return [dice.getrandbits(32) for _ in range(STEPS)]


@settings(
    max_examples=HISTORIES,
    # The same histories in each run; `make sweep` tries others.
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.lists(st.integers(0, 2**32), min_size=STEPS, max_size=STEPS))
def test_any_history_is_consistent_and_converges(actors: list[Actor], numbers: list[int]) -> None:
    """Each of them, with the steps of the one that fails in as few numbers as Hypothesis finds."""
    History(actors).play(numbers)


def failing(actors: list[Actor], seed: int) -> str:
    """Return why the history of this seed fails; empty if it does not."""
    try:
        History(actors).play(numbers_of(seed))
    except AssertionError as error:
        return str(error)
    return ""


def found_after(actors: list[Actor], mutant: str, most: int) -> tuple[int, str]:
    """Return how many histories it takes to find the planted defect, and how it shows; 0 if none does."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        for seed in range(most):
            if reason := failing(actors, seed):
                return seed + 1, reason.splitlines()[0]
    return 0, ""


@pytest.mark.parametrize("mutant", QUICK)
def test_a_planted_defect_is_found(actors: list[Actor], mutant: str) -> None:
    """The histories are no formality."""
    count, reason = found_after(actors, mutant, MOST)
    print(f"{mutant}: {count} {reason}")
    assert count, f"{mutant}: {MOST} histories do not find it"


@swept
def test_every_planted_defect_is_found(actors: list[Actor]) -> None:
    """Print for each how many histories it took."""
    found = {mutant: found_after(actors, mutant, 4 * MOST) for mutant in MUTANTS}
    for mutant, (count, reason) in found.items():
        print(f"{mutant:38} {count or 'not found':>9}  {reason}")
    assert all(count for count, _ in found.values())


@swept
def test_many_histories_are_consistent_and_converge(actors: list[Actor]) -> None:
    """Print the seed of each that fails; `numbers_of` gives its steps again."""
    failed = {seed: reason for seed in range(MANY) if (reason := failing(actors, seed))}
    print(f"histories {MANY}  steps {STEPS}  failures {len(failed)}")
    for seed, reason in failed.items():
        print(f"seed {seed}: {reason.splitlines()[0]}")
    assert not failed, next(iter(failed.values()))
