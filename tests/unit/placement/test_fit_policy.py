"""The policy `fit`: what follows where memory lacks, and models that have the memory of one in turns."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from uuid import UUID

import pytest

from nodes.decisions.decision_log import encode, find_changes, restore
from nodes.loading.load_snapshots import decode_load, encode_load
from nodes.placement import fit
from nodes.placement.choose import Candidate, Need, Reason, choose_node, find_refusal
from nodes.placement.evict import Eviction, ProtectionRules, Resident
from nodes.placement.explain import Explanation, FleetView, explain_memory
from nodes.placement.load_decision import EvictionCandidates, LoadQuestion, decide_load, simulate_placements
from tests.unit.placement.test_choose import view
from tests.unit.placement.test_fit import files_of, folder

__all__ = ["folder"]

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
NEED = Need(vram=10, vram_required=True, unknown_fits=True)
PARTIAL = replace(NEED, partial=((3, 8), (2, 6), (1, 4)))


def node(number: int = 1, **given: object) -> Candidate:
    return view(**{"id": UUID(int=number), "name": f"n{number}", "most_vram": 10, **given})


def resident(model: str = "a", *, served: float, load_time: float = 10, busy: bool = False) -> Resident:
    """One that was published `served` seconds ago and needs all memory of the node."""
    loaded = NOW - timedelta(seconds=served)
    started = loaded - timedelta(seconds=load_time)
    return Resident(
        UUID(int=9), UUID(int=1), f"{model}#0", model, False, int(busy), NOW, 10, loaded, started_at=started
    )


def decided(
    nodes: Sequence[Candidate], need: Need, *residents: Resident, claimed: bool = False, evicts: bool = True
) -> tuple[Explanation, Eviction | None]:
    """The decision, which is the same when it is made again from its snapshot (I14)."""
    guard = ProtectionRules(
        "m", NOW, {}, {}, least_serving=5, claimed={UUID(int=1)} if claimed else frozenset()
    )
    question = LoadQuestion(FleetView(nodes, need), evicts=evicts)
    decision = question.view.decide()
    eviction = EvictionCandidates(residents, guard).choose_eviction(question, decision)
    explanation = decide_load(question, decision, eviction)
    snapshot = decode_load(
        restore([encode(find_changes({}, encode_load("1", "m", question, eviction)))]), "1", "m"
    )
    assert snapshot is not None
    again, decision = snapshot.question, snapshot.question.view.decide()
    found = snapshot.occupants.choose_eviction(again, decision) if snapshot.occupants is not None else None
    assert decide_load(again, decision, found) == explanation
    assert (found and found.turn) == (eviction and eviction.turn)
    return explanation, eviction


@pytest.mark.rule("R2.32", "R2.34", "R2.51", "I14")
def test_what_follows_where_memory_lacks_comes_in_this_order() -> None:
    """D-VRAM-POLICY, D-EVICTION: idle replicas, fewer layers, busy ones whose time is over, a wait."""
    roomy, full = node(free_vram=10), node(free_vram=6)
    idle, busy = resident(served=50), resident(served=50, busy=True)
    assert decided([roomy], PARTIAL, idle)[0].gpu_layers == 0
    explanation, eviction = decided([full], PARTIAL, idle)
    assert (explanation.gpu_layers, eviction and eviction.drains) == (0, False)
    assert explanation.sentence.startswith("waits for a#0 on n1 to stop, the least recently used; ")
    explanation, _ = decided([full], PARTIAL, busy)
    assert (explanation.node, explanation.gpu_layers) == (full, 2)
    assert explanation.sentence.startswith(
        "with 2 layers on the GPU of n1, which does not have the memory for all of them; "
    )
    explanation, eviction = decided([full], NEED, busy)
    assert (explanation.node, eviction and eviction.drains) == (full, True)
    assert "waits for a#0 on n1 to end its requests and stop: its least time is over" in explanation.sentence
    explanation, eviction = decided([full], NEED, replace(busy, loaded_at=NOW))
    assert (explanation.node, eviction and eviction.node) == (None, None)
    assert explanation.sentence.endswith("1 loaded a moment ago; its turn on n1 is at 10:05:00 UTC")


@pytest.mark.rule("R2.51", "R2.52")
def test_a_replica_serves_five_times_its_load_time_and_the_wait_says_until_when() -> None:
    young = resident(served=49)
    explanation, eviction = decided([node()], NEED, young)
    assert explanation.node is None
    assert explanation.sentence.endswith(
        "; no replica there can make room: 1 that must serve longer; its turn on n1 is at 10:00:01 UTC"
    )
    assert eviction is not None
    assert eviction.turn == (UUID(int=1), NOW + timedelta(seconds=1))
    explanation, eviction = decided([node()], NEED, resident(served=50), claimed=True)
    assert explanation.sentence.endswith("; its turn on n1 is after an older load")
    assert eviction is not None
    assert eviction.turn == (UUID(int=1), NOW)
    _, eviction = decided([node()], NEED, replace(young, vram=0))
    assert eviction is not None
    assert eviction.turn is None, "time alone does not help"


@pytest.mark.rule("R2.32", "R1.70")
def test_fewer_layers_go_where_most_of_them_fit_also_for_one_more_replica() -> None:
    nodes = [node(1, free_vram=5), node(2, free_vram=8), node(3, free_vram=8, loaded=1), node(4)]
    explanation, _ = decided(nodes, PARTIAL, evicts=False)
    assert (explanation.node, explanation.gpu_layers) == (nodes[1], 3)
    placed = list(simulate_placements(LoadQuestion(FleetView(nodes, PARTIAL), evicts=False), [None] * 4))
    assert [(one.node and one.node.name, one.gpu_layers) for one in placed] == [
        ("n2", 3),
        ("n3", 3),
        ("n1", 1),
        (None, 0),
    ]


@pytest.mark.rule("R2.32")
def test_memory_that_is_not_known_counts_as_fitting() -> None:
    """Of a node or a model; under `require` only a model's."""
    silent, share = node(most_vram=0), replace(NEED, vram=0, vram_share=0.9, cards=1)
    strict = replace(NEED, unknown_fits=False)
    assert find_refusal(silent, need=NEED) is find_refusal(silent, need=share) is None
    assert find_refusal(silent, need=strict) is Reason.MEMORY
    assert find_refusal(node(), need=NEED) is Reason.MEMORY
    assert find_refusal(node(), need=replace(NEED, vram=0)) is None


