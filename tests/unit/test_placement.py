"""Placement: feasibility and ranking as properties over arbitrary fleets."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.placement import setbacks
from nodes.placement.choose import Candidate, Reason, choose, free_index, refusal
from nodes.placement.selector import ANY, Selector
from nodes.placement.setbacks import Setback

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)

LABELS = [(key, value) for key in ("tier", "zone") for value in ("a", "b")]
labels = st.frozensets(st.sampled_from(LABELS), max_size=2)
selectors = st.builds(Selector, model=st.just("m"), labels=st.none() | labels)

statuses = st.sampled_from(["pending", "healthy", "unhealthy", "offline", "draining"])
nodes = st.builds(
    Candidate,
    id=st.uuids(),
    name=st.text(min_size=1, max_size=5),
    node_type=st.sampled_from(["backend", "agent"]),
    status=statuses,
    free_vram=st.integers(-(2**40), 2**40),
    loaded=st.integers(0, 3),
    in_flight=st.integers(0, 9),
    taken=st.frozensets(st.integers(0, 3)),
    slots=st.integers(0, 4),
    labels=labels,
)
fleets = st.lists(nodes, max_size=8, unique_by=lambda node: node.id)


def view(**given_values: object) -> Candidate:
    plain = {
        "id": UUID(int=1),
        "name": "a",
        "node_type": "backend",
        "status": "healthy",
        "free_vram": 0,
        "loaded": 0,
        "in_flight": 0,
        "taken": frozenset(),
        "slots": 1,
    }
    return Candidate(**{**plain, **given_values})  # type: ignore[arg-type]


@pytest.mark.rule("R1.63", "R1.64", "R1.68", "R1.69", "R2.5")
@given(fleets, st.frozensets(st.uuids(), max_size=2), selectors)
def test_only_healthy_backend_nodes_that_match_and_have_a_free_slot_are_chosen(
    fleet: list[Candidate], resting: frozenset[UUID], selector: Selector
) -> None:
    """I10, R1.1, R1.63: nothing is placed on a pending, draining, offline, unhealthy, agent or full node.

    Nor on one outside the selector, and a selector that cannot be read matches nothing.
    """
    decision = choose(fleet, resting=resting, selector=selector)
    if decision.node is None:
        assert all(refusal(node, resting, selector=selector) is not None for node in fleet)
        return
    assert selector.labels is not None
    assert selector.labels <= decision.node.labels
    assert len(decision.node.taken) < decision.node.slots, "no node over its cap"
    assert decision.node.id not in resting
    assert (decision.node.status, decision.node.node_type) == ("healthy", "backend")
    assert decision.replica_index not in decision.node.taken
    assert 0 <= decision.replica_index < decision.node.slots


@given(fleets)
def test_every_refused_node_keeps_its_reason(fleet: list[Candidate]) -> None:
    """Lesson 12: feasible and refused together are the whole fleet."""
    decision = choose(fleet)
    assert set(decision.refused) == {node.id for node in fleet if refusal(node) is not None}
    assert {node.id for node in decision.ranked} == {node.id for node in fleet} - set(decision.refused)


@given(fleets.flatmap(lambda fleet: st.tuples(st.just(fleet), st.permutations(fleet))), selectors)
def test_the_choice_does_not_depend_on_the_order_of_the_fleet(
    fleets: tuple[list[Candidate], list[Candidate]], selector: Selector
) -> None:
    """A placement that re-computes to another answer could not be explained (I14)."""
    one, other = (
        choose([Candidate(**{**node.__dict__, "name": str(node.id)}) for node in fleet], selector=selector)
        for fleet in fleets
    )
    assert one == other
    assert one.why_none() == other.why_none()


@given(nodes)
def test_the_lowest_free_index_is_taken(node: Candidate) -> None:
    """R1.63: the lowest integer in [0, cap) not in use; rows above a lowered cap count too (R1.64)."""
    expected = sorted(set(range(node.slots)) - node.taken) if len(node.taken) < node.slots else []
    assert free_index(node) == (expected[0] if expected else None)


def test_an_idle_node_wins_then_the_one_with_more_free_memory() -> None:
    """R1.70: idle first, most effectively free memory among equals."""
    busy = view(id=UUID(int=1), loaded=1, free_vram=100)
    small, large = view(id=UUID(int=2), free_vram=1), view(id=UUID(int=3), free_vram=50)
    assert choose([busy, small, large]).node == large


def test_a_node_that_failed_this_load_comes_after_those_that_did_not() -> None:
    """Its rest is over, so it is the last resort: another node is tried first, however full that one is."""
    failed, other = view(id=UUID(int=1), free_vram=9), view(id=UUID(int=2), loaded=2)
    known = {failed.id: Setback(1, NOW)}
    assert choose([failed, other], setbacks=known).node == other
    assert choose([failed], setbacks=known).node == failed


def test_a_resting_node_is_not_chosen_and_the_reason_is_kept() -> None:
    """A load says that it waits for a node which did not answer, instead of asking it all the time."""
    silent = view()
    decision = choose([silent], resting={silent.id})
    assert decision.node is None
    assert decision.refused == {silent.id: Reason.SILENT}
    assert decision.why_none() == "no node can take it: 1 not answering or failed a moment ago"


def test_a_nodes_rest_doubles_up_to_a_limit_and_delays_no_other() -> None:
    """The back-off belongs to the node: another one that fails for the first time starts at the beginning."""
    one, other, known, rests = UUID(int=1), UUID(int=2), dict[UUID, Setback](), []
    for _ in range(12):
        known = setbacks.after_failure(known, one, NOW)
        rests.append((known[one].until - NOW).total_seconds())
    assert rests == [1, 2, 4, 8] + [15] * 8
    known = setbacks.after_failure(known, other, NOW)
    assert (known[other].times, setbacks.next_end(known, NOW)) == (1, 1)
    later = NOW + timedelta(seconds=1)
    assert setbacks.resting(known, NOW) == {one, other}
    assert setbacks.resting(known, later) == {one}
    assert setbacks.next_end(known, later) == pytest.approx(14)
    assert setbacks.next_end({}, NOW) is None


def test_setbacks_survive_the_payload() -> None:
    """The next attempt may be another controller's; what else the payload says stays."""
    known = setbacks.after_failure({}, UUID(int=1), NOW)
    payload = setbacks.into_payload({"model": "m"}, known)
    assert setbacks.from_payload(payload) == known
    assert payload["model"] == "m"
    assert setbacks.from_payload({}) == {}


