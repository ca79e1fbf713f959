"""Failures are dismissed; several nodes add up to one progress; the live list in the reference's shape."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import errors
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.kit.transactions import limit_lock_wait
from operations.changes import feed, topics
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick, record
from operations.models import Event, Operation, OperationTarget, Status, TargetStatus
from tests.support import api
from tests.support.races import holding

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
LEASE = 10.0

pytestmark = pytest.mark.django_db(transaction=True)


def admit(key: str = "node:1:mock", kind: str = "backend_install", **more: Any) -> Operation:
    request = admission.OperationRequest(kind, key=key, element="local@mock", by=Requester("ann"), **more)
    return admission.admit(request, now=NOW).operation


def claimed(now: datetime = NOW, **more: Any) -> Operation:
    """An operation that a controller works on."""
    admit(**more)
    (operation,) = attempts.claim("a", now=now, lease=LEASE, limit=1)
    return operation


def failed(**more: Any) -> Operation:
    operation = claimed(**more)
    attempts.finish(operation.id, operation.fence, Event.FAIL, now=NOW, error="no such file")
    return operation


def nodes(count: int) -> list[tuple[UUID, str]]:
    """That many targets."""
    return [(uuid4(), f"gpu-{number}") for number in range(count)]


def row(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def listed() -> list[dict[str, Any]]:
    answer = api.admin().get("/api/operations")
    assert answer.status_code == 200
    assert list(answer.json()) == ["operations"]
    found: list[dict[str, Any]] = answer.json()["operations"]
    return found


def dismiss(operation_id: Any) -> Any:
    return api.admin().post(f"/api/operations/{operation_id}/dismiss")


@pytest.mark.parametrize("event", [Event.COMPLETE, Event.FAIL])
def test_an_operation_that_succeeds_dismisses_the_failures_of_its_children(event: Event) -> None:
    """Review R9: a load that went to another node left its failed installation in the inbox."""
    load = claimed(kind="model_load", key="model:m#0")
    child, other = failed(key="node:a:echo", parent=load), failed(key="node:b:echo")
    attempts.finish(load.id, load.fence, event, now=NOW, error="" if event is Event.COMPLETE else "no node")
    dismissed = row(child).dismissed_at is not None
    assert dismissed is (event is Event.COMPLETE)
    assert (str(load.id) in row(child).dismissed_comment) is dismissed
    assert row(other).dismissed_at is None
    if dismissed:
        assert feed.current_seq() == row(load).seq == row(child).seq + 1


@pytest.mark.rule("O52", "O53", "http-3.5", "A37", "A45", "O81")
def test_a_dismissed_failure_leaves_every_list_and_tells_everyone() -> None:
    """D-DISMISS: by job id; who and when are stored, a restart does not bring it back; again is fine."""
    operation = failed()
    assert [entry["jobID"] for entry in listed()] == [str(operation.id)]
    before = feed.current_seq()
    for _ in range(2):
        answer = dismiss(operation.id)
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        assert answer.json()["message"]
    assert listed() == feed.snapshot().operations == []
    stored = row(operation)
    assert (stored.dismissed_by, stored.status) == ("static-key", "failed")
    assert stored.dismissed_at is not None
    (news,) = feed.since(before).operations
    assert (news["dismissedBy"], news["seq"]) == ("static-key", before + 1)
    assert news["dismissedAt"] == stored.dismissed_at.isoformat()


@pytest.mark.rule("O52", "http-3.5")
def test_only_failures_are_dismissed() -> None:
    """D-DISMISS: 404 for an unknown id and for what is none; 409 names the status and hides nothing."""
    for unknown in (uuid4(), "staging:m", "x"):
        answer = dismiss(unknown)
        assert (answer.status_code, answer.json()) == (404, {"error": "no operation has this id"})
    waiting, running, done = admit(key="b"), claimed(key="a"), claimed(key="c")
    attempts.finish(done.id, done.fence, Event.COMPLETE, now=NOW)
    statuses = {}
    for operation in (waiting, running, done):
        answer = dismiss(operation.id)
        assert answer.status_code == 409
        statuses[row(operation).status] = answer.json()["error"]
    assert set(statuses) == {"processing", "completed"}
    assert all(status in said for status, said in statuses.items())
    assert len(listed()) == 2


@pytest.mark.rule("O52", "http-3.5", "O107")
def test_dismissing_many_waits_for_no_operation_that_has_not_failed() -> None:
    """Whoever holds an active one may wait for the failures: each would wait for the other."""
    failure, active = failed(key="a"), claimed(key="b")
    with (
        holding("SELECT 1 FROM operations WHERE id = %s FOR NO KEY UPDATE", active.id),
        transaction.atomic(),
    ):
        limit_lock_wait(1)
        found = admission.dismiss_many([failure.id, active.id], actor="ann", now=NOW)
    assert {it.id: it.dismissed_by for it in found} == {failure.id: "ann", active.id: ""}


def test_dismissing_is_for_admins_and_needs_the_csrf_token() -> None:
    """An anonymous call and a page's without the token change nothing."""
    operation = failed()
    path = f"/api/operations/{operation.id}/dismiss"
    assert api.Caller().post(path).status_code == 401
    assert api.bearer("lac-wrong").post(path).status_code == 401
    assert row(operation).dismissed_at is None


