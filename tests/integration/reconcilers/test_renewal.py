"""An edited definition on PostgreSQL: replicas of it come, those of the former one go, no request fails."""

import asyncio
import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.kit import clock, errors
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import decode
from nodes.decisions import fleet_cache
from nodes.decisions.decision_log import encode, find_changes, restore
from nodes.definitions import folder
from nodes.definitions.folder import Folder
from nodes.gateway.request import InferenceRequest
from nodes.loading import load, load_placement, load_request
from nodes.loading.load_placement import LoadNeeds
from nodes.loading.load_request import ANY_REPLICA_REQUEST
from nodes.loading.load_snapshots import decode_load, encode_load
from nodes.models import LOADING_PHASES, BackendNode, ModelLoadInfo, ModelSchedulingConfig, NodeModel
from nodes.placement.choose import Need
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion, decide_load
from nodes.reconcilers import replicas
from nodes.replicas import eviction, fleet_queries, slots, terminations, unload_requests
from nodes.replicas.stops import Stopper
from nodes.scheduling import store
from nodes.scheduling.rules import Rule
from operations.executor.work import Postpone, WakeUps, Work, write_batch
from operations.ledger import attempts
from operations.ledger.progress import Recorder
from operations.models import Event, Operation
from tests.support import api, hot
from tests.support.bus import PlayedBus
from tests.support.loading import BACKEND, STARTED, loads
from tests.support.replicas import attempt, run

__all__ = ["loads"]
pytestmark = pytest.mark.django_db(transaction=True)

