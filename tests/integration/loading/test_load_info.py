"""What loads teach about the memory of a model, and what loads it while its definition cannot be read.

Issue 23, "It learns". Engines have a true size here; whatever is learned is that, or nothing.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.kit.errors import NotFound, Unavailable
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.api.definition_entries import find_entry, read_entries
from nodes.decisions import fleet_cache
from nodes.definitions import folder, store
from nodes.definitions.files import Definition, read_definition
from nodes.definitions.folder import Folder
from nodes.gateway import gateway
from nodes.loading import load, load_explanation, load_info
from nodes.models import BackendNode, ModelLoadInfo, NodeBackend, NodeModel, PlacementRecord
from nodes.placement.choose import Need
from nodes.placement.fit import MAX_READINGS
from nodes.reconcilers import replicas, tasks
from nodes.replicas import engines, slots
from nodes.replicas.slots import Slot
from operations.executor.work import in_thread
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.fleet import at_once
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage
from tests.support.races import holding, waiting
from tests.support.replicas import attempt, publish

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)

GIB = 2**30
TOTAL = 48 * GIB
BUILD = {"name": "b", "digest": "sha256:1"}


class Device:
    """A node with one GPU, whose engines have true sizes, and the clock of all writers."""

    def __init__(self, number: int = 0, *, listed: bool = True) -> None:
        self.now, self.listed = clock.now(), listed
        self.node = hot.node(
            f"n{number}",
            max_replicas_per_model=99,
            total_vram=TOTAL,
            available_vram=TOTAL,
            gpu_vendor="nvidia",
        )
        NodeBackend.objects.create(node=self.node, **BUILD)
        self.allocated: dict[Slot, int] = {}
        self.read()

    def pass_time(self, seconds: float = 10.0) -> None:
        self.now += timedelta(seconds=seconds)

    def read(self) -> None:
        """A heartbeat comes a while later, and is written."""
        self.pass_time()
        free = TOTAL - GIB // 2 - sum(self.allocated.values())
        gpu = {"index": 0, "uuid": "GPU-0", "total_vram": TOTAL, "free_vram": free}
        BackendNode.objects.filter(pk=self.node.pk).update(
            available_vram=free, gpus=[gpu] if self.listed else [], vram_read_at=self.now, reserved_vram=0
        )

    def begin(self, model: str, need: int = 4 * GIB) -> Slot:
        """A load takes a slot."""
        self.pass_time(0.1)
        (view,) = fleet_cache.read_fleet(model, allowed_nodes=[self.node.pk])
        slot = slots.reserve(
            view, model, attempt=attempt(f"{model}:1"), backend="b", now=self.now, need=Need(vram=need)
        )
        assert isinstance(slot, Slot)
        self.allocated[slot] = 0
        return slot

    def allocate(self, slot: Slot, size: int) -> None:
        self.allocated[slot] = size

    def serve(self, slot: Slot, model: str, size: int) -> None:
        """Its engine has allocated all, and serves."""
        self.pass_time(0.1)
        self.allocate(slot, size)
        port = 5000 + len(self.allocated)
        assert publish(slot, attempt(f"{model}:1"), now=self.now, address=f"127.0.0.1:{port}", revision="r")

    def end(self, slot: Slot) -> None:
        """Its engine ends, and the row with it."""
        self.pass_time(0.1)
        del self.allocated[slot]
        NodeModel.engines.filter(pk=slot.id).update(updated_at=self.now)
        listed = {(str(row), row.address.rpartition(":")[2]) for row in NodeModel.objects.exclude(pk=slot.id)}
        engines.end_unlisted(self.node.pk, listed, before=self.now + timedelta(seconds=1))
        NodeModel.engines.filter(pk=slot.id).delete()

    def learn(self) -> int:
        return load_info.learn_from_readings(now=self.now)


def sizes(model: str) -> list[int]:
    """What was learned of a model, of all keys."""
    info = ModelLoadInfo.objects.get(model_name=model)
    return [size for entry in info.memory for size, _, _ in entry["readings"]]


@pytest.mark.parametrize("listed", [True, False], ids=["its GPUs", "totals"])
def test_a_node_that_reports_no_engines_teaches_by_its_readings_before_and_after(listed: bool) -> None:
    """Issue 23: as of a stock worker. Once, and not by a reading that may miss a part."""
    device = Device(listed=listed)
    slot = device.begin("chat")
    device.serve(slot, "chat", 6 * GIB)
    assert device.learn() == 0, "the only reading is from before the load"
    device.read()
    assert device.learn() == 1
    device.read()
    assert device.learn() == 0
    assert sizes("chat") == [6 * GIB]


def beside_a_replica(device: Device) -> None:
    device.serve(device.begin("other"), "other", GIB)
    device.read()


def beside_a_replica_of_unknown_age(device: Device) -> None:
    beside_a_replica(device)
    NodeModel.engines.update(loaded_at=None)


def after_an_end(device: Device) -> None:
    """The last reading still shows an engine that has ended."""
    beside_a_replica(device)
    device.end(next(iter(device.allocated)))


def beside_a_load(device: Device) -> None:
    device.begin("other")


@pytest.mark.parametrize(
    "before", [beside_a_replica, beside_a_replica_of_unknown_age, after_an_end, beside_a_load]
)
def test_an_engine_that_was_not_alone_teaches_nothing(before: Callable[[Device], None]) -> None:
    device = Device()
    before(device)
    device.serve(device.begin("chat"), "chat", 6 * GIB)
    device.read()
    assert device.learn() == 0
    assert sizes("chat") == []


def test_three_models_that_load_at_once_teach_what_they_take_or_nothing() -> None:
    """Issue 23, robustness: without their own shares nothing, with them exactly that."""
    device = Device()
    loading = {model: device.begin(model) for model in ("one", "two", "three")}
    truth = {"one": 3 * GIB, "two": 5 * GIB, "three": 7 * GIB}
    for model, slot in loading.items():
        device.allocate(slot, truth[model] // 2)
        device.read()
    for model, slot in loading.items():
        device.serve(slot, model, truth[model])
    device.read()
    assert device.learn() == 0
    assert [sizes(model) for model in loading] == [[], [], []]
    for model, slot in loading.items():
        row = NodeModel.objects.get(pk=slot.id)
        engine = m.RunningModel(model, row.replica_index, row.address, vram=truth[model])
        NodeModel.objects.filter(pk=slot.id).update(measured_at=None)
        assert load_info.store_report(slot.id, engine, now=device.now)
        assert sizes(model) == [truth[model]]


def play(device: Device, seed: int) -> None:
    """Loads, readings, failures and ends in any order; each pass learns the truth or nothing."""
    chance = random.Random(seed)
    loading: dict[Slot, tuple[str, int]] = {}
    serving: dict[Slot, str] = {}
    truth: dict[str, int] = {}
    for number in range(50):
        step = chance.choice(["begin", "half", "serve", "serve", "read", "learn", "learn", "end"])
        if step == "begin" and len(loading) + len(serving) < chance.choice([1, 1, 1, 3]):
            model, size = f"{seed}-{number}", chance.randrange(1, 12) * GIB
            truth[model] = size
            loading[device.begin(model)] = (model, size)
        elif step == "half" and loading:
            slot = chance.choice(sorted(loading, key=str))
            device.allocate(slot, loading[slot][1] // 2)
        elif step == "serve" and loading:
            slot = chance.choice(sorted(loading, key=str))
            serving[slot], size = loading.pop(slot)
            device.serve(slot, serving[slot], size)
        elif step == "end" and serving:
            slot = chance.choice(sorted(serving, key=str))
            del serving[slot]
            device.end(slot)
        elif step in ("read", "learn"):
            device.read()
            if step == "learn":
                device.learn()
    device.read()
    device.learn()
    for info in ModelLoadInfo.objects.filter(model_name__in=truth):
        for size in sizes(info.model_name):
            assert abs(size - truth[info.model_name]) <= truth[info.model_name] // 20, (seed, info.model_name)


def test_whatever_happens_on_a_device_what_is_learned_is_within_five_percent() -> None:
    """Issue 23, robustness."""
    for seed in range(6 * EFFORT):
        play(Device(seed), seed)
    learned = sum(len(info.memory) for info in ModelLoadInfo.objects.all())
    assert learned > 3 * EFFORT, "else this shows nothing"


def served(device: Device, model: str = "chat") -> tuple[NodeModel, m.RunningModel]:
    slot = device.begin(model)
    device.serve(slot, model, GIB)
    row = NodeModel.objects.get(pk=slot.id)
    return row, m.RunningModel(
        model, row.replica_index, f"127.0.0.1:{row.address.rpartition(':')[2]}", vram=GIB
    )


def test_a_late_or_double_report_counts_once() -> None:
    """Issue 23: a report of another engine under the same key, or of one that has ended, not at all."""
    device = Device()
    row, engine = served(device)
    other = dataclasses.replace(engine, address="127.0.0.1:9", vram=2 * GIB)
    assert not load_info.store_report(row.pk, other, now=device.now)
    assert load_info.store_report(row.pk, engine, now=device.now)
    assert not load_info.store_report(row.pk, engine, now=device.now)
    device.read()
    assert device.learn() == 0, "nor does the node's reading"
    device.end(next(iter(device.allocated)))
    assert not load_info.store_report(row.pk, engine, now=device.now)
    assert sizes("chat") == [GIB]


def test_a_replica_that_was_loaded_otherwise_than_defined_teaches_nothing() -> None:
    """As with fewer layers on the GPU, where not all of them fit."""
    row, engine = served(Device())
    NodeModel.objects.update(model_options={"NGPULayers": 7})
    assert not load_info.store_report(row.pk, engine, now=clock.now())
    assert sizes("chat") == []


def test_a_kill_between_reading_and_storing_loses_only_that_reading() -> None:
    """Issue 23: row and record change together, so the node's own reading still counts."""
    device = Device()
    row, engine = served(device)
    with patch.object(ModelLoadInfo, "save", side_effect=DatabaseError), pytest.raises(DatabaseError):
        load_info.store_report(row.pk, engine, now=device.now)
    assert sizes("chat") == []
    device.read()
    assert device.learn() == 1
    assert sizes("chat") == [GIB]


