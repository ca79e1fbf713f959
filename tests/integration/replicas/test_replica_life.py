"""One engine is one row, from its reserved slot to the confirmed end, whatever becomes of its node."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, transaction

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from localai_cluster.kit.leases import Attempt
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import decode
from nodes.decisions import fleet_cache
from nodes.gateway.request import InferenceRequest
from nodes.loading import load_request
from nodes.models import BackendNode, NodeModel, OwnerKind, Phase, PhaseReason, ReplicaUse
from nodes.models.replica import load_key
from nodes.registry import lifecycle
from nodes.registry import lifecycle as node_drains
from nodes.registry.registration import Running
from nodes.replicas import drains, engines, hooks, slots, states, terminations, unload_requests
from nodes.replicas import stops as engine_stops
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica
from nodes.replicas.slots import Slot
from nodes.replicas.states import PHASES
from nodes.replicas.stops import Stopper
from nodes.replicas.unload_requests import UnloadRequest
from operations.executor.work import in_thread
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.models import Operation, TargetStatus
from tests.conftest import until
from tests.support import hot
from tests.support.bus import PlayedBus
from tests.support.fleet import approved, register
from tests.support.fleet import replica as fleet_replica
from tests.support.replicas import attempt, columns

pytestmark = pytest.mark.django_db(transaction=True)

GONE = m.StopModelReply(matched=True, terminated=True)
ADDRESS = "10.0.0.1:50100"


@pytest.fixture
def heard() -> Iterator[list[RemovedReplica]]:
    """What the hooks hear."""
    told: list[RemovedReplica] = []
    hooks.on_removed.append(told.append)
    yield told
    hooks.on_removed.remove(told.append)


def running_load() -> Attempt:
    """A load that a controller executes."""
    request = admission.OperationRequest(
        load_request.KIND, key=load_key("echo"), element="echo", by=Requester("test")
    )
    admission.admit(request, now=clock.now())
    (operation,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
    return (operation.id, operation.fence)


def reserved(node: BackendNode, owner: Attempt) -> Slot:
    (view,) = fleet_cache.read_fleet("echo", allowed_nodes=[node.pk])
    slot = slots.reserve(view, "echo", attempt=owner, backend="echo", now=clock.now())
    assert isinstance(slot, Slot), slot
    return slot


def bus_of(node: BackendNode, reply: Any = GONE) -> PlayedBus:
    bus = PlayedBus()
    bus.replies[messages.subject("model.stop", str(node.id))] = reply
    return bus


def stops(bus: PlayedBus, node: BackendNode) -> list[tuple[str, str]]:
    sent = [
        decode(body, m.StopModelRequest) for body in bus.asked[messages.subject("model.stop", str(node.id))]
    ]
    return [(stop.process_key, stop.expected_address) for stop in sent]


def phases() -> list[str]:
    return sorted(NodeModel.engines.values_list("phase", flat=True))


# --- the constraints of the table


def test_the_database_accepts_the_owners_and_reasons_of_the_table() -> None:
    """An owner that a phase cannot have, or a missing deadline, is refused."""
    node = hot.node()
    for index, (phase, kind) in enumerate(product(Phase, ["", *OwnerKind])):
        row = columns(phase=phase)
        row |= {
            "owner_kind": kind,
            "owner_id": uuid4() if kind in (OwnerKind.OPERATION, OwnerKind.INTENT) else None,
        }
        allowed = kind in PHASES[phase].owners or (not kind and not PHASES[phase].owners)
        assert accepted(node, index, row) == allowed, (phase, kind)
    for index, phase in enumerate(Phase):
        without = columns(phase=phase, deadline=None)
        assert accepted(node, 100 + index, without) == (phase == Phase.SERVING), phase
    for index, (phase, reason) in enumerate(product(Phase, ["", *PhaseReason])):
        allowed = reason in PHASES[phase].reasons or (not reason and not PHASES[phase].reasons)
        assert accepted(node, 200 + index, columns(phase=phase, reason=reason)) == allowed, (phase, reason)


def accepted(node: BackendNode, index: int, row: dict[str, Any]) -> bool:
    try:
        with transaction.atomic():
            NodeModel.engines.create(node=node, model_name="m", replica_index=index, **row)
    except IntegrityError:
        return False
    return True


def test_no_cascade_takes_an_engine_away() -> None:
    node = hot.node()
    fleet_replica(node, phase="departed")
    with pytest.raises(IntegrityError):
        BackendNode.objects.filter(pk=node.pk).delete()


# --- loads whose owner is gone


@pytest.mark.rule("R2.43", "R2.62")
@pytest.mark.parametrize("ended", ["failed", "cancelled"])
async def test_a_load_whose_operation_has_ended_leaves_no_slot(ended: str) -> None:
    """After its last lost lease, or when its reservation was committed after the cancellation."""
    node = await in_thread(hot.node)
    owner = await in_thread(running_load)
    over = {"status": ended, "finished_at": clock.now(), "lease_until": None, "lease_owner": ""}
    await in_thread(lambda: Operation.objects.update(**over))
    slot = await in_thread(reserved, node, owner)
    await in_thread(
        lambda: lifecycle.drain(node.pk, actor=actors.task("test"), now=clock.now(), deadline=600)
    )
    bus = bus_of(node)
    await Stopper(bus).run_pass()
    assert await in_thread(phases) == []
    assert not await in_thread(partial(slots.start, slot, attempt=owner, now=clock.now()))


async def test_its_engine_is_stopped_if_it_may_have_one() -> None:
    node = await in_thread(hot.node)
    owner = attempt("ended:1")
    slot = await in_thread(reserved, node, owner)
    assert await in_thread(partial(slots.start, slot, attempt=owner, now=clock.now()))
    await in_thread(slots.record_answer, slot, ADDRESS)
    bus = bus_of(node)
    await Stopper(bus).run_pass()
    assert stops(bus, node) == [("echo#0", ADDRESS)]
    assert await in_thread(phases) == []


def test_a_load_that_is_too_old_ends_although_its_operation_goes_on() -> None:
    slot = reserved(hot.node(), owner := running_load())
    assert slots.end_abandoned_loads(now=clock.now()) == []
    late = clock.now() + states.LOAD_LIMIT + timedelta(seconds=1)
    assert [row.pk for row in slots.end_abandoned_loads(now=late)] == [slot.id]
    assert not slots.is_owned(slot, attempt=owner)


def test_an_answer_that_comes_late_tells_the_stop_the_address() -> None:
    """The row is that engine's, whoever owns it now; an earlier answer stays."""
    slot = reserved(hot.node(), owner := attempt("a:1"))
    assert slots.start(slot, attempt=owner, now=clock.now())
    slots.end_attempt(slot, attempt=owner, now=clock.now())
    slots.record_answer(slot, ADDRESS)
    slots.record_answer(slot, "10.0.0.1:9")
    row = NodeModel.engines.get()
    assert (row.phase, row.start_answered, row.address) == ("stopping", True, ADDRESS)
    assert not slots.publish(
        slot, attempt=owner, address="x:1", backend="b", options={}, revision="", now=clock.now()
    )


