"""Engines that nothing accounts for are stopped, and a drained node is safe to power off only without any.

The bus is played by the test, the database is real.
"""

from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from localai_cluster.accounts import actors
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock
from localai_cluster.kit.leases import Attempt
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NotConnected, RequestTimeout
from localai_cluster.messaging.messages import decode
from nodes.decisions import fleet_cache
from nodes.loading import load_request
from nodes.models import BackendNode, NodeModel
from nodes.models.replica import load_key
from nodes.registry import lifecycle, registration
from nodes.replicas import engines, slots, stops
from nodes.replicas.slots import Slot
from nodes.replicas.stops import NO_ENGINE_LIST_MESSAGE, Stopper
from operations.executor.work import in_thread
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from tests.support import api, hot
from tests.support.bus import PlayedBus
from tests.support.fleet import register_as
from tests.support.replicas import columns, stop_now

pytestmark = pytest.mark.django_db(transaction=True)

KEY, ADDRESS = "echo#0", "gpu-1:7001"
ADMIN = actors.Actor(actors.ActorKind.USER, "anna")
GONE = m.StopModelReply(terminated=True, process_key=KEY)


class Stage:
    """One node, and what its worker answers."""

    def __init__(self) -> None:
        self.bus = PlayedBus()
        self.node = hot.node("one")

    def answers(self, command: str, reply: Any) -> None:
        self.bus.replies[messages.subject(command, str(self.node.id))] = reply

    def note(self, attempt: Attempt | None = None, address: str = ADDRESS) -> Slot:
        """An attempt that has ended, by default, had this engine started."""
        attempt = attempt or (uuid4(), 1)
        slot = self.slot(attempt)
        assert slots.start(slot, attempt=attempt, now=clock.now())
        if address:
            slots.record_answer(slot, address)
        return slot

    def slot(self, attempt: Attempt) -> Slot:
        """The slot of an attempt."""
        (view,) = fleet_cache.read_fleet("echo")
        slot = slots.reserve(view, "echo", attempt=attempt, backend="echo", now=clock.now())
        assert isinstance(slot, Slot)
        return slot

    def attempt(self) -> Attempt:
        """An attempt that runs."""
        now = clock.now()
        request = admission.OperationRequest(
            load_request.KIND, key=load_key("echo"), element="echo", by=Requester("test")
        )
        admission.admit(request, now=now)
        (operation,) = attempts.claim("controller", now=now, lease=60, limit=1)
        return (operation.id, operation.fence)

    async def look(self) -> int:
        return await Stopper(self.bus).run_pass()

    def stops(self) -> list[m.StopModelRequest]:
        """The exact stops that were asked for."""
        sent = self.bus.asked[messages.subject("model.stop", str(self.node.id))]
        return [decode(body, m.StopModelRequest) for body in sent]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def noted() -> bool:
    return NodeModel.engines.exists()


def row(node: BackendNode) -> BackendNode:
    return api.node(node.id)


