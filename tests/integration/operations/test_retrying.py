"""Operations that are tried again, the pages of the inbox, and clearing the record beside other work."""

import threading
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction

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
            retention.clear()
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
