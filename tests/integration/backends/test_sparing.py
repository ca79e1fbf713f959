"""Requests and last replicas before an upgrade in waves is sent; the worker is played by the test."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings
from django.db import OperationalError

from localai_cluster.kit import clock, errors
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import ConnectionLost, NoResponders, NotConnected, RequestTimeout
from localai_cluster.messaging.messages import decode
from nodes.backends import admission, backend_requests, intent_queue, intents, wave_requests
from nodes.backends.backend_requests import BackendRequest, RequestScope
from nodes.backends.installed import Build
from nodes.backends.intent_queue import IntentQueue
from nodes.backends.intents import Intent
from nodes.backends.waves import Options
from nodes.models import BackendNode, NodeBackend, NodeModel, PendingBackendOp
from nodes.replicas import drains
from operations.ledger import admission as ledger
from operations.ledger import attempts
from operations.ledger.admission import Requester
from operations.models import Event, Operation, OperationTarget
from tests.support import hot
from tests.support.bus import NEVER
from tests.support.intents import Stage as OneIntent
from tests.support.intents import claim, due_now, limits, quick

pytestmark = pytest.mark.django_db(transaction=True)

ECHO = m.InstalledBackend(name="echo", version="1.0.0", gallery_url="file:///srv/index.yaml", uri="/srv/echo")
STOPPED = m.UpgradeReply(True, "", ("m#0",), True)


class Stage(OneIntent):
    """A node that serves m and n by echo, and another one that serves them too."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = backend_requests.UPGRADE
        self.lists(ECHO)
        self.other = hot.node("two")
        for port, (node, model) in enumerate((n, x) for n in (self.node, self.other) for x in "mn"):
            hot.replica(
                node,
                model,
                address=f"127.0.0.1:{50000 + port}",
                backend_type="echo",
                updated_at=clock.now() - timedelta(minutes=1),
            )
        self.answers(STOPPED)

    def begins_in_waves(self, *confirmed: str) -> Intent:
        asked = RequestScope([self.node], by=Requester("test"), waves=Options(), last_replicas=confirmed)
        admission.admit(BackendRequest(backend_requests.UPGRADE, "echo"), asked, now=clock.now())
        return self.claimed()

    def alone(self) -> None:
        """The other node serves m no more."""
        NodeModel.objects.filter(node=self.other, model_name="m").delete()

    def loaded(self, node: BackendNode) -> set[str]:
        rows = NodeModel.objects.loaded().filter(node=node)
        return set(rows.values_list("model_name", flat=True))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    quick(monkeypatch)
    monkeypatch.setattr(intent_queue, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(intent_queue, "LOAD_POLL_SECONDS", 0.01)
    return Stage()


def counted(node: BackendNode, requests: int) -> Callable[[], Any]:
    return lambda: NodeModel.objects.filter(node=node, model_name="m").update(in_flight=requests)


def reason() -> str:
    return OperationTarget.objects.get().reason


async def test_the_command_is_sent_when_the_requests_have_ended(stage: Stage) -> None:
    await hot.in_thread(counted(stage.node, 2))
    intent = await hot.in_thread(stage.begins_in_waves)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: reason() == "waiting for 2 requests on one")
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    assert not stage.sent
    await hot.in_thread(counted(stage.node, 0))
    assert (await attempt).status == "success"
    assert len(stage.sent) == 1
    assert await hot.in_thread(stage.loaded, stage.node) == {"n"}, "what did not stop serves again"


@pytest.mark.rule("O10")
async def test_an_install_that_replaces_files_is_sent_when_the_requests_have_ended(stage: Stage) -> None:
    """Review R21. It stops the last replica of m too: nobody would be asked about it."""
    stage.kind = backend_requests.INSTALL
    stage.bus.replies[messages.subject("models.running", str(stage.node.id))] = m.RunningReply(())

    def begins() -> Intent:
        stage.alone()
        counted(stage.node, 2)()
        asked = RequestScope([stage.node], by=Requester("test"), drains=True)
        admission.admit(BackendRequest(backend_requests.INSTALL, "echo", force=True), asked, now=clock.now())
        return stage.claimed()

    stage.answers(m.InstallReply(True))
    attempt = asyncio.create_task(stage.carries_out(await hot.in_thread(begins)))
    await hot.until(lambda: reason() == "waiting for 2 requests on one")
    assert not stage.sent
    await hot.in_thread(counted(stage.node, 0))
    assert (await attempt).status == "success"
    assert decode(stage.sent[0], m.InstallRequest).force
    assert not await hot.in_thread(NodeModel.objects.filter(node=stage.node).exists)


