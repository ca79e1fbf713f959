"""Upgrades in waves: replicas of the backend leave the picks and come back; a model's last one stays."""

import threading
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction

from localai_cluster.kit import clock
from nodes.backends import admission, intents
from nodes.backends.intents import Intent
from nodes.models import BackendNode, NodeModel
from nodes.reconcilers import intents as reconciler
from nodes.replicas import drains, engines
from nodes.replicas.states import ReplicaEvent
from operations.models import Operation
from tests.support import api, hot
from tests.support.fleet import at_once
from tests.support.races import holding, waiting
from tests.support.replicas import forget_nodes
from tests.support.waves import asked, claimed, fleet

pytestmark = pytest.mark.django_db(transaction=True)


def on(node: BackendNode, model: str = "m", **fields: Any) -> NodeModel:
    port = 50000 + NodeModel.objects.count()
    return hot.replica(node, model, address=f"127.0.0.1:{port}", backend_type="echo", **fields)


def loaded() -> set[tuple[str, str]]:
    rows = NodeModel.objects.loaded().values_list("node__name", "model_name")
    return set(rows)


def upgrading(node: BackendNode) -> Intent:
    """A claimed intent of an upgrade in waves of this node alone."""
    asked([node])
    return claimed()[node.name]


def test_the_replicas_of_the_backend_leave_the_picks_and_come_back_when_the_attempt_is_over() -> None:
    a, b = fleet("a", "b")
    for node in (a, b):
        on(node)
    on(a, "n", in_flight=2)
    on(b, "n")
    hot.replica(a, "of-another", address="127.0.0.1:1", backend_type="other")
    intent = upgrading(a)
    found = drains.drain_for_upgrade(a.id, "ECHO", intent_id=intent.id, confirmed=(), deadline=clock.now())
    assert found == drains.UpgradeDrain(running=2)
    assert loaded() == {("b", "m"), ("b", "n"), ("a", "of-another")}
    drains.end_upgrade(intent.id, intent.fence + 1)
    assert len(loaded()) == 3, "a later attempt has them now"
    drains.end_upgrade(intent.id, intent.fence)
    assert len(loaded()) == 5
    assert not NodeModel.objects.exclude(owner_kind="").exists()


def test_a_models_last_replica_stays_unless_it_is_confirmed() -> None:
    a, b = fleet("a", "b")
    for node, model in ((a, "alone"), (a, "both"), (b, "both")):
        on(node, model)
    intent = upgrading(a)
    blocked = drains.drain_for_upgrade(
        a.id, "echo", intent_id=intent.id, confirmed=["both"], deadline=clock.now()
    )
    assert blocked == drains.UpgradeDrain(last_of=("alone",))
    assert len(loaded()) == 3, "all of them or none"
    drains.drain_for_upgrade(a.id, "echo", intent_id=intent.id, confirmed=["alone"], deadline=clock.now())
    assert loaded() == {("b", "both")}


def test_a_replica_on_a_node_that_is_away_is_no_other_replica() -> None:
    a, b = fleet("a", "b")
    on(a)
    on(b)
    BackendNode.objects.filter(pk=b.pk).update(offline_at=clock.now())
    assert drains.last_replicas("echo", [a.id, b.id]) == {a.id: {"m"}}


def test_two_nodes_at_once_never_take_out_the_last_two_replicas() -> None:
    for _ in range(5):
        forget_nodes()
        Operation.objects.all().delete()
        for node in (pair := fleet("a", "b")):
            on(node)
        asked(pair, canary=False, max_unavailable=2)
        both = claimed()
        jobs = (
            partial(
                drains.drain_for_upgrade,
                one.node.id,
                "echo",
                intent_id=one.id,
                confirmed=(),
                deadline=clock.now(),
            )
            for one in both.values()
        )
        found = at_once(*jobs)
        assert sorted(one.last_of for one in found) == [(), ("m",)]
        assert len(loaded()) == 1


def test_replicas_of_a_dead_controllers_attempt_serve_again() -> None:
    a, b = fleet("a", "b")
    on(a)
    on(b)
    intent = upgrading(a)
    drains.drain_for_upgrade(a.id, "echo", intent_id=intent.id, confirmed=(), deadline=clock.now())
    reconciler.end_stale_intents(now=clock.now())
    assert len(loaded()) == 1, "the attempt is under way"
    intents.reap(now=clock.now() + timedelta(minutes=5))
    reconciler.end_stale_intents(now=clock.now())
    assert len(loaded()) == 2


def abandoned(node: BackendNode) -> Intent:
    """An upgrade that has drained the node, and whose controller has died since."""
    intent = upgrading(node)
    drains.drain_for_upgrade(node.id, "echo", intent_id=intent.id, confirmed=(), deadline=clock.now())
    intents.reap(now=clock.now() + timedelta(minutes=5))
    return intent


