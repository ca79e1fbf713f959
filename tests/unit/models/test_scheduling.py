"""Selectors (`contract/scheduling.md` §1J): which ones can be read, and that the others choose nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.models import scheduling

UNREADABLE: list[Any] = [
    None,
    "tier=fast",
    "{broken",
    ["tier"],
    5,
    True,
    {"tier": 5},
    {"tier": None},
    {"tier": ["fast"]},
    {"": "x"},
    {"k" * 129: "x"},
    {"k": "v" * 256},
    {"k": "a\u200bb"},
    {f"k{number}": "x" for number in range(65)},
]


@pytest.mark.rule("R1.69")
@pytest.mark.parametrize("selector", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_is_no_selector_cannot_be_read(selector: Any) -> None:
    """Not an object of strings, or with keys and values that no label can have."""
    assert scheduling.readable_selector(selector) is None


@pytest.mark.parametrize("selector", [{}, {"tier": "fast"}, {"models/x:1@y": ""}])
def test_any_key_and_value_that_a_label_can_have_is_read(selector: dict[str, str]) -> None:
    assert scheduling.readable_selector(selector) == selector


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=3))
def test_anything_else_is_not_readable(value: Any) -> None:
    """Only an object is a selector, from any JSON."""
    assert scheduling.readable_selector(json.loads(json.dumps(value))) is None