@pytest.mark.rule("worker-7", "R6.32")
async def test_replicas_that_were_started_by_the_alias_are_spared(stage: Stage) -> None:
    """The upgrade stops their engines too: their requests were cut off, and last replicas went unasked."""

    def by_alias() -> None:
        NodeBackend.objects.create(node=stage.node, name="echo", alias="Speech")
        NodeBackend.objects.create(node=stage.other, name="echo")
        NodeModel.objects.update(backend_type="speech")
        counted(stage.node, 1)()

    await hot.in_thread(by_alias)
    stage.lists(replace(ECHO, alias="Speech"))
    both = [stage.node.id, stage.other.id]
    assert await hot.in_thread(partial(drains.last_replicas, "echo", both)) == {}
    await hot.in_thread(stage.alone)
    assert await hot.in_thread(partial(drains.last_replicas, "echo", both)) == {stage.node.id: {"m"}}
    intent = await hot.in_thread(partial(stage.begins_in_waves, "m"))
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: reason() == "waiting for 1 request on one")
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    await hot.in_thread(counted(stage.node, 0))
    assert (await attempt).status == "success"
    kept = await hot.in_thread(partial(NodeBackend.objects.get, node=stage.node, name="echo"))
    assert kept.alias == "Speech"


@pytest.mark.rule("worker-7")
async def test_an_upgrade_by_the_alias_spares_what_runs_under_either_name(stage: Stage) -> None:
    """It was refused as not installed."""
    stage.lists(replace(ECHO, name="cpu-echo", alias="echo"))

    def by_both() -> Intent:
        NodeBackend.objects.create(node=stage.node, name="cpu-echo", alias="echo")
        NodeModel.objects.filter(model_name="n").update(backend_type="cpu-echo")
        assert backend_requests.select_all_nodes(BackendRequest(backend_requests.UPGRADE, "echo"))[0] == [
            stage.node
        ]
        counted(stage.node, 1)()
        return stage.begins_in_waves()

    attempt = asyncio.create_task(stage.carries_out(await hot.in_thread(by_both)))
    await hot.until(lambda: reason() == "waiting for 1 request on one")
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    await hot.in_thread(counted(stage.node, 0))
    assert (await attempt).status == "success"


async def test_requests_that_take_too_long_do_not_hold_it_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, upgrade_drain=0.2))
    await hot.in_thread(counted(stage.node, 1))
    intent = await hot.in_thread(stage.begins_in_waves)
    began = clock.now()
    assert (await stage.carries_out(intent)).status == "success"
    assert clock.now() - began >= timedelta(seconds=0.2)


async def test_the_time_for_requests_goes_on_with_the_next_controller(stage: Stage) -> None:
    await hot.in_thread(counted(stage.node, 1))
    first = await hot.in_thread(stage.begins_in_waves)
    until_when = await hot.in_thread(partial(intents.drain_until, first, now=clock.now()))
    await hot.in_thread(partial(intents.reap, now=clock.now() + timedelta(minutes=5)))
    await hot.in_thread(due_now)
    (second,) = await hot.in_thread(claim)
    later = clock.now() + timedelta(minutes=1)
    assert await hot.in_thread(partial(intents.drain_until, second, now=later)) == until_when
    with pytest.raises(LeaseLost):
        await hot.in_thread(partial(intents.drain_until, first, now=later))


async def test_a_refused_upgrade_leaves_its_replicas_serving(stage: Stage) -> None:
    stage.answers(m.UpgradeReply(False, "no such image", (), True))
    intent = await hot.in_thread(stage.begins_in_waves)
    assert (await stage.carries_out(intent)).error == "no such image"
    assert await hot.in_thread(stage.loaded, stage.node) == {"m", "n"}


