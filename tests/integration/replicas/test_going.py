"""One replica that goes: it is `unloading` until its engine is known to be gone, whatever made it go."""

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from pytest_django import Settings

from localai_cluster.kit import clock, errors
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import RequestTimeout
from localai_cluster.messaging.messages import decode
from nodes.decisions import fleet_cache
from nodes.gateway.request import InferenceRequest, Replica
from nodes.loading import load_request
from nodes.loading.load_placement import find_eviction
from nodes.loading.load_request import ProgressDeadline, request_scale_up
from nodes.models import BackendNode, MassSilence, ModelSchedulingConfig, NodeModel
from nodes.models.replica import load_key
from nodes.placement.choose import Need, choose_node
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion
from nodes.reconcilers import replicas, tasks
from nodes.registry import lifecycle
from nodes.replicas import (
    drains,
    engines,
    eviction,
    reserved_memory,
    slots,
    terminations,
    unload_requests,
)
from nodes.replicas import stops as stops_of_engines
from nodes.replicas.slots import Slot
from nodes.replicas.stops import Stopper
from nodes.replicas.unload_requests import UnloadRequest
from nodes.scheduling import store
from nodes.scheduling.rules import Rule
from operations.executor.work import Work, in_thread, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Operation
from tests.integration.loading.test_evicting import GB, old, placed, read_node
from tests.support import backends, hot
from tests.support.bus import NEVER, PlayedBus
from tests.support.fleet import at_once, unexpected
from tests.support.ports import free_port
from tests.support.replicas import attempt, stop_now

pytestmark = pytest.mark.django_db(transaction=True)

TERMINATED = m.StopModelReply(matched=True, terminated=True)


def bus_of(node: BackendNode, stop: Any = TERMINATED) -> PlayedBus:
    bus = PlayedBus()
    bus.replies[messages.subject("model.stop", str(node.id))] = stop
    return bus


def stops(bus: PlayedBus, node: BackendNode) -> list[tuple[str, str]]:
    asked = [
        decode(body, m.StopModelRequest) for body in bus.asked[messages.subject("model.stop", str(node.id))]
    ]
    return [(one.process_key, one.expected_address) for one in asked]


async def lost(row: NodeModel, *, has_wrong_model: bool = False) -> None:
    """As a request says that got no answer there."""
    async with hot.picker() as picker:
        replica = Replica(row.id, row.node_id, row.replica_index, row.model_name, row.address)
        assert await picker.exclude(replica, has_wrong_model=has_wrong_model)


async def state(row: NodeModel) -> str:
    found = await in_thread(NodeModel.objects.filter(pk=row.pk).values_list("state", flat=True).first)
    return found or "gone"


# --- what a request found dead


@pytest.mark.rule("R2.9", "R2.84", "R1.99", "T-REV-8", "T-REV-11")
async def test_what_a_request_found_dead_is_stopped_exactly_before_its_row_goes() -> None:
    node = await in_thread(hot.node)
    row = await in_thread(lambda: hot.replica(node, address=f"127.0.0.1:{free_port()}"))
    await lost(row)
    assert await state(row) == "unloading"
    bus = bus_of(node, [RequestTimeout("late"), TERMINATED])
    assert await Stopper(bus).run_pass() == 1
    assert await state(row) == "unloading", "no confirmation, so it may still run"
    await in_thread(lambda: stop_now())
    assert await Stopper(bus).run_pass() == 1
    assert await state(row) == "gone"
    assert stops(bus, node) == [("echo#0", row.address)] * 2


@pytest.mark.rule("R2.12", "R2.13")
async def test_what_was_only_out_of_reach_serves_again() -> None:
    """The network between us was cut: nothing is stopped that answers when somebody comes to stop it."""
    node = await in_thread(hot.node)
    async with backends.running_backend("echo", model="echo") as engine:
        row = await in_thread(lambda: hot.replica(node, address=engine.address))
        await lost(row)
        bus = bus_of(node)
        await Stopper(bus).run_pass()
        assert await state(row) == "loaded"
        await lost(row, has_wrong_model=True)
        await Stopper(bus).run_pass()
    assert await state(row) == "gone", "another model answers there, or none"
    assert len(stops(bus, node)) == 1


