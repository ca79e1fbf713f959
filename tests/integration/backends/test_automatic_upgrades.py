"""Automatic upgrades on real rows: which operations they make, whom they leave out, that it happens once."""

import asyncio
import dataclasses
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from nodes.backends import admission, backend_requests, intents, upgrade_check, upgrade_state
from nodes.backends.installed import Offered
from nodes.backends.intents import Ended
from nodes.models import BackendNode, BackendOffer, NodeBackend, PendingBackendOp, UpgradeCheck
from nodes.registry import lifecycle
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget, Status, Waves
from tests.support import api, hot
from tests.support.fleet import at_once, unexpected

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("O103")]

GALLERY = "https://gallery.test/index.yaml"


def node(name: str, *, version: str = "1", replica_of: str = "", **more: Any) -> BackendNode:
    """A healthy node that has echo."""
    made = hot.node(name)
    columns = {"gallery_url": GALLERY, "version": version} | more
    NodeBackend.objects.create(node=made, name="echo", **columns)
    if replica_of:
        hot.replica(made, replica_of, backend_type="echo")
    return made


def checked(version: str = "2", **problems: str) -> None:
    """A check has ended and found this version of echo."""
    upgrade_state.request_check()
    mine = upgrade_state.claim("here:1", now=clock.now())
    assert mine is not None
    found = {"echo": Offered(version, f"/srv/echo-{version}")}
    assert upgrade_state.finish(mine, found, problems=problems, galleries="", now=clock.now())


def follow() -> list[Operation]:
    return upgrade_check.follow(now=clock.now())


def story(operation: Operation) -> dict[str, tuple[int | None, str, str]]:
    rows = OperationTarget.objects.filter(operation=operation)
    return {part.node_name: (part.wave, part.status, part.error or part.reason) for part in rows}


def carried_out(error: str = "") -> list[str]:
    """Carries out what is due; the names of the nodes."""
    found = intents.claim("controller", now=clock.now(), lease=60, limit=100)
    intents.record_outcomes({(one.id, one.fence): (Ended(error=error), ()) for one in found}, now=clock.now())
    return [one.node.name for one in found]


def test_what_a_check_finds_becomes_one_operation_in_waves_by_system() -> None:
    node("a")
    node("b")
    node("new", version="2")
    checked()
    (operation,) = follow()
    assert (operation.kind, operation.element, operation.actor) == ("backend_upgrade", "echo", "system")
    assert story(operation) == {"a": (0, "queued", "queued"), "b": (1, "queued", "waits for wave 2 of 2")}
    assert PendingBackendOp.objects.get().spares_requests
    assert follow() == [], "the check has been followed"


def test_a_failed_upgrade_is_not_asked_again_before_there_is_a_newer_version() -> None:
    node("a")
    checked()
    (first,) = follow()
    assert carried_out(error="no space left") == ["a"]
    checked()
    assert follow() == [], "the same version"
    assert Operation.objects.get(pk=first.pk).status == Status.FAILED
    checked("3")
    (second,) = follow()
    assert set(story(second)) == {"a"}


def test_an_operators_retry_of_a_failed_one_is_no_reason_for_another() -> None:
    node("a")
    checked()
    (first,) = follow()
    carried_out(error="no space left")
    by = backend_requests.RequestScope((), by=Requester("ann"))
    again = admission.retry(first.id, asked_by=by, now=clock.now()).operation
    assert (again.actor, set(story(again))) == ("ann", {"a"})
    checked()
    assert follow() == []


def test_there_are_never_two_operations_for_a_backend() -> None:
    """Someone is at it: the check is followed when that has ended, without another check."""
    a, _ = node("a"), node("b")
    asked = backend_requests.RequestScope([a], by=Requester("ann"))
    theirs = admission.admit(
        backend_requests.BackendRequest(backend_requests.UPGRADE, "echo"), asked, now=clock.now()
    ).operation
    checked()
    assert follow() == []
    assert carried_out() == ["a"]
    assert Operation.objects.get(pk=theirs.pk).status == Status.COMPLETED
    NodeBackend.objects.filter(node=a).update(version="2")
    (operation,) = follow()
    assert set(story(operation)) == {"b"}


def test_a_wave_that_asks_keeps_a_newer_version_waiting() -> None:
    node("a")
    node("b")
    checked()
    (operation,) = follow()
    carried_out(error="no such image")
    assert Operation.objects.get(pk=operation.pk).waves == Waves.ASKS
    checked("3")
    assert follow() == []


def test_a_node_with_a_last_replica_is_skipped_and_lands_in_the_inbox() -> None:
    node("a", replica_of="m")
    node("b")
    checked()
    (operation,) = follow()
    reason = (
        "skipped: a serves the last replica of m. Load it on another node, or upgrade a by hand and confirm"
        " that it may stop"
    )
    assert story(operation) == {"a": (None, "error", reason), "b": (0, "queued", "queued")}
    assert carried_out() == ["b"]
    (listed,) = api.admin().get("/api/operations/inbox").json()["operations"]
    assert (listed["jobID"], listed["error"]) == (str(operation.id), f"a: {reason}")
    checked()
    assert follow() == [], "it is said once"


