"""Reasons of placement: what is kept of decisions, explained over REST and the command line, and plans."""

import dataclasses
import json
import os
import secrets
import struct
from base64 import b64encode
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.decisions import decision_log, fleet_cache
from nodes.definitions.files import Definition, parse_definition
from nodes.loading import load_explanation, load_placement, load_request
from nodes.loading.load_attempts import Attempt
from nodes.loading.load_explanation import ReplayedDecision
from nodes.models import (
    BackendNode,
    ModelSchedulingConfig,
    NodeBackend,
    NodeLabel,
    NodeModel,
    PlacementLog,
    PlacementRecord,
)
from nodes.models.replica import load_key
from nodes.models.scheduling import PlacementOutcome
from nodes.placement.choose import NO_NEED, Need
from nodes.placement.explain import DecisionOutcome
from nodes.reconcilers import tasks
from nodes.replicas import slots
from operations.executor.work import Abandoned, Postpone, Work, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Operation
from tests.support import api, gguf_files, hot
from tests.support.bus import PlayedBus
from tests.support.deciding import decided
from tests.support.gguf_models import MODELS
from tests.support.replicas import attempt

pytestmark = pytest.mark.django_db(transaction=True)

PLAN = "/api/placement/plan"
GIB = 2**30
DEFINITION = "name: {name}\nbackend: echo\nparameters:\n  model: {name}\n"