async def test_an_attempt_without_an_answer_leaves_its_replicas_serving_until_the_next(stage: Stage) -> None:
    stage.bus.replies.clear()
    intent = await hot.in_thread(stage.begins_in_waves)
    assert (await stage.carries_out(intent)).status == "queued"
    assert await hot.in_thread(stage.loaded, stage.node) == {"m", "n"}
    row = await stage.row(intent)
    assert row is not None
    assert row.drain_until is None, "the next attempt has its own time"


async def test_a_worker_that_may_be_busy_gets_no_requests(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, 0.05)
    stage.answers(RequestTimeout("no answer"))
    intent = await hot.in_thread(stage.begins_in_waves)
    await stage.carries_out(intent)
    assert await hot.in_thread(lambda: PendingBackendOp.objects.get().lease_owner) == ""
    assert await hot.in_thread(stage.loaded, stage.node) == set()


@pytest.mark.parametrize("later", [NotConnected("down"), RequestTimeout("frozen")], ids=str)
async def test_a_worker_that_was_sent_the_command_gets_no_requests_while_it_cannot_answer(
    stage: Stage, later: Exception
) -> None:
    """It may be stopping the engines: the bus was lost after the command had left."""
    listed = messages.subject("backend.list", str(stage.node.id))

    def loses_the_bus() -> Exception:
        stage.bus.replies[listed] = NotConnected("down")
        return ConnectionLost("lost")

    stage.answers(loses_the_bus)
    intent = await hot.in_thread(stage.begins_in_waves)
    assert (await stage.carries_out(intent)).status == "queued"
    assert len(stage.sent) == 1
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    stage.bus.replies[listed] = later
    await stage.again()
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    assert await hot.in_thread(drains.return_without_upgrade) == 0
    stage.lists(ECHO)
    stage.answers(STOPPED)
    assert (await stage.again()).status == "success"
    assert await hot.in_thread(stage.loaded, stage.node) == {"n"}


async def test_the_replicas_stay_out_when_the_controller_dies_after_the_command(stage: Stage) -> None:
    """The worker goes on; the next controller joins the command."""
    intent = await hot.in_thread(stage.begins_in_waves)
    stage.answers(NEVER)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: len(stage.sent) == 1)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    await hot.in_thread(partial(intents.reap, now=clock.now() + timedelta(minutes=5)))
    assert await hot.in_thread(drains.return_without_upgrade) == 0
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    stage.answers(STOPPED)
    assert (await stage.again()).status == "success"
    assert await hot.in_thread(stage.loaded, stage.node) == {"n"}


async def test_a_cancelled_wait_sends_nothing_and_the_replicas_serve_again(stage: Stage) -> None:
    await hot.in_thread(counted(stage.node, 1))
    intent = await hot.in_thread(stage.begins_in_waves)
    attempt = asyncio.create_task(stage.queue.execute(intent))
    await hot.until(lambda: stage.loaded(stage.node) == set())
    cancelled = intent.row.operation_id
    await hot.in_thread(partial(admission.cancel, cancelled, actor="bob", now=clock.now()))
    with pytest.raises(LeaseLost):
        await attempt
    await stage.queue.execute((await hot.in_thread(claim))[0])
    assert not stage.sent
    assert await hot.in_thread(stage.loaded, stage.node) == {"m", "n"}
    assert (await hot.in_thread(partial(Operation.objects.get, pk=cancelled))).status == "cancelled"


async def test_engines_that_a_proven_upgrade_stopped_serve_no_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's list proves the end, so no reply says which engines it stopped."""
    limits(monkeypatch, 0.05)
    running = (m.RunningModel("n", 0, "127.0.0.1:50001"),)
    stage.bus.replies[messages.subject("models.running", str(stage.node.id))] = m.RunningReply(running)
    before = Build(ECHO.version, "sha256:old")
    intent = replace(await hot.in_thread(stage.begins_in_waves), listed_build=before)
    stage.answers(NEVER)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: OperationTarget.objects.get().overdue_since is not None)
    stage.lists(replace(ECHO, version="2.0.0"))
    assert (await attempt).status == "success"
    assert await hot.in_thread(stage.loaded, stage.node) == {"n"}
    assert not await hot.in_thread(NodeModel.objects.filter(exit_reported=True).exists)


