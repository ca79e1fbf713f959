"""Who comes at the same time: real transactions in threads. No update is lost, no one gets a 500.

Every race is run several times, because which side wins is chance; what must hold holds for both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db import transaction

from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import errors
from nodes.models import (
    BackendNode,
    NodeConflict,
)
from nodes.registry import change, labels, lifecycle
from nodes.registry.claims import record_other_process
from nodes.registry.heartbeats import WriteConflict
from nodes.registry.overrides import set_replica_cap, set_vram_budget
from tests.support.fleet import (
    ANNA,
    NOW,
    OTHER_SECRET,
    ROOT,
    approved,
    at_once,
    beat,
    beat_of,
    kinds,
    later,
    own_secret,
    register,
    replica,
    row,
    status,
    told,
    unexpected,
)
from tests.support.races import after, held, repeated

pytestmark = pytest.mark.django_db(transaction=True)


# --- registrations


@pytest.mark.rule("R1.22")
def test_the_same_worker_twenty_times_at_once_is_one_node() -> None:
    results = at_once(*[lambda: register(instance="1" * 32)] * 20)
    assert unexpected(results) == []
    assert len({result.node.pk for result in results}) == 1
    (node,) = BackendNode.objects.all()
    assert kinds(node).count("registered") == 1, "the same process once more is no news"
    assert node.revision == 20


@pytest.mark.rule("R1.22")
def test_twenty_workers_with_one_name_at_once_are_one_node_and_nineteen_visible_conflicts() -> None:
    """The first one's secret is bound; the others get 409, and every one of them is seen and counted."""
    secrets = [f"{number:064x}" for number in range(20)]
    results = at_once(*(lambda secret=secret: register(secret=secret) for secret in secrets))
    assert unexpected(results) == []
    winners = [result for result in results if not isinstance(result, Exception)]
    assert len(winners) == 1
    assert all(isinstance(result, errors.Conflict) for result in results if result is not winners[0])
    (node,) = BackendNode.objects.all()
    assert node.fingerprint == hash_secret(secrets[results.index(winners[0])])
    claims = set(NodeConflict.objects.values_list("claim", flat=True))
    assert claims == {hash_secret(secret) for secret in secrets} - {node.fingerprint}
    (event,) = told(node, "conflict")
    assert event.count == 19


@repeated
def test_names_that_look_alike_at_once_are_one_node() -> None:
    spellings = ["GPU-1", "gpu-1", "Gpu-1", "gPU-1", "\uff27PU-1", "gpU-1"]
    results = at_once(*(lambda name=name: register(name, secret=own_secret(name)) for name in spellings))
    assert unexpected(results) == []
    assert sum(isinstance(result, errors.Conflict) for result in results) == len(spellings) - 1
    assert BackendNode.objects.count() == 1


@repeated
def test_one_secret_under_many_names_at_once_is_one_node() -> None:
    """The others are conflicts of that node, for an admin to see."""
    results = at_once(*(lambda number=number: register(f"w{number}") for number in range(6)))
    assert unexpected(results) == []
    (node,) = BackendNode.objects.all()
    assert NodeConflict.objects.filter(node=node, kind=NodeConflict.Mismatch.NAME).count() == 5


@repeated
def test_a_worker_and_a_stock_worker_of_one_name_at_once(settings: Any) -> None:
    """One of them is the node, the other a conflict; never a node with a secret that goes by the token."""
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    results = at_once(lambda: register(secret=""), register, lambda: register(secret=""), register)
    assert unexpected(results) == []
    (node,) = BackendNode.objects.all()
    assert node.weak_identity is (node.fingerprint == "")
    assert {result.node.pk for result in results if not isinstance(result, Exception)} == {node.pk}
    assert NodeConflict.objects.get().kind == ("weak" if node.weak_identity else "token")
    assert NodeConflict.objects.get().count == 2


def test_many_workers_at_once() -> None:
    """Sixteen at a time, agents among them, some twice: no one is refused, no one is there twice."""
    names = [f"w{number}" for number in range(16)] * 2

    def one(name: str) -> Any:
        agent = name.endswith("5")
        kind: dict[str, Any] = {"node_type": "agent", "address": ""} if agent else {}
        return register(name, secret=own_secret(name), auto_approve=True, **kind)

    results = at_once(*(lambda name=name: one(name) for name in names))
    assert [result for result in results if isinstance(result, Exception)] == []
    assert sorted(BackendNode.objects.values_list("name", flat=True)) == sorted(set(names))


# --- verbs against each other


@repeated
def test_approve_against_deregister() -> None:
    """Approved and gone, or gone and not found."""
    node = register().node
    approval, end = after(
        held(node),
        lambda: lifecycle.approve(node.pk, actor=ROOT, now=later(1)),
        lambda: lifecycle.deregister(node.pk, actor=ANNA, now=later(1)),
    )
    assert unexpected([approval, end]) == []
    assert end is None
    assert not BackendNode.objects.exists()
    approvals = kinds(node).count("approved")
    assert isinstance(approval, errors.NotFound) is (approvals == 0)
    assert kinds(node)[-1] == "deregistered"


