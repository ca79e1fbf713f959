"""When silent nodes are kept, and for how long: a table, and what holds whatever the numbers are."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.reconcilers.liveness import HEALING_TIME, MassHold, decide_hold

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
HOLD = 300.0
NEW = MassHold(NOW, NOW + timedelta(seconds=HOLD))
OLD = MassHold(NOW - timedelta(seconds=299), NOW + timedelta(seconds=1))
OVER = MassHold(NOW - timedelta(seconds=300), NOW)


@pytest.mark.rule("R5.4")
@pytest.mark.parametrize(
    ("silent", "nearly", "of", "standing", "expected"),
    [
        (0, 0, 21, None, None),
        (7, 0, 21, None, None),
        (8, 0, 21, None, NEW),
        (1, 7, 21, None, NEW),
        (0, 21, 21, None, None),
        (10, 0, 12, None, None),
        (19, 0, 19, None, None),
        (20, 0, 20, None, NEW),
        (8, 0, 21, OLD, OLD),
        (21, 0, 21, OLD, OLD),
        (7, 0, 20, OLD, OLD),
        (7, 0, 21, NEW, MassHold(NOW, NOW + HEALING_TIME)),
        (7, 0, 21, MassHold(NOW, NOW + HEALING_TIME / 2), MassHold(NOW, NOW + HEALING_TIME / 2)),
        (7, 0, 21, OVER, None),
        (0, 0, 21, OLD, None),
        (0, 8, 21, OLD, None),
        (8, 0, 21, OVER, None),
        (19, 0, 19, NEW, MassHold(NOW, NOW + HEALING_TIME)),
    ],
    ids=[
        "nobody is silent",
        "a third",
        "more than a third",
        "more than a third, most of them nearly",
        "nobody is silent yet",
        "ten of twelve: too small a fleet",
        "all of nineteen",
        "all of twenty",
        "it stands",
        "more have followed",
        "some were heard, and it ends before that matters",
        "some were heard",
        "some were heard a while ago",
        "some were heard too late",
        "all were heard",
        "all were heard, some late",
        "it has run out",
        "the fleet has become too small",
    ],
)
def test_the_brake(
    silent: int, nearly: int, of: int, standing: MassHold | None, expected: MassHold | None
) -> None:
    assert decide_hold(standing, NOW, HOLD, silent=silent, nearly=nearly, of=of) == expected


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.sampled_from([None, OLD, OVER]))
def test_it_never_holds_without_a_setting_or_beyond_its_time(
    silent: int, nearly: int, heard: int, standing: MassHold | None
) -> None:
    found = {"silent": silent, "nearly": nearly, "of": silent + nearly + heard}
    assert decide_hold(standing, NOW, 0.0, **found) is None
    hold = decide_hold(standing, NOW, HOLD, **found)
    assert hold is None or hold.until > NOW
    assert hold is None or standing is not None or 3 * (silent + nearly) > found["of"]
    if standing is not None and hold is not None:
        assert (hold.since, hold.until <= standing.until) == (standing.since, True)