class TestEngineOfAnEndedAttempt:
    @pytest.mark.rule("R2.62")
    async def test_is_stopped_by_key_and_address(self, stage: Stage) -> None:
        await in_thread(stage.note)
        stage.answers("model.stop", GONE)
        assert await stage.look() == 1
        (stop,) = stage.stops()
        assert (stop.process_key, stop.expected_address) == (KEY, ADDRESS)
        assert not await in_thread(noted)

    async def test_is_left_alone_while_the_attempt_runs(self, stage: Stage) -> None:
        await in_thread(lambda: stage.note(stage.attempt()))
        assert await stage.look() == 0

    async def test_is_stopped_under_the_address_that_a_stock_worker_records(self, stage: Stage) -> None:
        """nats.md §4.5: it compares with its own form; the port tells that it is the same process."""
        await in_thread(stage.note)
        other = m.StopModelReply(matched=True, address="127.0.0.1:7001", error="recorded ...")
        stage.answers("model.stop", [other, GONE])
        await stage.look()
        assert [stop.expected_address for stop in stage.stops()] == [ADDRESS, "127.0.0.1:7001"]
        assert not await in_thread(noted)

    async def test_is_gone_when_another_process_has_its_key(self, stage: Stage) -> None:
        """It must not be stopped in its place."""
        await in_thread(stage.note)
        stage.answers("model.stop", m.StopModelReply(matched=True, address="127.0.0.1:7002"))
        await stage.look()
        assert len(stage.stops()) == 1
        assert not await in_thread(noted)

    async def test_is_not_stopped_once_its_place_was_taken_over(self, stage: Stage) -> None:
        """It has ended, and a load that begins during the question owns the key."""
        slot = await in_thread(partial(stage.note, address=""))

        async def taken_over() -> m.StopModelReply:
            assert await in_thread(engines.confirm_end, slot.id)
            await in_thread(lambda: stage.note(stage.attempt(), address=""))
            return m.StopModelReply(matched=True, address="127.0.0.1:7001")

        stage.answers("model.stop", taken_over)
        await stage.look()
        assert [stop.expected_address for stop in stage.stops()] == [""]
        assert await in_thread(noted)

    @pytest.mark.parametrize("left", [[], ["echo"]], ids=["gone", "alive"])
    async def test_of_a_worker_without_that_command_is_stopped_by_key(
        self, stage: Stage, left: list[str]
    ) -> None:
        """Releases up to v4.9.0 have no `model.stop`; what runs there tells."""
        await in_thread(stage.note)
        stage.answers("models.running", m.RunningReply(tuple(m.RunningModel(name) for name in left)))
        await stage.look()
        assert stage.bus.stops(stage.node.id) == [KEY]
        assert await in_thread(noted) == bool(left)

    @pytest.mark.parametrize(
        "reply",
        [None, RequestTimeout("late"), NotConnected("lost"), b"[", m.StopModelReply(matched=True, error="!")],
        ids=["not there", "late", "bus", "unreadable", "refused"],
    )
    async def test_is_looked_at_again_until_the_worker_has_confirmed(self, stage: Stage, reply: Any) -> None:
        await in_thread(stage.note)
        if reply is not None:
            stage.answers("model.stop", reply)
        await stage.look()
        assert await in_thread(noted)
        assert await stage.look() == 0, "it has a time for its next look"
        await in_thread(stop_now)
        stage.answers("model.stop", GONE)
        await stage.look()
        assert not await in_thread(noted)

    async def test_may_come_late_when_its_start_was_never_answered(self, stage: Stage) -> None:
        """The start may wait behind another command of its worker: "no such process" is no proof yet."""
        await in_thread(partial(stage.note, address=""))
        stage.answers("model.stop", GONE)
        await stage.look()
        assert await in_thread(noted)
        long_ago = clock.now() - timedelta(seconds=61)
        await in_thread(NodeModel.engines.update, started_at=long_ago, next_stop_at=long_ago)
        await stage.look()
        assert not await in_thread(noted)

    async def test_is_forgotten_with_a_removed_node(self, stage: Stage) -> None:
        await in_thread(stage.note)
        await in_thread(partial(lifecycle.deregister, stage.node.id, actor=ADMIN, now=clock.now()))
        assert not await in_thread(noted)


class TestPlaceOfAnEndedAttempt:
    async def test_gives_its_place_up(self, stage: Stage) -> None:
        """The controller was killed, and no request asks for the model again."""
        await in_thread(stage.slot, (uuid4(), 1))
        await stage.look()
        assert not await in_thread(NodeModel.objects.exists)

    async def test_of_an_earlier_attempt_is_given_up_too(self, stage: Stage) -> None:
        """The operation runs, under a later fence."""
        operation_id, fence = await in_thread(stage.attempt)
        await in_thread(stage.slot, (operation_id, fence - 1))
        await stage.look()
        assert not await in_thread(NodeModel.objects.exists)

    async def test_is_kept_while_the_attempt_runs(self, stage: Stage) -> None:
        await in_thread(lambda: stage.slot(stage.attempt()))
        await stage.look()
        assert await in_thread(NodeModel.objects.exists)

    async def test_is_kept_once_it_is_a_replica(self, stage: Stage) -> None:
        await in_thread(hot.replica, stage.node)
        await stage.look()
        assert await in_thread(NodeModel.objects.exists)

    async def test_is_not_noted_once_its_place_is_lost(self, stage: Stage) -> None:
        """An attempt that was overtaken must not have an engine started."""

        def lost() -> bool:
            running = stage.attempt()
            slot = stage.slot(running)
            NodeModel.objects.update(owner_fence=running[1] + 1)
            return slots.start(slot, attempt=running, now=clock.now())

        assert not await in_thread(lost)
        assert (await in_thread(NodeModel.objects.get)).phase == "reserved"


