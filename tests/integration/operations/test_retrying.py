"""Operations that are tried again, the pages of the inbox, and clearing the record beside other work."""

import threading
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import clock, conf
from operations.ledger import retention
from operations.models import Operation, OperationTarget
from tests.support import api
from tests.support.races import waiting

pytestmark = pytest.mark.django_db(transaction=True)


def ended(status: str, kind: str = "model_unload", *parts: str, **fields: Any) -> Operation:
    """An operation with a part of each status."""
    now = clock.now()
    made = Operation.objects.create(
        kind=kind, key=f"model:{uuid4()}", element="m", status=status, finished_at=now, **fields
    )
    for number, part in enumerate(parts):
        OperationTarget.objects.create(
            operation=made, node_id=uuid4(), node_name=f"gpu-{number}", status=part
        )
    return made


def nodes(operation: Operation, status: str = "") -> list[UUID]:
    found = OperationTarget.objects.filter(operation=operation, status__contains=status)
    return list(found.order_by("node_name").values_list("node_id", flat=True))


def retry(operation: Operation, *only: UUID) -> Any:
    body = {"nodes": [str(id) for id in only]} if only else {}
    return api.admin().post(f"/api/operations/{operation.id}/retry", body, content_type="application/json")


def test_a_load_that_is_tried_again_has_a_time_limit() -> None:
    before = clock.now()
    answer = retry(ended("failed", "model_load"))
    assert answer.status_code == 200
    load = Operation.objects.get(pk=answer.json()["jobID"])
    assert load.needed_until is not None
    assert load.needed_until >= before + timedelta(seconds=conf.cluster().install_timeout)


def test_what_is_completed_is_not_tried_again() -> None:
    assert retry(ended("completed", "model_unload", "success")).status_code == 409
    assert Operation.objects.count() == 1


def test_only_what_did_not_succeed_is_tried_again() -> None:
    failed = ended("failed", "model_unload", "success", "error", "cancelled")
    newer = Operation.objects.get(pk=retry(failed).json()["jobID"])
    assert nodes(newer) == nodes(failed)[1:]


def test_chosen_nodes_are_tried_again_if_they_are_parts() -> None:
    failed = ended("failed", "model_unload", "success", "error", "error")
    done, one, _ = nodes(failed)
    strange = retry(failed, one, uuid4())
    assert (strange.status_code, retry(failed, done).status_code) == (400, 409)
    assert "nodes" in strange.content.decode()
    assert nodes(Operation.objects.get(pk=retry(failed, one).json()["jobID"])) == [one]


def bulk_retry(*operations: Operation) -> Any:
    body = {"verb": "retry", "ids": [str(operation.id) for operation in operations]}
    answer = api.admin().post("/api/operations/bulk", body, content_type="application/json")
    assert answer.status_code == 200, answer.content
    return answer.json()


def successor(failed: Operation) -> Operation:
    """The operation that the dismissal of a failure names."""
    failed.refresh_from_db()
    return Operation.objects.get(pk=failed.dismissed_comment.removeprefix("tried again as operation "))


@pytest.mark.rule("O52", "A38")
def test_many_failures_are_retried_with_the_statements_of_a_few() -> None:
    """Loads, imports without targets and operations on nodes, each with its dismissal and its audit entry."""
    costs = []
    for size in (2, 40):
        loads = [
            ended("failed", "model_load", payload={"setbacks": {"x": 1}, "number": number})
            for number in range(size)
        ]
        unloads = [ended("failed", "model_unload", "success", "error", "error") for _ in range(size)]
        with CaptureQueriesContext(connection) as made:
            answer = bulk_retry(*loads, *unloads)
        assert answer == {"done": 2 * size, "ended": 0, "refused": 0, "reasons": []}
        costs.append(len(made))
        for number, failed in enumerate(loads):
            newer = successor(failed)
            assert (newer.key, newer.status, newer.payload) == (failed.key, "pending", {"number": number})
            assert newer.needed_until is not None
        for failed in unloads:
            assert nodes(successor(failed), "queued") == nodes(failed, "error")
        assert AuditEntry.objects.filter(kind="operation.asked").count() == 2 * size
        AuditEntry.objects.all().delete()
    assert costs[0] == costs[1]


@pytest.mark.rule("O34")
def test_each_retry_of_many_has_its_own_outcome() -> None:
    """What runs again is joined, what is excluded is refused by name, and what is over is not done twice."""
    first, second = ended("failed"), ended("failed")
    Operation.objects.filter(pk=second.pk).update(key=first.key, dismissed_at=clock.now())
    owner, excluded = "model:m", ended("failed", "model_load")
    Operation.objects.filter(pk=excluded.pk).update(key=f"{owner}#1")
    running = Operation.objects.create(kind="model_unload", key=f"{owner}#", element="m")
    joined = ended("failed", "model_load")
    active = Operation.objects.create(kind="model_load", key=joined.key, element="m")
    completed, pending = ended("completed"), Operation.objects.create(kind="model_load", key="k", element="m")
    answer = bulk_retry(first, second, excluded, joined, completed, pending)
    assert (answer["done"], answer["ended"], answer["refused"]) == (3, 1, 2)
    assert set(answer["reasons"]) == {
        f"model_unload of m is in progress (operation {running.id}, pending)",
        "the operation is pending",
    }
    assert successor(joined) == active
    active.refresh_from_db()
    assert active.needed_until is not None
    assert Operation.objects.active().filter(key=first.key).count() == 1
    excluded.refresh_from_db()
    assert excluded.dismissed_at is None


def test_a_failure_on_a_node_that_is_not_retried_stays() -> None:
    """Chosen nodes of an operation whose retry has a key of its own."""
    failed = ended("failed", "node_drain", "error", "error", payload={"options": {}})
    one, other = nodes(failed)
    assert retry(failed, one).status_code == 200
    failed.refresh_from_db()
    assert failed.dismissed_at is None
    open_targets = OperationTarget.objects.filter(operation=failed, dismissed_at=None)
    assert [target.node_id for target in open_targets] == [other]
    assert retry(failed).status_code == 200
    failed.refresh_from_db()
    assert failed.dismissed_at is not None


def test_the_inbox_comes_in_pages() -> None:
    made = [ended("failed") for _ in range(3)]
    newest_first = [str(one.id) for one in reversed(made)]
    admin = api.admin()
    first = admin.get("/api/operations/inbox?limit=2").json()
    rest = admin.get(f"/api/operations/inbox?limit=2&cursor={first['nextCursor']}").json()
    assert [one["jobID"] for one in first["operations"] + rest["operations"]] == newest_first
    assert "nextCursor" not in rest
    for wrong in ("limit=0", "cursor=x", "node=x"):
        assert admin.get(f"/api/operations/inbox?{wrong}").status_code == 400


def test_clearing_the_record_locks_in_the_order_of_all_others() -> None:
    """Somebody has the first child and takes the second while the record is being cleared."""
    parent = ended("completed")
    second, first = (ended("failed", id=UUID(int=number), parent=parent) for number in (2, 1))

    def clear() -> None:
        try:
            retention.delete_ended()
        finally:
            connection.close()

    thread = threading.Thread(target=clear)
    with transaction.atomic():
        Operation.objects.select_for_update(no_key=True).get(pk=first.pk)
        thread.start()
        waiting()
        Operation.objects.select_for_update(no_key=True, nowait=True).get(pk=second.pk)
    thread.join()
    assert set(Operation.objects.values_list("pk", "parent")) == {(first.pk, None), (second.pk, None)}
