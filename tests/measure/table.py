"""Measured figures beside their limits, as a table."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tests.measure.sides import Side

Rows = dict[str, dict[str, float]]
"""Figures by row and column of a table."""
Turn = Callable[["Side"], Rows]
"""Measures once on one side."""
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


@dataclass(frozen=True)
class Goal:
    """The limit of one figure of `Rows`."""

    row: str
    column: str
    limit: float
    at_least: bool = False


@dataclass(frozen=True)
class Measured:
    """One figure, its limit (None if there is none) and the figure of the base (None without one)."""

    name: str
    value: float
    limit: float | None = None
    at_least: bool = False
    unit: str = "s"
    base: float | None = None

    @property
    def within_limit(self) -> bool:
        """Whether the figure is within its limit."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def show(found: list[Measured], console: Console) -> bool:
    """Prints the table; returns whether all figures are within their limits."""
    table = Table("figure", "measured", "limit", "")
    for one in found:
        sign = "at least" if one.at_least else "at most"
        limit = "-" if one.limit is None else f"{sign} {one.limit:g} {one.unit}".strip()
        verdict = "" if one.limit is None else "ok" if one.within_limit else "EXCEEDED"
        table.add_row(one.name, f"{one.value:.2f} {one.unit}".strip(), limit, verdict)
    console.print(table)
    return all(one.within_limit for one in found)


def medians(turns: Iterable[Rows]) -> Rows:
    """Return the median of each figure over the turns."""
    values: dict[str, dict[str, list[float]]] = {}
    for rows in turns:
        for row, columns in rows.items():
            for column, value in columns.items():
                values.setdefault(row, {}).setdefault(column, []).append(value)
    return {
        row: {column: statistics.median(found) for column, found in columns.items()}
        for row, columns in values.items()
    }


def compare(goals: Sequence[Goal], ours: Rows, base: Rows) -> list[Measured]:
    """Return the figures that have a goal, as far as they were measured."""
    return [
        Measured(
            f"{goal.row}: {goal.column}", ours[goal.row][goal.column], goal.limit, goal.at_least, "",
            base.get(goal.row, {}).get(goal.column),
        )
        for goal in goals
        if goal.column in ours.get(goal.row, {})
    ]  # fmt: skip


def goal_lines(found: Sequence[Measured]) -> list[str]:
    """Return a Markdown table of figures with their goals, and with the base's figures and the ratio."""
    body = []
    for one in found:
        goal = f"{'≥' if one.at_least else '≤'} {one.limit:g}"
        base = ["-", "-"] if one.base is None else [number(one.base), f"{one.value / (one.base or 1):.2f}"]
        verdict = "reached" if one.within_limit else "**not reached**"
        body.append([one.name, number(one.value), goal, verdict, *base])
    return markdown(["figure", "this tree", "goal", "", "base", "ratio"], body)


def row_lines(ours: Rows, base: Rows) -> list[str]:
    """Return Markdown tables, one for rows of equal columns; the base's figures follow in brackets."""
    lines: list[str] = []
    for columns in dict.fromkeys(tuple(found) for found in ours.values()):
        body = [
            [row, *(_pair(ours[row][column], base.get(row, {}).get(column)) for column in columns)]
            for row in ours
            if tuple(ours[row]) == columns
        ]
        lines += [*([""] if lines else []), *markdown(["", *columns], body)]
    return lines


def _pair(value: float, base: float | None) -> str:
    return number(value) if base is None else f"{number(value)} ({number(base)})"


def number(value: float) -> str:
    """Return a figure with as many digits as mean something."""
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def write(name: str, lines: Sequence[str], document: Path = DOCUMENT) -> None:
    """Replace the block of this name, between its two markers, in the document."""
    begin, end = f"<!-- make measure: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{document.name} has no block {name}")
    document.write_text("\n".join([before + begin, "", *lines, "", end]) + after, encoding="utf-8")
