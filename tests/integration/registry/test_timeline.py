"""The timeline: one event for everything that happens, repeated conflicts counted, kept and pruned."""

from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings

from localai_cluster.accounts import actors
from localai_cluster.kit import clock, errors
from localai_cluster.kit.logs import request_id
from nodes.models import BackendNode, NodeConflict, NodeEvent
from nodes.reconcilers import tasks
from nodes.registry import claims, labels, lifecycle, overrides, timeline
from nodes.registry.timeline import Entry
from tests.support.fleet import (
    ANNA,
    NOW,
    OTHER_SECRET,
    ROOT,
    THIRD_SECRET,
    approved,
    beat,
    beat_of,
    kinds,
    later,
    register,
    told,
)

pytestmark = pytest.mark.django_db


def test_a_whole_life_is_told_once_each_with_actor_and_statuses() -> None:
    """What happened, by whom, why, from which status to which; nothing twice, nothing left out."""
    task = actors.task("liveness")
    node = register(now=later(0)).node
    lifecycle.reject(node.pk, actor=ANNA, now=later(1), reason="who?")
    lifecycle.approve(node.pk, actor=ROOT, now=later(2), reason="ah")
    lifecycle.mark_unhealthy(node.pk, actor=actors.task("commands"), now=later(3), reason="no answer")
    lifecycle.mark_recovered([node.pk], actor=task, now=later(4))
    beat(beat_of(node, at=later(5)))
    lifecycle.mark_recovered([node.pk], actor=task, now=later(6))
    lifecycle.drain(node.pk, actor=actors.STATIC_KEY, now=later(7), reason="disk")
    lifecycle.mark_silent([node.pk], limit=60, actor=task, now=later(70))
    beat(beat_of(node, at=later(80)))
    lifecycle.resume(node.pk, actor=ROOT, now=later(81))
    lifecycle.drain_by_worker(node.pk, now=later(82))
    lifecycle.deactivate(node.pk, now=later(83))
    claims.revoke(node.pk, actor=ROOT, now=later(84), reason="lost")
    lifecycle.deregister(node.pk, actor=ROOT, now=later(85))
    life = [
        (event.kind, event.actor_kind, event.actor, event.cause, event.status_before, event.status_after)
        for event in told(node)
    ]
    pending = "pending"
    assert life == [
        ("registered", "worker", "worker", "first registration", pending, pending),
        ("labels", "worker", "worker", "", pending, pending),
        ("rejected", "user", "anna", "who?", pending, pending),
        ("approved", "user", "root", "ah", pending, "healthy"),
        ("marked_unhealthy", "task", "commands", "no answer", "healthy", "unhealthy"),
        ("marked_healthy", "task", "liveness", "contact restored", "unhealthy", "healthy"),
        ("drained", "static_key", "static-key", "disk", "healthy", "draining"),
        ("fell_silent", "task", "liveness", "no heartbeat for more than 60 s", "draining", "offline"),
        ("heard_again", "worker", "worker", "heartbeat", "offline", "draining"),
        ("resumed", "user", "root", "", "draining", "healthy"),
        ("drained", "worker", "worker", "its worker is stopping", "healthy", "draining"),
        ("deactivated", "worker", "worker", "deregistered by the worker", "draining", "offline"),
        ("revoked", "user", "root", "lost", "offline", pending),
        ("deregistered", "user", "root", "", pending, pending),
    ]


def test_what_changes_nothing_is_not_told() -> None:
    node = approved()
    lifecycle.deactivate(node.pk, now=later(1))
    lifecycle.mark_unhealthy(node.pk, actor=ROOT, now=later(1), reason="x")
    lifecycle.drain(node.pk, actor=ROOT, now=later(1))
    before = kinds(node)
    lifecycle.deactivate(node.pk, now=later(2))
    lifecycle.mark_unhealthy(node.pk, actor=ROOT, now=later(2), reason="y")
    lifecycle.drain(node.pk, actor=ROOT, now=later(2))
    lifecycle.drain_by_worker(node.pk, now=later(2))
    lifecycle.mark_silent([node.pk], limit=1, actor=ROOT, now=later(99))
    lifecycle.finish_drains(now=later(99999))
    assert kinds(node) == before