@repeated
def test_register_against_deregister() -> None:
    """Either the old record came back and went, or a new one is there: pending in any case."""
    node = approved()
    replica(node)
    again, end = after(held(node), register, lambda: lifecycle.deregister(node.pk, actor=ROOT, now=later(1)))
    assert unexpected([again, end]) == []
    assert end is None
    assert not BackendNode.objects.filter(pk=node.pk).exists()
    if again.node.pk != node.pk:
        assert status(again.node) == "pending"


@pytest.mark.rule("R1.14", "R1.19")
@repeated
def test_drain_against_registration() -> None:
    """Whichever comes first, an admin's drain stands afterwards, and a worker's own is gone or stands."""
    node = approved()
    lifecycle.drain_by_worker(node.pk, now=NOW)
    results = after(
        held(node),
        lambda: register(instance="2" * 32, now=later(1)),
        lambda: lifecycle.drain(node.pk, actor=ANNA, now=later(1)),
        lambda: lifecycle.drain_by_worker(node.pk, now=later(1)),
    )
    assert [result for result in results if isinstance(result, Exception)] == []
    stored = row(node)
    assert (stored.status, stored.drained_by, stored.drain_is_own) == ("draining", "anna", False)
    assert stored.instance == "2" * 32


def test_heartbeats_against_overrides() -> None:
    """Neither overwrites what the other wrote."""
    node = approved(total_vram=1000, available_vram=1000)
    steps = 12

    def beats() -> None:
        for number in range(steps):
            one = beat_of(node, at=later(number + 1), available_ram=number, available_vram=900)
            while isinstance(beat(one)[one.key], WriteConflict):
                continue  # as the writer does with the next batch

    def overrides() -> None:
        for number in range(steps):
            set_replica_cap(node.pk, number + 1, actor=ROOT, now=later(number))
            set_vram_budget(node.pk, f"{number + 1}%", actor=ROOT, now=later(number))

    def edits() -> None:
        for number in range(steps):
            labels.edit_labels(node.pk, {f"k{number}": "v"}, actor=ANNA, now=later(number))

    assert at_once(beats, overrides, edits) == [None, None, None]
    stored = row(node)
    assert (stored.available_ram, stored.last_heartbeat) == (steps - 1, later(steps))
    assert (stored.max_replicas_per_model, stored.vram_budget, stored.vram_budget_bytes) == (12, "12%", 120)
    assert stored.available_vram <= 120
    assert stored.label_set.filter(key__startswith="k").count() == steps
    assert len(told(node, "override")) == 2 * steps
    assert stored.revision == 2 + 3 * steps


def test_two_labels_at_once_are_both_there() -> None:
    node = approved()
    results = at_once(
        *(
            lambda n=number: labels.edit_labels(node.pk, {f"k{n}": ""}, actor=ROOT, now=NOW)
            for number in range(8)
        )
    )
    assert unexpected(results) == []
    assert node.label_set.filter(key__startswith="k").count() == 8


@repeated
def test_two_admins_who_saw_the_same_revision() -> None:
    """One change, one conflict that names the field."""
    node = approved()
    seen = node.revision

    def edit(number: int) -> None:
        with transaction.atomic():
            change.lock_node(node.pk, seen)
            set_replica_cap(node.pk, number, actor=ROOT, now=NOW)

    results = after(held(node), lambda: edit(2), lambda: edit(3))
    assert unexpected(results) == []
    (lost,) = [result for result in results if result is not None]
    assert (type(lost), lost.field) == (errors.Conflict, "revision")
    assert row(node).max_replicas_per_model == (2 if results[0] is None else 3)


# --- the timeline


def test_conflicts_of_two_transactions_are_counted_exactly() -> None:
    """Coalesced rows under contention: nothing is lost, nothing fails."""
    node = approved(instance="1" * 32)
    register(instance="2" * 32, now=later(1))
    jobs: list[Callable[[], Any]] = [
        lambda: record_other_process(node.pk, "1" * 32, source_address="10.6.6.6", now=later(2))
    ] * 6
    jobs += [lambda: register(secret=OTHER_SECRET, now=later(2))] * 6
    assert unexpected(at_once(*jobs)) == []
    assert {event.cause: event.count for event in told(node, "conflict")} == {
        NodeConflict.Mismatch.INSTANCE.label: 6,
        NodeConflict.Mismatch.SECRET.label: 6,
    }
    assert sorted(NodeConflict.objects.values_list("kind", "count")) == [("instance", 6), ("secret", 6)]


def test_every_one_of_many_transitions_is_told() -> None:
    node = approved()
    before = len(told(node))

    def toggle(number: int) -> None:
        lifecycle.drain(node.pk, actor=ROOT, now=later(number))

    results = at_once(*(lambda n=n: toggle(n) for n in range(8)))
    assert unexpected(results) == []
    assert kinds(node)[before:] == ["drained"]
