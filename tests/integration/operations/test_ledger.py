"""The ledger against a real PostgreSQL: admission, claims, fences, sequence numbers, reaping."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction

from localai_cluster.kit import clock, errors, leases
from localai_cluster.kit.leases import LeaseLost
from operations.changes import feed
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick, record
from operations.models import TRANSITIONS, Event, Operation, Status, Transition
from operations.reconcilers import tasks

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
LEASE = 10.0

pytestmark = pytest.mark.django_db(transaction=True)


def admit(key: str = "model:m", kind: str = "model_load", **more: Any) -> admission.Admission:
    request = admission.OperationRequest(kind, key=key, element="m", by=Requester("test"), **more)
    return admission.admit(request, now=NOW)


def claim_one(owner: str = "a", now: datetime = NOW) -> Operation:
    (operation,) = attempts.claim(owner, now=now, lease=LEASE, limit=1)
    return operation


def at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` in `count` threads that start together; returns what each returned or raised."""
    barrier, results = threading.Barrier(count), []

    def run() -> None:
        barrier.wait()
        try:
            results.append(work())
        except Exception as error:
            results.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.rule("O34", "O93", "H9", "H11", "R2.16", "T-JOB-1", "T-JOB-2", "T-JOB-3")
def test_simultaneous_requests_make_one_operation() -> None:
    """O34: a key has one active operation; everyone else joins it."""
    admissions = at_once(12, admit)
    assert sum(admission.created for admission in admissions) == 1
    assert len({admission.operation.id for admission in admissions}) == 1


@pytest.mark.rule("O34", "O93")
def test_another_kind_on_an_active_key_is_a_conflict() -> None:
    """O34: a different kind on the same key is refused by name."""
    admit()
    with pytest.raises(errors.Conflict, match="model_load of m is in progress"):
        admit(kind="backend_install")


@pytest.mark.rule("O5")
def test_two_claimers_never_share_an_operation() -> None:
    """Rule 2: claims skip what others lock; each operation goes to exactly one owner."""
    for number in range(8):
        admit(f"model:{number}")
    batches = at_once(4, lambda: attempts.claim("x", now=NOW, lease=LEASE, limit=3))
    claimed = [operation.id for batch in batches for operation in batch]
    assert len(claimed) == len(set(claimed)) == 8


@pytest.mark.rule("I3", "H15", "O85")
def test_a_late_report_of_an_old_fence_changes_nothing() -> None:
    """I3, H15: after the lease was lost and taken again, the first owner's writes are refused."""
    admit()
    first = claim_one()
    attempts.reap(now=NOW + timedelta(seconds=LEASE + 1))
    second = claim_one("b", NOW + timedelta(seconds=LEASE + 2))
    assert second.fence > first.fence
    lost = (first.id, first.fence)
    assert record({lost: [Tick(percentage=50)]}, now=NOW) == {lost}
    with pytest.raises(LeaseLost):
        attempts.finish(first.id, first.fence, Event.COMPLETE, now=NOW)
    assert Operation.objects.get(pk=first.id).status == Status.PROCESSING


@pytest.mark.rule("A71", "O90", "H5")
def test_a_live_lease_is_not_reaped() -> None:
    """H5: only leases that ran out are taken back."""
    admit()
    held = claim_one()
    attempts.renew("a", [held.id], now=NOW + timedelta(seconds=8), lease=LEASE)
    assert attempts.reap(now=NOW + timedelta(seconds=LEASE + 1)) == (0, 0)


def test_a_reap_without_an_expired_lease_is_one_query(django_assert_num_queries: Any) -> None:
    """Every controller reaps twice per lease, and mostly no lease has expired."""
    admit()
    held = claim_one(now=clock.now())
    with django_assert_num_queries(1):
        tasks.reap()
    Operation.objects.update(lease_until=clock.now() - timedelta(seconds=1))
    tasks.reap()
    held.refresh_from_db()
    assert (held.status, held.lost_leases) == (Status.PENDING, 1)


