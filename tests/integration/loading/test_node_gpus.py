"""GPUs one by one against a real PostgreSQL: told, shown, reserved, raced for, given back (D-GPUS)."""

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from google.protobuf import json_format
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.api.heartbeats import HeartbeatApplication
from nodes.decisions import fleet_cache
from nodes.definitions.files import Definition, parse_definition
from nodes.definitions.headers import read_header
from nodes.definitions.sizes import ModelFiles
from nodes.live import rows as live_rows
from nodes.loading import load, load_placement, load_request
from nodes.loading.load_attempts import LoadFailed
from nodes.loading.load_placement import LoadNeeds, find_eviction
from nodes.models import BackendNode, NodeModel
from nodes.placement.choose import Need, Reason, choose_node
from nodes.placement.evict import Eviction
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion
from nodes.registry import heartbeats
from nodes.registry.heartbeats import Beat
from nodes.replicas import engines, slots
from nodes.replicas import stops as engine_stops
from nodes.replicas.slots import NoSlot, Slot
from operations.executor.work import Postpone
from tests.support import api, gguf_files, hot, pages
from tests.support.beating import Counted, beat, made, now_of
from tests.support.fleet import at_once, unexpected
from tests.support.gguf_models import MODELS
from tests.support.loading import BACKEND, STARTED, EngineClient, Stage, stage, stops
from tests.support.replicas import attempt, owner_of, publish

__all__ = ["stage"]
pytestmark = pytest.mark.django_db(transaction=True)

GIB = 2**30


def gpus(*free: int, total: int = 24) -> list[dict[str, Any]]:
    """GPUs 0, 1 … with so many GiB free."""
    return [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "name": "NVIDIA L4",
            "total_vram": total * GIB,
            "free_vram": one * GIB,
            "utilization": None,
        }
        for index, one in enumerate(free)
    ]


def told_by(name: str, *free: int, **more: Any) -> BackendNode:
    """A node whose worker has told its GPUs."""
    plain = {
        "gpus": gpus(*free),
        "available_vram": sum(free) * GIB,
        "vram_read_at": clock.now(),
        "max_replicas_per_model": 99,
    }
    return hot.node(name, **{**plain, **more})


