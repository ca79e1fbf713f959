"""How the replicas of an edited definition are replaced, decided. No database."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.scheduling.plan import plan
from nodes.scheduling.snapshot import (
    DesiredState,
    EvictReplica,
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
OLD, NEW = "a" * 64, "b" * 64


def host(number: int = 1, *, slots: int = 1, **labels: str) -> FleetNode:
    return FleetNode(UUID(int=number), f"n{number}", labels, slots)


def row(on: FleetNode, index: int = 0, **fields: Any) -> FleetReplica:
    """A loaded replica of the former definition, in use a moment ago."""
    values = {"model": "m", "state": "loaded", "in_flight": 0, "idle_since": NOW, "revision": OLD, **fields}
    return FleetReplica(UUID(int=1000 * on.id.int + index), on.id, index=index, **values)


def rule(minimum: int = 0, maximum: int = 0, **fields: Any) -> DesiredState:
    values = {"model": "m", "selector": {}, "failure_seq": 1, **fields}
    return DesiredState(minimum=minimum, maximum=maximum, **values)


def decided(desired_state: DesiredState, *, tick: bool = True, **fleet: Any) -> RuleDecision:
    fleet.setdefault("revisions", {"m": NEW})
    (decision,) = plan(Fleet(**fleet), [desired_state], NOW, tick=tick)
    return decision


def replaced(decision: RuleDecision) -> list[UUID | None]:
    return [one.replaces for one in decision.actions if isinstance(one, LoadReplica)]


def gone_first(decision: RuleDecision) -> list[UUID]:
    return [one.replica_id for one in decision.actions if isinstance(one, EvictReplica)]


@pytest.mark.rule("R1.94", "R1.98")
def test_a_replica_of_a_former_definition_is_replaced_by_one_load_that_names_it() -> None:
    """With a rule and without one; asked for once, and at a tick."""
    on = host(1, slots=2)
    for desired_state in (rule(), rule(1), rule(0, 1)):
        assert replaced(decided(desired_state, hosts=[on], replicas=[row(on)])) == [row(on).id]
        assert decided(desired_state, tick=False, hosts=[on], replicas=[row(on)]).actions == ()
        waits: dict[str, Any] = {"loads": {"m": 1}, "replacing": {row(on).id: False}}
        decision = decided(desired_state, hosts=[on], replicas=[row(on)], **waits)
        assert (decision.actions, decision.wanted) == ((), 1)
    decision = decided(rule(1), hosts=[on], replicas=[row(on)])
    assert (
        decision.reason
        == "the definition was edited: 1 replica has a former one, replica 0 on n1 is replaced"
    )


@pytest.mark.rule("R1.94")
@pytest.mark.parametrize(
    ("revision", "revisions"),
    [(NEW, {"m": NEW}), ("", {"m": NEW}), (OLD, {}), (OLD, {"n": NEW})],
    ids=["current", "not-known", "folder-hangs", "not-defined"],
)
def test_what_is_not_known_to_be_old_stays(revision: str, revisions: dict[str, str]) -> None:
    on = host(1, slots=2)
    found = decided(rule(1), hosts=[on], replicas=[row(on, revision=revision)], revisions=revisions)
    assert found.actions == ()


@pytest.mark.rule("R4.12", "R1.86")
def test_a_model_whose_rule_does_not_say_how_many_is_only_replaced() -> None:
    """Neither a burst nor idleness counts there."""
    on = host(1, slots=9)
    idle = [row(on, index, idle_since=NOW - timedelta(minutes=9)) for index in range(2)]
    for rows in ([row(on, in_flight=1)], idle):
        assert replaced(decided(rule(), hosts=[on], replicas=rows)) == [rows[0].id]
        assert decided(rule(), hosts=[on], replicas=rows, revisions={"m": OLD}).actions == ()


@pytest.mark.rule("R1.98")
def test_a_quarter_is_replaced_at_once() -> None:
    on = host(1, slots=30)
    rows = [row(on, index) for index in range(9)]
    assert len(replaced(decided(rule(9), hosts=[on], replicas=rows))) == 2
    one = {rows[5].id: False}
    assert len(replaced(decided(rule(9), hosts=[on], replicas=rows, loads={"m": 1}, replacing=one))) == 1


@pytest.mark.rule("R1.98")
def test_without_room_one_goes_first_if_others_serve_or_nothing_runs_on_it() -> None:
    a, b = host(1), host(2)
    lacks = {"loads": {"m": 1}, "replacing": {row(a).id: True}}
    alone = [row(a, in_flight=1)]
    assert gone_first(decided(rule(1), tick=False, hosts=[a], replicas=alone, **lacks)) == []
    assert gone_first(decided(rule(1), tick=False, hosts=[a], replicas=[row(a)], **lacks)) == [row(a).id]
    both = [*alone, row(b)]
    assert gone_first(decided(rule(2), tick=False, hosts=[a, b], replicas=both, **lacks)) == [row(a).id]
    leaves = [*both, row(b, 1, state="unloading")]
    assert gone_first(decided(rule(2), tick=False, hosts=[a, b], replicas=leaves, **lacks)) == []


@pytest.mark.rule("R1.98", "R4.7")
def test_a_spread_model_is_replaced_where_it_is_and_still_loaded_where_it_is_not() -> None:
    a, b = host(1), host(2)
    (load,) = decided(rule(spread=True), hosts=[a], replicas=[row(a)]).actions
    assert isinstance(load, LoadReplica)
    assert (load.allowed_nodes, load.pinned, load.replaces) == (frozenset({a.id}), True, row(a).id)
    waits: dict[str, Any] = {
        "loads": {"m": 1},
        "pinned": {"m": frozenset({a.id})},
        "replacing": {row(a).id: True},
    }
    (bare,) = decided(rule(spread=True), hosts=[a, b], replicas=[row(a)], **waits).actions
    assert isinstance(bare, LoadReplica)
    assert (bare.allowed_nodes, bare.replaces) == (frozenset({b.id}), None)


@pytest.mark.rule("R4.8", "R1.98")
def test_what_is_missing_comes_first_and_a_failed_load_rests() -> None:
    on = host(1, slots=3)
    assert replaced(decided(rule(2), hosts=[on], replicas=[row(on)])) == [None]
    for seconds, count in ((299, 0), (301, 1)):
        failed = {"m": Failure(NOW - timedelta(seconds=seconds), "refused", 1)}
        found = decided(rule(1), hosts=[on], replicas=[row(on)], failures=failed)
        assert len(replaced(found)) == count
    rests = rule(9, ticks=3, until=NOW + timedelta(seconds=60))
    assert len(replaced(decided(rests, hosts=[on], replicas=[row(on)]))) == 1


@pytest.mark.rule("R1.95", "T-REG-125")
def test_idle_ones_that_are_too_many_are_retired_instead() -> None:
    on = host(1, slots=9)
    idle = [row(on, index, idle_since=NOW - timedelta(minutes=9)) for index in range(3)]
    found = decided(rule(1), hosts=[on], replicas=idle)
    assert [type(one) for one in found.actions] == [RetireReplica, RetireReplica]


@pytest.mark.rule("R1.95", "R4.11", "T-REG-126")
def test_an_idle_one_of_a_former_definition_is_idle() -> None:
    """No one more beside it because the current one is busy."""
    on = host(1, slots=9)
    rows = [row(on, 0), row(on, 1, revision=NEW, in_flight=1)]
    found = decided(rule(1, 5), hosts=[on], replicas=rows)
    assert replaced(found) == [rows[0].id]


@dataclass
class Played:
    """A fleet in which loads are placed if there is room, and what leaves is gone at the next step."""

    hosts: list[FleetNode]
    rows: list[FleetReplica]
    desired_state: DesiredState
    wishes: list[LoadReplica] = field(default_factory=list)
    made: int = 0

    def step(self) -> RuleDecision:
        (decision,) = plan(self.fleet(), [self.desired_state], NOW, tick=True)
        assert not any(isinstance(one, RetireReplica | Unsatisfiable) for one in decision.actions)
        for action in decision.actions:
            if isinstance(action, LoadReplica):
                self.wishes.append(action)
            if isinstance(action, EvictReplica):
                self.leave(action.replica_id)
        return decision

    def fleet(self) -> Fleet:
        lacking = {one.replaces: True for one in self.wishes if one.replaces}
        pinned = frozenset(id for one in self.wishes if one.pinned for id in one.allowed_nodes or ())
        return Fleet(
            self.hosts, self.rows, {"m": len(self.wishes)}, {"m": pinned}, {}, None, {"m": NEW}, lacking
        )

    def leave(self, gone: UUID | None) -> None:
        self.rows = [replace(one, state="unloading") if one.id == gone else one for one in self.rows]

    def end(self) -> None:
        """Loads with room are published, each takes its former one out of the picks."""
        self.rows = [one for one in self.rows if one.state != "unloading"]
        for wish in tuple(self.wishes):
            for on in self.hosts:
                taken = {one.index for one in self.rows if one.node_id == on.id}
                free = set(range(on.slots)) - taken
                if free and (not wish.pinned or on.id in (wish.allowed_nodes or ())):
                    self.made += 1
                    new = row(on, min(free), revision=NEW)
                    self.rows.append(replace(new, id=UUID(int=10**9 + self.made)))
                    self.leave(wish.replaces)
                    self.wishes.remove(wish)
                    break


@pytest.mark.rule("R1.98", "R4.7", "R4.10")
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_an_edit_reaches_every_replica_and_never_takes_the_last_one_away(
    shape: list[tuple[int, int]], spread: bool, busy: bool
) -> None:
    """From any fleet whose rule is met. With more than one replica not even where nothing is idle."""
    hosts = [host(number, slots=slots) for number, (slots, _) in enumerate(shape, 1)]
    held = [max(min(count, on.slots), int(spread)) for on, (_, count) in zip(hosts, shape, strict=True)]
    rows = [
        row(on, index, in_flight=int(busy))
        for on, count in zip(hosts, held, strict=True)
        for index in range(count)
    ]
    count = len(rows)
    play = Played(hosts, rows, rule(spread=True) if spread else rule(count, count))
    for _ in range(4 * count + 4):
        before = sum(one.state == "loaded" for one in play.rows)
        play.step()
        serving = sum(one.state == "loaded" for one in play.rows)
        assert serving >= min(before, 1 if busy or count > 1 else 0)
        play.end()
    left = {one.revision for one in play.rows}
    full_and_busy = busy and count == 1 and sum(on.slots for on in hosts) == 1
    assert left <= ({OLD} if full_and_busy else {NEW})
    assert sum(one.state == "loaded" for one in play.rows) == count
    assert (
        not [one for one in play.step().actions if isinstance(one, LoadReplica | EvictReplica)]
        or full_and_busy
    )
