"""The life of a node at the registry itself: R1.10 to R1.21, drains, absence, and how each ends.

Status comes from PostgreSQL throughout: it is a generated column.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings

from localai_cluster.accounts import actors
from localai_cluster.kit import errors
from nodes.decisions import fleet_cache
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel, PendingBackendOp
from nodes.registry import claims, labels, lifecycle, overrides
from nodes.registry.change import changed_columns
from nodes.registry.heartbeats import Beat
from nodes.registry.states import Facts, facts_of, status_of
from nodes.replicas import hooks, slots
from nodes.replicas.hooks import RemovedReplica
from operations.models import Operation
from tests.checks.states import everything
from tests.support.fleet import (
    ANNA,
    NOW,
    ROOT,
    SECRET,
    approved,
    beat,
    beat_of,
    kinds,
    later,
    register,
    replica,
    replicas,
    row,
    status,
    told,
)
from tests.support.replicas import attempt

pytestmark = pytest.mark.django_db


def drain(node: BackendNode, **more: Any) -> BackendNode:
    return lifecycle.drain(node.pk, actor=ROOT, now=NOW, **more)


def resume(node: BackendNode) -> BackendNode:
    return lifecycle.resume(node.pk, actor=ROOT, now=NOW)


def leave(node: BackendNode) -> None:
    lifecycle.deactivate(node.pk, now=NOW)


def fall_silent(node: BackendNode, *, at: float = 61) -> int:
    task = actors.task("liveness")
    return lifecycle.mark_silent([node.pk], limit=60, actor=task, now=later(at))


@pytest.mark.rule("R1.2")
def test_postgresql_and_the_table_agree_on_every_combination_of_facts() -> None:
    """The generated column is `status_of`, and a row says the facts that were written into it."""
    combinations = list(everything())
    rows = []
    for number, facts in enumerate(combinations):
        blank = Facts(identified=facts.identified)
        rows.append(
            BackendNode(
                name=f"n{number}",
                name_key=f"n{number}",
                address="h:1",
                weak_identity=facts.identified,
                **changed_columns(blank, facts, ROOT, "why", NOW),
            )
        )
    BackendNode.objects.bulk_create(rows)
    found = {node.name: node for node in BackendNode.objects.all()}
    for number, facts in enumerate(combinations):
        assert facts_of(found[f"n{number}"]) == facts
        assert found[f"n{number}"].status == status_of(facts)


# --- approval


@pytest.mark.rule("R1.11", "R1.22", "T-REG-1")
def test_a_new_name_is_pending() -> None:
    node = register().node
    assert node.status == BackendNode.objects.get(name="w1").status == "pending"
    assert node.last_heartbeat == NOW


@pytest.mark.rule("R1.10", "T-REG-2", "T-REG-140")
def test_a_new_name_is_healthy_with_auto_approval() -> None:
    node = register(auto_approve=True).node
    assert status(node) == "healthy"
    assert (row(node).approved_at, row(node).approved_by) == (NOW, "auto-approval")


@pytest.mark.rule("R1.12", "R1.13", "T-REG-3")
def test_a_pending_node_registers_again() -> None:
    """It stays pending and keeps its id, until auto-approval is on."""
    first = register().node
    assert register(now=later(1)).node.pk == first.pk
    assert status(first) == "pending"
    register(auto_approve=True, now=later(2))
    assert status(first) == "healthy"


@pytest.mark.rule("R1.14", "T-REG-4")
def test_an_unhealthy_node_registers_again_and_is_healthy() -> None:
    node = approved()
    lifecycle.mark_unhealthy(node.pk, actor=ROOT, now=NOW, reason="no answer")
    assert register(now=later(1)).node.status == "healthy"


@pytest.mark.rule("R1.15", "T-REG-5")
def test_approval_says_who_and_why_and_keeps_replicas() -> None:
    node = register().node
    replica(node)
    lifecycle.approve(node.pk, actor=ANNA, now=later(5), reason="ticket 7")
    stored = row(node)
    assert stored.status == "healthy"
    assert (stored.approved_at, stored.approved_by, stored.approval_reason) == (later(5), "anna", "ticket 7")
    assert replicas(node) == ["m#0"]


@pytest.mark.rule("R1.15", "T-REG-6", "T-REG-7")
def test_approval_of_an_unknown_or_an_approved_node() -> None:
    """404, and 400 naming the state."""
    with pytest.raises(errors.NotFound):
        lifecycle.approve(uuid4(), actor=ROOT, now=NOW)
    node = approved()
    for state, lead in (("healthy", None), ("draining", drain), ("offline", leave)):
        if lead is not None:
            lead(node)
        with pytest.raises(errors.InvalidInput, match=state):
            lifecycle.approve(node.pk, actor=ROOT, now=NOW)


@pytest.mark.rule("R1.15", "R1.88", "R1.28", "R1.87", "T-REC-19")
def test_registration_and_approval_end_cooldowns() -> None:
    rule = ModelSchedulingConfig.objects.create(model_name="m", unsatisfiable_until=NOW)
    node = register().node
    assert ModelSchedulingConfig.objects.get(pk=rule.pk).unsatisfiable_until is None
    ModelSchedulingConfig.objects.update(unsatisfiable_until=NOW, unsatisfiable_ticks=2)
    lifecycle.approve(node.pk, actor=ROOT, now=NOW)
    left = ModelSchedulingConfig.objects.get(pk=rule.pk)
    assert (left.unsatisfiable_until, left.unsatisfiable_ticks) == (None, 0)


def test_what_is_wrong_with_one_does_not_stop_the_others() -> None:
    first, second, unknown = register("a").node, approved("b", secret="b" * 64), uuid4()
    outcomes = lifecycle.approve_many([unknown, first.pk, second.pk, first.pk], actor=ROOT, now=NOW)
    assert [(one.name, one.status) for one in outcomes] == [("", ""), ("a", "healthy"), ("", ""), ("", "")]
    assert [bool(one.error) for one in outcomes] == [True, False, True, True]
    assert kinds(first).count("approved") == 1


# --- rejection


@pytest.mark.rule("R1.13")
def test_a_rejected_node_stays_pending_and_rejected() -> None:
    """Registering again, also with auto-approval, does not clear an admin's no; an approval does."""
    node = register().node
    lifecycle.reject(node.pk, actor=ANNA, now=NOW, reason="who is this?")
    register(now=later(1), auto_approve=True)
    stored = row(node)
    assert stored.status == "pending"
    assert (stored.rejected_at, stored.rejected_by, stored.reject_reason) == (NOW, "anna", "who is this?")
    lifecycle.approve(node.pk, actor=ROOT, now=later(2))
    assert (row(node).status, row(node).rejected_at, row(node).reject_reason) == ("healthy", None, "")