def rooms(node: BackendNode) -> list[int]:
    """What placement takes for free on each GPU, in GiB."""
    (seen,) = fleet_cache.read_fleet("any", allowed_nodes=[node.pk])
    return [room // GIB for _, room in sorted(seen.gpus)]


def begun(node: BackendNode, model: str, size: int, *, required: bool = True) -> Slot | NoSlot:
    """A load takes its slot, whatever placement says."""
    (view,) = fleet_cache.read_fleet(model, allowed_nodes=[node.pk])
    need = Need(vram=size * GIB, vram_required=required)
    return slots.reserve(view, model, attempt=attempt(f"{model}:1"), backend="b", now=clock.now(), need=need)


def ids(slot: Slot | NoSlot) -> list[str]:
    assert isinstance(slot, Slot), slot
    return [one.id for one in slot.gpus]


def published(slot: Slot | NoSlot, mark: str) -> None:
    assert isinstance(slot, Slot)
    assert publish(slot, attempt(mark))


def read(node: BackendNode, *free: int) -> None:
    """A heartbeat has been written."""
    BackendNode.objects.filter(pk=node.pk).update(
        gpus=gpus(*free), available_vram=sum(free) * GIB, vram_read_at=clock.now(), reserved_vram=0
    )


@pytest.mark.rule("R1.32", "R1.33", "http-1.2")
async def test_a_heartbeat_tells_them_and_a_worker_that_does_not_takes_them_back(
    application: HeartbeatApplication,
) -> None:
    """With the total or without it; what was left out stays, and a total alone means totals as before."""
    node = await made()
    assert node.gpus == []
    assert (await beat(application, node.id, {"gpus": gpus(20, 24)}))[0] == 200
    stored = await now_of(node)
    assert (stored.gpus, stored.available_vram) == (gpus(20, 24), 44 * GIB)
    assert stored.vram_read_at is not None
    await beat(application, node.id, {"available_ram": 1})
    assert (await now_of(node)).gpus == gpus(20, 24)
    facts = {"temperature": 62, "power": 72, "power_limit": 75, "ecc_errors": 0, "driver": "550.54.15"}
    hot_gpu = gpus(20)[0] | facts
    await beat(application, node.id, {"gpus": [hot_gpu | {"fan": 30}]})
    assert (await now_of(node)).gpus == [hot_gpu]
    wrong = {"temperature": "hot", "power": 4_294_967, "power_limit": [], "ecc_errors": -1, "driver": "a\tb"}
    assert (await beat(application, node.id, {"gpus": [gpus(20)[0] | wrong]}))[0] == 200
    assert (await now_of(node)).gpus == gpus(20), "a driver's nonsense takes no node offline"
    await beat(application, node.id, {"available_vram": 9})
    stored = await now_of(node)
    assert (stored.gpus, stored.available_vram) == ([], 9)


@pytest.mark.rule("R1.34", "http-1.2")
async def test_wrong_gpus_are_named_and_a_pending_node_keeps_its_own(
    application: HeartbeatApplication,
) -> None:
    node, pending = await made(), await made(name="w2", approved=False)
    status, answer = await beat(application, node.id, {"gpus": gpus(1) * 2})
    assert (status, answer["error"]["message"]) == (400, "gpus has two of index 0")
    status, answer = await beat(application, node.id, {"gpus": [{"index": -1}]})
    assert status == 400
    assert answer["error"]["message"].startswith("gpus.0.index must be")
    assert (await now_of(node)).gpus == []
    secret = api.secret_of("w2")
    assert (await beat(application, pending.id, {"gpus": gpus(1)}, secret=secret))[0] == 200
    assert (await now_of(pending)).gpus == []


@pytest.mark.rule("R1.32")
async def test_a_batch_of_gpus_is_one_statement(database: Counted) -> None:
    """Sixty-four nodes with eight each; of two beats of one node the later reading counts as a whole."""
    at, nodes = clock.now(), [await made(name=f"n{number}") for number in range(64)]

    def said(node: BackendNode, at: Any, **figures: Any) -> Beat:
        return Beat(node.id, node.fingerprint, at, **figures)

    facts = {"temperature": 62, "power": 72, "power_limit": 75, "ecc_errors": 0, "driver": "550.54.15"}
    eight = [gpu | facts for gpu in gpus(*range(8))]
    beats = [said(node, at, available_vram=28 * GIB, gpus=eight) for node in nodes]
    assert set((await heartbeats.record(database, beats)).values()) == {None}
    assert len(database.statements) == 1
    assert {json.dumps(node.gpus) async for node in BackendNode.objects.all()} == {
        json.dumps((await now_of(nodes[0])).gpus)
    }
    assert (await now_of(nodes[0])).gpus == eight
    later = said(nodes[0], at + timedelta(seconds=1), available_ram=1).after(beats[0])
    assert (later.gpus, later.measured_at) == (eight, at)
    totals = said(nodes[0], at + timedelta(seconds=1), available_vram=1, gpus=[]).after(beats[0])
    assert (totals.gpus, totals.available_vram) == ([], 1)


@pytest.mark.rule("http-1.1", "R1.23", "R1.25")
def test_a_registration_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong ones are named; the same process once more says nothing; a stock worker in its place has none."""
    body = api.registration(total_vram=48 * GIB, available_vram=48 * GIB, gpus=gpus(24, 20))
    process = {"X-LocalAI-Node-Instance": "a" * 32}
    assert api.register(body, **process).status_code == 201
    node = BackendNode.objects.get()
    assert (node.gpus, node.available_vram) == (gpus(24, 20), 48 * GIB)
    assert api.register(body | {"gpus": gpus(1)}, **process).status_code == 201
    assert api.node(node.id).gpus == gpus(24, 20)
    for wrong, field in (
        ({"gpus": {}}, "gpus"),
        ({"gpus": [{**gpus(1)[0], "name": 1}]}, "gpus.0.name"),
        ({"system": []}, "system"),
    ):
        refused = api.register(body | wrong, **process)
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)
    plain = {name: value for name, value in body.items() if name != "gpus"}
    booted = {"os": "Debian 12", "cpu_count": 64, "cpu_cores": 32, "booted_at": "2026-11-27T08:00:00+01:00"}
    nonsense = {"os": "x" * 129, "kernel": "\x00", "cpu": "a\tb", "cpu_count": True, "booted_at": "yesterday"}
    nonsense["cpu_cores"] = 1.5
    told = plain | {"system": nonsense | {"booted_at": "0001-01-01T00:00:00+14:00"}}
    assert api.register(told, **{"X-LocalAI-Node-Instance": "d" * 32}).status_code == 201
    assert api.node(node.id).system == {}
    told = plain | {"system": booted | {"uptime": 1}}
    assert api.register(told, **{"X-LocalAI-Node-Instance": "b" * 32}).status_code == 201
    assert api.node(node.id).gpus == []
    shown = api.admin().get(f"/api/nodes/{node.id}").json()["system"]
    assert shown == booted | {"booted_at": "2026-11-27T07:00:00+00:00"}
    assert api.register(plain, **{"X-LocalAI-Node-Instance": "c" * 32}).status_code == 201
    assert api.node(node.id).system == {}


@pytest.mark.rule("http-2.3", "R2.43")
def test_a_node_shows_what_is_reserved_on_each() -> None:
    """Over REST, in the feed and to the admin, with the same queries for any number of GPUs and loads."""
    node, plain = told_by("one", 24, 20), hot.node("plain")

    def cost() -> int:
        with CaptureQueriesContext(connection) as asked:
            shown = api.admin().get(f"/api/nodes/{node.id}").json()["gpus"]
            live = {name: live_rows.render(one)["gpus"] for name, one in live_rows.read_nodes().items()}
        assert live == {str(node.id): shown, str(plain.id): []}
        assert shown == [
            one | {"reserved_vram": reserved * GIB}
            for one, reserved in zip(api.node(node.id).gpus, expected, strict=True)
        ]
        return len(asked)

    expected = [0, 0]
    before = cost()
    assert ids(begun(node, "m", 10)) == ["GPU-1"]
    assert ids(begun(node, "n", 23)) == ["GPU-0"]
    expected = [23, 10]
    assert cost() == before
    page = pages.superuser().get(f"/admin/nodes/backendnode/{node.id}/change/").content.decode()
    assert "NVIDIA L4" in page
    assert "gpus" not in api.admin().get("/api/nodes").json()[0], "a list of a thousand nodes stays small"


@pytest.mark.rule("R1.51", "R2.43")
@pytest.mark.parametrize("allocated", [0, 5, 10], ids=["nothing", "half", "all"])
def test_a_load_has_its_gpu_until_readings_show_it(allocated: int) -> None:
    """However much its engine has allocated when the beat comes, before and after it was published."""
    node = told_by("one", 24, 20)
    slot = begun(node, "m", 10)
    assert (ids(slot), rooms(node)) == (["GPU-1"], [24, 10])
    read(node, 24, 20 - allocated)
    assert rooms(node) == [24, 10]
    published(slot, "m:1")
    assert rooms(node) == [24, 10]
    read(node, 24, 10)
    assert rooms(node) == [24, 10]
    (row,) = NodeModel.objects.all()
    assert row.gpus == [{"index": 1, "uuid": "GPU-1", "bytes": 10 * GIB, "seen": 20 * GIB}]


@pytest.mark.rule("R2.43")
def test_a_split_reserves_on_each_and_its_end_gives_both_back() -> None:
    """The node's own figures carry the overhead, too; a failed load leaves nothing behind."""
    node = told_by("one", 24, 24, 6)
    slot = begun(node, "m", 40)
    assert ids(slot) == ["GPU-0", "GPU-1"]
    assert isinstance(slot, Slot)
    assert sum(one.amount for one in slot.gpus) == 41 * GIB
    assert rooms(node) == [3, 3, 6]
    assert api.node(node.id).reserved_vram == 41 * GIB
    slots.end_attempt(slot, attempt=attempt("m:1"), now=clock.now())
    assert rooms(node) == [24, 24, 6]
    assert api.node(node.id).reserved_vram == 0


@pytest.mark.rule("R2.32", "R2.43")
def test_what_fits_on_no_set_of_gpus_is_refused_or_takes_all_there_is() -> None:
    """Under `require` with the reason; under `prefer` it sees every GPU, and nothing is left for others."""
    node = told_by("one", 12, 12)
    refused = begun(node, "m", 24)
    assert refused == NoSlot(Reason.GPUS)
    assert NodeModel.objects.count() == 0
    assert ids(begun(node, "m", 24, required=False)) == []
    assert rooms(node) == [0, 0]


def test_a_load_without_a_known_need_or_on_a_stock_worker_is_on_no_gpu_in_particular() -> None:
    node, stock = told_by("one", 24), hot.node("stock", available_vram=24 * GIB)
    assert ids(begun(node, "m", 0)) == []
    assert rooms(node) == [24]
    assert ids(begun(stock, "m", 8)) == []
    BackendNode.objects.filter(pk=stock.pk).update(gpus=gpus(24, 24))
    assert rooms(stock) == [16, 16], "told later: it may be on either"


@pytest.mark.rule("R2.51", "R2.43")
def test_a_victim_makes_room_on_its_gpu_and_what_it_gives_back_counts_once() -> None:
    """Until it has gone, when it has gone, and when the new engine has taken its share."""
    node = told_by("one", 4, 6)
    long_ago: dict[str, Any] = {"loaded_at": hot.EPOCH}
    for number, (index, size) in enumerate(((0, 4), (1, 16))):
        its = [{"index": index, "uuid": f"GPU-{index}", "bytes": size * GIB, "seen": 24 * GIB}]
        hot.replica(node, f"old{number}", vram_needed=size * GIB, gpus=its, **long_ago)
    need = Need(vram=20 * GIB, vram_required=True)
    fleet = fleet_cache.read_fleet("m")
    view = FleetView(fleet, need)
    room = find_eviction("m", LoadQuestion(view), view.decide())
    assert room is not None
    assert room.node is not None
    assert [one.name for one in room.victims] == ["old1#0"]
    slot = slots.reserve(
        room.node, "m", attempt=attempt("m:1"), backend="b", now=clock.now(), need=need, room=room
    )
    assert ids(slot) == ["GPU-1"]
    assert rooms(node) == [4, -14]
    victim = NodeModel.objects.get(pk=room.victims[0].id)
    assert engine_stops.record_sent(victim, now=clock.now())
    with CaptureQueriesContext(connection) as asked:
        later = clock.now() + timedelta(seconds=2)
        assert engines.confirm_end(room.victims[0].id, stop_sent=later)
    assert len([one for one in asked if one["sql"].startswith('UPDATE "node_models"')]) == 1
    for free in (6, 22, 12, 2):  # the victim still shows; it is gone; the new engine takes half, then all
        read(node, 4, free)
        assert rooms(node) == [4, 2]


@pytest.mark.rule("R2.51", "R2.43")
def test_a_victim_estimated_too_large_frees_no_more_of_its_gpu_than_that_has() -> None:
    """Its estimate is 20, its real use 10: GPU 0 seemed to get 34 GiB free, and all 33 went there."""
    node = told_by("one", 14, 15)
    BackendNode.objects.update(total_vram=48 * GIB)
    its = [{"index": 0, "uuid": "GPU-0", "bytes": 20 * GIB, "seen": 24 * GIB}]
    hot.replica(node, "old", vram_needed=20 * GIB, gpus=its, loaded_at=hot.EPOCH)

    def evicted_for(gib: int) -> tuple[Need, Eviction]:
        need = Need(vram=gib * GIB, vram_required=True)
        view = FleetView(fleet_cache.read_fleet("m"), need)
        room = find_eviction("m", LoadQuestion(view), view.decide())
        assert room is not None
        return need, room

    assert evicted_for(39)[1].node is None, "24 + 15 GiB hold no 39 with the overhead of a split"
    need, room = evicted_for(33)
    assert room.node is not None
    slot = slots.reserve(
        room.node, "m", attempt=attempt("m:1"), backend="b", now=clock.now(), need=need, room=room
    )
    assert isinstance(slot, Slot)
    assert [gpu.id for gpu in slot.gpus] == ["GPU-0", "GPU-1"]
    assert [gpu.amount < most * GIB for gpu, most in zip(slot.gpus, (24, 15), strict=True)] == [True, True]


RACERS = 24


@pytest.mark.rule("R1.51", "R2.32", "R2.43")
def test_racers_for_the_gpus_of_one_node_overbook_none() -> None:
    """Each looks, chooses and takes until it is refused; then all of them fail."""
    node = told_by("one", 24, 24)

    def placed(number: int) -> Slot | Reason:
        need = Need(vram=(9 if number % 2 else 5) * GIB, vram_required=True)
        while True:
            decision = choose_node(fleet_cache.read_fleet(f"m{number}"), need=need)
            if decision.node is None:
                return decision.refused[node.pk]
            slot = slots.reserve(
                decision.node,
                f"m{number}",
                attempt=attempt(f"{number}:1"),
                backend="b",
                now=clock.now(),
                need=need,
            )
            if isinstance(slot, Slot):
                return slot

    jobs = [lambda number=number: placed(number) for number in range(RACERS)]
    results = at_once(*jobs)
    assert unexpected(results) == []
    won = [one for one in results if isinstance(one, Slot)]
    assert {one for one in results if not isinstance(one, Slot)} <= {Reason.MEMORY, Reason.GPUS}
    taken = {"GPU-0": 0, "GPU-1": 0}
    for slot in won:
        for share in slot.gpus:
            taken[share.id] += share.amount
    assert all(0 < amount <= 24 * GIB for amount in taken.values())
    assert all(left < 9 for left in rooms(node)), "nothing that fits was refused"
    marks = {row.pk: owner_of(row) for row in NodeModel.objects.all()}
    ends = [
        lambda slot=slot: slots.end_attempt(slot, attempt=marks[slot.id], now=clock.now()) for slot in won
    ]
    assert unexpected(at_once(*ends)) == []
    assert rooms(node) == [24, 24]


@pytest.mark.rule("R1.51", "R2.32")
def test_two_racers_for_the_last_room_on_one_gpu() -> None:
    """Both saw it free; under the node's lock one takes it and the other is refused."""
    node = told_by("one", 12, 4)
    (view,) = fleet_cache.read_fleet("m", allowed_nodes=[node.pk])
    need = Need(vram=10 * GIB, vram_required=True)

    def taking(name: str) -> Slot | NoSlot:
        return slots.reserve(
            view, name, attempt=attempt(f"{name}:1"), backend="b", now=clock.now(), need=need
        )

    results = at_once(lambda: taking("a"), lambda: taking("b"))
    assert unexpected(results) == []
    assert [one for one in results if isinstance(one, NoSlot)] == [NoSlot(Reason.GPUS)]
    assert rooms(node) == [2, 4]


@pytest.mark.rule("R1.51", "R2.41", "R2.43")
def test_a_share_of_a_card_is_reserved_on_one_of_them() -> None:
    """Half of a card of 24 GiB; a second load that takes most of a card gets the other one, a third none."""
    budget = {"vram_budget": "40GiB", "vram_budget_bytes": 40 * GIB}  # an engine does not know it
    node = told_by("one", 24, 24, total_vram=48 * GIB, **budget)
    (view,) = fleet_cache.read_fleet("m", allowed_nodes=[node.pk])

    def taking(name: str, share: float) -> Slot | NoSlot:
        need = Need(vram_required=True, vram_share=share, cards=1)
        return slots.reserve(
            view, name, attempt=attempt(f"{name}:1"), backend="b", now=clock.now(), need=need
        )

    assert [len(ids(taking("a", 0.5))), len(ids(taking("b", 0.9)))] == [1, 1]
    assert sorted(rooms(node)) == [2, 12]
    assert list(NodeModel.objects.order_by("model_name").values_list("vram_needed", flat=True)) == [
        12 * GIB,
        int(24 * GIB * 0.9),
    ]
    assert taking("c", 0.9) == NoSlot(Reason.GPUS)


def told_load(stage: Stage, monkeypatch: pytest.MonkeyPatch, size: int) -> list[dict[str, Any]]:
    """The first node has two GPUs, the second is full; answers what engines are told to load."""
    BackendNode.objects.filter(pk=stage.one.pk).update(
        gpus=gpus(24, 24), available_vram=48 * GIB, vram_read_at=clock.now()
    )
    heard: list[dict[str, Any]] = []

    class Client(EngineClient):
        async def load_model(self, options: Any, timeout: float) -> Any:
            heard.append(json_format.MessageToDict(options, preserving_proto_field_name=True))
            return await super().load_model(options, timeout)

    monkeypatch.setattr(load, "BackendClient", Client)
    need = Need(vram=size * GIB, vram_required=True)
    monkeypatch.setattr("nodes.loading.load_request.estimate_need", lambda *_: need)
    return heard


@pytest.mark.rule("R2.43", "nats-4.1")
@pytest.mark.parametrize(
    ("size", "chosen", "split"),
    [(20, ("GPU-0",), None), (30, ("GPU-0", "GPU-1"), "15872,15872")],
    ids=["one", "split"],
)
async def test_the_worker_and_the_engine_are_told_the_gpus(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, size: int, chosen: tuple[str, ...], split: str | None
) -> None:
    """In the request for the start, and how much is on which when the model is split."""
    heard = await hot.in_thread(told_load, stage, monkeypatch, size)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(True, STARTED.address, gpus=chosen))
    assert (await stage.handler(stage.work))["node"] == "one"
    (asked,) = stage.bus.asked[messages.subject("backend.install", str(stage.one.id))]
    assert tuple(json.loads(asked)["gpus"]) == chosen
    assert [one.get("TensorSplit") for one in heard] == [split]
    assert await hot.in_thread(rooms, stage.one) == ([4, 24] if split is None else [8, 8])


