"""The rows of intents: claimed, settled, put back, called off; what each does to their parts."""

import logging
from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock, errors, leases
from localai_cluster.messaging.messages import InstalledBackend
from nodes.backends import admission, intents, inventory
from nodes.backends.intents import (
    MAX_ATTEMPTS,
    PARALLEL_PER_NODE,
    Ended,
    Failed,
    Intent,
    PutBack,
    Settlement,
)
from nodes.models import BackendNode, PendingBackendOp
from nodes.reconcilers import intents as reconciler
from operations.ledger.progress import Tick
from operations.models import Operation
from tests.support import hot
from tests.support.fleet import at_once
from tests.support.intents import DELETE, INSTALL, KINDS, UPGRADE, ask, claim, due_now, part

pytestmark = pytest.mark.django_db(transaction=True)
MINUTE = timedelta(minutes=1)


def settle(intent: Intent, outcome: Settlement, *ticks: Tick) -> bool:
    """Whether the outcome was recorded."""
    attempt = (intent.id, intent.fence)
    return attempt not in intents.record_outcomes({attempt: (outcome, ticks)}, now=clock.now())


def begun(kind: str = INSTALL) -> tuple[Operation, Intent]:
    operation = ask(kind, hot.node())
    (intent,) = claim()
    return operation, intent


# --- claims


@pytest.mark.rule("R1.108", "R1.109", "A72", "O5", "O72")
def test_what_is_under_way_is_not_due_and_comes_back_when_its_lease_is_lost() -> None:
    operation, first = begun()
    assert claim() == []
    with CaptureQueriesContext(connection) as seen:
        assert intents.reap(now=clock.now()) == (0, 0)
    assert len(seen) == 1, "mostly no lease has expired"
    PendingBackendOp.objects.update(lease_until=clock.now() - MINUTE)
    assert claim() == [], "its holder may only be slow: it is taken back before it is given away"
    assert intents.reap(now=clock.now()) == (1, 0)
    found = part(operation)
    assert (found.status, found.reason) == (
        "queued",
        "its controller fell silent; another one takes over",
    )
    (second,) = claim()
    assert (second.id, second.fence, second.row.attempts) == (first.id, first.fence + 1, 0)
    assert not settle(first, Ended(error="abandoned"))
    assert settle(second, Ended())
    operation.refresh_from_db()
    assert (operation.status, operation.error) == ("completed", "")


@pytest.mark.rule("A81", "H14")
def test_what_runs_long_is_sent_once() -> None:
    """Whatever the passes and other controllers look for meanwhile: its lease is renewed."""
    _, intent = begun()
    for minutes in range(1, 40):
        now = clock.now() + minutes * MINUTE
        assert intents.renew("controller", [intent.id], now=now, lease=60) == {intent.id: intent.fence}
        assert intents.reap(now=now) == (0, 0)
        assert intents.claim("another", now=now, lease=60, limit=9) == []
    assert PendingBackendOp.objects.get().fence == intent.fence


@pytest.mark.rule("O77")
def test_a_list_ends_no_intent_whose_attempt_failed() -> None:
    """D-INTENT-ENDS: its files may be there although its worker has not answered; it ends with its part."""
    operation, intent = begun()
    assert settle(intent, Failed("the worker was restarted"))
    answer = inventory.InventoryReply(intent.node, [InstalledBackend("echo")], clock.now())
    assert inventory.store([answer]) == {intent.node.id}
    reconciler.end_stale_intents(now=clock.now())
    due_now()
    assert [one.id for one in claim()] == [intent.id]
    operation.refresh_from_db()
    assert operation.status == "processing"


@pytest.mark.rule("R1.109", "A4", "O73", "R4.25")
@pytest.mark.parametrize(
    "fields",
    [
        {"offline_at": clock.now()},
        {"unhealthy_at": clock.now()},
        {"drained_at": clock.now()},
        {"approved_at": None},
        {"node_type": "agent"},
    ],
    ids=lambda fields: min(fields),
)
def test_only_a_healthy_backend_node_is_sent_anything(fields: dict[str, object]) -> None:
    ask(INSTALL, hot.node())
    before = BackendNode.objects.values(*fields).get()
    BackendNode.objects.update(**fields)
    assert claim() == []
    BackendNode.objects.update(**before)
    assert len(claim()) == 1