@pytest.mark.rule("R2.73")
async def test_requests_that_run_there_may_end_first() -> None:
    """For as long as an unload gives them; then it is stopped all the same."""
    node = await in_thread(hot.node)
    row = await in_thread(lambda: hot.replica(node, in_flight=1))
    await lost(row, has_wrong_model=True)
    bus = bus_of(node)
    assert await Stopper(bus).run_pass() == 0
    await in_thread(lambda: stop_now())
    assert await Stopper(bus).run_pass() == 1
    assert await state(row) == "gone"


@pytest.mark.rule("R4.10")
def test_while_the_brake_holds_what_does_not_answer_counts_as_there() -> None:
    """We are cut off from many at once: nothing is loaded in their place."""
    hot.node("two")
    row = hot.replica(hot.node("one"), "echo")
    store.set_rule(Rule("echo", min_replicas=1), clock.now())
    terminations.lose_all([row.pk], now=clock.now())
    now = clock.now()
    held = MassSilence.objects.create(since=now, until=now + timedelta(minutes=5), nodes=[], of=9)
    replicas.run_pass(tick=False)
    assert ModelSchedulingConfig.objects.get().current_replicas == 1
    held.delete()
    replicas.run_pass(tick=False)
    assert ModelSchedulingConfig.objects.get().current_replicas == 0


@pytest.mark.rule("R2.84")
def test_an_engine_that_cannot_be_stopped_reaches_an_operator_once() -> None:
    """As an unload of that replica, which stays in the inbox if it fails too."""
    node = hot.node()
    row = hot.replica(node, in_flight=1)
    terminations.lose_all([row.pk], now=clock.now())
    assert unload_requests.report_stuck(now=clock.now()) == 0
    assert stops_of_engines.record_sent(row, now=clock.now())
    stops_of_engines.record_failure(row, "termination not confirmed", now=clock.now())
    assert unload_requests.report_stuck(now=clock.now()) == 0
    stop_now()
    tasks.state_pass()
    assert unload_requests.report_stuck(now=clock.now()) == 0
    (asked,) = Operation.objects.all()
    assert (asked.kind, asked.node_id, asked.payload["replica_index"]) == (drains.UNLOAD_KIND, node.id, 0)
    assert asked.payload["reason"].endswith("(lost) and was not stopped: termination not confirmed")


# --- what a failed load has left


def failed_load(node: BackendNode, *, started: bool) -> Slot:
    (view,) = fleet_cache.read_fleet("echo", allowed_nodes=[node.pk])
    mine = attempt("gone:1")
    slot = slots.reserve(view, "echo", attempt=mine, backend="echo", now=clock.now())
    assert isinstance(slot, Slot)
    if started:
        assert slots.start(slot, attempt=mine, now=clock.now())
        slots.record_answer(slot, "127.0.0.1:7")
    slots.end_attempt(slot, attempt=mine, now=clock.now())
    return slot


@pytest.mark.rule("R2.62", "R2.84", "R2.28")
async def test_the_place_of_a_failed_load_is_free_when_its_engine_is_gone() -> None:
    node = await in_thread(hot.node)
    await in_thread(lambda: failed_load(node, started=False))
    assert await in_thread(NodeModel.objects.count) == 0, "no engine was started"
    await in_thread(lambda: failed_load(node, started=True))
    assert await in_thread(lambda: fleet_cache.read_fleet("echo")[0].used_indices) == set(), (
        "it was no replica"
    )
    beside = await in_thread(lambda: failed_load(node, started=False))
    assert beside.replica_index == 1, "its index is not free before its engine is gone"
    silent = bus_of(node, RequestTimeout("late"))
    await Stopper(silent).run_pass()
    assert await in_thread(NodeModel.objects.count) == 1
    await in_thread(stop_now)
    await Stopper(bus_of(node)).run_pass()
    assert await in_thread(NodeModel.objects.count) == 0


