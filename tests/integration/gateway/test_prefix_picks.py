"""Picks by the prefix against a real PostgreSQL: the guard, the order, and the pure function beside them."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import IntegrityError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from nodes.gateway.request import InferenceRequest, Replica
from nodes.models import BackendNode, ModelSchedulingConfig, NodeModel, RoutePolicy
from nodes.replicas import statements
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.picks import raw
from tests.support.policy import Limits, Warm, select

__all__ = ["raw"]
pytestmark = pytest.mark.django_db(transaction=True)

NODES = [UUID(int=number) for number in range(1, 5)]
PLACES = [(node, index) for node in NODES for index in range(2)]
Place = tuple[UUID, int]
Ask = tuple[Place | None, float, int]
"""Whose beginning the prompt has, the share of it, and how many such picks there are."""


@pytest.fixture
def fleet() -> None:
    for node in NODES:
        hot.node(f"n{node.int}", id=node)
    for number, (node, index) in enumerate(PLACES):
        hot.replica(BackendNode(pk=node), index=index, address=f"a:{number}", state="unloading")


def chosen(
    raw: psycopg.Connection[Any],
    candidates: Sequence[Warm],
    asks: Sequence[Ask],
    limits: Limits,
) -> Counter[tuple[int, Place, bool]]:
    """What the statement gives each ask, and whether it found the hot replica: how often."""
    now, owner = clock.now(), uuid4()
    document = {
        "keys": [],
        "releases": [],
        "picks": [
            {"ask": ask, "scope": -1, "model": "echo", "key": "", "n": times, "ratio": share}
            | ({"node": str(hot[0]), "index": hot[1]} if hot else {})
            for ask, (hot, share, times) in enumerate(asks)
        ],
        "thresholds": {"match": limits.match, "abs": limits.abs, "rel": limits.rel},
        "weights": {
            "echo": {f"{one.node}/{one.index}": one.weight for one in candidates if one.weight},
        },
    }
    try:
        for one in candidates:
            raw.execute(
                "UPDATE node_models SET phase = 'serving', in_flight = %s, reason = '', owner_kind = '',"
                " deadline = NULL, next_stop_at = NULL WHERE node_id = %s"
                " AND replica_index = %s",
                (one.in_flight, one.node, one.index),
            )
        about = {"process": owner, "host": "h", "pid": 1, "started": now, "now": now, "version": "1"}
        raw.execute(statements.ANNOUNCE, about)
        values = str(owner), now.isoformat(), json.dumps(document)
        rows = psycopg.RawCursor(raw).execute(statements.EXCHANGE, values).fetchall()
    finally:
        raw.rollback()
    taken = Counter[tuple[int, Place, bool]]()
    for row in rows:
        taken[row[7], (row[1], row[8]), row[9]] += row[4]
    return taken


def expected(
    candidates: Sequence[Warm], asks: Sequence[Ask], limits: Limits
) -> Counter[tuple[int, Place, bool]]:
    """The same by the pure function, one after the other: first those that their own replicas take, the least
    busy replica first."""
    found, now = Counter[tuple[int, Place, bool]](), {one.place: one for one in candidates}

    def pick(number: int, hot_place: Place | None, share: float, *, only_own: bool) -> bool:
        picked = select([*now.values()], hot_place, share, limits)
        assert picked is not None
        if only_own and picked.place != hot_place:
            return False
        found[number, picked.place, hot_place in now and share >= limits.match] += 1
        now[picked.place] = Warm(picked.node, picked.index, picked.in_flight + 1, picked.weight)
        return True

    left, met = [], Counter[Place]()
    for number, (hot_place, share, times) in enumerate(asks):
        for _ in range(times):
            own = hot_place if hot_place in now and share >= limits.match else None
            busy = now[own].in_flight + met[own] if own else -1
            if own:
                met[own] += 1
            left.append((busy, number, hot_place, share))
    order = sorted((one for one in left if one[0] >= 0), key=lambda one: one[0])
    later = [one for one in left if one[0] < 0]
    later += [one for one in order if not pick(*one[1:], only_own=True)]
    for one in sorted(later, key=lambda one: one[1]):
        pick(*one[1:], only_own=False)
    return found


FLEETS = st.lists(
    st.tuples(st.sampled_from(PLACES), st.integers(0, 6), st.sampled_from([0.0, 0.5, 0.5, 2.0, 7.25])),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one[0],
)
ASKS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(PLACES),
        st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0]),
        st.sampled_from([1, 1, 2, 3, 9]),
    ),
    min_size=1,
    max_size=9,
)
LIMITS = st.builds(
    Limits, st.sampled_from([0.1, 0.3, 1.0]), st.integers(0, 4), st.sampled_from([1.0, 1.5, 2.0])
)


@pytest.mark.rule("R3.11", "R3.13", "R3.14", "R3.24", "C41", "C42")
@settings(
    max_examples=60 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(rows=FLEETS, asks=ASKS, limits=LIMITS)
def test_statement_and_pure_function_agree(
    raw: psycopg.Connection[Any],
    fleet: None,
    rows: list[tuple[Place, int, float]],
    asks: list[Ask],
    limits: Limits,
) -> None:
    """R3.14: many at once are chosen and counted as one after the other would be; a replica that is not
    loaded is no candidate, whatever is remembered of it."""
    candidates = [Warm(*place, in_flight, weight) for place, in_flight, weight in rows]
    asks = [(place, share if place else 0.0, times) for place, share, times in asks]
    assert chosen(raw, candidates, asks, limits) == expected(candidates, asks, limits)


ONE, TWO, ON_ONE = (NODES[0], 0), (NODES[1], 0), (NODES[0], 1)


def warm(place: Place, in_flight: int, weight: float = 0.0) -> Warm:
    return Warm(*place, in_flight, weight)


@pytest.mark.parametrize(
    ("candidates", "share", "expected_place"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.rule(name))
        for name, *case in (
            ("T-PFX-29", [warm(ONE, 1, 9), warm(TWO, 0)], 1.0, ONE),
            ("T-PFX-30", [warm(ONE, 5, 9), warm(TWO, 0)], 1.0, TWO),
            ("T-PFX-31", [warm(ONE, 0, 9), warm(TWO, 0)], 0.2, TWO),
            ("T-PFX-32", [warm(TWO, 5), warm(ON_ONE, 0, 3)], 0.0, ON_ONE),
            ("T-PFX-34", [warm(TWO, 1), warm(ON_ONE, 1), warm(ONE, 1)], 0.0, ONE),
            ("T-PFX-35", [warm(ONE, 90)], 1.0, ONE),
            ("T-PFX-36", [warm(ONE, 9, 9), warm(ON_ONE, 0)], 1.0, ON_ONE),
            ("T-PFX-37", [warm(ONE, 1, 9), warm(ON_ONE, 0)], 1.0, ONE),
            ("T-PFX-38", [warm(ONE, 50, 9), warm(TWO, 0)], 1.0, TWO),
            ("T-PFX-39", [warm(ONE, 1, 9), warm(TWO, 1)], 1.0, ONE),
            ("T-PFX-20", [warm(ONE, 0, 9), warm(TWO, 0, 2)], 0.0, TWO),
            ("T-PFX-21", [warm(TWO, 0, 2), warm(ON_ONE, 0, 1)], 1.0, ON_ONE),
        )
    ],
)
def test_the_choice(
    raw: psycopg.Connection[Any],
    fleet: None,
    candidates: list[Warm],
    share: float,
    expected_place: Place,
) -> None:
    """The catalogue's cases; the replica that had the prompt is (node 1, index 0)."""
    [(_, place, _)] = chosen(raw, candidates, [(ONE, share, 1)], Limits())
    picked = select(candidates, ONE, share)
    assert picked is not None
    assert place == picked.place == expected_place