@pytest.mark.rule("R1.109", "O73")
def test_the_oldest_is_first_and_what_is_not_due_waits() -> None:
    for name, minutes in (("late", -1), ("old", -3), ("future", 1)):
        ask(INSTALL, hot.node(name))
        PendingBackendOp.objects.filter(node__name=name).update(next_retry_at=clock.now() + minutes * MINUTE)
    assert [one.node.name for one in claim()] == ["old"]
    assert [one.node.name for one in claim(9)] == ["late"]


@pytest.mark.rule("R6.15", "O5", "O80", "H16", "R4.25")
def test_a_node_is_sent_few_commands_at_a_time_and_holds_up_no_other() -> None:
    busy = hot.node("busy")
    for number in range(PARALLEL_PER_NODE + 3):
        ask(INSTALL, busy, backend=f"b{number}")
    ask(INSTALL, hot.node("other"))
    claimed = claim(100)
    assert sorted(one.node.name for one in claimed) == ["busy"] * PARALLEL_PER_NODE + ["other"]
    assert claim(100) == []
    assert settle(claimed[0] if claimed[0].node.name == "busy" else claimed[1], Ended())
    assert [one.node.name for one in claim(100)] == ["busy"]


def test_a_claim_costs_the_same_for_one_intent_and_two_hundred() -> None:
    counts = []
    for total in (1, 200):
        ask(INSTALL, *(hot.node(f"{total}-{number}") for number in range(total)))
        with CaptureQueriesContext(connection) as queries:
            claimed = claim(500)
        assert len(claimed) == total
        counts.append(len(queries))
        with CaptureQueriesContext(connection) as queries:
            held = intents.renew("controller", [one.id for one in claimed], now=clock.now(), lease=60)
        assert held == {one.id: one.fence for one in claimed}
        counts.append(len(queries))
        outcomes: dict[tuple[UUID, int], tuple[Settlement, list[Tick]]] = {
            (one.id, one.fence): (Ended(), []) for one in claimed
        }
        with CaptureQueriesContext(connection) as queries:
            assert not intents.record_outcomes(outcomes, now=clock.now())
        counts.append(len(queries))
    assert counts[:3] == counts[3:]
    assert max(counts) <= 17


@pytest.mark.rule("O5")
def test_two_controllers_that_claim_at_once_get_different_work() -> None:
    for number in range(5):
        ask(INSTALL, *(hot.node(f"{number}-{one}") for one in range(20)))
        found = at_once(*[partial(claim, 15)] * 4)
        ids = [one.id for claimed in found for one in claimed]
        assert len(ids) == len(set(ids))
        while more := claim(50):
            ids += [one.id for one in more]
        assert len(set(ids)) == 20
        PendingBackendOp.objects.all().delete()


# --- outcomes


@pytest.mark.rule("R1.111", "R4.30", "O15", "O20", "O74", "R6.22")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_done_leaves_its_outcome_alone(kind: str) -> None:
    operation, intent = begun(kind)
    assert settle(intent, Ended(reason="removed"), Tick(current_bytes=3, total_bytes=12, percentage=25))
    assert not PendingBackendOp.objects.exists()
    before = operation.seq
    operation.refresh_from_db()
    found = part(operation)
    assert (operation.status, operation.progress, operation.finished_at) == (
        "completed",
        100,
        found.finished_at,
    )
    assert (operation.message, operation.cancellable, operation.seq > before) == ("completed", False, True)
    assert (found.status, found.percentage, found.reason, found.current_bytes) == (
        "success",
        100,
        "removed",
        3,
    )


