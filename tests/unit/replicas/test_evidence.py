"""What is concluded of an engine: a table of one look, and streaks of several."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.rpc.messages import Sign
from nodes.models import NodeModel
from nodes.replicas.evidence import ALIVE, CheckResult, is_listed, judge

FRESH = NodeModel(model_name="m", address="gpu-1:7001")
LISTED, MISSING, NO_WORD = True, False, None
Look = tuple[bool | None, Sign | None]


def missed(reports: int = 0, probes: int = 0, *, exit_reported: bool = False) -> NodeModel:
    return NodeModel(missed_reports=reports, missed_probes=probes, exit_reported=exit_reported)


@pytest.mark.rule("R4.34", "R4.35", "R4.39", "R4.40", "C5", "C6", "C17")
@pytest.mark.parametrize(
    ("before", "listed", "port", "found"),
    [
        (missed(1, 2), LISTED, None, ALIVE),
        (missed(0, 2), MISSING, None, CheckResult(missed_reports=1)),
        (missed(1, 0), MISSING, None, CheckResult(gone=True, missed_reports=2, confirmed=True)),
        (missed(1, 2), NO_WORD, Sign.ALIVE, ALIVE),
        (missed(1, 2), NO_WORD, Sign.BUSY, CheckResult(missed_reports=1)),
        (missed(1, 1), NO_WORD, Sign.UNREACHABLE, CheckResult(missed_reports=1, missed_probes=2)),
        (missed(0, 2), NO_WORD, Sign.UNREACHABLE, CheckResult(gone=True, missed_probes=3)),
        (missed(exit_reported=True), LISTED, None, ALIVE),
        (missed(exit_reported=True), NO_WORD, Sign.ALIVE, ALIVE),
        (missed(exit_reported=True), NO_WORD, Sign.BUSY, CheckResult(exit_reported=True)),
        (
            missed(exit_reported=True),
            MISSING,
            None,
            CheckResult(gone=True, missed_reports=1, exit_reported=True, confirmed=True),
        ),
        (
            missed(exit_reported=True),
            NO_WORD,
            Sign.UNREACHABLE,
            CheckResult(gone=True, missed_probes=1, exit_reported=True),
        ),
    ],
    ids=[
        "listed",
        "missing once",
        "missing twice",
        "answers",
        "busy",
        "unreachable twice",
        "unreachable three times",
        "reported as ended, but listed",
        "reported as ended, but something answers",
        "reported as ended, nothing known",
        "reported as ended and missing",
        "reported as ended and unreachable",
    ],
)
def test_one_look(before: NodeModel, listed: bool | None, port: Sign | None, found: CheckResult) -> None:
    assert judge(before, listed, port) == found


def follow(looks: Sequence[Look]) -> int | None:
    """After how many looks the replica is gone, None if it stays."""
    row = FRESH
    for number, look in enumerate(looks, 1):
        found = judge(row, *look)
        if found.gone:
            return number
        row = missed(found.missed_reports, found.missed_probes)
    return None


UP, DOWN, BUSY = (NO_WORD, Sign.ALIVE), (NO_WORD, Sign.UNREACHABLE), (NO_WORD, Sign.BUSY)


@pytest.mark.rule(
    "T-REC-28", "T-REC-30", "T-REC-31", "T-REC-32", "T-REC-40", "T-REC-46", "T-HLT-13", "T-HLT-14"
)
@pytest.mark.parametrize(
    ("looks", "gone_after"),
    [
        ([BUSY] * 10, None),
        ([DOWN] * 3, 3),
        ([DOWN, DOWN, UP, DOWN, DOWN], None),
        ([DOWN, DOWN, BUSY, DOWN, DOWN], None),
        ([(MISSING, None)] * 2, 2),
        ([(MISSING, None), (LISTED, None), (MISSING, None)], None),
        ([(MISSING, None), BUSY, (MISSING, None)], 3),
    ],
    ids=[
        "busy ten times",
        "unreachable three times",
        "an answer in between",
        "busy in between",
        "not listed twice",
        "listed in between",
        "no word in between",
    ],
)
def test_a_streak(looks: Sequence[Look], gone_after: int | None) -> None:
    assert follow(looks) == gone_after


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from(Sign))))
def test_nothing_goes_that_was_not_missed_twice(looks: list[Look]) -> None:
    """Whatever comes in between: one miss never decides, and what was seen alive was not missed before."""
    gone_after = follow(looks)
    for number, (listed, port) in enumerate(looks[:gone_after], 1):
        if number == gone_after:
            assert listed is False or (listed is None and port is Sign.UNREACHABLE)
            assert number > 1


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ({("m#0", "7001")}, True),
        ({("m#0", "")}, True),
        ({("m#0", "7002")}, False),
        ({("m#1", "7001")}, False),
        (set(), False),
    ],
    ids=["key and port", "no address told", "another port", "another index", "nothing"],
)
def test_an_engine_is_known_by_key_and_port(running: set[tuple[str, str]], expected: bool) -> None:
    assert is_listed(running, FRESH.process_key, FRESH.address) is expected