@pytest.mark.rule("R2.32", "R2.35")
def test_no_load_is_placed_on_a_node_without_the_card_that_it_takes_a_share_of() -> None:
    """Under `require` the node is refused for that, and no eviction gives it a card."""
    share = Need(vram_required=True, vram_share=0.9, cards=1)
    for residents in ((), (resident(served=1000),)):
        explanation, eviction = decided([node()], share, *residents)
        assert (explanation.node, eviction) == (None, None)


@pytest.mark.parametrize(("cards", "amount"), [(1, "90% of a GPU"), (2, "90% of each of 2 GPUs")])
def test_a_share_of_a_card_is_not_given_in_bytes_where_there_is_no_card(cards: int, amount: str) -> None:
    """It read "(0.0 GiB: n1 has 0.0 GiB free)"; nodes with a card still have their figures."""
    share = Need(vram_required=True, vram_share=0.9, cards=cards)
    sentence = f"1 without the VRAM it needs ({amount}: n1 reports no GPU)"
    assert choose_node([node()], need=share).describe_refusals().endswith(sentence)
    memory = explain_memory(FleetView([node()], share), (), ProtectionRules("m", NOW, {}, {}))
    assert memory.describe() == f"not on n1: it reports no GPU, and the model needs {amount}"
    with_card = node(2, free_vram=2**30, card_vram=10 * 2**30)
    refusals = choose_node([node(), with_card], need=share).describe_refusals()
    assert f"({9 * cards}.0 GiB: n2 has 1.0 GiB free, n1 reports no GPU)" in refusals


@pytest.mark.rule("R2.41")
def test_the_layers_that_are_left_out_need_no_memory(folder: object) -> None:
    """The most layers come first, each with what the terms say for it."""
    files = files_of(folder, "Llama-3.1-70B")  # type: ignore[arg-type]
    load = fit.load_options({})
    parts = fit.fewer_layers(files, load, "cuda")
    assert [layers for layers, _ in parts][:3] == [80, 78, 76]
    assert [size for _, size in parts] == sorted((size for _, size in parts), reverse=True)
    assert parts[10][1] == fit.total_bytes(fit.estimate(files, replace(load, gpu_layers=60)))


LOAD, PREPARES, TIMES, POLL = 10.0, 1.0, 5, 5.0
LEAST = TIMES * (LOAD - PREPARES)
"""Seconds of a load, of which the engine takes all but the first one, and of the least time that follows."""