def begin_again() -> drains.UpgradeDrain:
    """Claim the upgrade of node `a` and drain the node."""
    intent = claimed(now=clock.now() + timedelta(minutes=6))["a"]
    return drains.drain_for_upgrade(
        intent.node.id, "echo", intent_id=intent.id, confirmed=(), deadline=clock.now()
    )


def test_an_upgrade_drains_a_replica_that_is_just_being_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the replica serves again while its engine is stopped for the upgrade."""
    a, b = fleet("a", "b")
    on(a)
    on(b)
    abandoned(a)
    begun: list[Any] = []
    beginning = threading.Thread(target=lambda: begun.extend(at_once(begin_again)))

    def apply_event(rows: Any, event: Any, apply_event: Any = engines.apply_event, **columns: Any) -> int:
        if event == ReplicaEvent.RETURNED:
            beginning.start()
            waiting()
        return int(apply_event(rows, event, **columns))

    monkeypatch.setattr(engines, "apply_event", apply_event)
    assert drains.return_without_upgrade() == 1
    beginning.join()
    assert begun == [drains.UpgradeDrain(running=0)]
    assert loaded() == {("b", "m")}


def test_replicas_of_an_upgrade_that_began_during_a_wait_for_their_locks_stay_out() -> None:
    a, b = fleet("a", "b")
    mine = on(a)
    on(b)
    abandoned(a)
    returned: list[Any] = []
    returning = threading.Thread(target=lambda: returned.extend(at_once(drains.return_without_upgrade)))
    with holding("SELECT 1 FROM node_models WHERE id = %s FOR UPDATE", mine.pk):
        returning.start()
        waiting()
        assert claimed(now=clock.now() + timedelta(minutes=6)).keys() == {"a"}
    returning.join()
    assert returned == [0]
    assert loaded() == {("b", "m")}


def test_an_upgrade_waits_for_the_requests_of_replicas_that_an_unload_drains() -> None:
    """It would end them with the engine."""
    a, b = fleet("a", "b")
    on(a, in_flight=3)
    on(b)
    with transaction.atomic():
        drains.drain_for_unload(
            "m", [a.id], index=None, deadline=clock.now(), operation_id=uuid4(), now=clock.now()
        )
    intent = upgrading(a)
    found = drains.drain_for_upgrade(a.id, "echo", intent_id=intent.id, confirmed=(), deadline=clock.now())
    assert found == drains.UpgradeDrain(running=3)


def test_replicas_of_a_cancelled_upgrade_serve_again() -> None:
    a, b = fleet("a", "b")
    on(a)
    on(b)
    operation = asked([a])
    intent = claimed()["a"]
    drains.drain_for_upgrade(a.id, "echo", intent_id=intent.id, confirmed=(), deadline=clock.now())
    admission.cancel(operation.id, actor="bob", now=clock.now())
    called_off = claimed()["a"]
    intents.delete_cancelled({(called_off.id, called_off.fence): "stopped"}, now=clock.now())
    reconciler.end_stale_intents(now=clock.now())
    assert len(loaded()) == 2


def test_a_replica_that_an_unload_has_taken_over_stays_out() -> None:
    a, b = fleet("a", "b")
    mine = on(a)
    on(b)
    intent = upgrading(a)
    drains.drain_for_upgrade(a.id, "echo", intent_id=intent.id, confirmed=(), deadline=clock.now())
    unload: dict[str, Any] = {
        "index": None,
        "deadline": clock.now(),
        "operation_id": uuid4(),
        "now": clock.now(),
    }
    with transaction.atomic():
        (taken,) = drains.drain_for_unload("m", [a.id], **unload)
    assert taken.id == mine.pk
    drains.end_upgrade(intent.id, intent.fence)
    assert loaded() == {("b", "m")}


def test_the_answer_names_last_replicas_until_they_are_confirmed() -> None:
    a, b = fleet("a", "b")
    for node, model in ((a, "alone"), (a, "both"), (b, "both")):
        on(node, model)
    body: dict[str, Any] = {"nodes": [str(a.id), str(b.id)], "waves": {}}
    refused = api.admin().post("/api/backends/upgrade/echo", body)
    assert refused.status_code == 409
    assert (refused.json()["field"], refused.json()["last_replicas"]) == ("last_replicas", ["alone"])
    one = {"backend": "echo", "nodes": body["nodes"]}
    (several,) = (
        api.admin()
        .post("/api/backends/changes", {"verb": "upgrade", "backends": [one], "waves": {}})
        .json()["results"]
    )
    assert several == {"backend": "echo"} | refused.json()
    assert not Operation.objects.exists()
    started = api.admin().post("/api/backends/upgrade/echo", body | {"last_replicas": ["alone"]})
    assert started.status_code == 200, started.content
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert listed["waves"] == {
        "state": "running",
        "open": 0,
        "count": 2,
        "maxUnavailable": 1,
        "canary": True,
        "stopAtFailures": 1,
        "lastReplicas": ["alone"],
    }
    assert {part["node_name"]: part["wave"] for part in listed["nodes"]} == {"b": 0, "a": 1}
