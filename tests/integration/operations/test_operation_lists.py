"""Where an operation shows in each of its states: live list, catalogue, inbox, record, job (§1.7, §1.15)."""

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from nodes.backends import intents
from nodes.backends.intent_queue import IntentQueue
from nodes.backends.intents import Ended, Failed, Settlement
from nodes.loading.load_request import load_on_other_node
from nodes.models import BackendNode, PendingBackendOp
from operations.changes import feed
from operations.ledger import admission, attempts, progress, retention
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.models import Operation, OperationTarget
from operations.reconcilers.tasks import prune_record
from tests.support import api, hot
from tests.support.bus import PlayedBus
from tests.support.effort import EFFORT
from tests.support.fleet import at_once, unexpected
from tests.support.intents import DELETE, INSTALL, ask, claim

pytestmark = pytest.mark.django_db


def settled(outcome: Settlement, *ticks: Tick) -> None:
    """How the attempt under way ends."""
    (intent,) = claim()
    intents.record_outcomes({(intent.id, intent.fence): (outcome, ticks)}, now=clock.now())


def overdue(operation: Operation) -> None:
    (intent,) = claim()
    intents.record_overdue(intent, "it may still be busy with it", now=clock.now())


def failed(operation: Operation) -> None:
    settled(Ended(error="no such image"))


def dismissed(operation: Operation) -> None:
    failed(operation)
    assert api.admin().post(f"/api/operations/{operation.id}/dismiss").status_code == 200


def cancelled(operation: Operation) -> None:
    assert api.admin().post(f"/api/operations/{operation.id}/cancel").status_code == 200


def on_surfaces(operation: Operation) -> tuple[set[str], dict[str, Any]]:
    """Where it shows, and how the one list that has it tells it."""
    admin, found = api.admin(), set[str]()
    told: dict[str, Any] = {}
    for surface, path in (("live", ""), ("inbox", "/inbox"), ("record", "/history")):
        for entry in admin.get(f"/api/operations{path}").json()["operations"]:
            if entry["jobID"] == str(operation.id):
                found.add(surface)
                told |= entry
    if str(operation.id) in admin.get("/api/backends").json()["processingBackends"].values():
        found.add("card")
    return found, told


LISTED = {"live", "card"}
STATES: list[tuple[Callable[[Operation], Any], str, str, set[str], bool]] = [
    (lambda operation: None, "pending", "queued", LISTED, True),
    (lambda operation: claim(), "processing", "running", LISTED, False),
    (lambda operation: settled(Failed("no answer")), "pending", "queued", LISTED, True),
    (overdue, "processing", "verifying", LISTED, False),
    (lambda operation: settled(Ended()), "completed", "completed", {"record"}, False),
    (failed, "failed", "failed", {"live", "inbox"}, False),
    (dismissed, "failed", "failed", {"record"}, False),
    (cancelled, "cancelled", "cancelled", {"record"}, False),
]


@pytest.mark.parametrize(
    ("happens", "status", "state", "surfaces", "queued"),
    STATES,
    ids=["queued", "running", "retrying", "overdue", "completed", "failed", "dismissed", "cancelled"],
)
@pytest.mark.rule("A40", "A43", "A44", "A45", "A46", "A47", "A48", "A74")
@pytest.mark.rule("O12", "O33a", "O36", "O46", "O47", "O51", "O58", "O62", "O99", "H3")
def test_each_state_has_its_surfaces(
    happens: Callable[[Operation], Any], status: str, state: str, surfaces: set[str], queued: bool
) -> None:
    """D-LIST-PURE, D-CATALOGUE-RUNNING: at once and without anybody polling; looking changes nothing."""
    operation = ask(INSTALL, hot.node("one"), gallery="local")
    happens(operation)
    operation.refresh_from_db()
    before = (operation.seq, feed.current_seq())
    found, told = on_surfaces(operation)
    assert (operation.status, found) == (status, surfaces)
    assert (told["name"], told["fullName"], told["status"]) == ("echo", "local@echo", status)
    assert told["progress"] == (100 if status == "completed" else 0)
    assert told["cancellable"] == operation.cancellable == (operation.status in ("pending", "processing"))
    job = api.admin().get(f"/api/backends/job/{operation.id}").json()
    assert (job["state"], job["queued"], job["galleryElementName"]) == (state, queued, "local@echo")
    assert job["processed"] == (status in ("completed", "failed", "cancelled"))
    assert job.get("completed", False) == (status == "completed")
    assert job.get("error", "") == told.get("error", "") == ("no such image" if status == "failed" else "")
    operation.refresh_from_db()
    assert (operation.seq, feed.current_seq()) == before


