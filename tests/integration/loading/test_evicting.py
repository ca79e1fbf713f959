"""Evictions against a real PostgreSQL: races, memory that is given back, and the load that waits for it."""

import asyncio
import math
import threading
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.kit.database_pool import Pool
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.rpc.errors import BackendError
from nodes.decisions import fleet_cache
from nodes.definitions.files import parse_definition, read_definition
from nodes.definitions.folder import Folder
from nodes.gateway.picks import Picker
from nodes.gateway.request import InferenceRequest
from nodes.loading import load_explanation, load_request
from nodes.loading.load_attempts import LoadFailed, refusals
from nodes.loading.load_placement import find_eviction
from nodes.models import (
    BackendNode,
    ModelLoadInfo,
    ModelSchedulingConfig,
    NodeLabel,
    NodeModel,
    PlacementRecord,
)
from nodes.placement.choose import Need
from nodes.placement.evict import Eviction
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion, decide_load
from nodes.replicas import engines, eviction, hooks, slots, stops, terminations
from nodes.replicas.hooks import RemovedReplica
from nodes.replicas.slots import Slot
from nodes.replicas.stops import Stopper
from operations.executor.work import Postpone, in_thread
from operations.models import Operation
from tests.conftest import until
from tests.support import gguf_files, hot
from tests.support.fleet import at_once, unexpected
from tests.support.gguf_models import MODELS
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage
from tests.support.replicas import attempt

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)

GB = 2**30
RACERS, NODES = 32, 8
STATE = "SELECT state FROM node_models WHERE id = %(id)s"


def read_node(name: str, available: int) -> BackendNode:
    return hot.node(name, available_vram=available * GB, vram_read_at=clock.now(), max_replicas_per_model=9)


def old(on: BackendNode, model: str, index: int = 0, size: int = 10, **fields: Any) -> NodeModel:
    """A replica that the node's reading shows."""
    return hot.replica(on, model, index, loaded_at=hot.EPOCH, vram_needed=size * GB, **fields)


def asked(model: str, need: Need) -> LoadQuestion:
    return LoadQuestion(FleetView(fleet_cache.read_fleet(model), need))


def placed(number: int, need: Need) -> Slot | Eviction | None:
    """One racer: looks, finds a node or room on one, takes it, and looks again when another was faster."""
    model = f"m{number}"
    while True:
        question = asked(model, need)
        decision, room = question.view.decide(), None
        if (node := decision.node) is None:
            room = find_eviction(model, question, decision)
            if room is None or room.node is None:
                return room
            node = room.node
        taken = slots.reserve(
            node, model, attempt=attempt(f"{number}:1"), backend="b", now=clock.now(), need=need, room=room
        )
        if isinstance(taken, Slot):
            return taken


@pytest.mark.rule("R2.35", "R2.51", "R2.52")
def test_thirty_two_loads_evict_no_more_than_they_need() -> None:
    """Two fit in the place of one victim. The oldest are busy, or kept by a minimum or by `spread_all`."""
    nodes = [read_node(f"n{number}", 0) for number in range(NODES)]
    for number, node in enumerate(nodes):
        for index in range(4):
            used = hot.EPOCH + timedelta(minutes=number, seconds=index)
            old(node, "a", index, last_used=used)
    before: dict[str, Any] = {"last_used": hot.EPOCH - timedelta(days=1)}
    for node in nodes[:2]:
        old(node, "kept", **before)
        old(node, "spread", **before)
    old(nodes[0], "busy", in_flight=1, **before)
    ModelSchedulingConfig.objects.create(model_name="kept", min_replicas=1)
    ModelSchedulingConfig.objects.create(model_name="spread", spread_all=True)
    need = Need(vram=5 * GB, vram_required=True)
    jobs = [lambda number=number: placed(number, need) for number in range(RACERS)]
    results = at_once(*jobs)
    assert unexpected(results) == []
    assert [result for result in results if not isinstance(result, Slot)] == []
    out = NodeModel.objects.filter(state="unloading")
    assert out.count() == RACERS // 2
    assert sorted(out.exclude(model_name="a").values_list("model_name", flat=True)) == ["kept"]
    for node in nodes:
        taken = NodeModel.objects.filter(node=node, state="loading").count() * 5
        assert taken <= out.filter(node=node).count() * 10
    assert set(out.values_list("phase", "reason")) == {("terminating", "evicted")}


