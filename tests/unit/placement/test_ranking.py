"""A ranked fleet decides as the plain choice does, whatever changed and whatever was asked before."""

import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.placement import ranking
from nodes.placement.choose import Candidate, Need, Selector, choose_node, find_refusal
from nodes.placement.explain import FleetView
from nodes.placement.load_times import NodeBackoff
from nodes.placement.ranking import ModelFacts, RankedFleet
from tests.support.effort import EFFORT

SIZE = 6
ASKED = FleetView((), Need(vram=1))
NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
IDS = [UUID(int=number) for number in range(1, SIZE + 1)]
ids = st.sampled_from(IDS)
LABELS = [(key, value) for key in ("tier", "zone") for value in ("a", "b")]
figures = st.integers(0, 3)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """Small figures: many nodes are equal but for their names."""
    id = draw(ids)
    return Candidate(
        id=id,
        name=draw(st.sampled_from("ab")) + str(id),
        node_type=draw(st.sampled_from(["backend"] * 5 + ["agent"])),
        status=draw(st.sampled_from(["healthy"] * 5 + ["draining", "unhealthy"])),
        free_vram=draw(figures),
        loaded=draw(figures),
        in_flight=draw(figures),
        used_indices=frozenset(),
        slots=draw(st.integers(1, 2)),
        labels=draw(st.frozensets(st.sampled_from(LABELS), max_size=2)),
        available_vram=draw(figures),
        total_disk=draw(st.sampled_from([0, 9])),
        available_disk=draw(figures),
    )


needs = st.builds(Need, vram=figures, vram_required=st.booleans(), disk=figures, disk_required=st.booleans())
labels = st.none() | st.frozensets(st.sampled_from(LABELS), max_size=1)
questions = st.fixed_dictionaries(
    {
        "need": needs,
        "selector": st.builds(Selector, model=st.just("m"), labels=labels),
        "backoffs": st.dictionaries(ids, st.builds(NodeBackoff, figures.map(lambda n: n + 1), st.just(NOW))),
        "backed_off": st.frozensets(ids, max_size=2),
    }
)
owns = st.builds(
    ModelFacts,
    st.dictionaries(ids, st.frozensets(st.integers(0, 2), min_size=1), max_size=2),
    st.dictionaries(ids, st.just(frozenset({"other"})), max_size=2),
    promised_bytes=st.dictionaries(ids, figures, max_size=2),
)
steps = st.lists(candidates() | ids | st.tuples(questions, owns), min_size=1, max_size=30)


def as_seen(node: Candidate, question: dict[str, Any], own: ModelFacts) -> Candidate:
    keys = {key for key, _ in question["selector"].labels or ()}
    labels = frozenset(pair for pair in node.labels if pair[0] in keys)
    taken, conflicts = own.used_indices.get(node.id, frozenset()), own.conflicts.get(node.id, frozenset())
    promised = own.promised_bytes.get(node.id, 0)
    return replace(node, labels=labels, used_indices=taken, conflicts=conflicts, promised_bytes=promised)


@pytest.mark.parametrize("rows", [ranking.MAX_ROWS, 1])
@settings(max_examples=150 * EFFORT)
@given(played=steps, last=st.tuples(questions, owns), chance=st.randoms(use_true_random=False))
def test_it_answers_as_the_plain_choice(
    played: list[Any], last: tuple[Any, ModelFacts], chance: random.Random, rows: int
) -> None:
    """Nodes come, change and go between questions; neither that nor the order of rows makes a difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "MAX_ROWS", rows)
        fleet, there = RankedFleet(), dict[UUID, Candidate]()
        for step in [*played, last]:
            if isinstance(step, Candidate):
                fleet.put(step)
                there[step.id] = step
            elif isinstance(step, UUID):
                fleet.drop(step)
                there.pop(step, None)
            else:
                question, own = step
                nodes = [as_seen(node, question, own) for node in there.values()]
                seen, decision = fleet.decide(FleetView((), **question), own)
                plain = choose_node(chance.sample(nodes, len(nodes)), **question)
                assert decision == plain == seen.decide()
                assert decision.describe_refusals() == plain.describe_refusals()
                assert sorted(seen.nodes, key=lambda node: node.id) == sorted(nodes, key=lambda node: node.id)


def test_only_what_has_changed_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[UUID] = []
    plain = find_refusal

    def counted(node: Candidate, *given: Any, **options: Any) -> Any:
        judged.append(node.id)
        return plain(node, *given, **options)

    monkeypatch.setattr(ranking, "find_refusal", counted)
    fleet = RankedFleet()
    nodes = [
        Candidate(UUID(int=number), f"n{number:02}", "backend", "healthy", number, 0, 0, frozenset(), 1)
        for number in range(40)
    ]
    for node in nodes:
        fleet.put(node)
    fleet.decide(ASKED)
    assert len(judged) == 40
    judged.clear()
    fleet.put(replace(nodes[7], free_vram=100))
    _, decision = fleet.decide(ASKED, ModelFacts({nodes[3].id: frozenset({0})}))
    assert sorted(judged) == [nodes[3].id, nodes[7].id]
    assert decision.node is not None
    assert decision.node.id == nodes[7].id