@pytest.mark.parametrize("size", [-1, -(2**63), TOTAL + 1, 2**63 - 1])
def test_an_impossible_report_teaches_nothing(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Issue 23: and the log names the node."""
    device = Device()
    row, engine = served(device)
    assert not load_info.store_report(row.pk, dataclasses.replace(engine, vram=size), now=device.now)
    assert sizes("chat") == []
    assert "n0 reports" in caplog.text


def test_the_last_five_readings_of_the_last_keys_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 23."""
    monkeypatch.setattr(load_info, "MAX_KEYS", 2)
    device = Device()
    for number in range(3):
        NodeBackend.objects.update(digest=f"sha256:{number}")
        for size in range(MAX_READINGS + 2):
            row, engine = served(device)
            assert load_info.store_report(
                row.pk, dataclasses.replace(engine, vram=GIB + size), now=device.now
            )
    memory = ModelLoadInfo.objects.get().memory
    assert [entry["build"] for entry in memory] == ["sha256:1", "sha256:2"]
    for entry in memory:
        assert (entry["revision"], entry["device"]) == ("r", "nvidia")
        assert [size for size, _, _ in entry["readings"]] == [GIB + size for size in range(2, 7)]


def defined(folder: Path, **settings: Any) -> Definition:
    lines = [f"{key}: {value}\n" for key, value in settings.items()]
    (folder / "echo.yaml").write_text(
        "name: echo\nbackend: echo\nparameters: {model: echo}\n" + "".join(lines)
    )
    return read_definition(folder / "echo.yaml")


def a_gpu(stage: Stage, **installed: Any) -> None:
    """Both nodes have a GPU and the backend."""
    figures = {"total_vram": TOTAL, "available_vram": TOTAL, "gpu_vendor": "nvidia"}
    BackendNode.objects.update(**figures, vram_read_at=clock.now())
    for node in (stage.one, stage.two):
        NodeBackend.objects.create(node=node, **{"name": "echo", "version": "1", **installed})


def ready(stage: Stage, running: Any) -> None:
    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
        stage.bus.replies[messages.subject("models.running", str(node.id))] = running


async def test_what_a_worker_measures_after_a_load_is_what_the_next_one_needs(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Issue 23: with its source in the record, which recomputes; other definitions and builds have theirs."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=stage.folder)
    await in_thread(a_gpu, stage)
    ready(stage, m.RunningReply((m.RunningModel("echo", 0, STARTED.address, vram=6 * GIB),)))
    await stage.handler(stage.work)
    await stage.learned()
    (asked,) = [
        body for subject, bodies in stage.bus.asked.items() if "running" in subject for body in bodies
    ]
    assert asked == b'{"measure":"echo#0"}'

    def need() -> Need:
        wanted = load_explanation.needs_of("echo")
        assert wanted is not None
        of_many = load_info.readings_by_model([wanted.definition])
        assert of_many == {"echo": load_info.readings_of(wanted.definition)}
        return wanted.need

    def redefine(**settings: Any) -> None:
        defined(stage.folder, **settings)
        async_to_sync(folder.folder().reload)()

    def check() -> None:
        learned = need()
        assert (learned.vram, learned.source, learned.readings) == (6 * GIB, "learned", 1)
        assert dict(learned.terms) == {"measured": 6 * GIB}
        assert learned.learned_at.startswith("20")
        (first,) = PlacementRecord.objects.all()
        assert (first.facts["need"]["source"], first.facts["need"]["vram"]) == ("estimated", 0)
        explained = load_explanation.explain_model("echo", clock.now())["next"]["placement"]["need"]
        assert (explained["source"], explained["readings"]) == ("learned", 1)
        redefine(vram_needed="5GiB")
        assert (need().source, need().vram, need().readings) == ("stated", 5 * GIB, 0)
        redefine(context_size=77)
        assert need().source == "estimated"
        redefine()
        NodeBackend.objects.update(version="2")
        assert need().source == "estimated", "another build was installed"

    await in_thread(check)


async def test_a_decision_by_what_was_learned_is_made_again_from_its_record(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Issue 23, I14: the fixture recomputes every record."""

    def learned() -> None:
        a_gpu(stage)
        BackendNode.objects.filter(pk=stage.one.pk).update(available_vram=GIB)
        entry = {"revision": defined(stage.folder).revision, "build": "1", "device": "nvidia"}
        readings = [[2 * GIB, clock.now().isoformat(), False], [GIB, clock.now().isoformat(), True]]
        memory = [{**entry, "readings": readings}]
        ModelLoadInfo.objects.create(model_name="echo", backend_type="echo", memory=memory)

    await in_thread(learned)
    ready(stage, m.RunningReply())
    assert (await stage.handler(stage.work))["node"] == "two"
    record = await in_thread(PlacementRecord.objects.get)
    assert {name: record.facts["need"][name] for name in ("vram", "source", "readings")} == {
        "vram": 2 * GIB,
        "source": "learned",
        "readings": 2,
    }
    row = await in_thread(NodeModel.objects.get)
    assert row.vram_needed == 2 * GIB


_HOSTILE = ["-1", "9223372036854775808", "NaN", '"6"', "1e999", "[]", "true", "1.5"]


@pytest.mark.parametrize("value", _HOSTILE)
async def test_a_worker_that_reports_nonsense_teaches_nothing(
    stage: Stage, loads: list[Any], value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 23: the load succeeds, and the log has the reason."""
    await in_thread(a_gpu, stage)
    ready(
        stage,
        b'{"models":[{"model_id":"echo","address":"%s","vram":%s}]}'
        % (STARTED.address.encode(), value.encode()),
    )
    assert (await stage.handler(stage.work))["address"] == STARTED.address
    await stage.learned()
    assert await in_thread(sizes, "echo") == []
    assert any(record.levelname == "WARNING" and "one" in record.message for record in caplog.records)


async def test_a_database_that_fails_does_not_fail_the_load(stage: Stage, loads: list[Any]) -> None:
    await in_thread(a_gpu, stage)
    ready(stage, m.RunningReply((m.RunningModel("echo", 0, STARTED.address, vram=GIB),)))
    with patch.object(load_info, "store_report", side_effect=DatabaseError("gone")):
        assert (await stage.handler(stage.work))["node"] == "one"
        await stage.learned()


async def test_a_worker_that_measures_for_long_neither_delays_nor_fails_the_load(
    stage: Stage, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published row has no owner, which is no lost slot; the reading still counts when it comes."""
    monkeypatch.setattr(load, "_SLOT_POLL_SECONDS", 0.01)
    await in_thread(a_gpu, stage)
    measured = asyncio.Event()

    async def measure() -> m.RunningReply:
        await measured.wait()
        return m.RunningReply((m.RunningModel("echo", 0, STARTED.address, vram=GIB),))

    ready(stage, measure)
    assert (await asyncio.wait_for(stage.handler(stage.work), 30))["node"] == "one"
    assert await in_thread(sizes, "echo") == []
    measured.set()
    await stage.learned()
    assert await in_thread(sizes, "echo") == [GIB]


async def test_a_publication_that_takes_long_is_no_lost_slot(
    stage: Stage, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is published, and the answer of the database still on its way."""
    monkeypatch.setattr(load, "_SLOT_POLL_SECONDS", 0.01)
    ready(stage, m.RunningReply())
    publish = slots.publish

    def slowly(*args: Any, **columns: Any) -> bool:
        published = publish(*args, **columns)
        time.sleep(0.5)  # real time is the subject: a watch that still ran would read the row 50 times
        return published

    monkeypatch.setattr(slots, "publish", slowly)
    assert (await stage.handler(stage.work))["node"] == "one"


def test_learned_needs_cost_one_query_for_any_fleet(stage: Stage) -> None:
    counts = []
    for size in (1, 6):
        for number in range(size):
            node = hot.node(f"{size}-{number}", total_vram=TOTAL, gpu_vendor="nvidia")
            NodeBackend.objects.create(node=node, name="echo", digest=f"{number}")
        with CaptureQueriesContext(connection) as queries:
            load_info.readings_of(defined(stage.folder))
        with CaptureQueriesContext(connection) as queries_of_many:
            load_info.readings_by_model([defined(stage.folder)])
        counts += [len(queries), len(queries_of_many)]
    assert counts == [1, 2, 1, 2]


def broken(folder: Path) -> None:
    (folder / "echo.yaml").write_text("name: [")


def lost(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name} elsewhere"))


async def load_once(stage: Stage) -> None:
    """It is loaded, and unloaded again."""
    ready(stage, m.RunningReply())
    await stage.handler(stage.work)
    await in_thread(NodeModel.engines.all().delete)


@pytest.mark.rule("R1.6", "R1.92", "T-REG-88", "T-REC-22")
@pytest.mark.parametrize("happens", [broken, lost])
async def test_a_load_is_repeated_while_its_definition_cannot_be_read(
    stage: Stage, loads: list[Any], settings: Settings, happens: Callable[[Path], None]
) -> None:
    """Issue 23: for requests and for rules, by another process too; as it was, and by its revision."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=stage.folder)
    former = await in_thread(lambda: defined(stage.folder, context_size=4096))
    await load_once(stage)
    happens(stage.folder)
    await folder.folder().reload()
    assert await in_thread(replicas.definition_revisions) == {"echo": former.revision}
    assert dataclasses.replace(await gateway.find_definition("echo:latest"), changed=0) == former
    stage.handler._definitions = Folder(stage.folder)
    assert (await stage.handler(stage.work))["node"] == "one"
    row = await in_thread(NodeModel.objects.get)
    assert (row.config_revision, row.model_options["ContextSize"]) == (former.revision, 4096)


def deleted(folder: Path) -> None:
    (folder / "echo.yaml").unlink()


def disabled(folder: Path) -> None:
    defined(folder, disabled="true")


@pytest.mark.parametrize("withdrawn", [deleted, disabled])
@pytest.mark.parametrize("happens", [broken, lost])
async def test_what_a_person_deleted_or_disabled_is_never_loaded_from_its_record(
    stage: Stage,
    loads: list[Any],
    settings: Settings,
    withdrawn: Callable[[Path], None],
    happens: Callable[[Path], None],
) -> None:
    """Issue 23: not even when the file or the folder is unreadable afterwards.

    A new load ends that, or a pass that finds the definition again.
    """
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=stage.folder)
    await load_once(stage)
    withdrawn(stage.folder)
    await folder.folder().reload()
    await in_thread(lambda: replicas.definition_revisions(withdraws=True))
    happens(stage.folder)
    folder._folder.cache_clear()  # a process that starts knows the records only
    await folder.folder().reload()
    stage.handler._definitions = Folder(stage.folder)
    with pytest.raises(NotFound):
        await stage.handler(stage.work)
    with pytest.raises(gateway.ModelNotFound):
        await gateway.find_definition("echo")
    assert await in_thread(replicas.definition_revisions) == {}


@pytest.mark.parametrize("withdrawn", [deleted, disabled])
async def test_a_definition_that_comes_back_is_loaded_from_its_record_again(
    stage: Stage, loads: list[Any], settings: Settings, withdrawn: Callable[[Path], None]
) -> None:
    """Without a new load, and only as it is now."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=stage.folder)
    await load_once(stage)

    async def find_after(change: Callable[[Path], Any]) -> Definition | None:
        change(stage.folder)
        await folder.folder().reload()
        await in_thread(lambda: replicas.definition_revisions(withdraws=True))
        broken(stage.folder)
        await folder.folder().reload()
        return await load_info.find_definition(folder.folder(), "echo")

    assert await find_after(withdrawn) is None
    assert await find_after(lambda path: defined(path, context_size=77)) is None, "never loaded"
    restored = await find_after(defined)
    assert restored is not None


async def test_a_disabled_definition_is_not_loaded(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Neither by a request nor by a rule, and it hides a stored one of its name; it is still listed."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=stage.folder)
    await in_thread(disabled, stage.folder)
    await folder.folder().reload()
    ready(stage, m.RunningReply())
    with pytest.raises(NotFound):
        await stage.handler(stage.work)
    with pytest.raises(gateway.ModelNotFound):
        await gateway.find_definition("echo")
    assert await in_thread(replicas.definition_revisions) == {}
    (listed,) = await in_thread(read_entries)
    assert (listed.name, listed.state, listed.file) == ("echo", "disabled", "echo.yaml")
    assert (await in_thread(find_entry, "echo"))[0].state == "disabled"
    assert "disabled: true" in (await in_thread(store.text_in_force, "echo") or "")


def test_withdrawing_and_restoring_cost_equally_many_queries_for_any_number_of_models(
    tmp_path: Path,
) -> None:
    definition, counts = defined(tmp_path), []
    for size in (1, 6):
        ModelLoadInfo.objects.all().delete()
        definitions = [dataclasses.replace(definition, name=f"m{number}") for number in range(size)]
        for each in definitions:
            columns = {**load_info.columns_of(each), "withdrawn_at": clock.now()}
            ModelLoadInfo.objects.create(model_name=each.name, backend_type="echo", **columns)
        with CaptureQueriesContext(connection) as queries:
            load_info.withdraw(definitions, frozenset(), clock.now())
        counts.append(len(queries))
        assert not ModelLoadInfo.objects.filter(withdrawn_at__isnull=False).exists()
    assert counts[0] == counts[1]


async def test_a_request_in_an_outage_of_the_database_is_to_be_repeated(
    stage: Stage, settings: Settings
) -> None:
    """A name that no definition has, while some file is unreadable: 503 as in other outages."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=stage.folder)
    broken(stage.folder)
    gone = patch.object(load_info, "_last_definition", side_effect=DatabaseError("gone"))
    with gone, pytest.raises(Unavailable, match="database"):
        await gateway.find_definition("echo")


async def test_a_deleted_definition_is_not_loaded_beside_a_broken_one(stage: Stage, loads: list[Any]) -> None:
    """Also before a pass has seen it: its own file is not there."""
    await load_once(stage)
    deleted(stage.folder)
    (stage.folder / "other.yaml").write_text("name: [")
    stage.handler._definitions = Folder(stage.folder)
    with pytest.raises(NotFound):
        await stage.handler(stage.work)


def test_the_pass_learns(settings: Settings) -> None:
    """The schedule does it, a stock worker is asked for nothing."""
    device = Device()
    device.serve(device.begin("chat"), "chat", 6 * GIB)
    device.read()
    tasks.state_pass()
    assert sizes("chat") == [6 * GIB]


def test_the_pass_keeps_no_replica_locked_while_it_learns_from_the_next() -> None:
    """Picks lock replicas by id, loads a replica before what is known of its model."""
    for number, model in enumerate(("first", "second")):
        device = Device(number)
        device.serve(device.begin(model), model, 6 * GIB)
        device.read()
    with ThreadPoolExecutor(1) as pool:
        with holding("SELECT 1 FROM model_load_infos WHERE model_name = 'second' FOR UPDATE"):
            learning = pool.submit(lambda: at_once(tasks.state_pass))
            waiting()
            with transaction.atomic():
                assert list(NodeModel.objects.of("first").select_for_update(skip_locked=True))
        assert learning.result() == [None]
    assert [sizes("first"), sizes("second")] == [[6 * GIB], [6 * GIB]]