@pytest.mark.rule("R2.43")
async def test_a_worker_that_starts_it_elsewhere_has_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is stopped, nothing stays reserved, and the next node is tried."""
    heard = await hot.in_thread(told_load, stage, monkeypatch, 20)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(True, STARTED.address, gpus=("GPU-1",)))
    with pytest.raises((Postpone, LoadFailed)) as ended:
        await stage.handler(stage.work)
    assert "did not start it on the GPUs chosen" in str(ended.value)
    assert heard == []
    await stops(stage)
    assert await hot.in_thread(rooms, stage.one) == [24, 24]


@pytest.mark.rule("R2.32", "R2.80")
@pytest.mark.parametrize(("free", "options"), [(24, ["parallel:4"]), (21, None)], ids=["fits", "does not"])
async def test_options_are_tuned_to_a_node_that_has_the_memory_for_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, settings: Settings, free: int, options: list[str] | None
) -> None:
    """Otherwise the engine takes more than was reserved for it, and that of others."""
    settings.CLUSTER = replace(settings.CLUSTER, node_options=True)
    heard = await hot.in_thread(told_load, stage, monkeypatch, 20)
    (stage.folder / "echo.yaml").write_text("{name: echo, backend: llama-cpp, parameters: {model: echo}}")

    def estimated(definition: Definition, *_: Any) -> Need:
        return Need(vram=(22 if definition.options.get("Options") else 20) * GIB, vram_required=True)

    monkeypatch.setattr("nodes.loading.load_request.estimate_need", estimated)
    figures = {"gpus": gpus(free), "available_vram": free * GIB, "total_vram": 24 * GIB}
    await hot.in_thread(partial(BackendNode.objects.filter(pk=stage.one.pk).update, **figures))
    stage.lists(stage.one, m.InstalledBackend(name="llama-cpp"))
    stage.installs(stage.one, m.InstallReply(True, STARTED.address, gpus=("GPU-0",)))
    assert (await stage.handler(stage.work))["node"] == "one"
    assert [one.get("Options") for one in heard] == [options]
    assert await hot.in_thread(rooms, stage.one) == [2 if options else 1]


@pytest.mark.rule("R2.41", "R2.80")
def test_the_need_of_tuned_options_is_estimated(tmp_path: Path, settings: Settings) -> None:
    """Each parallel request of gemma keeps windows of its own."""
    settings.CLUSTER = replace(settings.CLUSTER, node_options=True)
    (model,) = (model for model in MODELS if model.name == "gemma-3-27b")
    path = gguf_files.write(tmp_path / "m.gguf", model)
    files = ModelFiles(path.stat().st_size, header=read_header(path))
    content = {"name": "m", "backend": "llama-cpp", "context_size": 32768, "parameters": {"model": "m.gguf"}}
    definition = parse_definition(content, "m.yaml")
    plain = load_request.estimate_need(definition, files)
    node = told_by("one", 24, total_vram=24 * GIB)
    tuned = load_placement._tuned(LoadNeeds(definition, plain, files=files), node.pk)
    assert tuned is not None
    assert tuned.options["Options"] == ["parallel:4"]
    assert tuned.need.vram - plain.vram > GIB
