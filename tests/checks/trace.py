"""Which tests prove which rule: rules are read from `docs/contract/`, proofs from pytest's own collection.

A test says what it proves by the marker `@pytest.mark.rule("R1.32", "http-1.2")`. `python -m
tests.checks.trace` prints rule -> tests for the covered sections, or for those named, and exits 1 if a
covered rule has no test or if a marker names a rule that no sheet knows. Nothing is run and no server is
started. A skipped test and an expected failure prove nothing. A deviation (`docs/deviations.md`) needs a
test like every other rule. The unit tests of the pages (`static/src/**/*.test.ts`) name behaviours in their
titles. `grpc-Predict` is a method of engines (`grpc.md`), `W1` a check of the worker (`worker.md` §22), `UW1`
a weakness of the pages that ours does without (`operations-and-ui.md` Part 3); the last list is not a section
that must be proved.
"""

import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "docs" / "contract"
SOURCES = ROOT / "static" / "src"
TITLE = 88
GAPS_ONLY = "--gaps"
_GAP = "GAP  "

_HEADING = re.compile(r"^#{2,3} (?P<number>\d+[A-Z]?(?:\.\d+)?)\.? ")
_SPAN = re.compile(r"(?P<stem>.+-)(?P<first>\d+)…(?P<last>\d+)\Z")


@dataclass(frozen=True)
class Rule:
    """One numbered rule: `section` is what `make trace SECTION=` calls it, `title` its first line."""

    id: str
    section: str
    title: str


@dataclass(frozen=True)
class Sheet:
    """How a file numbers its rules: `pattern` finds id and text in a line, `prefix` goes before the id.

    `only` is the one section whose lines count, where a sheet numbers other lists the same way; `section` is
    the name of all its rules, where its headings have no numbers.
    """

    name: str
    pattern: re.Pattern[str]
    prefix: str = ""
    only: str = ""
    section: str = ""


SHEETS = (
    Sheet("scheduling.md", re.compile(r"^(?:\| )?(R\d+\.\d+) (.+)")),
    Sheet("scheduling.md", re.compile(r"^\| (C\d+) \| (.+)")),
    Sheet("scheduling.md", re.compile(r"^- (T-[A-Z]+-[\d…]+) (.+)")),
    Sheet("http-api.md", re.compile(r"^### (\d+\.\d+) (.+)"), "http-"),
    Sheet("http-api.md", re.compile(r"^\| (6[a-z]) (.+)"), "http-"),
    Sheet("worker.md", re.compile(r"^#{2,3} (\d+(?:\.\d+)?)\.? (.+)"), "worker-"),
    Sheet("worker.md", re.compile(r"^(\d+)\. (.+)"), "W", only="W22"),
    Sheet("grpc.md", re.compile(r"^\| ([A-Z]\w+) \| (\w.+)"), "grpc-", section="grpc"),
    Sheet("nats.md", re.compile(r"^#{2,3} (\d+(?:\.\d+)?)\.? (.+)"), "nats-"),
    Sheet("operations-and-ui.md", re.compile(r"^[-|] \**([OHA]\d+[a-z]?)\.?\**[ |]+(.+)")),
    Sheet("operations-and-ui.md", re.compile(r"^- (E\d+)\. (.+)")),
    Sheet("operations-and-ui.md", re.compile(r"^- \*\*(UW\d+) \(\d\)\.\*\* (.+)"), section="weaknesses"),
    Sheet("README.md", re.compile(r"^\| (I\d+) \| (.+)")),
    Sheet("pages.md", re.compile(r"^\| (UI-\d+\.\d+) \| (.+)"), section="pages"),
)
_LATER = "| later"
"""In the row of a behaviour that waits for a page which is not there yet."""
_CITED = re.compile(r"\b(?:UI-\d+\.\d+|[AEHO]\d+|UW\d+)\b")