@pytest.mark.rule("T-PFX-33")
def test_without_candidates_there_is_no_choice(raw: psycopg.Connection[Any], fleet: None) -> None:
    """And no error."""
    assert not chosen(raw, [], [(ONE, 1.0, 1)], Limits())
    assert select([], ONE, 1.0) is None


@pytest.mark.rule("R3.13")
@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 2), (2, 4), (4, 6)])
def test_how_busy_the_hot_one_may_be(
    raw: psycopg.Connection[Any], fleet: None, least: int, most: int
) -> None:
    """R3.13 with the usual thresholds."""
    for in_flight, place in ((most, ONE), (most + 1, TWO)):
        candidates = [warm(ONE, in_flight, 5), warm(TWO, least)]
        assert chosen(raw, candidates, [(ONE, 1.0, 1)], Limits()) == {(0, place, True): 1}


def picks(requests: list[InferenceRequest]) -> list[Replica]:
    async def scenario() -> list[Replica | None]:
        async with hot.picker() as picker:
            return await asyncio.gather(*(picker.acquire(request) for request in requests))

    found = asyncio.run(scenario())
    assert None not in found
    return [one for one in found if one is not None]


def prefixed(place: Place | None, share: float = 1.0) -> InferenceRequest:
    return InferenceRequest(model="echo", chain=(1, 2), preferred=place, cached_ratio=share)