async def test_replicas_of_a_worker_that_fell_silent_during_its_upgrade_are_checked_at_once(
    stage: Stage,
) -> None:
    """It may have stopped their engines; one check decides, as after the report of an end."""
    stage.bus.replies[stage.subject] = NoResponders(stage.subject)
    intent = await hot.in_thread(stage.begins_in_waves)
    assert (await stage.carries_out(intent)).status == "queued"
    back = NodeModel.objects.filter(node=stage.node, phase="serving")
    found = await hot.in_thread(lambda: set(back.values_list("exit_reported", "checked_at")))
    assert found == {(True, None)}


async def test_a_cancel_after_the_wait_for_requests_overtakes_the_command(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker was asked to stop what it had not got yet, and then got it."""

    async def waits_and_is_cancelled(*wait: Any) -> None:
        cancel = partial(admission.cancel, intent.row.operation_id, actor="bob", now=clock.now())
        await hot.in_thread(cancel)

    monkeypatch.setattr(intent_queue, "wait_until_drained", waits_and_is_cancelled)
    intent = await hot.in_thread(stage.begins_in_waves)
    with pytest.raises(LeaseLost):
        await stage.queue.execute(intent)
    assert not stage.sent


def the_load() -> Operation:
    return Operation.objects.get(kind="model_load")


async def test_a_last_replica_waits_until_another_node_has_one(stage: Stage) -> None:
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: reason() == "m is loaded on another node first: queued")
    assert await hot.in_thread(stage.loaded, stage.node) == {"m", "n"}, "nothing leaves before"
    load = await hot.in_thread(the_load)
    assert load.payload == {"besides": [str(stage.node.id)]}
    ready = partial(hot.replica, stage.other, "m", address="127.0.0.1:51000", backend_type="echo")
    await hot.in_thread(ready)
    assert (await attempt).status == "success"
    assert len(stage.sent) == 1


async def test_a_last_replica_that_cannot_be_loaded_elsewhere_stays_and_says_why(stage: Stage) -> None:
    def fails() -> None:
        (load,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
        attempts.finish(load.id, load.fence, Event.FAIL, now=clock.now(), error="no memory")

    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: Operation.objects.filter(kind="model_load").exists())
    await hot.in_thread(fails)
    said = "it would stop the last replica of m; confirm, or load it on another node (no memory)"
    assert (await attempt).reason == said
    assert not stage.sent
    assert await hot.in_thread(stage.loaded, stage.node) == {"m", "n"}


async def test_a_last_replica_whose_model_is_busy_stays(stage: Stage) -> None:
    def unloads() -> None:
        asked = ledger.OperationRequest("model_unload", key="model:m#all", element="m", by=Requester("eve"))
        ledger.admit(asked, now=clock.now())

    await hot.in_thread(stage.alone)
    await hot.in_thread(unloads)
    intent = await hot.in_thread(stage.begins_in_waves)
    assert "model_unload of m is in progress" in (await stage.carries_out(intent)).reason
    assert not stage.sent


async def test_a_confirmed_last_replica_goes(stage: Stage) -> None:
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves, "m")
    assert (await stage.carries_out(intent)).status == "success"
    assert not await hot.in_thread(Operation.objects.filter(kind="model_load").exists)


def confirmed(operation_id: UUID) -> None:
    choice = partial(wave_requests.choose, last_replicas=["m"], actor="bob", now=clock.now())
    choice(operation_id, wave_requests.CONTINUE)


async def test_a_confirmation_is_heard_while_the_last_replica_waits_for_another(stage: Stage) -> None:
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    attempt = asyncio.create_task(stage.carries_out(intent))
    await hot.until(lambda: reason() == "m is loaded on another node first: queued")
    await hot.in_thread(confirmed, intent.row.operation_id)
    async with asyncio.timeout(120):
        assert (await attempt).status == "success"


async def test_a_confirmation_just_before_the_attempt_is_put_back_is_heard_at_once(stage: Stage) -> None:
    def is_confirmed_and_refuses(*load: Any) -> Operation:
        confirmed(intent.row.operation_id)
        raise errors.Conflict("the model is busy")

    stage.queue = IntentQueue(stage.bus, is_confirmed_and_refuses)
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    assert "the model is busy" in (await stage.carries_out(intent)).reason
    assert (await stage.carries_out((await hot.in_thread(claim))[0])).status == "success"


async def test_such_a_confirmation_is_heard_too_when_the_controller_dies_with_the_outcome(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_confirmed_and_refuses(*load: Any) -> Operation:
        confirmed(intent.row.operation_id)
        raise errors.Conflict("the model is busy")

    def writes_and_dies(*outcomes: Any, **at: Any) -> Any:
        write(*outcomes, **at)
        raise asyncio.CancelledError

    write = intents.record_outcomes
    monkeypatch.setattr(intents, "record_outcomes", writes_and_dies)
    stage.queue = IntentQueue(stage.bus, is_confirmed_and_refuses)
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    await asyncio.gather(stage.carries_out(intent), return_exceptions=True)
    row = await stage.row(intent)
    assert row is not None
    assert (row.lease_until, row.next_retry_at <= clock.now()) == (None, True)


async def test_the_wait_for_another_replica_has_an_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = replace(settings.CLUSTER, install_timeout=0.1, model_load_timeout=0.1)
    monkeypatch.setattr(settings, "CLUSTER", impatient)
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    async with asyncio.timeout(120):
        part = await stage.carries_out(intent)
    assert part.status == "queued"
    said = "it would stop the last replica of m; confirm, or load it on another node (m is loaded on"
    assert part.reason.startswith(said)
    assert await hot.in_thread(stage.loaded, stage.node) == {"m", "n"}


@pytest.mark.parametrize(("age", "pause"), [(0, 15), (300, 300), (90_000, 900)])
async def test_a_last_replica_that_stays_is_looked_at_less_and_less_often(
    stage: Stage, age: float, pause: float
) -> None:
    def older(intent: Intent) -> None:
        intent.row.created_at = clock.now() - timedelta(seconds=age)

    def busy(*load: Any) -> Operation:
        raise errors.Conflict("the model is busy")

    stage.queue = IntentQueue(stage.bus, busy)
    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(stage.begins_in_waves)
    older(intent)
    began = clock.now()
    await stage.carries_out(intent)
    row = await stage.row(intent)
    assert row is not None
    assert pause <= (row.next_retry_at - began).total_seconds() < pause + 15


async def test_a_confirmation_counts_for_all_operations_that_share_the_work(stage: Stage) -> None:
    def shared() -> Intent:
        asked = RequestScope([stage.node], by=Requester("test"), waves=Options())
        admission.admit(BackendRequest(backend_requests.UPGRADE, "echo"), asked, now=clock.now())
        both = replace(asked, nodes=[stage.node, stage.other], last_replicas=["m"])
        both = replace(both, waves=Options(max_unavailable=2, canary=False))
        admission.admit(BackendRequest(backend_requests.UPGRADE, "echo"), both, now=clock.now())
        return next(one for one in claim(2) if one.node == stage.node)

    await hot.in_thread(stage.alone)
    intent = await hot.in_thread(shared)
    await stage.queue.execute(intent)
    assert len(stage.sent) == 1
    assert not await hot.in_thread(Operation.objects.filter(kind="model_load").exists)


@pytest.mark.parametrize("begun", [False, True])
def test_waves_spare_the_requests_of_an_intent_that_was_made_without_them(stage: Stage, begun: bool) -> None:
    admission.admit(
        BackendRequest(backend_requests.UPGRADE, "echo"),
        RequestScope([stage.node], by=Requester("test")),
        now=clock.now(),
    )
    if begun:
        claim()
    waves = Options(max_unavailable=2, canary=False)
    asked = RequestScope([stage.node, stage.other], by=Requester("test"), waves=waves)
    admission.admit(BackendRequest(backend_requests.UPGRADE, "echo"), asked, now=clock.now())
    assert PendingBackendOp.objects.get(node=stage.node).spares_requests is not begun


async def test_the_answer_counts_though_the_replicas_cannot_be_put_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*intent: Any) -> None:
        raise OperationalError("deadlock detected")

    monkeypatch.setattr(drains, "end_upgrade", fails)
    intent = await hot.in_thread(stage.begins_in_waves)
    assert (await stage.carries_out(intent)).status == "success"
    assert len(stage.sent) == 1
    assert await hot.in_thread(stage.loaded, stage.node) == set()
    monkeypatch.undo()
    await hot.in_thread(drains.return_without_upgrade)
    assert await hot.in_thread(stage.loaded, stage.node) == {"n"}