@pytest.mark.rule("R2.28", "R4.36")
async def test_such_a_place_is_no_replica_and_never_serves() -> None:
    """Nothing to unload and nothing to return."""
    node = await in_thread(hot.node)
    await in_thread(lambda: failed_load(node, started=True))
    assert await in_thread(lambda: drains.unloadable_replicas("echo").count()) == 0
    assert await in_thread(drains.return_abandoned) == []
    assert await in_thread(NodeModel.objects.count) == 1


# --- memory


def free(node: BackendNode) -> int:
    return fleet_cache.read_fleet("any", allowed_nodes=[node.pk])[0].free_vram // GB


@pytest.mark.rule("R1.51", "R1.33")
async def test_what_an_unload_gives_back_counts_until_the_next_reading() -> None:
    """By its estimate, if the reading shows the engine and the worker says that the stop ended it."""
    node = await in_thread(lambda: read_node("one", 2))
    await in_thread(lambda: BackendNode.objects.update(vram_read_at=clock.now() - timedelta(seconds=8)))
    row = await in_thread(lambda: old(node, "echo"))
    await lost(row, has_wrong_model=True)
    await Stopper(bus_of(node)).run_pass()
    assert await state(row) == "gone"
    assert await in_thread(lambda: free(node)) == 12
    await in_thread(lambda: BackendNode.objects.update(available_vram=11 * GB, vram_read_at=clock.now()))
    assert await in_thread(lambda: free(node)) == 11


@pytest.mark.rule("R1.51", "T-REV-9")
@pytest.mark.parametrize("case", ["ended-before", "read-since", "not-shown"])
async def test_what_a_reading_may_show_already_is_not_given_away_twice(case: str) -> None:
    node = await in_thread(lambda: read_node("one", 2))
    at = clock.now() + timedelta(seconds=60 if case == "read-since" else -8)
    await in_thread(lambda: BackendNode.objects.update(vram_read_at=at))
    loaded_at = clock.now() if case == "not-shown" else hot.EPOCH
    row = await in_thread(lambda: hot.replica(node, vram_needed=10 * GB, loaded_at=loaded_at))
    await lost(row, has_wrong_model=True)
    reply = dataclasses.replace(TERMINATED, matched=False) if case == "ended-before" else TERMINATED
    await Stopper(bus_of(node, reply)).run_pass()
    assert await state(row) == "gone"
    assert await in_thread(lambda: free(node)) == 2


@pytest.mark.rule("R1.51", "R1.47")
def test_what_comes_back_stays_below_a_budget_and_adds_up() -> None:
    node = read_node("one", 2)
    BackendNode.objects.update(vram_read_at=clock.now() - timedelta(seconds=8))
    rows = [old(node, "echo", index) for index in range(2)]
    for row in rows:
        reserved_memory.credit_stopped_engine(row, stop_sent=clock.now())
    NodeModel.objects.all().delete()
    assert free(node) == 22
    BackendNode.objects.update(vram_budget_bytes=15 * GB)
    assert free(node) == 15


