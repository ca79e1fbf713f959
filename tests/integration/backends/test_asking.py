"""Requests for work on backends: what they join, what they are refused for; races."""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock, errors, failpoints
from nodes.backends import admission, backend_requests
from nodes.backends import intents as intent_rows
from nodes.backends.intents import Ended
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from nodes.reconcilers import intents
from nodes.registry import lifecycle
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget
from tests.support import hot
from tests.support.fleet import ROOT, at_once
from tests.support.intents import DELETE, INSTALL, UPGRADE, ask, claim, part
from tests.support.races import repeated, waiting
from tests.support.replicas import forget_nodes

pytestmark = pytest.mark.django_db(transaction=True)


def intent(node: BackendNode) -> PendingBackendOp:
    return PendingBackendOp.objects.get(node=node)


@pytest.mark.rule("A38", "A14", "R1.108", "O34", "O14", "H11", "R1.117", "T-REC-25")
def test_the_same_request_is_the_same_operation_and_due_at_once() -> None:
    node = hot.node()
    first = ask(INSTALL, node)
    later = clock.now() + timedelta(days=1000)
    PendingBackendOp.objects.update(
        attempts=intent_rows.MAX_ATTEMPTS, last_error="no answer", next_retry_at=later
    )
    assert ask(INSTALL, node).id == first.id
    row = intent(node)
    assert (row.attempts, row.last_error) == (intent_rows.MAX_ATTEMPTS, "no answer")
    assert row.next_retry_at <= clock.now()
    assert Operation.objects.count() == OperationTarget.objects.count() == 1


@pytest.mark.rule("A23", "A24", "A21", "O35", "O93", "R6.23", "R6.36", "T-MGR-6", "T-MGR-20")
@pytest.mark.parametrize("kind", [INSTALL, UPGRADE])
def test_two_nodes_are_two_operations_that_end_on_their_own(kind: str) -> None:
    one, two = hot.node("one"), hot.node("two")
    first = ask(kind, one)
    assert [row.node_id for row in PendingBackendOp.objects.all()] == [one.id]
    second = ask(kind, two)
    assert first.key == f"node:{one.id}:echo"
    assert first.id != second.id
    admission.cancel(first.id, actor="anna", now=clock.now())
    second.refresh_from_db()
    assert second.status == "pending"
    assert PendingBackendOp.objects.get().node_id == two.id


@pytest.mark.rule("O34", "R1.108")
def test_equal_wishes_for_other_nodes_share_the_intent() -> None:
    """Two operations, one piece of work on the node that both name."""
    one, two = hot.node("one"), hot.node("two")
    single, both = ask(INSTALL, one), ask(INSTALL, one, two)
    assert single.id != both.id
    assert part(single).intent_id == part(both, one).intent_id == intent(one).id
    assert PendingBackendOp.objects.count() == 2


@pytest.mark.rule("O34", "R1.115")
@pytest.mark.parametrize(
    "other", [{"uri": "/srv/b"}, {"name": "x"}, {"alias": "x"}, {"force": True}], ids=lambda wish: min(wish)
)
def test_another_wish_is_refused_and_changes_nothing(other: dict[str, Any]) -> None:
    node = hot.node()
    first = ask(INSTALL, node, uri="/srv/a")
    before = PendingBackendOp.objects.values().get()
    with pytest.raises(errors.Conflict, match=str(first.id)):
        ask(INSTALL, node, **{"uri": "/srv/a"} | other)
    assert PendingBackendOp.objects.values().get() == before
    assert Operation.objects.count() == 1


@pytest.mark.rule("R1.114")
def test_a_conflict_on_one_node_changes_nothing_on_the_others() -> None:
    one, two = hot.node("one"), hot.node("two")
    first, second = ask(INSTALL, one), ask(INSTALL, two, uri="/srv/b")
    with pytest.raises(errors.Conflict, match=str(second.id)):
        ask(INSTALL, one, two)
    assert part(first).status == "queued"
    assert PendingBackendOp.objects.count() == 2


