"""Installs, upgrades and deletions on the whole cluster by REST (`contract/http-api.md` §4.2): where."""

from typing import Any

import pytest

from localai_cluster.kit import clock
from nodes.backends import intents
from nodes.backends.intents import Ended
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from nodes.reconcilers import intents as passes
from operations.models import Operation
from tests.support import api, hot
from tests.support.intents import claim

pytestmark = pytest.mark.django_db


def asked(verb: str, name: str = "echo") -> Operation:
    answer = api.admin().post(f"/api/backends/{verb}/{name}", {})
    assert answer.status_code == 200, answer.content
    body = answer.json()
    assert body["statusUrl"] == f"/api/backends/job/{body['jobID']}"
    assert (body["uuid"], bool(body["message"])) == (body["jobID"], True)
    return Operation.objects.get(pk=body["jobID"])


def listed() -> dict[str, Any]:
    (entry,) = api.admin().get("/api/operations").json()["operations"]
    return dict(entry)


def names(operation: Operation) -> list[str]:
    return list(operation.targets.values_list("node_name", flat=True))


def has(node: BackendNode) -> BackendNode:
    """A node that lists the backend."""
    NodeBackend.objects.create(node=node, name="echo")
    return node


@pytest.mark.rule("A2", "A26", "A28", "O1", "O10", "O13", "O14")
def test_an_install_has_a_part_for_every_node_that_may_get_it_and_for_no_other() -> None:
    """D-DRAINING: an agent gets no intent and keeps its status, however often the passes look."""
    agent = hot.node("agent", node_type="agent", address="")
    hot.node("pending", approved_at=None)
    hot.node("draining", drained_at=clock.now())
    away, one = hot.node("away", offline_at=clock.now(), last_heartbeat=clock.now()), hot.node("one")
    operation = asked("install", "local@echo")
    assert names(operation) == ["away", "draining", "one"]
    rows = PendingBackendOp.objects.order_by("node__name")
    assert [(row.node_id, row.gallery, row.force) for row in rows] == [
        (away.id, "local", False),
        (one.id, "local", False),
    ]
    entry = listed()
    assert "nodeID" not in entry
    assert (entry["name"], entry["allNodes"]) == ("echo", True)
    assert {part["node_name"]: part["status"] for part in entry["nodes"]} == {
        "away": "queued",
        "draining": "cancelled",
        "one": "queued",
    }
    for _ in range(10):
        for intent in claim(9):
            assert intent.node.name == "one"
            intents.record_outcomes(
                {(intent.id, intent.fence): (intents.PutBack("late"), ())}, now=clock.now()
            )
        passes.end_stale_intents(now=clock.now())
        passes.refresh_reasons(None, now=clock.now())
    assert PendingBackendOp.objects.count() == 2
    agent.refresh_from_db()
    assert (agent.status, agent.pending_ops.count()) == ("healthy", 0)


@pytest.mark.rule("A26", "O13")
def test_on_one_node_that_is_all_there_is_it_is_for_no_node_in_particular() -> None:
    hot.node("one")
    operation = asked("install")
    assert (operation.node_id, "nodeID" in listed()) == (None, False)


@pytest.mark.parametrize("verb", ["upgrade", "delete"])
@pytest.mark.rule("A83", "O17", "O18")
def test_an_upgrade_or_deletion_is_for_the_nodes_that_have_it(verb: str) -> None:
    """The other node is not asked, so it cannot fail it; the answer names where it was."""
    has(hot.node("one"))
    hot.node("two")
    operation = asked(verb)
    (intent,) = claim(9)
    intents.record_outcomes({(intent.id, intent.fence): (Ended(reason="removed"), ())}, now=clock.now())
    operation.refresh_from_db()
    assert (operation.status, names(operation)) == ("completed", ["one"])
    job = api.admin().get(f"/api/backends/job/{operation.id}").json()
    assert [(part["node_name"], part["status"]) for part in job["nodes"]] == [("one", "success")]


@pytest.mark.rule("A2", "O13", "R6.18")
def test_a_node_that_is_draining_is_named_with_the_reason_and_can_be_asked_later() -> None:
    """It was left out in silence: nothing said that a node lacks what was installed on all."""
    hot.node("one")
    draining = hot.node("two", drained_at=clock.now())
    operation = asked("install")
    (intent,) = claim(9)
    intents.record_outcomes({(intent.id, intent.fence): (Ended(), ())}, now=clock.now())
    operation.refresh_from_db()
    assert (operation.status, operation.message) == ("completed", "completed, cancelled on 1 of 2 nodes")
    left = operation.targets.get(node_id=draining.id)
    assert (left.status, left.reason.partition(";")[0]) == ("cancelled", "left out: two is draining")
    retry = f"/api/operations/{operation.id}/retry"
    assert api.admin().post(retry).status_code == 409
    BackendNode.objects.update(drained_at=None)
    newer = Operation.objects.get(pk=api.admin().post(retry).json()["jobID"])
    assert names(newer) == ["two"]


@pytest.mark.parametrize("verb", ["install", "upgrade", "delete"])
@pytest.mark.rule("A2", "O13")
def test_where_all_nodes_are_draining_somebody_has_to_decide(verb: str) -> None:
    has(hot.node("one", drained_at=clock.now()))
    operation = asked(verb)
    assert (operation.status, names(operation)) == ("failed", ["one"])
    assert "one is draining" in operation.error


@pytest.mark.rule("O18")
def test_a_deletion_waits_for_a_node_that_had_it_and_is_down() -> None:
    has(hot.node("away", offline_at=clock.now(), last_heartbeat=clock.now()))
    operation = asked("delete")
    assert (operation.status, names(operation)) == ("waiting_for_nodes", ["away"])


@pytest.mark.rule("O17", "O21")
def test_an_upgrade_of_what_no_node_has_fails_and_says_so() -> None:
    hot.node("one")
    operation = asked("upgrade")
    assert (operation.status, operation.error) == ("failed", "no eligible node")
    assert listed()["error"] == "no eligible node"
