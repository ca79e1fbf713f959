"""`make trace`: rules are read from the sheets, proofs from the markers, and a gap or a slip is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks import trace

ROOT = Path(__file__).resolve().parents[2]
PLANTED = '''"""Planted."""

import pytest

pytestmark = pytest.mark.rule("R1.1")

@pytest.mark.rule("R1.32", "http-1.2")
@pytest.mark.parametrize("number", [1, 2])
def test_of_two_cases(number: int) -> None: ...

@pytest.mark.rule("R9.99")
def test_with_a_slip() -> None: ...

@pytest.mark.rule("R1.33")
@pytest.mark.skip(reason="not yet")
def test_that_never_runs() -> None: ...

@pytest.mark.rule("R1.34")
@pytest.mark.xfail
def test_that_may_fail() -> None: ...

@pytest.mark.rule()
class TestOfNothing:
    def test_in_a_class(self) -> None: ...
'''


def contract(folder: Path, **sheets: str) -> Path:
    """A folder with these sheets, the other ones empty."""
    for sheet in trace.SHEETS:
        (folder / sheet.name).write_text(sheets.get(sheet.name.partition(".")[0].replace("-", "_"), ""))
    return folder


def test_rules_are_read_in_every_form_the_sheets_use(tmp_path: Path) -> None:
    """Paragraphs, table rows, catalogue lines, ranges, numbered headings; prose that cites a rule is none."""
    scheduling = (
        "### 1B. Node status\n| R1.10 register, new name | all |\nR1.22 Lookup is by name.\n"
        "* R1.14 means more.\n"
        "### 7A. Registry (db)\n- T-REG-1 new node\n- T-REG-119…121 only the current row\n"
    )
    found = trace.rules(
        contract(
            tmp_path,
            scheduling=scheduling,
            http_api="## 1. Self-service\n### 1.1 POST `/api/node/register`\n",
            grpc="| Health | HealthMessage | Reply |\n| method | request |\n| 1 | Health | worker |\n",
            worker="## 4. Start\n1. Read.\n## 22. Checks\n1. Register.\n33. Exact paths.\n",
        )
    )
    assert {name: rule.section for name, rule in found.items()} == {
        "R1.10": "1B",
        "R1.22": "1B",
        "T-REG-1": "7A",
        "T-REG-119": "7A",
        "T-REG-120": "7A",
        "T-REG-121": "7A",
        "http-1.1": "http-1",
        "grpc-Health": "grpc",
        "worker-4": "worker-4",
        "worker-22": "worker-22",
        "W1": "W22",
        "W33": "W22",
    }
    assert found["W1"].title == "Register."


def test_a_weakness_of_the_pages_is_no_check_of_the_worker(tmp_path: Path) -> None:
    """Both lists once began with `W1`, so that a browser's test seemed to prove something of the worker."""
    found = trace.rules(
        contract(
            tmp_path,
            worker="## 22. Checks\n1. Register.\n",
            operations_and_ui="# Part 3. Weaknesses\n- **UW1 (1).** Everything is polled.\n",
        )
    )
    assert {name: rule.title for name, rule in found.items()} == {
        "worker-22": "Checks",
        "W1": "Register.",
        "UW1": "Everything is polled.",
    }


def test_every_rule_of_the_nodes_part_is_covered() -> None:
    """The sheets in the repository: nothing between the first number and the last is left out."""
    wanted = [rule.id for rule in trace.covered(trace.rules())]
    assert [name for name in wanted if name.startswith("R1.")] == [f"R1.{number}" for number in range(1, 121)]
    assert [name for name in wanted if name.startswith("http-")] == [
        *(f"http-0.{number}" for number in range(1, 7)),
        *(f"http-1.{number}" for number in range(1, 8)),
        *(f"http-2.{number}" for number in range(1, 14)),
        *(f"http-3.{number}" for number in range(1, 10)),
        *(f"http-4.{number}" for number in range(1, 6)),
        *(f"http-5.{number}" for number in range(1, 5)),
        *(f"http-6.{number}" for number in range(1, 4)),
        *(f"http-6{letter}" for letter in "abcd"),
    ]
    assert {f"T-REG-{number}" for number in (*range(1, 12), *range(33, 49), *range(103, 110))} < set(wanted)
    assert len(wanted) == len(set(wanted))


