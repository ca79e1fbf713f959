"""Which errors of an engine send a request on to another replica, and how much time the next one gets."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, cast
from uuid import uuid4

import pytest
from pytest_django import Settings

from localai_cluster.accounts.principals import Principal
from localai_cluster.kit import clock
from localai_cluster.kit.errors import Unavailable
from localai_cluster.rpc.client import ClientPool
from localai_cluster.rpc.errors import (
    BackendError,
    BackendFailed,
    Busy,
    DeadlineExceeded,
    IdentityMismatch,
    Lost,
    ModelNotLoaded,
    Refused,
    Rejected,
)
from localai_cluster.web import wire
from nodes.gateway import gateway
from nodes.gateway.gateway import MAX_REPLICA_ATTEMPTS, Attempts, Gateway
from nodes.gateway.picks import Picker
from nodes.gateway.prefix_routing import PrefixRouter
from nodes.gateway.request import InferenceRequest, Replica
from nodes.loading.wait import Loads
from nodes.replicas import hooks
from operations.changes.events import NODES, OPERATIONS
from operations.executor.work import WakeUps


class Replicas:
    """As many replicas as are asked for, all of them alive. Picker and clients in one."""

    def __init__(self) -> None:
        self.acquired = self.released = 0

    async def acquire(self, request: InferenceRequest) -> Replica:
        self.acquired += 1
        return Replica(uuid4(), uuid4(), 0, request.model, f"127.0.0.1:{self.acquired}")

    def release(self, replica: Replica) -> None:
        self.released += 1

    async def exclude(self, replica: Replica, *, has_wrong_model: bool = False) -> bool:
        return True

    def get(self, address: str, token: str) -> "Replicas":
        return self

    async def health(self, timeout: float) -> bool:
        return True


class Played:
    """A request whose attempts end in `errors`, one after the other, and then in an answer."""

    def __init__(self, errors: Sequence[BackendError]) -> None:
        self.errors = list(errors)
        self.deadlines: list[float] = []
        self.request = InferenceRequest(model="echo")
        self.replicas = Replicas()

    async def work(self, engine: Any) -> str:
        self.deadlines.append(self.request.deadline)
        if self.errors:
            raise self.errors.pop(0)
        return "answer"

    def run(self) -> str:
        """The answer, or the error that the caller gets."""
        try:
            return asyncio.run(self._answer())
        finally:
            assert self.replicas.acquired == self.replicas.released

    async def _answer(self) -> str:
        picker, clients = cast(Picker, self.replicas), cast(ClientPool, self.replicas)
        attempts = Attempts(Gateway(picker, clients, cast(Loads, None)), self.request)
        while True:
            async with attempts as engine:
                return await self.work(engine)


@pytest.mark.parametrize("error", [Rejected, BackendFailed, DeadlineExceeded])
def test_after_one_loss_an_error_that_is_an_answer_ends_the_request(error: type[BackendError]) -> None:
    played = Played([Lost(), error(), Busy()])
    with pytest.raises(error):
        played.run()
    assert played.replicas.acquired == 2


@pytest.mark.rule("R2.9", "T-ROU-44", "T-INF-1")
@pytest.mark.parametrize(
    "errors", [[Lost()], [Refused(), Lost(), Busy()], [Busy(), ModelNotLoaded(), Refused()]]
)
def test_a_replica_that_did_no_work_is_replaced_and_a_lost_one_once(errors: list[BackendError]) -> None:
    played = Played(errors)
    assert played.run() == "answer"
    assert played.replicas.acquired == len(played.deadlines)


def test_a_second_loss_ends_the_request() -> None:
    played = Played([Lost(), Busy(), Lost()])
    with pytest.raises(Lost):
        played.run()
    assert played.replicas.acquired == 3


@pytest.mark.parametrize("kind", [Refused, Lost, Busy, BackendFailed])
@pytest.mark.parametrize("caller", ["admin", "user", "anonymous"])
def test_only_an_administrator_gets_the_address_of_an_engine(
    kind: type[BackendError], caller: Literal["admin", "user", "anonymous"]
) -> None:
    """Clients learn neither the names of nodes nor their addresses."""
    text = "failed to connect to all addresses; last error: ipv4:10.0.0.5:50051"
    played = Played([kind(text) for _ in range(MAX_REPLICA_ATTEMPTS)])
    played.request.principal = Principal(caller)
    with pytest.raises(kind) as answer:
        played.run()
    assert answer.value.message == (text if caller == "admin" else kind.message)


@pytest.mark.rule("R2.9", "R2.76", "T-INF-24")
@pytest.mark.parametrize("kind", [Busy, ModelNotLoaded, IdentityMismatch])
def test_a_request_tries_so_many_replicas_and_no_more(kind: type[BackendError]) -> None:
    """Then the last one's error is the answer, as it is."""
    said = [kind(f"no {number}") for number in range(MAX_REPLICA_ATTEMPTS + 1)]
    played = Played(said)
    with pytest.raises(kind) as answer:
        played.run()
    assert played.replicas.acquired == MAX_REPLICA_ATTEMPTS
    assert answer.value is said[MAX_REPLICA_ATTEMPTS - 1]


def test_the_time_limit_is_one_budget_over_all_attempts(settings: Settings) -> None:
    """The second replica gets what the first one left, and a load between them no more than that."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=30.0, model_load_wait=0.0)
    before = clock.monotonic()
    played = Played([Refused(), Lost(), Busy()])
    assert played.run() == "answer"
    assert len(played.deadlines) == 4
    assert set(played.deadlines) == {played.request.wait_until}
    assert before + 30 <= played.deadlines[0] <= clock.monotonic() + 30


async def test_a_notification_that_is_not_understood_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends nothing: what is notified after it is heard."""
    operation = uuid4()

    async def told(*_: str) -> AsyncIterator[tuple[str, str]]:
        yield NODES, "no node"
        yield hooks.CHANNEL, "no replica"
        yield OPERATIONS, f"{operation} completed"

    monkeypatch.setattr(gateway, "listen", told)
    hints = WakeUps()
    with hints.watch(operation) as watch:
        await gateway._listen_for_notifications(hints, PrefixRouter(300.0, lambda news: None))
        assert await watch.changed(timeout=0)
    assert ["'no node'" in caplog.text, "'no replica'" in caplog.text] == [True, True]


async def test_a_block_is_ended_with_an_error_but_a_foreign_cancellation_goes_first() -> None:
    """Of nested blocks the one whose `cancel` was called raises; afterwards the task goes on."""
    task = asyncio.current_task()
    assert task is not None

    async def nested() -> None:
        with wire.CancelScope() as outer, wire.CancelScope():
            outer.cancel(Unavailable("outer"))
            await asyncio.sleep(0)

    with pytest.raises(Unavailable, match="outer"):
        await nested()
    assert task.cancelling() == 0

    async def work() -> None:
        with wire.CancelScope() as scope:
            asyncio.get_running_loop().call_soon(scope.cancel, Unavailable("ours"))
            await asyncio.Event().wait()

    started = asyncio.create_task(work())
    with pytest.raises(Unavailable, match="ours"):
        await started
    started = asyncio.create_task(work())
    await asyncio.sleep(0)
    started.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started
