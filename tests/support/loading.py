"""A claimed `model_load` on two nodes, whose workers and engines the test plays."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.definitions.folder import Folder
from nodes.loading import load, load_request
from nodes.models import BackendNode, NodeModel
from nodes.models.replica import load_key
from nodes.replicas.stops import Stopper
from operations.executor.work import WakeUps, Work, in_thread, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from tests.conftest import until
from tests.support import backends, hot
from tests.support.bus import PlayedBus

BACKEND = m.InstalledBackend(name="echo")


class EngineClient:
    """A client of an engine that succeeds at every call of a load; tests override calls in a subclass."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self.token = address, token

    async def load_model(self, options: Any, timeout: float) -> Any:
        return SimpleNamespace(success=True, message="")

    async def close(self) -> None:
        """Do nothing."""


class Stage:
    """Two nodes, a definition, and one claimed load."""

    def __init__(self, folder: Path) -> None:
        (folder / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
        self.bus, self.folder = PlayedBus(), folder
        self.one, self.two = hot.node("one"), hot.node("two")
        now = clock.now()
        request = admission.OperationRequest(
            load_request.KIND,
            key=load_key("echo"),
            element="echo",
            by=Requester("test"),
            needed_until=now - timedelta(seconds=1),
        )
        admission.admit(request, now=now)
        (operation,) = attempts.claim("controller", now=now, lease=60, limit=1)
        self.work = Work(operation, Recorder(write_batch))
        self.handler = load.LoadModel(self.bus, Folder(folder), WakeUps())

    def request_again(self) -> None:
        """Request and claim another load."""
        request = admission.OperationRequest(
            load_request.KIND, key=load_key("echo"), element="echo", by=Requester("test")
        )
        admission.admit(request, now=clock.now())
        (operation,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
        self.work = Work(operation, Recorder(write_batch))

    def lists(self, node: BackendNode, *backends: m.InstalledBackend) -> None:
        self.bus.replies[messages.subject("backend.list", str(node.id))] = m.ListReply(backends)

    def installs(self, node: BackendNode, reply: Any) -> None:
        self.bus.replies[messages.subject("backend.install", str(node.id))] = reply

    async def learned(self) -> None:
        """Measure the engines of all ended loads."""
        await asyncio.gather(*self.handler._learning)

    def need_until(self) -> None:
        """Extend the load's deadline, as a request that attaches to the running load does."""
        admission.extend_need({self.work.id: clock.now() + timedelta(seconds=60)})

    async def play(self, happens: Callable[[], bool] = lambda: True) -> BaseException:
        """Run the handler; retry `happens` until it succeeds. Return the exception that ended the attempt."""
        attempt = asyncio.create_task(self.handler(self.work))

        try:
            await until(lambda: hot.in_thread(happens))
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.shield(attempt), 60)
            assert attempt.done(), "the attempt goes on forever"
            error = attempt.exception()
            assert error is not None
            return error
        finally:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The results of `LoadModel` for each engine, in turn: None, an error, or a function to call first."""
    script: list[Any] = []

    class Client(EngineClient):
        async def load_model(self, options: Any, timeout: float) -> Any:
            assert (self.address, self.token) == (STARTED.address, backends.TOKEN)
            what = script.pop(0) if script else None
            if isinstance(what, Exception):
                raise what
            if what is not None:
                await hot.in_thread(what)
            return await super().load_model(options, timeout)

    monkeypatch.setattr(load, "BackendClient", Client)
    return script


STARTED = m.InstallReply(True, "127.0.0.1:7")


def left() -> list[tuple[str, str]]:
    """Return the engines that may have to be stopped, with their addresses."""
    stopping = NodeModel.engines.filter(phase__in=("stopping", "departed"))
    return [(str(row), row.address) for row in stopping]


async def stops(stage: Stage) -> None:
    """Let controllers stop the engines of the ended attempt, so that its slot is free."""
    stage.bus.replies[messages.subject("model.stop", str(stage.one.id))] = m.StopModelReply(terminated=True)
    await Stopper(stage.bus).run_pass()
    assert await in_thread(NodeModel.engines.count) == 0


ROOM: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "memory": (
        {"available_vram": 0},
        {"vram_policy": "require"},
        "2 without the VRAM it needs (0.1 GiB: one has 0.0 GiB free, two has 0.0 GiB free)",
    ),
    "disk": (
        {"total_disk": 9 * 2**30, "available_disk": 2**30},
        {},
        "2 without the disk space it needs"
        " (4 KiB of files and 1.0 GiB to spare:"
        " one has 1.0 GiB of 9.0 GiB free, two has 1.0 GiB of 9.0 GiB free)",
    ),
}
