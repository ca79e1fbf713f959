"""The handler of `model_load` against a real PostgreSQL and a bus whose workers the test plays."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connection, transaction

from localai_cluster import clock
from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import Handler, NoResponders, Subscription
from localai_cluster.messaging.codec import encode
from nodes.backends import install
from nodes.definitions.files import Folder
from nodes.loading import load
from nodes.models import BackendNode, NodeModel
from nodes.replicas import slots
from nodes.replicas.slots import Slot
from operations import services
from operations.executor import Postpone, Work
from operations.models import Operation
from operations.states import Event
from operations.waiting import Hints
from tests.conftest import eventually
from tests.support import hot

pytestmark = pytest.mark.django_db(transaction=True)

BACKEND = m.InstalledBackend(name="echo")


class Closed:
    """A subscription that nothing arrives on."""

    async def close(self) -> None:
        """Nothing to end."""


class Bus:
    """Workers by subject: a reply, or None for one that never answers; nobody else listens."""

    connected, generation = True, 1

    def __init__(self) -> None:
        self.replies: dict[str, Any] = {}

    async def wait_connected(self, *, after: int = 0) -> int:
        return self.generation

    async def publish(self, subject: str, payload: bytes) -> None:
        """Nobody takes it amiss."""

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        if subject not in self.replies:
            raise NoResponders(subject)
        reply = self.replies[subject]
        if reply is None:
            await asyncio.Event().wait()
        return encode(reply)

    async def subscribe(
        self, subject: str, handler: Handler, *, limit: int = 64, queue: str = ""
    ) -> Subscription:
        return Closed()

    async def close(self) -> None:
        """Nothing to end."""


class Stage:
    """Two nodes, a definition, and one claimed load."""

    def __init__(self, folder: Path) -> None:
        (folder / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
        self.bus = Bus()
        self.one, self.two = hot.node("one"), hot.node("two")
        now = clock.now()
        request = services.OperationRequest(
            load.KIND,
            key=load.key("echo"),
            element="echo",
            actor="test",
            wanted_until=now - timedelta(seconds=1),
        )
        services.admit(request, now=now)
        (operation,) = services.claim("controller", now=now, lease=60, limit=1)
        self.work = Work(operation, "controller")
        self.handler = load.LoadModel(self.bus, Folder(folder), Hints())

    def lists(self, node: BackendNode, *backends: m.InstalledBackend) -> None:
        self.bus.replies[subjects.backend_list(str(node.id))] = m.ListReply(backends)

    def installs(self, node: BackendNode, reply: m.InstallReply | None) -> None:
        self.bus.replies[subjects.backend_install(str(node.id))] = reply

    def want(self) -> None:
        """Somebody waits again, as a request says that attaches to the running load."""
        services.want(self.work.id, clock.now() + timedelta(seconds=60))

    async def play(self, happens: Callable[[], bool] = lambda: True) -> BaseException:
        """Runs the handler; `happens` is tried until it has happened. Answers how the attempt ended."""
        attempt = asyncio.create_task(self.handler(self.work))

        async def happened() -> bool:
            return await hot.in_thread(happens)

        try:
            assert await clock.wait_until(happened, timeout=10)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(attempt), 10)
            assert attempt.done(), "the attempt goes on for ever"
            error = attempt.exception()
            assert error is not None
            return error
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def vanishes_while_installing(stage: Stage) -> Callable[[], bool]:
    def happens() -> bool:
        child = Operation.objects.filter(kind=install.KIND).first()
        if child is None:
            return False
        now = clock.now()
        (held,) = services.claim("controller", now=now, lease=60, limit=1)
        services.put_back(held.id, held.fence, Event.POSTPONE, now=now, until=now, reason="worker gone")
        return True

    return happens


async def test_a_load_leaves_a_worker_that_vanished_while_it_installed(stage: Stage) -> None:
    """Rule 4: the installation goes on when its worker is back; the load tries elsewhere meanwhile."""
    stage.lists(stage.one)
    stage.lists(stage.two, BACKEND)
    await hot.in_thread(stage.want)
    ended = await stage.play(vanishes_while_installing(stage))
    assert isinstance(ended, Postpone), ended
    assert ended.payload is not None
    assert list(ended.payload["avoid"]) == [str(stage.one.id)]
    assert await hot.in_thread(NodeModel.objects.count) == 0


async def test_a_load_ends_when_its_slot_is_gone(stage: Stage) -> None:
    """A node that fell silent, left or started anew takes its rows away; whoever waits for it stops waiting.

    The worker here is a stock one: it does not name its process, so nothing else tells that it was restarted.
    """
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, None)
    await hot.in_thread(stage.want)

    def silent() -> bool:
        return NodeModel.objects.filter(state="loading").delete()[0] > 0

    ended = await stage.play(silent)
    assert isinstance(ended, Postpone), ended


async def test_whoever_came_later_keeps_the_load_alive(stage: Stage) -> None:
    """The wish is read when the attempt ends, not when it began."""
    stage.lists(stage.one, BACKEND)
    await hot.in_thread(stage.want)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended


async def test_an_engine_stopped_while_it_started_is_started_again(stage: Stage) -> None:
    """A stop meant for an earlier attempt may meet the engine of this one: no failure of the model."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(error="was stopped while it started", interrupted=True))
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended


def test_leftovers_are_locked_in_the_order_of_their_ids() -> None:
    """Whoever ends replicas of several nodes may hold an earlier one: nothing is held while it waits."""
    early, late = sorted((uuid4(), uuid4()))
    for number, pk in enumerate((late, early)):
        NodeModel.objects.create(
            id=pk, node=hot.node(f"n{number}"), model_name="m", state="loading", loading_by="gone"
        )

    def clear() -> list[Slot]:
        try:
            return slots.leftovers("m", mark="mine")
        finally:
            connection.close()

    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(hot.database_url(), autocommit=True) as watcher:
        with transaction.atomic():
            NodeModel.objects.select_for_update().get(pk=early)
            cleared = pool.submit(clear)
            eventually(lambda: watcher.execute(waiting).fetchone(), what="it waits for the earlier one")
            NodeModel.objects.select_for_update(nowait=True).get(pk=late)
        assert {slot.id for slot in cleared.result(timeout=15)} == {early, late}
