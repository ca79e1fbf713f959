"""The table of who had which prompt, against the plainest radix tree and the plainest sums."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.gateway.prefix_table import (
    HALF_LIFE_SECONDS,
    MAX_OWNERS_PER_MODEL,
    Chain,
    Match,
    PrefixTables,
    Slot,
    prompt_chain,
)
from tests.support.effort import EFFORT

NODES = [UUID(int=number) for number in range(1, 4)]
PLACES: list[Slot] = [(node, index) for node in NODES for index in range(2)]
A, B, A1 = PLACES[0], PLACES[2], PLACES[1]
TTL = 300.0


@dataclass
class Node:
    """A node of the tree of R3.8."""

    children: dict[int, Node] = field(default_factory=dict)
    value: Slot | None = None
    seen: float = 0.0


class Tree:
    """R3.8 to R3.12 as they are written: a radix tree for each model, everything by walking over it."""

    def __init__(self) -> None:
        self.roots: dict[str, Node] = {}

    def observe(self, model: str, path: Chain, place: Slot, now: float) -> bool:
        if not path:
            return False
        changed = self.match(model, path, now) != Match(place, len(path))
        node = self.roots.setdefault(model, Node())
        for hash in path:
            node = node.children.setdefault(hash, Node())
            node.value, node.seen = place, now
        return changed

    def match(self, model: str, path: Chain, now: float) -> Match | None:
        node, found = self.roots.get(model), None
        for depth, hash in enumerate(path, 1):
            node = node.children.get(hash) if node else None
            if node is not None and node.value is not None and now - node.seen <= TTL:
                found = Match(node.value, depth)
        return found

    def forget(self, model: str, node: UUID, index: int) -> None:
        for one in self.nodes(model):
            if one.value and one.value[0] == node and (index < 0 or one.value[1] == index):
                one.value = None

    def weights(self, model: str, now: float) -> dict[Slot, float]:
        found: dict[Slot, float] = {}
        for one in self.nodes(model):
            if one.value is not None and now - one.seen <= TTL:
                found[one.value] = found.get(one.value, 0.0) + 0.5 ** ((now - one.seen) / HALF_LIFE_SECONDS)
        return found

    def nodes(self, model: str) -> Iterable[Node]:
        waiting = [*self.roots.get(model, Node()).children.values()]
        while waiting:
            waiting.extend((one := waiting.pop()).children.values())
            yield one


def path(model: str, text: str) -> Chain:
    return prompt_chain(model, text.encode(), 1, 6)


MODELS = st.sampled_from(["m", "n"])
TEXTS = st.text("ab", max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), MODELS, TEXTS, st.sampled_from(PLACES)),
        st.tuples(st.just("forget"), MODELS, st.sampled_from(NODES), st.integers(-1, 2)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 100.0, 299.0, 300.0, 301.0])),
        st.tuples(st.just("sweep")),
    ),
    max_size=30,
)


@pytest.mark.rule("R3.8", "R3.9", "R3.10", "R3.11", "R3.12", "R3.22", "T-PFX-26", "T-RDX-2", "T-RDX-3")
@pytest.mark.rule("T-RDX-5", "T-RDX-12", "T-RDX-13", "T-RDX-14", "T-RDX-17", "T-RDX-18", "T-RDX-19")
@settings(max_examples=300 * EFFORT, deadline=None)
@given(STEPS, st.lists(st.tuples(MODELS, TEXTS), min_size=1, max_size=6))
def test_it_is_the_radix_tree(steps: list[tuple], asked: list[tuple[str, str]]) -> None:  # type: ignore[type-arg]
    """R3.8: matches, news and weights are those of the tree, whatever happened before."""
    ours, tree, now = PrefixTables(TTL), Tree(), 1000.0
    for what, *values in steps:
        if what == "observe":
            model, text, place = values
            told = (model, path(model, text), place, now)
            assert ours.observe(*told) == tree.observe(*told)
        elif what == "forget":
            ours.forget(*values)
            tree.forget(*values)
        elif what == "wait":
            now += values[0]
        else:
            ours.sweep(now)
        for model, text in asked:
            assert ours.match(model, path(model, text), now) == tree.match(model, path(model, text), now)
        for model in ("m", "n"):
            assert dict(ours.weights(model, now)) == pytest.approx(tree.weights(model, now))


@pytest.mark.rule(
    "T-PFX-18", "T-PFX-19", "T-PFX-22", "T-PFX-23", "T-RDX-1", "T-RDX-4", "T-RDX-24", "T-RDX-25"
)
def test_the_share_of_a_prompt() -> None:
    """R3.11: the depth of the match is of the prompt that asks, however long the one before was."""
    ours = PrefixTables(TTL)
    assert ours.match("m", path("m", "abcde"), 0) is None
    assert not ours.observe("m", (), A, 0)
    assert ours.observe("m", path("m", "abcd"), A, 0)
    assert ours.match("m", path("m", "abcde"), 1) == Match(A, 4)
    assert ours.match("m", path("m", "abcx"), 1) == Match(A, 3)
    assert ours.match("m", (), 1) is None
    assert ours.match("m", path("m", "x"), 1) is None


@pytest.mark.rule("T-PFX-24", "T-PFX-25", "T-PFX-27", "T-PFX-57")
def test_replicas_of_one_node_are_apart() -> None:
    """R3.22: one goes without the other; the node takes both; of an unknown model there is nothing."""
    ours = PrefixTables(TTL)
    for place, text in ((A, "aaa"), (A1, "bbb"), (B, "ccc")):
        ours.observe("m", path("m", text), place, 0)
    ours.forget("m", *A)
    assert [ours.match("m", path("m", text), 0) for text in ("aaa", "bbb")] == [None, Match(A1, 3)]
    ours.observe("m", path("m", "aaa"), A, 0)
    ours.forget("m", A[0], -1)
    found = [ours.match("m", path("m", text), 0) for text in ("aaa", "bbb", "ccc")]
    assert found == [None, None, Match(B, 3)]
    ours.forget("unknown", A[0], -1)
    assert ours._tables.keys() == {"m"}


@settings(max_examples=100 * EFFORT, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=6), st.sampled_from(PLACES), st.sampled_from([0.0, 100.0])
        ),
        max_size=30,
    )
)
def test_hashes_that_are_no_chain_do_no_harm(steps: list[tuple[list[int], Slot, float]]) -> None:
    """Another process may send any numbers: nothing fails, and what is too old goes all the same."""
    ours, now = PrefixTables(TTL, most=12), 0.0
    for numbers, place, passed in steps:
        now += passed
        ours.observe("m", tuple(numbers), place, now)
        ours.match("m", tuple(numbers), now)
        assert ours.size <= 12
        assert all(weight >= 0 for _, weight in ours.weights("m", now))
    ours.sweep(now + TTL + 1)
    assert ours.size == 0
    assert ours._tables == {}


@pytest.mark.rule("R3.10", "C43", "T-RDX-6", "T-RDX-7", "T-RDX-8", "T-RDX-20")
def test_what_is_too_old_goes() -> None:
    """R3.10: exactly as old as the limit still counts; a sweep leaves nothing behind."""
    ours = PrefixTables(TTL)
    ours.observe("m", path("m", "aaa"), A, 0)
    assert ours.match("m", path("m", "aaa"), TTL)
    assert ours.match("m", path("m", "aaa"), TTL + 0.001) is None
    ours.observe("m", path("m", "aab"), A, TTL)
    assert ours.match("m", path("m", "aaa"), TTL + 1) == Match(A, 2)
    ours.sweep(TTL + 1)
    assert ours.size == 3
    ours.sweep(3 * TTL)
    assert ours.size == 0
    assert not ours._tables


@pytest.mark.rule("R3.12", "T-RDX-9", "T-RDX-10", "T-RDX-11", "T-RDX-15", "T-RDX-16")
def test_weights() -> None:
    """R3.12: each block counts as a whole, half after a half-life, and not at all once it has expired."""
    ours = PrefixTables(TTL)
    assert ours.weights("m", 0) == []
    ours.observe("m", path("m", "aaaa"), A, 0)
    assert ours.weights("m", 0) == [(A, 4.0)]
    ours.observe("m", path("m", "bb"), B, HALF_LIFE_SECONDS)
    assert dict(ours.weights("m", HALF_LIFE_SECONDS)) == {A: 2.0, B: 2.0}
    assert [slot for slot, _ in ours.weights("m", TTL + 1)] == [B]


@pytest.mark.rule("T-RDX-21", "T-RDX-22", "T-RDX-23")
def test_it_is_bounded() -> None:
    """Beyond the limit the oldest entries of the largest model go, the last blocks of a prompt first."""
    ours = PrefixTables(TTL, most=100)
    ours.observe("small", path("small", "abc"), B, 0)
    for number in range(200):
        text = f"{number:03}xyz"
        ours.observe("large", path("large", text), A, number / 10)
        assert ours.size <= 100
    assert ours.match("small", path("small", "abc"), 20) == Match(B, 3)
    assert ours.match("large", path("large", "199xyz"), 20) == Match(A, 6)
    assert ours.match("large", path("large", "100xyz"), 20) == Match(A, 1), "later ones share that"
    many = PrefixTables(TTL, most=3 * MAX_OWNERS_PER_MODEL)
    for number in range(MAX_OWNERS_PER_MODEL + 5):
        many.observe("m", (number,), (UUID(int=number), 0), 0)
    assert len(many.weights("m", 0)) == MAX_OWNERS_PER_MODEL
    assert many.match("m", (MAX_OWNERS_PER_MODEL + 1,), 0) is None


def test_chains_that_no_prompt_has_stay_within_the_limit() -> None:
    """A message on the bus may name known blocks in another order; all copies of them count."""
    tables, chance = PrefixTables(3600.0, most=1_000), random.Random(1)
    blocks = list(range(1, 65))
    for second in range(500):
        tables.observe("m", tuple(chance.sample(blocks, 64)), A, float(second))
    assert tables.size <= 1_000
    stored = [len(node.blocks) for table in tables._tables.values() for node in table._order]
    assert sum(stored) == tables.size
