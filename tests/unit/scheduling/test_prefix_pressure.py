"""Pressure: requests kept from the replica that remembers them, as a process counts them and rows tell it."""

from datetime import UTC, datetime, timedelta

import pytest

from localai_cluster.kit.settings_table import MAX_PRESSURE
from nodes.gateway.prefix_routing import Pressure
from nodes.scheduling.pressure import MAX_CLOCK_LEAD, PRESSURE_WINDOW, count_pressure

NOW = datetime(2026, 5, 1, tzinfo=UTC)
TICK = timedelta(microseconds=1)


def seconds(number: float) -> datetime:
    return NOW + timedelta(seconds=number)


@pytest.mark.rule("R3.19", "C44", "T-PFX-40", "T-PFX-41", "T-PFX-42", "T-PFX-43")
def test_what_counts() -> None:
    """R3.19: by model; exactly as old as the window still counts; looking takes nothing away."""
    pressure = Pressure()
    pressure.record("m", NOW)
    pressure.record("n", seconds(30))
    assert pressure.recent_times("unknown", NOW) == ()
    for _ in range(2):
        assert pressure.recent_times("m", NOW + PRESSURE_WINDOW) == (NOW,)
    assert pressure.recent_times("m", NOW + PRESSURE_WINDOW + TICK) == ()
    assert pressure.recent_times("n", NOW + PRESSURE_WINDOW) == (seconds(30),)
    assert pressure._times.keys() == {"n"}


@pytest.mark.rule("R3.19", "T-PFX-44", "T-PFX-47")
def test_it_is_bounded() -> None:
    """Recording alone forgets what is over, and no model has more than can be asked for."""
    pressure = Pressure()
    for number in range(100):
        pressure.record("m", seconds(10 * number))
        assert len(pressure._times["m"]) <= 7
    for number in range(10):
        pressure.record("sparse", seconds(1000 * number))
    assert len(pressure._times["sparse"]) == 1
    for _ in range(500):
        pressure.record("busy", NOW)
    assert len(pressure.recent_times("busy", NOW)) == MAX_PRESSURE


@pytest.mark.rule("R3.19", "T-PFX-40", "T-PFX-43", "T-PFX-45", "T-PFX-46")
def test_what_the_rows_come_to() -> None:
    """Of all processes together; what is before the last load for it is over, of that model only; a clock
    that is a little ahead does not hide it, one that is far ahead makes nothing count for longer."""
    rows = [
        ("m", [seconds(-61).isoformat(), seconds(-60).isoformat(), seconds(-1).isoformat()]),
        ("m", [seconds(-20).isoformat(), (NOW + MAX_CLOCK_LEAD).isoformat(), seconds(3600).isoformat()]),
        ("n", [seconds(-20).isoformat()]),
        ("old", [seconds(-90).isoformat()]),
    ]
    assert count_pressure(rows, {}, NOW) == {"m": 4, "n": 1}
    assert count_pressure(rows, {"m": seconds(-20)}, NOW) == {"m": 2, "n": 1}
    assert count_pressure(rows, {"m": seconds(-20), "n": None}, NOW + MAX_CLOCK_LEAD) == {"m": 2, "n": 1}
