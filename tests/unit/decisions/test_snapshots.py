"""The log of what decisions saw: every state comes back from its entries, and so does every decision."""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.decisions import decision_log
from nodes.decisions import scale_records as scheduling
from nodes.decisions.decision_log import Section
from nodes.loading import load_snapshots
from nodes.placement.choose import Candidate, Need
from nodes.placement.evict import ProtectionRules, Resident
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import EvictionCandidates, LoadQuestion, decide_load
from nodes.scheduling.plan import plan
from nodes.scheduling.snapshot import Failure, Fleet
from tests.unit.placement.test_choose import view
from tests.unit.placement.test_evict import clusters
from tests.unit.placement.test_explain import snapshots
from tests.unit.scheduling import test_replica_plan

DATA = Path(__file__).parents[2] / "data"
SEEN = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        Section,
        rows=st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2) | st.none(), max_size=3),
        whole=st.booleans(),
    ),
    max_size=3,
)


def read_back(*seen: decision_log.SnapshotSections) -> decision_log.State:
    """What another process restores from the log of these decisions."""
    state: decision_log.State = {}
    entries = []
    for one in seen:
        found = decision_log.find_changes(state, one)
        decision_log.apply_changes(state, found)
        entries.append(decision_log.encode(found))
    return decision_log.restore(entries)


@given(st.lists(SEEN, max_size=5))
def test_a_log_ends_with_what_was_seen_last(seen: list[decision_log.SnapshotSections]) -> None:
    """A whole section replaces, another one adds; nothing that did not change is written twice."""
    expected: dict[str, dict[str, Any]] = {}
    for one in seen:
        for name, section in one.items():
            before = {} if section.whole else expected.get(name, {})
            expected[name] = {**before, **section.rows}
    state = read_back(*seen)
    assert {name: rows for name, rows in state.items() if rows} == {
        name: rows for name, rows in expected.items() if rows
    }
    if seen:
        assert decision_log.find_changes(state, seen[-1]) == {}


@pytest.mark.rule("I14", "R2.30")
@given(st.lists(snapshots, min_size=1, max_size=3), st.booleans(), st.data())
def test_the_same_decision_follows_from_the_log(
    views: list[FleetView], evicts: bool, data: st.DataObject
) -> None:
    """Reasons, order and figures included, behind other decisions and whatever the order of rows."""
    every = []
    for one in views:
        named = replace(one, nodes=[replace(node, name=str(node.id)) for node in one.nodes])
        ids = st.sampled_from([node.id for node in one.nodes]) if one.nodes else st.uuids()
        every.append(LoadQuestion(named, data.draw(st.frozensets(ids, max_size=2)), evicts))
    model = "m"
    state = read_back(
        *(load_snapshots.encode_load(str(number), model, one) for number, one in enumerate(every))
    )
    number, question = len(every) - 1, every[-1]
    known = load_snapshots.decode_load(state, str(number), model)
    assert known is not None
    assert known.occupants is None
    decision, again = question.view.decide(), known.question.view.decide()
    assert again == decision
    assert decide_load(known.question, again) == decide_load(question, decision)


@pytest.mark.rule("I14", "R2.51")
@given(clusters())
def test_the_same_eviction_follows_from_the_log(
    cluster: tuple[list[Candidate], list[Resident], ProtectionRules, Need],
) -> None:
    """With what protects replicas, and whose reading of the clock it was."""
    fleet, residents, guard, need = cluster
    question = LoadQuestion(FleetView(fleet, need))
    decision = question.view.decide()
    room = EvictionCandidates(residents, guard).choose_eviction(question, decision)
    known = load_snapshots.decode_load(
        read_back(load_snapshots.encode_load("1", "m", question, room)), "1", "m"
    )
    assert known is not None
    assert (known.occupants is None) == (room is None)
    if room is None or known.occupants is None:
        return
    again = known.occupants.choose_eviction(known.question, known.question.view.decide())
    assert again is not None
    assert (again.node, again.victims, again.why) == (room.node, room.victims, room.why)
    assert Counter(again.leaving) == Counter(room.leaving)
    assert decide_load(known.question, decision, again) == decide_load(question, decision, room)


