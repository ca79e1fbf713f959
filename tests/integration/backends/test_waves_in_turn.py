"""Upgrades in waves: which nodes have an intent when, and that each wave opens once."""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from localai_cluster.kit.transactions import Lock, try_lock
from nodes.backends import admission, intents, wave_requests
from nodes.backends.backend_requests import RequestScope
from nodes.backends.intents import Ended, Failed, PutBack
from nodes.models import BackendNode, PendingBackendOp
from nodes.reconcilers import intents as reconciler
from operations.changes import events
from operations.changes.feed import as_dict
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.models import Operation, OperationTarget, Status, Waves
from tests.support import api
from tests.support.fleet import at_once
from tests.support.replicas import forget_nodes
from tests.support.waves import ECHO, again, asked, claimed, fleet, settled, states, story

pytestmark = pytest.mark.django_db(transaction=True)


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


@pytest.mark.rule("UI-0.13")
def test_progress_and_claims_are_told_with_the_parts_that_moved_and_ends_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = asked(fleet("a", "b", "c", "d"))
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "publish", told.extend)

    def names() -> list[list[str]]:
        found = [[part["node_name"] for part in change["nodes"]] for change in told]
        told.clear()
        return found

    first = claimed()["a"]
    assert names() == [["a"]]
    intents.record({(first.id, first.fence): [Tick("downloading", percentage=25)]}, now=clock.now())
    assert names() == [["a"]]
    intents.record_overdue(first, "no answer", now=clock.now())
    assert names() == [["a"]]
    settled(first)
    whole = as_dict(again(operation), OperationTarget.objects.filter(operation=operation))
    assert told == [whole], "b waits for its turn no longer"


def test_an_attempt_that_is_repeated_keeps_its_wave_open() -> None:
    operation = asked(fleet("a", "b"))
    settled(*claimed().values(), outcome=Failed("no answer"))
    assert claimed() == {}
    settled(*claimed(now=clock.now() + timedelta(minutes=1)).values(), outcome=PutBack("away"))
    assert states(operation) == {"a": "queued", "b": "queued"}
    settled(*claimed().values())
    assert claimed().keys() == {"b"}


def test_two_controllers_that_end_the_last_parts_of_a_wave_at_once_open_the_next_one_once() -> None:
    for _ in range(5):
        forget_nodes()
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
    reconciler.end_stale_intents(now=clock.now())
    assert again(operation).status == Status.FAILED
    assert "given up" in again(operation).error


def test_an_upgrade_without_waves_is_on_all_nodes_at_once() -> None:
    nodes = fleet("a", "b")
    operation = admission.admit(ECHO, RequestScope(nodes, by=Requester("ann")), now=clock.now()).operation
    found = claimed()
    assert found.keys() == {"a", "b"}
    assert not any(intent.row.spares_requests for intent in found.values())
    assert {wave for wave, _, _ in story(operation).values()} == {None}


def test_a_wave_of_many_nodes_opens_with_as_many_statements_as_one_of_few() -> None:
    counts = []
    for size in (2, 30):
        forget_nodes()
        Operation.objects.all().delete()
        asked(fleet(*(f"node-{number:02}" for number in range(1 + size))), max_unavailable=size)
        (canary,) = claimed().values()
        with CaptureQueriesContext(connection) as made:
            settled(canary)
        counts.append(len(made))
        assert len(claimed()) == size
    assert counts[0] == counts[1]
    assert counts[0] < 30


def test_a_pause_between_two_waves_is_held_by_rows_and_ends_with_the_next_pass() -> None:
    """Its end is the next check of the next wave's targets; a pass before that opens nothing."""
    operation = asked(fleet("a", "b", "c"), pause_seconds=600)
    settled(*claimed().values())
    assert claimed() == {}
    (b,) = OperationTarget.objects.filter(operation=operation, node_name="b")
    assert b.reason.startswith("pause between two waves, until ")
    assert b.next_check_at is not None
    assert abs(b.next_check_at - clock.now() - timedelta(minutes=10)) < timedelta(minutes=1)
    assert again(operation).next_attempt_at == b.next_check_at
    reconciler.end_stale_intents(now=clock.now() + timedelta(minutes=5))
    assert claimed() == {}
    later = clock.now() + timedelta(minutes=11)
    assert at_once(*[partial(reconciler.end_stale_intents, now=later)] * 2) == [0, 0]
    assert claimed(now=later).keys() == {"b"}
    assert PendingBackendOp.objects.count() == 1


def test_a_pass_holds_its_lock_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two passes at once can both skip the same step, because each is at another one."""
    taken: list[bool] = []

    def other() -> bool:
        with try_lock(Lock.STALE_INTENTS) as locked:
            return locked

    def step(now: datetime) -> int:
        return 1

    def steps() -> Iterator[Callable[[datetime], int]]:
        for _ in range(2):
            yield step
            taken.extend(at_once(other))

    monkeypatch.setattr(reconciler, "_STEPS", steps())
    assert reconciler.end_stale_intents(now=clock.now()) == 2
    assert taken == [False, False]
    assert other()


def test_a_pause_is_cut_short_by_stop() -> None:
    operation = asked(fleet("a", "b"), pause_seconds=600)
    settled(*claimed().values())
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    assert states(operation) == {"a": "success", "b": "cancelled"}
    assert again(operation).status == Status.COMPLETED
    reconciler.end_stale_intents(now=clock.now() + timedelta(hours=1))
    assert claimed() == {}


def test_failures_below_the_limit_open_the_next_wave_and_the_one_that_reaches_it_asks() -> None:
    operation = asked(fleet("a", "b", "c", "d"), stop_at_failures=2)
    settled(claimed()["a"], outcome=Ended(error="full"))
    assert again(operation).waves == Waves.RUNNING
    settled(claimed()["b"])
    settled(claimed()["c"], outcome=Ended(error="full"))
    assert again(operation).waves == Waves.ASKS
    assert claimed() == {}


def test_an_install_goes_in_waves_as_well_and_spares_no_requests() -> None:
    nodes = fleet("a", "b")
    body = {
        "ids": [str(node.id) for node in nodes],
        "backend": "other",
        "waves": {"max_unavailable": "50%", "pause_seconds": None},
    }
    answer = api.admin().post("/api/nodes/backends/install", body)
    assert answer.status_code == 202, answer.content
    operation = Operation.objects.get(pk=answer.json()["jobID"])
    waves = operation.payload["waves"]
    assert (waves["max_unavailable"], waves["at_once"]) == ("50%", 1), (
        "as given: a retry may have fewer nodes"
    )
    for name in ("a", "b"):
        found = claimed()
        assert found.keys() == {name}
        assert (found[name].row.op, found[name].row.spares_requests) == ("install", False)
        settled(found[name])
    assert again(operation).status == Status.COMPLETED
    failed = api.admin().post("/api/nodes/backends/install", body | {"backend": "third"}).json()["jobID"]
    settled(*claimed().values(), outcome=Ended(error="full"))
    message = Operation.objects.get(pk=failed).message
    assert "the install failed on a: continue with the next wave, or stop" in message