@pytest.mark.rule("R1.114", "O34")
def test_a_wish_for_many_nodes_can_be_asked_again_after_a_different_one_for_one_node() -> None:
    """The former operation is still active, and owns the key; on that node the newer follows the other."""
    one, two = hot.node("one"), hot.node("two")
    former = ask(INSTALL, one, two)
    ask(DELETE, one)
    newer = ask(INSTALL, one, two)
    assert {part(newer, node).status for node in (one, two)} == {"queued"}
    assert sorted(PendingBackendOp.objects.values_list("node__name", "op")) == [
        ("one", "delete"), ("one", "install"), ("two", "install"),
    ]  # fmt: skip
    former.refresh_from_db()
    assert former.status == "cancelled"
    assert all(str(newer.id) in found.reason for found in former.targets.all())


@pytest.mark.rule("A1", "R6.16", "R6.28", "O21", "O13", "R6.30", "T-MGR-19", "T-MGR-30")
def test_all_nodes_are_those_that_may_get_it() -> None:
    hot.node("agent", node_type="agent")
    hot.node("pending", approved_at=None)
    draining = hot.node("draining", drained_at=clock.now())
    one, away = hot.node("one"), hot.node("away", offline_at=clock.now())
    ready, left_out = backend_requests.select_all_nodes(backend_requests.BackendRequest(INSTALL, "echo"))
    assert ready == [away, one]
    (left,) = left_out
    assert (left.node, left.fails) == (draining, False)
    for kind in (DELETE, UPGRADE):
        assert backend_requests.select_all_nodes(backend_requests.BackendRequest(kind, "echo")) == ([], [])
    NodeBackend.objects.create(node=one, name="echo")
    NodeBackend.objects.create(node=away, name="other")
    for kind in (DELETE, UPGRADE):
        assert backend_requests.select_all_nodes(backend_requests.BackendRequest(kind, "Echo")) == ([one], [])


@pytest.mark.rule("O34")
def test_all_nodes_while_the_only_node_drains_and_runs_the_same_names_that_operation() -> None:
    """Both have the node's key; without the check each attempt met the other's row and said 503."""
    node = hot.node()
    running = ask(INSTALL, node)
    BackendNode.objects.filter(pk=node.pk).update(drained_at=clock.now())
    request = backend_requests.BackendRequest(INSTALL, "echo")
    ready, left_out = backend_requests.select_all_nodes(request)
    scope = backend_requests.RequestScope(ready, by=Requester("x"), all_nodes=True, left_out=left_out)
    with pytest.raises(errors.Conflict, match=str(running.id)):
        admission.admit(request, scope, now=clock.now())


@pytest.mark.rule("R6.18", "R6.17", "R6.21")
def test_a_node_that_is_away_gets_its_intent_and_the_reason() -> None:
    away = hot.node("away", unhealthy_at=clock.now())
    found = part(ask(UPGRADE, away))
    assert (found.status, found.waits_for_node, found.reason) == ("queued", True, "node away is unhealthy")
    assert intent(away).attempts == 0


def test_asking_costs_the_same_for_any_number_of_nodes() -> None:
    counts = []
    for total in (2, 60):
        nodes = [hot.node(f"{total}-{number}") for number in range(total)]
        with CaptureQueriesContext(connection) as queries:
            ask(INSTALL, *nodes)
        counts.append(len(queries))
    assert counts[0] == counts[1]


# --- races of real transactions


def outcome_of(request: Callable[[], Operation]) -> Callable[[], UUID | str]:
    """The operation's id, or the refusal; anything else is an error."""

    def run() -> UUID | str:
        try:
            return request().id
        except errors.Conflict as refusal:
            return f"refused: {refusal.message}"

    return run