def _numbers(prefix: str, *spans: Iterable[int | str]) -> frozenset[str]:
    return frozenset(f"{prefix}{number}" for span in spans for number in span)


# The sections that must have no gap, and of each the rules that count; None: all of the section.
COVERED: dict[str, frozenset[str] | None] = {
    "0": _numbers("C", range(1, 50)),
    "1A": None,
    "1B": None,
    "1C": None,
    "1D": None,
    "1E": None,
    "1F": None,
    "1G": None,
    "1H": None,
    "1I": None,
    "1J": None,
    "1K": None,
    "1L": None,
    "1M": None,
    "1N": None,
    # R1.106: the prefix cache; the control plane has no handles of a local model store.
    "1O": None,
    "1P": None,
    "1Q": None,
    # Not R2.14: how the seed held a lock while it loaded, in whose place is R2.15 (D16).
    "2A": _numbers("R2.", range(1, 14), range(15, 16)),
    "2B": None,
    "2C": None,
    # Not R2.27: a definition always has options.
    "2D": frozenset({"R2.26", "R2.28", "R2.29"}),
    "2E": None,
    "2F": None,
    "2G": None,
    "2H": None,
    "2I": None,
    "2J": None,
    "2K": None,
    "2L": None,
    "2M": None,
    # Not R2.79: the control plane has no model store of its own.
    "2N": frozenset({"R2.77", "R2.78"}),
    "2O": None,
    "2P": None,
    "2Q": None,
    # Prefixes.
    "3A": None,
    "3B": None,
    "3C": None,
    "3D": None,
    "3E": None,
    # Both passes.
    "4A": _numbers("R4.", range(1, 5)),
    "4B": None,
    "4C": None,
    # Rules from the settings.
    "4D": None,
    "5": _numbers("R5.", range(1, 14)),
    "6A": None,
    "6B": None,
    "6C": None,
    "6D": None,
    "6E": None,
    "6F": None,
    "6G": None,
    # Not T-REG-95: two models are edited by two files.
    "7A": _numbers("T-REG-", range(1, 95), range(96, 139), range(140, 166))
    | _numbers("T-PICK-", range(1, 8)),
    "7B": None,
    # Not T-ROU-3, T-ROU-8: without a database. T-ROU-39: a definition has a name.
    # Of T-ADP the hooks and the picks; not the handles and the model store of a process, nor a mode without a
    # cluster.
    "7C": _numbers("T-ROU-", range(1, 3), range(4, 8), range(9, 39), range(40, 53))
    | _numbers("T-INF-", range(1, 29))
    | _numbers("T-ADP-", range(6, 7), range(22, 24))
    | _numbers("T-DL-", range(1, 25))
    | _numbers("T-DSK-", range(1, 14))
    | _numbers("T-HW-", range(1, 11))
    | _numbers("T-REV-", range(1, 15)),
    # Not T-PFX-28, T-RDX-26: one loop has the memory of prompts to itself. Of T-CTX the chain, which travels
    # in the request; not the holder of a node's id.
    "7D": _numbers("T-PFX-", range(1, 28), range(29, 58))
    | _numbers("T-RDX-", range(1, 26))
    | _numbers("T-CTX-", range(10, 14)),
    "7E": _numbers("T-REC-", range(1, 47)) | _numbers("T-SED-", range(1, 10)),
    # Not T-HLT-7: a mode without offline nodes.
    "7F": _numbers("T-HLT-", range(1, 7), range(8, 15)),
    "7G": None,
    "7H": None,
    # Of files of models; not T-STG-30: 3D. Those of requests are the inference edge's, what a worker answers
    # is worker-12's. Not T-FLW-16: an object store.
    "7I": _numbers("T-STG-", range(1, 30))
    | _numbers("T-FTS-", range(24, 28), range(35, 37))
    | _numbers("T-FLW-", range(3, 4), range(6, 7), range(15, 16), range(17, 20)),
    # Credentials of the bus; logs of engines.
    "7J": _numbers("T-JWT-", range(1, 7)) | _numbers("T-LOG-", range(1, 16)),
    "W22": None,
    "nats-1": None,
    "nats-2": _numbers("nats-2.", range(1, 4)),
    "nats-3": None,
    "nats-4": None,
    "nats-5": None,
    "nats-6": None,
    "nats-7": _numbers("nats-7.", range(1, 7)),
    "nats-8": None,
    "nats-9": None,
    "nats-10": None,
    # What requests of text, sound and images are.
    "grpc": frozenset(
        f"grpc-{method}"
        for method in (
            *("Predict", "PredictStream", "Embedding", "TokenizeString", "Detokenize", "Rerank"),
            *("AudioTranscription", "AudioTranscriptionStream", "TTS", "TTSStream", "GenerateImage"),
        )
    ),
    # Operations. Not O26, O104 to O106: galleries of models and staging. O63: raw statuses. O84: how the
    # reference locks its memory. O103: automatic upgrades.
    "1": frozenset({"O33a"})
    | _numbers("O", range(1, 26), range(27, 63), range(64, 84), range(85, 103), range(107, 110))
    | _numbers("H", range(1, 17)),
    # Not A76: that all tests pass together is said by the run. Of the pages operations,
    # backends and logs; not E53, E56: list and detail side by side.
    "2": _numbers("A", range(1, 76), range(77, 88))
    | _numbers("E", range(1, 30), range(43, 44), range(45, 53), range(54, 56), range(57, 58), range(69, 70)),
    "weaknesses": _numbers(
        "UW", range(9, 10), range(12, 13), range(21, 22), range(23, 28), range(29, 30), range(31, 33)
    ),
    "http-0": None,
    "http-1": None,
    "http-2": None,
    "http-3": None,
    "http-4": None,
    "worker-2": None,
    "worker-3": None,
    "worker-4": None,
    "worker-7": None,
    "worker-8": None,
    "worker-9": None,
    "worker-10": None,
    "worker-11": None,
    "worker-12": None,
    "worker-13": None,
    "worker-14": None,
    "worker-16": None,
    "worker-19": None,
    # Not where galleries come from, and what a machine can run.
    "worker-18": frozenset({"worker-18.1", "worker-18.2", "worker-18.5"}),
    # How the page is served and what its shell calls; which page calls what else (5.5) the pages say.
    "http-5": _numbers("http-5.", range(1, 5)),
    # Of 6a not edits, moderations and MCP, of 6b not faces. Rows without a letter are left out.
    "http-6": frozenset({"http-6.1", "http-6.2", "http-6.3"}) | _numbers("http-6", "abcd"),
    "pages": None,
}


