"""What the parts of an operation add up to, and the pauses between attempts: pure functions, all cases."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.backends.intents import MAX_ATTEMPTS, retry_delay
from operations import targets
from operations.models import (
    ACTIVE,
    KINDS,
    TERMINAL,
    KindFacts,
    Operation,
    OperationTarget,
    Status,
    TargetStatus,
)
from operations.targets import summarize_targets

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
BACKEND_KINDS = st.sampled_from(["backend_install", "backend_upgrade", "backend_delete"])
RUNNING = (TargetStatus.DOWNLOADING, TargetStatus.RUNNING_ON_WORKER)


@st.composite
def parts(draw: st.DrawFn) -> OperationTarget:
    """A part in any state that the rows can be in."""
    status = draw(st.sampled_from(list(TargetStatus)))
    ended = status in targets.ENDED
    return OperationTarget(
        node_id=uuid4(),
        node_name=draw(st.sampled_from(["one", "two", "three"])),
        status=status,
        percentage=draw(st.floats(0, 100)),
        error="no room" if status == TargetStatus.ERROR else "",
        reason=draw(st.sampled_from(["", "queued", "node one is offline"])),
        attempts=draw(st.integers(0, MAX_ATTEMPTS)),
        waits_for_node=draw(st.booleans()) if status == TargetStatus.QUEUED else False,
        next_check_at=None if ended else draw(st.none() | st.just(NOW) | st.just(NOW + timedelta(hours=1))),
    )


@given(kind=BACKEND_KINDS, found=st.lists(parts(), max_size=6))
@pytest.mark.rule("O16", "O18", "O21", "R6.20", "R6.26", "O12", "O57", "O58")
def test_every_combination_of_parts_is_one_state(kind: str, found: list[OperationTarget]) -> None:
    state = summarize_targets(kind, found)
    left = [part for part in found if part.status not in targets.ENDED]
    failed = [part for part in found if part.status == TargetStatus.ERROR]
    assert (state.status in TERMINAL) == (not left), "it has ended when all its parts have"
    assert 0 <= state.progress <= 100
    assert (state.progress == 100) == (state.status == Status.COMPLETED)
    assert bool(state.error) == (state.status == Status.FAILED)
    if state.status == Status.FAILED and found:
        assert failed
        assert all(part.error in state.error for part in failed), "each failure is told"
    if state.status in ACTIVE:
        running = any(part.status in RUNNING for part in left)
        assert (state.status == Status.PROCESSING) == running
        assert (state.status == Status.WAITING) == (not running and all(part.waits_for_node for part in left))
        operation = Operation(kind=kind, status=state.status)
        assert operation.cancellable == (kind != "backend_delete" or not running)
        looks = [part.next_check_at for part in left if part.next_check_at]
        assert state.next_check_at == (min(looks) if looks else None)
    else:
        assert not Operation(kind=kind, status=state.status).cancellable
        assert (state.next_check_at, state.phase) == (None, "")
    if state.status == Status.CANCELLED:
        gone = {TargetStatus.CANCELLED, TargetStatus.SUPERSEDED}
        assert {TargetStatus(part.status) for part in found} <= gone
        assert state.message


@given(kind=BACKEND_KINDS, found=st.lists(parts(), min_size=2, max_size=6))
def test_the_order_of_the_parts_makes_no_other_state(kind: str, found: list[OperationTarget]) -> None:
    one, other = summarize_targets(kind, found), summarize_targets(kind, found[::-1])
    assert (one.status, one.next_check_at, one.attempts) == (
        other.status,
        other.next_check_at,
        other.attempts,
    )
    assert one.progress == pytest.approx(other.progress)


@pytest.mark.rule("O18", "O21", "T-MGR-5", "T-MGR-22")
def test_without_a_node_only_a_deletion_is_done() -> None:
    assert summarize_targets("backend_delete", []).status == Status.COMPLETED
    for kind in ("backend_install", "backend_upgrade"):
        state = summarize_targets(kind, [])
        assert (state.status, state.error) == (Status.FAILED, targets.NO_ELIGIBLE_NODE)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.rule("O57", "O12")
def test_what_is_shown_as_a_deletion_cannot_be_cancelled_once_it_runs(kind: KindFacts) -> None:
    assert Operation(kind=kind.name, status=Status.PENDING).cancellable
    assert Operation(kind=kind.name, status=Status.PROCESSING).cancellable != kind.is_deletion


def part(name: str, status: TargetStatus, **more: Any) -> OperationTarget:
    return OperationTarget(node_name=name, status=status, **more)


@pytest.mark.rule("R6.20", "O16", "A24", "O9")
def test_a_failure_on_one_node_names_it_and_waits_for_the_others() -> None:
    failed = part("two", TargetStatus.ERROR, error="no room", percentage=50)
    waits = part("one", TargetStatus.QUEUED, waits_for_node=True, reason="node one is offline")
    state = summarize_targets("backend_install", [waits, failed])
    assert (state.status, state.progress, state.error) == (Status.WAITING, 25, "")
    assert state.message == "0 of 2 nodes done, 1 failed, 1 wait for their node"
    state = summarize_targets("backend_install", [part("one", TargetStatus.SUCCESS), failed])
    assert (state.status, state.error, state.progress) == (Status.FAILED, "two: no room", 75)
    assert state.message == "error: two: no room"
    both = [failed, part("one", TargetStatus.ERROR, error="gone")]
    assert summarize_targets("backend_install", both).error == "two: no room; one: gone"


@pytest.mark.rule("O16")
def test_of_many_failures_ten_are_named_and_the_others_counted() -> None:
    """D-FAILURES-NAMED. Each list and each event of operations has this text."""
    names = [f"n{number}" for number in range(1, 13)]
    many = [part(name, TargetStatus.ERROR, error="full") for name in names]
    expected = "; ".join(f"{name}: full" for name in names[:10])
    assert summarize_targets("backend_install", many[:10]).error == expected
    assert summarize_targets("backend_install", many).error == f"{expected}; and 2 more"


@pytest.mark.parametrize("kind", ["backend_install", "backend_upgrade", "backend_delete"])
@pytest.mark.rule("R6.20", "R6.26", "T-MGR-1", "T-MGR-2", "T-MGR-3", "T-MGR-17", "T-MGR-18", "T-MGR-25")
@pytest.mark.rule("T-MGR-26")
def test_it_succeeds_where_all_nodes_did_and_names_those_that_did_not(kind: str) -> None:
    done = part("one", TargetStatus.SUCCESS)
    failed = [part(name, TargetStatus.ERROR, error=f"{name} is full") for name in ("two", "three")]
    assert summarize_targets(kind, [done, part("two", TargetStatus.SUCCESS)]).status == Status.COMPLETED
    for ended, error in (
        ([done, failed[0]], "two: two is full"),
        (failed, "two: two is full; three: three is full"),
    ):
        state = summarize_targets(kind, ended)
        assert (state.status, state.error) == (Status.FAILED, error)


@pytest.mark.rule("A15", "R1.116", "C12")
def test_the_pauses_between_attempts() -> None:
    assert [retry_delay(failures) for failures in range(1, 8)] == [30, 60, 120, 240, 480, 900, 900]


@given(failures=st.integers(1, 10**9))
@pytest.mark.rule("R1.116")
def test_a_pause_never_shrinks_and_never_outgrows_a_quarter_of_an_hour(failures: int) -> None:
    assert 30 <= retry_delay(failures) <= retry_delay(failures + 1) <= 900


@pytest.mark.rule("A8", "C11", "R4.30")
def test_ten_failures_take_more_than_an_hour() -> None:
    assert sum(retry_delay(failures) for failures in range(1, MAX_ATTEMPTS)) > 3600
