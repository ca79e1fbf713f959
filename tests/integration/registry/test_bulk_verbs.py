"""Review R2: a verb over many nodes, an install on many, a verb over many operations: one call each."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from django.db import connection
from django.db.models import CASCADE
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import actors
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import clock
from localai_cluster.kit.leases import LeaseLost
from nodes.backends import intents
from nodes.backends.intents import Ended
from nodes.models import BackendNode, NodeEvent, NodeLabel, NodeModel, PendingBackendOp
from nodes.registry import bulk, change, labels
from operations.executor.executor import OperationQueue
from operations.executor.work import in_thread
from operations.ledger import attempts
from operations.models import Operation, OperationTarget
from tests.support import api, hot
from tests.support.intents import DELETE, INSTALL, UPGRADE, ask, claim

pytestmark = pytest.mark.django_db(transaction=True)


def nodes(count: int, **fields: Any) -> list[BackendNode]:
    return [hot.node(f"node-{number}", **fields) for number in range(count)]


def run(verb: str, on: list[BackendNode], **body: Any) -> Operation:
    """The operation that one call makes."""
    ids = [str(node.id) for node in on]
    answer = api.admin().post("/api/nodes/bulk", {"verb": verb, "ids": ids, **body})
    assert answer.status_code == 202, answer.content
    return Operation.objects.get(pk=answer.json()["jobID"])


@async_to_sync
async def run_controller() -> None:
    """Runs all operations that are due."""
    queue = OperationQueue(dict.fromkeys(bulk.VERBS, bulk.RunOnNodes()))
    for operation in await in_thread(attempts.claim, "one", now=clock.now(), lease=60, limit=9):
        await queue.execute(operation)


def parts(operation: Operation) -> dict[str, tuple[str, str]]:
    rows = OperationTarget.objects.filter(operation=operation)
    return {part.node_name: (part.status, part.error) for part in rows}


def statuses(on: list[BackendNode]) -> list[str]:
    return [BackendNode.objects.get(pk=node.pk).status for node in on]


@pytest.mark.parametrize(
    ("verb", "body", "fields", "after"),
    [
        ("approve", {}, {"approved_at": None, "weak_identity": True}, "healthy"),
        ("reject", {"reason": "unknown machine"}, {"approved_at": None, "weak_identity": True}, "pending"),
        ("drain", {"reason": "new power supply", "deadline_seconds": 600}, {}, "draining"),
        ("resume", {}, {"unhealthy_at": clock.now()}, "healthy"),
    ],
)
def test_a_verb_over_many_nodes_is_one_operation(
    verb: str, body: Mapping[str, Any], fields: Mapping[str, Any], after: str
) -> None:
    """Its caller may be gone: a controller runs it, in the caller's name."""
    three = nodes(3, **fields)
    operation = run(verb, three, **body)
    assert (operation.kind, operation.element, operation.cancellable) == (f"node_{verb}", "3 nodes", True)
    run_controller()
    operation.refresh_from_db()
    assert (operation.status, operation.progress, operation.error) == ("completed", 100, "")
    assert set(parts(operation).values()) == {("success", "")}
    assert statuses(three) == [after] * 3
    events = NodeEvent.objects.filter(node_id__in=[node.id for node in three], actor="static-key")
    assert {event.cause for event in events} == {body.get("reason", "")}
    assert {event.actor_kind for event in events} == {"static_key"}


def test_labels_are_set_and_removed_on_many_nodes() -> None:
    two = nodes(2)
    labels.edit_labels(two[0].id, {"old": "x"}, actor=actors.STATIC_KEY, now=clock.now())
    run("label", two, labels={"tier": "fast"}, remove_labels=["old"])
    run_controller()
    for node in two:
        assert dict(node.label_set.values_list("key", "value")) == {"tier": "fast"}