@pytest.mark.rule("I4", "A37", "A69", "A70", "A75", "O90", "O91", "H5", "T-JOB-9")
def test_an_operation_that_kills_its_controllers_is_given_up() -> None:
    """I4: it ends with a reason instead of going round forever."""
    admit()
    at = NOW
    for number in range(leases.MAX_LOST_LEASES + 1):
        claim_one(now=at)
        at += timedelta(seconds=LEASE + 1)
        assert attempts.reap(now=at) == ((1, 0) if number < leases.MAX_LOST_LEASES else (0, 1))
    ended = Operation.objects.get()
    assert ended.status == Status.FAILED
    assert "controllers fell silent" in ended.error
    assert [entry["error"] for entry in feed.snapshot().operations] == [ended.error]
    admission.dismiss(ended.id, actor="ann", now=at)
    assert feed.snapshot().operations == []


@pytest.mark.rule("O88", "O89", "O90", "O92")
def test_what_only_waits_is_never_reaped_however_old() -> None:
    """The owner's lease counts, not the age; and of two reapers at once one does the work."""
    admit("model:a")
    admit("model:b")
    first = claim_one()
    later = NOW + timedelta(days=365)
    attempts.put_back(first.id, first.fence, Event.WAIT, now=NOW, until=later, reason="no node")
    assert attempts.reap(now=later) == (0, 0)
    assert {entry["status"] for entry in feed.snapshot().operations} == {"pending", "waiting_for_nodes"}
    claim_one()
    assert sorted(at_once(2, lambda: attempts.reap(now=later))) == [(0, 0), (1, 0)]


def test_postponed_attempts_are_no_lost_leases() -> None:
    """I4: an operation that waited long for its worker is not given up at the first lost lease."""
    admit()
    at = NOW
    for _ in range(leases.MAX_LOST_LEASES + 1):
        held = claim_one(now=at)
        at += timedelta(seconds=1)
        attempts.put_back(held.id, held.fence, Event.POSTPONE, now=at, until=at, reason="no worker")
    claim_one(now=at)
    assert attempts.reap(now=at + timedelta(seconds=LEASE + 1)) == (1, 0)


@pytest.mark.rule("H10")
def test_parent_and_child_report_at_once_without_a_deadlock() -> None:
    """A child's foreign key must not make it wait for its parent while it holds the counter."""
    parent = admit("model:parent").operation
    child = admit("node:1:backend", "backend_install", parent=parent).operation
    claimed = {operation.id: operation for operation in attempts.claim("a", now=NOW, lease=LEASE, limit=2)}
    turns = iter([claimed[parent.id], claimed[child.id]] * 3)
    lock = threading.Lock()

    def report() -> None:
        with lock:
            operation = next(turns)
        for current in range(30):
            tick = Tick(current_bytes=current, total_bytes=100)
            record({(operation.id, operation.fence): [tick]}, now=NOW)

    assert at_once(6, report) == [None] * 6


@pytest.mark.rule("H5")
def test_only_named_leases_are_renewed() -> None:
    """H5: an operation whose attempt ended without an outcome must run out, though its owner lives on."""
    admit("model:a")
    admit("model:b")
    first, _forgotten = attempts.claim("a", now=NOW, lease=LEASE, limit=2)
    later = NOW + timedelta(seconds=8)
    assert attempts.renew("a", [first.id], now=later, lease=LEASE) == {first.id: first.fence}
    assert attempts.reap(now=NOW + timedelta(seconds=LEASE + 1)) == (1, 0)


@pytest.mark.rule("I6", "R2.21", "T-JOB-7", "T-JOB-8")
def test_progress_never_goes_back() -> None:
    """I6: bytes and percentage only rise within an attempt; 100 % is for the end."""
    admit()
    operation = claim_one()
    for current in (10, 90, 40, 100):
        tick = Tick(current_bytes=current, total_bytes=100, percentage=current)
        record({(operation.id, operation.fence): [tick]}, now=NOW)
    row = Operation.objects.get()
    assert (row.current_bytes, row.progress) == (100, 99)


@pytest.mark.rule("O81", "O85")
def test_sequence_numbers_are_dense_and_the_feed_resumes() -> None:
    """Every change takes the next number, no matter who writes; since(n) answers what came after n."""
    start = feed.current_seq()
    at_once(6, lambda: admit(f"model:{uuid4()}"))
    assert sorted(Operation.objects.values_list("seq", flat=True)) == list(range(start + 1, start + 7))
    seen = feed.since(start + 4)
    assert [entry["seq"] for entry in seen.operations] == [start + 5, start + 6]
    assert seen.seq == start + 6


