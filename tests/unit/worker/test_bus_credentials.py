"""When a worker asks for new credentials for the bus, and when it lets the bus be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from localai_cluster.kit import clock, nkeys
from localai_cluster.messaging.servers import Servers, mint_worker
from localai_cluster.worker import registration
from localai_cluster.worker.control_plane import CallFailed, Registered, ServerKind
from localai_cluster.worker.registration import BusCredentials
from tests.conftest import until

ACCOUNT = nkeys.generate("account")
CLUSTER, STOCK = ServerKind.CLUSTER, ServerKind.STOCK
REVOKED = CallFailed("403 this secret was revoked", http_status=403)
CLAIMED = CallFailed("409 another worker is this node", http_status=409)
DOWN = CallFailed("no answer")


def approved() -> Registered:
    user = nkeys.generate("user")
    made = mint_worker(ACCOUNT, user, "backend", "n1", now=clock.now().timestamp(), lifetime=3600)
    return Registered("n1", "healthy", CLUSTER, made.jwt, made.seed, "nats://10.0.0.1:4222")


class Played:
    """A bus that notes what it is to dial with, and a control plane that answers as the test says."""

    def __init__(self, *answers: Any) -> None:
        self.dialled: list[Servers | None] = []
        self.tries = 0
        self._answers = list(answers)
        self.credentials = BusCredentials(self, None, None, self.register)  # type: ignore[arg-type]

    def use(self, servers: Servers | None) -> None:
        self.dialled.append(servers)

    async def register(self) -> None:
        self.tries += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        self.credentials.adopt(answer)


@asynccontextmanager
async def running(played: Played) -> AsyncIterator[BusCredentials]:
    """An approved worker, whose bus has just refused its credentials."""
    played.credentials.adopt(approved())
    task = asyncio.create_task(played.credentials.run())
    await settle()
    assert played.tries == 0
    played.credentials.refused()
    await settle()
    yield played.credentials
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    """Lets everything happen that needs no time."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal by the bus is acted upon without a pause."""
    monkeypatch.setattr(registration, "REFUSAL_INTERVAL_SECONDS", 0.0)


@pytest.mark.rule("nats-9.3")
@pytest.mark.parametrize("answer", [REVOKED, CLAIMED], ids=["revoked", "claimed"])
async def test_a_worker_that_is_refused_everywhere_asks_once_a_minute(answer: CallFailed) -> None:
    """Every attempt counts against its address, and every dial is a line in the server's log."""
    played = Played(answer)
    async with running(played) as credentials:
        assert played.tries == 1
        assert played.dialled[-1] is None, "nothing is dialled with what both have refused"
        assert str(answer) in credentials.problem
        credentials.refused()
        await settle()
        assert played.tries == 1, "a late refusal by the bus does not hurry it"


@pytest.mark.rule("nats-9.3")
async def test_it_comes_back_when_it_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REFUSED_PAUSE_SECONDS", 0.0)
    played = Played(REVOKED, REVOKED, approved())
    async with running(played) as credentials:
        await until(lambda: credentials.problem == "")
        assert played.tries == 3
        assert played.dialled[-1] is not None


@pytest.mark.rule("nats-9.3")
async def test_without_an_answer_of_the_server_the_bus_is_dialled_on() -> None:
    """Its clock or its configuration may have been wrong for a moment."""
    played = Played(DOWN)
    async with running(played) as credentials:
        assert played.tries == 1
        assert None not in played.dialled
        credentials.refused()
        await settle()
        assert played.tries == 2


@pytest.mark.rule("W4", "nats-9.3")
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_worker_that_becomes_pending_through_a_heartbeat_polls_for_its_approval(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was removed. Off the bus no heartbeat would find the approval."""
    monkeypatch.setattr(registration, "FIRST_PENDING_POLL_SECONDS", 0.0)
    played = Played(approved())
    played.credentials.adopt(Registered("n1", "healthy", CLUSTER, nats_url="nats://10.0.0.1:4222"))
    task = asyncio.create_task(played.credentials.run())
    if is_refused:
        played.credentials.refused()
    await settle()
    assert played.tries == 0
    played.credentials.adopt(Registered("n2", "pending", CLUSTER))
    await settle()
    assert played.tries == 1
    assert played.credentials.problem == ""
    assert played.dialled[-1] is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
