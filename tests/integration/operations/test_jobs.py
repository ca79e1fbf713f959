"""How single operations go, by REST: jobs, raw statuses, cancel and pause (`contract/http-api.md` §3)."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.api_document import document
from localai_cluster.kit import clock
from nodes.backends import intents
from nodes.backends.intents import Ended
from nodes.models import PendingBackendOp
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.models import Operation
from tests.integration.api.test_document import fits
from tests.support import api, hot
from tests.support import intents as wished

pytestmark = pytest.mark.django_db

JOBS = ("/api/backends/job/{uid}", "/api/models/job/{uid}")
STATUSES = ("/backends/jobs/{uid}", "/models/jobs/{uid}")


def read(template: str, uid: Any = "") -> Any:
    """The answer, which the API document describes."""
    answer = api.admin().get(template.format(uid=uid))
    told = document()["paths"][template]["get"]["responses"][str(answer.status_code)]
    assert fits(told["content"]["application/json"]["schema"], answer.json()) == []
    return answer


def act(verb: str, operation: Operation) -> Any:
    return api.admin().post(f"/api/operations/{operation.id}/{verb}")


def load(key: str = "model:m") -> Operation:
    request = admission.OperationRequest("model_load", key=key, element="m", by=Requester("ann"))
    return admission.admit(request, now=clock.now()).operation


def settle(*outcomes: tuple[intents.Intent, Ended]) -> None:
    intents.record_outcomes({(one.id, one.fence): (ended, ()) for one, ended in outcomes}, now=clock.now())


def downloads(intent: intents.Intent, current: int, total: int) -> None:
    """The worker's report of its progress."""
    tick = Tick(
        "downloading", "weights", current, total, 100 * current / total, "weights", intent.node.id, "one"
    )
    intents.record({(intent.id, intent.fence): [tick]}, now=clock.now())


@pytest.mark.rule("http-3.1", "http-3.7", "http-3.9", "O3", "O12", "O20")
def test_an_operation_from_its_admission_to_its_end() -> None:
    """Known under every name at once; queued and cancellable, running, completed."""
    operation = wished.ask(wished.INSTALL, hot.node())
    for template in JOBS:
        job = read(template, operation.id).json()
        assert (job["processed"], job["progress"], job["state"], "completed" in job) == (
            False,
            0,
            "queued",
            False,
        )
    for template in STATUSES:
        status = read(template, operation.id).json()
        assert (status["phase"], status["processed"], status["cancellable"]) == ("queued", False, True)
    (intent,) = wished.claim()
    downloads(intent, 2**20, 2**22)
    status = read(STATUSES[0], operation.id).json()
    assert (status["file_name"], status["downloaded_size"], status["file_size"]) == (
        "weights",
        "1.0 MiB",
        "4.0 MiB",
    )
    assert (status["current_bytes"], status["total_bytes"], status["progress"]) == (2**20, 2**22, 25)
    assert [part["status"] for part in status["nodes"]] == ["downloading"]
    settle((intent, Ended()))
    job, status = (read(name, operation.id).json() for name in (JOBS[0], STATUSES[0]))
    assert (job["completed"], job["processed"], job["progress"], job["state"]) == (
        True,
        True,
        100,
        "completed",
    )
    assert (status["processed"], status["cancelled"], status["cancellable"]) == (True, False, False)
    assert ("error" in status, status["file_name"], status["message"]) == (False, "", "completed")


@pytest.mark.rule("http-3.7", "http-3.9", "O62", "O63")
def test_a_failure_has_its_reason_and_a_cancelled_one_none() -> None:
    failed = wished.ask(wished.INSTALL, hot.node("a"))
    settle((wished.claim()[0], Ended(error="disk full")))
    cancelled = wished.ask(wished.INSTALL, hot.node("b"))
    assert act("cancel", cancelled).status_code == 200
    for template in (*JOBS, *STATUSES):
        assert read(template, failed.id).json()["error"] == "disk full"
        answer = read(template, cancelled.id).json()
        assert ("error" in answer, "completed" in answer, answer["processed"]) == (False, False, True)
    assert read(STATUSES[0], cancelled.id).json()["cancelled"] is True
    assert read(JOBS[0], cancelled.id).json()["state"] == "cancelled"