@pytest.mark.rule("O32", "O34", "H9", "R6.37")
def test_failures_stay_listed_until_a_new_request_supersedes_them() -> None:
    """O32, O34: a failed operation stays on the list; the next one of its key takes its place."""
    admit()
    operation = claim_one()
    attempts.finish(operation.id, operation.fence, Event.FAIL, now=NOW, error="no such file")
    listed = feed.snapshot().operations
    assert [(entry["status"], entry["error"]) for entry in listed] == [("failed", "no such file")]
    again = admit()
    assert again.created
    assert [entry["jobID"] for entry in feed.snapshot().operations] == [str(again.operation.id)]


@pytest.mark.parametrize(("event", "woken"), [(Event.WAIT, 1), (Event.POSTPONE, 0)])
def test_a_waiting_operation_says_why_and_is_woken_but_a_back_off_is_not(event: Event, woken: int) -> None:
    """Rule 4: both carry reason and next look; only the wait for a node ends before its time."""
    admit()
    operation = claim_one()
    attempts.put_back(
        operation.id, operation.fence, event, now=NOW, until=NOW + timedelta(hours=1), reason="no node"
    )
    assert attempts.claim("a", now=NOW, lease=LEASE, limit=1) == []
    assert Operation.objects.get().message == "no node"
    assert attempts.wake([operation.id], now=NOW) == woken
    assert attempts.wake([operation.id], now=NOW) == 0
    assert len(attempts.claim("a", now=NOW, lease=LEASE, limit=1)) == woken


@pytest.mark.parametrize(("limit", "next_look"), [(None, 60), (30, 30), (90, 60), (-1, 60)])
def test_the_next_look_is_no_later_than_the_time_at_which_it_gives_up(
    limit: int | None, next_look: int
) -> None:
    """What the pages say about its end is true to the second; one that is over waits for its usual look."""
    wanted = None if limit is None else NOW + timedelta(seconds=limit)
    admit(needed_until=wanted)
    operation = claim_one()
    until = NOW + timedelta(seconds=60)
    attempts.put_back(operation.id, operation.fence, Event.WAIT, now=NOW, until=until, reason="no node")
    assert Operation.objects.get().next_attempt_at == NOW + timedelta(seconds=next_look)


def test_the_services_go_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table does not allow is refused, and nothing is written."""
    admit()
    operation = claim_one()
    row = TRANSITIONS[Event.POSTPONE]
    monkeypatch.setitem(
        TRANSITIONS, Event.POSTPONE, Transition(frozenset({Status.WAITING}), row.target, row.sentence)
    )
    with pytest.raises(ValueError, match="postpone cannot happen to an operation that is processing"):
        attempts.put_back(operation.id, operation.fence, Event.POSTPONE, now=NOW, until=NOW, reason="")
    with pytest.raises(ValueError, match="claim cannot happen"):
        attempts.finish(operation.id, operation.fence, Event.CLAIM, now=NOW)
    assert Operation.objects.get().status == Status.PROCESSING


def test_a_stopping_controller_hands_back_at_once() -> None:
    """A clean stop costs no lease time."""
    admit()
    claim_one("a")
    assert attempts.release("a", now=NOW) == 1
    assert claim_one("b").lease_owner == "b"


@pytest.mark.rule("O32", "O85", "H8")
def test_the_table_knows_every_state_and_terminal_is_sticky() -> None:
    """O32: no event leads out of completed or cancelled; every state is reached by some event."""
    for event in Event:
        for ended in (Status.COMPLETED, Status.FAILED, Status.CANCELLED):
            assert ended not in TRANSITIONS[event].sources
    assert {transition.target for transition in TRANSITIONS.values()} == set(Status)


@pytest.mark.rule("O30", "O32")
def test_the_database_refuses_what_must_never_be() -> None:
    """A processing row without lease, a second active row of a key, a negative byte count."""
    admit()
    for change in (
        {"status": "processing"},
        {"status": "nonsense"},
        {"current_bytes": -1},
        {"status": "failed"},
    ):
        with pytest.raises(IntegrityError), transaction.atomic():
            Operation.objects.update(**change)


def test_a_claim_of_many_costs_a_constant_number_of_statements(django_assert_max_num_queries: Any) -> None:
    """Fast by construction: claiming and announcing do not loop over statements."""
    for number in range(20):
        admit(f"model:{number}")
    with django_assert_max_num_queries(9):
        assert len(attempts.claim("a", now=NOW, lease=LEASE, limit=50)) == 20