def test_what_was_refused_is_not_told() -> None:
    """The change and its event exist together or not at all."""
    node = approved()
    before = kinds(node)
    with pytest.raises(errors.InvalidInput):
        lifecycle.approve(node.pk, actor=ROOT, now=NOW)
    with pytest.raises(errors.Conflict):
        lifecycle.resume(node.pk, actor=ROOT, now=NOW)
    with pytest.raises(errors.InvalidInput):
        register(labels={"\u200b": "x"})
    with pytest.raises(errors.InvalidInput):
        overrides.set_replica_cap(node.pk, 0, actor=ROOT, now=NOW)
    assert kinds(node) == before


def test_auto_approval_is_an_event_of_its_own() -> None:
    node = register(auto_approve=True).node
    assert [(event.kind, event.actor_kind, event.actor) for event in told(node)] == [
        ("registered", "worker", "worker"),
        ("approved", "system", "auto-approval"),
        ("labels", "worker", "worker"),
    ]


def test_an_event_names_the_request_that_caused_it() -> None:
    token = request_id.set("req-7")
    try:
        node = register().node
    finally:
        request_id.reset(token)
    lifecycle.approve(node.pk, actor=ROOT, now=NOW)
    assert [event.request_id for event in told(node)] == ["req-7", "req-7", ""]


# --- conflicts are counted


def claim(secret: str, second: float, source: str = "10.6.6.6") -> None:
    with pytest.raises(errors.Conflict):
        register(secret=secret, source=source, now=later(second))


def test_conflicts_of_one_cause_are_one_row_a_minute() -> None:
    """From however many addresses and secrets; another cause, minute or node has a row of its own."""
    node = approved(instance="1" * 32)
    for second in (0, 10, 59.9):
        claim(OTHER_SECRET, second)
    claim(THIRD_SECRET, 30, source="10.7.7.7")
    claim(OTHER_SECRET, 60)
    register(instance="2" * 32, now=later(61))
    with pytest.raises(errors.Conflict):
        register(instance="1" * 32, now=later(62))
    rows = [(event.cause, event.at, event.last_at, event.count) for event in told(node, "conflict")]
    secret, instance = NodeConflict.Mismatch.SECRET.label, NodeConflict.Mismatch.INSTANCE.label
    assert rows == [
        (secret, later(0), later(59.9), 4),
        (secret, later(60), later(60), 1),
        (instance, later(62), later(62), 1),
    ]
    assert told(node, "conflict")[0].detail == {
        "kind": "secret",
        "source_address": "10.6.6.6",
        "advertised_address": "10.0.0.1:50051",
    }


def test_transitions_labels_and_overrides_by_people_are_never_counted_together() -> None:
    node = approved()
    for _ in range(3):
        lifecycle.drain(node.pk, actor=ROOT, now=NOW)
        lifecycle.resume(node.pk, actor=ROOT, now=NOW)
        labels.edit_labels(node.pk, {"a": "1"}, drop=None, actor=ROOT, now=NOW)
        labels.edit_labels(node.pk, {}, drop=None, actor=ROOT, now=NOW)
        overrides.set_replica_cap(node.pk, 2, actor=ROOT, now=NOW)
        overrides.reset_replica_cap(node.pk, actor=ROOT, now=NOW)
    events = told(node, "drained", "resumed", "override")
    assert len(events) == 12
    assert len(told(node, "labels")) > 6
    assert {event.count for event in events} == {1}
    assert {event.actor for event in NodeEvent.objects.filter(repeat_key__isnull=False)} == {"worker"}


def test_a_flood_of_registrations_is_a_few_events_a_minute() -> None:
    """Whoever holds the registration token can send them without end."""
    node = approved()
    before = NodeEvent.objects.count()
    for number in range(20):
        register(instance=f"{number:032x}", labels={"run": str(number)}, now=later(number))
    assert {event.count for event in told(node, "registered", "labels")[-2:]} == {20}
    assert NodeEvent.objects.count() - before == 2


