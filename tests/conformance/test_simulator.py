"""The simulated workers: what they say has the shape of the recordings, and they do what they are told."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Message, NoResponders, RequestTimeout
from localai_cluster.messaging.messages import decode
from localai_cluster.messaging.nats import NatsBus
from tests.conformance.conftest import Play
from tests.conformance.worker_support import Registry, ask
from tests.conftest import until
from tests.support.simulator import Act, Fleet, SimulatedWorker
from tests.support.simulator.script import STOCK

DATA = Path(__file__).parent.parent / "data"
MEBIBYTE = 1024 * 1024
IMAGE = (16 * MEBIBYTE, 57 * MEBIBYTE, 5 * MEBIBYTE)


async def install(bus: NatsBus, worker: SimulatedWorker, timeout: float = 30, **more: Any) -> m.InstallReply:
    request = m.InstallRequest(**{"backend": "echo", "install_only": True, **more})
    return await ask(
        bus, messages.subject("backend.install", worker.node_id), request, m.InstallReply, timeout
    )


async def listed(bus: NatsBus, worker: SimulatedWorker) -> m.ListReply:
    return await ask(bus, messages.subject("backend.list", worker.node_id), m.EmptyRequest(), m.ListReply, 30)


def recorded(ending: str) -> list[tuple[Any, Any]]:
    """Request and reply of every recorded command of this name that was answered."""
    files = sorted((DATA / "nats").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    replies = {line["subject"]: line["data"] for line in lines}
    return [
        (line["data"], replies[line["reply_to"]])
        for line in lines
        if line["subject"].endswith(ending) and line.get("reply_to") in replies
    ]


def shape(value: Any) -> Any:
    """Names and types; a list by its first element, a whole number like a broken one."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return float if type(value) is int else type(value)


COMMANDS = ("backend.install", "backend.upgrade", "backend.delete", "model.unload")


@pytest.mark.parametrize("verb", COMMANDS)
async def test_replies_have_the_shape_of_the_recorded_ones(play: Play, bus: NatsBus, verb: str) -> None:
    """Done and refused alike, each to the recorded request."""
    pairs = recorded(verb)
    assert pairs
    for request, reply in pairs:
        refusal = Act(refuse="" if reply["success"] else reply["error"])
        async with play(stock=True, **{verb.replace(".", "_"): refusal}) as simulated:
            worker = simulated.workers[0]
            if verb == "backend.delete" and reply["success"]:
                worker.machine.backends[request["backend"]] = m.InstalledBackend(request["backend"])
            for key in reply.get("stopped_process_keys", ()):
                worker.machine.engines[key] = (request["backend"], "127.0.0.1:1")
            subject = f"{messages.node_prefix(worker.node_id)}.{verb}"
            answer = await bus.request(subject, json.dumps(request).encode(), 30, inbox="_INBOX.test")
            assert shape(json.loads(answer)) == shape(reply), request


@pytest.mark.rule("nats-4.7")
async def test_a_list_has_the_shape_of_the_recorded_one(play: Play, bus: NatsBus) -> None:
    """An empty list is `[]`, never the `null` of the reference (nats-1)."""
    async with play(stock=True) as simulated:
        worker = simulated.workers[0]
        subject = messages.subject("backend.list", worker.node_id)
        assert json.loads(await bus.request(subject, b"{}", 30, inbox="_INBOX.test")) == {"backends": []}
        assert (await install(bus, worker, uri="/srv/x", name="ext", backend="ext")).success
        told = json.loads(await bus.request(subject, b"{}", 30, inbox="_INBOX.test"))
        known = {
            json.dumps(sorted(entry)) for _, reply in recorded("list") for entry in reply["backends"] or ()
        }
        assert {json.dumps(sorted(entry)) for entry in told["backends"]} <= known


async def test_a_registration_has_the_shape_of_the_recorded_one(play: Play, registry: Registry) -> None:
    examples = json.loads((DATA / "http" / "register.json").read_text())["examples"]
    async with play(stock=True):
        sent = registry.seen("/register")[0].body
    wanted = examples[0]["request_body"]
    wanted["labels"].pop("tier")
    assert shape(sent) == shape(wanted)


