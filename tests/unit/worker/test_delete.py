"""A delete that meets the start of an engine: nothing runs from files that are gone."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from localai_cluster.kit import processes
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Handler, Message
from localai_cluster.messaging.messages import decode, encode
from localai_cluster.worker.backend_store import START_FILE, BackendStore
from localai_cluster.worker.commands import Commands, Pauses
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.engines import EngineSupervisor, StartFailed, StopFailed
from localai_cluster.worker.install_commands import InstallCommands
from localai_cluster.worker.log_rings import LogRings
from localai_cluster.worker.ports import PortAllocator
from tests.conftest import until


class Subscriptions:
    """The part of a bus that takes subscriptions."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Any:
        self.handlers[subject] = handler


class BusyStore(BackendStore):
    """An engine is launched after the delete has stopped all, and before it removes the files."""

    supervisor: EngineSupervisor
    loop: asyncio.AbstractEventLoop
    starting: "asyncio.Task[Any]"

    def remove(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(self._launch(name), self.loop).result()
        super().remove(name)

    async def _launch(self, name: str) -> None:
        start = self.backends / name / START_FILE
        self.starting = asyncio.create_task(self.supervisor.start("late#0", name, start))

        await until(lambda: bool(self.supervisor.engines()))


class Unkillable(EngineSupervisor):
    """One engine ends, another one cannot be killed."""

    def of_backend(self, names: frozenset[str]) -> list[str]:
        return ["a#0", "b#0"]

    async def ensure_stopped(self, keys: Sequence[str], *, force: bool) -> list[str]:
        raise StopFailed("b#0: process 7 cannot be killed", stopped=("a#0",))


async def deleted(store: BackendStore, supervisor: EngineSupervisor) -> m.DeleteReply:
    """What the worker answers to the deletion of `b`."""
    bus: Any = Subscriptions()
    nothing = cast(Any, None)
    installs = InstallCommands(*[nothing] * 6)
    commands = Commands(nothing, bus, store, supervisor, installs, "i", Pauses(), lambda: None, nothing)
    await commands.subscribe("n")
    subject = messages.subject("backend.delete", "n")
    answer = await bus.handlers[subject](Message(subject, encode(m.DeleteRequest("b")), True))
    return decode(answer, m.DeleteReply)


@pytest.mark.rule("worker-8.3", "nats-4.6")
async def test_an_engine_that_cannot_be_killed_keeps_its_files(tmp_path: Path) -> None:
    """The refusal names those that have ended."""
    start = tmp_path / "backends" / "b" / START_FILE
    start.parent.mkdir(parents=True)
    start.touch()
    with processes.ProcessReaper() as reaper:
        supervisor = Unkillable(PortAllocator(43000, 43999), "token", reaper, LogRings(), Exits("h"))
        store = BackendStore(tmp_path / "backends", tmp_path / "system", "default")
        reply = await deleted(store, supervisor)
    assert reply == m.DeleteReply(False, "b#0: process 7 cannot be killed", ("a#0",), True)
    assert start.exists()


@pytest.mark.rule("worker-8")
async def test_an_engine_launched_while_its_files_go_is_ended_and_reported(tmp_path: Path) -> None:
    """D-BUILD-LOCK."""
    start = tmp_path / "backends" / "b" / START_FILE
    start.parent.mkdir(parents=True)
    start.write_text("#!/bin/sh\nsleep 1000\n")
    with processes.ProcessReaper() as reaper:
        store = BusyStore(tmp_path / "backends", tmp_path / "system", "default")
        store.loop = asyncio.get_running_loop()
        store.supervisor = EngineSupervisor(
            PortAllocator(43000, 43999), "token", reaper, LogRings(), Exits("h")
        )
        assert await deleted(store, store.supervisor) == m.DeleteReply(True, "", ("late#0",), True)
        assert store.supervisor.engines() == []
        with pytest.raises(StartFailed):
            await store.starting
        await store.supervisor.close()
