"""A cluster without engines: what routing by prefix is good for, beside round robin, by the same arrivals."""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from nodes.gateway.prefix_table import PrefixTables, Slot, prompt_chain
from tests.support.policy import Warm, select

REPLICAS, PREFIXES, REMEMBERS, REQUESTS = 8, 24, 4, 6000
PLACES: list[Slot] = [(UUID(int=number), 0) for number in range(1, REPLICAS + 1)]
BUSY = 0.5
"""The share of the time for which a replica works."""

Choice = Callable[[int, str, Sequence[Warm], float], Slot]
"""Of the number of a request, its prompt, the replicas and the time."""


@dataclass
class Engine:
    """Remembers the prefixes that it was given last, and how many requests run on it until when."""

    remembered: OrderedDict[int, None] = field(default_factory=OrderedDict)
    until: list[float] = field(default_factory=list)

    def takes(self, prefix: int, until: float) -> bool:
        """Whether it had the prefix."""
        had = prefix in self.remembered
        self.remembered[prefix] = None
        self.remembered.move_to_end(prefix)
        if len(self.remembered) > REMEMBERS:
            self.remembered.popitem(last=False)
        self.until.append(until)
        return had


def simulated(choose: Choice, seed: int) -> tuple[float, float]:
    """The share of requests whose prefix was there, and the busiest replica's share over the mean."""
    chance, now = random.Random(seed), 0.0
    engines = {place: Engine() for place in PLACES}
    hits, taken = 0, Counter[Slot]()
    for number in range(REQUESTS):
        now += chance.expovariate(BUSY * REPLICAS)
        prefix = chance.randrange(PREFIXES)
        prompt = f"{prefix:04}" * 300 + f"question {number} " * 8
        for engine in engines.values():
            engine.until = [until for until in engine.until if until > now]
        place = choose(number, prompt, [Warm(*one, len(engines[one].until)) for one in PLACES], now)
        hits += engines[place].takes(prefix, now + chance.uniform(0.5, 1.5))
        taken[place] += 1
    return hits / REQUESTS, max(taken.values()) * REPLICAS / REQUESTS


def round_robin(number: int, prompt: str, replicas: Sequence[Warm], now: float) -> Slot:
    return replicas[number % len(replicas)].place


class ByPrefix:
    """As a web process does it: what it remembers, the choice that the statement makes, what it learns."""

    def __init__(self) -> None:
        self.affinity = PrefixTables(300.0)

    def __call__(self, number: int, prompt: str, replicas: Sequence[Warm], now: float) -> Slot:
        blocks = prompt_chain("m", prompt.encode())
        found = self.affinity.match("m", blocks, now)
        weights = dict(self.affinity.weights("m", now))
        weighed = [Warm(*one.place, one.in_flight, weights.get(one.place, 0.0)) for one in replicas]
        share = found.depth / len(blocks) if found else 0.0
        picked = select(weighed, found.slot if found else None, share)
        assert picked is not None
        self.affinity.observe("m", blocks, picked.place, now)
        return picked.place


@pytest.mark.rule("R3.14", "R3.16", "T-PFX-56")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_prefixes_are_found_four_times_as_often_and_the_load_stays_even(seed: int) -> None:
    """24 prefixes do not fit into one replica's memory of 4, but into that of 8 replicas."""
    spread, _ = simulated(round_robin, seed)
    found, imbalance = simulated(ByPrefix(), seed)
    print(
        f"seed {seed}: round robin {spread:.3f}, by prefix {found:.3f}, busiest {imbalance:.2f} of the mean"
    )
    assert found >= 4 * spread
    assert imbalance <= 1.5
