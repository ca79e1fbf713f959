"""The replica pass, decided: the order of its steps, and what must hold of every plan. No database."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.scheduling.plan import COOLDOWN_DURATION, plan
from nodes.scheduling.snapshot import (
    Action,
    ClearUnsatisfiable,
    DesiredState,
    EndPressure,
    Failure,
    Fleet,
    FleetNode,
    FleetReplica,
    LoadReplica,
    RetireReplica,
    RuleDecision,
    Unsatisfiable,
)

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
TICK = timedelta(seconds=30)


def ago(**span: float) -> datetime:
    return NOW - timedelta(**span)


def host(number: int = 1, *, slots: int = 1, **labels: str) -> FleetNode:
    return FleetNode(UUID(int=number), f"n{number}", labels, slots)


def row(on: FleetNode, index: int = 0, **fields: Any) -> FleetReplica:
    """A loaded replica that has been idle for ten minutes."""
    values = {"model": "m", "state": "loaded", "in_flight": 0, "idle_since": ago(minutes=10), **fields}
    return FleetReplica(UUID(int=1000 * on.id.int + index), on.id, index=index, **values)


def rule(minimum: int = 0, maximum: int = 0, **fields: Any) -> DesiredState:
    values = {"model": "m", "selector": {}, "failure_seq": 1, **fields}
    return DesiredState(minimum=minimum, maximum=maximum, **values)


def decided(
    desired_state: DesiredState, *, tick: bool = True, now: datetime = NOW, **fleet: Any
) -> RuleDecision:
    (decision,) = plan(Fleet(**fleet), [desired_state], now, tick=tick)
    return decision


def loads(actions: Iterable[Action]) -> list[LoadReplica]:
    return [action for action in actions if isinstance(action, LoadReplica)]


def retired(actions: Iterable[Action]) -> list[UUID]:
    return [action.replica_id for action in actions if isinstance(action, RetireReplica)]


def flags(decision: RuleDecision) -> list[Action]:
    return [action for action in decision.actions if isinstance(action, Unsatisfiable | ClearUnsatisfiable)]


# --- minimum


@pytest.mark.rule("R4.10", "R4.12", "T-REC-3", "R4.21", "T-ROU-13")
def test_what_is_missing_is_loaded_without_a_first_request() -> None:
    decision = decided(rule(2), hosts=[host(1), host(2)])
    assert loads(decision.actions) == list(decision.actions)
    assert [action.allowed_nodes for action in loads(decision.actions)] == [None, None]
    assert (decision.wanted, decision.current, decision.loading) == (2, 0, 0)
    assert decision.reason == "2 wanted, 0 running, 0 loading: starting 2"


@pytest.mark.rule("R4.10", "R1.65", "T-REC-16", "T-REC-21")
@pytest.mark.parametrize(
    ("held", "chosen", "expected"), [((), 3, 7), ((0, 2), 3, 5), ((0, 2), 2, 2), ((0, 0, 0, 0, 1, 2), 3, 1)]
)
def test_no_more_than_there_is_room_for(held: tuple[int, ...], chosen: int, expected: int) -> None:
    """Caps of 4, 2 and 1: every row takes a slot, whatever its state; a load without a slot takes one too."""
    hosts = [host(1, slots=4), host(2, slots=2, tier="a"), host(3, slots=1, tier="a")]
    rows = [row(hosts[number], index, state="unloading") for index, number in enumerate(held)]
    desired_state = rule(20, selector={"tier": "a"} if chosen == 2 else {})
    assert len(loads(decided(desired_state, hosts=hosts, replicas=rows).actions)) == expected
    assert (
        len(loads(decided(desired_state, hosts=hosts, replicas=rows, loads={"m": 1}).actions)) == expected - 1
    )


@pytest.mark.rule("R4.9", "R4.10", "R4.22", "R1.66", "T-REG-55", "T-REG-56")
def test_only_what_requests_find_counts_and_what_is_under_way() -> None:
    """A replica on a node that is not healthy is replaced at once, one that is loading is waited for."""
    here, gone = host(1, slots=2), host(9)
    assert len(loads(decided(rule(2), hosts=[here], replicas=[row(here), row(gone)]).actions)) == 1
    loading = row(here, 1, state="loading")
    decision = decided(rule(2), hosts=[here], replicas=[row(here), loading], loads={"m": 1})
    assert (decision.actions, decision.current, decision.loading) == ((), 1, 1)


@pytest.mark.rule("R4.15", "T-REC-8")
def test_a_selector_names_the_nodes_of_the_load() -> None:
    fits, other = host(1, tier="a", more="x"), host(2)
    (asked,) = loads(decided(rule(1, selector={"tier": "a"}), hosts=[fits, other]).actions)
    assert asked.allowed_nodes == frozenset({fits.id})


def test_a_replica_where_the_rule_does_not_want_it_is_replaced_and_then_goes() -> None:
    """It serves until another one does, and goes before those that are wanted."""
    fits, other = host(1, tier="a"), host(2)
    desired_state = rule(1, 1, selector={"tier": "a"})
    assert loads(decided(desired_state, hosts=[fits, other], replicas=[row(other)]).actions)
    both = [row(fits), row(other)]
    assert retired(decided(desired_state, hosts=[fits, other], replicas=both).actions) == [both[1].id]
    busy = [row(fits), row(other, in_flight=1)]
    assert decided(desired_state, hosts=[fits, other], replicas=busy).actions == ()


# --- what cannot be had


@pytest.mark.rule("R4.23", "C9", "C10", "T-REC-17", "R1.87")
@pytest.mark.parametrize(
    ("hosts", "selector", "reason"),
    [
        ([], {}, "there is no healthy node"),
        ([host(1)], {"b": "2", "a": "1"}, "no healthy node has a=1, b=2"),
        ([host(1)], None, "its node selector cannot be read, so it matches no node"),
        ([host(2)], {}, "1 wanted, 0 running, 0 loading, but no free slot on the 1 node that it may run on"),
    ],
    ids=["no node", "no match", "unreadable", "no slot"],
)
def test_a_problem_is_counted_and_the_third_time_begins_a_cooldown(
    hosts: list[FleetNode], selector: Any, reason: str
) -> None:
    taken = [row(host(2), state="idle")]
    desired_state = rule(1, selector=selector)
    for ticks in (1, 2):
        decision = decided(desired_state, hosts=hosts, replicas=taken)
        assert decision.actions == (Unsatisfiable("m", ticks, None, reason),)
        desired_state = replace(desired_state, ticks=ticks)
    until = NOW + COOLDOWN_DURATION
    said = f"{reason}; nothing is tried until 10:05:00 UTC"
    decision = decided(desired_state, hosts=hosts, replicas=taken)
    assert decision.actions == (Unsatisfiable("m", 3, until, said),)
    assert decision.reason == said


@pytest.mark.rule("R4.8", "T-REC-17")
def test_a_cooldown_leaves_the_model_alone_and_keeps_its_reason() -> None:
    on = host(1, slots=3)
    desired_state = rule(3, ticks=3, until=NOW + timedelta(seconds=1))
    assert (decided(desired_state, hosts=[on]).actions, decided(desired_state, hosts=[on]).reason) == ((), "")
    many = [row(on, index) for index in range(3)]
    assert decided(replace(desired_state, minimum=1), hosts=[on], replicas=many).actions == ()


@pytest.mark.rule("R4.8", "R4.10")
def test_in_a_cooldown_only_what_was_lost_is_replaced() -> None:
    """It could be had a moment ago; what could not be had rests, also when the loss was looked at before."""
    a, b = host(1), host(2)
    rests = rule(3, ticks=3, until=NOW + timedelta(minutes=4))
    there = [row(a)]
    lost = replace(rests, seen=2)
    decision = decided(lost, tick=False, hosts=[a, b], replicas=there)
    assert (len(loads(decision.actions)), flags(decision)) == (1, [])
    assert decision.reason == "1 of 2 were lost: 1 more, without waiting for the cooldown"
    leaves = [*there, row(b, state="unloading")]
    assert len(loads(decided(lost, tick=False, hosts=[a, b], replicas=leaves).actions)) == 1
    assert decided(replace(rests, seen=1), tick=False, hosts=[a, b], replicas=there).actions == ()
    assert decided(lost, tick=False, hosts=[a], replicas=there).actions == ()
    assert decided(lost, tick=False, hosts=[a, b], replicas=there, loads={"m": 2}).actions == ()
    everywhere = rule(spread=True, ticks=3, until=NOW + timedelta(minutes=4), seen=2)
    (asked,) = loads(decided(everywhere, tick=False, hosts=[a, b], replicas=there).actions)
    assert asked.allowed_nodes == frozenset({b.id})


@pytest.mark.rule("R4.10", "R4.23", "T-REC-18")
def test_after_a_cooldown_success_clears_the_flags_and_failure_begins_another() -> None:
    desired_state = rule(1, ticks=3, until=NOW)
    decision = decided(desired_state, hosts=[host(1)])
    assert [type(action) for action in decision.actions] == [LoadReplica, ClearUnsatisfiable]
    assert flags(decided(desired_state)) == [
        Unsatisfiable("m", 4, NOW + COOLDOWN_DURATION, decided(desired_state).reason),
    ]


def test_flags_end_also_when_somebody_else_has_brought_what_was_missing() -> None:
    """A rule that is satisfied does not say that it cannot be."""
    on = host(1)
    assert decided(rule(1, ticks=2), hosts=[on], replicas=[row(on)]).actions == (ClearUnsatisfiable("m"),)


@pytest.mark.rule("R4.21")
def test_a_model_without_definition_is_said_and_counted_but_has_no_cooldown() -> None:
    """Its definition may be written at any moment."""
    decision = decided(rule(1, ticks=7), hosts=[host(1)], defined=frozenset({"other"}))
    reason = "no model m is defined in the models folder"
    assert decision.actions == (Unsatisfiable("m", 8, None, reason),)
    assert decided(rule(0, 2), hosts=[host(1)], defined=frozenset()).reason == reason
    assert loads(decided(rule(1), hosts=[host(1)], defined=None).actions)


def test_a_load_that_fails_is_tried_twice_more_and_then_rests() -> None:
    """A broken model is not loaded at each tick for ever."""
    desired_state, failed = rule(1), {"m": Failure(ago(seconds=5), "refused", 2)}
    for ticks in (1, 2):
        decision = decided(desired_state, hosts=[host(1)], failures=failed)
        assert loads(decision.actions)
        assert [one.ticks for one in flags(decision) if isinstance(one, Unsatisfiable)] == [ticks]
        desired_state = replace(desired_state, ticks=ticks)
    (third,) = decided(desired_state, hosts=[host(1)], failures=failed).actions
    assert third == Unsatisfiable(
        "m", 3, NOW + COOLDOWN_DURATION, "the last load failed: refused; nothing is tried until 10:05:00 UTC"
    )
    old = {"m": Failure(ago(seconds=5), "refused", 1)}
    assert flags(decided(desired_state, hosts=[host(1)], failures=old)) == [ClearUnsatisfiable("m")]


def test_a_slot_that_is_being_freed_is_waited_for() -> None:
    on = host(1)
    decision = decided(rule(1), hosts=[on], replicas=[row(on, state="unloading")])
    assert (decision.actions, "no free slot" in decision.reason) == ((), True)


# --- spread


@pytest.mark.rule("R4.7", "T-REC-1", "R1.86")
def test_a_spread_model_is_loaded_on_each_node_that_lacks_it() -> None:
    """Also where another node has two; one on a node that does not match is of no use."""
    a, b, c = host(1, slots=2, tier="a"), host(2, tier="a"), host(3)
    desired_state = rule(spread=True, selector={"tier": "a"})
    assert {one.allowed_nodes for one in loads(decided(desired_state, hosts=[c, b, a]).actions)} == {
        frozenset({a.id}),
        frozenset({b.id}),
    }
    rows = [row(a), row(a, 1), row(c)]
    (asked,) = loads(decided(desired_state, hosts=[a, b, c], replicas=rows).actions)
    assert asked.allowed_nodes == frozenset({b.id})
    assert decided(desired_state, hosts=[a, b, c], loads={"m": 1}).actions == ()


@pytest.mark.rule("R4.7", "T-REC-2")
def test_a_spread_model_without_nodes_wants_nothing() -> None:
    decision = decided(rule(spread=True, selector={"tier": "a"}, ticks=1), hosts=[host(1)])
    assert (decision.actions, decision.reason) == ((), "no healthy node has tier=a")


@pytest.mark.rule("R4.7", "R4.17")
def test_a_spread_model_keeps_one_on_each_node() -> None:
    a, b = host(1, slots=2), host(2, slots=2)
    rows = [row(a), row(a, 1), row(b, 1, idle_since=ago(hours=1))]
    assert retired(decided(rule(spread=True), hosts=[a, b], replicas=rows).actions) == [rows[1].id]


# --- busy burst


@pytest.mark.rule("R4.11", "R4.14", "T-REC-4", "T-REC-5", "T-REC-11")
def test_one_more_while_all_are_busy_and_none_is_on_its_way() -> None:
    on = host(1, slots=9)
    busy = [row(on, index, in_flight=1) for index in range(2)]
    decision = decided(rule(1, 4), hosts=[on], replicas=busy)
    assert (len(loads(decision.actions)), decision.wanted) == (1, 3)
    assert decision.reason == "all 2 replicas are busy: one more"
    assert decided(rule(1), hosts=[on], replicas=busy[:1]).reason == "the one replica is busy: one more"
    assert decided(rule(1, 2), hosts=[on], replicas=busy).actions == ()
    assert len(decided(rule(1), hosts=[on], replicas=busy).actions) == 1
    assert decided(rule(1, 4), hosts=[on], replicas=busy, loads={"m": 1}).actions == ()
    assert decided(rule(1, 4), hosts=[on], replicas=[*busy, row(on, 2, idle_since=NOW)]).actions == ()
    assert decided(rule(1, 4), hosts=[host(1, slots=2)], replicas=busy).actions == ()
    assert decided(rule(0, 4), hosts=[on]).actions == ()


@pytest.mark.rule("R4.11")
def test_a_replica_that_may_come_back_counts_against_the_limit() -> None:
    on, away = host(1, slots=9), host(9)
    rows = [row(on, in_flight=1), row(away)]
    assert decided(rule(1, 2), hosts=[on], replicas=rows).actions == ()


# --- pressure


@pytest.mark.rule("R4.13", "R4.14", "T-REC-9", "T-REC-10", "T-REC-14", "T-REC-15")
def test_one_more_under_pressure_where_there_is_room_for_it() -> None:
    """R4.13: never over the limit, no eviction, no cooldown; it ends only with what is loaded."""
    on = host(1, slots=3)
    there = [row(on, idle_since=NOW), row(on, 1, in_flight=1)]
    decision = decided(rule(1, 3), hosts=[on], replicas=there, pressed={"m": 4})
    assert [type(action) for action in decision.actions] == [LoadReplica, EndPressure]
    assert decision.reason == (
        "4 requests within a minute not sent to the replica that remembers the prompt: too busy; one more"
    )
    assert loads(decided(rule(1), hosts=[on], replicas=there[:1], pressed={"m": 1}).actions)
    for desired_state, fleet in (
        (rule(1, 2), {}),
        (rule(1), {}),
        (rule(1, 3), {"loads": {"m": 1}}),
        (rule(1, 3), {"hosts": [host(1, slots=2)]}),
        (rule(1, 3), {"replicas": []}),
        (rule(spread=True), {}),
        (rule(0, 0), {}),
        (rule(1, 3, until=NOW + TICK), {}),
        (rule(1, 3), {"pressed": {"other": 9}}),
    ):
        scene: dict[str, Any] = {"hosts": [on], "replicas": there, "pressed": {"m": 1}} | fleet
        actions = decided(desired_state, **scene).actions
        assert not any(isinstance(action, EndPressure | Unsatisfiable) for action in actions)
    assert not decided(rule(1, 3), tick=False, hosts=[on], replicas=there, pressed={"m": 4}).actions
    busy = [replace(one, in_flight=1) for one in there]
    both = decided(rule(1, 3), hosts=[on], replicas=busy, pressed={"m": 4}).actions
    assert [type(action) for action in both] == [LoadReplica]


@pytest.mark.rule("R4.13")
@given(minimum=st.integers(1, 4), maximum=st.integers(0, 6), slots=st.integers(1, 12))
def test_a_text_that_all_prompts_share_does_not_take_the_fleet(
    minimum: int, maximum: int, slots: int
) -> None:
    """Review R18: with a minimum of 1 and no maximum, one system prompt grew a model over every slot."""
    on = host(1, slots=slots)
    played = Played(
        Fleet([on], [row(on, idle_since=NOW)]), [rule(minimum, maximum and max(minimum, maximum))]
    )
    for _ in range(12):
        played.fleet = replace(played.fleet, pressed={"m": 99})
        played.apply(played.plan())
        played.end()
        played.fleet = replace(
            played.fleet, replicas=[replace(one, idle_since=played.now) for one in played.fleet.replicas]
        )
    limit = max(minimum, maximum) if maximum else minimum + 1
    assert len(played.fleet.replicas) == max(min(limit, slots), 1)


# --- scale-down


@pytest.mark.rule("R4.17", "R4.18", "C2", "T-REC-6", "T-REC-7")
def test_idle_ones_go_highest_index_first_then_the_longest_idle() -> None:
    a, b = host(1, slots=3), host(2, slots=3)
    rows = [row(a), row(b, 2), row(a, 1), row(b, 1, idle_since=ago(hours=1))]
    gone = retired(decided(rule(1), hosts=[a, b], replicas=rows).actions)
    assert gone == [rows[1].id, rows[3].id, rows[2].id]
    assert decided(rule(4), hosts=[a, b], replicas=rows).actions == ()
    assert len(retired(decided(rule(0, 9), hosts=[a, b], replicas=rows).actions)) == 3


@pytest.mark.rule("R4.18")
def test_nothing_is_retired_while_a_load_is_under_way() -> None:
    """A load under pressure beside an idle replica: the next pass would retire that one."""
    on = host(slots=3)
    there = [row(on), row(on, 1, idle_since=ago(minutes=9))]
    played = Played(Fleet([on], there, {}, pressed={"m": 4}), [rule(1, 3)])
    (first,) = played.plan()
    assert loads(first.actions)
    played.apply([first])
    (second,) = played.plan()
    assert not second.actions
    assert retired(decided(rule(1, 3), hosts=[on], replicas=there).actions) == [there[1].id]


@pytest.mark.rule("R4.13", "R4.18")
def test_nothing_is_retired_under_pressure() -> None:
    """At the limit pressure loads nothing; with one replica less it would load that one again."""
    on = host(slots=3)
    full: dict[str, Any] = {"hosts": [on], "replicas": [row(on), row(on, 1)]}
    assert not decided(rule(1, 2), **full, pressed={"m": 1}).actions
    assert retired(decided(rule(1, 2), **full, pressed={"other": 1}).actions) == [full["replicas"][1].id]


@pytest.mark.rule("R4.18")
def test_a_load_that_waits_keeps_no_idle_replica() -> None:
    """Otherwise two models whose loads wait for the memory of the other's idle replica block each other."""
    on = host(slots=3)
    there = [row(on), row(on, 1)]
    waits: dict[str, Any] = {"hosts": [on], "replicas": there, "loads": {"m": 1}, "waiting": {"m": 1}}
    assert retired(decided(rule(1, 3), **waits).actions) == [there[1].id]
    assert not decided(rule(1, 3), **waits | {"loads": {"m": 2}}).actions


