"""`make sweep`: every failure of every round is in the table, and the exit code says so."""

from pathlib import Path

import pytest

from tests import sweep
from tests.sweep import Part, Result

REPORT = '<testsuites><testsuite failures="2" errors="1" tests="9"/></testsuites>'


def test_failures_are_those_of_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert sweep.counted(report) == 0
    report.write_text(REPORT)
    assert sweep.counted(report) == 3


def test_what_was_skipped_is_told_with_the_reason(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert sweep.reasons(report) == set()
    report.write_text(
        '<testsuites><testcase><skipped type="x" message="not allowed"/></testcase></testsuites>'
    )
    assert sweep.reasons(report) == {"not allowed"}


def test_the_table_says_what_came_of_each_part() -> None:
    results = [
        Result(Part("races", (), effort=10), 0, 61.4),
        Result(Part("kills", (), times=5), 2, 300, ("not allowed",)),
    ]
    assert sweep.table(results) == [
        "what                    rounds  failures  seconds",
        "races                       10         0       61",
        "kills                        5         2      300",
        "skipped in kills: not allowed",
    ]


def test_a_part_that_ends_badly_fails_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its rounds counts, and the parts after it run all the same."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(sweep, "OUTPUT", tmp_path / "sweep")
    planted = (
        Part("bad", ("-c", "raise SystemExit(3)"), times=2),
        Part("good", ("-c", "import os; print(os.environ['TEST_EFFORT'])"), effort=7),
    )
    monkeypatch.setattr(sweep, "parts", lambda: planted)
    assert sweep.main([]) == 1
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[3:5]] == [
        ["bad", "2", "2"],
        ["good", "7", "0"],
    ]
    assert (tmp_path / "sweep" / "good-1.log").read_text() == "7\n"
    assert sweep.main(["good"]) == 0
    assert sweep.main(["nothing of that name"]) == 1


def test_every_part_finds_its_tests() -> None:
    """A word that no file has would let pytest run everything."""
    for part in sweep.parts():
        assert "pytest" not in part.argv or any(word.startswith("tests/") for word in part.argv), part.name


def test_each_test_that_is_left_to_the_sweep_is_in_a_part() -> None:
    """A test that a usual run skips and no part plays would never run."""
    played = tuple(word for part in sweep.parts() for word in part.argv if word.startswith("tests/"))
    files = (file for file in (sweep.ROOT / "tests").rglob("test_*.py") if file != Path(__file__))
    left = [
        name
        for file in files
        for name in [file.relative_to(sweep.ROOT).as_posix()]
        if "swept" in (text := file.read_text("utf-8")) or "`make sweep` plays it" in text
        if not any(name == word or name.startswith(f"{word}/") for word in played)
    ]
    assert left == []