@pytest.mark.parametrize("section", trace.COVERED)
def test_a_section_is_printed_alone(section: str) -> None:
    """`make trace SECTION=1B` shows the rules of 1B and no others."""
    rules = trace.covered(trace.rules(), [section])
    assert rules
    assert {rule.section for rule in rules} == {section}
    counted = trace.COVERED[section]
    assert counted is None or counted == {rule.id for rule in rules}


def test_a_section_that_is_not_covered_is_refused() -> None:
    """Silence about a section no one looks at would read as "no gap"."""
    with pytest.raises(trace.Untraceable, match="not covered: 9Z"):
        trace.covered(trace.rules(), ["1B", "9Z"])


def test_a_gap_is_counted_and_shown() -> None:
    """Each rule stands with its tests; one without any is a GAP."""
    wanted = [trace.Rule("R1.1", "1A", "types"), trace.Rule("R1.10", "1B", "register")]
    lines, gaps = trace.report(wanted, {"R1.10": {"b.py::test_b", "a.py::test_a"}})
    assert gaps == 1
    assert [line.split() for line in lines] == [
        ["[1A]"],
        ["R1.1", "GAP", "types"],
        ["[1B]"],
        ["R1.10", "register"],
        ["->", "a.py::test_a"],
        ["->", "b.py::test_b"],
    ]


def collected(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """What `trace.collect` says of one test module, in a process of its own."""
    (folder / "test_planted.py").write_text(source)
    script = (
        "import json\nfrom tests.checks import trace\n"
        f"print(json.dumps({{name: [*tests] for name, tests in trace.collect({str(folder)!r}).items()}}))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_markers_are_collected_without_running_anything(tmp_path: Path) -> None:
    """Cases collapse to their function; a skip or an xfail proves nothing; a marker without ids is a slip."""
    done = collected(tmp_path, PLANTED)
    assert done.returncode == 0, done.stderr
    found = {
        name: {test.rpartition("::")[2] for test in tests} for name, tests in json.loads(done.stdout).items()
    }
    assert found == {
        "R1.1": {"test_of_two_cases", "test_with_a_slip", "test_in_a_class"},
        "R1.32": {"test_of_two_cases"},
        "http-1.2": {"test_of_two_cases"},
        "R9.99": {"test_with_a_slip"},
        "(no id)": {"test_in_a_class"},
    }
    assert set(found) - set(trace.rules()) == {"R9.99", "(no id)"}


def test_a_module_that_cannot_be_imported_is_no_silent_gap(tmp_path: Path) -> None:
    """The trace says what pytest said."""
    done = collected(tmp_path, "import nothing_of_that_name\n")
    assert done.returncode != 0
    assert "nothing_of_that_name" in done.stderr


def test_gaps_and_slips_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 for a gap, for an unknown id, and for a section no one covers; 0 when all is proved."""
    full = {rule.id: {f"{trace.SUITES.get(rule.section, '')}test_x"} for rule in trace.covered(trace.rules())}
    for proofs, code, says in [
        (full, 0, "0 without a test, 0 unknown"),
        ({**full, "R9.99": {"test_y"}}, 1, "unknown rule R9.99: test_y"),
        ({name: tests for name, tests in full.items() if name != "R1.32"}, 1, "1 without a test"),
        # Of any worker, so a test of ours alone is not one.
        ({**full, "W7": {"tests/unit/test_x"}}, 1, "1 without a test"),
    ]:
        monkeypatch.setattr(trace, "collect", lambda *_, proofs=proofs: proofs)
        assert trace.main([]) == code
        assert says in capsys.readouterr().out
    assert trace.main(["9Z"]) == 1


def test_gaps_alone_can_be_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--gaps`, as `make test` runs it: silent about what is proved."""
    monkeypatch.setattr(trace, "collect", lambda *_: {"http-1.1": {"test_x"}})
    assert trace.main(["--gaps", "http-1"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[:-1]] == [[f"http-1.{n}", "GAP"] for n in range(2, 8)]
