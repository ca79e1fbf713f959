"""`make measure`: turns, medians, goals and the blocks of the document."""

from pathlib import Path
from typing import Any

import pytest

from localai_cluster.embedded.resources import SetupError
from tests.measure import __main__ as measure
from tests.measure import sides, table
from tests.measure.table import Goal, Rows


def test_sides_take_turns_and_medians_are_taken() -> None:
    """Which side begins changes, so that neither always meets the quieter moment."""
    order: list[str] = []
    values = iter([1.0, 10.0, 30.0, 2.0, 3.0, 20.0])

    def turn(side: Any) -> Rows:
        order.append(side)
        return {"stream": {"ms": next(values)}}

    pair: Any = ["ours", "base"]
    found = measure.take_turns(measure.Part(lambda: [turn], ()), pair, 3, measure.Loads())
    assert order == ["ours", "base", "base", "ours", "ours", "base"]
    assert found == [{"stream": {"ms": 2.0}}, {"stream": {"ms": 20.0}}]


def test_goals_stand_beside_both_figures() -> None:
    goals = [
        Goal("stream", "ms", 0.6),
        Goal("stream", "requests/s", 1700, at_least=True),
        Goal("chat", "ms", 1),
    ]
    ours, base = {"stream": {"ms": 0.5, "requests/s": 1500.0}}, {"stream": {"ms": 2.0, "requests/s": 500.0}}
    lines = table.goal_lines(table.compare(goals, ours, base))
    assert lines[2:] == [
        "| stream: ms | 0.50 | ≤ 0.6 | reached | 2 | 0.25 |",
        "| stream: requests/s | 1,500 | ≥ 1700 | **not reached** | 500 | 3.00 |",
    ]
    assert table.row_lines(ours, base)[2:] == ["| stream | 0.50 (2) | 1,500 (500) |"]


def test_a_block_is_replaced_alone(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("# A\n\n<!-- make measure: a -->\nold\n<!-- end: a -->\n\nrest\n")
    table.write("a", ["new"], document)
    assert document.read_text() == "# A\n\n<!-- make measure: a -->\n\nnew\n\n<!-- end: a -->\n\nrest\n"
    with pytest.raises(ValueError, match="no block b"):
        table.write("b", [], document)


def test_every_part_with_tables_has_its_block() -> None:
    text = table.DOCUMENT.read_text(encoding="utf-8")
    for name in (*measure.PARTS, "growth"):
        assert f"<!-- make measure: {name} -->" in text
        assert f"<!-- end: {name} -->" in text


def test_a_base_needs_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="git is not installed"):
        sides.checkout("HEAD")