def test_removed_nodes_are_gone_and_their_parts_say_so() -> None:
    two = nodes(2)
    operation = run("remove", two)
    run_controller()
    assert not BackendNode.objects.exists()
    assert parts(operation) == {"node-0": ("success", ""), "node-1": ("success", "")}


def test_nodes_that_cannot_take_a_verb_are_named_before_anything_starts() -> None:
    two, gone = nodes(2, approved_at=None, weak_identity=True), uuid4()
    approved = hot.node("approved")
    ids = [str(two[0].id), str(two[1].id), str(approved.id), str(gone)]
    body = {"verb": "approve", "ids": ids, "fingerprints": {str(two[0].id): "f" * 64}}
    answer = api.admin().post("/api/nodes/bulk", body)
    assert answer.status_code == 409
    error = answer.json()["error"]
    found = {refusal["node_name"]: (refusal["node_id"], refusal["reason"]) for refusal in error["refusals"]}
    assert found == {
        "node-0": (ids[0], "the fingerprint has changed; review the node again"),
        "approved": (ids[2], "the node is healthy"),
        str(gone): (ids[3], "the node is no longer registered"),
    }
    assert error["field"] == "ids"
    assert all(
        name in error["message"] for name in ("node-0: the fingerprint", "approved: the node is healthy")
    )
    assert not Operation.objects.exists()
    run("approve", [two[1]])
    run_controller()
    assert statuses(two) == ["pending", "healthy"]


def test_a_request_that_joins_is_not_refused_for_what_is_done_already() -> None:
    two = nodes(2, unhealthy_at=clock.now())
    operation = run("resume", two)
    BackendNode.objects.filter(pk=two[0].pk).update(unhealthy_at=None)
    assert run("resume", two).id == operation.id


def test_a_node_that_changes_meanwhile_stops_no_other_and_is_retried_alone() -> None:
    """The refusal is the part's, a node that has gone included; the operation is in the inbox."""
    three = nodes(3, unhealthy_at=clock.now())
    operation = run("resume", three)
    BackendNode.objects.filter(pk=three[0].pk).update(unhealthy_at=None)
    three[2].delete()
    run_controller()
    operation.refresh_from_db()
    assert operation.status == "failed"
    assert parts(operation) == {
        "node-0": ("error", "the node is healthy"),
        "node-1": ("success", ""),
        "node-2": ("error", "node not found"),
    }
    answer = api.admin().post(f"/api/operations/{operation.id}/retry", {"nodes": [str(three[0].id)]})
    again = Operation.objects.get(pk=answer.json()["jobID"])
    assert set(parts(again)) == {"node-0"}
    operation.refresh_from_db()
    assert operation.dismissed_at is None, "the failure on node-2 still needs a decision"
    assert api.admin().post(f"/api/operations/{operation.id}/retry", {}).status_code == 200
    (rest,) = Operation.objects.exclude(pk__in=[operation.pk, again.pk])
    assert (set(parts(rest)), rest.element) == ({"node-2"}, "1 node")
    operation.refresh_from_db()
    assert operation.dismissed_at is not None


def test_failures_are_dismissed_by_node_and_the_operation_with_the_last_of_them() -> None:
    three = nodes(3, unhealthy_at=clock.now())
    operation = run("resume", three)
    BackendNode.objects.update(unhealthy_at=None)
    run_controller()
    url, ids = f"/api/operations/{operation.id}/dismiss", [str(node.id) for node in three]
    answer = api.admin().post(url, {"nodes": ids[:2], "comment": "known"})
    assert answer.status_code == 200, answer.content
    (listed,) = api.admin().get("/api/operations/inbox").json()["operations"]
    assert {part["node_id"] for part in listed["nodes"] if "dismissedAt" in part} == set(ids[:2])
    assert {part["cause"] for part in listed["nodes"]} == {"the node is healthy"}
    refused = api.admin().post(url, {"nodes": [str(uuid4())]})
    assert (refused.status_code, refused.json()["field"]) == (400, "nodes")
    assert api.admin().post(url, {"nodes": ids[2:]}).status_code == 200
    assert api.admin().get("/api/operations/inbox").json()["operations"] == []