# --- nodes that leave


@pytest.mark.rule("R1.101", "R1.103", "R1.20")
async def test_a_departed_replica_counts_for_nobody_and_keeps_slot_and_memory(
    heard: list[RemovedReplica],
) -> None:
    node = await in_thread(lambda: hot.node(available_vram=10, total_vram=10))
    needs: dict[str, Any] = {
        "vram_needed": 4,
        "vram_seen": 10,
        "vram_seen_at": clock.now(),
        "loaded_at": clock.now(),
    }
    row = await in_thread(lambda: hot.replica(node, **needs))
    async with hot.picker() as picker:
        replica = await picker.acquire(InferenceRequest(model="echo"))
        assert replica is not None
        await in_thread(lambda: lifecycle.deactivate(node.pk, now=clock.now()))
        picker.release(replica)
        await picker.settle()
        assert await picker.acquire(InferenceRequest(model="echo")) is None
    left = await in_thread(NodeModel.engines.get)
    assert (left.pk, left.phase, left.state, left.in_flight) == (row.pk, "departed", None, 0)
    assert not await in_thread(NodeModel.objects.exists)
    assert not await in_thread(ReplicaUse.objects.exists)
    assert heard == [RemovedReplica("echo", node.pk, ALL_REPLICAS)]
    await in_thread(lambda: BackendNode.objects.update(offline_at=None))
    (view,) = await in_thread(fleet_cache.read_fleet, "echo")
    assert (view.used_indices, view.free_vram) == (frozenset(), 6)
    assert (await in_thread(reserved, node, attempt("a:1"))).replica_index == 1
    await in_thread(lambda: engines.forget_departed(now=clock.now() + states.DEPARTED_ENGINE_LIMIT))
    assert heard == [RemovedReplica("echo", node.pk, ALL_REPLICAS)], "it was announced when it departed"