def test_a_last_replica_alone_is_a_failure_at_once_and_a_later_one_supersedes_it() -> None:
    node("a", replica_of="m")
    checked()
    (first,) = follow()
    assert (first.status, first.node_name, first.waves) == (Status.FAILED, "a", "")
    assert not PendingBackendOp.objects.exists()
    checked("3")
    (second,) = follow()
    inbox = api.admin().get("/api/operations/inbox").json()["operations"]
    assert [one["jobID"] for one in inbox] == [str(second.id)]


def test_a_skipped_node_is_upgraded_by_hand_with_the_confirmation() -> None:
    a = node("a", replica_of="m")
    checked()
    follow()
    body = {"nodes": [str(a.id)], "waves": {}, "last_replicas": ["m"]}
    answer = api.admin().post("/api/backends/upgrade/echo", body, content_type="application/json")
    assert answer.status_code == 200, answer.content
    assert carried_out() == ["a"]


def test_nodes_that_are_away_are_named_and_upgraded_after_their_return() -> None:
    node("a")
    b, c = node("b"), node("c")
    BackendNode.objects.filter(pk=b.pk).update(offline_at=clock.now())
    lifecycle.drain(c.id, actor=actors.CONTROLLER, now=clock.now(), deadline=60)
    checked()
    (operation,) = follow()
    said = story(operation)
    assert said["b"] == (None, "cancelled", "left out: b is offline; a check after its return upgrades it")
    assert said["c"] == (None, "cancelled", "left out: c is draining; a check after its return upgrades it")
    assert carried_out() == ["a"]
    assert Operation.objects.get(pk=operation.pk).status == Status.COMPLETED
    BackendNode.objects.filter(pk=b.pk).update(offline_at=None)
    checked()
    (later,) = follow()
    assert {name: status for name, (_, status, _) in story(later).items()} == {
        "b": "queued",
        "c": "cancelled",
    }


def test_what_a_check_finds_that_was_made_again_is_followed() -> None:
    """The galleries could not be read at first; nobody asks for the check that is made five minutes later."""
    node("a")
    upgrade_state.request_check()
    now = clock.now()
    first = upgrade_state.claim("here:1", now=now)
    assert first is not None
    assert upgrade_state.finish(first, {}, problems={"main": "no answer"}, galleries="", now=now)
    assert follow() == []
    later = now + timedelta(seconds=upgrade_state.RETRY_AFTER)
    again = upgrade_state.claim("here:1", now=later)
    assert again is not None
    found = {"echo": Offered("2", "/srv/echo-2")}
    assert upgrade_state.finish(again, found, problems={}, galleries="", now=later)
    assert [set(story(one)) for one in follow()] == [{"a"}]


def test_away_nodes_alone_and_builds_from_an_address_make_no_operation() -> None:
    away = node("a")
    BackendNode.objects.filter(pk=away.pk).update(offline_at=clock.now())
    node("b", gallery_url="", uri="/srv/own")
    checked()
    assert follow() == []
    assert BackendOffer.objects.get().automatic_nodes == []


def test_a_controller_that_dies_between_check_and_operation_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next look of any controller makes it: rows say that the check was not followed."""
    node("a")
    checked()

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(upgrade_check, "admit", dies)
    with pytest.raises(KeyboardInterrupt):
        follow()
    assert BackendOffer.objects.get().automatic_nodes == [], "note and operation are one transaction"
    monkeypatch.undo()
    assert len(follow()) == 1


def test_what_a_later_check_has_replaced_is_not_upgraded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that was slow has read the offers before that check."""
    node("a", replica_of="m")
    checked()
    stale = upgrade_state.offers()
    checked("3")
    assert len(follow()) == 1
    monkeypatch.setattr(upgrade_state, "offers", lambda: stale)
    UpgradeCheck.objects.update(processed=0)
    assert follow() == []
    assert BackendOffer.objects.get().automatic_to == "3"


def test_two_controllers_make_one_operation() -> None:
    node("a")
    node("b")
    checked()
    outcomes = at_once(*[partial(upgrade_check.follow, now=clock.now())] * 2)
    assert not unexpected(outcomes)
    assert Operation.objects.count() == 1


def test_it_is_off_unless_the_setting_says_so(settings: Any) -> None:
    node("a")
    checked()
    checker = upgrade_check.UpgradeChecker("here:1")
    asyncio.run(checker.follow())
    assert not Operation.objects.exists()
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, auto_upgrade_backends=True)
    asyncio.run(checker.follow())
    assert Operation.objects.count() == 1


def test_queries_are_the_same_for_many_nodes() -> None:
    counts = []
    for total in (3, 60):
        for number in range(NodeBackend.objects.count(), total):
            node(f"n{number}")
        BackendOffer.objects.all().delete()
        Operation.objects.all().delete()
        PendingBackendOp.objects.all().delete()
        checked()
        with CaptureQueriesContext(connection) as queries:
            assert len(follow()) == 1
        counts.append(len(queries))
    assert counts[0] == counts[1]
