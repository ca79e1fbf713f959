"""Every kind of decision leaves a record; each is decided again after its test (`tests/conftest.py`)."""

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.kit import clock, errors
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NotConnected
from localai_cluster.rpc.errors import BackendError, Lost
from nodes.decisions import scale_records
from nodes.loading import load_attempts, load_request
from nodes.loading.load_attempts import Cause, NodeReason
from nodes.models import BackendNode, ModelSchedulingConfig, NodeModel, PlacementLog, PlacementRecord
from nodes.reconcilers import replicas
from nodes.replicas import unload_requests
from nodes.replicas.stops import Stopper
from nodes.replicas.unload_requests import UnloadRequest
from nodes.scheduling import passes, store
from nodes.scheduling.plan import plan
from nodes.scheduling.rules import Rule
from operations.executor.work import in_thread
from operations.ledger.admission import Requester
from operations.models import Operation
from tests.conftest import until
from tests.integration.loading.test_evicting import old, short_of_room, waits
from tests.support import api, hot
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)

GIB = 2**30
HOUR = timedelta(hours=1)


@pytest.fixture
def models(settings: Settings, tmp_path: Path) -> Path:
    """A models folder that defines `m` and `n`."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    for name in "mn":
        (tmp_path / f"{name}.yaml").write_text(
            f"name: {name}\nbackend: echo\nparameters: {{model: {name}}}\n"
        )
    return tmp_path


def records() -> list[tuple[str, str, str, str]]:
    rows = PlacementRecord.objects.order_by("id")
    return [(row.model_name, row.kind, row.outcome, row.node_name) for row in rows]


@pytest.mark.rule("R2.51", "I14")
async def test_an_eviction_is_kept_with_the_slot_that_it_makes_room_for(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Under the victim's model, with whose load it was for; the load's record names the victim."""
    victim = await hot.in_thread(short_of_room, stage, settings)
    stage.bus.replies[messages.subject("model.stop", str(stage.one.id))] = m.StopModelReply(
        terminated=True, process_key="a#0"
    )
    playing = asyncio.create_task(stage.handler(stage.work))
    await until(lambda: hot.in_thread(waits))
    await Stopper(stage.bus).run_pass()
    await playing
    assert await in_thread(records) == [
        ("echo", "placement", "placed", "one"),
        ("a", "eviction", "evicted", "one"),
    ]
    placed, evicted = await in_thread(lambda: list(PlacementRecord.objects.order_by("id")))
    assert placed.reason.startswith(
        "waits for a#0 on one to stop, the least recently used; no node can take it"
    )
    assert [one["replica_id"] for one in placed.facts["evicts"]] == [str(victim)]
    assert evicted.reason.startswith("makes room for echo: idle since 2026-01-01 00:00:00 UTC")
    assert evicted.operation_id == placed.operation_id == stage.work.id


def refuses(stage: Stage, loads: list[Any]) -> None:
    loads.append(BackendError("no such file"))


def dies(stage: Stage, loads: list[Any]) -> None:
    loads.append(Lost("connection reset"))


def leaves_no_bus(stage: Stage, _: list[Any]) -> None:
    stage.bus.replies[messages.subject("backend.list", str(stage.one.id))] = NotConnected("down")


def vanishes(stage: Stage, _: list[Any]) -> None:
    (stage.folder / "echo.yaml").unlink()


@pytest.mark.rule("R2.65", "I14")
@pytest.mark.parametrize(
    ("happens", "cause", "outcome"),
    [
        (refuses, Cause.NODE_REFUSED, "waiting"),
        (dies, Cause.ENGINE_DIED, "waiting"),
        (leaves_no_bus, Cause.NO_BUS, "waiting"),
        (vanishes, Cause.UNDEFINED, "refused"),
    ],
    ids=["refuses", "dies", "no bus", "undefined"],
)
async def test_an_attempt_that_ends_is_kept_with_what_follows(
    stage: Stage, loads: list[Any], happens: Callable[..., None], cause: Cause, outcome: str
) -> None:
    await in_thread(BackendNode.objects.filter(pk=stage.two.pk).delete)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)
    happens(stage, loads)
    ended = await stage.play()
    last = await in_thread(lambda: PlacementRecord.objects.order_by("id").last())
    assert last is not None
    assert (last.kind, last.outcome, last.facts["cause"]) == ("attempt", outcome, cause)
    assert last.reason == str(ended)
    assert last.node_name == ("one" if loads or "engine" in cause or "node" in cause else "")