def test_only_a_pending_node_can_be_rejected() -> None:
    with pytest.raises(errors.Conflict, match="healthy"):
        lifecycle.reject(approved().pk, actor=ROOT, now=NOW, reason="no")
    with pytest.raises(errors.NotFound):
        lifecycle.reject(uuid4(), actor=ROOT, now=NOW, reason="no")


# --- impossible paths


@pytest.mark.rule("R5.6", "R1.34")
def test_pending_offline_healthy() -> None:
    """Impossible: a goodbye, beats, health passes and registrations leave an unapproved node pending."""
    node = register().node
    leave(node)
    assert fall_silent(node) == 0
    lifecycle.mark_recovered([node.pk], actor=ROOT, now=later(70))
    assert beat(beat_of(node, at=later(71))) == {(node.pk, node.fingerprint, ""): None}
    lifecycle.drain_by_worker(node.pk, now=later(72))
    lifecycle.mark_unhealthy(node.pk, actor=ROOT, now=later(72), reason="x")
    lifecycle.mark_recovered([node.pk], actor=ROOT, now=later(73))
    register(now=later(80))
    assert status(node) == "pending"
    assert {event.status_after for event in told(node)} == {"pending"}


@pytest.mark.rule("R1.18")
def test_resume_on_a_pending_node() -> None:
    """Impossible, for an admin and for the worker itself, drained or not."""
    node = register().node
    for prepare in (lambda: None, lambda: drain(node), lambda: lifecycle.drain_by_worker(node.pk, now=NOW)):
        prepare()
        with pytest.raises(errors.Conflict, match="pending"):
            resume(node)
        with pytest.raises(errors.Conflict, match="pending"):
            lifecycle.resume_by_worker(node.pk, now=NOW)
    assert status(node) == "pending"