@pytest.mark.rule("R1.58", "R2.51", "R2.52")
def test_no_request_loses_its_replica_to_an_eviction_and_no_release_is_lost() -> None:
    """Two web processes pick and release all the while; whoever has a replica has one that serves."""
    nodes = [read_node(f"n{number}", 0) for number in range(NODES)]
    for index, node in enumerate(node for node in nodes for _ in range(4)):
        old(node, "a", index)
    held: list[str] = []
    evicted = threading.Event()

    async def requests(picker: Picker, looking: Pool) -> None:
        while not evicted.is_set():
            replica = await picker.acquire(InferenceRequest(model="a"))
            assert replica is not None
            [[state]] = await looking.fetch_rows(STATE, {"id": replica.id})
            held.append(state)
            picker.release(replica)

    async def web_process() -> None:
        pool = Pool(hot.database_url())
        await pool.open()
        async with hot.picker() as picker:
            await asyncio.gather(*(requests(picker, pool) for _ in range(4)))
            await picker.settle()
        await pool.close()

    def evictions() -> list[Any]:
        try:
            need = Need(vram=5 * GB, vram_required=True)
            return at_once(*(lambda number=number: placed(number, need) for number in range(RACERS)))
        finally:
            evicted.set()

    results = at_once(evictions, *[lambda: asyncio.run(web_process())] * 2)
    assert unexpected(results) == unexpected(results[0]) == []
    assert [result for result in results[0] if not isinstance(result, Slot)] == []
    assert set(held) == {"loaded"}
    for name in sorted({row.node.name for row in NodeModel.objects.select_related("node")}):
        here = NodeModel.objects.filter(node__name=name)
        made, taken = (here.filter(state=state).count() for state in ("unloading", "loading"))
        assert made == math.ceil(taken / 2), "no more than the loads of this node need"
    assert set(NodeModel.objects.values_list("in_flight", flat=True)) == {0}


@pytest.mark.rule("R1.104", "R2.51", "R2.54")
def test_what_a_victim_gives_back_counts_once_whenever_the_readings_come() -> None:
    """Free as it will be: while it stops, when it has gone, and with and without the new engine's share."""
    node = read_node("one", 2)
    victim = old(node, "a")
    removed: list[RemovedReplica] = []
    hooks.on_removed.append(removed.append)

    def free(available: int) -> int:
        BackendNode.objects.update(available_vram=available * GB, vram_read_at=clock.now())
        return fleet_cache.read_fleet("any")[0].free_vram // GB

    try:
        slot = placed(1, Need(vram=10 * GB, vram_required=True))
        assert isinstance(slot, Slot)
        assert free(2) == -8
        assert [one.vram for one in eviction.terminating_replicas(node.pk, now=clock.now())] == [10 * GB]
        later = clock.now() + timedelta(seconds=2)
        assert stops.record_sent(victim, now=clock.now())
        assert engines.confirm_end(victim.pk, stop_sent=later)
    finally:
        hooks.on_removed.remove(removed.append)
    assert removed == [RemovedReplica("a", node.pk, 0)]
    assert [free(available) for available in (2, 12, 7, 2)] == [2, 2, 2, 2]