@pytest.mark.parametrize(
    ("cause", "times", "over", "outcome"),
    [
        (Cause.NODE_REFUSED, 2, False, "waiting"),
        (Cause.NODE_REFUSED, 3, False, "refused"),
        (Cause.ENGINE_DIED, 3, False, "refused"),
        (Cause.WORKER_GONE, 99, False, "waiting"),
        (Cause.WORKER_GONE, 1, True, "refused"),
        (Cause.FAILED, 1, False, "refused"),
    ],
)
def test_what_follows_an_attempt(cause: Cause, times: int, over: bool, outcome: str) -> None:
    assert load_attempts.replay_outcome({"cause": cause, "times": times, "over": over}) == outcome


async def test_a_load_that_all_nodes_have_refused_ends_with_a_record(stage: Stage) -> None:
    """The decision that no node is left is one of placement."""
    payload: dict[str, Any] = {}
    for node in (stage.one, stage.two):
        payload = load_attempts.with_refusal(payload, NodeReason(node.id, node.name, "no such file"))
    stage.work.operation.payload = payload
    await in_thread(Operation.objects.update, payload=payload)
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, load_attempts.LoadFailed)
    (row,) = await in_thread(lambda: list(PlacementRecord.objects.all()))
    assert (row.kind, row.outcome) == ("placement", "refused")
    assert row.reason.startswith("every node that could take it has refused this load; no node can take it")


def rule(minimum: int, model: str = "m", **fields: Any) -> None:
    store.set_rule(Rule(model, min_replicas=minimum, **fields), clock.now())


def last_scaled() -> PlacementRecord:
    return PlacementRecord.objects.filter(kind="scale").latest("id")


@pytest.mark.usefixtures("models")
class TestScaling:
    @pytest.mark.rule("R4.10", "R4.17", "I14")
    def test_what_is_loaded_and_what_is_retired_is_kept_in_the_words_of_the_rule(self) -> None:
        node = hot.node("one", max_replicas_per_model=3)
        rule(2)
        replicas.run_pass(tick=True)
        assert records() == [("m", "scale", "scaled", "")]
        assert last_scaled().reason == "2 wanted, 0 running, 0 loading: starting 2"
        Operation.objects.all().delete()
        for index in range(3):
            hot.replica(node, "m", index, last_used=clock.now() - HOUR)
        replicas.run_pass(tick=True)
        assert records()[1:] == [("m", "scale", "scaled", ""), ("m", "unload", "unloading", "")]
        assert last_scaled().reason.startswith("replica 2 on one idle for 60 min and more than 2 there")
        unload = PlacementRecord.objects.latest("id")
        assert unload.reason == f"{last_scaled().reason}; replicas that leave: 2 on one"
        count = PlacementRecord.objects.count()
        replicas.run_pass(tick=True)
        assert PlacementRecord.objects.count() == count, "nothing was decided"

    @pytest.mark.rule("R4.23", "I14")
    def test_what_cannot_be_had_is_kept_once_as_long_as_its_words_stay(self) -> None:
        rule(1, model="undefined")
        for _ in range(4):
            replicas.run_pass(tick=True)
        assert records() == [("undefined", "scale", "waiting", "")]

    @pytest.mark.rule("R4.5", "I14")
    def test_what_is_refused_has_a_record_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hot.node("one")

        def refuses(*_: Any, **__: Any) -> None:
            raise errors.Conflict("model_unload of m is in progress")

        monkeypatch.setattr(load_request, "request_scale_up", refuses)
        rule(1)
        replicas.run_pass(tick=True)
        assert records() == [("m", "scale", "scaled", ""), ("m", "scale", "refused", "")]
        assert last_scaled().reason.endswith("starting 1; refused: model_unload of m is in progress")

    def test_the_records_of_a_pass_are_a_constant_number_of_statements(self, models: Path) -> None:
        counts = []
        for size in (2, 8):
            for number in range(size):
                name = f"{size}-{number}"
                rule(1, model=name)
                (models / f"{name}.yaml").write_text(f"name: {name}\nbackend: b\nparameters: {{model: x}}\n")
            desired_states = passes.read_desired_states()
            fleet = replicas.observe(desired_states, replicas.definition_revisions(), clock.now())
            decisions = plan(fleet, desired_states, clock.now(), tick=True)
            about = {desired_state.model: desired_state for desired_state in desired_states}
            with CaptureQueriesContext(connection) as queries:
                scale_records.record_decisions(decisions, fleet, about, clock.now(), tick=True)
            counts.append(len(queries))
        assert counts == [5, 5], "a snapshot, the last records, and the new ones in a transaction"


