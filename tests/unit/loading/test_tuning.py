"""R2.80: options that follow from a node, and how long a load may take (R2.60, R2.24). Pure."""

from typing import Any

import pytest

from nodes.loading.load import fingerprint
from nodes.loading.load_placement import Machine, tune_options
from nodes.placement import load_times

GIB = 2**30


@pytest.mark.rule("R2.80", "T-HW-1", "T-HW-3", "T-HW-4", "T-HW-10")
@pytest.mark.parametrize(
    ("given", "machine", "batch"),
    [
        (512, Machine(32 * GIB, 0, "12.0"), 2048),
        (2048, Machine(32 * GIB, 0, "8.9"), 512),
        (512, Machine(0, 0, "12.0"), 512),
        (512, Machine(32 * GIB, GIB // 4, "12.1"), 512),
        (512, Machine(32 * GIB, 0, "gfx1100"), 512),
        (1024, Machine(32 * GIB, 0, "12.0"), 1024),
        (None, Machine(32 * GIB, 0, "12.0"), None),
    ],
    ids=["large", "older-gpu", "memory-not-known", "small-budget", "not-a-number", "chosen", "none"],
)
def test_the_batch_follows_from_the_gpu(given: int | None, machine: Machine, batch: int | None) -> None:
    options: dict[str, Any] = {} if given is None else {"NBatch": given}
    assert tune_options(options, "echo", machine).get("NBatch") == batch
    assert options.get("NBatch") == given


@pytest.mark.rule("R2.80", "T-HW-2", "T-HW-9")
def test_a_long_context_keeps_the_batch_and_nothing_stays_nothing() -> None:
    long: dict[str, Any] = {"NBatch": 512, "ContextSize": 400_000}
    assert tune_options(long, "echo", Machine(32 * GIB, 0, "12.0")) == long
    assert tune_options({}, "", Machine()) == {}


@pytest.mark.rule("R2.80", "T-HW-5", "T-HW-6", "T-HW-7", "T-HW-8")
@pytest.mark.parametrize(
    ("gib", "extra", "context", "found"),
    [
        (32, [], 0, ["parallel:8"]),
        (8, ["flash"], 0, ["flash", "parallel:4"]),
        (4, [], 0, ["parallel:2"]),
        (3, [], 0, None),
        (32, ["parallel:1"], 0, ["parallel:1"]),
        (8, [], 131072, None),
        (119, [], 0, ["parallel:8"]),
        (16, [], 200_000, None),
    ],
    ids=["large", "medium", "small", "too-small", "chosen", "long-context", "119-gib", "200k-context"],
)
def test_requests_at_a_time_follow_from_the_memory(
    gib: int, extra: list[str], context: int, found: list[str] | None
) -> None:
    given: dict[str, Any] = ({"Options": extra} if extra else {}) | {"ContextSize": context}
    for backend, expected in (("cuda12-llama-cpp", found), ("echo", extra or None)):
        assert tune_options(given, backend, Machine(gib * GIB)).get("Options") == expected


def test_equal_options_have_one_fingerprint() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1})


@pytest.mark.rule("R2.60", "C28", "T-DL-1", "T-DL-2", "T-DL-3", "T-DL-5", "T-DL-6", "T-DL-7")
@pytest.mark.parametrize(
    ("gib", "given", "seconds"),
    [
        (0, 0, 300),
        (2, 0, 340),
        (70, 0, 1700),
        (600, 0, 12300),
        (9000, 0, 21600),
        (70, 420, 420),
        (0, 2700, 2700),
    ],
)
def test_a_load_model_has_time_by_the_size_of_its_files(gib: int, given: float, seconds: float) -> None:
    assert load_times.load_limit(gib * GIB, given) == seconds


@pytest.mark.rule("R2.24", "R2.25", "C29", "T-DL-8", "T-DL-9", "T-DL-10", "T-DL-11", "T-DL-12")
@pytest.mark.parametrize(
    ("install", "load", "minutes"),
    [(15, 5, 25), (15, 45, 65), (40, 5, 50), (1, 1, 25), (0, -1, 25)],
)
def test_a_load_is_wanted_for_an_installation_and_a_load(install: float, load: float, minutes: float) -> None:
    assert load_times.progress_deadline(install * 60, load * 60) == minutes * 60


@pytest.mark.rule("R2.24", "C31", "T-DL-4", "T-DL-13", "T-DL-15", "T-DL-17")
def test_what_moves_is_wanted_for_longer_but_not_for_ever() -> None:
    day = 24 * 3600.0
    assert load_times.extend_deadline(3600, 300, 1500) == 300
    assert load_times.extend_deadline(day - 100, 300, 1500) == 100
    assert load_times.extend_deadline(day + 100, 300, 1500) == 0
    assert load_times.extend_deadline(day + 100, 300, 2 * day) == 300
