"""Who comes at the same time: real transactions in threads. No update is lost, nobody gets a 500.

Every race is run several times, because which side wins is chance; what must hold holds for both.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import IntegrityError, transaction

from localai_cluster import errors
from nodes import actors, services
from nodes.beats import Overtaken
from nodes.health.liveness import Limits, Plan, apply
from nodes.identity import hash_secret
from nodes.loading.replicas import fleet, reserve
from nodes.models import (
    BackendNode,
    ModelSchedulingConfig,
    NodeConflict,
    NodeEvent,
    NodeModel,
    PendingBackendOp,
    ReplicaUse,
    RevokedSecret,
    WebProcess,
)
from nodes.services import Running
from tests.conftest import eventually
from tests.support import hot
from tests.support.fleet import (
    ANNA,
    NOW,
    OTHER_SECRET,
    ROOT,
    SECRET,
    THIRD_SECRET,
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

pytestmark = pytest.mark.django_db(transaction=True)

ROUNDS = 5
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


def repeated(race: Callable[..., None]) -> Callable[..., None]:
    """Runs a race several times, each time without nodes."""

    @functools.wraps(race)
    def run(*args: Any, **kwargs: Any) -> None:
        for _ in range(ROUNDS):
            BackendNode.objects.all().delete()
            RevokedSecret.objects.all().delete()
            race(*args, **kwargs)

    return run


def waiting(count: int = 1) -> None:
    """Returns when that many connections wait for a lock."""

    with psycopg.connect(hot.database_url(), autocommit=True) as watcher:

        def enough() -> bool:
            found = watcher.execute(WAITING).fetchone()
            return found is not None and found[0] >= count

        eventually(enough, what=f"{count} wait for a lock")


@contextmanager
def holding(statement: str, *parameters: Any) -> Iterator[psycopg.Connection]:
    """Another transaction that has locked something; it ends with the block."""
    with psycopg.connect(hot.database_url()) as other:
        other.execute(statement, parameters)
        yield other


def held(node: BackendNode) -> Any:
    """Somebody else holds the node's row."""
    return holding("SELECT 1 FROM backend_nodes WHERE id = %s FOR NO KEY UPDATE", node.pk)


def after(lock: Any, *jobs: Callable[[], Any]) -> list[Any]:
    """Runs the jobs so that all of them wait for `lock` before it is released."""
    results: list[Any] = []
    with lock:
        thread = threading.Thread(target=lambda: results.extend(at_once(*jobs)))
        thread.start()
        waiting(len(jobs))
    thread.join()
    return results


# --- registrations