FORMER = "0" * 64


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """A models folder that defines `echo`, as it was edited."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    return tmp_path


def revision() -> str:
    (found,) = asyncio.run(folder.folder().all())
    return found.revision


def old(node: BackendNode, index: int = 0, **fields: Any) -> NodeModel:
    values = {"config_revision": FORMER, "address": "127.0.0.1:9", "last_used": clock.now(), **fields}
    return hot.replica(node, "echo", index, **values)


def claimed() -> Work:
    (operation,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
    return Work(operation, Recorder(write_batch))


def node(name: str = "one", slots: int = 2) -> BackendNode:
    return hot.node(name, max_replicas_per_model=slots)


def bus_of(*nodes: BackendNode) -> PlayedBus:
    """Their workers have the backend, start engines, and confirm stops."""
    bus = PlayedBus()
    for one in nodes:
        bus.replies[messages.subject("backend.list", str(one.id))] = m.ListReply((BACKEND,))
        bus.replies[messages.subject("backend.install", str(one.id))] = STARTED
        bus.replies[messages.subject("model.stop", str(one.id))] = m.StopModelReply(terminated=True)
    return bus


def stopped(bus: PlayedBus, on: BackendNode) -> list[str]:
    found = bus.asked[messages.subject("model.stop", str(on.id))]
    return [decode(body, m.StopModelRequest).process_key for body in found]


@pytest.mark.rule("R1.94", "R1.98", "R1.86")
def test_a_model_without_a_rule_is_replaced_too_and_its_rule_for_routing_is_left_alone() -> None:
    replica = old(node())
    store.set_rule(Rule("echo", route_policy="round_robin"), clock.now())
    for _ in range(2):
        assert replicas.run_pass(tick=True)
    (asked,) = Operation.objects.all()
    assert (asked.kind, asked.element) == (load_request.KIND, "echo")
    assert asked.payload["replaces"] == str(replica.pk)
    assert asked.payload["reason"].startswith("the definition was edited")
    assert ModelSchedulingConfig.objects.get().checked_at is None


@pytest.mark.rule("R1.98", "R1.79", "R1.99", "R1.83", "T-REV-2", "T-REV-3", "T-REV-7")
async def test_the_new_one_serves_before_the_old_one_goes_and_a_request_that_runs_ends(
    loads: list[Any],
) -> None:
    """No new request reaches the old one; its engine is stopped when the last one has ended."""
    one = await hot.in_thread(node)
    former = await hot.in_thread(old, one)
    bus = bus_of(one)
    async with hot.picker() as picker:
        running = await picker.acquire(InferenceRequest(model="echo"))
        assert running is not None
        await hot.in_thread(lambda: replicas.run_pass(tick=True))
        work = await hot.in_thread(claimed)
        done = await asyncio.wait_for(load.LoadModel(bus, folder.folder(), WakeUps())(work), 60)
        assert done["replica_index"] == 1
        await hot.in_thread(former.refresh_from_db)
        assert (former.state, former.reason, former.in_flight) == ("unloading", "replaced", 1)
        assert former.deadline is not None
        assert former.deadline > clock.now() + timedelta(seconds=500)
        second = await picker.acquire(InferenceRequest(model="echo"))
        assert second is not None
        assert second.id != running.id
        assert await Stopper(bus).run_pass() == 0
        picker.release(running)
        await picker.settle()
    assert await Stopper(bus).run_pass() == 1
    assert stopped(bus, one) == ["echo#0"]
    left = await hot.in_thread(NodeModel.objects.get)
    assert (left.replica_index, left.config_revision) == (1, await hot.in_thread(revision))


@pytest.mark.rule("R1.98")
async def test_without_room_the_idle_one_goes_first_and_the_load_takes_its_place(loads: list[Any]) -> None:
    one = await hot.in_thread(node, "one", 1)
    former = await hot.in_thread(old, one)
    bus = bus_of(one)
    await hot.in_thread(lambda: replicas.run_pass(tick=True))
    work = await hot.in_thread(claimed)
    with pytest.raises(Postpone) as waits:
        await load.LoadModel(bus, folder.folder(), WakeUps())(work)
    assert "no free slot" in waits.value.reason

    def put_back() -> None:
        now = clock.now()
        attempts.put_back(
            work.id,
            work.operation.fence,
            Event.WAIT,
            now=now,
            until=now,
            reason=waits.value.reason,
            payload=waits.value.payload,
        )
        NodeModel.objects.update(in_flight=1)
        replicas.run_pass(tick=False)
        assert NodeModel.objects.get().state == "loaded", "it is the only one and busy"
        NodeModel.objects.update(in_flight=0)
        replicas.run_pass(tick=False)

    await hot.in_thread(put_back)
    await hot.in_thread(former.refresh_from_db)
    assert (former.state, former.reason) == ("unloading", "replaced")
    assert await Stopper(bus).run_pass() == 1
    again = await hot.in_thread(claimed)
    assert (await load.LoadModel(bus, folder.folder(), WakeUps())(again))["replica_index"] == 0
    left = await hot.in_thread(NodeModel.objects.get)
    assert (left.state, left.config_revision) == ("loaded", await hot.in_thread(revision))
    await hot.in_thread(lambda: replicas.run_pass(tick=True))
    assert await hot.in_thread(Operation.objects.count) == 1, "nothing more is asked for"


@pytest.mark.rule("R1.98", "R2.32")
@pytest.mark.parametrize(("free", "goes"), [(3, False), (4, True)])
@pytest.mark.parametrize("slots", [1, 2])
def test_the_old_one_goes_first_only_if_the_new_one_fits_in_its_place(
    free: int, goes: bool, slots: int
) -> None:
    """The new definition needs 10 GiB and the old replica gives 6 back: else the model would have none."""
    one = hot.node("one", max_replicas_per_model=slots, available_vram=free * 2**30)
    former = old(one, vram_needed=6 * 2**30, loaded_at=hot.EPOCH)
    BackendNode.objects.update(vram_read_at=clock.now())
    view = FleetView(fleet_cache.read_fleet("echo"), Need(vram=10 * 2**30, vram_required=True))
    question = LoadQuestion(view, evicts=False)
    decision = view.decide()
    assert decision.node is None
    resident = eviction.serving(former.pk)
    assert resident is not None
    assert question.fits_by_replacing(resident, decision) is goes


@pytest.mark.rule("R1.98", "R2.32", "I14")
@pytest.mark.parametrize(("free", "layers"), [(3, 2), (4, 0)])
def test_a_successor_is_not_loaded_with_fewer_layers_if_all_fit_in_place_of_its_predecessor(
    free: int, layers: int
) -> None:
    """`gpu_layers: auto` loaded it on another node with fewer layers instead."""
    one = hot.node("one", available_vram=free * 2**30, total_vram=10 * 2**30)
    hot.node("two", available_vram=8 * 2**30, total_vram=8 * 2**30)
    former = old(one, vram_needed=6 * 2**30, loaded_at=hot.EPOCH)
    BackendNode.objects.update(vram_read_at=clock.now())
    need = Need(vram=10 * 2**30, vram_required=True, partial=((2, 8 * 2**30), (1, 5 * 2**30)))
    (definition,) = asyncio.run(folder.folder().all())
    wanted, request = (
        LoadNeeds(definition, need),
        dataclasses.replace(ANY_REPLICA_REQUEST, is_scale_up=True, replaces=former.pk),
    )
    question, decision = load_placement.decide(wanted, request, {}, frozenset(), frozenset())
    explanation = decide_load(question, decision)
    assert explanation.gpu_layers == layers
    assert (explanation.node is None) is not bool(layers)
    sections = encode_load("1", "echo", question)
    snapshot = decode_load(restore([encode(find_changes({}, sections))]), "1", "echo")
    assert snapshot is not None
    assert decide_load(snapshot.question, snapshot.question.view.decide()) == explanation


@pytest.mark.rule("R1.98")
def test_the_last_one_stays_when_a_request_has_come_since_the_plan() -> None:
    replica = old(node(), in_flight=1)
    with pytest.raises(errors.Conflict, match="in use again"):
        replicas.replace_replica(replica.pk, clock.now())
    other = old(node("two"))
    replicas.replace_replica(replica.pk, clock.now())
    assert dict(NodeModel.objects.values_list("pk", "state")) == {
        replica.pk: "unloading",
        other.pk: "loaded",
    }
    with pytest.raises(errors.Conflict):
        replicas.replace_replica(replica.pk, clock.now())


@pytest.mark.rule("R1.94")
async def test_nothing_is_loaded_when_the_definition_was_edited_back(loads: list[Any], models: Path) -> None:
    former = await hot.in_thread(old, await hot.in_thread(node))
    await hot.in_thread(lambda: replicas.run_pass(tick=True))
    await hot.in_thread(lambda: NodeModel.objects.update(config_revision=revision()))
    work = await hot.in_thread(claimed)
    assert await load.LoadModel(PlayedBus(), Folder(models), WakeUps())(work) == {"already_loaded": True}
    await hot.in_thread(former.refresh_from_db)
    assert former.state == "loaded"


@pytest.mark.rule("R1.98", "R1.5")
def test_a_new_one_that_is_published_twice_takes_one_former_one_out() -> None:
    """The place was lost: nothing changes."""
    one = node()
    former = old(one)
    new = hot.replica(one, "echo", 1, phase=LOADING_PHASES[-1], owner=attempt("1:1"))
    run(attempt("1:1"))
    place = slots.Slot(new.pk, one.pk, "one", 1)
    wish: dict[str, Any] = {"address": "127.0.0.1:8", "backend": "echo", "options": {}, "revision": "x"}
    lost = slots.publish(place, attempt=attempt("1:2"), now=clock.now(), replaces=former.pk, **wish)
    assert (lost, NodeModel.objects.get(pk=former.pk).state) == (False, "loaded")
    assert slots.publish(place, attempt=attempt("1:1"), now=clock.now(), replaces=former.pk, **wish)
    assert NodeModel.objects.get(pk=former.pk).state == "unloading"


@pytest.mark.rule("R1.96", "R1.98", "T-REV-1", "T-REV-3")
async def test_a_load_during_which_the_definition_was_edited_is_followed_by_another(
    loads: list[Any], models: Path
) -> None:
    """It ends as it began, and its row says what was loaded: the next pass has a successor loaded."""
    one = await hot.in_thread(node)
    bus = bus_of(one)
    before = await hot.in_thread(revision)
    edited = "name: echo\nbackend: echo\nparameters: {model: echo}\ncontext_size: 64\n"

    def edit() -> None:
        (models / "echo.yaml").write_text(edited)
        folder._folder.cache_clear()  # which looks once a second

    loads.append(edit)

    def asked() -> Work:
        store.set_rule(Rule("echo", min_replicas=1), clock.now())
        replicas.run_pass(tick=True)
        return claimed()

    async def loaded(work: Work) -> NodeModel:
        done = await load.LoadModel(bus, folder.folder(), WakeUps())(work)
        now = clock.now()
        await hot.in_thread(
            lambda: attempts.finish(*work.attempt, Event.COMPLETE, now=now, result=dict(done))
        )
        return await hot.in_thread(lambda: NodeModel.objects.get(state="loaded"))

    first = await loaded(await hot.in_thread(asked))
    assert first.config_revision == before != await hot.in_thread(revision)
    # The next engine has the played worker's only address.
    await hot.in_thread(lambda: NodeModel.objects.update(address="127.0.0.1:9"))
    await hot.in_thread(lambda: replicas.run_pass(tick=True))
    work = await hot.in_thread(claimed)
    assert work.operation.payload["replaces"] == str(first.pk)
    second = await loaded(work)
    assert (second.replica_index, second.config_revision) == (1, await hot.in_thread(revision))


@pytest.mark.rule("R1.98", "T-REG-94", "T-REG-97")
def test_a_replacement_is_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Successor, former one and load info change together; a stop was not sent yet."""
    one = node()
    former = old(one)
    new = hot.replica(one, "echo", 1, phase=LOADING_PHASES[-1], owner=attempt("1:1"))
    info = ModelLoadInfo.objects.create(model_name="echo", backend_type="former", updated_at=clock.now())
    run(attempt("1:1"))
    place = slots.Slot(new.pk, one.pk, "one", 1)
    wish: dict[str, Any] = {"address": "127.0.0.1:8", "backend": "echo", "options": {}, "revision": "x"}

    def published() -> bool:
        return slots.publish(place, attempt=attempt("1:1"), now=clock.now(), replaces=former.pk, **wish)

    def rows() -> list[Any]:
        info.refresh_from_db()
        columns = ("state", "stop_error", "stop_attempts")
        return [*NodeModel.objects.order_by("replica_index").values_list(*columns), info.backend_type]

    with monkeypatch.context() as broken:
        broken.setattr(terminations, "replace", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            published()
    assert rows() == [("loaded", "", 0), ("loading", "", 0), "former"]
    assert published()
    assert rows() == [("unloading", "", 0), ("loaded", "", 0), "echo"]


@pytest.mark.rule(
    *("R1.95", "T-REG-96", "T-REG-119", "T-REG-120", "T-REG-121", "T-REG-122", "T-REG-123", "T-REG-124"),
    *("T-REG-158", "R1.83"),
)
async def test_a_replica_of_a_former_definition_is_one_until_it_gives_way() -> None:
    """D-RENEWAL: for the picks, the finders, the counts and the slots; then it only keeps its slot."""
    one = await hot.in_thread(node, "one", 3)
    former = await hot.in_thread(lambda: old(one, last_used=hot.EPOCH))
    current = await hot.in_thread(lambda: old(one, 1, config_revision=revision(), in_flight=1))

    def seen() -> list[Any]:
        (view,) = fleet_cache.read_fleet("echo")
        return [
            fleet_queries.is_served("echo"),
            NodeModel.objects.serving().filter(pk=former.pk).exists(),
            [row.pk for row in unload_requests.least_recently_used([one.pk])] == [former.pk],
            NodeModel.objects.of("echo").loaded().count(),
            api.admin().get(f"/api/nodes/{one.pk}").json()["model_count"],
            (view.used_indices, view.slots),
        ]

    async with hot.picker() as picker:
        assert await hot.in_thread(seen) == [True, True, True, 2, 2, ({0, 1}, 3)]
        picked = await picker.acquire(InferenceRequest(model="echo"))
        assert picked is not None
        assert picked.id == former.pk
        picker.release(picked)
        await picker.settle()
        await hot.in_thread(lambda: terminations.replace([former.pk], now=clock.now()))
        assert await hot.in_thread(seen) == [True, False, False, 1, 1, ({0, 1}, 3)]
        picked = await picker.acquire(InferenceRequest(model="echo"))
        assert picked is not None
        assert picked.id == current.pk
        picker.release(picked)
        await picker.settle()