@pytest.mark.rule("R5.4", "R5.5")
async def test_a_node_that_was_only_silent_has_exactly_its_former_engines_stopped() -> None:
    node = await in_thread(lambda: hot.node(last_heartbeat=clock.now() - timedelta(hours=1)))
    await in_thread(lambda: hot.replica(node, address=ADDRESS))
    silent = partial(lifecycle.mark_silent, [node.pk], limit=60, actor=actors.task("test"), now=clock.now())
    assert await in_thread(silent) == 1
    bus = bus_of(node)
    assert await Stopper(bus).run_pass() == 0, "it cannot be reached"
    await in_thread(lambda: BackendNode.objects.update(offline_at=None, last_heartbeat=clock.now()))
    assert await Stopper(bus).run_pass() == 1
    assert stops(bus, node) == [("echo#0", ADDRESS)]
    assert await in_thread(phases) == []


@pytest.mark.rule("R1.12", "R1.14")
def test_a_registration_confirms_the_end_of_what_it_does_not_list() -> None:
    node = approved()
    listed, gone = (
        fleet_replica(node, "m", 0, phase="departed"),
        fleet_replica(node, "m", 1, phase="departed"),
    )
    register(running_processes=[Running("m#0", listed.address)])
    assert [row.pk for row in NodeModel.engines.all()] == [listed.pk]
    assert NodeModel.engines.get().next_stop_at is None, "its stop is due at once"
    assert gone.pk != listed.pk


@pytest.mark.parametrize("seconds", [1, 61])
def test_a_start_that_was_never_answered_may_yet_come_after_a_registration(seconds: int) -> None:
    node = approved()
    started = clock.now() - timedelta(seconds=seconds)
    fleet_replica(node, phase="starting", started_at=started, address="")
    register(running_processes=[], now=clock.now())
    assert phases() == (["departed"] if seconds < 60 else [])
    assert not NodeModel.objects.exists()


def test_a_removed_node_takes_its_engines_with_it(heard: list[RemovedReplica]) -> None:
    node = hot.node()
    hot.replica(node)
    hot.replica(node, index=1, phase="departed")
    lifecycle.deregister(node.pk, actor=actors.task("test"), now=clock.now())
    assert phases() == []
    assert heard == [RemovedReplica("echo", node.pk, ALL_REPLICAS)]


def test_an_engine_whose_node_stays_away_counts_as_ended_in_the_end() -> None:
    node = hot.node()
    hot.replica(node)
    lifecycle.deactivate(node.pk, now=clock.now())
    now = clock.now()
    assert engines.forget_departed(now=now + states.DEPARTED_ENGINE_LIMIT - timedelta(minutes=1)) == []
    assert len(engines.forget_departed(now=now + states.DEPARTED_ENGINE_LIMIT + timedelta(minutes=1))) == 1
    assert phases() == []


def test_a_node_that_comes_and_goes_does_not_extend_the_deadline_of_its_departed_engines() -> None:
    node = hot.node()
    hot.replica(node)
    now = clock.now()
    for hours in range(3):
        hot.replica(node, index=1 + hours)
        with transaction.atomic():
            assert engines.depart(node.pk, now=now + timedelta(hours=hours)) == (2 if hours == 0 else 1)
    deadlines = NodeModel.engines.order_by("replica_index").values_list("deadline", flat=True)
    assert [deadline - now - states.DEPARTED_ENGINE_LIMIT for deadline in deadlines if deadline] == [
        timedelta(hours=hours) for hours in (0, 0, 1, 2)
    ]


async def test_a_drained_node_is_not_safe_before_its_engines_have_ended() -> None:
    node = await in_thread(hot.node)
    await in_thread(lambda: hot.replica(node, address=ADDRESS))
    await in_thread(lambda: node_drains.drain(node.pk, actor=actors.task("test"), now=clock.now()))
    assert await in_thread(phases) == ["departed"]
    bus = bus_of(node)
    bus.replies[messages.subject("models.running", str(node.id))] = m.RunningReply()
    await Stopper(bus).run_pass()
    assert stops(bus, node) == [("echo#0", ADDRESS)]
    assert (await in_thread(BackendNode.objects.get)).engines_gone_at is None
    await Stopper(bus).run_pass()
    assert (await in_thread(BackendNode.objects.get)).engines_gone_at is not None