def test_decisions_are_told_with_the_conflict() -> None:
    node = approved()
    claim(OTHER_SECRET, 1)
    conflict = NodeConflict.objects.get()
    claims.refuse_conflict(conflict.pk, actor=ANNA, now=later(2))
    claims.accept_conflict(conflict.pk, actor=ROOT, now=later(3))
    refused, accepted = told(node, "conflict_refused", "conflict_accepted")
    assert (refused.actor, refused.status_after) == ("anna", "healthy")
    assert (accepted.actor, accepted.status_before, accepted.status_after) == ("root", "healthy", "offline")
    detail = {"conflict": str(conflict.pk), "source_address": "10.6.6.6"}
    assert refused.detail == accepted.detail == detail


# --- how long


def entry(node: BackendNode, cause: str = "") -> Entry:
    return Entry(node.pk, node.name, NodeEvent.Kind.DRAINED, ROOT, cause)


def test_the_timeline_outlives_its_node() -> None:
    node = approved()
    lifecycle.deregister(node.pk, actor=ROOT, now=later(1))
    register(now=later(2))
    assert kinds(node) == ["registered", "labels", "approved", "deregistered"]


def test_old_events_are_pruned_in_chunks() -> None:
    node = approved()
    timeline.record(*(entry(node, str(number)) for number in range(5)), at=NOW - timedelta(days=1))
    assert timeline.prune(before=NOW, limit=2) == 2
    assert [event.cause for event in told(node, "drained")] == ["2", "3", "4"]
    assert timeline.prune(before=NOW, limit=20) == 3
    assert timeline.prune(before=NOW, limit=20) == 0
    assert kinds(node) == ["registered", "labels", "approved"]


def test_the_pruning_task_goes_by_the_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PRUNE_CHUNK_ROWS", 2)
    now, keep = clock.now(), timedelta(seconds=settings.CLUSTER.event_retention)
    node = approved()
    NodeEvent.objects.all().delete()
    for number in range(5):
        timeline.record(entry(node, f"old {number}"), at=now - keep - timedelta(hours=1))
    timeline.record(entry(node, "young"), at=now - keep + timedelta(hours=1))
    tasks.prune_timeline()
    assert [event.cause for event in told(node)] == ["young"]
    assert keep == timedelta(days=30)


def test_a_long_pruning_leaves_the_rest_to_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 5 of review 22: the tasks of a process run one after another, and liveness is due every 5 s."""
    monkeypatch.setattr(tasks, "PRUNE_CHUNK_ROWS", 2)
    monkeypatch.setattr(tasks, "PRUNE_SECONDS", 0)
    node = approved()
    NodeEvent.objects.all().delete()
    timeline.record(*(entry(node, str(number)) for number in range(5)), at=NOW - timedelta(days=999))
    left = []
    for _ in range(3):
        tasks.prune_timeline()
        left.append(len(told(node)))
    assert left == [3, 1, 0]


def test_long_causes_are_cut_and_long_actors_too() -> None:
    node = approved()
    long = actors.Actor(actors.ActorKind.USER, "u" * 200)
    lifecycle.drain(node.pk, actor=long, now=NOW, reason="r" * 300)
    (event,) = told(node, "drained")
    assert (event.actor, event.cause) == ("u" * 150, "r" * 255)


def test_silence_of_many_is_told_for_each_at_a_constant_price(django_assert_num_queries: Any) -> None:
    ids = [approved(f"n{number}", secret=f"{number:064x}").pk for number in range(12)]
    with django_assert_num_queries(6):
        gone = lifecycle.mark_silent(ids, limit=60, actor=actors.task("liveness"), now=later(99))
    assert gone == NodeEvent.objects.filter(kind="fell_silent").count() == 12
    assert set(BackendNode.objects.values_list("status", "revision")) == {("offline", 3)}
