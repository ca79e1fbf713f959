"""Upgrades in waves on real rows: which parts have an intent when, what failures and choices do."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster import clock, errors
from localai_cluster.accounts import actors
from nodes.backends import admission, intents, wave_requests, wishes
from nodes.backends.intents import Ended, Failed, Intent, PutBack
from nodes.backends.wave_plan import Options
from nodes.backends.wishes import DELETE, UPGRADE, Asked, Wish
from nodes.models import BackendNode, NodeModel, PendingBackendOp
from nodes.reconcilers import intents as reconciler
from nodes.registry import services
from nodes.replicas import withdrawn
from operations import targets
from operations.models import Operation, OperationTarget, Status, Waves
from tests.support import api, hot
from tests.support.effort import EFFORT
from tests.support.fleet import at_once, unexpected

pytestmark = pytest.mark.django_db(transaction=True)

ECHO = Wish(UPGRADE, "echo")


def fleet(*names: str) -> list[BackendNode]:
    return [hot.node(name) for name in names]


def asked(nodes: Sequence[BackendNode], **options: Any) -> Operation:
    """An upgrade of echo in waves."""
    wanted = Asked(nodes, actor="ann", waves=Options(**options))
    return admission.ask(ECHO, wanted, now=clock.now()).operation


def claimed(owner: str = "controller", *, now: datetime | None = None) -> dict[str, Intent]:
    """What a controller takes up now, by node."""
    found = intents.claim(owner, now=now or clock.now(), lease=60, limit=100)
    return {intent.node.name: intent for intent in found}


def settled(*found: Intent, outcome: Any = None) -> None:
    written = intents.settle(
        {(one.id, one.fence): (outcome or Ended(), ()) for one in found}, now=clock.now()
    )
    assert not written


def story(operation: Operation) -> dict[str, tuple[int | None, str, str]]:
    rows = OperationTarget.objects.filter(operation=operation)
    return {part.node_name: (part.wave, part.status, part.reason) for part in rows}


def states(operation: Operation) -> dict[str, str]:
    return {name: status for name, (_, status, _) in story(operation).items()}


def again(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def test_only_the_open_wave_has_intents_and_the_others_say_what_they_wait_for() -> None:
    operation = asked(fleet("a", "b", "c", "d"), max_unavailable=2)
    assert {intent.node.name for intent in PendingBackendOp.objects.all()} == {"a"}
    assert story(operation) == {
        "a": (0, "queued", "queued"),
        "b": (1, "queued", "waits for wave 2 of 3"),
        "c": (1, "queued", "waits for wave 2 of 3"),
        "d": (2, "queued", "waits for wave 3 of 3"),
    }
    assert operation.message == "wave 1 of 3: 0 of 4 nodes done"
    assert (operation.waves, operation.open_wave) == (Waves.RUNNING, 0)


def test_the_transaction_that_ends_a_wave_opens_the_next() -> None:
    operation = asked(fleet("a", "b", "c", "d"), max_unavailable=2)
    settled(*claimed().values())
    second = claimed()
    assert second.keys() == {"b", "c"}
    settled(second["b"])
    assert claimed() == {}, "a wave opens when the whole one before it has ended"
    assert again(operation).message == "wave 2 of 3: 2 of 4 nodes done"
    settled(second["c"])
    settled(claimed()["d"])
    ended = again(operation)
    assert (ended.status, ended.message, ended.waves) == (Status.COMPLETED, "completed", Waves.RUNNING)
    assert set(states(operation).values()) == {"success"}


def test_an_attempt_that_is_repeated_keeps_its_wave_open() -> None:
    operation = asked(fleet("a", "b"))
    settled(*claimed().values(), outcome=Failed("no answer"))
    assert claimed() == {}
    settled(*claimed(now=clock.now() + timedelta(minutes=1)).values(), outcome=PutBack("away"))
    assert states(operation) == {"a": "queued", "b": "queued"}
    settled(*claimed().values())
    assert claimed().keys() == {"b"}


def failed_canary() -> Operation:
    operation = asked(fleet("a", "b", "c"))
    settled(*claimed().values(), outcome=Ended(error="no such image"))
    return again(operation)


def test_a_failed_wave_stops_the_rest_and_asks() -> None:
    operation = failed_canary()
    reason = "the upgrade failed on a: continue with the next wave, or stop"
    assert (operation.status, operation.waves) == (Status.PENDING, Waves.ASKS)
    assert operation.message == f"wave 2 of 3: 0 of 3 nodes done, 1 failed; {reason}"
    assert story(operation)["c"] == (2, "queued", reason)
    assert not PendingBackendOp.objects.exists()
    reconciler.clean(now=clock.now() + timedelta(hours=1))
    assert again(operation).waves == Waves.ASKS, "time alone decides nothing"


def test_stop_after_a_failed_canary_ends_the_rest_as_cancelled_and_the_operation_as_failed() -> None:
    operation = failed_canary()
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    ended = again(operation)
    assert (ended.status, ended.error) == (Status.FAILED, "a: no such image")
    assert ended.waves == Waves.STOPPED
    assert story(operation)["b"][1:] == ("cancelled", "stopped by bob")
    with pytest.raises(errors.Conflict, match="the operation is failed"):
        wave_requests.choose(operation.id, "continue", actor="bob", now=clock.now())


def test_continue_after_a_failed_canary_opens_the_next_wave_and_asks_again_after_another_failure() -> None:
    operation = failed_canary()
    wave_requests.choose(operation.id, "continue", actor="bob", now=clock.now())
    assert (again(operation).waves, again(operation).open_wave) == (Waves.CONTINUED, 1)
    assert story(operation)["c"] == (2, "queued", "waits for wave 3 of 3")
    settled(claimed()["b"], outcome=Ended(error="full"))
    assert again(operation).waves == Waves.ASKS
    wave_requests.choose(operation.id, "continue", actor="eve", now=clock.now())
    settled(claimed()["c"])
    ended = again(operation)
    assert (ended.status, ended.error) == (Status.FAILED, "a: no such image; b: full")
    assert states(operation)["c"] == "success"
    made = [(said["choice"], said["by"]) for said in ended.payload["waves"]["choices"]]
    assert made == [("continue", "bob"), ("continue", "eve")]


def test_the_last_wave_fails_without_a_question() -> None:
    operation = asked(fleet("a", "b"))
    settled(claimed()["a"])
    settled(claimed()["b"], outcome=Ended(error="full"))
    assert (again(operation).status, again(operation).waves) == (Status.FAILED, Waves.RUNNING)


def test_stop_while_a_wave_runs_lets_that_wave_end() -> None:
    operation = asked(fleet("a", "b", "c"))
    canary = claimed()["a"]
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    assert states(operation) == {"a": "running_on_worker", "b": "cancelled", "c": "cancelled"}
    settled(canary)
    assert again(operation).status == Status.COMPLETED
    assert not PendingBackendOp.objects.exists()


def test_what_cannot_be_chosen_is_refused() -> None:
    now = clock.now()
    nodes = fleet("a", "b")
    plain = admission.ask(Wish(UPGRADE, "other"), Asked(nodes, actor="ann"), now=now).operation
    with pytest.raises(errors.Conflict, match="does not go in waves"):
        wave_requests.choose(plain.id, "stop", actor="bob", now=now)
    operation = asked(nodes)
    with pytest.raises(errors.Conflict, match="no wave has failed"):
        wave_requests.choose(operation.id, "continue", actor="bob", now=now)
    wave_requests.choose(operation.id, "stop", actor="bob", now=now)
    with pytest.raises(errors.Conflict, match="was stopped"):
        wave_requests.choose(operation.id, "stop", actor="bob", now=now)


def test_cancel_in_wave_2_is_final() -> None:
    operation = asked(fleet("a", "b", "c"))
    settled(*claimed().values())
    second = claimed()
    admission.cancel(operation.id, actor="bob", now=clock.now())
    assert states(operation) == {"a": "success", "b": "cancelled", "c": "cancelled"}
    late = intents.settle({(second["b"].id, second["b"].fence): (Ended(), ())}, now=clock.now())
    assert late, "the late answer changes nothing"
    called_off = claimed()["b"]
    intents.called_off({(called_off.id, called_off.fence): "the worker stopped"}, now=clock.now())
    assert (again(operation).status, again(operation).open_wave) == (Status.CANCELLED, 1)
    assert not PendingBackendOp.objects.exists()
    reconciler.clean(now=clock.now() + timedelta(hours=1))
    assert not PendingBackendOp.objects.exists()


def test_two_controllers_that_end_the_last_parts_of_a_wave_at_once_open_the_next_one_once() -> None:
    for _ in range(5):
        BackendNode.objects.all().delete()
        Operation.objects.all().delete()
        operation = asked(fleet("a", "b", "c", "d"), max_unavailable=2, canary=False)
        first = claimed()
        assert first.keys() == {"a", "b"}
        assert at_once(*(partial(settled, one) for one in first.values())) == [None, None]
        assert again(operation).open_wave == 2
        assert sorted(i.node.name for i in PendingBackendOp.objects.select_related("node")) == ["c", "d"]


def test_a_controller_that_dies_between_waves_leaves_work_for_the_next_one() -> None:
    operation = asked(fleet("a", "b"))
    settled(*claimed("one").values())
    assert claimed("one").keys() == {"b"}
    assert intents.reap(now=clock.now() + timedelta(minutes=5)) == (1, 0)
    settled(*claimed("two", now=clock.now() + timedelta(minutes=5)).values())
    assert again(operation).status == Status.COMPLETED


def test_a_node_that_was_removed_before_its_wave_fails_the_wave() -> None:
    nodes = fleet("a", "b", "c")
    operation = asked(nodes)
    nodes[1].delete()
    settled(*claimed().values())
    rows = {part.node_name: part for part in OperationTarget.objects.filter(operation=operation)}
    assert rows["b"].error == "node b was removed"
    assert again(operation).waves == Waves.ASKS
    wave_requests.choose(operation.id, "continue", actor="bob", now=clock.now())
    assert claimed().keys() == {"c"}


def test_a_node_that_is_away_goes_last_and_waits_with_its_reason() -> None:
    nodes = fleet("a", "b")
    BackendNode.objects.filter(pk=nodes[0].pk).update(offline_at=clock.now())
    operation = asked([BackendNode.objects.get(pk=node.pk) for node in nodes])
    settled(claimed()["b"])
    assert story(operation)["a"][2] == "node a is offline"
    assert again(operation).status == Status.WAITING


def test_a_node_that_is_given_up_while_it_is_away_ends_its_wave() -> None:
    nodes = fleet("a", "b")
    operation = asked(nodes)
    settled(claimed()["a"])
    gone = clock.now() - timedelta(days=2)
    BackendNode.objects.filter(pk=nodes[1].pk).update(offline_at=gone, last_heartbeat=gone)
    reconciler.clean(now=clock.now())
    assert again(operation).status == Status.FAILED
    assert "given up" in again(operation).error


def test_a_part_waits_for_other_work_on_its_node_and_begins_after_it() -> None:
    nodes = fleet("a", "b")
    operation = asked(nodes)
    canary = claimed()["a"]
    admission.ask(Wish(wishes.INSTALL, "echo"), Asked([nodes[1]], actor="eve"), now=clock.now())
    settled(canary)
    assert story(operation)["b"][2] == "other work on this backend has not ended on b"
    assert again(operation).open_wave == 1
    install = claimed()["b"]
    assert install.row.op == "install"
    later = clock.now() + timedelta(minutes=1)
    reconciler.clean(now=later)
    assert story(operation)["b"][2] == "other work on this backend has not ended on b"
    settled(install)
    reconciler.clean(now=later + timedelta(minutes=1))
    upgrade = claimed(now=later + timedelta(minutes=1))["b"]
    assert (upgrade.row.op, upgrade.row.spares_requests) == ("upgrade", True)
    settled(upgrade)
    assert again(operation).status == Status.COMPLETED


def test_a_deletion_takes_over_the_parts_that_wait_for_their_wave() -> None:
    nodes = fleet("a", "b", "c")
    operation = asked(nodes)
    canary = claimed()["a"]
    newer = admission.ask(Wish(DELETE, "echo"), Asked(nodes[1:], actor="eve"), now=clock.now()).operation
    reason = f"superseded by backend_delete of echo (operation {newer.id})"
    assert story(operation)["b"][1:] == ("superseded", reason)
    settled(canary)
    assert again(operation).status == Status.COMPLETED
    assert {i.op for i in PendingBackendOp.objects.all()} == {"delete"}


def test_the_same_request_joins_and_one_with_other_waves_is_refused() -> None:
    nodes = fleet("a", "b")
    operation = asked(nodes)
    wanted = Asked(nodes, actor="eve", waves=Options())
    joined = admission.ask(ECHO, wanted, now=clock.now())
    assert (joined.operation.id, joined.created) == (operation.id, False)
    for other in (Options(max_unavailable=2), Options(canary=False), None):
        with pytest.raises(errors.Conflict, match="with other waves"):
            admission.ask(ECHO, replace(wanted, waves=other), now=clock.now())


def test_a_retry_of_a_failed_upgrade_goes_in_waves_again() -> None:
    operation = asked(fleet("a", "b", "c"), max_unavailable=1)
    settled(claimed()["a"])
    settled(claimed()["b"], outcome=Ended(error="full"))
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    newer = admission.retry(operation.id, asked_by=Asked([], actor="bob"), now=clock.now()).operation
    assert {name: wave for name, (wave, _, _) in story(newer).items()} == {"b": 0, "c": 1}


def test_an_upgrade_without_waves_is_on_all_nodes_at_once() -> None:
    nodes = fleet("a", "b")
    operation = admission.ask(ECHO, Asked(nodes, actor="ann"), now=clock.now()).operation
    found = claimed()
    assert found.keys() == {"a", "b"}
    assert not any(intent.row.spares_requests for intent in found.values())
    assert {wave for wave, _, _ in story(operation).values()} == {None}


# Replicas: out of the picks, and back.


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
    found = withdrawn.withdraw(a.id, "ECHO", intent_id=intent.id, confirmed=())
    assert found == withdrawn.Withdrawal(running=2)
    assert loaded() == {("b", "m"), ("b", "n"), ("a", "of-another")}
    withdrawn.put_back(intent.id, intent.fence + 1)
    assert len(loaded()) == 3, "a later attempt has them now"
    withdrawn.put_back(intent.id, intent.fence)
    assert len(loaded()) == 5
    assert not NodeModel.objects.filter(withdrawn_for__isnull=False).exists()


def test_a_models_last_replica_stays_unless_it_is_confirmed() -> None:
    a, b = fleet("a", "b")
    for node, model in ((a, "alone"), (a, "both"), (b, "both")):
        on(node, model)
    intent = upgrading(a)
    blocked = withdrawn.withdraw(a.id, "echo", intent_id=intent.id, confirmed=["both"])
    assert blocked == withdrawn.Withdrawal(last_of=("alone",))
    assert len(loaded()) == 3, "all of them or none"
    withdrawn.withdraw(a.id, "echo", intent_id=intent.id, confirmed=["alone"])
    assert loaded() == {("b", "both")}


def test_a_replica_on_a_node_that_is_away_is_no_other_replica() -> None:
    a, b = fleet("a", "b")
    on(a)
    on(b)
    BackendNode.objects.filter(pk=b.pk).update(offline_at=clock.now())
    assert withdrawn.last_replicas("echo", [a.id, b.id]) == {a.id: {"m"}}


def test_two_nodes_at_once_never_take_out_the_last_two_replicas() -> None:
    for _ in range(5):
        BackendNode.objects.all().delete()
        Operation.objects.all().delete()
        for node in (pair := fleet("a", "b")):
            on(node)
        asked(pair, canary=False, max_unavailable=2)
        both = claimed()
        jobs = (
            partial(withdrawn.withdraw, one.node.id, "echo", intent_id=one.id, confirmed=())
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
    withdrawn.withdraw(a.id, "echo", intent_id=intent.id, confirmed=())
    reconciler.clean(now=clock.now())
    assert len(loaded()) == 1, "the attempt is under way"
    intents.reap(now=clock.now() + timedelta(minutes=5))
    reconciler.clean(now=clock.now())
    assert len(loaded()) == 2


def test_replicas_of_a_cancelled_upgrade_serve_again() -> None:
    a, b = fleet("a", "b")
    on(a)
    on(b)
    operation = asked([a])
    intent = claimed()["a"]
    withdrawn.withdraw(a.id, "echo", intent_id=intent.id, confirmed=())
    admission.cancel(operation.id, actor="bob", now=clock.now())
    called_off = claimed()["a"]
    intents.called_off({(called_off.id, called_off.fence): "stopped"}, now=clock.now())
    reconciler.clean(now=clock.now())
    assert len(loaded()) == 2


def test_a_replica_that_an_unload_has_taken_over_stays_out() -> None:
    a, b = fleet("a", "b")
    mine = on(a)
    on(b)
    intent = upgrading(a)
    withdrawn.withdraw(a.id, "echo", intent_id=intent.id, confirmed=())
    NodeModel.objects.filter(pk=mine.pk).update(loading_by="an unload")
    withdrawn.put_back(intent.id, intent.fence)
    assert loaded() == {("b", "m")}


# The API.


def test_the_answer_names_last_replicas_until_they_are_confirmed() -> None:
    a, b = fleet("a", "b")
    for node, model in ((a, "alone"), (a, "both"), (b, "both")):
        on(node, model)
    body: dict[str, Any] = {"nodes": [str(a.id), str(b.id)], "waves": {}}
    refused = api.admin().post("/api/backends/upgrade/echo", body)
    assert refused.status_code == 409
    assert (refused.json()["field"], refused.json()["last_replicas"]) == ("last_replicas", ["alone"])
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
        "lastReplicas": ["alone"],
    }
    assert {part["node_name"]: part["wave"] for part in listed["nodes"]} == {"b": 0, "a": 1}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"waves": {"max_unavailable": 0}}, "waves"),
        ({"waves": {"max_unavailable": "1"}}, "waves"),
        ({"waves": {"canary": "perhaps"}}, "waves"),
        ({"waves": []}, "waves"),
        ({"waves": {}, "last_replicas": "m"}, "last_replicas"),
        ({"waves": {}, "last_replicas": [1]}, "last_replicas"),
        ({"last_replicas": ["m"]}, "last_replicas"),
    ],
)
def test_what_is_wrong_with_waves_is_named(body: dict[str, Any], field: str) -> None:
    fleet("a")
    refused = api.admin().post("/api/backends/upgrade/echo", body)
    assert (refused.status_code, refused.json()["field"]) == (400, field)


def test_the_choice_is_made_by_the_api() -> None:
    operation = failed_canary()
    url = f"/api/operations/{operation.id}/waves"
    assert api.admin().post(url, {"choice": "later"}).status_code == 400
    assert api.admin().post(url, {}).status_code == 400
    assert api.admin().post(url, {"choice": "continue"}).json() == {"success": True, "message": "goes on"}
    assert claimed().keys() == {"b"}
    assert api.admin().post(url, {"choice": "continue"}).status_code == 409
    assert api.admin().post(url, {"choice": "stop"}).json() == {"success": True, "message": "stopped"}
    assert api.admin().post("/api/operations/nope/waves", {"choice": "stop"}).status_code == 404


def test_a_confirmation_that_comes_later_is_kept_and_the_part_looked_at_now() -> None:
    a, _ = fleet("a", "b")
    operation = asked([a])
    settled(*claimed().values(), outcome=PutBack("it would stop the last replica of m", 15))
    assert claimed() == {}
    answer = api.admin().post(
        f"/api/operations/{operation.id}/waves", {"choice": "continue", "last_replicas": ["m"]}
    )
    assert answer.status_code == 200, answer.content
    assert wave_requests.confirmed_in(again(operation)) == ("m",)
    assert claimed().keys() == {"a"}


def test_a_wave_of_many_nodes_opens_with_as_many_statements_as_one_of_few() -> None:
    counts = []
    for size in (2, 30):
        BackendNode.objects.all().delete()
        Operation.objects.all().delete()
        asked(fleet(*(f"node-{number:02}" for number in range(1 + size))), max_unavailable=size)
        (canary,) = claimed().values()
        with CaptureQueriesContext(connection) as made:
            settled(canary)
        counts.append(len(made))
        assert len(claimed()) == size
    assert counts[0] == counts[1]
    assert counts[0] < 30


BACKENDS = ("echo", "mock")


def meddles(seed: int, nodes: Sequence[BackendNode]) -> None:
    """One of several that do everything at once to the same nodes; only refusals are allowed."""
    random = Random(seed)
    for _ in range(15 * EFFORT):
        now = clock.now() + timedelta(minutes=random.randint(0, 1))
        there = list(BackendNode.objects.filter(pk__in=[node.pk for node in nodes]).order_by("name"))
        some = random.sample(there, min(3, len(there)))
        backend, ids = random.choice(BACKENDS), list(Operation.objects.active().values_list("pk", flat=True))
        acts: list[Callable[[], Any]] = [
            partial(in_waves, backend, some, now),
            partial(admission.ask, Wish(DELETE, backend), Asked(some, actor="eve"), now=now),
            partial(carries_out, random, now),
            partial(carries_out, random, now),
            partial(reconciler.clean, now=now),
        ]
        if ids:
            chosen, id = random.choice(wave_requests.CHOICES), random.choice(ids)
            acts.append(partial(wave_requests.choose, id, chosen, last_replicas=["m"], actor="bob", now=now))
            acts.append(partial(admission.cancel, id, actor="bob", now=now))
        if seed == 0 and len(there) > 3 and random.random() < 0.2:
            acts = [partial(services.deregister, there[-1].pk, actor=actors.CONTROLLER, now=now)]
        with suppress(errors.ClusterError):
            random.choice(acts)()


def in_waves(backend: str, nodes: Sequence[BackendNode], now: datetime) -> None:
    wanted = Asked(nodes, actor="ann", waves=Options(max_unavailable=2))
    admission.ask(Wish(UPGRADE, backend), wanted, now=now)


def carries_out(random: Random, now: datetime) -> None:
    outcomes = (Ended(), Ended(), Ended(error="no"), PutBack("away"))
    found = intents.claim("controller", now=now, lease=60, limit=3)
    called_off = {(one.id, one.fence): "stopped" for one in found if one.row.cancelled_at}
    others = {(one.id, one.fence): (random.choice(outcomes), ()) for one in found if not one.row.cancelled_at}
    intents.called_off(called_off, now=now)
    intents.settle(others, now=now)


@pytest.mark.rule("A78")
def test_whatever_happens_at_once_nothing_hangs_and_everything_ends() -> None:
    nodes = fleet(*"abcdef")
    found = unexpected(at_once(*(partial(meddles, seed, nodes) for seed in range(4))))
    assert found == []
    now = clock.now()
    for _ in range(100):
        now += timedelta(minutes=2)
        intents.reap(now=now)
        reconciler.clean(now=now)
        found = intents.claim("last", now=now, lease=30, limit=100)
        intents.called_off({(i.id, i.fence): "" for i in found if i.row.cancelled_at}, now=now)
        done = {(i.id, i.fence): (Ended(), ()) for i in found if not i.row.cancelled_at}
        intents.settle(done, now=now)
        for asks in Operation.objects.active().filter(waves=Waves.ASKS):
            wave_requests.choose(asks.pk, "continue", actor="bob", now=now)
        if not Operation.objects.active().exists():
            break
    left = [(one.waves, one.message, story(one)) for one in Operation.objects.active()]
    assert left == []
    assert not PendingBackendOp.objects.exists()
    ended = OperationTarget.objects.exclude(status__in=targets.ENDED)
    assert not ended.exists()


def test_a_new_upgrade_takes_over_what_is_left_of_one_that_lost_a_node_to_a_deletion() -> None:
    nodes = fleet("a", "b", "c")
    older = asked(nodes)
    admission.ask(Wish(DELETE, "echo"), Asked([nodes[0]], actor="eve"), now=clock.now())
    assert states(older) == {"a": "superseded", "b": "queued", "c": "queued"}
    newer = asked(nodes)
    assert newer.id != older.id
    assert set(states(older).values()) == {"superseded"}
    assert story(newer)["c"] == (2, "queued", "waits for wave 3 of 3")


def test_a_cancel_that_meets_the_opening_of_a_wave_leaves_no_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intents were read before the wave opened: the cancel begins again."""
    operation = asked(fleet("a", "b", "c"))
    really = admission._running
    read: list[Any] = []

    def running(*asked: Any) -> Any:
        found = really(*asked)
        if not read:
            settled(*claimed().values())  # the canary ends here, and the next wave opens
        read.append(found)
        return found

    monkeypatch.setattr(admission, "_running", running)
    admission.cancel(operation.id, actor="ann", now=clock.now())
    assert again(operation).status == "cancelled"
    assert not PendingBackendOp.objects.exists()
    assert len(read) > 2


def test_an_install_on_the_nodes_of_an_upgrade_that_asks_takes_over_what_has_not_begun() -> None:
    """The upgrade owns the key of these nodes; it must not keep them until someone decides."""
    nodes = fleet("a", "b")
    operation = asked(nodes)
    settled(*claimed().values(), outcome=Ended(error="no such image"))
    assert again(operation).waves == Waves.ASKS
    newer = admission.ask(
        Wish("backend_install", "echo"), Asked(nodes, actor="bob"), now=clock.now()
    ).operation
    assert states(operation) == {"a": "error", "b": "superseded"}
    assert str(newer.id) in story(operation)["b"][2]
    assert states(newer) == {"a": "queued", "b": "queued"}


def test_an_intent_that_no_operation_asks_for_is_not_carried_out() -> None:
    operation = asked(fleet("a"))
    OperationTarget.objects.filter(operation=operation).update(status="cancelled")
    assert reconciler.clean(now=clock.now()) == 1
    assert not PendingBackendOp.objects.exists()