@pytest.mark.rule("R2.51")
def test_a_victim_that_got_a_request_stays(settings: Settings) -> None:
    """The plan is from before; under the locks nothing is taken, and the next look finds no victim."""
    settings.CLUSTER = replace(settings.CLUSTER, vram_policy="require")
    node = read_node("one", 0)
    old(node, "a")
    need = Need(vram=5 * GB, vram_required=True)
    question = asked("m", need)
    room = find_eviction("m", question, question.view.decide())
    assert room is not None
    assert [one.name for one in room.victims] == ["a#0"]
    NodeModel.objects.update(in_flight=1)
    (view,) = question.view.nodes
    taken = slots.reserve(
        view, "m", attempt=attempt("1:1"), backend="b", now=clock.now(), need=need, room=room
    )
    assert not isinstance(taken, Slot)
    assert NodeModel.objects.get().state == "loaded"
    again = placed(1, need)
    assert isinstance(again, Eviction)
    assert again.why == "no replica there can make room: 1 busy"


def enough(row: NodeModel) -> bool:
    with transaction.atomic():
        return terminations.keeps_minimum(row)


@pytest.mark.rule("R2.52", "R2.10")
@pytest.mark.parametrize("selector", [{"zone": "a"}, {"zone": "a", "disk": "b"}, ["zone"]])
def test_where_the_rule_lets_no_request_go_a_replica_counts_toward_no_minimum(selector: Any) -> None:
    """Else the last one that requests find would be evicted, and the replica pass would load it again."""
    chosen, other = read_node("one", 0), read_node("two", 0)
    for key, value in (("zone", "a"), ("disk", "b")):
        NodeLabel.objects.create(node=chosen, key=key, value=value)
    NodeLabel.objects.create(node=other, key="zone", value="b")
    found = old(chosen, "a")
    hot.replica(other, "a", 1, in_flight=1)
    ModelSchedulingConfig.objects.create(model_name="a", min_replicas=1, node_selector=selector)
    need = Need(vram=5 * GB, vram_required=True)
    refused = placed(1, need)
    assert isinstance(refused, Eviction)
    assert not terminations.has_other_replica(found)
    assert not enough(found)
    ModelSchedulingConfig.objects.update(node_selector={})
    assert isinstance(placed(1, need), Slot)


@pytest.mark.rule("R2.51", "R1.51")
@pytest.mark.parametrize("life", [("draining", "lost"), ("terminating", "wrong_model")])
def test_an_engine_that_may_have_ended_before_makes_no_room(life: tuple[str, str]) -> None:
    """The node's reading may show its memory as free already: it would be given away twice."""
    node = read_node("one", 20)
    old(node, "a", phase=life[0], reason=life[1])
    assert not isinstance(placed(1, Need(vram=25 * GB, vram_required=True)), Slot)


@pytest.mark.rule("R1.51", "R2.43")
@pytest.mark.parametrize("case", ["ended-before", "read-since"])
def test_what_a_load_may_have_seen_free_is_not_given_back_to_it(case: str) -> None:
    """It was placed by a reading that may be from after the end of the engine."""
    node = read_node("one", 20)
    victim = old(node, "a")
    terminations.evict([victim.pk], now=clock.now())
    sent = None if case == "ended-before" else clock.now() - timedelta(seconds=5)
    need = Need(vram=25 * GB)
    (view,) = fleet_cache.read_fleet("m")
    assert isinstance(
        slots.reserve(view, "m", attempt=attempt("1:1"), backend="b", now=clock.now(), need=need), Slot
    )
    assert fleet_cache.read_fleet("any")[0].free_vram == -5 * GB
    assert stops.record_sent(victim, now=clock.now())
    assert engines.confirm_end(victim.pk, stop_sent=sent)
    assert fleet_cache.read_fleet("any")[0].free_vram == -5 * GB


def test_the_facts_of_an_eviction_are_four_queries(django_assert_num_queries: Any) -> None:
    for number in range(4):
        node = read_node(f"n{number}", 0)
        old(node, "a")
        old(node, "b")
    need = Need(vram=5 * GB, vram_required=True)
    question = asked("m", need)
    with django_assert_num_queries(4):
        find_eviction("m", question, question.view.decide())
    with django_assert_num_queries(4):
        found = fleet_cache.read_fleet("m", conflicts={"a", "c"})
    assert {one.conflicts for one in found} == {frozenset({"a"})}