# --- replicas that leave


async def test_a_lost_replica_that_an_unload_has_taken_over_does_not_return() -> None:
    """The operation was asked to stop it; that it is cancelled does not prove that the engine answers."""
    node = await in_thread(hot.node)
    row = await in_thread(hot.replica, node)

    @transaction.atomic
    def taken() -> None:
        terminations.lose_all([row.pk], now=clock.now())
        drains.drain_for_unload(
            "echo", [node.pk], index=None, deadline=clock.now(), operation_id=uuid4(), now=clock.now()
        )

    await in_thread(taken)
    assert await in_thread(phases) == ["terminating"]
    assert await in_thread(drains.return_abandoned) == []
    bus = bus_of(node)
    assert await Stopper(bus).run_pass() == 1
    assert stops(bus, node) == [("echo#0", row.address)]


def test_a_replica_that_returned_is_not_ended_by_a_late_confirmation() -> None:
    row = hot.replica(hot.node())
    terminations.lose_all([row.pk], now=clock.now())
    row.refresh_from_db()
    assert terminations.restore_lost(row)
    assert not engines.confirm_end(row.pk, stop_sent=clock.now())
    assert phases() == ["serving"]


def test_a_start_that_is_sent_again_may_arrive_after_its_last_send() -> None:
    """A start whose worker did not answer in time is sent again, minutes after the first one."""
    owner, begun_at = running_load(), clock.now()
    slot = reserved(hot.node("a"), owner)
    sent_again_at = begun_at + timedelta(minutes=2)
    assert slots.start(slot, attempt=owner, now=begun_at)
    assert slots.start(slot, attempt=owner, now=sent_again_at)
    engine = NodeModel.engines.get(pk=slot.id)
    assert engines.may_still_start(engine, sent_again_at + timedelta(seconds=5))
    assert not slots.start(slot, attempt=(owner[0], owner[1] + 1), now=sent_again_at)


# --- what comes late


async def test_a_stop_that_was_claimed_long_ago_waits_for_requests_that_have_come_since() -> None:
    """Another controller found the lost replica alive; requests ran there when an unload took it out."""
    node = await in_thread(hot.node)
    row = await in_thread(hot.replica, node)
    now = clock.now()

    def used_again() -> Any:
        with transaction.atomic():
            terminations.lose_all([row.pk], now=now)
        (engine,) = engine_stops.claim_due(9, now=now)
        assert terminations.restore_lost(engine)
        NodeModel.objects.update(in_flight=1)
        with transaction.atomic():
            drains.drain_for_unload(
                "echo",
                [node.pk],
                index=None,
                deadline=now + timedelta(hours=1),
                operation_id=uuid4(),
                now=now,
            )
        return engine

    engine = await in_thread(used_again)
    bus = bus_of(node)
    assert await engine_stops.send_stop(bus, engine, node.name) is None
    assert stops(bus, node) == []
    assert await in_thread(phases) == ["draining"]
    await in_thread(lambda: NodeModel.objects.update(in_flight=0))
    assert await engine_stops.send_stop(bus, engine, node.name) is not None
    assert stops(bus, node) == [("echo#0", row.address)]


def test_an_attempt_that_is_over_ends_no_engine_at_its_former_address() -> None:
    """Its worker started anew and gave the port to the engine of a later load."""
    node, early = approved(), clock.now() - timedelta(minutes=1)
    over = reserved(node, owner := attempt("over:1"))
    assert slots.start(over, attempt=owner, now=early)
    slots.record_answer(over, ADDRESS)
    later = NodeModel.engines.create(
        node=node,
        model_name="other",
        **columns(phase="starting", address=ADDRESS, started_at=early + timedelta(seconds=30)),
    )
    assert engines.end_at_address(ADDRESS, node_id=node.pk, new_engine_id=over.id) == []
    slots.end_attempt(over, attempt=owner, now=clock.now())
    NodeModel.engines.filter(pk=later.pk).update(started_at=early - timedelta(seconds=30))
    assert engines.end_at_address(ADDRESS, node_id=node.pk, new_engine_id=over.id) == []
    assert phases() == ["starting", "stopping"]


