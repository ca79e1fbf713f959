"""Explanations of placement: what decided, who was near, and how large."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.placement import explain, load_decision
from nodes.placement.choose import ANY_NODE, NO_NEED, Candidate, Need, Rank, Reason, Selector
from nodes.placement.explain import MAX_BYTES, OTHER_COLUMNS_BYTES, FleetView
from nodes.placement.load_decision import LoadQuestion
from nodes.placement.load_times import NodeBackoff
from tests.unit.placement.test_choose import GIB, fleets, needs, selectors, view

LATER = datetime(2026, 8, 22, 10, tzinfo=UTC)


def explained(snapshot: FleetView) -> explain.Explanation:
    return explain.explain(snapshot, snapshot.decide())


def fleet(*nodes: Mapping[str, object], need: Need = NO_NEED, **more: object) -> FleetView:
    views = [view(**{"id": UUID(int=n), "name": "abcdefgh"[n % 8], **one}) for n, one in enumerate(nodes)]
    return FleetView(views, need, **more)  # type: ignore[arg-type]


snapshots = st.builds(
    FleetView,
    nodes=fleets,
    need=needs,
    selector=selectors | st.just(ANY_NODE),
    restricted=st.booleans(),
).flatmap(
    lambda one: st.builds(
        lambda failed, resting: replace(
            one,
            backoffs={one.nodes[at % len(one.nodes)].id: NodeBackoff(n, LATER) for at, n in failed.items()}
            if one.nodes
            else {},
            backed_off=frozenset(one.nodes[at % len(one.nodes)].id for at in resting)
            if one.nodes
            else frozenset(),
        ),
        st.dictionaries(st.integers(0, 7), st.integers(1, 3), max_size=3),
        st.frozensets(st.integers(0, 7), max_size=2),
    )
)


@given(snapshots)
def test_every_node_is_counted_once(snapshot: FleetView) -> None:
    """Feasible and refused nodes are the whole fleet; best and misses are parts of them."""
    facts = explained(snapshot).facts
    refused = sum(one["count"] for one in facts["refused"])
    assert facts["nodes"]["considered"] == len(snapshot.nodes) == facts["nodes"]["feasible"] + refused
    assert len(facts["best"]) == min(facts["nodes"]["feasible"], 5)
    assert len(facts["misses"]) == min(refused, 5)


@pytest.mark.parametrize("size", [1, 20, 200, 2000])
@pytest.mark.parametrize("letter", ["a", "🦙"])
def test_it_is_never_larger_than_16_kib(size: int, letter: str) -> None:
    """The longest names and the longest selector."""
    labels = frozenset((letter * 126 + f"{n:02}", letter * 255) for n in range(64))
    full = [
        view(
            id=UUID(int=n),
            name=f"{n:05}" + letter * 250,
            status="healthy" if n % 2 else "offline",
            free_vram=-(2**62),
            available_vram=n,
            labels=labels,
        )
        for n in range(size)
    ]
    for selector in (Selector("m" * 255, labels), Selector("m" * 255, frozenset({("no", "no")}))):
        told = explained(FleetView(full, Need(vram=2**62), selector))
        stored = orjson.dumps([told.sentence, told.facts])
        assert len(stored) <= MAX_BYTES - OTHER_COLUMNS_BYTES


@pytest.mark.rule("R1.70", "R1.71", "R1.72")
@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        (fleet({}), "the only node"),
        (
            fleet({}, {"status": "offline"}, {"status": "offline"}, {"slots": 0}),
            "the only node that can take it; the others: 2 offline, 1 no free slot for this model",
        ),
        (
            fleet({}, {}, backoffs={UUID(int=0): NodeBackoff(2, LATER)}),
            "fewest failures of load or backend: 0 against 2 on a",
        ),
        (
            fleet({"free_vram": 4 * GIB}, {"free_vram": 20 * GIB}, need=Need(vram=8 * GIB + 1)),
            "it has the VRAM needed: 20.0 GiB free of 8.1 GiB needed"
            " against 4.0 GiB free of 8.1 GiB needed on a",
        ),
        (fleet({}, {"loaded": 2}), "it is idle; loaded replicas: 0 against 2 on b"),
        (
            fleet({"loaded": 1, "in_flight": 3}, {"loaded": 2, "in_flight": 1}),
            "fewest requests: 1 against 3 on a",
        ),
        (
            fleet({"free_vram": 20 * GIB}, {"free_vram": 12 * GIB}, need=Need(vram=8 * GIB)),
            "most VRAM free: 20.0 GiB against 12.0 GiB on b",
        ),
        (
            fleet({"available_vram": 20 * GIB + 2}, {"available_vram": 20 * GIB + 1}),
            "most VRAM available: 21474836482 bytes against 21474836481 bytes on b",
        ),
        (fleet({}, {}), "equal to b in every term, the first by name"),
        (
            fleet({}, {"has_backend": True}),
            "the backend is there already: installed against not installed on a",
        ),
        (fleet(), "no node is registered"),
        (fleet(restricted=True), "none of the nodes that it may use is registered"),
        (fleet({"status": "offline"}), "no node can take it: 1 offline"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_sentence_says_what_decided(snapshot: FleetView, said: str) -> None:
    assert explained(snapshot).sentence == said


def test_every_term_of_the_rank_has_words() -> None:
    """A term without words could decide and not be named; the name is the last one."""
    assert (*explain.TERMS, "name") == Rank._fields


def test_the_nearest_misses_come_first_with_their_figures() -> None:
    """Who fails the last question was nearest; among those who has the most memory."""
    told = explained(
        fleet(
            {"status": "offline"},
            {"free_vram": GIB},
            {"free_vram": 2 * GIB},
            {"slots": 0, "available_disk": 7, "promised_bytes": 5},
            {"node_type": "agent"},
            {"status": "pending"},
            {"free_vram": 9 * GIB},
            need=Need(vram=4 * GIB, vram_required=True),
            backed_off=frozenset({UUID(int=6)}),
        )
    )
    assert [(one["node"], one["code"]) for one in told.facts["misses"]] == [
        ("g", "silent"),
        ("c", "memory"),
        ("b", "memory"),
        ("d", "full"),
        ("a", "offline"),
    ]
    assert told.facts["misses"][1]["free_vram"] == 2 * GIB
    full = told.facts["misses"][3]
    assert (full["available_disk"], full["promised_bytes"]) == (7, 5)
    assert {explain.reason_code(reason) for reason in Reason} >= {"memory", "disk", "selector"}


def test_those_behind_say_what_put_them_there() -> None:
    """Of themselves: the sentence about the best stood in their rows (review R14)."""
    told = explained(fleet({}, {"loaded": 1}, {"loaded": 1, "in_flight": 2}))
    assert [one.get("against") for one in told.facts["best"]] == [
        None,
        "it is not idle; loaded replicas: 1 against 0 on a",
        "it is not idle; loaded replicas: 1 against 0 on a",
    ]
    assert isinstance(told.node, Candidate)


@given(fleets, needs, st.integers(1, 9))
def test_a_plan_keeps_every_cap_and_every_budget(nodes: list[Candidate], need: Need, replicas: int) -> None:
    """As the loads would, one after another; only the last decision may find no node."""
    told = list(load_decision.simulate_placements(LoadQuestion(FleetView(nodes, need)), [None] * replicas))
    places = [(one.node.id, one.replica_index) for one in told if one.node is not None]
    assert len(set(places)) == len(places) >= len(told) - 1
    assert len(told) == replicas or told[-1].node is None
    for node in nodes:
        here = [index for id, index in places if id == node.id]
        assert not here or len(node.used_indices) + len(here) <= node.slots
        if need.vram_required and here:
            assert need.vram * len(here) <= node.free_vram or not need.vram
