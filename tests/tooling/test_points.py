"""Points: what the check finds, what a kill needs, and that every point has a round of the kill sweep."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.kill_rounds import OUT_OF_REACH, rounds
from tests.checks.points import PACKAGES, around, check, collect

ROOT = Path(__file__).resolve().parents[2]
ROOM = "operations/ledger/planted.py"


def planted(tmp_path: Path, source: str) -> list[str]:
    """What the check says of one file in a room."""
    file = tmp_path / ROOM
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return check(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "def verb():\n    with transaction.atomic():\n        pass",
        "from django.db.transaction import atomic",
        "async def verb(bus):\n    await bus.publish('subject', b'')",
        "async def verb(bus):\n    await bus.request('subject', b'', 1.0, inbox='')",
        "async def verb(bus):\n    await carrier.ask(bus, 'subject', None, str, 1.0, inbox='')",
        "def verb(row):\n    row.save()",
        "def verb(rows):\n    with committed('a'):\n        pass\n    rows.update(name='')",
        "def verb(rows):\n    _step(rows)\n\ndef _step(rows):\n    rows.delete()",
        "def verb(name):\n    with committed(name):\n        pass",
    ],
)
def test_what_goes_around_the_points_is_found(tmp_path: Path, source: str) -> None:
    """A transaction, a message or a write of its own, and a point that cannot be collected."""
    assert len(planted(tmp_path, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def verb(row):\n    with committed('a'):\n        row.save()",
        "def verb(rows):\n    with committed('a'):\n        _step(rows)\n\ndef _step(rows):\n    rows.save()",
        "async def verb(bus):\n    with failpoints.wrap_message('a'):\n        await bus.publish('', b'')",
    ],
)
def test_what_goes_through_them_is_left_alone(tmp_path: Path, source: str) -> None:
    """A step of a registered commit needs none of its own."""
    assert planted(tmp_path, source) == []


def test_the_tree_itself_is_clean() -> None:
    """Every commit and message of the rooms has its point."""
    assert check(ROOT) == []


def test_a_message_within_a_point_is_covered() -> None:
    """So is one in a nested block."""
    source = "with failpoints.wrap_request('a'):\n    if True:\n        bus.publish('', b'')"
    assert list(around(ast.parse(source))) == []


def test_every_point_has_a_round() -> None:
    """A point without a kill fails, and so does a round without its point."""
    points = {point for point in collect(ROOT) if point.rpartition(":")[0] not in OUT_OF_REACH}
    assert {one.point.partition("@")[0] for one in rounds()} == points


def test_what_has_no_round_is_used_by_nothing() -> None:
    """A function that the product begins to call, or hands on to be called, needs rounds."""
    source = "\n".join(path.read_text() for room in PACKAGES for path in (ROOT / room).rglob("*.py"))
    for point, name in OUT_OF_REACH.items():
        assert len(re.findall(rf"\b{name}\b", source)) == 1, f"{name} is used, so {point} needs rounds"


def test_a_kill_needs_the_word_that_it_is_a_test() -> None:
    """The setting alone ends the process with the setting and the fix, before it has done anything."""
    done = subprocess.run(
        [sys.executable, "-c", "import localai_cluster.kit.failpoints"],
        env={"PYTHONPATH": str(ROOT), "CLUSTER_KILL_AT": "ledger.claim:before"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "unset CLUSTER_KILL_AT" in done.stderr


def test_a_process_ends_at_its_point(tmp_path: Path) -> None:
    """Once for each file, at the n-th time, and not before the file is there."""
    gate = tmp_path / "gate"
    code = (
        "from pathlib import Path; from localai_cluster.kit import failpoints\n"
        f"failpoints.passed('a'); failpoints.passed('a'); Path({str(gate)!r}).touch()\n"
        "failpoints.passed('b'); failpoints.passed('a'); print('once', flush=True)\n"
        "failpoints.passed('a'); print('twice')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "CLUSTER_KILL_AT": "a@2", "CLUSTER_KILL_TEST": str(gate)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-9, "once\n")
    assert "killed at the point a" in done.stderr
    assert not gate.exists()