async def test_a_stock_worker_reports_layers_as_recorded(play: Play, bus: NatsBus) -> None:
    """The percentage falls with each layer; an image of one layer and ours do not."""
    text = (DATA / "nats" / "install-progress.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    seen = [
        line["data"]
        for line in lines
        if line["subject"].startswith("nodes.") and line["subject"].endswith(".progress")
    ]
    events: list[dict[str, Any]] = []

    async def keep(message: Message) -> None:
        events.append(json.loads(message.payload))

    async with play(stock=True, backend_install=Act(0.2, ticks=20, layers=IMAGE)) as simulated:
        worker = simulated.workers[0]
        subscription = await bus.subscribe(messages.install_progress(worker.node_id, "op"), keep, limit=1)
        assert (await install(bus, worker, op_id="op")).success
        await until(lambda: len(events) == 20, what="all events")
        await subscription.close()
    assert {json.dumps(sorted(event)) for event in events} == {json.dumps(sorted(event)) for event in seen}
    percentages = [event["percentage"] for event in events]
    falls = sum(one > two for one, two in pairwise(percentages))
    assert falls == 2
    assert (percentages[-1], max(percentages[:-1]) < 100) == (100, True)
    assert [event["file_name"].partition(" ")[0] for event in events[-2:]] == ["Downloading", "Extracting"]


async def test_each_command_is_written_down_with_its_time(play: Play, bus: NatsBus) -> None:
    async with play(2) as simulated:
        one, two = simulated.workers
        await install(bus, two, op_id="b")
        await install(bus, one, op_id="a")
        commands = simulated.received("backend.install")
        assert [(c.node_id, c.body["op_id"]) for c in commands] == [(two.node_id, "b"), (one.node_id, "a")]
        assert commands[0].at < commands[1].at
        assert commands[0].subject == messages.subject("backend.install", two.node_id)
        assert (simulated.count("backend.install"), one.count("backend.list")) == (2, 0)


async def test_acts_follow_each_other_and_the_last_one_stays(play: Play, bus: NatsBus) -> None:
    acts = [Act(refuse="disk full"), Act(raw=b"[broken"), Act()]
    async with play(backend_upgrade=acts) as simulated:
        subject = messages.subject("backend.upgrade", simulated.workers[0].node_id)
        answers = [await bus.request(subject, b'{"backend":"x"}', 30, inbox="_INBOX.test") for _ in range(4)]
    assert [decode(answers[each], m.UpgradeReply).success for each in (0, 2, 3)] == [False, True, True]
    assert decode(answers[0], m.UpgradeReply).error == "disk full"
    assert answers[1] == b"[broken"


async def test_a_silent_worker_does_it_and_says_nothing(play: Play, bus: NatsBus) -> None:
    async with play(backend_install=Act(silent=True)) as simulated:
        worker = simulated.workers[0]
        with pytest.raises(RequestTimeout):
            await install(bus, worker, timeout=0.3)
        assert [entry.name for entry in (await listed(bus, worker)).backends] == ["echo"]


async def test_the_same_request_again_joins_the_running_one(play: Play, bus: NatsBus) -> None:
    async with play(backend_install=[Act(0.3), Act(refuse="it ran twice")]) as simulated:
        worker = simulated.workers[0]
        replies = await asyncio.gather(*(install(bus, worker, op_id="same") for _ in range(3)))
        assert all(reply.success for reply in replies)
        assert worker.count("backend.install") == 3
        assert [entry.name for entry in (await listed(bus, worker)).backends] == ["echo"]


async def test_a_cancel_ends_the_install_of_its_operation_only(play: Play, bus: NatsBus) -> None:
    async with play(backend_install=Act(600)) as simulated:
        worker = simulated.workers[0]
        waiting = asyncio.create_task(install(bus, worker, timeout=60, op_id="mine"))
        other = asyncio.create_task(install(bus, worker, timeout=60, op_id="other", backend="two"))
        await until(lambda: worker.count("backend.install") == 2, what="both have arrived")
        subject = messages.subject("backend.cancel", worker.node_id)
        replies = [await ask(bus, subject, m.CancelRequest(op), m.CancelReply, 30) for op in ("mine", "no")]
        assert replies == [m.CancelReply(True, found=True), m.CancelReply(True, found=False)]
        assert (await waiting) == m.InstallReply(error="cancelled")
        assert not other.done()
        other.cancel()