@pytest.fixture
def models(tmp_path: Path, settings: Any) -> Path:
    """A models folder with the definitions `m` and `org/m`."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    for file, name in (("a", "m"), ("b", "org/m")):
        (tmp_path / f"{file}.yaml").write_text(DEFINITION.format(name=name))
    return tmp_path


def definition() -> Definition:
    return parse_definition({"name": "m", "backend": "echo", "parameters": {"model": "m"}}, "m.yaml")


def claimed() -> Work:
    wanted = admission.OperationRequest(
        load_request.KIND, key=load_key("m"), element="m", by=Requester("key")
    )
    now = clock.now()
    admission.admit(dataclasses.replace(wanted, needed_until=now + timedelta(hours=1)), now=now)
    (mine,) = attempts.claim("c", now=now, lease=60, limit=1)
    return Work(mine, Recorder(write_batch))


async def placed(work: Work, need: Need = NO_NEED, *, silent: str = "") -> Attempt:
    bus = PlayedBus()
    nodes = await hot.in_thread(lambda: list(BackendNode.objects.values_list("id", "name")))
    for id, name in nodes:
        if name != silent:
            bus.replies[messages.subject("backend.list", str(id))] = m.ListReply(())
    what = load_placement.LoadNeeds(definition(), need)
    return await load_placement.reserve_slot(bus, work, what)


def kept() -> list[PlacementRecord]:
    return list(PlacementRecord.objects.order_by("id"))


def test_outcomes_are_the_same_in_rows_and_decisions() -> None:
    """Placement is pure and cannot ask the model."""
    assert set(PlacementOutcome.values) == set(DecisionOutcome)


class TestRecords:
    @pytest.mark.rule("R2.30", "R1.71", "T-ROU-11", "UW9")
    async def test_a_placement_is_kept_with_what_decided_it(self) -> None:
        """Another process makes the same decision from the row alone (I14)."""

        def given() -> Work:
            hot.node("a", available_vram=12 * GIB)
            hot.node("b", available_vram=20 * GIB)
            return claimed()

        work = await hot.in_thread(given)
        place = await placed(work)
        (row,) = await hot.in_thread(kept)
        assert (row.model_name, row.operation_id, row.outcome) == ("m", work.id, "placed")
        assert (row.node_id, row.node_name, row.replica_index) == (place.slot.node_id, "b", 0)
        assert row.reason == place.why == "most VRAM available: 20.0 GiB against 12.0 GiB on a"
        again = await hot.in_thread(load_explanation.replay, row)
        assert (
            again
            == load_explanation.recorded_decision(row)
            == ReplayedDecision("placed", row.reason, row.node_id)
        )
        assert (await hot.in_thread(NodeModel.objects.get)).node_id == row.node_id

    @pytest.mark.rule("R1.72", "I14")
    async def test_of_equal_nodes_the_one_that_has_the_backend_is_chosen(self) -> None:
        """Review R14. The record alone leads to the same decision; the other node says why it is behind."""

        def given() -> Work:
            hot.node("a")
            NodeBackend.objects.create(node=hot.node("b"), name=definition().backend.upper())
            hot.node("c", offline_at=clock.now())
            return claimed()

        work = await hot.in_thread(given)
        assert (await placed(work)).slot.node_name == "b"
        (row,) = await hot.in_thread(kept)
        assert row.reason == "the backend is there already: installed against not installed on a"
        assert [one.get("against") for one in row.facts["best"]] == [
            None,
            "the backend is not there yet: not installed against installed on b",
        ]
        again = await hot.in_thread(load_explanation.replay, row)
        assert (
            again
            == load_explanation.recorded_decision(row)
            == ReplayedDecision("placed", row.reason, row.node_id)
        )

    async def test_who_did_not_answer_is_a_miss_of_the_record(self) -> None:
        def given() -> Work:
            hot.node("a", available_vram=12 * GIB)
            hot.node("b", available_vram=20 * GIB)
            return claimed()

        await placed(await hot.in_thread(given), silent="b")
        (row,) = await hot.in_thread(kept)
        assert row.node_name == "a"
        assert [(one["node"], one["code"]) for one in row.facts["misses"]] == [("b", "silent")]

    async def test_a_wait_is_kept_once_as_long_as_its_reasons_stay(self) -> None:
        """The figures follow; another reason is another record, and so is the end of the load."""
        need = Need(vram=8 * GIB, vram_required=True)

        async def waits(**figures: Any) -> str:
            await hot.in_thread(lambda: BackendNode.objects.update(**figures))
            with pytest.raises((Postpone, Abandoned)) as ended:
                await placed(work, need)
            return str(ended.value)

        def given() -> Work:
            hot.node("a")
            return claimed()

        work = await hot.in_thread(given)
        first = await waits(available_vram=2 * GIB)
        assert first == await waits()
        (row,) = await hot.in_thread(kept)
        assert (row.outcome, row.reason, row.at) == ("waiting", first, row.last_at)
        second = await waits(available_vram=3 * GIB)
        (row,) = await hot.in_thread(kept)
        assert row.reason == second != first
        assert row.facts["misses"][0]["free_vram"] == 3 * GIB
        assert row.at < row.last_at
        third = await waits(approved_at=None)
        assert [one.reason for one in await hot.in_thread(kept)] == [second, third]
        await hot.in_thread(lambda: Operation.objects.update(needed_until=clock.now()))
        ended = await waits()
        rows = await hot.in_thread(kept)
        assert [(one.outcome, one.reason) for one in rows[2:]] == [("refused", third)]
        assert ended.endswith(third)

    def test_slot_and_record_are_there_together_or_not_at_all(self) -> None:
        """What fails after the row takes it back, too."""
        hot.node("a")
        (view,) = fleet_cache.read_fleet("m")
        why = decided("m")
        broken = patch.object(PlacementRecord, "save", side_effect=RuntimeError)
        with broken, pytest.raises(RuntimeError):
            slots.reserve(view, "m", attempt=attempt("a:1"), backend="b", now=clock.now(), why=why)
        assert not NodeModel.objects.exists()
        slots.reserve(view, "m", attempt=attempt("a:1"), backend="b", now=clock.now(), why=why)
        slots.reserve(view, "m", attempt=attempt("b:1"), backend="b", now=clock.now(), why=why)
        assert (NodeModel.objects.count(), len(kept())) == (1, 1), "a refused slot leaves no record"

    def test_the_index_is_the_one_that_was_taken(self) -> None:
        node = hot.node("a", max_replicas_per_model=2)
        (view,) = fleet_cache.read_fleet("m")
        why = decided("m")
        hot.replica(node, "m", 0)
        slots.reserve(view, "m", attempt=attempt("a:1"), backend="b", now=clock.now(), why=why)
        assert kept()[0].replica_index == 1

    def test_they_last_as_long_as_events(self) -> None:
        """A wait that goes on is as young as its last look."""
        now = clock.now()
        for age in (0, 29, 31, 50):
            decision_log.record(decided(f"m{age}"), now=now - timedelta(days=age))
        PlacementRecord.objects.filter(model_name="m50").update(last_at=now)
        tasks.prune_timeline()
        assert {one.model_name for one in kept()} == {"m0", "m29", "m50"}


def test_records_of_decisions_are_bounded_by_their_size(settings: Settings) -> None:
    """Review X11: at one decision a second they took 41 GB a month. The newest ones are kept."""
    now = clock.now()
    for number in range(6):
        PlacementRecord.objects.create(
            model_name=f"m{number}",
            at=now - timedelta(days=9),
            last_at=now - timedelta(minutes=number),
            outcome="waiting",
            reason="x",
            # As text that cannot be compressed, so that the row is as large as it looks.
            facts={"best": secrets.token_hex(8000)},
        )
        PlacementLog.objects.create(position=0, at=now - timedelta(minutes=number), body=os.urandom(10_000))
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, decision_storage_limit=10**6)
    with CaptureQueriesContext(connection) as none_deleted:
        tasks.prune_timeline()
    assert len(kept()) == PlacementLog.objects.count() == 6
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, decision_storage_limit=36_000)
    with CaptureQueriesContext(connection) as some_deleted:
        tasks.prune_timeline()
    assert len(some_deleted) - len(none_deleted) == 2, "a deletion of each, whatever their number"
    names = {one.model_name for one in kept()}
    assert names == {f"m{number}" for number in range(len(names))}, "the newest"
    assert 1 <= len(names) <= 2
    assert PlacementLog.objects.count() == 3
    tasks.prune_timeline()
    assert (len(kept()), PlacementLog.objects.count()) == (len(names), 3), "what fits stays"
    PlacementRecord.objects.all().delete()  # nobody made these decisions


def explained(model: str = "m") -> Any:
    answer = api.admin().get(f"/api/models/{model}/explain")
    assert answer.status_code == 200, answer.content
    return answer.json()


@pytest.mark.usefixtures("models")
class TestExplain:
    def test_a_model_that_never_was_is_404(self) -> None:
        for name in ("nothing", "%00", "org/nothing"):
            assert api.admin().get(f"/api/models/{name}/explain").status_code == 404
        decision_log.record(decided("org/gone"), now=clock.now())
        answer = explained("org/gone")
        assert (answer["defined"], answer["next"]["action"]) == (False, "refuse")
        assert answer["next"]["placement"] is None
        assert answer["records"][0]["reason"] == "no node is registered"

    def test_it_is_for_admins(self) -> None:
        for path in ("/api/models/m/explain", PLAN):
            assert api.Caller().get(path).status_code == 401

    def test_a_request_goes_where_the_picks_would_send_it(self) -> None:
        near, far = hot.node("near"), hot.node("far", max_replicas_per_model=2)
        hot.replica(far, "m", 0, in_flight=2)
        chosen = hot.replica(far, "m", 1, in_flight=1)
        hot.replica(near, "m", 0, in_flight=1, last_used=clock.now())
        hot.replica(hot.node("sick", unhealthy_at=clock.now()), "m")
        answer = explained()
        assert [(one["node"], one["replica_index"], one["in_flight"]) for one in answer["replicas"]] == [
            ("far", 0, 2),
            ("far", 1, 1),
            ("near", 0, 1),
            ("sick", 0, 0),
        ]
        assert answer["next"]["replica_id"] == str(chosen.id)
        assert answer["next"]["says"] == "it is sent to replica 1 on far; requests there: 1"
        assert answer["next"]["placement"]["outcome"] == "waiting", "one more replica has no place"

    @pytest.mark.rule("UW9")
    def test_what_a_load_would_decide_now_is_said_and_not_written(self) -> None:
        hot.node("a", available_vram=2 * GIB)
        hot.node("b", available_vram=3 * GIB)
        answer = explained("org/m")
        because = "most VRAM available: 3.0 GiB against 2.0 GiB on a"
        assert answer["next"]["action"] == "load"
        assert answer["next"]["says"] == f"a load begins on b: {because}"
        assert answer["next"]["placement"]["reason"] == because
        assert [one["node"] for one in answer["next"]["placement"]["best"]] == ["b", "a"]
        assert not PlacementRecord.objects.exists()
        assert not Operation.objects.exists()

    def test_a_request_joins_the_load_under_way_and_hears_a_failure_of_a_moment_ago(self) -> None:
        hot.node("a")
        work = claimed()
        answer = explained()["next"]
        assert (answer["action"], answer["operation_id"]) == ("join", str(work.id))
        now = clock.now()
        Operation.objects.update(status="failed", finished_at=now, error="no such file", lease_until=None)
        answer = explained()["next"]
        assert (answer["action"], answer["operation_id"]) == ("refuse", str(work.id))
        assert answer["says"] == "the last load failed a moment ago: no such file"
        Operation.objects.update(finished_at=now - timedelta(minutes=1))
        assert explained()["next"]["action"] == "load"

    def test_the_number_of_queries_is_the_same_for_any_fleet(self) -> None:
        counts = []
        ModelSchedulingConfig.objects.create(model_name="m", node_selector={"tier": "fast"})
        for size in (1, 6):
            for number in range(size):
                node = hot.node(f"{size}-{number}")
                NodeLabel.objects.create(node=node, key="tier", value="fast")
                hot.replica(node, "m")
                decision_log.record(decided("m"), now=clock.now())
            explained()  # the mirror reads what is new
            with CaptureQueriesContext(connection) as queries:
                explained()
            counts.append(len(queries))
        assert counts[0] == counts[1]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the dimensions of SmolLM2."""
    return gguf_files.write(tmp_path_factory.mktemp("models") / "m.gguf", MODELS[0])