@pytest.mark.rule("R4.18", "C2")
def test_idle_is_more_than_five_minutes_after_the_end_of_the_last_request() -> None:
    on = host(1, slots=2)
    for idle, gone in ((timedelta(minutes=5), 0), (timedelta(minutes=5, seconds=1), 1)):
        rows = [row(on, idle_since=NOW), row(on, 1, idle_since=NOW - idle)]
        assert len(retired(decided(rule(1), hosts=[on], replicas=rows).actions)) == gone


@pytest.mark.rule("R4.14")
def test_the_last_idle_one_stays_while_the_next_tick_would_load_it_again() -> None:
    on = host(1, slots=3)
    rows = [row(on, in_flight=1), row(on, 1), row(on, 2)]
    assert retired(decided(rule(1), hosts=[on], replicas=rows).actions) == [rows[2].id]
    assert retired(decided(rule(1, 1), hosts=[on], replicas=rows).actions) == [rows[2].id, rows[1].id]


# --- between two ticks


@pytest.mark.rule("R4.14", "R4.23")
def test_between_two_ticks_only_what_is_missing_is_asked_for() -> None:
    """A burst, an idle replica, a problem and a failure wait for the tick that counts them."""
    on = host(1, slots=3)
    assert loads(decided(rule(1), tick=False, hosts=[on]).actions)
    assert decided(rule(1), tick=False, hosts=[on], replicas=[row(on, in_flight=1)]).actions == ()
    assert decided(rule(1), tick=False, hosts=[on], replicas=[row(on), row(on, 1)]).actions == ()
    problem = decided(rule(1), tick=False)
    assert (problem.actions, problem.reason) == ((), "there is no healthy node")
    failed = Fleet(hosts=[on], failures={"m": Failure(NOW, "refused", 2)})
    assert plan(failed, [rule(1)], NOW, tick=False) == []