def test_the_reason_names_what_to_do() -> None:
    """The caller learns whether to add a node, approve one or wait."""
    assert choose([]).why_none() == "no node is registered"
    assert choose([view(status="pending")]).why_none() == "only pending nodes (1): approve one"
    mixed = choose([view(status="offline"), view(id=UUID(int=2), status="draining")]).why_none()
    assert mixed == "no node can take it: 1 draining, 1 offline"
    assert refusal(view(taken=frozenset({0}))) is Reason.FULL


@pytest.mark.rule("R2.5", "R1.68", "R1.69")
@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ({("tier", "fast"), ("gpu", "a")}, "the selector of model m: gpu=a, tier=fast"),
        (None, "the selector of model m, which cannot be read"),
    ],
    ids=["demands", "unreadable"],
)
def test_a_selector_that_nothing_matches_is_named_with_its_model(
    selector: set[tuple[str, str]] | None, said: str
) -> None:
    """Whether a node that does not match is there or not says nothing: it is of no use."""
    demanded = Selector("m", None if selector is None else frozenset(selector))
    fleet = [
        view(labels=frozenset({("tier", "fast")})),
        view(id=UUID(int=2), status="offline", labels=frozenset({("gpu", "a")})),
        view(id=UUID(int=3), node_type="agent"),
    ]
    assert choose(fleet, selector=demanded).why_none() == f"no node matches {said}"


@pytest.mark.rule("R2.5")
def test_a_node_that_does_not_match_is_one_reason_among_others() -> None:
    slow, full = view(), view(id=UUID(int=2), labels=frozenset({("tier", "fast")}), taken=frozenset({0}))
    fast = Selector("m", frozenset({("tier", "fast")}))
    said = choose([slow, full], selector=fast).why_none()
    assert said == "no node can take it: 1 no free slot for this model, 1 not matching the rule's selector"
    assert choose([slow, full], selector=ANY).node == slow
