"""The hot path, beats, passes and verbs at once: nothing refers to a node that is gone, nothing deadlocks."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import IntegrityError, transaction

from localai_cluster.accounts import actors
from localai_cluster.kit import errors
from localai_cluster.kit.transactions import Lock, try_lock
from nodes.decisions.fleet_cache import read_fleet
from nodes.models import (
    BackendNode,
    ModelSchedulingConfig,
    NodeEvent,
    NodeModel,
    PendingBackendOp,
    ReplicaUse,
    WebProcess,
)
from nodes.reconcilers.liveness import Limits, Plan, apply
from nodes.registry import lifecycle
from nodes.registry.registration import Running
from nodes.replicas import slots
from nodes.replicas.engines import SERVING_COLUMNS
from nodes.replicas.slots import Slot, reserve
from tests.support.fleet import (
    NOW,
    ROOT,
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
    status,
    unexpected,
)
from tests.support.races import after, held, holding, repeated, waiting
from tests.support.replicas import attempt

pytestmark = pytest.mark.django_db(transaction=True)


# --- rows that refer to a node that goes


@repeated
def test_a_slot_against_deregistration() -> None:
    """A load reserves a slot on a node that is being removed: the slot goes with it, or is not given."""
    node = approved()
    (view,) = read_fleet("m")
    results = at_once(
        lambda: lifecycle.deregister(node.pk, actor=ROOT, now=later(1)),
        *(
            lambda n=number: reserve(view, f"m{n}", attempt=attempt("x"), backend="b", now=NOW)
            for number in range(6)
        ),
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
            PendingBackendOp.objects.create(node=node, backend="b", op="install", operation_id=uuid4())
        except Exception:
            failed.append(True)

    with transaction.atomic():
        BackendNode.objects.select_for_update().get(pk=node.pk)
        thread = threading.Thread(target=lambda: at_once(insert))
        thread.start()
        waiting()
        lifecycle.deregister(node.pk, actor=ROOT, now=later(1))
    thread.join()
    assert failed == [True]
    assert not PendingBackendOp.objects.exists()


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
    """Nodes by id before replicas by id, no matter who is at it; a deadlock would be an exception here."""
    nodes = [approved(f"w{n}", secret=own_secret(f"w{n}")) for n in range(4)]
    alive, slow = (WebProcess.objects.create(host="h", pid=n, seen_at=NOW).pk for n in range(2))
    listed = [Running(f"m#{index}") for index in range(3)]
    rows = [replica(node, index=index).pk for node in nodes for index in range(3)]
    ModelSchedulingConfig.objects.create(model_name="m", unsatisfiable_until=NOW)
    BackendNode.objects.update(max_replicas_per_model=3)

    def fill() -> None:
        for node in nodes:
            for _ in range(3):
                reserve_row(node)

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
        chain(lambda: lifecycle.finish_drains(now=later(99999)), fill),
        chain(*(lambda node=node: lifecycle.drain(node.pk, actor=ROOT, now=NOW) for node in nodes)),
        chain(*(lambda node=node: lifecycle.resume(node.pk, actor=ROOT, now=NOW) for node in nodes[::-1])),
        chain(
            *(
                lambda node=node: register(
                    node.name, secret=own_secret(node.name), running_processes=listed, now=later(3)
                )
                for node in nodes
            )
        ),
        chain(*(lambda node=node: lifecycle.deactivate(node.pk, now=NOW) for node in nodes[::-1])),
        chain(*(lambda node=node: register(node.name, secret=THIRD_SECRET) for node in nodes)),
    ]
    assert at_once(*jobs) == [None] * len(jobs)
    for one in NodeModel.objects.all():
        assert one.in_flight >= 0
    everything_told_is_consistent()


def reserve_row(node: BackendNode) -> None:
    """A replica that a load has published, if the slot is free."""
    view = next(one for one in read_fleet("m") if one.id == node.pk)
    slot = reserve(view, "m", attempt=attempt("x"), backend="b", now=NOW)
    if isinstance(slot, Slot):
        NodeModel.objects.filter(pk=slot.id).update(
            phase="serving", **SERVING_COLUMNS, address="h:1", loaded_at=NOW
        )


def everything_told_is_consistent() -> None:
    """Along each node's timeline every event starts in the state in which the one before it ended."""
    for node in BackendNode.objects.all():
        events = list(NodeEvent.objects.filter(node_id=node.pk).exclude(kind="conflict").order_by("id"))
        pairs = [(one.status_after, other.status_before) for one, other in itertools.pairwise(events)]
        assert all(before == following for before, following in pairs), [str(event) for event in events]
        assert events[-1].status_after == node.status