class TestDrainedNode:
    @pytest.fixture(autouse=True)
    def drained(self, stage: Stage) -> None:
        lifecycle.drain(stage.node.id, actor=ADMIN, now=clock.now())

    async def test_is_safe_once_nothing_runs_there(self, stage: Stage) -> None:
        stage.answers("models.running", m.RunningReply())
        await stage.look()
        assert (await in_thread(row, stage.node)).engines_gone_at is not None
        assert await stage.look() == 0, "nothing more to ask"

    async def test_has_its_engines_stopped_first(self, stage: Stage) -> None:
        running = m.RunningReply((m.RunningModel("echo", 0, "127.0.0.1:7001"),))
        stage.answers("models.running", [running, m.RunningReply()])
        stage.answers("model.stop", GONE)
        await stage.look()
        assert [stop.expected_address for stop in stage.stops()] == ["127.0.0.1:7001"]
        found = await in_thread(row, stage.node)
        assert (found.engines_gone_at, found.engines_error) == (None, "")
        await in_thread(BackendNode.objects.update, engines_due_at=clock.now())
        await stage.look()
        assert (await in_thread(row, stage.node)).engines_gone_at is not None

    async def test_of_a_stock_worker_is_never_called_safe(self, stage: Stage) -> None:
        """It is asked to stop everything; whether it did, it cannot tell."""
        stage.answers("backend.list", m.ListReply())
        await stage.look()
        found = await in_thread(row, stage.node)
        assert (found.engines_gone_at, found.engines_error) == (None, NO_ENGINE_LIST_MESSAGE)
        assert stage.bus.stops(stage.node.id) == [""]

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            (None, "is not responding"),
            (RequestTimeout("late"), "did not answer within"),
            (NotConnected("lost"), "bus is not connected"),
            (b"[", "cannot be read"),
            (m.RunningReply(error="out of memory"), "out of memory"),
        ],
        ids=["not there", "late", "bus", "unreadable", "refused"],
    )
    async def test_without_an_answer_is_not_called_safe(self, stage: Stage, reply: Any, says: str) -> None:
        if reply is not None:
            stage.answers("models.running", reply)
        await stage.look()
        found = await in_thread(row, stage.node)
        assert found.engines_gone_at is None
        assert says in found.engines_error
        assert found.engines_due_at is not None

    async def test_that_is_resumed_during_the_question_is_left_alone(self, stage: Stage) -> None:
        """Also when it is drained again: that drain has its own question."""

        async def resumed() -> m.RunningReply:
            await in_thread(lifecycle.resume, stage.node.id, actor=ADMIN, now=clock.now())
            await in_thread(lifecycle.drain, stage.node.id, actor=ADMIN, now=clock.now())
            return m.RunningReply()

        stage.answers("models.running", resumed)
        await stage.look()
        assert (await in_thread(row, stage.node)).engines_gone_at is None

    async def test_that_is_resumed_during_the_question_keeps_its_engines(self, stage: Stage) -> None:
        """A load may have started them since."""

        async def resumed() -> m.RunningReply:
            await in_thread(lifecycle.resume, stage.node.id, actor=ADMIN, now=clock.now())
            return m.RunningReply((m.RunningModel("echo", 0, "127.0.0.1:7001"),))

        stage.answers("models.running", resumed)
        stage.answers("model.stop", GONE)
        await stage.look()
        assert stage.stops() == []

    async def test_waits_for_its_replicas_and_for_loads(self, stage: Stage) -> None:
        """What a drain still waits for must not be stopped."""

        def nothing_due() -> bool:
            return stops.claim_drained_nodes(16, now=clock.now()) == []

        replica = await in_thread(hot.replica, stage.node)
        assert await in_thread(nothing_due)
        await in_thread(replica.delete)
        await in_thread(lambda: hot.replica(stage.node, phase="starting"))
        assert await in_thread(nothing_due)
        await in_thread(
            lambda: NodeModel.engines.update(**columns(phase="departed"), owner_id=None, owner_fence=None)
        )
        assert await in_thread(nothing_due), "its engine may run"

    async def test_is_not_safe_any_more_when_its_worker_starts_again(self, stage: Stage) -> None:
        stage.answers("models.running", m.RunningReply())
        await stage.look()
        worker = registration.Registration(name="one", address="127.0.0.1:1")

        def again(node_id: UUID) -> BackendNode:
            secret = "5" * 64
            BackendNode.objects.update(fingerprint=hash_secret(secret))
            register_as(worker, secret=secret, source_address="", now=clock.now(), auto_approve=False)
            return api.node(node_id)

        assert (await in_thread(again, stage.node.id)).engines_gone_at is None

    async def test_of_an_agent_has_no_engines(self, stage: Stage) -> None:
        await in_thread(BackendNode.objects.update, node_type="agent")
        await stage.look()
        assert (await in_thread(row, stage.node)).engines_gone_at is not None
