"""The steps of `make lint` and `make check`, two at a time.

`python -m tests.checks.steps lint` runs every check of the source, `check` the unit tests and trips too. A
step that passes is one line, below it the figures of `words`, `modules` and `trips`; one that fails prints
its whole output, and its name stands again on the last line. The exit code is 1 if any failed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from localai_cluster.kit import clock

BIN = Path(sys.executable).parent
SIDE_BY_SIDE = 2
"""Most steps use one core all the time; `make check` is meant for two."""


@dataclass(frozen=True)
class Step:
    """One command; a program of the virtual environment, or `python`."""

    name: str
    argv: tuple[str, ...]
    is_shown: bool = False
    """True if its output is printed although it passes."""

    def run(self) -> tuple[int, str, float]:
        """Exit code, output, seconds."""
        begin = clock.monotonic()
        done = subprocess.run(
            [BIN / self.argv[0], *self.argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            # Colours and progress bars are for a terminal, which no step has.
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb"},
        )
        return done.returncode, done.stdout, clock.monotonic() - begin


def module(name: str, *words: str) -> tuple[str, ...]:
    """The command that runs a module."""
    return ("python", "-m", name, *words)


# The longest first, so that none of them is left running alone at the end.
UNIT = Step("unit tests", module("pytest", "tests/unit", "tests/tooling", "-n0", "-q"))
LINT = (
    Step("pages", module("localai_cluster.embedded.build", "check")),
    Step("types", ("mypy",)),
    Step("import contracts", ("lint-imports",)),
    Step("house", module("tests.checks.house")),
    Step("words", module("tests.checks.words"), is_shown=True),
    Step("modules", module("tests.checks.modules"), is_shown=True),
    Step("clock", module("tests.checks.clock")),
    Step("points", module("tests.checks.points")),
    Step("replicas", module("tests.checks.replicas")),
    Step("settings", module("tests.checks.settings")),
    Step("format", ("ruff", "format", "--check", ".")),
    Step("lint", ("ruff", "check", ".")),
)
# It collects every test, so only `make check` and `make trace` run it.
TRACE = Step("trace", module("tests.checks.trace", "--gaps"))
TRIPS = Step("trips", module("tests.checks.trip"), is_shown=True)
TARGETS = {"lint": LINT, "check": (LINT[0], UNIT, TRIPS, TRACE, *LINT[1:])}


def run(steps: Sequence[Step], side_by_side: int = SIDE_BY_SIDE) -> list[str]:
    """Runs them and prints how each ended; returns the names of those that failed."""
    failed = []
    with ThreadPoolExecutor(side_by_side) as pool:
        started = {pool.submit(step.run): step for step in steps}
        for future in as_completed(started):
            step, (code, output, seconds) = started[future], future.result()
            print(f"{'FAILED' if code else 'ok':<7} {step.name:<17} {seconds:5.1f} s", flush=True)
            if code:
                failed.append(step.name)
                print(output, flush=True)
            elif step.is_shown:
                print("".join(f"        {line}\n" for line in output.splitlines()), end="", flush=True)
    return failed


def main(words: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if len(words) != 1 or words[0] not in TARGETS:
        print(f"usage: python -m tests.checks.steps {'|'.join(TARGETS)}", file=sys.stderr)
        return 2
    begin = clock.monotonic()
    failed = run(TARGETS[words[0]])
    took = f"{clock.monotonic() - begin:.0f} s"
    print(f"{words[0]}: {'failed: ' + ', '.join(failed) if failed else 'all passed'} in {took}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
