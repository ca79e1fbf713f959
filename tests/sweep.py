"""`make sweep`: what is too long for every run. Prints a table: what, rounds, failures, seconds.

Races run with more rounds and properties with more examples (`EFFORT` times as many), the kills of the
acceptance tests several times, and schemathesis against the whole API. Every part runs to its end; its output
is under `build/sweep`, and the exit code is 1 if anything failed.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localai_cluster.kit import clock

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "sweep"
EFFORT = int(os.environ.get("TEST_EFFORT", "10"))
KILLS = 5
"""How often the kills are repeated; each time is some minutes."""
CUTS = 3
"""How often the cable between two machines is pulled."""
FRONT = ("tests/acceptance/test_front_whole.py", "tests/acceptance/test_make_run.py")
"""`make run` as a whole, with either web server."""
HISTORIES = (
    "tests/integration/replicas/test_replica_histories.py",
    "tests/acceptance/test_replica_processes.py",
)
"""The life of replicas: planted defects, many histories, and some with processes."""
SHOWN = "for the table: "
"""What stands before a line of an output that belongs to the table; pytest may write a dot before it."""
PATIENCE = 14_400
"""Seconds that one test may take with so many rounds."""


@dataclass(frozen=True)
class Part:
    """One line of the table: a command that runs `times`, with `effort` in its environment."""

    name: str
    argv: tuple[str, ...]
    effort: int = 1
    times: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    """More of its environment."""

    @property
    def rounds(self) -> int:
        """How often its tests look where a usual run looks once."""
        return self.effort * self.times


@dataclass(frozen=True)
class Result:
    """What came of a part."""

    part: Part
    failures: int
    seconds: float
    skipped: tuple[str, ...] = ()
    """Why tests of it did not run."""
    shown: tuple[str, ...] = ()
    """Lines of its output for the table."""


def using(word: str, folder: str = "tests/integration") -> tuple[str, ...]:
    """The test files in which this word stands."""
    found = sorted((ROOT / folder).rglob("test_*.py"))
    return tuple(file.relative_to(ROOT).as_posix() for file in found if word in file.read_text("utf-8"))


def tests(*words: str) -> tuple[str, ...]:
    """The command that runs these tests."""
    return ("-m", "pytest", "-q", "-n0", f"--timeout={PATIENCE}", *words)


def parts() -> tuple[Part, ...]:
    """Everything that is swept."""
    named = _named_parts()
    played = {word for part in named for word in part.argv}
    rest = {*using("swept"), *using("swept", "tests/acceptance")} - played
    return (*named, Part("other long tests", tests(*sorted(rest))))


def _named_parts() -> tuple[Part, ...]:
    """The parts with rounds, settings or a line of the table of their own."""
    return (
        Part("races", tests(*using("@repeated")), EFFORT),
        Part("stateful", tests(*using("run_state_machine_as_test")), EFFORT),
        Part("properties of rooms", tests(*sorted({*using("@given(")} - {*HISTORIES})), EFFORT),
        Part("properties of rules", tests(*using("@given(", "tests/unit")), EFFORT),
        Part("replicas", tests(*HISTORIES, "-s"), EFFORT),
        Part("trips", ("-m", "tests.checks.trip")),
        Part("rotation", tests("tests/acceptance/test_rotation.py"), 10),
        Part("two machines", tests("tests/acceptance/test_two_machines.py"), CUTS),
        Part(
            "kills",
            tests("tests/acceptance/test_kills.py", "tests/acceptance/test_stream_kills.py"),
            times=KILLS,
        ),
        Part("web processes", tests("tests/acceptance/test_web_processes.py", "-s")),
        *(
            Part(f"front, {server}", tests(*FRONT), settings=(("CLUSTER_SERVER", server),))
            for server in ("uvicorn", "daphne")
        ),
        Part("faults", tests("tests/acceptance/test_faults.py"), 10),
        Part("kill sweep", tests("tests/acceptance/test_kill_sweep.py", "-s"), EFFORT),
        Part("memory fit", tests("tests/integration/examples/test_memory_fit.py")),
        Part("wire", tests("tests/wire")),
        Part("bus credentials", tests("tests/acceptance/test_bus_credentials.py")),
        Part("real registry", tests("tests/wire/test_registry.py", "-s")),
        Part("pages in the dark", tests(*using("swept", "tests/browser"))),
        Part("clients of others", tests("tests/sdks")),
        Part("fuzz", ("-m", "tests.fuzz")),
    )


def run(part: Part) -> Result:
    """Runs a part to its end; every test of it that failed is one failure, each time it did."""
    begin, failures = clock.monotonic(), 0
    skipped: set[str] = set()
    shown: list[str] = []
    for number in range(1, part.times + 1):
        stem = OUTPUT / f"{part.name.replace(' ', '-')}-{number}"
        report = stem.with_suffix(".xml")
        report.unlink(missing_ok=True)
        more = (f"--junitxml={report}",) if "pytest" in part.argv else ()
        with stem.with_suffix(".log").open("wb") as log:
            code = subprocess.run(
                [sys.executable, *part.argv, *more],
                cwd=ROOT,
                env={**os.environ, "TEST_EFFORT": str(part.effort), **dict(part.settings)},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        failures += counted(report) or bool(code)
        skipped |= reasons(report)
        lines = stem.with_suffix(".log").read_text("utf-8", errors="replace").splitlines()
        shown += [line.partition(SHOWN)[2] for line in lines if SHOWN in line]
    return Result(part, failures, clock.monotonic() - begin, tuple(sorted(skipped)), tuple(shown))


def counted(report: Path) -> int:
    """The failures and errors that pytest wrote down; 0 without a report."""
    if not report.exists():
        return 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    return sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)


def reasons(report: Path) -> set[str]:
    """Why tests were skipped, as pytest wrote it down."""
    if not report.exists():
        return set()
    return {one.get("message", "") for one in ElementTree.parse(report).getroot().iter("skipped")}


def table(results: Sequence[Result]) -> list[str]:
    """The lines to print at the end."""
    lines = [f"{'what':<22}{'rounds':>8}{'failures':>10}{'seconds':>9}"]
    lines += [
        f"{one.part.name:<22}{one.part.rounds:>8}{one.failures:>10}{one.seconds:>9.0f}" for one in results
    ]
    lines += [line for one in results for line in one.shown]
    return lines + [f"skipped in {one.part.name}: {reason}" for one in results for reason in one.skipped]


def main(words: Sequence[str]) -> int:
    """Runs all parts, or those that are named; 1 if anything failed."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts() if not words or part.name in words]
    results = []
    for part in chosen:
        print(f"{part.name} …", flush=True)
        results.append(run(part))
    print("\n".join(table(results)))
    failed = sum(one.failures for one in results)
    if failed:
        print(f"{failed} failures; the output is in {OUTPUT.relative_to(ROOT)}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