@pytest.mark.rule("A48", "O33a", "O62")
def test_what_waits_for_its_node_stays_listed_as_waiting() -> None:
    operation = ask(INSTALL, hot.node("away", offline_at=clock.now()))
    found, told = on_surfaces(operation)
    assert (found, told["isQueued"], told["status"]) == (LISTED, True, "waiting_for_nodes")
    assert told["nodes"][0]["reason"] == "node away is offline"
    job = api.admin().get(f"/api/backends/job/{operation.id}").json()
    assert (job["state"], job["queued"]) == ("waiting_for_nodes", True)


@pytest.mark.rule("UW23", "O65", "O80")
def test_what_is_tried_again_tells_attempts_reason_and_time() -> None:
    """It is tried at once on demand, and a cancel drops it."""
    operation = ask(INSTALL, hot.node("one"))
    settled(Failed("no answer"))
    _, told = on_surfaces(operation)
    (part,) = told["nodes"]
    due = PendingBackendOp.objects.get().next_retry_at
    assert (part["node_name"], part["status"], part["attempts"]) == ("one", "queued", 1)
    assert (part["error"], part["nextLookAt"]) == ("no answer", due.isoformat())
    assert api.admin().post(f"/api/operations/{operation.id}/retry").json()["message"] == "tried at once"
    assert PendingBackendOp.objects.get().next_retry_at < due
    cancelled(operation)
    assert not PendingBackendOp.objects.exists()


@pytest.mark.rule("A41", "O48", "O89")
def test_what_has_ended_well_leaves_nothing_on_the_lists() -> None:
    """Five installs on each of five nodes; what failed a year ago and was not dismissed is still there."""
    nodes = [hot.node(f"n{number}") for number in range(5)]
    for number in range(5):
        ask(INSTALL, *nodes, backend=f"b{number}")
    while claimed := claim(25):
        intents.record_outcomes({(one.id, one.fence): (Ended(), ()) for one in claimed}, now=clock.now())
    assert Operation.objects.filter(status="completed").count() == 5
    assert api.admin().get("/api/operations").json() == {"operations": []}
    assert api.admin().get("/api/backends").json()["processingBackends"] == {}
    old = ended("failed", clock.now() - timedelta(days=365))
    assert [one["jobID"] for one in feed.snapshot().operations] == [str(old.id)]


