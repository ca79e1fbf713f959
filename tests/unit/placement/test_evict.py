"""Which replicas make room: properties over arbitrary nodes, replicas and rules."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.loading import load_attempts
from nodes.loading.load_attempts import NodeReason
from nodes.placement import choose, evict
from nodes.placement.choose import Candidate, Need, Reason, Selector, choose_node, find_refusal
from nodes.placement.evict import (
    JUST_LOADED,
    ProtectionRules,
    Resident,
    choose_victims,
    nodes_short_of_memory,
)
from tests.unit.placement.test_choose import nodes, view

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
MODELS = ["m", "a", "b", "c"]
IDS = [UUID(int=number) for number in range(1, 4)]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Candidate], list[Resident], ProtectionRules, Need]:
    """Up to three nodes, the replicas on them, rules, and a need that is required."""
    fleet = [replace(draw(nodes), id=id, name=str(id)) for id in IDS[: draw(st.integers(1, 3))]]
    fleet = [replace(node, free_vram=node.free_vram % 5, status="healthy") for node in fleet]
    found = draw(
        st.lists(
            st.builds(
                Resident,
                id=st.uuids(),
                node_id=st.sampled_from([node.id for node in fleet]),
                name=st.just("x#0"),
                model_name=st.sampled_from(MODELS),
                leaving=st.booleans(),
                in_flight=st.integers(0, 1),
                last_used=st.integers(0, 9).map(lambda seconds: NOW - timedelta(seconds=seconds)),
                vram=st.integers(0, 6),
                loaded_at=st.sampled_from([None, NOW, NOW - JUST_LOADED, NOW - timedelta(minutes=1)]),
                started_at=st.sampled_from([None, NOW - timedelta(seconds=70)]),
            ),
            max_size=8,
            unique_by=lambda one: one.id,
        )
    )
    loaded = Counter(one.model_name for one in found if not one.leaving)
    minimums = draw(st.dictionaries(st.sampled_from(MODELS), st.integers(0, 2)))
    spread = draw(st.frozensets(st.sampled_from(MODELS), max_size=1))
    times = draw(st.sampled_from([None, 0, 3]))
    claimed = (
        draw(st.frozensets(st.sampled_from(IDS), max_size=1)) if times is not None else frozenset[UUID]()
    )
    guard = ProtectionRules("m", NOW, loaded, minimums, spread, times, claimed)
    partial = draw(st.sampled_from([(), ((3, 4), (2, 2), (1, 1))]))
    return fleet, found, guard, Need(draw(st.integers(1, 12)), vram_required=True, partial=partial)


@pytest.mark.rule("R1.75", "R2.34", "R2.35", "R2.45", "R2.51", "R2.52", "R2.53")
@given(clusters(), st.booleans())
def test_victims_are_idle_unprotected_on_one_candidate_and_no_more_than_it_needs(
    cluster: tuple[list[Candidate], list[Resident], ProtectionRules, Need], matches: bool
) -> None:
    """A node outside the selector, of agents, without a slot or resting gets none of it."""
    fleet, found, guard, need = cluster
    selector = Selector("m", frozenset() if matches else frozenset({("tier", "a")}))
    refused = choose_node(fleet, need=need, selector=selector).refused
    short = nodes_short_of_memory(fleet, refused)
    chosen = choose_victims(short, found, guard, need)
    if chosen.node is None:
        return
    assert refused[chosen.node.id] is Reason.MEMORY
    gone = Counter(one.model_name for one in chosen.victims)
    for one in chosen.victims:
        assert (one.node_id, one.leaving) == (chosen.node.id, False)
        assert not one.in_flight or guard.least_serving is not None
        assert one.serves_until(guard.least_serving or 0) <= NOW
        assert chosen.node.id not in guard.claimed
        assert one.model_name not in {"m", *guard.spread}
        assert one.loaded_at is None or one.loaded_at <= NOW - JUST_LOADED
    for model, count in gone.items():
        least = guard.minimums.get(model, 0)
        assert guard.loaded[model] - count >= least
    leaving = sum(one.vram for one in found if one.leaving and one.node_id == chosen.node.id)
    after = chosen.node.free_vram + leaving + sum(one.vram for one in chosen.victims)
    assert find_refusal(replace(chosen.node, free_vram=after), need=need, selector=selector) is None
    for one in chosen.victims:
        assert after - one.vram < need.vram, "no victim too many"
    again = choose_victims(short[::-1], found[::-1], guard, need)
    assert (again.node, again.victims, again.why) == (chosen.node, chosen.victims, chosen.why), "any order"


def resident(number: int, **given_values: object) -> Resident:
    plain = {
        "id": UUID(int=number),
        "node_id": IDS[0],
        "name": f"a#{number}",
        "model_name": "a",
        "leaving": False,
        "in_flight": 0,
        "last_used": NOW - timedelta(minutes=number),
        "vram": 10,
    }
    return Resident(**{**plain, **given_values})  # type: ignore[arg-type]


GUARD = ProtectionRules("m", NOW, loaded={"a": 4}, minimums={})
NEED = Need(vram=10, vram_required=True)


@pytest.mark.rule("R2.51", "R2.52")
def test_the_longest_unused_goes_unless_something_keeps_it_and_the_sentence_says_so() -> None:
    node = view(free_vram=2)
    found = [resident(1), resident(3), resident(2)]
    chosen = choose_victims([node], found, GUARD, NEED)
    assert [one.name for one in chosen.victims] == ["a#3"]
    assert chosen.why == "waits for a#3 on a to stop, the least recently used"
    busy = [resident(1, in_flight=1), resident(2, vram=0), resident(3, vram=1), resident(4, model_name="m")]
    assert choose_victims([node], busy, GUARD, NEED).why == (
        "no replica there can make room: 1 busy, 1 of the model itself, 1 of unknown size, 1 too small"
    )
    kept = replace(GUARD, loaded={"a": 1, "b": 1}, minimums={"a": 1}, spread={"b"})
    rows = [resident(1), resident(2, model_name="b"), resident(3, model_name="c", loaded_at=NOW)]
    assert choose_victims([node], rows, kept, NEED).why == (
        "no replica there can make room: 1 kept by the minimum of its rule,"
        " 1 kept on every node by its rule, 1 loaded a moment ago"
    )
    assert choose_victims([node], [], GUARD, NEED).why == ""


@pytest.mark.rule("R2.51")
def test_what_leaves_already_is_waited_for_and_claimed_once() -> None:
    """The second load's node has the first one's reservation: what it took is not there for the second."""
    leaving = resident(1, leaving=True, vram=20)
    first = choose_victims([view(free_vram=2)], [leaving, resident(2)], GUARD, NEED)
    assert (first.victims, first.why) == ((), "waits for a#1 on a to stop")
    second = choose_victims([view(free_vram=-8)], [leaving, resident(2)], GUARD, NEED)
    assert second.victims == ()
    third = choose_victims([view(free_vram=-18)], [leaving, resident(2)], GUARD, NEED)
    assert [one.name for one in third.victims] == ["a#2"]


@pytest.mark.rule("R2.34", "R2.45", "R2.31")
def test_nothing_is_evicted_for_a_node_that_only_rests_or_lacks_a_slot() -> None:
    short, full = view(), view(id=IDS[1], name="b", used_indices=frozenset({0}))
    rests = view(id=IDS[2], name="c", free_vram=10)
    decision = choose_node([short, full, rests], need=NEED, backed_off={rests.id})
    assert nodes_short_of_memory([short, full, rests], decision.refused) == []
    decision = choose_node([short, full], need=NEED)
    assert nodes_short_of_memory([short, full], decision.refused) == [short]
    assert nodes_short_of_memory([short, full], decision.refused, {short.id}) == []


@pytest.mark.rule("R2.65")
def test_the_end_of_a_load_names_each_node_and_equal_reasons_once() -> None:
    payload: dict[str, object] = {"model": "m"}
    for number, (name, reason) in enumerate([("a", "no file"), ("b", "no memory"), ("c", "no file")], 1):
        payload = load_attempts.with_refusal(payload, NodeReason(UUID(int=number), name, reason))
    assert load_attempts.refusals_error(payload).message == "a, c: no file; b: no memory"
    assert [one.node_name for one in load_attempts.refusals(payload)] == ["a", "b", "c"]


@pytest.mark.rule("R2.82", "R2.83", "T-ROU-20", "T-ROU-21", "T-ROU-22", "T-ROU-23", "T-ROU-24", "T-ROU-25")
@given(st.lists(st.booleans(), min_size=1, max_size=3), st.booleans())
def test_a_node_with_a_model_of_its_groups_comes_last_but_is_taken(
    shared: list[bool], narrowed: bool
) -> None:
    """With and without a selector; however much memory is free there."""
    labels = frozenset({("tier", "a")})
    fleet = [
        view(
            id=id, name=str(id), labels=labels, conflicts=frozenset({"x"} if one else ()), available_vram=one
        )
        for id, one in zip(IDS, shared, strict=False)
    ]
    decision = choose_node(fleet, selector=Selector("m", labels if narrowed else frozenset()))
    assert [bool(node.conflicts) for node in decision.ranked] == sorted(shared)
    assert decision.node is not None


@pytest.mark.rule("R2.51")
def test_no_replica_goes_for_a_load_that_the_node_cannot_hold_when_it_is_empty() -> None:
    """What replicas use is an estimate: added up it may be more than there is."""
    node = replace(view(), free_vram=20, most_vram=70)
    idle = NOW - timedelta(hours=1)
    found = [
        Resident(UUID(int=9 + number), node.id, f"{model}#0", model, False, 0, idle, vram=30)
        for number, model in enumerate("abc")
    ]
    guard = ProtectionRules("m", NOW, loaded={"a": 1, "b": 1, "c": 1}, minimums={})
    fits, too_large = (Need(vram=vram, vram_required=True) for vram in (70, 71))
    assert len(choose_victims([node], found, guard, fits).victims) == 2
    told = choose_victims([node], found, guard, too_large)
    assert (told.node, told.why) == (None, "no replica there can make room: 3 too small")


@pytest.mark.rule("R2.51")
def test_replicas_that_are_kept_cost_no_look_at_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most replicas of a large cluster are: the choice is repeated by every load that waits."""
    looks: list[Need] = []
    genuine = choose.has_memory

    def has_memory(node: Candidate, need: Need) -> bool:
        looks.append(need)
        return genuine(node, need)

    monkeypatch.setattr(evict, "has_memory", has_memory)
    found = [resident(1), *(resident(number, in_flight=1) for number in range(2, 50))]
    assert len(choose_victims([view(free_vram=2)], found, GUARD, NEED).victims) == 1
    assert len(looks) == 3, "without a victim, with it, and whether it could stay"