@pytest.mark.rule("O34", "O52")
def test_a_new_request_dismisses_the_failure_before_it() -> None:
    """O34: it stays in the record, under the name of who asked again."""
    operation = failed()
    again = admit()
    assert row(operation).dismissed_by == "ann"
    assert [entry["jobID"] for entry in listed()] == [str(again.id)]


@pytest.mark.rule("O70", "O25", "O65")
def test_several_nodes_add_up_to_one_progress() -> None:
    """D-AGGREGATE: the mean over all targets, never back, no 100 before the last ends; counts in words."""
    targets = nodes(4)
    operation = claimed(targets=targets)
    first, second, third, fourth = (node for node, _ in targets)

    def tell(node: UUID, percentage: float) -> tuple[float, str]:
        tick = Tick("downloading", "x", int(percentage), 100, percentage, "f", node)
        record({(operation.id, operation.fence): [tick]}, now=NOW)
        return row(operation).progress, row(operation).message

    def end(node: UUID, status: TargetStatus, error: str = "") -> tuple[float, str]:
        attempts.end_target(operation.id, operation.fence, node, status, error, now=NOW)
        return row(operation).progress, row(operation).message

    assert tell(first, 80) == (20, "0 of 4 nodes done")
    assert tell(second, 40) == (30, "0 of 4 nodes done")
    assert tell(first, 10) == (30, "0 of 4 nodes done")  # late or begun again: the whole does not go back
    assert end(first, TargetStatus.SUCCESS) == (35, "1 of 4 nodes done")
    assert end(second, TargetStatus.ERROR, "disk full") == (35, "1 of 4 nodes done, 1 failed")
    assert tell(second, 99) == (35, "1 of 4 nodes done, 1 failed")  # it has ended
    assert end(third, TargetStatus.SUCCESS) == (60, "2 of 4 nodes done, 1 failed")
    (entry,) = listed()
    assert [(part["node_name"], part["status"], part["percentage"]) for part in entry["nodes"]] == [
        ("gpu-0", "success", 100),
        ("gpu-1", "error", 40),
        ("gpu-2", "success", 100),
        ("gpu-3", "queued", 0),
    ]
    assert (entry["currentBytes"], entry["totalBytes"]) == (120, 200)
    end(fourth, TargetStatus.SUCCESS)
    assert row(operation).progress == 85
    attempts.finish(operation.id, operation.fence, Event.FAIL, now=NOW, error="1 of 4 nodes failed")
    errors_of = dict(OperationTarget.objects.values_list("node_name", "error"))
    assert errors_of == {"gpu-0": "", "gpu-1": "disk full", "gpu-2": "", "gpu-3": ""}


@pytest.mark.rule("O69", "O70")
def test_a_late_report_takes_no_node_back() -> None:
    """Reports may come out of order; another file begins with its own bytes, the percentage does not."""
    targets = nodes(2)
    operation = claimed(targets=targets)

    def tell(share: int, file: str) -> tuple[float, int]:
        tick = Tick("downloading", "x", share, 100, share, file, targets[0][0])
        record({(operation.id, operation.fence): [tick]}, now=NOW)
        part = OperationTarget.objects.get(node_id=targets[0][0])
        return part.percentage, part.current_bytes

    assert [tell(80, "a"), tell(60, "a"), tell(10, "b")] == [(80, 80), (80, 80), (80, 10)]