@pytest.mark.rule("I14")
def test_an_unload_that_somebody_asks_for_names_what_leaves() -> None:
    one, two = hot.node("one"), hot.node("two")
    for node in (one, two):
        hot.replica(node, "m")
    unload_requests.unload(UnloadRequest("m", Requester("anna"), node=two), now=clock.now())
    (row,) = PlacementRecord.objects.all()
    assert (row.kind, row.outcome) == ("unload", "unloading")
    assert row.reason == "unload asked for by anna; replicas that leave: 0 on two"
    unload_requests.unload(UnloadRequest("m", Requester("bert"), node=two), now=clock.now())
    assert PlacementRecord.objects.count() == 1, "the second one joins"


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("placement", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.rule("I14")
def test_the_command_line_decides_again() -> None:
    hot.node("one")
    hot.replica(BackendNode.objects.get(), "m")
    unload_requests.unload(UnloadRequest("m", Requester("anna")), now=clock.now())
    row = PlacementRecord.objects.get()
    assert run("again", str(row.pk)).startswith("the same decision: unloading: unload asked for by anna")
    assert '"same": true' in run("again", str(row.pk), "--json")
    PlacementRecord.objects.update(reason="something else")
    assert run("again", str(row.pk)).startswith("ANOTHER decision: unloading")
    PlacementLog.objects.all().delete()
    assert run("again", str(row.pk)).startswith("the snapshot of this decision has been deleted")
    with pytest.raises(CommandError, match="no record of this number"):
        run("again", "0")
    PlacementRecord.objects.all().delete()


# --- explain and plan know evictions


@pytest.fixture
def requires(settings: Settings, models: Path) -> None:
    """Models `m` and `n` of 1 MiB, and memory that is required."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, vram_policy="require")
    for name in "mn":
        (models / name).write_bytes(bytes(2**20))


def full(name: str, *models: str) -> BackendNode:
    node = hot.node(name, available_vram=0, vram_read_at=clock.now(), max_replicas_per_model=9)
    for index, model in enumerate(models):
        old(node, model, index, last_used=hot.EPOCH + timedelta(hours=node.pk.int % 7, minutes=index))
    return node


@pytest.mark.usefixtures("requires")
@pytest.mark.rule("R2.51")
def test_explain_says_what_the_next_load_would_evict() -> None:
    full("one", "a")
    answer = api.admin().get("/api/models/m/explain").json()["next"]
    assert answer["action"] == "load"
    assert answer["says"].startswith("a load begins on one: waits for a#0 on one to stop")
    assert answer["placement"]["outcome"] == "placed"
    assert [one["replica"] for one in answer["placement"]["evicts"]] == ["a#0"]
    ModelSchedulingConfig.objects.create(model_name="a", min_replicas=1)
    answer = api.admin().get("/api/models/m/explain").json()["next"]
    assert answer["placement"]["outcome"] == "waiting"
    assert answer["says"].endswith("no replica there can make room: 1 kept by the minimum of its rule")
    assert not PlacementRecord.objects.exists()
    assert NodeModel.objects.get().state == "loaded"


@pytest.mark.usefixtures("requires")
@pytest.mark.rule("R2.51", "R2.52")
def test_a_plan_evicts_for_one_replica_after_another_and_each_victim_once() -> None:
    full("one", "a", "b")
    answer = api.admin().post("/api/placement/plan", {"need": {"vram": 12 * GIB}, "replicas": 2}).json()
    first, second = answer["decisions"]
    assert (first["outcome"], len(first["evicts"])) == ("placed", 2)
    assert (second["outcome"], second["evicts"]) == ("waiting", [])
    assert NodeModel.objects.filter(state="loaded").count() == 2


@pytest.mark.usefixtures("models")
def test_explain_knows_what_the_load_under_way_was_asked_for() -> None:
    """A load for another node than the one whose replica stops goes elsewhere; not where it was refused."""
    leaving, other = hot.node("leaving", available_vram=9 * GIB), hot.node("other")
    load_request.load_on_other_node("m", leaving.id, None)
    answer = api.admin().get("/api/models/m/explain").json()["next"]
    assert answer["action"] == "join"
    assert (answer["placement"]["node"], answer["placement"]["nodes"]["considered"]) == ("other", 1)
    operation = Operation.objects.get()
    refusal = NodeReason(other.id, "other", "no such file")
    Operation.objects.update(payload=load_attempts.with_refusal(operation.payload, refusal))
    answer = api.admin().get("/api/models/m/explain").json()["next"]
    assert answer["placement"]["outcome"] == "refused"