@repeated
def equal_requests() -> None:
    Operation.objects.all().delete()
    nodes = [hot.node(name) for name in ("one", "two")]
    jobs = [outcome_of(partial(ask, INSTALL, *order)) for order in (nodes, nodes[::-1]) * 3]
    answers = at_once(*jobs)
    assert len(set(answers)) == 1, answers
    assert isinstance(answers[0], UUID)
    assert PendingBackendOp.objects.count() == 2


@pytest.mark.rule("A38", "O34", "O93", "H11")
def test_equal_requests_at_once_are_one_operation() -> None:
    equal_requests()


@repeated
def overlapping_requests() -> None:
    Operation.objects.all().delete()
    nodes = [hot.node(name) for name in ("one", "two", "three")]
    sets = [nodes, nodes[:2], nodes[1:], nodes[::-2], nodes[:1], nodes[2:]]
    answers = at_once(*(outcome_of(partial(ask, INSTALL, *some)) for some in sets))
    assert all(isinstance(answer, UUID) for answer in answers), answers
    assert PendingBackendOp.objects.count() == 3
    assert set(OperationTarget.objects.values_list("intent_id", flat=True)) == set(
        PendingBackendOp.objects.values_list("id", flat=True)
    )


@pytest.mark.rule("O34", "R1.108")
def test_requests_for_overlapping_nodes_at_once_share_their_intents() -> None:
    overlapping_requests()


@repeated
def opposite_requests() -> None:
    Operation.objects.all().delete()
    one, two = hot.node("one"), hot.node("two")
    ask(INSTALL, one)  # there is already something to replace
    orders = ((one, two), (two, one), (one,))
    jobs = [outcome_of(partial(ask, kind, *order)) for kind in (INSTALL, DELETE) for order in orders]
    answers = at_once(*jobs)
    assert all(isinstance(answer, UUID) or answer.startswith("refused") for answer in answers), answers
    for row in PendingBackendOp.objects.all():
        assert PendingBackendOp.objects.filter(node=row.node_id, op=row.op).count() == 1
        carried = OperationTarget.objects.filter(intent_id=row.id, status="queued")
        assert {found.operation.kind for found in carried} == {f"backend_{row.op}"}
    left = OperationTarget.objects.filter(status="queued")
    found = set(PendingBackendOp.objects.values_list("id", flat=True))
    assert set(left.values_list("intent_id", flat=True)) == found


@pytest.mark.rule("R1.114", "O34")
def test_opposite_requests_at_once_leave_one_row_for_each_op() -> None:
    opposite_requests()


@pytest.mark.rule("R1.114")
def test_a_request_and_a_claim_at_once_begin_the_former() -> None:
    """The newer request waits, whichever is first."""
    for _ in range(5):
        forget_nodes()
        node = hot.node()
        former = ask(INSTALL, node)
        answer, claimed = at_once(outcome_of(partial(ask, DELETE, node)), claim)
        assert isinstance(answer, UUID)
        assert answer != former.id
        # A claim leaves out rows that the request holds locked at that moment.
        assert [one.row.operation_id for one in [*claimed, *claim(10)]] == [former.id]


@pytest.mark.rule("R1.39")
def test_a_node_that_is_removed_meanwhile_is_no_longer_registered() -> None:
    """Not an error of the database: the removal was first."""
    node = hot.node()
    found = BackendNode.objects.get(pk=node.pk)
    node.delete()
    with pytest.raises(errors.NotFound, match="no longer registered"):
        ask(INSTALL, found)
    assert not Operation.objects.exists()


@pytest.mark.rule("R1.39")
def test_a_request_and_a_removal_at_once_end_cleanly() -> None:
    """The request is recorded before the node goes, or refused; the database reports no deadlock."""
    for number in range(5):
        nodes = [hot.node(f"{number}-{one}") for one in range(3)]
        ask(INSTALL, *nodes)
        removals = [partial(lifecycle.deregister, node.id, actor=ROOT, now=clock.now()) for node in nodes[:2]]
        *removed, answer = at_once(*removals, partial(_answer, nodes))
        assert removed == [None, None]
        assert answer in ("asked", "not found"), answer
        assert PendingBackendOp.objects.count() == (2 if answer == "asked" else 1)
        intents.end_stale_intents(now=clock.now())
        left = OperationTarget.objects.filter(status="queued")
        assert {part.node_id for part in left} == {nodes[2].id}
        PendingBackendOp.objects.all().delete()
        Operation.objects.all().delete()


