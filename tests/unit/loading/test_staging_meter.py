"""How far the files of a model are, as people and clients are told."""

import pytest

from nodes.loading.transfer import UploadMeter
from nodes.placement import load_times

MIB = 2**20


@pytest.mark.rule("R2.58", "R2.23", "C48")
def test_bytes_files_rate_and_the_time_that_is_left() -> None:
    meter = UploadMeter({"a": 100 * MIB, "b": 100 * MIB}, "gpu")
    assert (meter.current, meter.total, meter.file_index, meter.rate(0)) == (0, 200 * MIB, 1, 0)
    meter.start_file("a", 60 * MIB)
    assert (meter.current, meter.rate(0.5)) == (60 * MIB, 0), "what was there before is no speed"
    meter.add_sent("a", 20 * MIB)
    assert meter.rate(2) == 10 * MIB
    assert meter.sentence(10 * MIB) == (
        "sending a to gpu, file 1 of 2: 80.0 MiB of 200.0 MiB, 10.0 MiB/s, 12 s left"
    )
    meter.add_sent("a", 20 * MIB)
    meter.finish_file("a")
    assert (meter.current, meter.file_index) == (100 * MIB, 2)
    meter.finish_file("b")
    assert (meter.current, meter.file_index) == (200 * MIB, 2)


def test_the_rate_forgets_what_was_long_ago() -> None:
    meter = UploadMeter({"a": 10**9}, "gpu")
    meter.start_file("a", 0)
    for second in range(60):
        meter.add_sent("a", 1000 if second < 30 else 10)
        rate = meter.rate(float(second))
    assert rate == 10


def test_a_meter_of_empty_files_divides_by_nothing() -> None:
    meter = UploadMeter({"a": 0}, "gpu")
    meter.start_file("a", 0)
    meter.finish_file("a")
    assert "0 B of 0 B" in meter.sentence(meter.rate(5))


@pytest.mark.rule("worker-13")
def test_a_large_file_may_be_read_for_longer_than_a_stall() -> None:
    assert load_times.hashing_limit(0) == 0
    assert load_times.hashing_limit(64 * 2**30) > load_times.STALL
