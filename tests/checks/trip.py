"""The product files and functions that four requests pass, beside the goals.

`python -m tests.checks.trip` runs the test of each trip under `sys.setprofile` and prints a table;
`--files` lists the files in the order of their first call. A pair of files that call each other in both
directions is counted, too. Not counted: start-up, imports, fixtures, migrations, generated stubs, other
processes.
As a pytest plugin (`-p tests.checks.trip`) it writes what one run has executed to the file `TRIP_RESULT`.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = "TRIP_RESULT"
_PREFIX = f"{ROOT}{os.sep}"
_PACKAGES = ("localai_cluster/", "nodes/", "operations/")


@dataclass(frozen=True)
class Trip:
    """A request, the tests that make it, and the goals."""

    name: str
    tests: tuple[str, ...]
    """Names of test functions; the trip is the union of what they execute."""
    max_files: int
    max_functions: int | None = None


TRIPS = (
    Trip("warm embeddings", ("test_answers_in_both_encodings",), 25),
    Trip(
        "cold request with staging",
        ("test_one_load_for_everyone", "test_the_files_are_there_before_the_engine_starts"),
        60,
        400,
    ),
    Trip("heartbeat", ("test_figures_are_stored",), 12),
    Trip("streamed chat", ("test_the_first_piece_leaves_at_once",), 35),
)


@dataclass
class Recording:
    """Functions and calls between files, in the order of their first execution."""

    functions: dict[tuple[str, str], None] = field(default_factory=dict)
    calls: dict[tuple[str, str], None] = field(default_factory=dict)

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call; a function for `sys.setprofile`."""
        path = _product_path(frame) if event == "call" else None
        if path is None or _is_import(frame):
            return
        self.functions[path, frame.f_code.co_qualname] = None
        caller = frame.f_back
        while caller is not None and _product_path(caller) is None:
            caller = caller.f_back
        calling_path = _product_path(caller) if caller is not None else None
        if calling_path is not None and calling_path != path:
            self.calls[calling_path, path] = None

    def update(self, recording: "Recording") -> None:
        """Add what another run has executed."""
        self.functions.update(recording.functions)
        self.calls.update(recording.calls)

    @property
    def files(self) -> list[str]:
        """Files in the order of their first call."""
        return list(dict.fromkeys(path for path, _ in self.functions))

    @property
    def mutual_pairs(self) -> list[tuple[str, str]]:
        """Pairs of files that call each other in both directions."""
        return sorted(pair for pair in self.calls if pair[0] < pair[1] and pair[::-1] in self.calls)


def _product_path(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    if not path.startswith(_PREFIX):
        return None
    path = path.removeprefix(_PREFIX)
    is_product = path.startswith(_PACKAGES) and "/migrations/" not in path and "/generated/" not in path
    return path if is_product else None


def _is_import(frame: FrameType | None) -> bool:
    """Return True for bodies of modules and classes of the product, and for what they call.

    Only the first call of a process imports a module, so these would depend on what ran before.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _product_path(frame) is not None:
            return True
        frame = frame.f_back
    return False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record a test in the file `TRIP_RESULT`."""
    recording = Recording()
    threading.setprofile(recording.profile)
    sys.setprofile(recording.profile)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        if path := os.environ.get(RESULT):
            result = {"functions": list(recording.functions), "calls": list(recording.calls)}
            Path(path).write_text(json.dumps(result), encoding="utf-8")


def find_test(name: str) -> str:
    """Return the id of a test function; raise LookupError unless exactly one file defines it."""
    paths = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if f"def {name}(" in path.read_text(encoding="utf-8")
    ]
    if len(paths) != 1:
        raise LookupError(f"{name}: {len(paths)} tests have this name")
    return f"{paths[0].relative_to(ROOT).as_posix()}::{name}"


def record(test: str) -> Recording:
    """Run a test in a process of its own; raise RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.checks.trip", find_test(test)]
        finished = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, RESULT: str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if finished.returncode or not path.exists():
            raise RuntimeError(finished.stdout)
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Recording(
        dict.fromkeys((file, function) for file, function in result["functions"]),
        dict.fromkeys((caller, callee) for caller, callee in result["calls"]),
    )


def line(trip: Trip, recording: Recording) -> str:
    """Return a line of the table."""
    files = f"{len(recording.files):>4} files (goal {trip.max_files})"
    goal = f" (goal {trip.max_functions})" if trip.max_functions else ""
    functions = f"{len(recording.functions):>4} functions{goal}"
    return f"{trip.name:<26}{files}  {functions}  {len(recording.mutual_pairs)} mutual pairs"


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 0."""
    for trip in TRIPS:
        recording = Recording()
        for test in trip.tests:
            recording.update(record(test))
        print(line(trip, recording), flush=True)
        if "--files" in arguments:
            print("".join(f"  {path}\n" for path in recording.files), end="")
            print("".join(f"  {first} <-> {second}\n" for first, second in recording.mutual_pairs), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