@pytest.mark.rule("O70")
def test_figures_of_workers_that_no_column_holds_together() -> None:
    """Each says what 64 bits hold; the sum is what the column holds."""
    targets = nodes(2)
    operation = claimed(targets=targets)
    for node, _ in targets:
        tick = Tick("downloading", "x", 2**63 - 1, 2**63 - 1, 1, "f", node)
        record({(operation.id, operation.fence): [tick]}, now=NOW)
    assert (row(operation).current_bytes, row(operation).total_bytes) == (2**63 - 1, 2**63 - 1)


@pytest.mark.rule("O70")
def test_the_last_node_does_not_make_it_a_hundred() -> None:
    """The end of the operation does; all successes are 99 until then."""
    targets = nodes(2)
    operation = claimed(targets=targets)
    for node, _ in targets:
        attempts.end_target(operation.id, operation.fence, node, TargetStatus.SUCCESS, now=NOW)
    assert row(operation).progress == 99
    attempts.finish(operation.id, operation.fence, Event.COMPLETE, now=NOW)
    assert (row(operation).progress, row(operation).message) == (100, "completed")


@pytest.mark.rule("O56", "O64", "O70")
def test_an_end_keeps_what_has_ended_and_ends_the_rest() -> None:
    """A part keeps its own outcome; telling an end twice changes nothing, not even the number."""
    targets = nodes(2)
    operation = claimed(targets=targets)
    first = targets[0][0]
    attempts.end_target(operation.id, operation.fence, first, TargetStatus.ERROR, "disk full", now=NOW)
    before = feed.current_seq()
    attempts.end_target(operation.id, operation.fence, first, TargetStatus.SUCCESS, now=NOW)
    assert feed.current_seq() == before
    attempts.finish(operation.id, operation.fence, Event.COMPLETE, now=NOW)
    parts = list(OperationTarget.objects.values_list("status", "percentage", "error"))
    assert parts == [("error", 0, "disk full"), ("success", 100, "")]


@pytest.mark.rule("O64")
def test_a_part_ends_under_the_fence_and_only_where_there_is_one() -> None:
    """Who lost the lease writes nothing; an unknown node and an end that is none are refused."""
    targets = nodes(1)
    operation = claimed(targets=targets)
    node = targets[0][0]
    with pytest.raises(LeaseLost):
        attempts.end_target(operation.id, operation.fence + 1, node, TargetStatus.SUCCESS, now=NOW)
    with pytest.raises(errors.NotFound):
        attempts.end_target(operation.id, operation.fence, uuid4(), TargetStatus.SUCCESS, now=NOW)
    with pytest.raises(ValueError, match="is not a final status"):
        attempts.end_target(operation.id, operation.fence, node, TargetStatus.QUEUED, now=NOW)
    assert OperationTarget.objects.get().status == "queued"


@pytest.mark.rule("O70")
def test_a_new_attempt_goes_on_where_the_ended_nodes_left_it() -> None:
    """A controller that dies costs the half-done nodes, not the done ones."""
    targets = nodes(4)
    operation = claimed(targets=targets)
    tick = Tick("downloading", "x", 50, 100, 50.0, "f", targets[1][0])
    attempts.end_target(operation.id, operation.fence, targets[0][0], TargetStatus.SUCCESS, now=NOW)
    record({(operation.id, operation.fence): [tick]}, now=NOW)
    later = NOW + timedelta(seconds=LEASE + 1)
    attempts.reap(now=later)
    (again,) = attempts.claim("b", now=later, lease=LEASE, limit=1)
    assert (again.id, again.progress) == (operation.id, 25)
    parts = list(OperationTarget.objects.values_list("status", "percentage", "current_bytes"))
    assert parts == [("success", 100, 0), ("queued", 0, 0), ("queued", 0, 0), ("queued", 0, 0)]


