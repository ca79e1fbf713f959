"""Grids and blocks of figures: nothing is lost by packing, counts are added up, all else is averaged."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.figures import series
from nodes.figures.series import HOUR, MINUTE, SAMPLE_EVERY, Grid

START = datetime(2026, 8, 22, 10, tzinfo=UTC)
NODE = "node/5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11"
_VALUES = st.lists(st.none() | st.integers(0, 2**31 - 1), max_size=60)


@given(st.dictionaries(st.text(), _VALUES, max_size=5))
def test_a_block_has_what_was_packed(columns: series.Columns) -> None:
    assert series.unpack(series.pack(columns)) == columns


def test_a_node_s_numbers_are_named_by_gpu() -> None:
    names = series.names_of(NODE, [1, 2, 3, 0, 10, 11, 12, 13, 4, 20, 21, 22, 23])
    assert names[:5] == ("vram_used", "ram_used", "disk_used", "", "gpu0.vram_used")
    assert names[-1] == "gpu4.power"
    assert [series.split_name(name) for name in ("ram_used", "gpu4.power")] == [
        (None, "ram_used"),
        (4, "power"),
    ]


def test_counts_are_added_up_and_all_else_is_averaged() -> None:
    grid = Grid(START, MINUTE, 2)
    for number in range(6):
        grid.add_sample(START + number * SAMPLE_EVERY, NODE, [number, None, 7])
        grid.add_sample(START + number * SAMPLE_EVERY, "model/m", [2, 1, 0, 0, 0, 0])
    grid.add_sample(START - SAMPLE_EVERY, NODE, [999, 999, 999])
    columns = grid.columns()
    assert columns["vram_used"] == [2, None]  # 2.5, to even
    assert columns["disk_used"] == [7, None]
    assert "ram_used" not in columns
    assert (columns["requests"], columns["errors"]) == ([12, None], [6, None])


@given(st.lists(st.integers(0, 100), min_size=60, max_size=60), st.integers(1, 59))
def test_a_mean_weighs_each_value_with_its_time(values: list[int], split: int) -> None:
    """Minutes of a block beside samples of ten seconds."""
    grid = Grid(START, HOUR, 1)
    grid.add_block(START, MINUTE, {"busy": [*values[:split], *[None] * (60 - split)]})
    numbers = ("cluster", len(series.CLUSTER_FIGURES))
    for minute, value in enumerate(values[split:], start=split):
        for tenth in range(6):
            row: list[int | None] = [None] * numbers[1]
            row[series.CLUSTER_FIGURES.index("busy")] = value
            grid.add_sample(START + minute * MINUTE + tenth * SAMPLE_EVERY, numbers[0], row)
    assert grid.columns()["busy"] == [pytest.approx(sum(values) / 60, abs=0.51)]


def test_times_have_a_place_on_the_grid() -> None:
    at = START + timedelta(minutes=59, seconds=59, microseconds=999999)
    assert series.floor_to_step(at, HOUR) == START
    assert series.floor_to_step(at, SAMPLE_EVERY) == START + timedelta(minutes=59, seconds=50)