SUITES = {"W22": "tests/wire/"}
"""Sections whose rules are proved in one folder: any worker and any server can be held to its tests."""


class Untraceable(Exception):
    """The trace cannot be made: the tests cannot be collected, or a section is not among the covered ones."""


def rules(contract: Path = CONTRACT) -> dict[str, Rule]:
    """Every rule of every sheet under `contract`, by id, in the order of the sheets."""
    found: dict[str, Rule] = {}
    for sheet in SHEETS:
        for rule in _of_sheet(sheet, (contract / sheet.name).read_text(encoding="utf-8")):
            found.setdefault(rule.id, rule)
    return found


def _of_sheet(sheet: Sheet, text: str) -> Iterator[Rule]:
    section = sheet.section
    for line in text.splitlines():
        if not sheet.section and (heading := _HEADING.match(line)):
            section = sheet.prefix + heading["number"].partition(".")[0]
        found = sheet.pattern.match(line)
        if found and sheet.only in ("", section):
            yield from (Rule(sheet.prefix + name, section, found[2]) for name in _expand(found[1]))


def _expand(name: str) -> list[str]:
    """`T-REG-119…122` is four rules."""
    span = _SPAN.match(name)
    if span is None:
        return [name]
    return [f"{span['stem']}{number}" for number in range(int(span["first"]), int(span["last"]) + 1)]


