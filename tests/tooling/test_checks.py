"""F2: one violation of each enforced kind, planted in a copy of the tree, is found by its check."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks.clock import check, findings

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
COPIED = ("localai_cluster", "nodes", "operations", "tests", "manage.py", "pyproject.toml")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the checks look at, with mypy's cache so that it need not start from nothing."""
    home = tmp_path_factory.mktemp("tree")
    for name in (*COPIED, ".mypy_cache"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, home / name)
    return home


def run(tree: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(BIN), "PYTHONPATH": str(tree), "SECRET_KEY": "x" * 32}
    return subprocess.run(
        [str(BIN / argv[0]), *argv[1:]],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


PLANTED = {
    "import contract": (
        "nodes/placement/planted.py",
        '"""Planted."""\n\nimport django\n\nUSED = django\n',
        ("lint-imports",),
    ),
    "layer": (
        "operations/planted.py",
        '"""Planted."""\n\nfrom nodes import models\n\nUSED = models\n',
        ("lint-imports",),
    ),
    "type": ("nodes/planted.py", '"""Planted."""\n\nUSED: int = "text"\n', ("mypy", "nodes/planted.py")),
    "clock": (
        "nodes/planted.py",
        '"""Planted."""\n\nfrom datetime import UTC, datetime\n\nUSED = datetime.now(UTC)\n',
        ("ruff", "check", "--no-cache", "nodes"),
    ),
    "format": (
        "nodes/planted.py",
        '"""Planted."""\n\nUSED = {  "a":1 }\n',
        ("ruff", "format", "--no-cache", "--check", "nodes"),
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_violation_is_found(tree: Path, kind: str) -> None:
    """F2: the check is silent before and fails after, for the planted file."""
    path, source, command = PLANTED[kind]
    (tree / path).write_text(source)
    try:
        found = run(tree, *command)
    finally:
        (tree / path).unlink()
    assert found.returncode != 0
    assert "planted" in found.stdout + found.stderr


@pytest.mark.parametrize(
    "source",
    [
        "at = models.DateTimeField(auto_now=True)",
        "at = models.DateTimeField(auto_now_add=True)",
        "late = loop.time() + 5",
        "late = asyncio.get_running_loop().time()",
        'cursor.execute("UPDATE node SET seen = now() WHERE id = 1")',
        'cursor.execute("SELECT current_timestamp")',
    ],
)
def test_the_clock_ban_sees_what_ruff_cannot(source: str) -> None:
    """Time is a parameter: Django's, SQL's and the loop's own clocks are banned too."""
    assert list(findings(source))


@pytest.mark.parametrize(
    "source", ["now = clock.now()", '"""Waits for now() in prose."""', "span = loop.call_later(1, f)"]
)
def test_the_clock_ban_leaves_the_rest_alone(source: str) -> None:
    """No false alarm for prose, parameters and timers."""
    assert not list(findings(source))


def test_the_tree_itself_is_clean() -> None:
    """What the ban is for."""
    assert check(ROOT) == []
