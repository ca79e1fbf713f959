"""The backends and engines of one simulated worker, and its answer to each command.

The worker changes its lists as a real one changes its disk and processes: at the end of the work. Commands
for one backend run one after the other. A repeated request joins the running one, except on a stock worker,
which executes it twice.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from localai_cluster.kit import clock
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import DecodeError, decode, encode
from tests.support.simulator.script import Act, Script

KEPT = 2000
"""Maximum commands that a worker keeps; its counts include all commands."""

R = TypeVar("R")
Send = Callable[[m.ProgressEvent], Awaitable[None]]
"""Publishes one progress report."""


@dataclass(frozen=True)
class Command:
    """One received message; `at` on the monotonic clock."""

    node_id: str
    verb: str
    subject: str
    payload: bytes
    at: float

    @property
    def body(self) -> Any:
        """The parsed JSON; None for an empty body."""
        return json.loads(self.payload or b"null")


@dataclass
class Machine:
    """The state of one worker. `host` and `port` are the address of its engines."""

    script: Script
    host: str = "127.0.0.1"
    port: int = 20000
    instance: str = ""
    node_id: str = ""
    backends: dict[str, m.InstalledBackend] = field(default_factory=dict)
    engines: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By process key: backend and address."""
    received: deque[Command] = field(default_factory=lambda: deque(maxlen=KEPT))
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._running: dict[Any, asyncio.Task[Any]] = {}
        self._started = 0

    def note(self, verb: str, subject: str, payload: bytes) -> None:
        """Record one message."""
        self.counts[verb] += 1
        self.received.append(Command(self.node_id, verb, subject, payload, clock.monotonic()))

    async def answer(self, verb: str, payload: bytes, send: Send) -> bytes | None:
        """Execute the script; return None for a command without a reply."""
        act = self.script.next(verb)
        kind, execute, failed = _HANDLERS[verb]
        instance = self.instance
        try:
            request = decode(payload, kind)
        except DecodeError as error:
            return encode(failed(error.message))
        reply = await execute(self, request, act, send)
        if act.silent or reply is None or instance != self.instance:
            return None
        return encode(reply) if act.raw is None else act.raw

    def end(self) -> None:
        """End the process: nothing runs or answers any more; installed backends stay."""
        for task in self._running.values():
            task.cancel()
        self._running.clear()
        self.engines.clear()
        self.instance = ""

    async def _install(self, request: m.InstallRequest, act: Act, send: Send) -> m.InstallReply:
        cancelled = m.InstallReply(error="cancelled")
        return await self._joined(request, lambda: self._installed(request, act, send), cancelled)

    async def _upgrade(self, request: m.UpgradeRequest, act: Act, send: Send) -> m.UpgradeReply:
        cancelled = m.UpgradeReply(error="cancelled", reports_stopped_processes=True)
        return await self._joined(request, lambda: self._upgraded(request, act, send), cancelled)

    async def _joined(self, request: Any, run: Callable[[], Awaitable[R]], cancelled: R) -> R:
        name = self._name(request)

        async def alone() -> R:
            async with self._locks.setdefault(name, asyncio.Lock()):
                return await run()

        key = object() if self.script.stock else request
        task: asyncio.Task[R] | None = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(alone())
            task.add_done_callback(lambda _: self._running.pop(key, None))
        await asyncio.wait({task})
        if task.cancelled():
            # By `backend.cancel`, or with the process, which then says nothing.
            return cancelled
        return task.result()

    async def _installed(self, request: m.InstallRequest, act: Act, send: Send) -> m.InstallReply:
        name = self._name(request)
        key = m.process_key(request.model_id or name, request.replica_index)
        running = self.engines.get(key)
        if running and not request.force and not request.install_only:
            return m.InstallReply(True, running[1], gpus=() if self.script.stock else request.gpus)
        if name not in self.backends or request.force:
            if problem := await self._work(request, act, send):
                return m.InstallReply(error=problem)
            self._put(request)
            if (self.script.stock and "@" in request.backend) or not name:
                return m.InstallReply(error=f'backend "{request.backend}" not found after install attempt')
        if request.install_only and not self.script.stock:
            return m.InstallReply(True)
        self._started += 1
        address = f"{self.host}:{self.port + self._started}"
        self.engines[key] = (name, address)
        return m.InstallReply(True, address, gpus=() if self.script.stock else request.gpus)

    async def _upgraded(self, request: m.UpgradeRequest, act: Act, send: Send) -> m.UpgradeReply:
        stopped = self._stop_engines(self._name(request))
        problem = await self._work(request, act, send)
        if not problem:
            self._put(request)
        return m.UpgradeReply(not problem, problem, stopped, True)

    async def _work(self, request: m.InstallRequest | m.UpgradeRequest, act: Act, send: Send) -> str:
        """Spend the script's time and report progress; return the error, "" without one."""
        pause = act.seconds / max(act.ticks, 1)
        events = act.progress(self._name(request), stock=self.script.stock) if request.op_id else iter(())
        for _ in range(max(act.ticks, 1)):
            if event := next(events, None):
                told = replace(event, op_id=request.op_id, node_id=self.node_id, backend=request.backend)
                await send(told)
            await asyncio.sleep(pause)
        return act.refuse

    def _name(self, request: m.InstallRequest | m.UpgradeRequest) -> str:
        """Return the backend of a command; a stock worker uses only `backend`."""
        if self.script.stock:
            return request.backend
        return (request.backend or request.name).rpartition("@")[2]

    def _put(self, request: m.InstallRequest | m.UpgradeRequest) -> None:
        name = (request.name or request.backend).rpartition("@")[2]
        now = clock.now()
        self.backends[name] = m.InstalledBackend(
            name=name,
            installed_at=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            version="" if request.uri else "1.0.0",
            uri=request.uri or f"/srv/gallery/{name}",
            size=0 if self.script.stock else 3 * 2**20,
        )

    def _stop_engines(self, backend: str) -> tuple[str, ...]:
        stopped = tuple(key for key, (name, _) in self.engines.items() if name == backend)
        for key in stopped:
            del self.engines[key]
        return stopped

    async def _cancel(self, request: m.CancelRequest, act: Act, _: Send) -> m.CancelReply:
        await asyncio.sleep(act.seconds)
        if act.refuse:
            return m.CancelReply(error=act.refuse)
        found = [task for key, task in self._running.items() if getattr(key, "op_id", "") == request.op_id]
        for task in found:
            task.cancel()
        return m.CancelReply(True, found=bool(found))

    async def _delete(self, request: m.DeleteRequest, act: Act, _: Send) -> m.DeleteReply:
        await asyncio.sleep(act.seconds)
        stopped = self._stop_engines(request.backend)
        problem = act.refuse
        if not problem and self.backends.pop(request.backend, None) is None:
            problem = f'backend "{request.backend}": backend not found'
        return m.DeleteReply(not problem, problem, stopped, True)

    async def _list(self, _: m.EmptyRequest, act: Act, __: Send) -> m.ListReply:
        await asyncio.sleep(act.seconds)
        found = tuple(self.backends[name] for name in sorted(self.backends))
        return m.ListReply(found, act.refuse, self._instance)

    async def _models(self, _: m.EmptyRequest, act: Act, __: Send) -> m.RunningReply:
        await asyncio.sleep(act.seconds)
        running = []
        for key, (_name, address) in sorted(self.engines.items()):
            if split := m.split_process_key(key):
                running.append(m.RunningModel(*split, address))
        return m.RunningReply(tuple(running), act.refuse, self._instance)

    @property
    def _instance(self) -> str:
        return "" if self.script.stock else self.instance

    async def _unload(self, _: m.UnloadRequest, act: Act, __: Send) -> m.UnloadReply:
        await asyncio.sleep(act.seconds)
        return m.UnloadReply(not act.refuse, act.refuse)

    async def _stop_model(self, request: m.StopModelRequest, act: Act, _: Send) -> m.StopModelReply:
        await asyncio.sleep(act.seconds)
        reply = m.StopModelReply(process_key=request.process_key)
        found = self.engines.get(request.process_key)
        if found is None:
            return replace(reply, terminated=True)
        reply = replace(reply, matched=True, address=found[1])
        if act.refuse or found[1] != request.expected_address:
            wrong = f'recorded "{found[1]}", expected "{request.expected_address}"'
            return replace(reply, error=act.refuse or wrong)
        del self.engines[request.process_key]
        return replace(reply, freed=not request.force, terminated=True)

    async def _delete_model(self, _: m.DeleteModelRequest, act: Act, __: Send) -> m.DeleteModelReply:
        await asyncio.sleep(act.seconds)
        return m.DeleteModelReply(not act.refuse, act.refuse)

    async def _stop(self, request: m.StopBackend, act: Act, _: Send) -> None:
        await asyncio.sleep(act.seconds)
        wanted = request.backend
        for key, (backend, _address) in list(self.engines.items()):
            if not wanted or wanted in (backend, key, key.rpartition("#")[0]):
                del self.engines[key]


_HANDLERS: dict[str, tuple[type[Any], Callable[..., Awaitable[Any]], Callable[[str], Any]]] = {
    "backend.install": (m.InstallRequest, Machine._install, lambda text: m.InstallReply(error=text)),
    "backend.upgrade": (m.UpgradeRequest, Machine._upgrade, lambda text: m.UpgradeReply(error=text)),
    "backend.cancel": (m.CancelRequest, Machine._cancel, lambda text: m.CancelReply(error=text)),
    "backend.delete": (m.DeleteRequest, Machine._delete, lambda text: m.DeleteReply(error=text)),
    "backend.list": (m.EmptyRequest, Machine._list, lambda text: m.ListReply(error=text)),
    "models.running": (m.RunningRequest, Machine._models, lambda text: m.RunningReply(error=text)),
    "model.unload": (m.UnloadRequest, Machine._unload, lambda text: m.UnloadReply(error=text)),
    "model.stop": (m.StopModelRequest, Machine._stop_model, lambda text: m.StopModelReply(error=text)),
    "model.delete": (
        m.DeleteModelRequest,
        Machine._delete_model,
        lambda text: m.DeleteModelReply(error=text),
    ),
    "backend.stop": (m.StopBackend, Machine._stop, lambda text: None),
}
