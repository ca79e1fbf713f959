"""Which node of an upgrade goes in which wave, for any nodes."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.backends.waves import CANARY, Member, Options, nodes_at_once, plan

members = st.lists(
    st.builds(
        Member,
        id=st.uuids(),
        name=st.text(max_size=3),
        replicas=st.integers(0, 5),
        last=st.booleans(),
        present=st.booleans(),
    ),
    max_size=30,
    unique_by=lambda member: member.id,
)
options = st.builds(Options, max_unavailable=st.integers(1, 8), canary=st.booleans())


def sizes(waves: dict[UUID, int]) -> list[int]:
    numbers = list(waves.values())
    return [numbers.count(number) for number in sorted(set(numbers))]


@given(members, options)
def test_every_node_has_one_wave_and_no_wave_is_empty(nodes: list[Member], asked: Options) -> None:
    waves = plan(nodes, asked)
    assert waves.keys() == {node.id for node in nodes}
    numbers = sorted(set(waves.values()))
    first = CANARY if asked.canary else CANARY + 1
    assert numbers == list(range(first, first + len(numbers)))


@given(members, options)
def test_no_wave_is_larger_than_allowed_and_only_the_last_is_smaller(
    nodes: list[Member], asked: Options
) -> None:
    waves = plan(nodes, asked)
    canary = [id for id, wave in waves.items() if wave == CANARY]
    assert len(canary) == (1 if nodes and asked.canary else 0)
    rest = sizes({id: wave for id, wave in waves.items() if wave != CANARY})
    at_once = nodes_at_once(asked.max_unavailable, len(nodes))
    assert all(size == at_once for size in rest[:-1])
    assert all(1 <= size <= at_once for size in rest[-1:])


@given(members, options)
def test_what_is_away_comes_last_and_before_it_what_would_leave_a_model_alone(
    nodes: list[Member], asked: Options
) -> None:
    waves = plan(nodes, asked)
    ranks = [(not n.present, n.last, n.replicas) for n in sorted(nodes, key=lambda n: waves[n.id])]
    by_wave: dict[int, list[tuple[bool, bool, int]]] = {}
    for node in nodes:
        by_wave.setdefault(waves[node.id], []).append((not node.present, node.last, node.replicas))
    ordered = [rank for wave in sorted(by_wave) for rank in sorted(by_wave[wave])]
    assert ordered == sorted(ranks)


@given(members, options, st.randoms())
def test_the_order_in_which_nodes_are_given_changes_nothing(
    nodes: list[Member], asked: Options, random: object
) -> None:
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan(nodes, asked) == plan(shuffled, asked)


def test_the_canary_is_the_node_with_the_fewest_replicas() -> None:
    few, many = Member(UUID(int=1), "z", 1), Member(UUID(int=2), "a", 2)
    last = Member(UUID(int=3), "b", 0, last=True)
    assert plan([many, last, few], Options()) == {few.id: 0, many.id: 1, last.id: 2}
    assert plan([many, last, few], Options(2, canary=False)) == {few.id: 1, many.id: 1, last.id: 2}


@pytest.mark.parametrize("asked", [Options(), Options(canary=False)])
def test_no_nodes_have_no_waves(asked: Options) -> None:
    assert plan([], asked) == {}


@given(st.integers(1, 100), st.integers(0, 3000))
def test_a_percentage_rounds_down_and_is_one_node_at_least(percent: int, nodes: int) -> None:
    at_once = nodes_at_once(f"{percent}%", nodes)
    assert at_once == max(nodes * percent // 100, 1)
    assert nodes_at_once(at_once, nodes) == at_once