def test_an_upgrade_ends_no_engine_that_was_started_after_its_command() -> None:
    """The worker stopped the first engine of the slot, whose start had no answer; the load sent another."""
    node = hot.node()
    slot = reserved(node, owner := attempt("a:1"))
    assert slots.start(slot, attempt=owner, now=clock.now())
    before = engines.engine_ids(node.pk)
    assert slots.start(slot, attempt=owner, now=clock.now())
    slots.record_answer(slot, ADDRESS)
    assert engines.end_stopped(node.pk, ["echo#0"], among=before) == []
    assert phases() == ["starting"]


@pytest.mark.rule("R1.12")
@pytest.mark.parametrize("seconds", [1, 61])
def test_an_engine_that_came_up_while_a_registration_was_under_way_is_stopped(seconds: int) -> None:
    """Its list does not have the engine, and is no proof that it does not run."""
    node, now = approved(), clock.now()
    fleet_replica(node, phase="starting", started_at=now - timedelta(seconds=seconds), start_answered=True)
    register(running_processes=[], now=now)
    assert phases() == (["departed"] if seconds < 60 else [])


async def test_a_stop_that_an_unload_has_given_up_goes_on_while_the_unload_waits_elsewhere() -> None:
    """Its target has ended; the requests on another node may take an hour."""
    node, other = await in_thread(hot.node, "one"), await in_thread(hot.node, "two")

    def given_up() -> None:
        rows = [hot.replica(node), hot.replica(other, index=1, in_flight=1)]
        wish = UnloadRequest("echo", Requester("anna"), grace=3600)
        operation = unload_requests.unload(wish, now=clock.now()).operation
        (claimed,) = attempts.claim("c", now=clock.now(), lease=3600, limit=1)
        with transaction.atomic():
            engines = drains.drain_for_unload(
                "echo",
                [node.pk, other.pk],
                index=None,
                deadline=clock.now() + timedelta(hours=1),
                operation_id=operation.id,
                now=clock.now(),
            )
        mine = next(engine for engine in engines if engine.id == rows[0].pk)
        assert engine_stops.record_sent(mine, now=clock.now())
        engine_stops.record_failure(mine, "still running", now=clock.now() - timedelta(minutes=1))
        assert engine_stops.claim_due(9, now=clock.now()) == []
        ended = (TargetStatus.ERROR, "it may still run")
        attempts.end_target(claimed.id, claimed.fence, node.pk, *ended, now=clock.now())

    await in_thread(given_up)
    bus = bus_of(node)
    assert await Stopper(bus).run_pass() == 1
    assert stops(bus, node) == [("echo#0", "127.0.0.1:50000")]
    assert await in_thread(phases) == ["draining"], "the other one waits for its request"


async def test_a_replica_that_came_up_during_an_unload_and_was_evicted_does_not_wait_for_the_unload() -> None:
    """The unload waits for requests of the replicas that it drained, and does not stop a later one."""
    node = await in_thread(hot.node)

    def evicted_meanwhile() -> None:
        hot.replica(node, in_flight=1)
        wish = UnloadRequest("echo", Requester("anna"), node=node, grace=3600)
        operation = unload_requests.unload(wish, now=clock.now()).operation
        attempts.claim("c", now=clock.now(), lease=3600, limit=1)
        with transaction.atomic():
            drains.drain_for_unload(
                "echo",
                [node.pk],
                index=None,
                deadline=clock.now() + timedelta(hours=1),
                operation_id=operation.id,
                now=clock.now(),
            )
            later = hot.replica(node, index=1)
            terminations.evict([later.pk], now=clock.now())

    await in_thread(evicted_meanwhile)
    bus = bus_of(node)
    assert await Stopper(bus).run_pass() == 1
    assert stops(bus, node) == [("echo#1", "127.0.0.1:50001")]
    assert await in_thread(phases) == ["draining"]


async def test_what_needs_no_worker_goes_on_without_the_bus() -> None:
    """Requests reach engines without it: a replica whose unload has ended must not wait for it."""
    node = await in_thread(hot.node)
    left: dict[str, Any] = {"phase": "draining", "owner_kind": "operation", "owner_id": uuid4()}

    def rows() -> None:
        hot.replica(node, **left)
        hot.replica(node, index=1, phase="reserved")
        hot.replica(node, index=2, phase="terminating")

    await in_thread(rows)
    bus = bus_of(node)
    bus.connected = False
    stopper = asyncio.create_task(Stopper(bus).run())

    async def is_settled() -> bool:
        return await in_thread(phases) == ["serving", "terminating"]

    try:
        await until(is_settled)
    finally:
        stopper.cancel()
        await asyncio.gather(stopper, return_exceptions=True)
    assert not bus.asked