CYCLES = 2000 if EFFORT > 1 else 12


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("A49", "A75", "H1", "H2", "O29", "O49")
def test_lists_are_whole_while_operations_come_and_go() -> None:
    """As many reads as cycles, at once: what stays is in every answer once, and nothing is lost."""
    assert connection.vendor == "postgresql"
    stays = str(ask(INSTALL, hot.node("away", offline_at=clock.now()), backend="stays").id)
    nodes = [hot.node(f"n{number}") for number in range(2)]

    def cycles(node: BackendNode) -> int:
        for number in range(CYCLES // 2):
            ask(INSTALL, node, backend=f"b{number}")
            outcomes: dict[Any, Any] = {(one.id, one.fence): (Ended(), ()) for one in claim(9)}
            intents.record_outcomes(outcomes, now=clock.now())
        return 0

    def reads() -> int:
        wrong = 0
        for _ in range(CYCLES // 2):
            listed = [entry["jobID"] for entry in feed.snapshot().operations]
            wrong += listed.count(stays) != 1 or len(set(listed)) != len(listed)
        return wrong

    results = at_once(*(partial(cycles, node) for node in nodes), reads, reads)
    assert unexpected(results) == []
    assert results == [0, 0, 0, 0]
    left = claim(CYCLES)
    intents.record_outcomes({(one.id, one.fence): (Ended(), ()) for one in left}, now=clock.now())
    assert Operation.objects.filter(status="completed").count() == CYCLES // 2 * 2
    assert [entry["jobID"] for entry in feed.snapshot().operations] == [stays]


def ended(status: str, at: datetime, **fields: Any) -> Operation:
    """An operation that ended then."""
    columns = {"kind": INSTALL, "key": f"node:{uuid4()}:echo", "element": "local@echo", "actor": "ann"}
    times = {"created_at": at, "finished_at": at, "updated_at": at}
    return Operation.objects.create(status=status, **columns | times | fields)


def record(query: str = "") -> list[dict[str, Any]]:
    answer = api.admin().get(f"/api/operations/history{query}")
    assert answer.status_code == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["operations"]
    return found


@pytest.mark.rule("A79", "O94", "O95", "O96", "O97", "O86", "O36")
def test_the_record_says_what_where_by_whom_and_when() -> None:
    """Newest end first, each once; an end that came before the beginning starts when it was asked for."""
    node, asked_by = hot.node("one"), "test"
    made = [ask(kind, node, backend=f"b{n}", gallery="local") for n, kind in enumerate((INSTALL, DELETE))]
    settled(Ended())
    settled(Ended(error="cannot be removed"))
    never = ask(INSTALL, node, backend="b2")
    cancelled(never)
    dismiss = f"/api/operations/{made[1].id}/dismiss"
    assert [entry["jobID"] for entry in record()] == [str(never.id), str(made[0].id)]
    assert api.admin().post(dismiss).status_code == 200
    found = record()
    assert [(one["jobID"], one["outcome"], one["taskType"], one.get("error", "")) for one in found] == [
        (str(never.id), "cancelled", "installation", ""),
        (str(made[1].id), "failed", "deletion", "cannot be removed"),
        (str(made[0].id), "completed", "installation", ""),
    ]
    for entry, row in zip(found, (never, made[1], made[0]), strict=True):
        row.refresh_from_db()
        assert (entry["id"], entry["nodeID"], entry["nodeName"]) == (row.key, str(node.id), "one")
        assert (entry["name"], entry["isBackend"], entry["actor"]) == (
            row.element.rpartition("@")[2],
            True,
            asked_by,
        )
        began, end = (datetime.fromisoformat(entry[name]) for name in ("startedAt", "finishedAt"))
        assert (began, end) == (row.started_at or row.created_at, row.finished_at)
        assert row.created_at <= began <= end


@pytest.mark.rule("O94", "O95", "O100", "UW29")
def test_the_record_has_fifty_at_a_time_and_leads_to_the_older_ones() -> None:
    now = clock.now()
    made = [str(ended("completed", now - timedelta(minutes=number)).id) for number in range(52)]
    first = api.admin().get("/api/operations/history").json()
    assert [one["jobID"] for one in first["operations"]] == made[:50]
    assert [one["jobID"] for one in record(f"?cursor={first['nextCursor']}")] == made[50:]


@pytest.mark.rule("O100", "UW29")
def test_the_record_is_filtered() -> None:
    now, node = clock.now(), uuid4()
    one = ended("completed", now - timedelta(hours=2), node_id=node, node_name="one")
    two = ended("cancelled", now, kind=DELETE, actor="bob", element="other")
    OperationTarget.objects.create(operation=two, node_id=node, node_name="one", status="cancelled")
    ended("failed", now)
    between = f"from={(now - timedelta(hours=3)).isoformat()}&to={(now - timedelta(hours=1)).isoformat()}"
    for query, wanted in {
        f"node={node}": [two, one],
        "backend=echo": [one],
        f"kind={DELETE}": [two],
        "outcome=completed": [one],
        "actor=bob": [two],
        between.replace("+", "%2B"): [one],
        f"node={uuid4()}": [],
    }.items():
        assert [entry["jobID"] for entry in record(f"?{query}")] == [str(row.id) for row in wanted], query
    assert api.admin().get("/api/operations/history?outcome=lost").status_code == 400


@pytest.mark.rule("O100")
def test_the_record_ends_after_its_time_and_what_waits_for_someone_never() -> None:
    long_ago, lately = (clock.now() - timedelta(days=days) for days in (91, 89))
    ended("completed", long_ago)
    ended("failed", long_ago, dismissed_at=long_ago)
    kept = [
        ended("completed", lately),
        ended("failed", long_ago),
        ended("pending", long_ago, finished_at=None),
    ]
    prune_record()
    assert set(Operation.objects.values_list("id", flat=True)) == {row.id for row in kept}


def test_the_inbox_and_the_record_are_bounded_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review X11: failures that nobody dismissed stayed for ever, and each open page is told all of them."""
    monkeypatch.setattr(retention, "MAX_INBOX_FAILURES", 3)
    monkeypatch.setattr(retention, "MAX_DISMISSED_PER_TRANSACTION", 2)
    now = clock.now()
    failures = [ended("failed", now - timedelta(minutes=number)) for number in range(8)]
    prune_record()
    inbox = api.admin().get("/api/operations/inbox").json()["operations"]
    assert [one["jobID"] for one in inbox] == [str(row.id) for row in failures[:3]]
    dismissed = Operation.objects.filter(dismissed_by="system").order_by("-finished_at")
    assert [row.id for row in dismissed] == [row.id for row in failures[3:]], "deleted by nobody"
    assert {row.dismissed_comment for row in dismissed} == {retention.OVERFLOW_COMMENT}
    assert len({row.seq for row in dismissed}) == 5, "open pages are told"
    monkeypatch.setattr(retention, "MAX_ENDED_OPERATIONS", 2)
    running = ended("processing", now, finished_at=None, fence=1, lease_until=now + timedelta(hours=1))
    prune_record()
    kept = [*failures[:5], running]
    assert set(Operation.objects.values_list("id", flat=True)) == {row.id for row in kept}


def test_bounding_costs_the_same_queries_for_any_number() -> None:
    """Review X11: also where nothing is beyond a bound."""
    costs = []
    for number in range(1, 4):
        ended("failed", clock.now() - timedelta(minutes=number))
        ended("completed", clock.now() - timedelta(minutes=number))
        with CaptureQueriesContext(connection) as queries:
            prune_record()
        costs.append(len(queries))
    assert len(set(costs)) == 1


UNKNOWN = uuid4()


@pytest.mark.parametrize("id", [str(UNKNOWN), "staging:m", "nope"], ids=["unknown", "staging", "no id"])
@pytest.mark.rule("A85", "O61", "O62")
def test_an_invented_id_is_404_and_leaves_no_trace(id: str) -> None:
    admin, before = api.admin(), feed.current_seq()
    for verb in ("cancel", "pause", "dismiss", "retry"):
        answer = admin.post(f"/api/operations/{id}/{verb}", {})
        assert (answer.status_code, answer.json()) == (404, {"error": "no operation has this id"}), verb
    assert admin.get(f"/api/backends/job/{id}").status_code == 404
    assert (Operation.objects.count(), feed.current_seq()) == (0, before)


@pytest.mark.rule("O61", "O57", "O55")
def test_what_cannot_be_cancelled_is_409_and_says_why() -> None:
    node = hot.node("one")
    removal = ask(DELETE, node)
    (intent,) = claim()
    path = f"/api/operations/{removal.id}/cancel"
    refused = api.admin().post(path)
    assert (refused.status_code, api.message(refused)) == (
        409,
        "a deletion that has begun cannot be cancelled",
    )
    intents.record_outcomes({(intent.id, intent.fence): (Ended(), ())}, now=clock.now())
    refused = api.admin().post(path)
    assert (refused.status_code, api.message(refused)) == (409, "the operation is completed already")
    install = ask(INSTALL, node)
    cancelled(install)
    again = api.admin().post(f"/api/operations/{install.id}/cancel")
    assert (again.status_code, api.message(again)) == (409, "the operation is cancelled already")


@pytest.mark.rule("O57", "http-3.2")
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("kind", ["model_load", "model_unload", "model_delete"])
def test_the_list_offers_to_cancel_exactly_what_the_server_cancels(kind: str, running: bool) -> None:
    """Review R3: a load could be cancelled over REST, while every page said that it could not."""
    request = admission.OperationRequest(kind, f"model:{kind}#all", "smollm2", by=Requester("alice"))
    operation = admission.admit(request, now=clock.now()).operation
    if running:
        attempts.claim("controller", now=clock.now(), lease=60, limit=1)
    (entry,) = api.admin().get("/api/operations").json()["operations"]
    assert entry["cancellable"] == (not running or kind != "model_delete")
    answer = api.admin().post(f"/api/operations/{operation.id}/cancel")
    assert (answer.status_code == 200) == entry["cancellable"]
    (status,) = api.admin().get("/models/jobs").json().values()
    assert (status["cancelled"], status["cancellable"]) == (entry["cancellable"], False)


def test_work_that_runs_says_when_it_was_last_heard_of_and_when_it_is_given_up() -> None:
    """Review R5: a worker that never answers was a spinner for 15 minutes."""
    operation, began = ask(INSTALL, hot.node("one")), clock.now()
    queue = IntentQueue(PlayedBus(), load_on_other_node)
    (intent,) = queue.claim("controller", now=began, lease=60, limit=1)
    assert times_of(operation) == [(began, began + timedelta(seconds=900))] * 2
    heard = began + timedelta(seconds=100)
    intents.record({(intent.id, intent.fence): [Tick("downloading", "x", 1, 9)]}, now=heard)
    assert times_of(operation) == [(heard, began + timedelta(seconds=900))] * 2
    intents.record_outcomes({(intent.id, intent.fence): (Failed("no answer"), ())}, now=heard)
    assert times_of(operation) == [(None, None)] * 2


def test_a_load_says_the_limit_of_its_step_and_what_has_moved() -> None:
    """A report in which nothing has moved is no news, and the next step has another limit."""
    request = admission.OperationRequest("model_load", "model:m#0", "m", by=Requester("alice"))
    operation = admission.admit(request, now=clock.now()).operation
    began = clock.now()
    (claimed,) = attempts.claim("controller", now=began, lease=60, limit=1)
    attempt, limit = (claimed.id, claimed.fence), began + timedelta(seconds=300)
    later, moved = began + timedelta(seconds=9), began + timedelta(seconds=2)
    progress.record({attempt: [Tick("staging", "sending", 5, 9, progress_at=moved)]}, now=later)
    assert times_of(operation) == [(moved, None)]
    progress.record({attempt: [Tick("loading", "loading m", time_limit_at=limit)]}, now=later)
    assert times_of(operation) == [(later, limit)]
    attempts.release("controller", now=later)
    assert times_of(operation) == [(None, None)]


def times_of(operation: Operation) -> list[tuple[datetime | None, datetime | None]]:
    """Last progress and time limit of the operation and of its parts, as the live list has them."""
    entry = api.admin().get(f"/api/operations/{operation.id}").json()
    moments = [
        [row.get(name) for name in ("lastProgressAt", "timeLimitAt")]
        for row in (entry, *entry.get("nodes", ()))
    ]
    return [
        (heard and datetime.fromisoformat(heard), until and datetime.fromisoformat(until))
        for heard, until in moments
    ]


@pytest.mark.rule("E2", "O59")
def test_nothing_is_paused_and_a_pause_never_cancels() -> None:
    """D-NO-PAUSE."""
    operation = ask(INSTALL, hot.node("one"))
    claim()
    refused = api.admin().post(f"/api/operations/{operation.id}/pause")
    assert (refused.status_code, "cannot be paused" in api.message(refused)) == (409, True)
    operation.refresh_from_db()
    assert (operation.status, PendingBackendOp.objects.get().cancelled_at) == ("processing", None)


@pytest.mark.rule("A68", "A74", "H2", "H4")
def test_a_cancel_survives_every_process() -> None:
    """All there is of an operation is its rows: who reads them finds it ended and nothing to carry out."""
    operation = ask(INSTALL, hot.node("one"))
    cancelled(operation)
    assert claim(9) == []
    assert feed.snapshot().operations == []
    assert [entry["jobID"] for entry in record()] == [str(operation.id)]


WISH: dict[str, Any] = {
    "gallery": "local",
    "uri": "/srv/x",
    "name": "x",
    "alias": "y",
    "galleries": "[1]",
    "force": True,
}


@pytest.mark.rule("E5", "E6", "O23", "O53", "UW31")
def test_a_retry_repeats_the_stored_request_of_its_own_job() -> None:
    """D-RETRY: of two failures with one display id, the other one stays as it is."""
    one, two = hot.node("one"), hot.node("two")
    for node in (one, two):
        ask(INSTALL, node, **WISH)
        settled(Ended(error="no such image"))
    other, mine = Operation.objects.order_by("created_at")
    assert other.element == mine.element
    again = api.admin().post(f"/api/operations/{mine.id}/retry", {}).json()["jobID"]
    newer, intent = Operation.objects.get(pk=again), PendingBackendOp.objects.get()
    assert (newer.payload, newer.kind, newer.node_id) == (mine.payload, INSTALL, two.id)
    assert {name: getattr(intent, name) for name in WISH} == WISH
    assert (intent.backend, intent.node_id) == ("echo", two.id)
    mine.refresh_from_db()
    other.refresh_from_db()
    assert (mine.dismissed_comment, other.dismissed_at) == (f"tried again as operation {again}", None)