@pytest.mark.rule("I14", "R4.6")
@given(test_replica_plan.fleets(), st.booleans())
def test_the_same_ruling_follows_from_the_log(scene: Any, tick: bool) -> None:
    """Each rule by itself, from sections that all rules share."""
    (fleet, desired_states), failed = scene, Failure(test_replica_plan.ago(seconds=9), "no such file", 2)
    pinned = {"a": frozenset({UUID(int=1)})}
    fleet = replace(fleet, pinned=pinned, failures={"b": failed}, defined=frozenset({"a", "b"}))
    now = test_replica_plan.NOW
    about = {desired_state.model: desired_state for desired_state in desired_states}
    state = read_back(scheduling.encode_rules(fleet, about, now, tick=tick))
    decisions = {one.model: one for one in plan(fleet, desired_states, now, tick=tick)}
    for model in about:
        seen = scheduling.decode_rule(state, model)
        assert seen is not None
        again = {one.model: one for one in plan(seen[0], [seen[1]], seen[2], tick=seen[3])}
        assert again.get(model) == decisions.get(model)


@pytest.mark.rule("I14", "R4.23")
@pytest.mark.parametrize(("checked_at", "is_counted"), [(10, True), (8, False), (None, False)])
def test_a_failure_of_an_entry_with_times_is_counted_as_it_was(
    checked_at: int | None, is_counted: bool
) -> None:
    """Earlier versions compared the times of the failure and of the last pass."""
    rule, on = test_replica_plan.rule(1), test_replica_plan.host(1)
    failures = {"m": Failure(test_replica_plan.ago(seconds=9), "refused", 5)}
    encoded = scheduling.encode_rules(
        Fleet([on], failures=failures), {"m": rule}, test_replica_plan.NOW, tick=True
    )
    facts = encoded["rule/m"].rows
    at = None if checked_at is None else test_replica_plan.ago(seconds=checked_at)
    demand = {**dict(facts["demand"]), "looked_at": at}
    del demand["failure_seq"]
    facts = {**facts, "demand": tuple(demand.items()), "failures": facts["failures"][:2]}
    seen = scheduling.decode_rule(read_back({**encoded, "rule/m": Section(facts)}), "m")
    assert seen is not None
    (decision,) = plan(seen[0], [seen[1]], seen[2], tick=seen[3])
    assert ("the last load failed" in decision.reason) == is_counted


def test_every_field_of_a_node_comes_back() -> None:
    """A new field is taken over by itself; its type says how it is read."""
    node = view(
        id=UUID(int=7),
        used_indices=frozenset({1, 2}),
        labels=frozenset({("tier", "fast")}),
        conflicts=frozenset({"other"}),
        available_vram=5,
        card_vram=9,
        total_disk=6,
        available_disk=7,
        promised_bytes=3,
        staged_bytes=8,
        disk_quota=9,
        other_models_bytes=10,
        gpu_totals=frozenset({(0, 24)}),
        file_port_failed=True,
        has_backend=True,
    )
    need = Need(1, True, 2, True, 3, True, 0.5, (("weights", 1), ("context", 2)), 2)
    question = LoadQuestion(FleetView([node], need), fits_by_replacement=True)
    known = load_snapshots.decode_load(read_back(load_snapshots.encode_load("1", "m", question)), "1", "m")
    assert known is not None
    assert known.question == question
    defaults = view(id=UUID(int=7))
    same = [one.name for one in fields(Candidate) if getattr(node, one.name) == getattr(defaults, one.name)]
    assert len(same) <= 10, "give every field of its own another value here"