@pytest.mark.rule("R1.14")
def test_a_drain_healed_by_re_registration() -> None:
    """Impossible: an admin's drain outlives restart, silence, goodbye, and a worker's own drain."""
    node = approved()
    lifecycle.drain_by_worker(node.pk, now=NOW)
    lifecycle.drain(node.pk, actor=ANNA, now=later(1), reason="disk swap")
    register(now=later(2))
    assert status(node) == "draining"
    assert fall_silent(node, at=100) == 1
    assert status(node) == "offline"
    beat(beat_of(node, at=later(101)))
    assert status(node) == "draining"
    lifecycle.drain_by_worker(node.pk, now=later(102))
    lifecycle.deactivate(node.pk, now=later(103))
    register(now=later(104), instance="1" * 32)
    stored = row(node)
    assert (stored.status, stored.drained_by, stored.drain_reason) == ("draining", "anna", "disk swap")
    assert stored.drained_at == later(1)
    assert resume(node).status == status(node) == "healthy"


@pytest.mark.rule("R5.7", "R1.20", "R5.5")
def test_a_shutdown_that_flips_back_within_15_s() -> None:
    """Impossible: beats that were under way and the next health pass leave it offline."""
    node = approved()
    lifecycle.drain_by_worker(node.pk, now=later(1))
    lifecycle.deactivate(node.pk, now=later(2))
    beat(beat_of(node, at=later(1)), Beat(node.pk, node.fingerprint, later(3), instance=""))
    beat(beat_of(node, at=later(14)))
    lifecycle.mark_recovered([node.pk], actor=ROOT, now=later(15))
    stored = row(node)
    assert (stored.status, stored.offline_reason) == ("offline", "deregistered by the worker")
    assert stored.last_heartbeat == later(14)


# --- drains


@pytest.fixture
def busy() -> BackendNode:
    """A node on which one of two replicas serves a request."""
    node = approved()
    replica(node, index=0, in_flight=1)
    replica(node, index=1)
    return node


@pytest.mark.rule("R1.19")
def test_an_idle_node_loses_its_replicas_with_the_drain() -> None:
    node = approved()
    replica(node)
    assert drain(node).status == status(node) == "draining"
    assert replicas(node) == []
    assert kinds(node) == ["registered", "labels", "approved", "drained"]


@pytest.mark.rule("R1.19")
def test_replicas_stay_until_nothing_is_in_flight(busy: BackendNode) -> None:
    """What remains shows in the meantime; the end of the drain is told once and leaves the node draining."""
    drain(busy)
    assert lifecycle.finish_drains(now=later(1)) == 0
    assert replicas(busy) == ["m#0", "m#1"]
    NodeModel.objects.update(in_flight=0)
    assert lifecycle.finish_drains(now=later(2)) == 1
    assert lifecycle.finish_drains(now=later(3)) == 0
    assert (replicas(busy), status(busy)) == ([], "draining")
    (ended,) = told(busy, "drain_ended")
    assert (ended.actor, ended.at, ended.cause) == ("drains", later(2), "nothing runs any more")
    assert (ended.status_before, ended.status_after) == ("draining", "draining")


@pytest.mark.rule("R1.19")
def test_a_deadline_ends_a_drain_however_busy(busy: BackendNode) -> None:
    drain(busy, deadline=30)
    assert row(busy).drain_deadline == later(30)
    assert lifecycle.finish_drains(now=later(29.9)) == 0
    assert lifecycle.finish_drains(now=later(30)) == 1
    assert replicas(busy) == []
    assert told(busy, "drain_ended")[0].detail == {"in_flight": 1}


def test_deadlines_come_from_the_settings_or_the_caller(
    busy: BackendNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, drain_deadline=90.0))
    assert drain(busy).drain_deadline == later(90)
    again = lifecycle.drain(busy.pk, actor=ANNA, now=later(10), reason="hurry", deadline=5)
    assert (again.drain_deadline, again.drain_reason) == (later(15), "hurry")
    assert (again.drained_by, again.drained_at) == ("root", NOW)
    again = lifecycle.drain(busy.pk, actor=ANNA, now=later(11), reason="really")
    assert (again.drain_deadline, again.drain_reason) == (later(15), "really")
    assert lifecycle.drain(busy.pk, actor=ANNA, now=later(12)).revision == again.revision
    assert kinds(busy).count("drained") == 3


