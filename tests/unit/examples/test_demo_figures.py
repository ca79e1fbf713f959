"""The figures of the main job: compared with what is expected, and named when they are off."""

import copy
import json
import math
from typing import Any

import pytest

from examples.demo.client import Chat, read_chat
from examples.demo.figures import compare, cosine, rows
from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock

EXPECT = {
    "dimensions": 2,
    "norm": 1.0,
    "tolerance": 0.001,
    "cosines": [{"of": ["a", "b"], "is": 0.8}],
    "first_components": {"a": [1.0]},
    "prompt_tokens": 5,
}
ANSWER: dict[str, Any] = {
    "data": [{"index": 1, "embedding": [0.8, 0.6]}, {"index": 0, "embedding": [1.0, 0.0]}],
    "usage": {"prompt_tokens": 5},
}


def test_a_right_answer_holds_in_any_order() -> None:
    figures = compare(ANSWER, ["a", "b"], EXPECT)
    assert all(figure.holds for figure in figures)
    assert {"cos(a, b)", "prompt tokens", "'a' [0]", "dimensions of 'b'"} <= {one.name for one in figures}


def test_each_wrong_figure_is_named() -> None:
    answer = copy.deepcopy(ANSWER)
    answer["data"][1]["embedding"] = [0.99, 0.0]
    answer["usage"]["prompt_tokens"] = 6
    off = [figure.name for figure in compare(answer, ["a", "b"], EXPECT) if not figure.holds]
    assert off == ["length of 'a'", "'a' [0]", "prompt tokens"]


def test_a_vector_without_direction_is_off() -> None:
    assert math.isnan(cosine([0.0, 0.0], [1.0, 0.0]))
    answer = copy.deepcopy(ANSWER)
    answer["data"][0]["embedding"] = [0.0, 0.0]
    assert "cos(a, b)" in [one.name for one in compare(answer, ["a", "b"], EXPECT) if not one.holds]


def test_the_table_has_a_line_for_each_check_and_counts_without_decimals() -> None:
    answer = copy.deepcopy(ANSWER)
    answer["usage"]["prompt_tokens"] = 6
    assert rows(compare(answer, ["a", "b"], EXPECT)) == [
        ("Vectors", "2", "ok"),
        ("Dimensions of each vector", "2", "ok"),
        ("Length of each vector", "1.0000", "ok"),
        ('Similarity of "a", "b"', "0.8000", "ok"),
        ('First numbers of "a"', "1.0000", "ok"),
        ("Prompt tokens", "6", "WRONG: expected 5"),
    ]


def chunk(**delta: str) -> str:
    """A line of a stream."""
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]})


def test_a_stream_is_shown_as_it_comes() -> None:
    usage = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 5}})
    shown: list[str] = []
    lines = [
        ": working",
        "",
        chunk(role="assistant", content=""),
        chunk(content="It"),
        chunk(content=" is"),
        usage,
    ]
    chat = read_chat([*lines, "data: [DONE]"], clock.monotonic(), shown.append)
    assert shown == ["It", " is"]
    assert isinstance(chat, Chat)
    assert (chat.pieces, chat.tokens) == (2, 5)
    assert 0 < chat.first <= chat.whole


def test_a_stream_that_ends_with_an_error_says_so() -> None:
    with pytest.raises(SetupError, match="out of ideas"):
        read_chat(['data: {"error": {"message": "out of ideas"}}'], clock.monotonic(), print)
