"""VRAM budgets: the grammar of R1.49."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.registry import resources

GB = 10**9


@pytest.mark.rule("T-REG-103", "R1.49")
@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("80%", 10 * GB, 8 * GB),
        ("12GB", 10 * GB, 10 * GB),
        ("", 10 * GB, 0),
        ("  ", 10 * GB, 0),
        ("0%", 10 * GB, 0),
        ("100%", 10 * GB, 10 * GB),
        ("12.5 %", 8000, 1000),
        ("0.5", 1000, 500),
        ("1", 1000, 1000),
        (".25", 1000, 250),
        ("0", 1000, 0),
        ("2", 1000, 2),
        ("512", 1000, 512),
        ("1KiB", 10**6, 1024),
        ("1kb", 10**6, 1000),
        ("1.5 MiB", GB, 1572864),
        ("1 mb", GB, 10**6),
        ("2GiB", 10 * GB, 2 * 1024**3),
        ("1TiB", 10**13, 1024**4),
        ("1TB", 10**13, 10**12),
        ("700B", 1000, 700),
        ("50%", 0, 0),
        ("8GB", 0, 0),
        ("100%", 2**63 - 1, 2**63 - 1),
    ],
)
def test_the_ceiling_of_a_budget(text: str, total: int, expected: int) -> None:
    assert resources.budget_ceiling(text, total) == expected


@pytest.mark.rule("R1.49")
@pytest.mark.parametrize(
    "text", ["101%", "-1", "-50%", "1.5", "5 ib", "5k", "5 gi", "GB", "%", "1e9", "½", "\uff11", "1 2", "nan"]
)
def test_what_is_no_budget(text: str) -> None:
    """Refused here; where the registry reads one from a worker it means "no cap"."""
    with pytest.raises(ValueError, match="budget"):
        resources.budget_ceiling(text, 1000)
    assert resources.budget_ceiling_or_none(text, 1000) == 0


@pytest.mark.rule("R1.49")
@given(st.text("0123456789.%kmgtibKMGTIB -", max_size=32), st.integers(0, 2**63 - 1))
def test_a_ceiling_never_exceeds_the_total(text: str, total: int) -> None:
    """And nothing but a ValueError comes of what cannot be read."""
    assert 0 <= resources.budget_ceiling_or_none(text, total) <= total


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_cap_of_zero_is_none(available: int, ceiling: int) -> None:
    assert resources.cap_to_ceiling(available, ceiling) == (min(available, ceiling) if ceiling else available)