def test_a_setting_beyond_the_longest_deadline_refuses_no_drain(
    busy: BackendNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLUSTER_DRAIN_DEADLINE has no upper limit; a drain has one, 30 days."""
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, drain_deadline=1e12))
    assert drain(busy).drain_deadline == later(30 * 86400)


@pytest.mark.parametrize("deadline", [-1, 1e20, float("inf"), float("nan")])
def test_a_deadline_that_cannot_be(busy: BackendNode, deadline: float) -> None:
    with pytest.raises(errors.InvalidInput, match="deadline_seconds"):
        drain(busy, deadline=deadline)
    assert status(busy) == "healthy"


def test_a_stopping_worker_waits_a_minute_at_most(busy: BackendNode) -> None:
    """The worker's own way out is limited to 60 s (worker.md §19)."""
    lifecycle.drain_by_worker(busy.pk, now=NOW)
    stored = row(busy)
    assert (stored.drain_deadline, stored.drained_by, stored.drain_is_own) == (later(60), "worker", True)
    lifecycle.drain(busy.pk, actor=ROOT, now=later(1))
    stored = row(busy)
    assert (stored.drained_by, stored.drain_is_own) == ("root", False)
    assert stored.drain_deadline == later(1 + settings.CLUSTER.drain_deadline)
    lifecycle.drain_by_worker(busy.pk, now=later(2))
    assert row(busy).revision == stored.revision


def test_a_worker_takes_back_its_own_drain_only(busy: BackendNode) -> None:
    lifecycle.drain_by_worker(busy.pk, now=NOW)
    lifecycle.resume_by_worker(busy.pk, now=NOW)
    assert status(busy) == "healthy"
    with pytest.raises(errors.Conflict, match="healthy"):
        lifecycle.resume_by_worker(busy.pk, now=NOW)
    drain(busy)
    with pytest.raises(errors.Conflict, match="drained by an administrator"):
        lifecycle.resume_by_worker(busy.pk, now=NOW)


def test_draining_costs_one_query_when_nothing_is_due(
    busy: BackendNode, django_assert_num_queries: Any
) -> None:
    drain(busy)
    for number in range(20):
        node = approved(f"n{number}", secret=f"{number:064x}")
        lifecycle.drain(node.pk, actor=ROOT, now=NOW)
    with django_assert_num_queries(1):
        assert lifecycle.finish_drains(now=later(1)) == 0


@pytest.mark.parametrize("count", [1, 12])
def test_ending_drains_costs_the_same_for_one_and_for_twelve(
    count: int, django_assert_num_queries: Any
) -> None:
    for number in range(count):
        node = approved(f"n{number}", secret=f"{number:064x}")
        replica(node, in_flight=1)
        lifecycle.drain(node.pk, actor=ROOT, now=NOW, deadline=1)
    with django_assert_num_queries(11):
        assert lifecycle.finish_drains(now=later(2)) == count
    assert NodeModel.objects.count() == 0


# --- absence and health


@pytest.mark.rule("R1.20", "T-REG-8", "T-REG-9")
def test_a_worker_that_leaves_is_offline_and_its_record_stays() -> None:
    node = approved()
    replica(node)
    leave(node)
    stored = row(node)
    assert (stored.status, stored.offline_by, stored.offline_at) == ("offline", "worker", NOW)
    assert (replicas(node), stored.approved_by) == ([], "root")
    with pytest.raises(errors.NotFound):
        lifecycle.deactivate(uuid4(), now=NOW)


@pytest.mark.rule("R1.17", "R1.18", "T-REG-10", "T-REG-11", "T-REG-144")
def test_unhealthy_and_back() -> None:
    """Replicas stay meanwhile."""
    node = approved()
    replica(node)
    lifecycle.mark_unhealthy(node.pk, actor=actors.task("commands"), now=later(1), reason="no answer")
    stored = row(node)
    assert (stored.status, stored.unhealthy_by, stored.unhealthy_reason) == (
        "unhealthy",
        "commands",
        "no answer",
    )
    assert replicas(node) == ["m#0"]
    assert lifecycle.mark_recovered([node.pk], actor=ROOT, now=later(2)) == 0, "it has not sent a heartbeat"
    beat(beat_of(node, at=later(3)))
    assert lifecycle.mark_recovered([node.pk, uuid4()], actor=ROOT, now=later(4)) == 1
    assert (status(node), replicas(node)) == ("healthy", ["m#0"])
    assert lifecycle.mark_recovered([node.pk], actor=ROOT, now=later(5)) == 0, "it is not marked unhealthy"
    with pytest.raises(errors.NotFound):
        lifecycle.mark_unhealthy(uuid4(), actor=ROOT, now=NOW, reason="x")


@pytest.mark.rule("R1.18")
def test_resume_ends_what_an_admin_may_end() -> None:
    """Drain and "unhealthy"; an offline node waits for its next heartbeat, also one that had left."""
    node = approved()
    lifecycle.mark_unhealthy(node.pk, actor=ROOT, now=NOW, reason="x")
    assert resume(node).status == "healthy"
    with pytest.raises(errors.Conflict, match="healthy"):
        resume(node)
    drain(node)
    leave(node)
    assert resume(node).status == status(node) == "offline"
    beat(beat_of(node, at=later(5)))
    assert status(node) == "healthy"
    with pytest.raises(errors.NotFound):
        lifecycle.resume(uuid4(), actor=ROOT, now=NOW)


# --- the end


@pytest.mark.rule("R1.21", "R1.38", "R1.39", "T-REG-142", "T-REG-152")
def test_deregistration_takes_labels_intents_and_replicas_along() -> None:
    """The timeline stays; the name is free again, for anybody."""
    node = approved(labels={"tier": "fast"})
    replica(node)
    PendingBackendOp.objects.create(node=node, backend="llama-cpp", op="install", operation_id=uuid4())
    lifecycle.deregister(node.pk, actor=ANNA, now=later(1))
    assert not BackendNode.objects.exists()
    assert not NodeLabel.objects.exists()
    assert not PendingBackendOp.objects.exists()
    assert not NodeModel.objects.exists()
    last = told(node)[-1]
    assert (last.kind, last.actor, last.node_name) == ("deregistered", "anna", "w1")
    assert register(secret="e" * 64).node.pk != node.pk
    with pytest.raises(errors.NotFound):
        lifecycle.deregister(node.pk, actor=ROOT, now=NOW)


# --- the hook


@pytest.fixture
def removed(django_capture_on_commit_callbacks: Any) -> Any:
    """Runs something as if it had been committed; answers which removals were reported."""

    def run(work: Any) -> list[tuple[str, Any, int]]:
        seen: list[tuple[str, Any, int]] = []

        def hear(one: RemovedReplica) -> None:
            seen.append((one.model_name, one.node_id, one.replica_index))

        hooks.on_removed.append(hear)
        try:
            with django_capture_on_commit_callbacks() as callbacks:
                work()
                assert seen == []
            for callback in callbacks:
                callback()
        finally:
            hooks.on_removed.remove(hear)
        return seen

    return run


@pytest.mark.rule("R1.27", "R1.102", "R1.103", "T-REG-72", "T-REG-73", "T-REG-74", "T-REG-75", "T-REG-76")
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(leave, id="offline"),
        pytest.param(lambda node: fall_silent(node), id="silent"),
        pytest.param(drain, id="drain"),
        pytest.param(lambda node: lifecycle.deregister(node.pk, actor=ROOT, now=NOW), id="deregister"),
        pytest.param(lambda node: register(now=NOW), id="register again"),
        pytest.param(lambda node: claims.revoke(node.pk, actor=ROOT, now=NOW), id="revoke"),
    ],
)
def test_bulk_removals_report_each_model_once_after_commit(end: Any, removed: Any) -> None:
    """R1.19 to R1.21, hooks column: negative index, once per distinct model, nothing survives."""
    node, other = approved(), approved("w2", secret="b" * 64)
    for model, index in (("m", 0), ("m", 1), ("a/b:c@d#e", 0)):
        replica(node, model, index)
    replica(other, "stays")
    seen = removed(lambda: end(node))
    assert sorted(seen) == [("a/b:c@d#e", node.pk, -1), ("m", node.pk, -1)]
    assert list(NodeModel.objects.values_list("model_name", flat=True)) == ["stays"]