def test_the_error_of_the_operation_names_ten_refusals_and_counts_the_others() -> None:
    operation = run("approve", nodes(13, approved_at=None, weak_identity=True))
    BackendNode.objects.update(approved_at=clock.now())
    run_controller()
    operation.refresh_from_db()
    assert operation.error.count("only a pending node can be approved") == 10
    assert operation.error.startswith("node-0: ")
    assert operation.error.endswith(" and 3 more")
    assert len(parts(operation)) == 13


def test_the_same_verb_on_the_same_nodes_is_joined() -> None:
    two = nodes(2)
    assert run("drain", two).id == run("drain", two[::-1]).id
    assert run("drain", two, reason="another").id != run("drain", two).id
    labelled = run("label", two, labels={"tier": "fast", "b": "1"})
    assert labelled.id == run("label", two, labels={"b": "1", "tier": "fast"}).id
    assert run("label", two, labels={"b": "2", "tier": "fast"}).id != labelled.id
    operation = Operation.objects.get(pk=labelled.pk)
    ids = [node.id for node in two]
    key, _ = bulk.key_and_element(operation.kind, operation.payload["options"], ids)
    assert key == operation.key, "the database keeps the labels in another order"


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_attempt_that_is_cut_off_is_continued(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verb and outcome of a node are one transaction: none gets the verb twice."""
    three = nodes(3, approved_at=None, weak_identity=True)
    operation = run("approve", three)
    calls: list[Any] = []
    original = bulk.VERBS[bulk.APPROVE_KIND]

    def counted(*args: Any) -> None:
        original(*args)
        calls.append(args[0])
        if len(calls) == after + 1:
            raise Killed  # after the verb, before the outcome of its part

    monkeypatch.setitem(bulk.VERBS, bulk.APPROVE_KIND, counted)
    with pytest.raises(Killed):
        run_controller()
    operation.refresh_from_db()
    assert (operation.status, sum(status == "healthy" for status in statuses(three))) == ("processing", after)
    attempts.release("one", now=clock.now())
    run_controller()
    operation.refresh_from_db()
    assert (operation.status, statuses(three)) == ("completed", ["healthy"] * 3)


def test_a_cancel_stops_the_nodes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    three = nodes(3)
    operation = run("drain", three)
    cancelled: list[str] = []
    monkeypatch.setattr(bulk, "_run_on_node", _cancelling(operation, bulk._run_on_node, cancelled))
    with pytest.raises(LeaseLost):
        run_controller()
    operation.refresh_from_db()
    assert operation.status == "cancelled"
    assert cancelled == ["2 cancelled, 1 had already finished (by static-key)"]
    assert sorted(status for status, _ in parts(operation).values()) == ["cancelled", "cancelled", "success"]
    assert sorted(statuses(three)) == ["draining", "healthy", "healthy"]


def _cancelling(operation: Operation, run_on_node: Any, answers: list[str]) -> Any:
    """Runs the first node, then an operator cancels."""

    def wrapped(*args: Any) -> None:
        run_on_node(*args)
        answer = api.admin().post(f"/api/operations/{operation.id}/cancel")
        assert answer.status_code == 200
        answers.append(answer.json()["message"])

    return wrapped


@pytest.mark.parametrize(
    "body",
    [
        {"verb": "explode", "ids": [str(uuid4())]},
        {"verb": "drain"},
        {"verb": "drain", "ids": []},
        {"verb": "drain", "ids": ["x"]},
        {"verb": "reject", "ids": [str(uuid4())]},
        {"verb": "reject", "ids": [str(uuid4())], "reason": "  "},
        {"verb": "label", "ids": [str(uuid4())]},
        {"verb": "label", "ids": [str(uuid4())], "labels": {"": "x"}},
        {"verb": "approve", "ids": [str(uuid4())], "fingerprints": {"x": "f" * 64}},
    ],
)
def test_a_request_that_cannot_be_is_400_and_no_operation(body: Any) -> None:
    assert api.admin().post("/api/nodes/bulk", body).status_code == 400
    assert not Operation.objects.exists()


def install(on: list[str], **body: Any) -> Operation:
    answer = api.admin().post("/api/nodes/backends/install", {"ids": on, "backend": "echo", **body})
    assert answer.status_code == 202, answer.content
    return Operation.objects.get(pk=answer.json()["jobID"])


def test_an_install_on_many_nodes_is_one_operation_and_forces_nothing() -> None:
    """What runs there already is joined by its intent."""
    three = nodes(3)
    earlier = ask(INSTALL, three[0])
    operation = install([str(node.id) for node in three])
    assert operation.id != earlier.id
    assert len(parts(operation)) == 3
    assert PendingBackendOp.objects.count() == 3
    assert not PendingBackendOp.objects.filter(force=True).exists()
    again = api.admin().post(
        "/api/nodes/backends/install", {"ids": [str(node.id) for node in three], "backend": "echo"}
    )
    assert (again.json()["jobID"], again.json()["deduplicated"]) == (str(operation.id), True)


def refused_install(on: list[str], **body: Any) -> dict[str, str]:
    """The reasons of a refused install by node."""
    answer = api.admin().post("/api/nodes/backends/install", {"ids": on, "backend": "echo", **body})
    assert answer.status_code == 409, answer.content
    return {refusal["node_name"]: refusal["reason"] for refusal in answer.json()["error"]["refusals"]}


def test_nodes_that_cannot_take_an_install_are_named_before_anything_starts() -> None:
    """A draining one, one that installs from elsewhere, one that has gone; then the others go on."""
    ready, draining, busy = hot.node("ready"), hot.node("draining", drained_at=clock.now()), hot.node("busy")
    earlier = ask(INSTALL, busy, uri="oci://elsewhere/echo")
    claim()
    gone = str(uuid4())
    found = refused_install([str(node.id) for node in (ready, draining, busy)] + [gone])
    assert found.keys() == {"draining", "busy", gone}
    assert found["draining"] == "node draining is draining"
    assert "install echo on busy is in progress" in found["busy"]
    assert found[gone] == "the node is no longer registered"
    assert list(Operation.objects.all()) == [earlier]
    operation = install([str(ready.id)])
    (intent,) = claim()
    intents.record_outcomes({(intent.id, intent.fence): (Ended(), ())}, now=clock.now())
    operation.refresh_from_db()
    assert (operation.status, parts(operation)) == ("completed", {"ready": ("success", "")})


def test_an_install_on_many_nodes_waits_for_an_upgrade_on_one_of_them() -> None:
    """Rows of one node and backend run one at a time, in the order of their requests."""
    ready, busy = hot.node("ready"), hot.node("busy")
    ask(UPGRADE, busy)
    (upgrade,) = claim()
    operation = install([str(node.id) for node in (ready, busy)])
    assert parts(operation) == {"ready": ("queued", ""), "busy": ("queued", "")}
    assert [intent.node.name for intent in claim(9)] == ["ready"]
    intents.record_outcomes({(upgrade.id, upgrade.fence): (Ended(), ())}, now=clock.now())
    assert [intent.node.name for intent in claim(9)] == ["busy"]


def test_a_refused_request_names_its_nodes_with_the_same_number_of_statements() -> None:
    counts = []
    for size in (2, 30):
        on = [str(hot.node(f"{size}-{number}", drained_at=clock.now()).id) for number in range(size)]
        with CaptureQueriesContext(connection) as made:
            assert len(refused_install(on)) == size
        counts.append(len(made))
    assert counts[0] == counts[1]


def bulk_operations(verb: str, *operations: Operation, **body: Any) -> dict[str, Any]:
    ids = [str(operation.id) for operation in operations]
    answer = api.admin().post("/api/operations/bulk", {"verb": verb, "ids": ids, **body})
    assert answer.status_code == 200, answer.content
    counts: dict[str, Any] = answer.json()
    return counts


def test_cancel_all_cancels_what_it_can_and_counts_the_rest() -> None:
    """What ended meanwhile is no refusal; a removal that has begun is."""
    one, two, three = nodes(3)
    waiting, ended, removal = ask(INSTALL, one), ask(INSTALL, two), ask(DELETE, three)
    api.admin().post(f"/api/operations/{ended.id}/cancel")
    for intent in claim(9):
        if intent.row.op == "install":
            intents.release("controller", now=clock.now())
    PendingBackendOp.objects.filter(op="delete").update(lease_owner="x", lease_until=clock.now())
    Operation.objects.filter(pk=removal.pk).update(status="processing")
    unknown = Operation(id=uuid4())
    assert bulk_operations("cancel", waiting, ended, removal, unknown, waiting) == {
        "done": 1,
        "ended": 2,
        "refused": 1,
        "reasons": ["a deletion that has begun cannot be cancelled"],
    }
    assert Operation.objects.get(pk=waiting.pk).status == "cancelled"
    assert bulk_operations("cancel", waiting)["ended"] == 1


def test_failures_are_dismissed_and_retried_together() -> None:
    operations = [ask(INSTALL, node) for node in nodes(2)]
    for intent in claim(9):
        intents.record_outcomes({(intent.id, intent.fence): (Ended(error="disk full"), ())}, now=clock.now())
    assert bulk_operations("dismiss", operations[0], comment="known")["done"] == 1
    assert Operation.objects.get(pk=operations[0].pk).dismissed_comment == "known"
    assert bulk_operations("dismiss", operations[0], comment="again")["done"] == 1
    assert Operation.objects.get(pk=operations[0].pk).dismissed_comment == "known"
    assert bulk_operations("retry", operations[1]) == {"done": 1, "ended": 0, "refused": 0, "reasons": []}
    assert Operation.objects.active().count() == 1


def test_refusals_are_counted_by_their_cause() -> None:
    """Twenty operations with one cause are one reason, which says that it is that of twenty."""
    keys = [f"waiting {number}" for number in range(3)]
    pending = [Operation.objects.create(kind="backend_install", key=key, element="x") for key in keys]
    other = failed_operation("other", status="cancelled")
    answer = bulk_operations("dismiss", other, *pending)
    assert (answer["done"], answer["refused"]) == (0, 4)
    assert answer["reasons"] == [
        "the operation is pending: only a failure can be dismissed (3 operations)",
        "the operation is cancelled: only a failure can be dismissed",
    ]


def test_what_has_not_failed_is_not_dismissed_and_many_cost_as_much_as_one() -> None:
    """What was completed, or has no record, is no refusal. Each dismissal is in the audit log."""
    costs = []
    for size in (2, 30):
        failures = [failed_operation(f"{size} {number}") for number in range(size)]
        with CaptureQueriesContext(connection) as made:
            assert bulk_operations("dismiss", *failures, comment="known")["done"] == size
        costs.append(len(made))
        assert AuditEntry.objects.filter(kind="operation.dismissed", detail="known").count() == size
        AuditEntry.objects.all().delete()
    assert costs[0] == costs[1]
    completed = failed_operation("completed", status="completed")
    cancelled = failed_operation("cancelled", status="cancelled")
    waiting = Operation.objects.create(kind="backend_install", key="waiting", element="x")
    everything = (completed, cancelled, waiting, failed_operation("failed"), Operation(id=uuid4()))
    answer = bulk_operations("dismiss", *everything, completed)
    assert (answer["done"], answer["ended"], answer["refused"]) == (1, 2, 2)
    assert sorted(answer["reasons"]) == [
        f"the operation is {status}: only a failure can be dismissed" for status in ("cancelled", "pending")
    ]
    assert Operation.objects.filter(dismissed_at__isnull=False).count() == 33


def failed_operation(key: str, status: str = "failed") -> Operation:
    values = {"status": status, "finished_at": clock.now()}
    return Operation.objects.create(kind="backend_install", key=key, element="x", **values)


@pytest.mark.rule("R1.21")
@pytest.mark.parametrize("count", [3, 130])
def test_removing_many_nodes_costs_the_same_as_removing_few(
    count: int, django_assert_num_queries: Any
) -> None:
    """Issue 22, item 6: it took one transaction and 47 statements a node. What belongs to them goes too."""
    many, other = nodes(count), hot.node("other")
    all_nodes = [*many, other]
    NodeLabel.objects.bulk_create(NodeLabel(node=node, key="tier") for node in all_nodes)
    PendingBackendOp.objects.bulk_create(
        PendingBackendOp(node=node, backend="echo", op="install", operation_id=uuid4()) for node in all_nodes
    )
    NodeModel.objects.bulk_create(
        NodeModel(
            node=node,
            model_name="echo",
            address="h:2",
            phase="serving",
            vram_on_node=True,
            vram_needed=1,
            loaded_at=clock.now(),
        )
        for node in all_nodes
    )
    with django_assert_num_queries(13):
        removed = change.remove_all(
            BackendNode.objects.exclude(pk=other.pk), actors.STATIC_KEY, now=clock.now()
        )
    assert removed == {node.id for node in many}
    for model in (BackendNode, NodeLabel, PendingBackendOp, NodeModel):
        assert model._default_manager.count() == 1
    assert NodeEvent.objects.filter(kind="deregistered").count() == count
    for relation in BackendNode._meta.related_objects:
        if relation.on_delete is CASCADE:
            assert not relation.related_model._meta.related_objects, "one statement deletes one level only"


def test_a_removal_that_is_cut_off_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes and the outcomes of their targets are one transaction: none is reported as missing afterwards."""
    three = nodes(3)
    operation = run("remove", three)
    monkeypatch.setattr(bulk, "REMOVALS_PER_TRANSACTION", 2)
    original, calls = attempts.end_targets, list[Any]()

    def cut_off(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return original(*args)

    monkeypatch.setattr(attempts, "end_targets", cut_off)
    with pytest.raises(Killed):
        run_controller()
    assert BackendNode.objects.count() == 1
    attempts.release("one", now=clock.now())
    run_controller()
    operation.refresh_from_db()
    assert (operation.status, BackendNode.objects.count()) == ("completed", 0)


@pytest.mark.rule("O34")
@pytest.mark.parametrize("count", [10, 1000])
def test_an_operation_on_many_nodes_costs_the_same_as_on_few(
    count: int, django_assert_num_queries: Any
) -> None:
    """Issue 22, item 6: the answer waits for rows that are written together, and for nothing else."""
    on = BackendNode.objects.bulk_create(
        BackendNode(name=f"n{number}", name_key=f"n{number}", address="h:1", approved_at=clock.now())
        for number in range(count)
    )
    with django_assert_num_queries(17):
        operation = install([str(node.id) for node in on])
    rows = {target.intent_id: target for target in OperationTarget.objects.filter(operation=operation)}
    intents_by_id = PendingBackendOp.objects.in_bulk(rows)
    assert len(intents_by_id) == count
    assert all(intents_by_id[id].node_id == target.node_id for id, target in rows.items() if id is not None)
    assert {(row.status, row.reason, row.waits_for_node) for row in rows.values()} == {
        ("queued", "queued", False)
    }
    as_written, default = intents_by_id.popitem()[1], PendingBackendOp(backend="echo")
    same = ("gallery", "uri", "name", "alias", "force", "attempts", "lease_owner", "lease_until", "fence")
    assert [getattr(as_written, name) for name in same] == [getattr(default, name) for name in same]