def _answer(nodes: list[BackendNode]) -> str:
    try:
        ask(DELETE, *nodes)
    except errors.NotFound:
        return "not found"
    return "asked"


@pytest.mark.rule("R1.39")
def test_a_request_for_a_node_that_is_just_being_removed_waits_and_is_refused() -> None:
    """The removal has the node's row, the request what waits on it."""
    node = hot.node()
    ask(INSTALL, node)
    answers: list[str] = []
    with transaction.atomic():
        BackendNode.objects.select_for_update().get(pk=node.pk)
        thread = threading.Thread(target=lambda: answers.extend(at_once(partial(_answer, [node]))))
        thread.start()
        waiting()
        lifecycle.deregister(node.pk, actor=ROOT, now=clock.now())
    thread.join()
    assert answers == ["not found"]
    assert not PendingBackendOp.objects.exists()


def ended(operation: Operation, **errors_by_node: str) -> None:
    """Every part of it ends: with the error that is given for its node, or well."""
    found = intent_rows.claim("controller", now=clock.now(), lease=60, limit=10)
    outcomes = {
        (one.id, one.fence): (Ended(error=errors_by_node.get(one.node.name, "")), ()) for one in found
    }
    intent_rows.record_outcomes(outcomes, now=clock.now())


@pytest.mark.rule("O34", "H9")
def test_the_failure_names_the_operation_that_tries_the_same_again() -> None:
    node = hot.node("one")
    failed = ask(INSTALL, node)
    ended(failed, one="no such image")
    newer = ask(INSTALL, node)
    failed.refresh_from_db()
    assert (failed.status, failed.dismissed_comment) == ("failed", f"tried again as operation {newer.id}")


def test_trying_again_leaves_a_newer_wish_its_way() -> None:
    """What was installed before a deletion that follows is not installed again, unless its node is named."""
    one, two = hot.node("one"), hot.node("two")
    operation = ask(INSTALL, one, two)
    ask(DELETE, one)
    ended(operation, two="no such image")
    asked_by = backend_requests.RequestScope((), by=Requester("ann"))
    again = admission.retry(operation.id, asked_by=asked_by, now=clock.now()).operation
    assert [part.node_id for part in OperationTarget.objects.filter(operation=again)] == [two.id]


class Killed(BaseException):
    """The end of a process."""

    point = "backends.ask:committed"

    def pass_by(self) -> None:
        raise self


@pytest.mark.rule("O52")
def test_a_process_that_dies_after_a_retry_leaves_no_failure_that_is_being_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The retry is on fewer nodes, so its key is another one and does not supersede the failure."""
    one, two = hot.node("one"), hot.node("two")
    failed = ask(INSTALL, one, two)
    ended(failed, two="no such image")
    asked_by = backend_requests.RequestScope((), by=Requester("ann"))
    monkeypatch.setattr(failpoints, "_configured_kill", Killed())
    with pytest.raises(Killed):
        admission.retry(failed.id, asked_by=asked_by, now=clock.now())
    newer = Operation.objects.active().get()
    failed.refresh_from_db()
    assert failed.dismissed_comment == f"tried again as operation {newer.id}"


@pytest.mark.rule("O19", "O50")
def test_the_time_of_an_unknown_outcome_counts_from_the_first_time_limit() -> None:
    ask(INSTALL, hot.node())
    (claimed,) = claim()
    first = intent_rows.record_overdue(claimed, "late", now=clock.now())
    assert intent_rows.record_overdue(claimed, "later", now=clock.now() + timedelta(minutes=15)) == first