@pytest.mark.rule("R1.51", "R2.43")
@pytest.mark.parametrize("state", ["loading", "unloading"])
def test_a_row_goes_although_its_memory_cannot_be_given_back(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal is committed by then: the next reading makes up for it, and nobody hears of an error."""

    def lost(*_: Any, **__: Any) -> None:
        raise OperationalError("connection lost")

    for name in ("credit_stopped_engine", "release"):
        monkeypatch.setattr(reserved_memory, name, lost)
    node = read_node("one", 2)
    fields: dict[str, Any] = {"state": state, "vram_on_node": True, "vram_needed": GB}
    row = hot.replica(node, loaded_at=clock.now() if state == "unloading" else None, **fields)
    if state == "unloading":
        assert engines.confirm_end(row.pk, stop_sent=clock.now())
    else:
        slots.end_attempt(Slot(row.pk, node.pk, node.name, 0), attempt=attempt("nobody:1"), now=clock.now())
    assert not NodeModel.objects.exists()


@pytest.mark.rule("R1.51")
def test_no_more_comes_back_than_the_node_has() -> None:
    """An engine that was estimated larger than its node had taken what there was."""
    node = read_node("one", 2)
    BackendNode.objects.update(vram_read_at=clock.now() - timedelta(seconds=8), total_vram=24 * GB)
    row = old(node, "echo", size=40)
    reserved_memory.credit_stopped_engine(row, stop_sent=clock.now())
    NodeModel.objects.all().delete()
    assert free(node) == 24


@pytest.mark.rule("R2.51", "R2.52")
def test_a_victim_whose_stop_fails_makes_no_later_load_evict_more() -> None:
    """Its memory is the first load's while that waits; after that it is nobody's until it is gone."""
    node = read_node("one", 0)
    BackendNode.objects.update(max_replicas_per_model=9)
    for index in range(3):
        old(node, "a", index)
    need = Need(vram=10 * GB, vram_required=True)
    assert isinstance(placed(1, need), Slot)
    victim = NodeModel.objects.get(state="unloading")
    assert stops_of_engines.record_sent(victim, now=clock.now())
    stops_of_engines.record_failure(victim, "not confirmed", now=clock.now())
    assert isinstance(placed(2, need), Slot)
    assert NodeModel.objects.filter(state="unloading").count() == 2, "one for each load"
    long_ago = clock.now() - eviction.STOPS_WITHIN - timedelta(seconds=1)
    NodeModel.objects.filter(pk=victim.pk).update(updated_at=long_ago)
    assert victim.pk not in {one.id for one in eviction.residents([node.pk], now=clock.now())}


@pytest.mark.rule("T-REG-130", "R2.52")
def test_a_replica_that_is_replaced_does_not_count_toward_the_minimum() -> None:
    """With one current replica nothing may go; with a second one a current one does."""
    node = read_node("one", 0)
    former, _ = old(node, "a", 0), old(node, "a", 1)
    ModelSchedulingConfig.objects.create(model_name="a", min_replicas=1)
    terminations.replace([former.pk], now=clock.now())
    NodeModel.objects.filter(pk=former.pk).update(in_flight=1)
    need = Need(vram=5 * GB, vram_required=True)
    assert not isinstance(placed(1, need), Slot)
    old(node, "a", 2)
    assert isinstance(placed(2, need), Slot)
    gone = NodeModel.objects.filter(reason="evicted")
    assert [row.replica_index for row in gone] == [1]


# --- a request, an eviction, a drain, an edit, at once


@pytest.mark.rule("R1.79", "R2.51", "R1.19", "I8")
async def test_no_request_fails_because_its_replica_went(settings: Settings) -> None:
    """However they meet: what was picked has its row and its count until the request has ended."""
    node, other = await in_thread(lambda: read_node("one", 0)), await in_thread(lambda: hot.node("two"))
    rows = [await in_thread(partial(old, node, "echo", index)) for index in range(3)]
    rows.append(await in_thread(partial(hot.replica, other, "echo")))
    need, over = Need(vram=5 * GB, vram_required=True), asyncio.Event()
    missing: list[str] = []

    async def requests() -> int:
        served = 0
        async with hot.picker() as picker:
            while not over.is_set():
                replica = await picker.acquire(InferenceRequest(model="echo"))
                if replica is None:
                    break
                row = await in_thread(NodeModel.objects.filter(pk=replica.id).first)
                if row is None or not row.in_flight:
                    missing.append(replica.address)
                served += 1
                picker.release(replica)
            await picker.settle()
        return served

    async def goings() -> None:
        stopper = Stopper(bus_of(node))
        for number in range(3):
            await in_thread(evicts, number, need)
            await in_thread(gives_way, rows[number])
            await stopper.run_pass()
        await in_thread(lambda: lifecycle.finish_drains(now=clock.now()))
        over.set()

    served, *_ = await asyncio.gather(requests(), requests(), goings())
    assert served
    assert missing == []
    assert set((await in_thread(hot.counts)).values()) <= {0}


def evicts(number: int, need: Need) -> None:
    fleet = fleet_cache.read_fleet(
        f"m{number}", allowed_nodes=NodeModel.objects.values_list("node_id", flat=True)
    )
    view = FleetView([one for one in fleet if one.name == "one"], need)
    room = find_eviction(f"m{number}", LoadQuestion(view), view.decide())
    if room is not None and room.node is not None:
        slots.reserve(
            room.node,
            f"m{number}",
            attempt=attempt(f"{number}:1"),
            backend="b",
            now=clock.now(),
            need=need,
            room=room,
        )


def gives_way(row: NodeModel) -> None:
    """To a successor, unless a request or an eviction was faster."""
    with contextlib.suppress(errors.Conflict):
        replicas.replace_replica(row.pk, clock.now())


@pytest.mark.rule("R2.51", "R1.79", "R4.18")
def test_an_eviction_a_successor_and_an_unload_never_take_one_replica_twice() -> None:
    node = read_node("one", 0)
    row = old(node, "a")
    old(node, "a", 1, in_flight=1)
    need = Need(vram=5 * GB, vram_required=True)
    jobs = [
        lambda: placed(1, need),
        lambda: gives_way(row),
        lambda: unload_requests.unload(
            UnloadRequest("a", Requester("anna"), node=node, index=0), now=clock.now()
        ),
    ]
    results = at_once(*jobs)
    assert [one for one in unexpected(results) if "not loaded" not in str(one)] == []
    assert NodeModel.objects.get(pk=row.pk).reason in {"evicted", "replaced", ""}


# --- a frozen worker, an older release


@pytest.mark.rule("A82", "R4.10", "R4.22")
async def test_a_minimum_is_restored_elsewhere_while_a_worker_hangs(
    tmp_path: Path, settings: Settings
) -> None:
    """It takes commands and answers none; its node is still healthy. Counts are true all the time."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    frozen, well = await in_thread(lambda: hot.node("frozen")), await in_thread(lambda: hot.node("well"))
    row = await in_thread(lambda: hot.replica(frozen, address=f"127.0.0.1:{free_port()}"))
    await in_thread(lambda: store.set_rule(Rule("echo", min_replicas=1), clock.now()))
    bus = PlayedBus()
    for command in ("backend.list", "model.stop", "models.running"):
        bus.replies[messages.subject(command, str(frozen.id))] = NEVER
    bus.replies[messages.subject("backend.list", str(well.id))] = m.ListReply(
        (m.InstalledBackend(name="echo"),)
    )
    await lost(row)
    stopping = asyncio.create_task(Stopper(bus).run_pass())
    try:
        await in_thread(lambda: replicas.run_pass(tick=False))
        (operation,) = await in_thread(lambda: attempts.claim("c", now=clock.now(), lease=60, limit=1))
        assert operation.kind == load_request.KIND
        place = await in_thread(lambda: placed_besides(frozen))
        assert place.node_name == "well"
        rule = await in_thread(ModelSchedulingConfig.objects.get)
        assert (rule.current_replicas, rule.wanted_replicas) == (0, 1)
        assert (await in_thread(NodeModel.objects.get, pk=row.pk)).in_flight == 0
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
    assert await state(row) == "unloading", "it may still run, so its place is not free"


def placed_besides(frozen: BackendNode) -> Slot:
    """What the load takes when the frozen worker has not answered: its slot there is not free either."""
    decision = choose_node(fleet_cache.read_fleet("echo"))
    assert decision.node is not None
    assert decision.refused[frozen.id] == "no free slot for this model"
    taken = slots.reserve(
        decision.node, "echo", attempt=attempt("1:1"), backend="echo", now=clock.now(), need=Need()
    )
    assert isinstance(taken, Slot)
    return taken


@pytest.mark.rule("R2.16")
def test_a_load_of_a_release_without_shares_excludes_an_unload_and_no_load() -> None:
    """It owns all of the model; it is carried out as any other one."""
    hot.replica(hot.node(), "m")
    request = admission.OperationRequest(load_request.KIND, key="model:m", element="m", by=Requester("key"))
    former = admission.admit(request, now=clock.now()).operation
    with pytest.raises(Exception, match="model_load of m is in progress"):
        unload_requests.unload(UnloadRequest("m", Requester("anna")), now=clock.now())
    joined = admission.OperationRequest(
        load_request.KIND, key=load_key("m"), element="m", by=Requester("key")
    )
    assert admission.admit(joined, now=clock.now()).created
    assert {one.id for one in attempts.claim("c", now=clock.now(), lease=60, limit=9)} >= {former.id}


# --- what an operator asks for, and how long one more replica is wanted


@pytest.mark.rule("R2.55", "R1.75", "R2.75", "T-ROU-16", "T-ROU-17")
def test_an_operator_evicts_the_least_recently_used_of_a_node() -> None:
    node, other = hot.node("one"), hot.node("two")
    hot.replica(other, "a", 0)
    for number, requests in enumerate((1, 0, 0)):
        hot.replica(node, f"m{number}", number, in_flight=requests)
    out = StringIO()
    call_command("nodes", "evict", "one", stdout=out)
    (asked,) = Operation.objects.all()
    assert (asked.kind, asked.element, asked.node_id) == (drains.UNLOAD_KIND, "m1", node.id)
    assert out.getvalue().startswith("one: m1#1 is unloaded (operation ")
    NodeModel.objects.filter(node=node).update(in_flight=1)
    with pytest.raises(CommandError, match="no replica on node one is idle"):
        call_command("nodes", "evict", "one")


@pytest.mark.rule("R2.24", "C30", "T-DL-14")
async def test_one_more_replica_is_wanted_for_longer_while_something_moves() -> None:
    """Requests move their own wish; without either it ends with what it waited for."""
    asked = await in_thread(
        partial(request_scale_up, "m", allowed_nodes=None, actor="system", reason="1 of 2 replicas")
    )
    assert asked.needed_until is not None
    assert asked.needed_until - asked.created_at == timedelta(minutes=25)

    async def until() -> float:
        row = await in_thread(Operation.objects.get, pk=asked.id)
        assert row.needed_until is not None
        return (row.needed_until - clock.now()).total_seconds()

    await in_thread(lambda: Operation.objects.update(needed_until=clock.now()))
    held = ProgressDeadline(Work(asked, Recorder(write_batch)))
    await held.extend_on_progress(0)
    assert await until() <= 0
    await held.extend_on_progress(7)
    assert 200 < await until() <= 300
    await held.extend_for(5000)
    assert 4900 < await until() <= 5000
    plain = await in_thread(Operation.objects.get, pk=asked.id)
    plain.payload = {}
    await ProgressDeadline(Work(plain, Recorder(write_batch))).extend_for(9000)
    assert await until() <= 5000


@pytest.mark.rule("R2.24", "C30", "T-DL-16")
async def test_where_a_load_is_wanted_for_less_than_a_pause_a_pause_is_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_request, "initial_seconds", lambda: 60.0)
    asked = await in_thread(
        partial(request_scale_up, "m", allowed_nodes=None, actor="system", reason="1 of 2 replicas")
    )
    await in_thread(lambda: Operation.objects.update(needed_until=clock.now()))
    await ProgressDeadline(Work(asked, Recorder(write_batch))).extend_on_progress(7)
    row = await in_thread(Operation.objects.get, pk=asked.id)
    assert row.needed_until is not None
    assert 0 < (row.needed_until - clock.now()).total_seconds() <= 60