@pytest.mark.rule("R1.27")
def test_a_listener_that_fails_fails_nothing_else(removed: Any) -> None:
    node = approved()
    replica(node)

    def fail(one: RemovedReplica) -> None:
        raise RuntimeError("a listener's own problem")

    hooks.on_removed.append(fail)
    try:
        assert removed(lambda: leave(node)) == [("m", node.pk, -1)]
    finally:
        hooks.on_removed.remove(fail)


@pytest.mark.rule("R1.101", "R1.102")
def test_single_removals_are_announced_with_their_index(removed: Any) -> None:
    """A failed load and what an earlier attempt left: one announcement each, and only for rows that went."""
    node = approved()
    now = NOW
    BackendNode.objects.filter(pk=node.pk).update(max_replicas_per_model=2)
    (operation,) = Operation.objects.bulk_create(
        [Operation(kind="k", key="k", element="m", status="processing", fence=2, lease_until=now)]
    )
    current = (operation.id, 2)
    view = next(one for one in fleet_cache.read_fleet("m") if one.id == node.pk)
    mine = slots.reserve(view, "m", attempt=current, backend="b", now=now)
    other = slots.reserve(view, "m", attempt=(operation.id, 1), backend="b", now=now)
    assert isinstance(mine, slots.Slot)
    assert isinstance(other, slots.Slot)
    assert removed(lambda: slots.end_attempt(mine, attempt=attempt("another:1"), now=now)) == []
    assert removed(lambda: slots.end_abandoned_loads("n", now=now)) == []
    assert removed(lambda: slots.end_abandoned_loads("m", now=now)) == [("m", node.pk, 1)]
    assert removed(lambda: slots.end_attempt(mine, attempt=current, now=now)) == [("m", node.pk, 0)]
    assert removed(lambda: slots.end_attempt(mine, attempt=current, now=now)) == []