@pytest.mark.rule("http-3.7", "http-3.9", "O62", "O63")
@pytest.mark.parametrize("template", [*JOBS, *STATUSES])
def test_an_id_without_a_record_is_404(template: str) -> None:
    """Flat for jobs, nested for raw statuses; never "queued" for ever."""
    for unknown in (uuid4(), "nope", "%00"):
        answer = api.admin().get(template.format(uid=unknown))
        assert (answer.status_code, api.message(answer)) == (404, admission.NO_SUCH_OPERATION)
        assert isinstance(answer.json()["error"], str) == (template in JOBS)


@pytest.mark.rule("http-3.8", "O19", "O50")
def test_what_a_worker_may_still_be_busy_with_is_no_end() -> None:
    """Neither processed nor an error, under every name; the list shows it in amber."""
    operation = wished.ask(wished.INSTALL, hot.node())
    (intent,) = wished.claim()
    assert intents.record_overdue(intent, "no answer within 15 minutes", now=clock.now())
    job = read(JOBS[0], operation.id).json()
    assert (job["processed"], job["state"], "error" in job) == (False, "verifying", False)
    assert read(STATUSES[0], operation.id).json()["processed"] is False
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert ("error" in listed, [part["status"] for part in listed["nodes"]]) == (False, ["running_on_worker"])
    (entry,) = api.admin().get("/api/backends").json()["processingBackends"].values()
    assert entry == str(operation.id)


@pytest.mark.rule("http-3.9", "O29", "O63")
def test_the_lists_of_statuses_are_of_late_and_of_one_kind() -> None:
    """By id; an hour after its end an operation is found by its own address alone."""
    of_backend, of_model = wished.ask(wished.INSTALL, hot.node()), load()
    old = wished.ask(wished.INSTALL, hot.node("b"), backend="old")
    act("cancel", old)
    listed = read("/backends/jobs").json()
    assert listed.keys() == {str(of_backend.id), str(old.id)}
    assert listed[str(of_backend.id)] == read(STATUSES[0], of_backend.id).json()
    assert read("/models/jobs").json().keys() == {str(of_model.id)}
    Operation.objects.filter(pk=old.pk).update(finished_at=clock.now() - timedelta(hours=1, seconds=1))
    assert read("/backends/jobs").json().keys() == {str(of_backend.id)}
    assert read(STATUSES[0], old.id).json()["cancelled"] is True


@pytest.mark.rule("http-3.9")
def test_the_list_of_statuses_costs_the_same_for_many() -> None:
    def costs() -> int:
        with CaptureQueriesContext(connection) as seen:
            read("/backends/jobs")
        return len(seen)

    wished.ask(wished.INSTALL, hot.node())
    few = costs()
    for number in range(5):
        wished.ask(wished.INSTALL, hot.node(f"n{number}"), backend=f"b{number}")
    assert costs() == few


@pytest.mark.rule("http-3.3", "O54", "O57", "O61")
def test_cancel_is_accepted_once_and_only_for_what_can_be_cancelled() -> None:
    """It leaves the list at once, and its intent goes; a second one, and an unknown id, are refused."""
    operation = wished.ask(wished.DELETE, hot.node())
    answer = act("cancel", operation)
    assert (answer.status_code, answer.json()) == (200, {"success": True, "message": "operation cancelled"})
    assert api.admin().get("/api/operations").json() == {"operations": []}
    assert not PendingBackendOp.objects.exists()
    (entry,) = api.admin().get("/api/operations/history").json()["operations"]
    assert (entry["jobID"], entry["outcome"]) == (str(operation.id), "cancelled")
    again = act("cancel", operation)
    assert (again.status_code, again.json()["error"]) == (409, "the operation is cancelled already")
    for unknown in (uuid4(), "nope"):
        assert api.admin().post(f"/api/operations/{unknown}/cancel").status_code == 404
    running = wished.ask(wished.DELETE, hot.node("b"))
    wished.claim()
    assert act("cancel", running).status_code == 409
    assert Operation.objects.get(pk=running.pk).status == "processing"


@pytest.mark.rule("http-3.4", "O59")
def test_nothing_can_be_paused_and_the_answer_says_what_to_do() -> None:
    """No operation can go on from where it stood, and none offers it."""
    for operation in (wished.ask(wished.INSTALL, hot.node()), load()):
        answer = act("pause", operation)
        assert (answer.status_code, "cannot be paused" in answer.json()["error"]) == (409, True)
        assert Operation.objects.get(pk=operation.pk).status == "pending"
    attempts.claim("a", now=clock.now(), lease=60, limit=1)
    assert act("pause", operation).status_code == 409
    assert api.admin().post(f"/api/operations/{uuid4()}/pause").status_code == 404