@dataclass(frozen=True)
class Counted(FleetNode):
    """Counts how often anything of a node is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            Counted.looks += 1
        return super().__getattribute__(name)


@pytest.mark.rule("R4.1")
def test_rules_share_what_a_selector_chooses() -> None:
    """So a pass is linear: twice as many rules on the same nodes do not look at each node twice as often."""
    hosts = [Counted(UUID(int=number), f"n{number:03}", {"tier": "x"}, 1) for number in range(1, 101)]

    def looks(rules: int) -> int:
        Counted.looks = 0
        desired_states = [rule(2, model=f"m{number:02}", selector={"tier": "x"}) for number in range(rules)]
        decisions = plan(Fleet(hosts), desired_states, NOW, tick=True)
        assert all(len(loads(one.actions)) == 2 for one in decisions)
        return Counted.looks

    assert looks(40) == looks(20)


# --- what must hold of every plan


MODELS = ("a", "b")
STATES = st.sampled_from(["loaded"] * 6 + ["loading", "staging", "unloading", "idle"])


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Fleet, list[DesiredState]]:
    hosts = [
        host(number, slots=draw(st.integers(1, 3)), tier=draw(st.sampled_from("xy")))
        for number in range(1, draw(st.integers(0, 4)) + 1)
    ]
    rows = [
        replace(
            row(on, index + 10 * MODELS.index(model)),
            model=model,
            index=index,
            state=draw(STATES),
            in_flight=draw(st.integers(0, 1)),
            idle_since=NOW - timedelta(minutes=draw(st.integers(0, 20))),
        )
        for on in [*hosts, host(9, slots=2)]
        for model in MODELS
        for index in range(draw(st.integers(0, on.slots)))
    ]
    placed = Counter(one.model for one in rows if one.state in ("loading", "staging"))
    under_way = {model: placed[model] + draw(st.integers(0, 2)) for model in MODELS}
    pressed = {model: draw(st.integers(0, 2)) for model in MODELS}
    return Fleet(hosts, rows, under_way, pressed=pressed), [draw(desired_states(model)) for model in MODELS]


@st.composite
def desired_states(draw: st.DrawFn, model: str) -> DesiredState:
    spread, minimum = draw(st.booleans()), draw(st.integers(0, 4))
    return DesiredState(
        model,
        selector=draw(st.sampled_from([{}, {"tier": "x"}, {"tier": "z"}, None])),
        minimum=0 if spread else minimum,
        maximum=0 if spread else draw(st.just(0) | st.integers(max(minimum, 1), 6)),
        spread=spread,
        ticks=draw(st.integers(0, 4)),
        until=draw(st.sampled_from([None, ago(seconds=1), NOW + TICK])),
        failure_seq=1,
    )


@dataclass
class Played:
    """A fleet to which plans are applied: first nothing but what was asked for, later what comes of it."""

    fleet: Fleet
    rules: list[DesiredState]
    now: datetime = NOW
    wishes: list[LoadReplica] = field(default_factory=list)

    def plan(self, *, tick: bool = True) -> list[RuleDecision]:
        return plan(self.fleet, self.rules, self.now, tick=tick)

    def apply(self, decisions: Sequence[RuleDecision]) -> None:
        for action in (action for decision in decisions for action in decision.actions):
            match action:
                case LoadReplica(model):
                    self.wishes.append(action)
                    under_way = {**self.fleet.loads, model: self.fleet.loads.get(model, 0) + 1}
                    self.fleet = replace(self.fleet, loads=under_way)
                case RetireReplica(_, replica_id):
                    self._rows(lambda one, gone=replica_id: self._gone(one, gone))
                case Unsatisfiable(model, ticks, until):
                    self._flags(model, ticks, until)
                case ClearUnsatisfiable(model):
                    self._flags(model, 0, None)
                case EndPressure(model):
                    self.fleet = replace(self.fleet, pressed={**self.fleet.pressed, model: 0})

    def _gone(self, one: FleetReplica, gone: UUID) -> FleetReplica:
        return replace(one, state="unloading") if one.id == gone else one

    def _rows(self, change: Any) -> None:
        self.fleet = replace(self.fleet, replicas=[change(one) for one in self.fleet.replicas])

    def _flags(self, model: str, ticks: int, until: datetime | None) -> None:
        self.rules = [
            replace(one, ticks=ticks, until=until) if one.model == model else one for one in self.rules
        ]

    def end(self) -> None:
        """All that is under way ends well: loads have their replica, what leaves is gone."""
        self.now += TICK
        rows = [one for one in self.fleet.replicas if one.state != "unloading"]
        rows = [replace(one, state="loaded") if one.state in ("loading", "staging") else one for one in rows]
        for number, wish in enumerate(self.wishes):
            for on in self.fleet.hosts:
                taken = {one.index for one in rows if (one.node_id, one.model) == (on.id, wish.model)}
                free = set(range(on.slots)) - taken
                if free and (wish.allowed_nodes is None or on.id in wish.allowed_nodes):
                    id = UUID(int=10**6 + len(rows) * 1000 + number)
                    rows.append(FleetReplica(id, on.id, wish.model, min(free), "loaded", 0, self.now))
                    break
        self.wishes = []
        self.fleet = replace(self.fleet, replicas=rows, loads={})


def there(fleet: Fleet, desired_state: DesiredState) -> int:
    """Loaded replicas where the rule wants them."""
    selector = desired_state.selector
    fits = {one.id for one in fleet.hosts if selector is not None and selector.items() <= one.labels.items()}
    return sum(
        one.model == desired_state.model and one.state == "loaded" and one.node_id in fits
        for one in fleet.replicas
    )


@pytest.mark.rule("R4.10", "R4.11", "R4.15", "R1.65")
@given(fleets(), st.booleans())
def test_never_over_the_limit_the_caps_or_outside_the_selector(
    scene: tuple[Fleet, list[DesiredState]], tick: bool
) -> None:
    fleet, rules = scene
    slots = {one.id: one for one in fleet.hosts}
    for desired_state, decision in zip(rules, plan(fleet, rules, NOW, tick=tick), strict=True):
        asked = loads(decision.actions)
        rows = [one for one in fleet.replicas if one.model == desired_state.model]
        under_way = fleet.loads[desired_state.model]
        unplaced = max(under_way - sum(one.state in ("loading", "staging") for one in rows), 0)
        for wish in asked:
            chosen = (
                [slots[id] for id in wish.allowed_nodes] if wish.allowed_nodes is not None else fleet.hosts
            )
            assert desired_state.selector is not None
            assert all(desired_state.selector.items() <= one.labels.items() for one in chosen)
            free = sum(one.slots - sum(has.node_id == one.id for has in rows) for one in chosen)
            assert free >= (1 if desired_state.spread else len(asked) + unplaced)
        if desired_state.maximum and asked:
            assert there(fleet, desired_state) + under_way + len(asked) <= desired_state.maximum


@pytest.mark.rule("R4.17", "R4.18")
@given(fleets())
def test_nothing_busy_or_needed_is_retired(scene: tuple[Fleet, list[DesiredState]]) -> None:
    fleet, rules = scene
    healthy = {one.id for one in fleet.hosts}
    for desired_state, decision in zip(rules, plan(fleet, rules, NOW, tick=True), strict=True):
        gone = set(retired(decision.actions))
        if not gone:
            continue
        left = replace(fleet, replicas=[one for one in fleet.replicas if one.id not in gone])
        assert all(one.in_flight == 0 for one in fleet.replicas if one.id in gone)
        assert any(one.model == desired_state.model and one.node_id in healthy for one in left.replicas)
        assert there(left, desired_state) >= min(desired_state.minimum, there(fleet, desired_state))
        assert not loads(plan(left, [desired_state], NOW, tick=True)[0].actions)


@given(fleets(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(
    scene: tuple[Fleet, list[DesiredState]], chance: random.Random
) -> None:
    fleet, rules = scene

    def shuffled(rows: Sequence[Any]) -> list[Any]:
        return chance.sample(list(rows), len(rows))

    other = replace(fleet, hosts=shuffled(fleet.hosts), replicas=shuffled(fleet.replicas))
    assert plan(other, shuffled(rules), NOW, tick=True) == plan(fleet, rules, NOW, tick=True)


@given(fleets())
def test_a_plan_applied_to_its_own_picture_leaves_nothing_to_do(
    scene: tuple[Fleet, list[DesiredState]],
) -> None:
    """Asked for, but nothing has come of it yet: the second pass asks for nothing more."""
    play = Played(*scene)
    play.apply(play.plan())
    for decision in play.plan():
        assert not loads(decision.actions)
        assert not retired(decision.actions)


@pytest.mark.rule("R4.10", "R4.23")
@given(fleets())
def test_passes_converge(scene: tuple[Fleet, list[DesiredState]]) -> None:
    """Within as many ticks as a cooldown lasts and some: nothing changes any more, and minimums are met."""
    play = Played(*scene)
    play.end()
    for _ in range(30):
        play.apply(play.plan())
        play.end()
    last = play.plan()
    assert not [
        one for decision in last for one in decision.actions if isinstance(one, LoadReplica | RetireReplica)
    ]
    for desired_state, decision in zip(play.rules, last, strict=True):
        missing = max(desired_state.minimum - there(play.fleet, desired_state), 0)
        assert not missing or desired_state.ticks >= 3
        assert bool(missing) <= ("no" in decision.reason or bool(desired_state.until))
