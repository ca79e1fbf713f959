"""`make measure`: every figure of the product beside its goal, and beside an older commit in turns.

`ONLY=streams,memory` chooses parts, `BASE=<commit>` compares those of `PARTS` with that commit, `RUNS=7` is
the number of turns of each side, `NODES=100` makes the fleet smaller. A part writes its tables into
`docs/performance.md`, between its two markers.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock
from tests.benchmarks import engine
from tests.measure import first_run, fleet, growth, load
from tests.measure.sides import Side, Tree, checkout, started
from tests.measure.table import Goal, Rows, Turn, compare, goal_lines, markdown, medians, row_lines, write

RUNS = 7


@dataclass(frozen=True)
class Part:
    """Turns that all sides take one after the other, and the goals of their figures."""

    turns: Callable[[], Iterable[Turn]]
    goals: Sequence[Goal]
    waits: bool = False
    """True if it mostly waits: it runs once, on all sides at the same time."""


PARTS = {
    "streams": Part(load.turns, load.GOALS),
    "fleet": Part(lambda: [fleet.run], fleet.GOALS),
    "memory": Part(lambda: [fleet.memory], fleet.MEMORY_GOALS),
    "detection": Part(lambda: [fleet.detection], fleet.DETECTION_GOALS, waits=True),
    "processes": Part(lambda: [load.processes], load.PROCESSES_GOALS),
}
ALONE = ("growth", "first-run", "pages")
"""Parts without sides."""


class Loads:
    """The load of the machine while something is measured."""

    def __init__(self) -> None:
        self.seen = [os.getloadavg()[0]]

    def __str__(self) -> str:
        self.seen.append(os.getloadavg()[0])
        return f"load of the machine {min(self.seen):.1f} to {max(self.seen):.1f}"


def take_turns(part: Part, sides: Sequence[Side], runs: int, loads: Loads) -> list[Rows]:
    """Return the medians of each side; which side begins changes with each turn."""
    found: list[list[Rows]] = [[] for _ in sides]
    order = list(enumerate(sides))
    for turn in part.turns():
        if part.waits:
            with ThreadPoolExecutor(len(sides)) as pool:
                for rows, seen in zip(found, pool.map(turn, sides), strict=True):
                    rows.append(seen)
            continue
        for _ in range(runs):
            for index, side in order:
                found[index].append(turn(side))
                loads.seen.append(os.getloadavg()[0])
            order.reverse()
    return [medians(rows) for rows in found]


def report(name: str, goals: Sequence[Goal], found: Sequence[Rows], about: str, console: Console) -> bool:
    """Print the tables of a part and write them into the document; return True if all goals are reached."""
    ours, base = found[0], found[1] if len(found) > 1 else Rows()
    measured = compare(goals, ours, base)
    lines = [about, "", *goal_lines(measured), "", *row_lines(ours, base)]
    console.print(f"\n--- {name}", *lines, sep="\n", soft_wrap=True, markup=False)
    write(name, lines)
    return all(one.within_limit for one in measured)


def measure_sides(names: Sequence[str], base: str, runs: int, console: Console) -> bool:
    """Measure these parts on this tree and the base; return True if all goals are reached."""
    if reason := engine.build():
        console.print(f"not measured: {', '.join(names)}: {reason}")
        return True
    trees = [Tree("this tree"), *([checkout(base)] if base else [])]
    reached = True
    with ExitStack() as stack:
        sides = [stack.enter_context(started(tree)) for tree in trees]
        for name in names:
            part, those = PARTS[name], sides[:1] if name == "processes" else sides
            if name == "processes" and not load.has_processes(sides[0]):
                console.print("processes:", reason := "not measured: this tree has no --processes")
                write(name, [reason])
                continue
            begun, loads = clock.monotonic(), Loads()
            found = take_turns(part, those, runs, loads)
            seconds = f"{clock.monotonic() - begun:.0f} s"
            turns = "one turn" if part.waits or runs == 1 else f"medians of {runs} turns"
            beside = f" beside {base} (in brackets)" if len(those) > 1 else ""
            about = f"{clock.now():%Y-%m-%d}{beside}; {turns}; {loads}; {seconds}."
            reached &= report(name, part.goals, found, about, console)
    return reached


def measure_growth(console: Console) -> bool:
    """Write the growth table."""
    loads = Loads()
    lines = markdown(*growth.run())
    lines = [f"{clock.now():%Y-%m-%d}; {loads}.", "", *lines]
    console.print("\n--- growth", *lines, sep="\n", soft_wrap=True, markup=False)
    write("growth", lines)
    return True


def main() -> int:
    """Run the command; return its exit code."""
    console = Console(highlight=False)
    base = os.environ.get("BASE", "")
    everything = [*PARTS, *ALONE]
    only = [name for name in os.environ.get("ONLY", "").split(",") if name]
    only = only or ([*PARTS] if base else everything)
    runs = int(os.environ.get("RUNS") or (RUNS if base else 1))
    if unknown := set(only) - {*everything}:
        console.print(f"measure: ONLY: no part {', '.join(sorted(unknown))}; parts: {', '.join(everything)}")
        return 2
    console.print(f"parts: {', '.join(only)}; {Loads()}")
    try:
        reached = True
        if names := [name for name in PARTS if name in only]:
            reached &= measure_sides(names, base, runs, console)
        if "growth" in only:
            reached &= measure_growth(console)
        if "first-run" in only:
            reached &= first_run.run(console)
        if "pages" in only:
            reached &= subprocess.run([sys.executable, "-m", "tests.browser.measure"]).returncode == 0
    except SetupError as error:
        console.print(f"measure: {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
