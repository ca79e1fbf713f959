"""Measured figures beside their limits, as a table."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Measured:
    """One figure and its limit; None if there is none."""

    name: str
    value: float
    limit: float | None = None
    at_least: bool = False
    unit: str = "s"

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