def covered(known: dict[str, Rule], sections: Iterable[str] = ()) -> list[Rule]:
    """The rules that need a test, of the named sections or of all covered ones, in the order of the sheets.

    Raises Untraceable for a section that is not covered.
    """
    names = list(sections) or list(COVERED)
    if strange := [name for name in names if name not in COVERED]:
        raise Untraceable(f"not covered: {', '.join(strange)}; there is: {', '.join(COVERED)}")
    return [rule for name in names for rule in known.values() if rule.section == name and _counts(rule)]


def _counts(rule: Rule) -> bool:
    wanted = COVERED[rule.section]
    return (wanted is None or rule.id in wanted) and _LATER not in rule.title


class _Collector:
    """The pytest plugin that reads the markers of what was collected."""

    def __init__(self) -> None:
        self.proofs: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Notes rule -> tests; the cases of a parametrised test are one test."""
        for item in items:
            if item.get_closest_marker("skip") or item.get_closest_marker("xfail"):
                continue
            for marker in item.iter_markers("rule"):
                for name in marker.args or ("(no id)",):
                    self.proofs.setdefault(str(name), set()).add(item.nodeid.partition("[")[0])


def collect(*arguments: str) -> dict[str, set[str]]:
    """The tests of each rule as pytest collects them, here or where `arguments` point.

    Raises Untraceable with pytest's own words if a test module cannot be imported.
    """
    collector, said = _Collector(), io.StringIO()
    quiet = ["--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    with redirect_stdout(said):
        code = pytest.main([*quiet, *arguments], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise Untraceable(f"the tests cannot be collected:\n{said.getvalue()}")
    return collector.proofs


def cited(sources: Path = SOURCES) -> dict[str, set[str]]:
    """The tests of the page's own logic, by the behaviours that their files name."""
    proofs: dict[str, set[str]] = {}
    for file in sorted(sources.rglob("*.test.ts*")):
        for name in _CITED.findall(file.read_text(encoding="utf-8")):
            proofs.setdefault(name, set()).add(file.relative_to(ROOT).as_posix())
    return proofs


def report(wanted: list[Rule], proofs: dict[str, set[str]]) -> tuple[list[str], int]:
    """What to print, and the number of rules without a test."""
    lines, gaps, section = [], 0, ""
    for rule in wanted:
        if rule.section != section:
            section = rule.section
            lines.append(f"[{section}]")
        suite = SUITES.get(rule.section, "")
        tests = sorted(test for test in proofs.get(rule.id, ()) if test.startswith(suite))
        gaps += not tests
        lines.append(f"{rule.id:<12}{'' if tests else _GAP}{rule.title[:TITLE]}")
        lines += [f"{'':<12}-> {test}" for test in tests]
    return lines, gaps


def main(arguments: list[str]) -> int:
    """Prints the trace of the named sections, with `--gaps` what is wrong with it only.

    1 if it has a gap, names an unknown rule or cannot be made.
    """
    known, sections = rules(), [name for name in arguments if name != GAPS_ONLY]
    try:
        wanted, proofs = covered(known, sections), collect()
    except Untraceable as error:
        print(error)
        return 1
    for name, tests in cited().items():
        proofs.setdefault(name, set()).update(tests)
    lines, gaps = report(wanted, proofs)
    if GAPS_ONLY in arguments:
        lines = [line for line in lines if _GAP in line]
    unknown = sorted(set(proofs) - set(known))
    lines += [f"unknown rule {name}: {', '.join(sorted(proofs[name]))}" for name in unknown]
    print("\n".join(lines))
    print(f"{len(wanted)} rules, {gaps} without a test, {len(unknown)} unknown")
    return 1 if gaps or unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