def planned(**body: Any) -> Any:
    answer = api.admin().post(PLAN, body)
    assert answer.status_code == 200, answer.content
    return answer.json()


@pytest.mark.usefixtures("models")
class TestPlan:
    @pytest.mark.rule("UW12")
    def test_replicas_are_placed_one_after_another_and_nothing_is_written(self) -> None:
        hot.node("a", available_vram=20 * GIB, max_replicas_per_model=2)
        hot.node("b", available_vram=12 * GIB)
        with CaptureQueriesContext(connection) as queries:
            answer = planned(need={"vram": 8 * GIB}, replicas=4)
        assert not [one for one in queries if one["sql"].startswith(("INSERT", "UPDATE", "DELETE"))]
        assert (answer["model"], answer["wanted"], answer["placed"]) == (None, 4, 3)
        assert [(one["node"], one["replica_index"]) for one in answer["decisions"]] == [
            ("a", 0),
            ("b", 0),
            ("a", 1),
            (None, None),
        ]
        last = answer["decisions"][-1]
        assert (last["outcome"], last["reason"]) == (
            "waiting",
            "no node can take it: 2 no free slot for this model",
        )

    @pytest.mark.rule("UW12")
    def test_nodes_that_do_not_exist_are_added_with_the_labels_they_would_have(self) -> None:
        hot.node("a", available_vram=99 * GIB)
        ModelSchedulingConfig.objects.create(model_name="m", node_selector={"gpu.vram": "24GB"})
        answer = planned(model="m", replicas=4, nodes=[{"count": 3, "vram_gib": 24}])
        assert [one["hypothetical"] for one in answer["decisions"]] == [True, True, True, False]
        assert answer["placed"] == 3
        free = planned(model="m", selector={}, nodes=[{"count": 1, "vram_gib": 1, "labels": {"x": "y"}}])
        assert free["decisions"][0]["node"] == "a"
        only = planned(model="m", selector={"x": "y"}, nodes=[{"count": 1, "labels": {"x": "y"}}])
        assert only["decisions"][0]["hypothetical"] is True

    @pytest.mark.parametrize("policy", ["fit", "require"])
    @pytest.mark.parametrize(("gib", "cards", "placed"), [(24, 1, 1), (24, 4, 0), (0, 1, 0)])
    def test_an_added_node_has_one_gpu_of_its_memory(
        self, models: Path, settings: Any, policy: str, gib: int, cards: int, placed: int
    ) -> None:
        """An engine that takes a share of each GPU fits on as many GPUs as it uses, and on none without."""
        settings.CLUSTER = dataclasses.replace(settings.CLUSTER, vram_policy=policy)
        text = f"name: v\nbackend: vllm\nparameters: {{model: v}}\ntensor_parallel_size: {cards}\n"
        (models / "v.yaml").write_text(text)
        answer = planned(model="v", nodes=[{"count": 1, "vram_gib": gib}])
        assert answer["placed"] == (1 if policy == "fit" and not gib else placed)

    def test_null_is_the_same_as_nothing(self) -> None:
        """Also where the field has a check of its own."""
        nothing = {"model": None, "need": None, "nodes": None, "selector": None, "rule": None}
        file = {"size": GIB, "header": None, "config": None, "definition": None}
        assert planned(**nothing, file=file)["placed"] == 0

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({}, "model"),
            ({"model": "m", "need": {}}, "model"),
            ({"model": "none"}, "model"),
            ({"model": 5}, "model"),
            ({"need": {"vram": -1}}, "need"),
            ({"need": {"vram": 2**63}}, "need"),
            ({"need": []}, "need"),
            ({"need": {}, "replicas": 0}, "replicas"),
            ({"need": {}, "replicas": 65}, "replicas"),
            ({"need": {}, "replicas": True}, "replicas"),
            ({"need": {}, "selector": ["a"]}, "selector"),
            ({"need": {}, "selector": {"a": 1}}, "selector"),
            ({"need": {}, "selector": {"": "a"}}, "selector"),
            ({"need": {}, "selector": {"a": "\ud800"}}, "selector"),
            ({"model": "\ud800"}, "model"),
            ({"need": {}, "nodes": [{"count": 200}, {"count": 57}]}, "nodes"),
            ({"need": {}, "nodes": [{"vram_gib": 1}]}, "nodes"),
            ({"need": {}, "nodes": [{"count": 1, "vram_gib": 1e300}]}, "nodes"),
            ({"need": {}, "nodes": [{"count": 1, "labels": {"a": "b\u0000"}}]}, "nodes"),
            ({"file": {"size": 1}, "need": {}}, "model"),
            ({"file": {"size": 0}}, "file"),
            ({"file": {"size": 1, "config": []}}, "file"),
        ],
        ids=str,
    )
    def test_a_body_that_cannot_be_meant_names_its_field(self, body: Any, field: str) -> None:
        answer = api.admin().post(PLAN, body)
        assert answer.status_code == 400, answer.content
        assert answer.json()["error"]["field"] == field

    @pytest.mark.rule("UW12", "R2.41")
    def test_a_model_that_is_not_there_is_planned_by_its_header_its_config_or_its_size(
        self, gguf: Path
    ) -> None:
        """Each term is in the answer; the settings of a definition count."""
        hot.node("gpu-1", available_vram=20 * GIB, total_vram=24 * GIB)
        size, header = gguf.stat().st_size, b64encode(gguf.read_bytes()[: 2**20]).decode()
        by_header = planned(file={"size": size, "header": header, "definition": {"context_size": 4096}})
        memory = by_header["memory"]
        assert memory["terms"]["context"] == 4096 * 22.5 * 1024
        assert (memory["context"], memory["considered"]) == (4096, 1)
        (node,) = memory["nodes"]
        assert (node["verdict"], node["missing"]) == ("fits", 0)
        assert node["needed"] == sum(memory["terms"].values()) == by_header["decisions"][0]["need"]["vram"]
        assert memory["says"].startswith("fits on gpu-1 (needs ")
        config: dict[str, Any] = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9}
        config |= {"num_key_value_heads": 3, "model_type": "llama"}
        by_config = planned(file={"size": 9000 * 2**20, "config": config})["memory"]["terms"]
        assert (by_config["weights"], by_config["context"]) == (9000 * 2**20, 8192 * 22.5 * 1024)
        by_size = planned(file={"size": 30 * GIB})["memory"]
        assert by_size["terms"]["context"] == 8192 * 2048
        assert by_size["nodes"][0]["says"] == "not on gpu-1: 10.1 GiB missing"

    @pytest.mark.rule("UW12", "R2.41")
    @pytest.mark.parametrize(
        ("header", "reason"),
        [
            (b"nothing", "it is not a GGUF file"),
            (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 10**6), "tensors and 1000000 keys"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "a key or name has"),
            (
                b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) * 2 + bytes(8),
                "lists",
            ),
            (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "it ends early"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 2**61), "longer than"),
        ],
        ids=["other", "counts", "key", "nested", "truncated", "text"],
    )
    def test_a_hostile_header_is_refused_with_its_reason(self, header: bytes, reason: str) -> None:
        answer = api.admin().post(PLAN, {"file": {"size": 2**40, "header": b64encode(header).decode()}})
        refusal = answer.json()["error"]
        assert (answer.status_code, refusal["field"]) == (400, "file"), refusal
        assert refusal["message"].startswith("file.header: ")
        assert reason in refusal["message"]

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ({"header": "%%"}, "file.header: is not Base64"),
            ({"header": "", "config": {}}, "file.config: give a header or a config"),
            ({"config": {"text_config": 1}}, "file.config: it is not a mapping"),
            ({"definition": {"backend": ""}}, "file.definition: does not say `backend`"),
            (
                {"definition": {"rope_freq_base": 10**309}},
                "file.definition: `rope_freq_base` is out of range",
            ),
            ({"definition": {"tokenizer": "\ud800"}}, "file.definition: a text has half of a surrogate pair"),
        ],
        ids=["base64", "both", "config", "definition", "overflow", "surrogate"],
    )
    def test_a_file_that_cannot_be_meant_names_its_part(self, file: dict[str, Any], message: str) -> None:
        answer = api.admin().post(PLAN, {"file": {"size": 2**30, **file}})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)

    def test_a_header_may_have_16_mib_and_no_more(self) -> None:
        """Its vocabulary; other routes keep the limit of the settings."""
        texts = struct.pack("<Q", 2**20) + bytes(2**20)
        pair = struct.pack("<Q", 1) + b"t" + struct.pack("<IIQ", 9, 8, 15) + texts * 15
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair
        body: dict[str, Any] = {"file": {"size": 2**40, "header": b64encode(header).decode()}}
        assert planned(**body)["memory"]["terms"]["weights"] == 2**40
        body["file"]["header"] = b64encode(bytes(2**24 + 3)).decode()
        assert api.admin().post(PLAN, body).status_code == 400
        body["file"]["header"] *= 2
        assert api.admin().post(PLAN, body).status_code == 413
        assert api.admin().post("/api/nodes/scheduling", body).status_code == 413

    @pytest.mark.rule("UW9")
    def test_the_memory_is_read_in_as_many_queries_for_any_fleet(self) -> None:
        """What could be unloaded is named; the replicas of all shown nodes are read at once."""
        counts, facts = [], {"available_vram": 2 * GIB, "total_vram": 24 * GIB}
        loaded_at = clock.now() - timedelta(hours=1)
        for size in (2, 30):
            for number in range(size):
                node = hot.node(f"{size}-{number}", vram_read_at=clock.now(), **facts)
                hot.replica(node, f"other{number}", vram_needed=20 * GIB, loaded_at=loaded_at)
            planned(need={"vram": 8 * GIB})
            with CaptureQueriesContext(connection) as queries:
                memory = planned(need={"vram": 8 * GIB})["memory"]
            counts.append(len(queries))
        assert counts[0] == counts[1]
        assert (len(memory["nodes"]), memory["considered"]) == (20, 32)
        assert memory["nodes"][0]["unload"] == ["other0#0"]

    def test_the_largest_plan_is_bounded(self) -> None:
        answer = planned(need={"vram": GIB}, replicas=64, nodes=[{"count": 256, "vram_gib": 8}])
        assert answer["placed"] == 64


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("placement", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.usefixtures("models")
class TestCommandLine:
    def test_it_prints_what_rest_answers(self) -> None:
        node = hot.node("a", available_vram=20 * GIB)
        hot.replica(node, "m")
        decision_log.record(decided("m"), now=clock.now())
        assert json.loads(run("explain", "m", "--json")) == explained()
        asked = ("--vram", "8", "--replicas", "2", "--node", "2x24GiB", "--selector", "gpu.vram=24GB")
        assert json.loads(run("plan", *asked, "--json")) == planned(
            need={"vram": 8 * GIB},
            replicas=2,
            selector={"gpu.vram": "24GB"},
            nodes=[{"count": 2, "vram_gib": 24}],
        )

    def test_a_plan_names_its_model_as_explain_does(self) -> None:
        """By its place or by the option, but not by both."""
        hot.node("a", available_vram=20 * GIB)
        assert run("plan", "m") == run("plan", "--model", "m")
        with pytest.raises(CommandError, match="not allowed with argument"):
            run("plan", "m", "--model", "m")
        with pytest.raises(CommandError, match="MODEL"):
            run("plan")

    def test_options_that_a_plan_does_not_use_are_refused(self) -> None:
        for arguments in (("m", "--context", "8192"), ("m", "--disk", "5"), ("--size", "5", "--disk", "5")):
            with pytest.raises(CommandError, match=f"{arguments[-2]}: only with"):
                run("plan", *arguments)

    def test_it_reads_as_text(self) -> None:
        node = hot.node("a", available_vram=20 * GIB)
        hot.replica(node, "m")
        decision_log.record(decided("m"), now=clock.now())
        text = run("explain", "m")
        assert "next request: it is sent to replica 0 on a; requests there: 0" in text
        assert "  not a: no free slot for this model" in text
        plan = run("plan", "--vram", "8", "--replicas", "2", "--node", "1x24GiB")
        assert plan.startswith("2 of 2 replicas placed")
        assert "most VRAM free: 24.0 GiB against 20.0 GiB on a" not in plan, "a has a replica already"
        assert "memory:\n  fits on (new 1) (needs 8.0 of 24.0 GiB)" in plan

    @pytest.mark.rule("UW12", "R2.41")
    def test_a_file_is_planned_by_its_path(self, gguf: Path) -> None:
        """A GGUF file, the config of a folder with weights, or a size."""
        hot.node("gpu-1", available_vram=20 * GIB, total_vram=24 * GIB)
        text = run("plan", "--file", str(gguf), "--context", "4096")
        assert "memory (0.7 GiB: weights 0.1, context 0.1, " in text
        (gguf.parent / "a.safetensors").write_bytes(bytes(1000))
        (gguf.parent / "config.json").write_text('{"num_hidden_layers": 1, "hidden_size": 8}')
        config = json.loads(run("plan", "--file", str(gguf.parent / "config.json"), "--json"))
        assert config["memory"]["terms"]["weights"] == 1000
        assert "  fits on gpu-1 (needs 9.1 of 20.0 GiB)" in run("plan", "--size", "9")
        with pytest.raises(CommandError, match="--file: "):
            run("plan", "--file", str(gguf.parent / "absent.gguf"))

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("pipe.gguf", None, "not a regular file"),
            ("config.json", None, "not a regular file"),
            ("config.json", b"[" * 100_000, "it is nested more than 64 levels deep"),
            ("config.json", b" " * 2**20 + b"{}", "it is too large"),
            ("config.json", b"{", "it is not JSON"),
            ("config.json", b"{}", "there is no file .*safetensors beside it"),
        ],
        ids=["pipe", "pipe-config", "deep", "large", "half", "alone"],
    )
    def test_a_file_that_cannot_be_read_is_refused_without_waiting_for_it(
        self, tmp_path: Path, name: str, content: bytes | None, reason: str
    ) -> None:
        """A pipe without a writer would block the command; a nested text would end it with a traceback."""
        path = tmp_path / name
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content)
        with pytest.raises(CommandError, match=f"--file: .*{reason}"):
            run("plan", "--file", str(path))

    @pytest.mark.parametrize(
        "arguments",
        [
            ("explain", "nothing"),
            ("plan", "--model", "nothing"),
            ("plan", "--vram", "1", "--replicas", "65"),
            ("plan", "--vram", "1e300"),
            ("plan", "--rule", "[" * 100_000),
        ],
        ids=lambda arguments: " ".join(arguments)[:40],
    )
    def test_a_question_without_an_answer_ends_with_one_line(self, arguments: tuple[str, ...]) -> None:
        with pytest.raises(CommandError) as refusal:
            run(*arguments)
        assert "\n" not in str(refusal.value)


def test_the_admin_shows_records_and_changes_none() -> None:
    decision_log.record(decided("m"), now=clock.now())
    (row,) = kept()
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root", password="x"))
    for path in ("", f"{row.pk}/change/"):
        page = client.get(f"/admin/nodes/placementrecord/{path}")
        assert page.status_code == 200
        assert b"no node is registered" in page.content
    assert client.get("/admin/nodes/placementrecord/add/").status_code == 403
