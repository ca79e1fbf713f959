"""The choice of a replica as a pure function (R1.78)."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policy import Candidate, spread

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def candidate(number: int, in_flight: int = 0, idle: int = 0, vram: int = 0) -> Candidate:
    return Candidate(UUID(int=number), in_flight, NOW - timedelta(seconds=idle), vram)


CANDIDATES = st.lists(
    st.builds(candidate, st.integers(1, 99), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)),
    max_size=6,
    unique_by=lambda c: c.id,
)


def one_by_one(candidates: list[Candidate], requests: int) -> dict[UUID, int]:
    """The plainest way to say it: sort, take the first, count it in, sort again."""
    taken: dict[UUID, int] = {}
    for _ in range(requests if candidates else 0):
        candidates = sorted(candidates, key=lambda c: (c.in_flight, c.last_used, -c.available_vram, c.id))
        first, *rest = candidates
        taken[first.id] = taken.get(first.id, 0) + 1
        candidates = [Candidate(first.id, first.in_flight + 1, NOW, first.available_vram), *rest]
    return taken


@pytest.mark.rule("R1.78", "T-PICK-3", "T-PICK-4", "T-PICK-5", "T-PICK-7")
def test_tiers_in_order() -> None:
    """R1.78: fewest in flight, then the longest unused, then the most VRAM, then the smaller id."""
    assert list(spread([candidate(1, in_flight=1, idle=9), candidate(2)], 1, NOW)) == [UUID(int=2)]
    assert list(spread([candidate(1, idle=1, vram=9), candidate(2, idle=2)], 1, NOW)) == [UUID(int=2)]
    assert list(spread([candidate(1, vram=1), candidate(2, vram=2)], 1, NOW)) == [UUID(int=2)]
    assert list(spread([candidate(2), candidate(1)], 1, NOW)) == [UUID(int=1)]


@pytest.mark.rule("R1.78", "T-PICK-1")
def test_nothing_to_choose_from() -> None:
    """R1.78: an empty list gives none."""
    assert spread([], 5, NOW) == {}


@pytest.mark.rule("R1.78")
@given(CANDIDATES, st.integers(0, 40))
def test_a_batch_is_the_same_as_one_after_the_other(candidates: list[Candidate], requests: int) -> None:
    """R1.78: picking many at once spreads them exactly as single picks would."""
    assert dict(spread(candidates, requests, NOW)) == one_by_one(candidates, requests)


@pytest.mark.rule("R1.78", "T-PICK-2", "T-PICK-6")
def test_an_early_tier_outweighs_all_later_ones() -> None:
    """A busy replica is taken if it is the only one; an idle one wins however small and recently used."""
    assert list(spread([candidate(1, in_flight=7)], 1, NOW)) == [UUID(int=1)]
    calm, busy = candidate(2, in_flight=0, idle=0, vram=1), candidate(1, in_flight=1, idle=99, vram=99)
    assert list(spread([busy, calm], 1, NOW)) == [UUID(int=2)]