@pytest.mark.rule("R3.15", "R3.1", "T-ROU-33")
def test_a_rule_for_round_robin_spreads_whatever_the_prompts_are() -> None:
    """As if there were no prompts: all of them together, and nothing says that a prefix had a part in it."""
    one, two = hot.node("one"), hot.node("two")
    for node in (one, two):
        hot.replica(node, address=f"{node.name}:1")
    ModelSchedulingConfig.objects.create(model_name="echo", route_policy="round_robin")
    requests = [prefixed((one.pk, 0), share / 8) for share in range(1, 9)]
    found = picks(requests)
    assert Counter(one.node_id for one in found) == {one.pk: 4, two.pk: 4}
    assert {request.is_prefix_cached for request in requests} == {None}


@pytest.mark.rule("R2.6", "R3.16", "T-ROU-31", "T-ROU-34", "T-ROU-35", "T-ROU-36")
def test_the_replica_that_remembers_is_picked_unless_it_is_too_busy() -> None:
    """On one node too, by the index; what the pick says tells pressure from a prompt that is new."""
    node = hot.node()
    for index in range(2):
        hot.replica(node, index=index)
    warm_one = prefixed((node.pk, 1))
    assert picks([warm_one])[0].index == 1
    assert warm_one.is_prefix_cached is True
    NodeModel.objects.filter(replica_index=1).update(in_flight=50)
    kept_from_it, new, scarcely = prefixed((node.pk, 1)), prefixed(None, 0.0), prefixed((node.pk, 1), 0.2)
    assert [one.index for one in picks([kept_from_it, new])] == [0, 0]
    assert [one.index for one in picks([scarcely])] == [0]
    assert (kept_from_it.is_prefix_cached, new.is_prefix_cached, scarcely.is_prefix_cached) == (
        True,
        False,
        False,
    )


@pytest.mark.rule("R3.1", "R3.2", "T-PFX-9", "T-PFX-10", "T-PFX-11")
@pytest.mark.parametrize(("policy", "counts"), [("", True), ("prefix_cache", True), ("round_robin", False)])
def test_the_policy_of_a_rule(policy: str, counts: bool) -> None:
    """R3.1: the empty one is the cluster's, which is to go by the prefix; no other text can be stored."""
    node = hot.node()
    for index in range(2):
        hot.replica(node, index=index)
    rule = ModelSchedulingConfig.objects.create(model_name="echo", route_policy=policy)
    request = prefixed((node.pk, 1))
    assert picks([request])[0].index == int(counts)
    assert request.is_prefix_cached is (True if counts else None)
    assert RoutePolicy.values == ["round_robin", "prefix_cache"]
    with pytest.raises(IntegrityError):
        ModelSchedulingConfig.objects.filter(pk=rule.pk).update(route_policy="other")


@pytest.mark.rule("R3.2")
def test_a_rules_own_thresholds_count() -> None:
    """R3.2: what it leaves at zero is the cluster's."""
    node = hot.node()
    for index in range(2):
        hot.replica(node, index=index)
    rule = ModelSchedulingConfig.objects.create(model_name="echo")

    def picked(hot_index: int, share: float, busy: int, **thresholds: float) -> int:
        ModelSchedulingConfig.objects.filter(pk=rule.pk).update(**thresholds)
        NodeModel.objects.filter(replica_index=hot_index).update(in_flight=busy)
        NodeModel.objects.exclude(replica_index=hot_index).update(in_flight=1)
        return picks([prefixed((node.pk, hot_index), share)])[0].index

    assert picked(0, 1.0, 3) == 1
    assert picked(0, 1.0, 3, balance_rel_threshold=3) == 0
    assert picked(0, 1.0, 3, balance_abs_threshold=1) == 1
    assert picked(1, 0.2, 1) == 0
    assert picked(1, 0.2, 1, min_prefix_match=0.1) == 1
    assert picked(1, 0.2, 1, min_prefix_match=0) == 0


@pytest.mark.rule("R1.80")
def test_picks_with_and_without_a_prefix_share_a_statement() -> None:
    """Each by its own rule, and every one is counted."""
    one, two = hot.node("one"), hot.node("two")
    for node in (one, two):
        hot.replica(node, address=f"{node.name}:1")
    sure = InferenceRequest(model="echo", preferred=(two.pk, 0))
    requests = [sure, prefixed((one.pk, 0)), InferenceRequest(model="echo"), prefixed((one.pk, 0), 0.5)]
    found = picks(requests)
    assert [replica.node_id for replica in (found[0], found[1])] == [two.pk, one.pk]
    assert [request.is_prefix_cached for request in requests] == [None, True, None, True]
    assert sum(hot.counts().values()) == 4
