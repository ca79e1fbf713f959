"""Upgrades in waves beside installs, deletions and other upgrades of the same nodes."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import pytest

from localai_cluster.accounts import actors
from localai_cluster.kit import clock, errors
from nodes.backends import admission, backend_requests, intents, wave_requests
from nodes.backends.backend_requests import DELETE, UPGRADE, BackendRequest, RequestScope
from nodes.backends.intents import Ended, PutBack
from nodes.backends.waves import Options
from nodes.models import BackendNode, PendingBackendOp
from nodes.reconcilers import intents as reconciler
from nodes.registry import lifecycle
from operations import targets
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget, Status, Waves
from tests.support.effort import EFFORT
from tests.support.fleet import at_once, unexpected
from tests.support.waves import ECHO, again, asked, claimed, fleet, settled, states, story

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_part_waits_for_other_work_on_its_node_and_begins_after_it() -> None:
    nodes = fleet("a", "b")
    operation = asked(nodes)
    canary = claimed()["a"]
    admission.admit(
        BackendRequest(backend_requests.INSTALL, "echo"),
        RequestScope([nodes[1]], by=Requester("eve")),
        now=clock.now(),
    )
    settled(canary)
    assert story(operation)["b"][2] == "other work on this backend has not ended on b"
    assert again(operation).open_wave == 1
    install = claimed()["b"]
    assert install.row.op == "install"
    later = clock.now() + timedelta(minutes=1)
    reconciler.end_stale_intents(now=later)
    assert story(operation)["b"][2] == "other work on this backend has not ended on b"
    settled(install)
    reconciler.end_stale_intents(now=later + timedelta(minutes=1))
    upgrade = claimed(now=later + timedelta(minutes=1))["b"]
    assert (upgrade.row.op, upgrade.row.spares_requests) == ("upgrade", True)
    settled(upgrade)
    assert again(operation).status == Status.COMPLETED


def test_a_deletion_takes_over_the_parts_that_wait_for_their_wave() -> None:
    nodes = fleet("a", "b", "c")
    operation = asked(nodes)
    canary = claimed()["a"]
    newer = admission.admit(
        BackendRequest(DELETE, "echo"), RequestScope(nodes[1:], by=Requester("eve")), now=clock.now()
    ).operation
    reason = f"superseded by backend_delete of echo (operation {newer.id})"
    assert story(operation)["b"][1:] == ("superseded", reason)
    settled(canary)
    assert again(operation).status == Status.COMPLETED
    assert {i.op for i in PendingBackendOp.objects.all()} == {"delete"}


def test_the_same_request_joins_and_one_with_other_waves_is_refused() -> None:
    nodes = fleet("a", "b")
    operation = asked(nodes)
    wanted = RequestScope(nodes, by=Requester("eve"), waves=Options())
    joined = admission.admit(ECHO, wanted, now=clock.now())
    assert (joined.operation.id, joined.created) == (operation.id, False)
    for other in (Options(max_unavailable=2), Options(canary=False), None):
        with pytest.raises(errors.Conflict, match="with other wave options"):
            admission.admit(ECHO, replace(wanted, waves=other), now=clock.now())


def test_a_retry_of_a_failed_upgrade_goes_in_waves_again() -> None:
    operation = asked(fleet("a", "b", "c"), max_unavailable=1)
    settled(claimed()["a"])
    settled(claimed()["b"], outcome=Ended(error="full"))
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    newer = admission.retry(
        operation.id, asked_by=RequestScope([], by=Requester("bob")), now=clock.now()
    ).operation
    assert {name: wave for name, (wave, _, _) in story(newer).items()} == {"b": 0, "c": 1}


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
            partial(
                admission.admit,
                BackendRequest(DELETE, backend),
                RequestScope(some, by=Requester("eve")),
                now=now,
            ),
            partial(carries_out, random, now),
            partial(carries_out, random, now),
            partial(reconciler.end_stale_intents, now=now),
        ]
        if ids:
            chosen, id = random.choice(wave_requests.CHOICES), random.choice(ids)
            acts.append(partial(wave_requests.choose, id, chosen, last_replicas=["m"], actor="bob", now=now))
            acts.append(partial(admission.cancel, id, actor="bob", now=now))
        if seed == 0 and len(there) > 3 and random.random() < 0.2:
            acts = [partial(lifecycle.deregister, there[-1].pk, actor=actors.CONTROLLER, now=now)]
        with suppress(errors.ClusterError):
            random.choice(acts)()


def in_waves(backend: str, nodes: Sequence[BackendNode], now: datetime) -> None:
    wanted = RequestScope(nodes, by=Requester("ann"), waves=Options(max_unavailable=2))
    admission.admit(BackendRequest(UPGRADE, backend), wanted, now=now)


def carries_out(random: Random, now: datetime) -> None:
    outcomes = (Ended(), Ended(), Ended(error="no"), PutBack("away"))
    found = intents.claim("controller", now=now, lease=60, limit=3)
    called_off = {(one.id, one.fence): "stopped" for one in found if one.row.cancelled_at}
    others = {(one.id, one.fence): (random.choice(outcomes), ()) for one in found if not one.row.cancelled_at}
    intents.delete_cancelled(called_off, now=now)
    intents.record_outcomes(others, now=now)


@pytest.mark.rule("A78")
def test_whatever_happens_at_once_nothing_hangs_and_everything_ends() -> None:
    nodes = fleet(*"abcdef")
    found = unexpected(at_once(*(partial(meddles, seed, nodes) for seed in range(4))))
    assert found == []
    now = clock.now()
    for _ in range(100):
        now += timedelta(minutes=2)
        intents.reap(now=now)
        reconciler.end_stale_intents(now=now)
        found = intents.claim("last", now=now, lease=30, limit=100)
        intents.delete_cancelled({(i.id, i.fence): "" for i in found if i.row.cancelled_at}, now=now)
        done = {(i.id, i.fence): (Ended(), ()) for i in found if not i.row.cancelled_at}
        intents.record_outcomes(done, now=now)
        for asks in Operation.objects.active().filter(waves=Waves.ASKS):
            wave_requests.choose(asks.pk, "continue", actor="bob", now=now)
        if not Operation.objects.active().exists():
            break
    left = [(one.waves, one.message, story(one)) for one in Operation.objects.active()]
    assert left == []
    assert not PendingBackendOp.objects.exists()
    ended = OperationTarget.objects.exclude(status__in=targets.ENDED)
    assert not ended.exists()


def test_a_new_upgrade_takes_over_one_that_a_deletion_follows_on_a_node() -> None:
    nodes = fleet("a", "b", "c")
    older = asked(nodes)
    admission.admit(
        BackendRequest(DELETE, "echo"), RequestScope([nodes[0]], by=Requester("eve")), now=clock.now()
    )
    assert states(older) == {"a": "queued", "b": "queued", "c": "queued"}
    newer = asked(nodes)
    assert newer.id != older.id
    assert set(states(older).values()) == {"superseded"}
    assert story(newer)["c"] == (2, "queued", "waits for wave 3 of 3")


def test_an_install_runs_on_the_nodes_of_an_upgrade_that_asks() -> None:
    """The upgrade must not keep these nodes until someone decides."""
    nodes = fleet("a", "b")
    operation = asked(nodes)
    settled(*claimed().values(), outcome=Ended(error="no such image"))
    assert again(operation).waves == Waves.ASKS
    newer = admission.admit(
        BackendRequest("backend_install", "echo"), RequestScope(nodes, by=Requester("bob")), now=clock.now()
    ).operation
    assert states(operation) == {"a": "error", "b": "queued"}
    assert {intent.row.operation_id for intent in claimed().values()} == {newer.id}


def test_an_intent_that_no_operation_asks_for_is_not_carried_out() -> None:
    operation = asked(fleet("a"))
    OperationTarget.objects.filter(operation=operation).update(status="cancelled")
    assert reconciler.end_stale_intents(now=clock.now()) == 1
    assert not PendingBackendOp.objects.exists()