def test_a_start_that_is_recorded_while_its_node_registers_keeps_its_row() -> None:
    """The list of processes is from before the start, so the engine may start afterwards (R1.34)."""
    node = approved("w1", secret=own_secret("w1"))
    (view,) = read_fleet("m")
    owner = attempt("m:1")
    slot = reserve(view, "m", attempt=owner, backend="b", now=NOW)
    assert isinstance(slot, Slot)

    def registered() -> None:
        register("w1", secret=own_secret("w1"), running_processes=[], now=later(1))

    thread = threading.Thread(target=lambda: at_once(registered))
    with transaction.atomic():
        assert slots.start(slot, attempt=owner, now=NOW)
        thread.start()
        waiting()
    thread.join()
    assert NodeModel.engines.get(pk=slot.id).phase == "departed", "a controller stops what may start"
    node.refresh_from_db()
    assert kinds(node)[-1] == "registered"


def test_silence_against_the_beat_that_comes_after_all() -> None:
    """A pass that found the node silent waits for its beat: then it is not declared gone."""
    node = approved()
    replica(node)
    statement = "UPDATE backend_nodes SET last_heartbeat = %s WHERE id = %s"
    silent = after(
        holding(statement, later(99), node.pk),
        lambda: lifecycle.mark_silent([node.pk], limit=60, actor=actors.task("liveness"), now=later(100)),
    )
    assert silent == [0]
    assert (status(node), kinds(node).count("fell_silent")) == ("healthy", 0)


def test_a_pass_holds_no_doubtful_node_while_it_waits_for_another_one() -> None:
    """Heartbeats lock nodes by id; whoever has the first one gets the second one too."""
    first, second = sorted((approved("w1"), approved("w2", secret=THIRD_SECRET)), key=lambda node: node.pk)
    BackendNode.objects.update(inventory_due_at=later(99))
    plan = Plan([], [], recovered=[first.pk], doubtful=[second.pk])

    def run() -> tuple[int, int]:
        with try_lock(Lock.LIVENESS):
            return apply(plan, later(1), Limits(node=60, web=15))

    with ThreadPoolExecutor(1) as pool:
        with held(first) as other:
            passing = pool.submit(at_once, run)
            waiting()
            other.execute("SELECT 1 FROM backend_nodes WHERE id = %s FOR UPDATE NOWAIT", [second.pk])
        assert passing.result() == [(0, 0)]
    second.refresh_from_db()
    assert second.inventory_due_at == later(1)


def test_two_passes_at_once_end_a_drain_once_and_a_silence_once() -> None:
    node = approved()
    replica(node, in_flight=1)
    lifecycle.drain(node.pk, actor=ROOT, now=NOW, deadline=1)
    ended = after(held(node), *[lambda: lifecycle.finish_drains(now=later(5))] * 3)
    assert sorted(ended) == [0, 0, 1]
    silence: dict[str, Any] = {"limit": 60, "actor": actors.task("liveness"), "now": later(99)}
    gone = after(held(node), *[lambda: lifecycle.mark_silent([node.pk], **silence)] * 3)
    assert sorted(gone) == [0, 0, 1]
    assert [kinds(node).count(kind) for kind in ("drain_ended", "fell_silent")] == [1, 1]
