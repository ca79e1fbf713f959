"""What an unload and a deletion of a model make of each outcome of their commands, on one node and on many.

The bus is played by the test, the database is real.
"""

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.kit import clock
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NotConnected, RequestTimeout
from localai_cluster.messaging.messages import decode
from nodes.commands import commands
from nodes.commands.outcomes import CommandFailed
from nodes.gateway.request import InferenceRequest
from nodes.models import BackendNode, NodeModel
from nodes.registry import lifecycle
from nodes.replicas import drains, unload_requests
from nodes.replicas.engines import SERVING_COLUMNS
from nodes.replicas.stops import Stopper
from nodes.replicas.unload_requests import DELETE_KIND, UNLOAD_KIND, UnloadRequest
from operations.executor.work import Work, in_thread, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Operation, OperationTarget
from tests.conftest import until
from tests.support import hot
from tests.support.bus import PlayedBus
from tests.support.replicas import attempt

pytestmark = pytest.mark.django_db(transaction=True)

GONE = m.StopModelReply(matched=True, freed=True, terminated=True)


class Stage:
    """Two nodes with a replica of `echo` each, and one of another model."""

    def __init__(self) -> None:
        self.bus = PlayedBus()
        self.one, self.two = hot.node("one"), hot.node("two")
        self.replicas = [hot.replica(self.one), hot.replica(self.two)]
        self.other = hot.replica(self.one, "other", address="127.0.0.1:50009")
        for node in (self.one, self.two):
            self.stops(node, GONE)

    def stops(self, node: BackendNode, reply: Any) -> None:
        self.bus.replies[messages.subject("model.stop", str(node.id))] = reply

    def deletes(self, node: BackendNode, reply: Any) -> None:
        self.bus.replies[messages.subject("model.delete", str(node.id))] = reply

    def asked(self, node: BackendNode) -> list[m.StopModelRequest]:
        sent = self.bus.asked[messages.subject("model.stop", str(node.id))]
        return [decode(body, m.StopModelRequest) for body in sent]

    def begins(self, kind: str = UNLOAD_KIND, *, grace: float = 0, **wish: Any) -> Work:
        """The first attempt of an operation of this kind."""
        ask = unload_requests.unload if kind == UNLOAD_KIND else unload_requests.delete
        ask(UnloadRequest("echo", Requester("test"), grace=grace, **wish), now=clock.now())
        return self.claimed()

    def taken_over(self) -> Work:
        """The next attempt, after the controller of the last one has fallen silent."""
        later = clock.now() + timedelta(seconds=120)
        assert attempts.reap(now=later) == (1, 0)
        return self.claimed(later)

    def claimed(self, at: datetime | None = None) -> Work:
        (operation,) = attempts.claim("controller", now=at or clock.now(), lease=60, limit=1)
        return Work(operation, Recorder(write_batch))

    async def carries_out(self, work: Work) -> Mapping[str, Any]:
        kind = {UNLOAD_KIND: unload_requests.UnloadModel, DELETE_KIND: unload_requests.DeleteModel}[
            work.operation.kind
        ]
        return await asyncio.wait_for(kind(self.bus)(work), 60)

    async def fails(self, work: Work) -> str:
        """Soon; what is to succeed has more time than a busy machine needs."""
        unload_requests.STOP_WITHIN, unload_requests.SILENT_FOR = 0.2, 0.1
        with pytest.raises(CommandFailed) as failure:
            await self.carries_out(work)
        return failure.value.message


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    for module, name in (
        (commands, "PING_EVERY"),
        (commands, "_RETRY_PAUSE_SECONDS"),
        (commands, "BUS_WAIT"),
    ):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(unload_requests, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(unload_requests, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(unload_requests, "STOP_WITHIN", 60.0)
    monkeypatch.setattr(unload_requests, "SILENT_FOR", 60.0)
    return Stage()


async def rows() -> set[tuple[str, str, str]]:
    """Node, model and state of every replica."""
    values = NodeModel.objects.values_list("node__name", "model_name", "state")
    return await in_thread(lambda: set(values))


async def leaves() -> bool:
    return ("one", "echo", "unloading") in await rows()


async def parts() -> dict[str, tuple[str, str]]:
    values = OperationTarget.objects.values_list("node_name", "status", "error")
    return await in_thread(lambda: {name: (status, error) for name, status, error in values})


OTHER = ("one", "other", "loaded")


@pytest.mark.rule("R6.11", "T-UNL-5", "T-UNL-38", "nats-4.5", "T-ROU-14")
async def test_an_unload_everywhere_stops_each_engine_exactly_and_removes_the_rows(stage: Stage) -> None:
    work = await in_thread(stage.begins)
    assert await stage.carries_out(work) == {"nodes": ["one", "two"]}
    for node in (stage.one, stage.two):
        (sent,) = stage.asked(node)
        assert (sent.model_name, sent.process_key) == ("echo", "echo#0")
        assert (sent.expected_address, sent.force) == ("127.0.0.1:50000", False)
    assert await rows() == {OTHER}
    assert await parts() == {"one": ("success", ""), "two": ("success", "")}


@pytest.mark.rule("R6.11", "T-UNL-6")
async def test_a_node_whose_stop_fails_keeps_its_row_and_is_named_while_the_other_is_unloaded(
    stage: Stage,
) -> None:
    stage.stops(stage.one, m.StopModelReply(matched=True, error="signal: cannot be killed"))
    work = await in_thread(stage.begins)
    failure = await stage.fails(work)
    assert failure == "one: echo#0 may still run: signal: cannot be killed"
    assert await rows() == {OTHER, ("one", "echo", "unloading")}
    assert (await parts())["two"] == ("success", "")
    row = await in_thread(lambda: NodeModel.objects.get(node=stage.one, model_name="echo"))
    assert row.stop_error == "signal: cannot be killed"
    assert row.stop_attempts > 0


@pytest.mark.rule("T-UNL-37", "R6.13")
async def test_on_one_node_only_that_node_is_asked(stage: Stage) -> None:
    work = await in_thread(lambda: stage.begins(node=stage.one))
    assert await stage.carries_out(work) == {"nodes": ["one"]}
    assert not stage.asked(stage.two)
    assert await rows() == {OTHER, ("two", "echo", "loaded")}


async def test_of_one_replica_the_others_of_the_model_stay(stage: Stage) -> None:
    await in_thread(lambda: hot.replica(stage.one, index=1))
    work = await in_thread(lambda: stage.begins(node=stage.one, index=1))
    await stage.carries_out(work)
    assert [sent.process_key for sent in stage.asked(stage.one)] == ["echo#1"]
    assert ("one", "echo", "loaded") in await rows()


async def test_replicas_leave_the_picks_before_a_command_and_requests_may_end(stage: Stage) -> None:
    """A real picker: what runs keeps its engine, what comes is not sent there."""
    await in_thread(lambda: NodeModel.objects.filter(node=stage.two).delete())
    async with hot.picker() as picker:
        held = await picker.acquire(InferenceRequest(model="echo"))
        assert held is not None
        work = await in_thread(lambda: stage.begins(grace=600))
        running = asyncio.create_task(stage.carries_out(work))
        await until(leaves)
        assert await picker.acquire(InferenceRequest(model="echo")) is None
        assert not stage.asked(stage.one)
        picker.release(held)
        await asyncio.wait_for(running, 30)
    assert len(stage.asked(stage.one)) == 1
    assert await rows() == {OTHER}


async def test_at_the_deadline_running_requests_keep_the_engine_no_longer(stage: Stage) -> None:
    await in_thread(lambda: NodeModel.objects.filter(model_name="echo").update(in_flight=1))
    work = await in_thread(lambda: stage.begins(grace=0.05, node=stage.one))
    await stage.carries_out(work)
    assert await rows() == {OTHER, ("two", "echo", "loaded")}


async def test_asking_again_with_a_shorter_deadline_joins_and_hurries(stage: Stage) -> None:
    await in_thread(lambda: NodeModel.objects.filter(model_name="echo").update(in_flight=1))
    work = await in_thread(lambda: stage.begins(grace=600, node=stage.one))
    running = asyncio.create_task(stage.carries_out(work))
    await until(leaves)
    wish = UnloadRequest("echo", Requester("test"), node=stage.one, grace=0)
    again = await in_thread(lambda: unload_requests.unload(wish, now=clock.now()))
    assert (again.created, again.operation.id) == (False, work.id)
    await asyncio.wait_for(running, 30)


@pytest.mark.parametrize("lost", [RequestTimeout("late"), NotConnected("bus")], ids=["late", "bus"])
@pytest.mark.rule("C27", "R6.4")
async def test_measured_14_a_late_reply_costs_another_question_and_not_the_result(
    stage: Stage, lost: Exception
) -> None:
    """The worker has stopped it meanwhile: it knows no such process any more."""
    stage.stops(stage.one, [lost, lost, m.StopModelReply(terminated=True)])
    work = await in_thread(lambda: stage.begins(node=stage.one))
    await stage.carries_out(work)
    assert len(stage.asked(stage.one)) == 3
    assert ("one", "echo", "unloading") not in await rows()


@pytest.mark.rule("R6.4")
async def test_measured_3_a_dead_worker_is_named_and_delays_no_other_node(stage: Stage) -> None:
    del stage.bus.replies[messages.subject("model.stop", str(stage.one.id))]
    work = await in_thread(stage.begins)
    assert "one: echo#0 may still run: node one is not responding" in await stage.fails(work)
    assert await rows() == {OTHER, ("one", "echo", "unloading")}
    assert (await parts())["two"] == ("success", "")


@pytest.mark.rule("R2.75", "T-ROU-15")
async def test_without_the_bus_every_row_stays_and_the_error_says_so(stage: Stage) -> None:
    for node in (stage.one, stage.two):
        stage.stops(node, NotConnected("lost"))
    work = await in_thread(stage.begins)
    assert "the message bus is not connected" in await stage.fails(work)
    assert await rows() == {OTHER, ("one", "echo", "unloading"), ("two", "echo", "unloading")}


@pytest.mark.rule("nats-6.3", "nats-4.9", "R6.5", "T-UNL-9", "C25")
async def test_a_worker_without_the_exact_stop_frees_stops_by_key_and_is_asked_what_runs(
    stage: Stage,
) -> None:
    at = str(stage.one.id)
    del stage.bus.replies[messages.subject("model.stop", at)]
    stage.bus.replies[messages.subject("model.unload", at)] = m.UnloadReply(True)
    still = m.RunningReply((m.RunningModel("echo", 0, "127.0.0.1:50000"),))
    stage.bus.replies[messages.subject("models.running", at)] = [still, still, m.RunningReply()]
    work = await in_thread(lambda: stage.begins(node=stage.one))
    await stage.carries_out(work)
    (freed, *_) = stage.bus.asked[messages.subject("model.unload", at)]
    assert decode(freed, m.UnloadRequest) == m.UnloadRequest("echo", "127.0.0.1:50000")
    assert set(stage.bus.stops(at)) == {"echo#0"}
    assert len(stage.bus.asked[messages.subject("models.running", at)]) == 3


@pytest.mark.rule("nats-4.5")
async def test_the_workers_own_form_of_the_address_is_accepted(stage: Stage) -> None:
    own = m.StopModelReply(matched=True, address="0.0.0.0:50000", error="recorded …")
    stage.stops(stage.one, [own, GONE])
    work = await in_thread(lambda: stage.begins(node=stage.one))
    await stage.carries_out(work)
    assert [sent.expected_address for sent in stage.asked(stage.one)] == ["127.0.0.1:50000", "0.0.0.0:50000"]


@pytest.mark.rule("nats-4.5")
async def test_an_engine_that_another_has_replaced_is_not_stopped(stage: Stage) -> None:
    stage.stops(stage.one, m.StopModelReply(matched=True, address="127.0.0.1:50007", error="recorded …"))
    work = await in_thread(lambda: stage.begins(node=stage.one))
    await stage.carries_out(work)
    assert len(stage.asked(stage.one)) == 1


async def test_a_second_attempt_continues_where_a_killed_controller_stopped(stage: Stage) -> None:
    """Killed between the statement that withdraws and the command: the rows say what is left to do."""
    work = await in_thread(stage.begins)
    await in_thread(unload_requests._drain_targets, work)
    assert {state for _, model, state in await rows() if model == "echo"} == {"unloading"}
    again = await in_thread(stage.taken_over)
    assert await stage.carries_out(again) == {"nodes": ["one", "two"]}
    assert await rows() == {OTHER}


async def test_measured_16_an_attempt_that_lost_its_operation_sends_and_writes_nothing(stage: Stage) -> None:
    work = await in_thread(stage.begins)
    later = clock.now() + timedelta(seconds=120)
    await in_thread(lambda: attempts.reap(now=later))
    with pytest.raises(LeaseLost):
        await stage.carries_out(work)
    assert not stage.asked(stage.one)
    assert ("one", "echo", "loaded") in await rows()


async def test_measured_21_a_part_that_has_ended_is_not_asked_again(stage: Stage) -> None:
    """The second attempt repeats only what is left."""

    async def dies() -> m.StopModelReply:
        await until(first_ended)
        raise RuntimeError("the controller dies")

    async def first_ended() -> bool:
        return (await parts())["one"][0] == "success"

    stage.stops(stage.two, dies)
    work = await in_thread(stage.begins)
    with pytest.raises(RuntimeError):
        await stage.carries_out(work)
    stage.stops(stage.two, GONE)
    await stage.carries_out(await in_thread(stage.taken_over))
    assert (len(stage.asked(stage.one)), len(stage.asked(stage.two))) == (1, 2)
    assert await rows() == {OTHER}


async def test_a_node_that_went_offline_meanwhile_says_that_nothing_is_known(stage: Stage) -> None:
    work = await in_thread(stage.begins)

    def lost() -> None:
        lifecycle.deactivate(stage.one.id, now=clock.now())

    await in_thread(lost)
    assert await stage.fails(work) == "one: the node is offline, so what runs there is not known"
    assert (await parts())["two"] == ("success", "")


async def test_a_worker_that_started_again_without_the_engine_is_a_success(stage: Stage) -> None:
    work = await in_thread(stage.begins)
    await in_thread(lambda: NodeModel.objects.filter(node=stage.one, model_name="echo").delete())
    await stage.carries_out(work)
    assert not stage.asked(stage.one)


class TestDeletion:
    @pytest.mark.rule("R6.13", "nats-4.10", "C25", "R6.39")
    async def test_measured_15_files_that_are_absent_are_a_success_on_every_node(self, stage: Stage) -> None:
        await in_thread(lambda: hot.node("three"))
        for node in await in_thread(lambda: list(BackendNode.objects.all())):
            stage.deletes(node, m.DeleteModelReply(True))
        work = await in_thread(lambda: stage.begins(DELETE_KIND))
        assert await stage.carries_out(work) == {"nodes": ["one", "three", "two"]}
        assert await rows() == {OTHER}
        (sent,) = stage.bus.asked[messages.subject("model.delete", str(stage.two.id))]
        assert decode(sent, m.DeleteModelRequest) == m.DeleteModelRequest("echo")

    @pytest.mark.rule("T-UNL-13", "R6.13", "R6.39")
    async def test_a_refusal_of_one_node_is_named_and_the_others_are_done(self, stage: Stage) -> None:
        stage.deletes(stage.one, m.DeleteModelReply(error="disk is read-only"))
        stage.deletes(stage.two, m.DeleteModelReply(True))
        work = await in_thread(lambda: stage.begins(DELETE_KIND))
        assert await stage.fails(work) == "one: disk is read-only"
        assert (await parts())["two"] == ("success", "")

    async def test_files_stay_while_the_engine_may_run(self, stage: Stage) -> None:
        stage.stops(stage.one, m.StopModelReply(matched=True, error="stuck"))
        stage.deletes(stage.one, m.DeleteModelReply(True))
        work = await in_thread(lambda: stage.begins(DELETE_KIND, node=stage.one))
        assert "may still run" in await stage.fails(work)
        assert not stage.bus.asked[messages.subject("model.delete", str(stage.one.id))]

    async def test_files_stay_when_a_load_has_taken_a_place_meanwhile(self, stage: Stage) -> None:
        stage.deletes(stage.one, m.DeleteModelReply(True))
        work = await in_thread(lambda: stage.begins(DELETE_KIND, node=stage.one))
        mark = f"{work.id}:1"
        await in_thread(lambda: hot.replica(stage.one, index=1, state="loading", owner=attempt(mark)))
        assert "is being loaded there" in await stage.fails(work)
        assert not stage.bus.asked[messages.subject("model.delete", str(stage.one.id))]

    async def test_a_lost_reply_is_asked_for_again(self, stage: Stage) -> None:
        stage.deletes(stage.one, [RequestTimeout("late"), m.DeleteModelReply(True)])
        work = await in_thread(lambda: stage.begins(DELETE_KIND, node=stage.one))
        await stage.carries_out(work)


class TestLeftBehind:
    """What an operation leaves does not stay: the stopper of every controller sees to it."""

    async def test_a_replica_that_was_not_stopped_serves_again_after_a_cancel(self, stage: Stage) -> None:
        work = await in_thread(stage.begins)
        await in_thread(unload_requests._drain_targets, work)
        await Stopper(stage.bus).run_pass()
        assert ("one", "echo", "unloading") in await rows(), "its operation is active"
        await in_thread(ended_as_cancelled)
        await Stopper(stage.bus).run_pass()
        assert await rows() == {OTHER, ("one", "echo", "loaded"), ("two", "echo", "loaded")}
        assert not stage.asked(stage.one)

    @pytest.mark.parametrize("index", [None, 0])
    async def test_a_cancelled_unload_puts_nothing_back_that_another_one_unloads(
        self, stage: Stage, index: int | None
    ) -> None:
        """The one on the node began first; the one of the cluster took its row over, and was cancelled."""
        mine = await in_thread(lambda: stage.begins(node=stage.one, index=index))
        await in_thread(unload_requests._drain_targets, mine)
        other = await in_thread(stage.begins)
        await in_thread(unload_requests._drain_targets, other)
        await in_thread(lambda: admission.cancel(other.id, actor="bob", now=clock.now()))
        await Stopper(stage.bus).run_pass()
        assert await rows() == {OTHER, ("one", "echo", "unloading"), ("two", "echo", "loaded")}
        await stage.carries_out(mine)
        assert len(stage.asked(stage.one)) == 1
        assert await rows() == {OTHER, ("two", "echo", "loaded")}

    async def test_an_unload_of_another_replica_keeps_nothing_out(self, stage: Stage) -> None:
        await in_thread(lambda: hot.replica(stage.one, index=1))
        mine = await in_thread(lambda: stage.begins(node=stage.one, index=1))
        await in_thread(unload_requests._drain_targets, mine)
        other = await in_thread(stage.begins)
        await in_thread(unload_requests._drain_targets, other)
        await in_thread(lambda: admission.cancel(other.id, actor="bob", now=clock.now()))
        await Stopper(stage.bus).run_pass()
        states = NodeModel.objects.filter(node=stage.one, model_name="echo").order_by("replica_index")
        found = await in_thread(lambda: list(states.values_list("state", flat=True)))
        assert found == ["loaded", "unloading"]

    async def test_a_replica_that_an_upgrade_has_taken_out_stays_out(self, stage: Stage) -> None:
        work = await in_thread(lambda: stage.begins(node=stage.one))
        await in_thread(unload_requests._drain_targets, work)
        mine = NodeModel.objects.filter(node=stage.one, model_name="echo")
        intent = {"backend": "echo", "op": "upgrade", "operation_id": uuid4(), "spares_requests": True}
        lease = {"lease_owner": "c", "lease_until": clock.now() + timedelta(hours=1)}
        upgrade = await in_thread(lambda: stage.one.pending_ops.create(**intent, **lease))
        await in_thread(lambda: mine.update(backend_type="echo"))
        await in_thread(ended_as_cancelled)
        await Stopper(stage.bus).run_pass()
        assert ("one", "echo", "unloading") in await rows()
        await in_thread(upgrade.delete)
        await in_thread(drains.return_without_upgrade)
        assert ("one", "echo", "loaded") in await rows()

    async def test_an_unload_whose_replica_serves_again_is_no_success(self, stage: Stage) -> None:
        def is_put_back() -> None:
            again = NodeModel.objects.filter(node=stage.one, model_name="echo")
            again.update(phase="serving", **SERVING_COLUMNS)

        await in_thread(lambda: NodeModel.objects.filter(model_name="echo").update(in_flight=1))
        work = await in_thread(lambda: stage.begins(node=stage.one, grace=600))
        running = asyncio.create_task(stage.fails(work))
        await until(leaves)
        await in_thread(is_put_back)
        assert await asyncio.wait_for(running, 30) == "one: echo#0 is in use again: try again"

    async def test_an_engine_that_was_not_confirmed_is_stopped_later(self, stage: Stage) -> None:
        stage.stops(stage.one, m.StopModelReply(matched=True, error="stuck"))
        work = await in_thread(lambda: stage.begins(node=stage.one))
        await stage.fails(work)
        await in_thread(ended_as_cancelled)
        stage.stops(stage.one, GONE)
        await Stopper(stage.bus).run_pass()
        assert ("one", "echo", "unloading") in await rows(), "it is not due yet"
        due = clock.now() - timedelta(seconds=1)
        await in_thread(lambda: NodeModel.objects.filter(state="unloading").update(next_stop_at=due))
        await Stopper(stage.bus).run_pass()
        assert await rows() == {OTHER, ("two", "echo", "loaded")}


def ended_as_cancelled() -> None:
    Operation.objects.update(
        status="cancelled", finished_at=clock.now(), lease_until=None, lease_owner="", fence=9
    )