async def test_a_restart_answers_nothing_and_is_another_process(
    play: Play, bus: NatsBus, registry: Registry
) -> None:
    async with play(backend_install=[Act(600), Act()]) as simulated:
        worker = simulated.workers[0]
        before = (await listed(bus, worker)).instance
        waiting = asyncio.create_task(install(bus, worker, timeout=1, op_id="lost"))
        await until(lambda: worker.count("backend.install") == 1, what="it has arrived")
        await worker.restart()
        with pytest.raises(RequestTimeout):
            await waiting
        assert (await listed(bus, worker)).instance not in ("", before)
        assert len(registry.seen("/register")) == 2
        assert (await install(bus, worker, op_id="lost")).success


async def test_a_deaf_worker_beats_and_has_no_responder(play: Play, bus: NatsBus, registry: Registry) -> None:
    async with play() as simulated:
        worker = simulated.workers[0]
        await worker.deafen()
        with pytest.raises(NoResponders):
            await install(bus, worker)
        beats = len(registry.seen("/heartbeat"))
        await until(lambda: len(registry.seen("/heartbeat")) > beats, what="it beats")
        await worker.listen()
        assert (await install(bus, worker)).success


async def test_a_frozen_worker_neither_beats_nor_answers_until_it_thaws(
    play: Play, bus: NatsBus, registry: Registry
) -> None:
    async with play() as simulated:
        worker = simulated.workers[0]
        await until(lambda: registry.seen("/heartbeat"), what="it beats")
        worker.freeze()
        waiting = asyncio.create_task(install(bus, worker, timeout=60))
        await until(lambda: worker.count("backend.install"), what="the message has arrived")
        with pytest.raises(RequestTimeout):
            await ask(
                bus, messages.subject("backend.list", worker.node_id), m.EmptyRequest(), m.ListReply, 0.5
            )
        beats = len(registry.seen("/heartbeat"))
        assert not waiting.done()
        worker.thaw()
        assert (await waiting).success
        await until(lambda: len(registry.seen("/heartbeat")) > beats, what="it beats again")


async def test_a_stock_worker_has_no_cancel_and_its_traps(play: Play, bus: NatsBus) -> None:
    """Contract/nats.md §4.1: a pure address and a prefixed name bring the files and fail."""
    async with play(stock=True) as simulated:
        worker = simulated.workers[0]
        with pytest.raises(NoResponders):
            await ask(
                bus,
                messages.subject("backend.cancel", worker.node_id),
                m.CancelRequest("x"),
                m.CancelReply,
                30,
            )
        assert (await listed(bus, worker)).instance == ""
        pure = await install(bus, worker, backend="", uri="/srv/x", name="ext")
        prefixed = await install(bus, worker, backend="local@mock")
        assert [pure.error, prefixed.error] == [
            'backend "" not found after install attempt',
            'backend "local@mock" not found after install attempt',
        ]
        assert [entry.name for entry in (await listed(bus, worker)).backends] == ["ext", "mock"]


async def test_an_old_worker_knows_less(play: Play, bus: NatsBus) -> None:
    async with play(stock=True, knows=frozenset(STOCK) - {"backend.upgrade"}) as simulated:
        worker: SimulatedWorker = simulated.workers[0]
        with pytest.raises(NoResponders):
            await bus.request(
                messages.subject("backend.upgrade", worker.node_id), b"{}", 30, inbox="_INBOX.test"
            )
        assert (await install(bus, worker, force=True)).success


async def test_engines_are_listed_and_stopped(play: Play, bus: NatsBus) -> None:
    async with play() as simulated:
        worker = simulated.workers[0]
        started = await install(bus, worker, install_only=False, model_id="m", replica_index=2)
        running = await ask(
            bus, messages.subject("models.running", worker.node_id), m.EmptyRequest(), m.RunningReply, 30
        )
        assert running.models == (m.RunningModel("m", 2, started.address),)
        wrong = m.StopModelRequest("m", "m#2", "127.0.0.1:1")
        subject = messages.subject("model.stop", worker.node_id)
        assert (await ask(bus, subject, wrong, m.StopModelReply, 30)).terminated is False
        right = m.StopModelRequest("m", "m#2", started.address)
        assert (await ask(bus, subject, right, m.StopModelReply, 30)).terminated is True
        assert simulated.count("model.stop") == 2
        assert isinstance(simulated, Fleet)