@pytest.mark.rule("O39", "O40", "O42", "O43", "http-3.2", "A26", "O46", "O65", "R6.37")
def test_the_live_list_has_the_keys_of_the_reference() -> None:
    """D-LIST-PURE, D-MORE-OF-OPERATIONS: what is always there, what only when known; order; nothing clean."""
    node = (uuid4(), "gpu-0")
    running = claimed(key="a", node=node, targets=[node])
    record({(running.id, running.fence): [Tick("downloading", "f", 5, 10, 50.5, "f", node[0])]}, now=NOW)
    gone = claimed(key="b")
    attempts.finish(gone.id, gone.fence, Event.CANCEL, now=NOW, message="no request needs it")
    clean = claimed(key="c")
    attempts.finish(clean.id, clean.fence, Event.COMPLETE, now=NOW)
    waiting = admit(key="d")
    entries = listed()
    assert [entry["jobID"] for entry in entries] == [str(waiting.id), str(running.id)]
    always = {
        "id": "local@mock",
        "name": "mock",
        "fullName": "local@mock",
        "taskType": "installation",
        "isDeletion": False,
        "isBackend": True,
        "cancellable": True,
    }
    assert entries[0].items() >= (always | {"progress": 0, "isQueued": True, "message": "queued"}).items()
    assert (
        entries[1].items() >= (always | {"progress": 50, "isQueued": False, "phase": "downloading"}).items()
    )
    optional = {"nodeID", "nodeName", "currentBytes", "totalBytes", "error", "nodes"}
    assert optional & set(entries[0]) == set()
    assert optional & set(entries[1]) == optional - {"error"}


@pytest.mark.rule("O44", "http-3.2", "O31", "O45")
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("backend_install", "installation"),
        ("backend_upgrade", "upgrade"),
        ("backend_delete", "deletion"),
        ("model_delete", "deletion"),
        ("model_load", "staging"),
    ],
)
def test_task_types_are_four_words_in_lower_case(kind: str, task: str) -> None:
    """D-TASK-TYPES; a cold load is `staging` in every phase (D-LOADS-LISTED)."""
    admit(kind=kind)
    (entry,) = listed()
    assert entry["taskType"] == task
    assert (entry["isDeletion"], entry["isBackend"]) == (
        kind.endswith("_delete"),
        kind.startswith("backend_"),
    )


@pytest.mark.rule("O4", "http-3.2")
@pytest.mark.parametrize(
    ("event", "status"), [(Event.WAIT, "waiting_for_nodes"), (Event.POSTPONE, "pending")]
)
def test_what_waits_is_listed_as_queued_with_its_reason(event: Event, status: str) -> None:
    """D-QUEUED: phase and flag say the same; the message is the reason, and the next look is told."""
    operation = claimed()
    assert (listed()[0]["isQueued"], "phase" in listed()[0]) == (False, False)
    until = NOW + timedelta(seconds=30)
    attempts.put_back(operation.id, operation.fence, event, now=NOW, until=until, reason="no node has room")
    (entry,) = listed()
    assert (entry["isQueued"], entry["phase"], entry["status"]) == (True, "queued", status)
    assert (entry["message"], entry["nextLookAt"]) == ("no node has room", until.isoformat())
    assert "givesUpAt" not in entry
    Operation.objects.update(needed_until=NOW + timedelta(hours=1))
    assert listed()[0]["givesUpAt"] == (NOW + timedelta(hours=1)).isoformat()
    attempts.claim("a", now=until, lease=LEASE, limit=1)
    assert row(operation).status == Status.PROCESSING
    assert "givesUpAt" not in listed()[0], "what runs is not given up"


@pytest.mark.rule("O41")
def test_parts_are_listed_by_the_name_of_the_node() -> None:
    """In any order."""
    targets = nodes(3)
    admit(targets=targets[::-1])
    assert [part["node_name"] for part in listed()[0]["nodes"]] == ["gpu-0", "gpu-1", "gpu-2"]


def test_looking_costs_the_same_for_any_number_of_operations() -> None:
    """The list over REST, what a socket begins with, what it missed; and one query if it missed nothing."""

    def costs() -> list[int]:
        now = feed.current_seq()
        looks: list[Callable[[], Any]] = [
            listed,
            lambda: topics.read_update(None),
            lambda: topics.read_update(now - 1),
            lambda: topics.read_update(now),
        ]
        return [queries_of(look) for look in looks]

    admit("node:0:mock", targets=nodes(2))
    few = costs()
    for number in range(1, 40):
        admit(f"node:{number}:mock", targets=nodes(2))
    assert costs() == few
    assert few[-1] == 1


def queries_of(look: Callable[[], Any]) -> int:
    """How many queries it makes."""
    with CaptureQueriesContext(connection) as seen:
        look()
    return len(seen)