@pytest.mark.rule(
    "R1.112",
    "R1.116",
    "A15",
    "A8",
    "A6",
    "A7",
    "R4.30",
    "C11",
    "C12",
    "O15",
    "O74",
    "O76",
    "R1.117",
    "T-REC-26",
)
def test_failures_are_tried_again_ever_later_and_the_tenth_is_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operation, intent = begun()
    pauses = []
    for number in range(1, MAX_ATTEMPTS):
        at = clock.now()
        assert not intents.record_outcomes({(intent.id, intent.fence): (Failed("no answer"), ())}, now=at)
        row = PendingBackendOp.objects.get()
        pauses.append((row.next_retry_at - at).total_seconds())
        assert (row.attempts, row.last_error, row.lease_owner) == (number, "no answer", "")
        found = part(operation)
        assert (found.status, found.attempts, found.next_check_at) == ("queued", number, row.next_retry_at)
        assert claim() == []
        due_now()
        (intent,) = claim()
    assert pauses == [30, 60, 120, 240, 480, 900, 900, 900, 900]
    with caplog.at_level(logging.ERROR):
        assert settle(intent, Failed("no answer"))
    (entry,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    text = entry.getMessage()
    assert all(word in text for word in ("install", "echo", str(intent.node.id), "10 attempts", "no answer"))
    assert not PendingBackendOp.objects.exists()
    operation.refresh_from_db()
    assert (operation.status, operation.attempts) == ("failed", 10)
    assert operation.error == "given up after 10 attempts: no answer"
    assert claim() == []


@pytest.mark.rule("R1.113", "R4.31")
def test_what_is_put_back_does_not_count() -> None:
    operation, intent = begun()
    began = clock.now()
    assert settle(intent, PutBack("no bus", 5))
    row = PendingBackendOp.objects.get()
    assert (row.attempts, row.last_error) == (0, "no bus")
    assert began <= row.next_retry_at - timedelta(seconds=5) <= clock.now()
    operation.refresh_from_db()
    assert (operation.status, operation.message) == ("pending", "no bus")


@pytest.mark.rule("A84")
def test_an_attempt_that_lost_its_lease_changes_nothing() -> None:
    """Neither its reports nor its outcome, not even those that say that all is done."""
    operation, first = begun()
    PendingBackendOp.objects.update(lease_until=clock.now() - MINUTE)
    intents.reap(now=clock.now())
    (second,) = claim()

    def now() -> tuple[object, ...]:
        operation.refresh_from_db()
        return tuple(PendingBackendOp.objects.values().get().values()), part(operation).status, operation.seq

    before = now()
    late = (first.id, first.fence)
    assert intents.record({late: [Tick(percentage=90)]}, now=clock.now()) == {late}
    for outcome in (Ended(), Ended(error="x"), Failed("x"), PutBack("x")):
        assert not settle(first, outcome)
    intents.record_overdue(first, "late", now=clock.now())
    intents.delete_cancelled({late: "stopped"}, now=clock.now())
    assert now() == before
    assert settle(second, Ended())


@pytest.mark.rule("A37", "O90", "H5", "R6.38")
def test_an_intent_that_outlives_ten_controllers_ends() -> None:
    operation, _ = begun()
    for _ in range(leases.MAX_LOST_LEASES):
        PendingBackendOp.objects.update(lease_until=clock.now() - MINUTE)
        assert intents.reap(now=clock.now()) == (1, 0)
        assert len(claim()) == 1
    PendingBackendOp.objects.update(lease_until=clock.now() - MINUTE)
    assert intents.reap(now=clock.now()) == (0, 1)
    operation.refresh_from_db()
    assert operation.status == "failed"
    assert "10 controllers fell silent" in operation.error


def test_a_controller_that_stops_hands_back_at_once() -> None:
    operation, intent = begun()
    assert intents.release("another", now=clock.now()) == 0
    assert intents.release("controller", now=clock.now()) == 1
    assert part(operation).status == "queued"
    (again,) = claim()
    assert again.fence == intent.fence + 1


def test_a_renewal_answers_what_is_still_held() -> None:
    _, intent = begun()
    at = clock.now() + MINUTE
    assert intents.renew("controller", [intent.id], now=at, lease=60) == {intent.id: intent.fence}
    assert PendingBackendOp.objects.get().lease_until == at + MINUTE
    assert intents.renew("another", [intent.id], now=at, lease=60) == {}
    settle(intent, PutBack("x"))
    assert intents.renew("controller", [intent.id], now=at, lease=60) == {}


@pytest.mark.rule("O16", "R6.20")
def test_what_happens_to_a_shared_intent_happens_to_all_that_share_it() -> None:
    one, two = hot.node("one"), hot.node("two")
    both, single = ask(INSTALL, one, two), ask(INSTALL, one)
    claimed = {intent.node.name: intent for intent in claim(9)}
    assert settle(claimed["one"], Ended(error="no room"))
    assert part(both, one).error == part(single).error == "no room"
    single.refresh_from_db()
    both.refresh_from_db()
    assert (single.status, both.status) == ("failed", "processing")
    assert settle(claimed["two"], Ended())
    both.refresh_from_db()
    assert (both.status, both.error) == ("failed", "one: no room")


def test_settling_and_asking_at_once_never_deadlock() -> None:
    for number in range(5):
        nodes = [hot.node(f"{number}-{one}") for one in range(6)]
        ask(INSTALL, *nodes)
        claimed = claim(6)
        assert len(claimed) == 6
        halves: list[dict[tuple[UUID, int], tuple[Settlement, list[Tick]]]] = [
            {(one.id, one.fence): (Ended(), []) for one in half} for half in (claimed[:3], claimed[:2:-1])
        ]
        jobs = [partial(intents.record_outcomes, half, now=clock.now()) for half in halves]
        lost, also, _, _ = at_once(*jobs, partial(ask, INSTALL, *nodes), partial(ask, INSTALL, *nodes[::-1]))
        assert lost == also == set()
        PendingBackendOp.objects.all().delete()
        Operation.objects.all().delete()


# --- cancel


@pytest.mark.rule("O54", "O57", "A75", "O6", "O60", "R6.38")
@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_is_cancelled_without_a_trace_on_the_node(kind: str) -> None:
    operation = ask(kind, hot.node())
    ended = admission.cancel(operation.id, actor="anna", now=clock.now())
    assert (ended.status, ended.message, part(operation).status) == (
        "cancelled",
        "cancelled by anna",
        "cancelled",
    )
    assert not PendingBackendOp.objects.exists()
    with pytest.raises(errors.Conflict, match="cancelled already"):
        admission.cancel(operation.id, actor="anna", now=clock.now())


@pytest.mark.rule("O54", "A84", "A73", "O60", "H15", "R6.38")
@pytest.mark.parametrize("kind", [INSTALL, UPGRADE])
def test_what_runs_is_called_off_and_its_late_answer_is_nobodys(kind: str) -> None:
    """The intent stays until its worker was asked to stop, so that nothing else begins before."""
    operation, intent = begun(kind)
    admission.cancel(operation.id, actor="anna", now=clock.now())
    assert part(operation).reason == "the worker is asked to stop"
    for late in (Ended(), Ended(error="context canceled"), Failed("context canceled")):
        assert not settle(intent, late)
    with pytest.raises(errors.Conflict, match="is being cancelled"):
        ask(kind, intent.node)
    (off,) = claim()
    assert off.row.cancelled_at is not None
    assert part(operation).status == "cancelled", "its claim is no new attempt"
    intents.delete_cancelled({(off.id, off.fence): "the worker stopped"}, now=clock.now())
    operation.refresh_from_db()
    found = part(operation)
    assert (operation.status, found.status, found.reason) == ("cancelled", "cancelled", "the worker stopped")
    assert not PendingBackendOp.objects.exists()


@pytest.mark.rule("O57")
def test_a_deletion_that_has_begun_is_not_cancelled() -> None:
    operation, intent = begun(DELETE)
    with pytest.raises(errors.Conflict, match="cannot be cancelled"):
        admission.cancel(operation.id, actor="anna", now=clock.now())
    assert PendingBackendOp.objects.get().cancelled_at is None
    assert settle(intent, Ended())


@pytest.mark.rule("O54")
@pytest.mark.parametrize("runs", [False, True], ids=["waits", "runs"])
def test_an_intent_that_another_operation_shares_survives_a_cancel(runs: bool) -> None:
    one, two = hot.node("one"), hot.node("two")
    both, single = ask(INSTALL, one, two), ask(INSTALL, one)
    claimed = claim(9) if runs else []
    admission.cancel(both.id, actor="anna", now=clock.now())
    assert part(both, one).reason == "another operation wants the same and goes on"
    single.refresh_from_db()
    assert single.status == ("processing" if runs else "pending")
    kept = PendingBackendOp.objects.get(node=one)
    assert kept.cancelled_at is None
    for intent in claimed or claim(9):
        if intent.node.name == "one":
            assert settle(intent, Ended())
    single.refresh_from_db()
    assert single.status == "completed"
    assert part(both, one).status == "cancelled", "its end is final"


@pytest.mark.rule("A84", "H8")
def test_a_cancel_and_an_outcome_at_once_leave_one_end() -> None:
    for number in range(5):
        operation = ask(INSTALL, hot.node(f"n{number}"))
        (intent,) = claim()
        recorded, ended = at_once(
            partial(settle, intent, Ended()),
            partial(_cancelled, operation),
        )
        operation.refresh_from_db()
        assert (recorded, ended) in ((True, False), (False, True))
        assert operation.status == ("completed" if recorded else "cancelled")
        PendingBackendOp.objects.all().delete()


def _cancelled(operation: Operation) -> bool:
    try:
        admission.cancel(operation.id, actor="anna", now=clock.now())
    except errors.Conflict:
        return False
    return True
