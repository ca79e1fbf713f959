"""What a load does in which order, what it tells worker and engine, and what it writes.

It follows from the definition and the node alone: not from how the model was loaded before, and not from the
rule as it was when somebody asked.
"""

from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import decode
from localai_cluster.rpc.errors import DeadlineExceeded
from nodes.backends.node_commands import offered_to
from nodes.definitions.files import Definition, read_definition
from nodes.loading import load
from nodes.loading.load_attempts import refusals
from nodes.loading.load_request import ALLOWED_NODES, SCALE_UP
from nodes.models import BackendNode, ModelLoadInfo, ModelSchedulingConfig, NodeLabel, NodeModel
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger.progress import Recorder, Tick
from tests.support import hot
from tests.support.loading import BACKEND, ROOM, STARTED, Stage, loads, stage

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)

GIB = 2**30
DEFINITION = "name: echo\nbackend: echo\nparameters: {model: other.gguf}\nbatch: 512\ncontext_size: 4096\n"


@pytest.fixture
def told(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that engines are told."""
    heard: list[Any] = []
    client: Any = vars(load)["BackendClient"]
    plain = client.load_model

    async def load_model(self: Any, options: Any, timeout: float) -> Any:
        heard.append(options)
        return await plain(self, options, timeout)

    monkeypatch.setattr(client, "load_model", load_model)
    return heard


def defined(stage: Stage) -> Definition:
    (stage.folder / "echo.yaml").write_text(DEFINITION)
    return read_definition(stage.folder / "echo.yaml")


def installs(stage: Stage, node: BackendNode) -> list[m.InstallRequest]:
    sent = stage.bus.asked[messages.subject("backend.install", str(node.id))]
    return [decode(body, m.InstallRequest) for body in sent]


class Steps(Recorder):
    """What an attempt says, in order, and how the rows are at that moment."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def add(self, key: tuple[UUID, int], value: list[Tick]) -> None:
        """Kept here only."""
        self.said += [tick.phase for tick in value]


@pytest.mark.rule("R2.26", "R2.29", "R2.46", "R2.50", "T-ROU-2")
async def test_the_steps_of_a_load_and_what_is_there_after_each(
    stage: Stage, told: list[Any], loads: list[Any]
) -> None:
    """Its place before its backend, the note of its engine before the start, the replica last."""
    steps = Steps()
    stage.work = Work(stage.work.operation, steps)
    definition = await in_thread(defined, stage)

    def looked(step: str) -> None:
        row = NodeModel.objects.get()
        seen = (row.state, row.in_flight, row.address, row.phase)
        steps.said.append((step, *seen, ModelLoadInfo.objects.count()))

    async def starting() -> m.InstallReply:
        await in_thread(looked, "started")
        return STARTED

    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, starting)
    loads.append(lambda: looked("loads"))
    assert (await stage.handler(stage.work))["node"] == "one"
    # Review L5: it was asked three times.
    assert len(stage.bus.asked[messages.subject("backend.list", str(stage.one.id))]) == 1
    assert steps.said == [
        "installing",
        "loading",
        ("started", "loading", 0, "", "starting", 0),
        "loading",
        ("loads", "loading", 0, STARTED.address, "starting", 0),
    ]
    row, info = await in_thread(NodeModel.objects.get), await in_thread(ModelLoadInfo.objects.get)
    assert (row.state, row.in_flight, row.address) == ("loaded", 0, STARTED.address)
    assert row.model_options == info.model_options == definition.options
    (asked,) = installs(stage, stage.one)
    assert (asked.backend, asked.model_id, asked.replica_index) == ("echo", "echo", 0)
    assert asked.backend_galleries == offered_to(stage.one).encoded
    assert asked.op_id == str(stage.work.id), "by it the worker is told to stop"
    assert told[0].Model == definition.model