def short_of_room(stage: Stage, settings: Settings, policy: str = "require", **victim: Any) -> UUID:
    """Node one lacks memory that a replica uses; node two is not there."""
    settings.CLUSTER = replace(settings.CLUSTER, vram_policy=policy)
    (stage.folder / "echo").write_bytes(bytes(4096))
    BackendNode.objects.filter(pk=stage.two.pk).delete()
    BackendNode.objects.update(available_vram=0, total_vram=GB, vram_read_at=clock.now())
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    stage.need_until()
    stage.bus.replies[messages.subject("model.stop", str(stage.one.id))] = m.StopModelReply(
        terminated=True, process_key="a#0"
    )
    return old(stage.one, "a", size=1, address="127.0.0.1:9", **victim).pk


def waits(said: str = "waits for a#0 on one to stop, the least recently used") -> bool:
    return Operation.objects.get().message == said and NodeModel.objects.filter(state="unloading").exists()


@pytest.mark.rule("R2.45", "R2.51", "R2.54", "T-ROU-18", "C36")
async def test_a_load_waits_for_its_victim_and_then_starts(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Controllers stop exactly that process; no engine is started before it has gone."""
    victim = await hot.in_thread(short_of_room, stage, settings)
    playing = asyncio.create_task(stage.handler(stage.work))
    await until(lambda: hot.in_thread(waits))
    assert not [one for one in stage.bus.asked if "backend.install" in str(one)]
    assert await Stopper(stage.bus).run_pass() == 1
    assert (await asyncio.wait_for(playing, 60))["node"] == "one"
    assert not await in_thread(NodeModel.objects.filter(pk=victim).exists)


@pytest.mark.rule("T-ROU-19")
async def test_a_victim_is_stopped_although_its_load_has_died(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """And the place that the load held is free again."""
    await hot.in_thread(short_of_room, stage, settings)
    playing = asyncio.create_task(stage.handler(stage.work))
    await until(lambda: hot.in_thread(waits))
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await in_thread(Operation.objects.all().delete)
    await Stopper(stage.bus).run_pass()
    assert await in_thread(NodeModel.objects.count) == 0


@pytest.mark.rule("R2.51", "T-ROU-19")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_busy_replica_whose_time_is_over_ends_its_requests_for_a_load_that_waits(
    stage: Stage, loads: list[Any], settings: Settings, is_killed: bool
) -> None:
    """D-EVICTION: it gets no more requests. The row owns the stop, also if the load dies meanwhile."""
    victim = await hot.in_thread(partial(short_of_room, stage, settings, "fit", in_flight=1))
    playing, row = asyncio.create_task(stage.handler(stage.work)), NodeModel.objects.filter(pk=victim)
    said = "waits for a#0 on one to end its requests and stop: its least time is over"
    await until(lambda: hot.in_thread(waits, said))
    assert not [one for one in stage.bus.asked if "backend.install" in str(one)]
    draining = await in_thread(row.get)
    assert (draining.phase, draining.reason) == ("terminating", "evicted")
    assert draining.deadline is not None
    assert draining.deadline > clock.now() + timedelta(seconds=settings.CLUSTER.request_timeout / 2)
    if is_killed:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await in_thread(Operation.objects.all().delete)
    assert await Stopper(stage.bus).run_pass() == 0, "a request runs there"
    await in_thread(partial(row.update, in_flight=0))
    assert await Stopper(stage.bus).run_pass() == 1
    if not is_killed:
        assert (await asyncio.wait_for(playing, 60))["node"] == "one"
    assert not await in_thread(row.exists)


@pytest.mark.rule("R2.51")
async def test_loads_have_their_turn_in_the_order_of_their_requests(stage: Stage, settings: Settings) -> None:
    """D-EVICTION: the first one waits for the replica's least time, and no younger one takes the memory."""
    started = clock.now() - timedelta(seconds=60)
    victim = await hot.in_thread(partial(short_of_room, stage, settings, "fit", started_at=started))
    rows, need = NodeModel.objects.filter(pk=victim), Need(vram=GB // 2, vram_required=True)
    await in_thread(partial(rows.update, loaded_at=started + timedelta(seconds=30)))
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    assert (ended.payload["turn"], ended.seconds <= 5) == (str(stage.one.id), True)
    assert "1 that must serve longer; its turn on one is at " in ended.reason
    await in_thread(partial(Operation.objects.update, payload=ended.payload))
    await in_thread(partial(rows.update, loaded_at=hot.EPOCH, started_at=None))

    def room(created_at: datetime | None = None) -> Eviction:
        question = asked("m", need)
        found = find_eviction("m", question, question.view.decide(), created_at)
        assert found is not None
        return found

    younger = await in_thread(room)
    assert younger.node is None
    assert younger.why == "its turn on one is after an older load"
    assert (await in_thread(room, stage.work.operation.created_at)).node is not None
    await in_thread(partial(Operation.objects.update, needed_until=clock.now()))
    assert (await in_thread(room)).node is not None, "nobody waits for the older one any more"


@pytest.mark.rule("R2.32", "R2.41", "R2.80")
async def test_a_load_takes_fewer_layers_where_not_all_fit_and_its_row_has_them(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """D-VRAM-POLICY: the definition's revision and the options for later loads stay those of the file."""
    (model,) = (model for model in MODELS if model.name == "SmolLM2-135M")
    gguf_files.write(stage.folder / "small.gguf", model)
    text = "name: echo\nbackend: echo\nparameters: {model: small.gguf}\ngpu_layers: auto\n"
    (stage.folder / "echo.yaml").write_text(text)
    definition = read_definition(stage.folder / "echo.yaml")
    need = load_request.estimate_need(definition, await Folder(stage.folder).sizes.of(definition))
    layers, needed = need.partial[3]
    figures = {"available_vram": needed, "total_vram": GB, "vram_read_at": clock.now()}
    await in_thread(partial(BackendNode.objects.update, **figures))
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)
    result = await stage.handler(stage.work)
    assert result["why"].startswith(
        f"with {layers} layers on the GPU of one, which does not have the memory for all of them; "
    )
    row = await in_thread(NodeModel.objects.get)
    assert (row.vram_needed, row.model_options["NGPULayers"], row.state) == (needed, layers, "loaded")
    assert row.config_revision == definition.revision
    info = await in_thread(ModelLoadInfo.objects.get)
    assert info.model_options == definition.options
    (record,) = await in_thread(lambda: list(PlacementRecord.objects.all()))
    assert await in_thread(load_explanation.replay, record) == load_explanation.recorded_decision(record)


CONTROLLERS, LOADS = 16, 3
SIZES, USED = ((24, 16, 8, 48), (80, 12), (40,), (2,)), {(0, 0), (0, 2), (1, 0)}
"""The GPUs of four nodes in GiB, the last too small for a whole model; those that an idle replica uses."""


def controller(number: int) -> list[Slot]:
    """One that decides some loads, each until it is placed or waits; needs are estimated or learned."""
    placed = []
    for load in range(LOADS):
        model, vram = f"m{number}-{load}", (3 + (number * 7 + load * 11) % 29) * GB
        terms = (("weights", vram - GB), ("context", GB)) if number % 2 else (("learned", vram),)
        parts = tuple((layers, vram * layers // 32) for layers in range(31, 0, -1)) if load else ()
        need = Need(vram, vram_required=True, unknown_fits=True, terms=terms, partial=parts)
        while True:
            question = asked(model, need)
            decision = question.view.decide()
            room = find_eviction(model, question, decision) if question.evictable_nodes(decision) else None
            explanation = decide_load(question, decision, room)
            if explanation.node is None:
                break
            layers = explanation.gpu_layers
            taken = slots.reserve(
                explanation.node,
                model,
                attempt=attempt(f"{model}:1"),
                backend="b",
                now=clock.now(),
                need=need.with_layers(layers),
                room=None if layers else room,
                gpu_layers=layers,
            )
            if isinstance(taken, Slot):
                placed.append(taken)
                break
    return placed


@pytest.mark.rule("R1.51", "R2.32", "R2.43", "R2.51")
def test_sixteen_controllers_never_overbook_a_gpu_by_the_figures_that_they_used() -> None:
    """Eight GPUs of different sizes, with idle replicas that may go and loads of fewer layers."""
    free: Counter[tuple[UUID, int]] = Counter()
    for number, sizes in enumerate(SIZES):
        figures = {index: 0 if (number, index) in USED else size * GB for index, size in enumerate(sizes)}
        told = [
            {"index": index, "uuid": f"GPU-{index}", "total_vram": sizes[index] * GB, "free_vram": available}
            for index, available in figures.items()
        ]
        node = read_node(f"n{number}", 0)
        BackendNode.objects.filter(pk=node.pk).update(
            gpus=told, available_vram=sum(figures.values()), total_vram=sum(sizes) * GB
        )
        free.update({(node.pk, index): available for index, available in figures.items()})
        for index in (index for used, index in USED if used == number):
            share = [{"index": index, "uuid": f"GPU-{index}", "bytes": sizes[index] * GB, "seen": 0}]
            old(node, f"old{index}", size=sizes[index], gpus=share, last_used=hot.EPOCH)
    results = at_once(*[lambda number=number: controller(number) for number in range(CONTROLLERS)])
    assert unexpected(results) == []
    placed = [slot for result in results for slot in result]
    assert [slot for slot in placed if slot.gpu_layers] != []
    assert len(placed) > len(free)
    signs = {"loading": -1, "unloading": 1, "loaded": 0}
    for row in NodeModel.objects.all():
        free.update({(row.node_id, gpu["index"]): signs[row.state or ""] * gpu["bytes"] for gpu in row.gpus})
    assert NodeModel.objects.filter(reason="evicted").exists()
    assert min(free.values()) >= 0


@pytest.mark.rule("R2.65")
async def test_another_node_is_tried_when_the_first_refuses_and_the_error_names_both(
    stage: Stage, loads: list[Any]
) -> None:
    """D-NEXT-NODE: each node once, then the load ends with what they said."""
    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
    await hot.in_thread(stage.need_until)
    loads += [BackendError("no such file"), BackendError("no such file")]
    for number in (1, 2):
        ended = await stage.play()
        assert isinstance(ended, Postpone), ended
        assert ended.payload is not None
        assert len(refusals(ended.payload)) == number
        stage.work.operation.payload = dict(ended.payload)
        await in_thread(Operation.objects.update, payload=stage.work.operation.payload)
    ended = await stage.play()
    assert isinstance(ended, LoadFailed), ended
    assert sorted(ended.message.partition(": ")[0].split(", ")) == ["one", "two"]
    assert ended.message.endswith("echo refused to load: no such file")


@pytest.mark.rule("R2.81", "R2.83")
async def test_groups_are_read_from_the_definitions(tmp_path: Path) -> None:
    """Trimmed, without empty ones and doubles; not of a disabled model, and never in conflict with itself."""
    plain: dict[str, Any] = {"backend": "b", "parameters": {"model": "x"}}
    one = parse_definition(plain | {"name": "one", "concurrency_groups": [" gpu ", "", "gpu"]}, "one.yaml")
    assert one.groups == {"gpu"}
    assert one.revision == parse_definition(plain | {"name": "one"}, "one.yaml").revision
    for name, more in {
        "one": "concurrency_groups: [gpu]",
        "two": "concurrency_groups: ['gpu ', other]",
        "off": "concurrency_groups: [gpu]\ndisabled: true",
        "far": "concurrency_groups: [other]",
    }.items():
        text = f"name: {name}\nbackend: b\nparameters: {{model: x}}\n{more}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    assert await Folder(tmp_path).conflicting(one) == {"two"}
