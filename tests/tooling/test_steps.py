"""`make check`: a failed step is shown whole and named last, and the others run to their end."""

import pytest

from tests.checks import steps


def test_a_failure_is_named_last_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planted = (
        steps.Step("good", ("python", "-c", "print('not worth reading')")),
        steps.Step("bad", ("python", "-c", "print('what is wrong'); raise SystemExit(3)")),
        steps.Step("late", ("python", "-c", "pass")),
        steps.Step("figures", ("python", "-c", "print('modules 7')"), is_shown=True),
    )
    monkeypatch.setitem(steps.TARGETS, "check", planted)
    assert steps.main(["check"]) == 1
    printed = capfd.readouterr().out
    assert "what is wrong" in printed
    assert "not worth reading" not in printed
    assert "        modules 7\n" in printed
    assert [printed.count(f"ok      {name}") for name in ("good", "late")] == [1, 1]
    assert printed.splitlines()[-1].startswith("check: failed: bad in ")


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(steps.TARGETS, "lint", (steps.Step("good", ("python", "-c", "pass")),))
    assert steps.main(["lint"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("lint: all passed in ")


def test_an_unknown_target_is_no_success() -> None:
    assert steps.main(["everything"]) == 2