@pytest.mark.rule("R1.91", "R1.97", "T-REG-90", "T-REG-91", "T-REG-99", "T-REV-4", "T-ROU-13")
@pytest.mark.parametrize("recorded", [False, True], ids=["never loaded", "loaded otherwise"])
async def test_a_load_follows_from_the_definition_and_not_from_an_earlier_load(
    stage: Stage, told: list[Any], recorded: bool
) -> None:
    """D-RENEWAL: also one that no request has asked for."""
    await in_thread(defined, stage)
    before = {"backend_type": "another", "model_options": {"ContextSize": 1}, "updated_at": clock.now()}

    def earlier() -> None:
        ModelLoadInfo.objects.create(model_name="echo", **before)
        options = {"ContextSize": 2}
        hot.replica(stage.two, "echo", model_options=options, config_revision="0" * 64)

    if recorded:
        await in_thread(earlier)
    stage.work.operation.payload = {SCALE_UP: True}
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    assert (await stage.handler(stage.work))["node"] == "one"
    assert [one.backend for one in installs(stage, stage.one)] == ["echo"]
    assert [one.ContextSize for one in told] == [4096]
    assert (await in_thread(ModelLoadInfo.objects.get)).backend_type == "echo"


@pytest.mark.rule("T-REV-5", "T-REV-6", "R2.80", "T-ROU-38", "T-ROU-40")
async def test_two_unlike_nodes_have_one_revision_and_options_of_their_own(
    stage: Stage, told: list[Any], settings: Settings
) -> None:
    """The model goes by the definition's name, whatever file it loads."""
    settings.CLUSTER = replace(settings.CLUSTER, node_options=True)
    definition = await in_thread(defined, stage)
    for node, capability in ((stage.one, "12.0"), (stage.two, "8.9")):
        one = BackendNode.objects.filter(pk=node.pk)
        figures = partial(one.update, total_vram=32 * GIB, gpu_compute_capability=capability)
        await in_thread(figures)
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
        stage.work.operation.payload = {SCALE_UP: True, ALLOWED_NODES: [str(node.id)]}
        assert (await stage.handler(stage.work))["node"] == node.name
    assert [one.NBatch for one in told] == [2048, 512]
    rows = await in_thread(lambda: list(NodeModel.objects.of("echo")))
    assert {row.config_revision for row in rows} == {definition.revision}
    assert len({row.effective_options_hash for row in rows}) == 2
    assert not await in_thread(NodeModel.objects.of("other.gguf").exists)


@pytest.mark.rule("R2.8", "R2.47")
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (m.InstallReply(error="no space left"), "no space left"),
        (m.InstallReply(True, ""), "its worker reported no address for echo#0"),
    ],
    ids=["refused", "without an address"],
)
async def test_what_a_worker_says_of_a_start_is_kept(
    stage: Stage, told: list[Any], reply: m.InstallReply, said: str
) -> None:
    """D-REPLY-ADDRESS: an engine is where its worker says, and nowhere else."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, reply)
    await in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    (refusal,) = refusals(ended.payload)
    assert (refusal.node_name, said in refusal.reason) == ("one", True)
    assert told == []


@pytest.mark.rule("T-DSK-11", "R2.39")
async def test_the_switch_of_the_disk_check_counts_at_the_next_decision(
    stage: Stage, told: list[Any], settings: Settings
) -> None:
    await in_thread(lambda: BackendNode.objects.update(**ROOM["disk"][0]))
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await in_thread(stage.need_until)
    assert "disk space" in str(await stage.play())
    settings.CLUSTER = replace(settings.CLUSTER, disk_headroom_check=False)
    assert (await stage.handler(stage.work))["node"] == "one"


@pytest.mark.rule("R2.67")
async def test_a_rule_that_was_edited_since_the_request_counts(stage: Stage, told: list[Any]) -> None:
    def edited() -> None:
        NodeLabel.objects.create(node=stage.two, key="tier", value="fast")
        ModelSchedulingConfig.objects.create(model_name="echo", node_selector={"tier": "fast"})

    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
    await in_thread(edited)
    assert (await stage.handler(stage.work))["node"] == "two"


@pytest.mark.rule("R2.61", "R2.60")
async def test_a_load_that_takes_too_long_names_its_limit_its_size_and_the_setting(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    settings.CLUSTER = replace(settings.CLUSTER, model_load_timeout=0)
    (stage.folder / "echo").write_bytes(bytes(GIB // 1024))
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    loads.append(DeadlineExceeded("late"))
    ended = str(await stage.play())
    for part in ("0.0 GiB", "300 s", "LOCALAI_NATS_MODEL_LOAD_TIMEOUT"):
        assert part in ended