def test_what_did_not_change_is_not_written_again() -> None:
    """A thousand nodes are written once; then one entry has the node that changed, and the load itself."""
    fleet = [view(id=UUID(int=n), name=f"n{n}", free_vram=n) for n in range(1000)]
    first = load_snapshots.encode_load("1", "m", LoadQuestion(FleetView(fleet, Need())))
    state: decision_log.State = {}
    whole = decision_log.find_changes(state, first)
    decision_log.apply_changes(state, whole)
    moved = [replace(fleet[0], free_vram=9), *fleet[1:]]
    second = decision_log.find_changes(
        state, load_snapshots.encode_load("2", "other", LoadQuestion(FleetView(moved, Need())))
    )
    assert set(second) == {"nodes", "load/2"}
    assert list(second["nodes"][0]) == ["n0"]
    assert len(decision_log.encode(second)) < 1000 < len(decision_log.encode(whole)) < 200_000


def test_what_other_loads_will_take_of_a_disk_rewrites_no_node() -> None:
    """Loads of two models see different figures; in turns they would write the nodes' rows each time."""
    fleet = [view(id=UUID(int=n), name=f"n{n}", total_disk=9, available_disk=9) for n in range(2)]
    seen = {"m": fleet, "other": [replace(fleet[0], promised_bytes=4), fleet[1]]}
    state: decision_log.State = {}
    written: list[set[str]] = []
    for number, model in enumerate(("m", "other", "m", "other")):
        question = LoadQuestion(FleetView(seen[model], Need(disk=6, disk_required=True)))
        changes = decision_log.find_changes(state, load_snapshots.encode_load(str(number), model, question))
        decision_log.apply_changes(state, changes)
        written.append(set(changes) - {f"load/{number}"})
        known = load_snapshots.decode_load(state, str(number), model)
        assert known is not None
        assert known.question.view.decide() == question.view.decide()
    assert written[1:] == [{"promised/other"}, set(), set()]


def test_a_reader_of_another_version_takes_what_it_knows() -> None:
    """A column that is gone is left out; one that came later has its default."""
    question = LoadQuestion(FleetView([view()], Need()))
    state = read_back(load_snapshots.encode_load("1", "m", question))
    columns = state["columns"]["node"]
    at = columns.index("available_disk")
    columns[at] = "of_another_version"
    known = load_snapshots.decode_load(state, "1", "m")
    assert known is not None
    assert known.question == question


@pytest.mark.rule("I14")
def test_entries_of_an_earlier_version_replay() -> None:
    """A log and its decisions as the version of 2026-11-23 wrote them.

    It retired a replica under pressure; the decision of that rule is the one of today.
    """
    stored = orjson.loads((DATA / "decisions/snapshots.json").read_bytes())
    entries = [orjson.dumps(entry) for entry in stored["entries"]]
    for position, expected in enumerate(stored["loads"], 1):
        state = decision_log.restore(entries[:position])
        known = load_snapshots.decode_load(state, expected["load"], expected["model"])
        assert known is not None
        question, decision = known.question, known.question.view.decide()
        candidates = known.occupants
        eviction = candidates.choose_eviction(question, decision) if candidates is not None else None
        explanation = decide_load(question, decision, eviction, is_expired=known.is_expired)
        assert (explanation.outcome, explanation.sentence) == (expected["outcome"], expected["sentence"])
        assert (str(explanation.node.id) if explanation.node else None) == expected["node_id"]
        victims = [victim.name for victim in eviction.victims] if eviction is not None else []
        assert victims == expected["victims"]
    state = decision_log.restore(entries)
    for expected in stored["rules"]:
        decoded = scheduling.decode_rule(state, expected["model"])
        assert decoded is not None
        (of_rule,) = plan(decoded[0], [decoded[1]], decoded[2], tick=decoded[3])
        assert (of_rule.reason, of_rule.wanted) == (expected["reason"], expected["wanted"])