@pytest.mark.rule("R1.22")
def test_the_same_worker_twenty_times_at_once_is_one_node() -> None:
    results = at_once(*[lambda: register(instance="1" * 32)] * 20)
    assert unexpected(results) == []
    assert len({result.node.pk for result in results}) == 1
    (node,) = BackendNode.objects.all()
    assert kinds(node).count("registered") == 20
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
    assert NodeConflict.objects.filter(node=node, kind=NodeConflict.Kind.NAME).count() == 5


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
    """Sixteen at a time, agents among them, some twice: nobody is refused, nobody is there twice."""
    names = [f"w{number}" for number in range(16)] * 2

    def one(name: str) -> Any:
        agent = name.endswith("5")
        kind = {"node_type": "agent", "address": ""} if agent else {}
        return register(name, secret=own_secret(name), auto_approve=True, **kind)  # type: ignore[arg-type]

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
        lambda: services.approve(node.pk, actor=ROOT, now=later(1)),
        lambda: services.deregister(node.pk, actor=ANNA, now=later(1)),
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
    again, end = after(held(node), register, lambda: services.deregister(node.pk, actor=ROOT, now=later(1)))
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
    services.drain_itself(node.pk, now=NOW)
    results = after(
        held(node),
        lambda: register(instance="2" * 32, now=later(1)),
        lambda: services.drain(node.pk, actor=ANNA, now=later(1)),
        lambda: services.drain_itself(node.pk, now=later(1)),
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
            while isinstance(beat(one)[one.key], Overtaken):
                continue  # as the writer does with the next batch

    def overrides() -> None:
        for number in range(steps):
            services.set_replica_cap(node.pk, number + 1, actor=ROOT, now=later(number))
            services.set_vram_budget(node.pk, f"{number + 1}%", actor=ROOT, now=later(number))

    def edits() -> None:
        for number in range(steps):
            services.merge_labels(node.pk, {f"k{number}": "v"}, actor=ANNA, now=later(number))

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
            lambda n=number: services.merge_labels(node.pk, {f"k{n}": ""}, actor=ROOT, now=NOW)
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
            services.locked(node.pk, seen)
            services.set_replica_cap(node.pk, number, actor=ROOT, now=NOW)

    results = after(held(node), lambda: edit(2), lambda: edit(3))
    assert unexpected(results) == []
    (lost,) = [result for result in results if result is not None]
    assert (type(lost), lost.field) == (errors.Conflict, "revision")
    assert row(node).max_replicas_per_model == (2 if results[0] is None else 3)


@repeated
def test_two_revokes() -> None:
    """One revokes, the other is told that there is nothing left to revoke."""
    node = approved()
    results = after(held(node), *[lambda: services.revoke(node.pk, actor=ROOT, now=later(1))] * 2)
    assert unexpected(results) == []
    assert sum(isinstance(result, errors.Conflict) for result in results) == 1
    assert kinds(node).count("revoked") == RevokedSecret.objects.count() == 1


@repeated
def test_two_decisions_on_one_conflict() -> None:
    """The first counts; a refused one may still be accepted, never the other way round."""
    node = approved()
    at_once(lambda: register(secret=OTHER_SECRET))
    conflict = NodeConflict.objects.get()
    decide = {"actor": ROOT, "now": later(1)}
    results = after(
        held(node),
        lambda: services.accept_conflict(conflict.pk, **decide),  # type: ignore[arg-type]
        lambda: services.refuse_conflict(conflict.pk, **decide),  # type: ignore[arg-type]
        lambda: services.accept_conflict(conflict.pk, **decide),  # type: ignore[arg-type]
    )
    assert unexpected(results) == []
    assert kinds(node).count("conflict_accepted") == 1
    assert kinds(node).count("conflict_refused") == (not isinstance(results[1], Exception))
    assert NodeConflict.objects.get().state == "accepted"
    assert row(node).fingerprint == hash_secret(OTHER_SECRET)


@repeated
def test_a_decision_against_the_claim_that_comes_again() -> None:
    """Who claims holds the node and wants the conflict; who decides must not hold them crosswise."""
    node = approved()
    at_once(lambda: register(secret=OTHER_SECRET))
    conflict = NodeConflict.objects.get()
    claim, decision, copy = after(
        held(node),
        lambda: register(secret=OTHER_SECRET, now=later(1)),
        lambda: services.accept_conflict(conflict.pk, actor=ROOT, now=later(1)),
        lambda: services.note_other_process(node.pk, "9" * 32, source_address="10.6.6.6", now=later(1)),
    )
    assert unexpected([claim, decision, copy]) == []
    assert not isinstance(decision, Exception)
    assert isinstance(claim, errors.Conflict) or status(node) == "healthy"
    conflict.refresh_from_db()
    assert conflict.state == "accepted"


@repeated
def test_a_conflict_against_deregistration() -> None:
    """A copy's call, a decision: recorded before the end, or there is nothing any more."""
    node = approved()
    at_once(lambda: register(secret=OTHER_SECRET))
    conflict = NodeConflict.objects.get()
    results = after(
        held(node),
        lambda: services.deregister(node.pk, actor=ROOT, now=later(1)),
        lambda: services.note_other_process(node.pk, "9" * 32, source_address="10.6.6.6", now=later(1)),
        lambda: services.accept_conflict(conflict.pk, actor=ROOT, now=later(1)),
    )
    assert unexpected(results) == []
    assert isinstance(results[2], BackendNode | errors.NotFound)
    assert not NodeConflict.objects.exists()


@repeated
def test_rotate_against_revoke() -> None:
    """Whoever is second, the old secret is refused, and a revoked node ends without identity."""
    node = approved()
    rotation, revocation = after(
        held(node),
        lambda: services.rotate(
            node.pk, old_fingerprint=hash_secret(SECRET), new_secret=OTHER_SECRET, now=later(1)
        ),
        lambda: services.revoke(node.pk, actor=ROOT, now=later(1)),
    )
    assert unexpected([rotation, revocation]) == []
    assert not isinstance(revocation, Exception)
    assert (status(node), row(node).fingerprint) == ("pending", "")
    lost = isinstance(rotation, errors.NotAuthenticated)
    refused = {hash_secret(SECRET)} if lost else {hash_secret(SECRET), hash_secret(OTHER_SECRET)}
    assert set(RevokedSecret.objects.values_list("pk", flat=True)) == refused


@repeated
def test_register_against_revoke_of_the_same_secret() -> None:
    """The registration was before, or is refused: a revoked secret is never bound again."""
    node = approved()
    results = after(
        held(node),
        lambda: services.revoke(node.pk, actor=ROOT, now=later(1)),
        *[lambda: register(now=later(1), auto_approve=True)] * 3,
        lambda: register("w2", now=later(1), auto_approve=True),
    )
    assert unexpected(results) == []
    assert not isinstance(results[0], Exception)
    assert (status(node), row(node).fingerprint) == ("pending", "")
    assert not BackendNode.objects.filter(name="w2").exists()
    assert all(isinstance(one, errors.Forbidden) or one.node.pk == node.pk for one in results[1:4])


@repeated
def test_rotate_to_a_secret_that_somebody_registers_meanwhile() -> None:
    """The unique constraint decides; the loser is told so."""
    node = approved()
    results = at_once(
        lambda: services.rotate(
            node.pk, old_fingerprint=hash_secret(SECRET), new_secret=OTHER_SECRET, now=later(1)
        ),
        lambda: register("w2", secret=OTHER_SECRET),
    )
    assert unexpected(results) == []
    assert sum(isinstance(result, Exception) for result in results) == 1
    assert BackendNode.objects.filter(fingerprint=hash_secret(OTHER_SECRET)).count() == 1


@pytest.mark.parametrize("kind", ["secret", "name"])
def test_a_decision_that_somebody_else_makes_impossible(kind: str) -> None:
    """The claimed name or secret is taken by a transaction that has not ended yet: a conflict, not a 500."""
    node = approved()
    claimed = {"secret": OTHER_SECRET} if kind == "secret" else {"name": "w2"}
    at_once(lambda: register(**claimed))  # type: ignore[arg-type]
    conflict = NodeConflict.objects.get()
    assert conflict.kind == kind
    taking = holding(
        "INSERT INTO backend_nodes (id, name, name_key, node_type, address, http_address, fingerprint,"
        " approved_by, approval_reason, rejected_by, reject_reason, revoked_by, revoke_reason, drained_by,"
        " drain_reason, drain_is_own, offline_by, offline_reason, offline_recovers, unhealthy_by,"
        " unhealthy_reason, weak_identity, instance, former_instances, source_address, total_vram,"
        " available_vram, reserved_vram, total_ram, available_ram, total_disk, available_disk, gpu_vendor,"
        " gpu_compute_capability, capability, max_replicas_per_model, max_replicas_per_model_manually_set,"
        " vram_budget, vram_budget_bytes, vram_budget_manually_set, inventory_error, revision,"
        " created_at, updated_at)"
        " VALUES (%s, %s, %s, 'backend', 'h:1', '', %s, '', '', '', '', '', '', '', '', false, '', '',"
        " false, '', '', false, '', '[]', '', 0, 0, 0, 0, 0, 0, 0, '', '', '', 1, false, '', 0, false, '',"
        " 0, %s, %s)",
        uuid4(),
        "w2" if kind == "name" else "w3",
        "w2" if kind == "name" else "w3",
        hash_secret(OTHER_SECRET),
        NOW,
        NOW,
    )
    (result,) = after(taking, lambda: services.accept_conflict(conflict.pk, actor=ROOT, now=later(1)))
    assert isinstance(result, errors.Conflict)
    assert NodeConflict.objects.get(pk=conflict.pk).state == "open"
    assert (row(node).name, row(node).fingerprint) == ("w1", hash_secret(SECRET))


# --- rows that refer to a node that goes


@repeated
def test_a_slot_against_deregistration() -> None:
    """A load reserves a slot on a node that is being removed: the slot goes with it, or is not given."""
    node = approved()
    (view,) = fleet("m")
    results = at_once(
        lambda: services.deregister(node.pk, actor=ROOT, now=later(1)),
        *(lambda n=number: reserve(view, f"m{n}", 0, mark="x", backend="b", now=NOW) for number in range(6)),
    )
    assert unexpected(results) == []
    assert results[0] is None
    assert not NodeModel.objects.exists()


def test_nothing_new_refers_to_a_node_between_its_last_look_and_its_end() -> None:
    """Who inserts a row for the node waits for its removal, and then finds it gone."""
    node = approved()
    failed: list[bool] = []

    def insert() -> None:
        try:
            PendingBackendOp.objects.create(node=node, backend="b", op="install")
        except Exception:
            failed.append(True)

    with transaction.atomic():
        services.locked(node.pk, removing=True)
        thread = threading.Thread(target=lambda: at_once(insert))
        thread.start()
        waiting()
        services.deregister(node.pk, actor=ROOT, now=later(1))
    thread.join()
    assert failed == [True]
    assert not PendingBackendOp.objects.exists()


# --- the timeline


def test_conflicts_of_two_transactions_are_counted_exactly() -> None:
    """Coalesced rows under contention: nothing is lost, nothing fails."""
    node = approved(instance="1" * 32)
    register(instance="2" * 32, now=later(1))
    jobs: list[Callable[[], Any]] = [
        lambda: services.note_other_process(node.pk, "1" * 32, source_address="10.6.6.6", now=later(2))
    ] * 6
    jobs += [lambda: register(secret=OTHER_SECRET, now=later(2))] * 6
    assert unexpected(at_once(*jobs)) == []
    assert {event.cause: event.count for event in told(node, "conflict")} == {
        NodeConflict.Kind.INSTANCE.label: 6,
        NodeConflict.Kind.SECRET.label: 6,
    }
    assert sorted(NodeConflict.objects.values_list("kind", "count")) == [("instance", 6), ("secret", 6)]


def test_every_one_of_many_transitions_is_told() -> None:
    node = approved()
    before = len(told(node))

    def toggle(number: int) -> None:
        services.drain(node.pk, actor=ROOT, now=later(number))

    results = at_once(*(lambda n=n: toggle(n) for n in range(8)))
    assert unexpected(results) == []
    assert kinds(node)[before:] == ["drained"]


# --- deadlocks with the hot path, beats, passes


def chain(*works: Callable[[], Any]) -> Callable[[], None]:
    """One job that does the works one after the other, several times; the registry's refusals are answers."""

    def run() -> None:
        for _ in range(5):
            for work in works:
                try:
                    work()
                except errors.ClusterError:
                    continue

    return run


def picks(process: UUID, replicas: list[UUID]) -> Callable[[], None]:
    """The hot path's locks: all replicas of a model by id, then their uses.

    A process that was declared dead meanwhile fails on that, and on nothing else.
    """

    def run() -> None:
        for _ in range(15):
            with suppress(IntegrityError), transaction.atomic():
                rows = NodeModel.objects.filter(pk__in=replicas).order_by("id").select_for_update()
                for one in rows:
                    use, _ = ReplicaUse.objects.get_or_create(
                        process_id=process, replica=one, defaults={"count": 0}
                    )
                    ReplicaUse.objects.filter(pk=use.pk).update(count=1)
                    NodeModel.objects.filter(pk=one.pk).update(in_flight=1)

    return run


def test_no_deadlock_between_hot_path_beats_passes_and_verbs() -> None:
    """Nodes by id before replicas by id, whoever is at it; a deadlock would be an exception here."""
    nodes = [approved(f"w{n}", secret=own_secret(f"w{n}")) for n in range(4)]
    alive, slow = (WebProcess.objects.create(host="h", pid=n, seen_at=NOW).pk for n in range(2))
    listed = [Running(f"m#{index}") for index in range(3)]
    rows = [replica(node, index=index).pk for node in nodes for index in range(3)]
    ModelSchedulingConfig.objects.create(model_name="m", unsatisfiable_until=NOW)

    def fill() -> None:
        for node in nodes:
            for index in range(3):
                reserve_row(node, index)

    def together(order: list[BackendNode]) -> Any:
        with transaction.atomic():
            return beat(*(beat_of(node, secret=own_secret(node.name), at=later(1)) for node in order))

    limits = Limits(node=60, web=15)
    ids = [node.pk for node in nodes]
    jobs = [
        picks(alive, rows),
        picks(slow, rows),
        chain(lambda: together(nodes), lambda: together(nodes[::-1])),
        chain(lambda: apply(Plan(ids, [], ids[::-1]), later(2), limits)),
        chain(lambda: apply(Plan(ids[:2], [slow], ids[2:]), later(500), limits)),
        chain(lambda: services.finish_drains(now=later(99999)), fill),
        chain(*(lambda node=node: services.drain(node.pk, actor=ROOT, now=NOW) for node in nodes)),
        chain(*(lambda node=node: services.resume(node.pk, actor=ROOT, now=NOW) for node in nodes[::-1])),
        chain(
            *(
                lambda node=node: register(
                    node.name, secret=own_secret(node.name), running_processes=listed, now=later(3)
                )
                for node in nodes
            )
        ),
        chain(*(lambda node=node: services.deactivate(node.pk, now=NOW) for node in nodes[::-1])),
        chain(*(lambda node=node: register(node.name, secret=THIRD_SECRET) for node in nodes)),
    ]
    assert at_once(*jobs) == [None] * len(jobs)
    for one in NodeModel.objects.all():
        assert one.in_flight >= 0
    everything_told_is_consistent()


def reserve_row(node: BackendNode, index: int) -> None:
    """A replica that a load has published, if the slot is free."""
    view = next(one for one in fleet("m") if one.id == node.pk)
    slot = reserve(view, "m", index, mark="x", backend="b", now=NOW)
    if slot is not None:
        NodeModel.objects.filter(pk=slot.id).update(state="loaded", address="h:1")


def everything_told_is_consistent() -> None:
    """Along each node's timeline every event starts in the state in which the one before it ended."""
    for node in BackendNode.objects.all():
        events = list(NodeEvent.objects.filter(node_id=node.pk).exclude(kind="conflict").order_by("id"))
        pairs = [(one.status_after, other.status_before) for one, other in itertools.pairwise(events)]
        assert all(before == following for before, following in pairs), [str(event) for event in events]
        assert events[-1].status_after == node.status


def test_silence_against_the_beat_that_comes_after_all() -> None:
    """A pass that found the node silent waits for its beat: then it is not declared gone."""
    node = approved()
    replica(node)
    statement = "UPDATE backend_nodes SET last_heartbeat = %s WHERE id = %s"
    silent = after(
        holding(statement, later(99), node.pk),
        lambda: services.fell_silent([node.pk], limit=60, actor=actors.task("liveness"), now=later(100)),
    )
    assert silent == [0]
    assert (status(node), kinds(node).count("fell_silent")) == ("healthy", 0)


def test_two_passes_at_once_end_a_drain_once_and_a_silence_once() -> None:
    node = approved()
    replica(node, in_flight=1)
    services.drain(node.pk, actor=ROOT, now=NOW, deadline=1)
    ended = after(held(node), *[lambda: services.finish_drains(now=later(5))] * 3)
    assert sorted(ended) == [0, 0, 1]
    silence = {"limit": 60, "actor": actors.task("liveness"), "now": later(99)}
    gone = after(held(node), *[lambda: services.fell_silent([node.pk], **silence)] * 3)  # type: ignore[arg-type]
    assert sorted(gone) == [0, 0, 1]
    assert [kinds(node).count(kind) for kind in ("drain_ended", "fell_silent")] == [1, 1]