# --- who may not be reached


@pytest.mark.rule("R1.37", "T-REG-145", "R5.8")
def test_the_stale_finder() -> None:
    """Only who was silent too long; pending and offline ones never, unhealthy ones too (R5.8)."""
    old, fresh = approved("old", secret="1" * 64), approved("fresh", secret="2" * 64)
    register("pending", secret="3" * 64)
    gone, ill = approved("gone", secret="4" * 64), approved("ill", secret="5" * 64)
    leave(gone)
    lifecycle.mark_unhealthy(ill.pk, actor=ROOT, now=NOW, reason="x")
    beat(beat_of(fresh, secret="2" * 64, at=later(50)))
    found = BackendNode.objects.silent(since=later(10))
    assert {node.name for node in found} == {"old", "ill"}
    assert old.name == "old"


def test_reasons_are_kept_readable() -> None:
    """Line breaks, bidi and zero-width characters of a reason become blanks, and it is cut at 255."""
    node = register().node
    lifecycle.reject(node.pk, actor=ROOT, now=NOW, reason="no\n\u202eway\x00" + "x" * 300)
    stored = row(node)
    assert stored.reject_reason == ("no  way " + "x" * 300)[:255]
    assert told(node, "rejected")[0].cause == stored.reject_reason


def test_every_change_moves_the_revision_by_one_and_a_beat_does_not() -> None:
    node = approved()
    seen = [row(node).revision]
    steps = (
        lambda: drain(node),
        lambda: beat(beat_of(node, secret=SECRET, at=later(1))),
        lambda: resume(node),
        lambda: labels.edit_labels(node.pk, {"a": "b"}, drop=None, actor=ROOT, now=NOW),
        lambda: overrides.set_replica_cap(node.pk, 3, actor=ROOT, now=NOW),
    )
    for step in steps:
        step()
        seen.append(row(node).revision)
    first = seen[0]
    assert [number - first for number in seen] == [0, 1, 1, 2, 3, 4]
    assert row(node).updated_at >= NOW - timedelta(seconds=1)