@dataclass
class Load:
    """A load that requests wait for."""

    created: float
    arrivals: list[float]
    turn: bool = False
    placed: bool = False


@dataclass
class Simulation:
    """One node for one of the models, its loads and requests; time is a number of seconds."""

    seed: int
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    now: float = 0.0
    serving: str = ""
    published: float = 0.0
    in_flight: int = 0
    emptied: Callable[[], None] | None = None
    """Called when the last request of the evicted replica ends."""
    loads: dict[str, Load] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.dice, self.order = Random(self.seed), itertools.count()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (round(seconds, 3), next(self.order), event))

    def run(self, arrivals: Sequence[tuple[float, str]]) -> None:
        for at, model in arrivals:
            self.at(at, partial(self.request, model, at))
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def request(self, model: str, arrived: float) -> None:
        if model == self.serving:
            self.waits.append(self.now - arrived)
            self.in_flight += 1
            self.at(self.now + self.dice.uniform(0.5, 1), self.release)
        elif model in self.loads:
            self.loads[model].arrivals.append(arrived)
        else:
            self.loads[model] = Load(self.now, [arrived])
            self.attempt(model)

    def release(self) -> None:
        self.in_flight -= 1
        if not self.in_flight and self.emptied is not None:
            self.emptied()

    def instant(self, seconds: float) -> datetime:
        return NOW + timedelta(seconds=seconds)

    def attempt(self, model: str) -> None:
        """One attempt of the load, with the product's decisions."""
        load, now = self.loads[model], self.instant(self.now)
        reserved = sum(one.placed for one in self.loads.values()) + bool(self.serving)
        older = [one for one in self.loads.values() if one.created < load.created]
        claimed = {UUID(int=1)} if any(one.turn and not one.placed for one in older) else frozenset[UUID]()
        residents = []
        if self.serving:
            loaded = self.instant(self.published)
            row = resident(self.serving, served=0, busy=bool(self.in_flight))
            started = loaded - timedelta(seconds=LOAD - PREPARES)
            residents = [replace(row, loaded_at=loaded, last_used=now, started_at=started)]
        guard = ProtectionRules(model, now, {}, {}, least_serving=TIMES, claimed=claimed)
        question = LoadQuestion(FleetView([node(free_vram=10 - 10 * reserved)], NEED))
        decision = question.view.decide()
        eviction = EvictionCandidates(residents, guard).choose_eviction(question, decision)
        if decide_load(question, decision, eviction).node is not None:
            self.place(load, model)
            return
        assert eviction is not None
        load.turn, until = eviction.turn is not None, POLL
        if eviction.turn is not None and eviction.turn[1] > now:
            until = min(until, (eviction.turn[1] - now).total_seconds())
        self.at(self.now + until, lambda: self.attempt(model))

    def place(self, load: Load, model: str) -> None:
        """The replica there takes no more requests; its last ones end while the load prepares."""
        served = self.now - self.published
        assert not self.serving or served >= LEAST - 0.001, "its least time is not over"
        load.placed, self.serving, self.count = True, "", self.count + 1
        ready = self.now + PREPARES

        def start() -> None:
            self.emptied = None
            self.at(max(ready, self.now) + LOAD - PREPARES, lambda: self.publish(model))

        self.emptied = start
        if not self.in_flight:
            start()

    def publish(self, model: str) -> None:
        self.serving, self.published = model, self.now
        for arrived in self.loads.pop(model).arrivals:
            self.request(model, arrived)


@pytest.mark.rule("R2.34", "R2.51")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("interval", [0.05, 0.25, 0.4])
def test_three_models_in_the_memory_of_one_are_not_loaded_in_turns_all_the_time(
    seed: int, interval: float
) -> None:
    """A third of the loads of first come, first served, and nobody waits for more than two others.

    A request comes every `interval` seconds and takes up to one, so the resident model is never idle.
    """
    dice = Random(seed)
    times = itertools.accumulate(dice.expovariate(1 / interval) for _ in range(1000))
    arrivals = [(at, dice.choice("abc")) for at in times]
    first_come = 1 + sum(one[1] != other[1] for one, other in itertools.pairwise(arrivals))
    simulation = Simulation(seed)
    simulation.run(arrivals)
    assert len(simulation.waits) == 1000
    assert simulation.count <= first_come / 3
    assert max(simulation.waits) <= 3 * LOAD + 2 * LEAST
