"""The eleven subjects a worker subscribes to, and the handling of each message (nats.md §3, §4).

Installs, upgrades and their cancels run concurrently; every other subject handles one message at a time. A
request that cannot be decoded gets an error reply; a publish that cannot be decoded is ignored. A command
that changes files is not begun if it may have been sent before a pause of this process (`Pauses`).
"""

import asyncio
import contextlib
import logging
import math
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localai_cluster.kit import cancellation, clock, failpoints
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Bus, Handler, Message, Subscription
from localai_cluster.messaging.messages import DecodeError, decode, encode
from localai_cluster.metrics import worker as metrics
from localai_cluster.worker.backend_store import BackendStore, strip_gallery
from localai_cluster.worker.config import Config
from localai_cluster.worker.engines import Engine, EngineSupervisor
from localai_cluster.worker.hardware import GpuReader, process_memory
from localai_cluster.worker.install_commands import InstallCommands, stopped_engines_reply
from localai_cluster.worker.source_files import WorkCancelled

log = logging.getLogger(__name__)

PAUSE_THRESHOLD_SECONDS = 15.0
"""Seconds without a tick after which the process counts as paused, not only as slow.

No sender gives up within this time.
"""
CATCH_UP_SECONDS = 5.0
"""Seconds after a pause within which the process has received all messages from before its end."""
_TICK_SECONDS = 1.0

LATE_COMMAND_ERROR = "the worker was stopped for a while and has not begun this"


class Pauses:
    """Detects pauses of this process (stopped or asleep) by a periodic tick that comes late.

    The worker does not begin a command that may have been sent before the end of a pause. Its sender may have
    given the command up, because the node counted as offline; a sender that still needs the command sends it
    again. A time in the command would not help, because clocks of different machines are not comparable. A
    pause that the machine's own clocks do not show, such as that of a virtual machine, is not detected.
    """

    def __init__(self) -> None:
        self._ticked_at = clock.since_boot()
        self._over_at = -math.inf

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Run the ticks while the context is active."""
        self._ticked_at = clock.since_boot()
        task = asyncio.create_task(self._tick_forever(), name="pauses")
        try:
            yield
        finally:
            await cancellation.cancel_and_wait(task)

    async def _tick_forever(self) -> None:
        while True:
            self.tick(clock.since_boot())
            await asyncio.sleep(_TICK_SECONDS)

    def tick(self, now: float) -> None:
        """Record that this process runs at `now`."""
        paused, self._ticked_at = now - self._ticked_at, now
        if paused > PAUSE_THRESHOLD_SECONDS:
            self._over_at = now
            log.warning("this process did not run for %.0f s; commands from before are not begun", paused)

    def may_precede(self, arrived_at: float) -> bool:
        """Return True if a message that arrived at this time may be older than the end of the last pause."""
        is_tick_overdue = (
            arrived_at - self._ticked_at > PAUSE_THRESHOLD_SECONDS
        )  # the first tick has not come yet
        return is_tick_overdue or arrived_at <= self._over_at + CATCH_UP_SECONDS


MAX_CONCURRENT_MESSAGES = 64
_CONCURRENT_COMMANDS = ("backend.install", "backend.upgrade", "backend.cancel")


_LISTED_METADATA = ("installed_at", "gallery_url", "version", "uri", "digest", "alias", "size")


@dataclass(eq=False, repr=False)
class Commands:
    """Handles the controllers' commands for one node id at a time."""

    config: Config
    bus: Bus
    store: BackendStore
    supervisor: EngineSupervisor
    installs: InstallCommands
    instance: str
    pauses: Pauses
    stop_worker: Callable[[], None]
    gpus: GpuReader
    _subscriptions: list[Subscription] = field(default_factory=list, init=False)

    async def subscribe(self, node_id: str) -> None:
        """Subscribe to the commands for `node_id`; end all other subscriptions."""
        await self.unsubscribe()
        subscriptions = self._subscriptions
        for subject, handler, limit in self._list_handlers(node_id):
            handler = self._drop_after_unsubscribe(handler, subscriptions)
            subscriptions.append(await self.bus.subscribe(subject, handler, limit=limit))

    async def unsubscribe(self) -> None:
        """End all subscriptions: another process is the node now, or the worker serves another server.

        Messages that were received but not begun are dropped.
        """
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.close()

    @property
    def subscribed(self) -> bool:
        """True if this worker receives commands."""
        return bool(self._subscriptions)

    def _list_handlers(self, node_id: str) -> list[tuple[str, Handler, int]]:
        acts: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "backend.install": self.installs.install,
            "backend.upgrade": self.installs.upgrade,
            "backend.cancel": self._cancel,
            "backend.delete": self._delete,
            "backend.list": self._list,
            "models.running": self._running,
            "model.unload": self._unload,
            "model.stop": self._stop_model,
            "model.delete": self._delete_model,
        }
        handlers = {command: self._create_handler(command, act) for command, act in acts.items()}
        for command in ("backend.install", "backend.upgrade", "backend.delete"):
            reply: Any = m.COMMANDS[command][1]
            late = encode(reply(error=LATE_COMMAND_ERROR, interrupted=True))
            handlers[command] = self._refuse_late_messages(handlers[command], late)
        # Without a reply: the controller repeats it until it gets one.
        handlers["model.delete"] = self._refuse_late_messages(handlers["model.delete"], None)
        handlers |= {"backend.stop": self._stop_backend, "stop": self._stop_node}
        return [
            (
                messages.subject(command, node_id),
                handlers[command],
                MAX_CONCURRENT_MESSAGES if command in _CONCURRENT_COMMANDS else 1,
            )
            for command in m.COMMANDS
        ]

    def _create_handler(self, command: str, act: Callable[[Any], Awaitable[Any]]) -> Handler:
        kind, reply_kind = m.COMMANDS[command]
        assert reply_kind is not None

        def failed(text: str) -> bytes:
            return encode(reply_kind(error=text))

        async def handle(message: Message) -> bytes | None:
            started_at, outcome = clock.monotonic(), "failed"
            try:
                request = kind() if kind is m.EmptyRequest else decode(message.payload, kind)
                reply = await act(request)
                outcome = "refused" if getattr(reply, "error", "") else "ok"
                return encode(reply)
            except WorkCancelled:
                # No reply: the controller notices that this worker is gone and retries instead of failing.
                return None
            except (ClusterError, OSError) as error:
                log.warning("%s: %s", message.subject, error)
                return failed(error.message if isinstance(error, ClusterError) else str(error))
            except Exception as error:
                log.exception("%s failed", message.subject)
                return failed(f"internal worker error: {type(error).__name__}")
            finally:
                metrics.command_ended(command, outcome, clock.monotonic() - started_at)

        return handle

    def _refuse_late_messages(self, handler: Handler, late: bytes | None) -> Handler:
        """Wrap a handler: reply `late` to a message that may have been sent before the last pause ended."""

        async def handle(message: Message) -> bytes | None:
            if not self.pauses.may_precede(message.arrived_at):
                return await handler(message)
            log.warning("%s: not begun, since it may have been sent before a pause", message.subject)
            return late

        return handle

    def _drop_after_unsubscribe(self, handler: Handler, subscriptions: list[Subscription]) -> Handler:
        """Wrap a handler: drop messages of subscriptions that have ended."""

        async def handle(message: Message) -> bytes | None:
            if self._subscriptions is subscriptions:
                return await handler(message)
            log.warning("%s: not begun, since this worker serves the node no longer", message.subject)
            return None

        return handle

    async def _cancel(self, request: m.CancelRequest) -> m.CancelReply:
        return m.CancelReply(True, found=await self.installs.cancel(request.op_id))

    async def _delete(self, request: m.DeleteRequest) -> m.UpgradeReply:
        name = strip_gallery(request.backend)
        names = await asyncio.to_thread(self.store.identity, name)
        stopped: list[str] = []
        try:
            stopped += await self.supervisor.ensure_stopped(self.supervisor.of_backend(names), force=False)
            failpoints.passed("worker.delete:stopped")
            await asyncio.to_thread(self.store.remove, name)
            failpoints.passed("worker.delete:removed")
            # An install that waited may have started an engine from these files meanwhile.
            engines = self.supervisor.engines()
            late_keys = [
                engine.key for engine in engines if engine.backend in names and not engine.same_folder()
            ]
            stopped += await self.supervisor.ensure_stopped(late_keys, force=True)
        except (ClusterError, OSError) as error:
            return stopped_engines_reply(stopped, error)
        return stopped_engines_reply(stopped)

    async def _list(self, _: m.EmptyRequest) -> m.ListReply:
        entries = await asyncio.to_thread(self.store.scan)
        return m.ListReply(
            backends=tuple(
                m.InstalledBackend(
                    entry.name,
                    entry.is_system,
                    entry.is_meta,
                    **{name: getattr(entry.metadata, name) for name in _LISTED_METADATA},
                )
                for _, entry in sorted(entries.items())
                if not entry.is_alias
            ),
            instance=self.instance,
        )

    async def _running(self, request: m.RunningRequest) -> m.RunningReply:
        measured, alive = self.supervisor.get(request.measure), []
        memory = await process_memory(measured.process.pid, self.gpus) if measured is not None else (0, 0)
        for engine in self.supervisor.running():
            key = m.split_process_key(engine.key)
            if key is not None:
                figures = memory if engine is measured else (0, 0)
                alive.append(m.RunningModel(*key, engine.address, *figures))
        return m.RunningReply(tuple(alive), instance=self.instance)

    async def _unload(self, request: m.UnloadRequest) -> m.UnloadReply:
        keys = self.supervisor.of_model(request.model_name)
        engines = [engine for key in keys if (engine := self.supervisor.get(key))]
        if request.address:
            engines = [e for e in self.supervisor.engines() if self._has_address(e, request.address)]
        problems = [problem for engine in engines if (problem := await self.supervisor.unload(engine))]
        return m.UnloadReply(not problems, "; ".join(problems))

    async def _stop_model(self, request: m.StopModelRequest) -> m.StopModelReply:
        engine = self.supervisor.get(request.process_key)
        if engine is None:
            return m.StopModelReply(terminated=True, process_key=request.process_key)
        if not self._has_address(engine, request.expected_address):
            mismatch = f'recorded "{engine.address}", expected "{request.expected_address}"'
            return m.StopModelReply(
                matched=True, process_key=engine.key, address=engine.address, error=mismatch
            )
        return await self.supervisor.stop(request.process_key, force=request.force)

    def _has_address(self, engine: Engine, address: str) -> bool:
        """Return True if `address` is the engine's local or advertised address (nats.md §4.5)."""
        return address in (engine.address, f"{self.config.advertise_host}:{engine.port}")

    async def _delete_model(self, request: m.DeleteModelRequest) -> m.DeleteModelReply:
        await asyncio.to_thread(delete_model, self.config.models_path, request.model_name)
        return m.DeleteModelReply(True)

    async def _stop_backend(self, message: Message) -> None:
        try:
            request = decode(message.payload, m.StopBackend)
        except DecodeError as error:
            log.warning("%s ignored: %s", message.subject, error)
            return
        keys = [engine.key for engine in self.supervisor.engines()]
        if request.backend:
            names = await asyncio.to_thread(self.store.identity, strip_gallery(request.backend))
            keys = [*self.supervisor.of_backend(names), *self.supervisor.of_model(request.backend)]
        log.info("stop target=%r force=%s keys=%s", request.backend, request.force, keys)
        stops = (self.supervisor.stop(key, force=request.force) for key in dict.fromkeys(keys))
        for outcome in await asyncio.gather(*stops):
            if outcome.error:
                log.warning("stop: %s", outcome.error)

    async def _stop_node(self, _: Message) -> None:
        log.info("stop requested by the control plane")
        self.stop_worker()


def delete_model(models: Path, name: str) -> None:
    """Remove the folder `<models>/<name>`, or the file of that path and the files `<models>/<name>.*`.

    Raise InvalidInput for a name that points outside the folder.
    """
    target = Path(os.path.normpath(models / name)) if name and "\0" not in name else models
    is_inside = target != models and target.is_relative_to(models)
    if not is_inside or not target.parent.resolve().is_relative_to(models.resolve()):
        raise InvalidInput(f"not a model name: {name[:80]!r}", field="model_name")
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
        return
    if target.parent.is_dir():
        for path in list(target.parent.iterdir()):
            if path == target or (path.name.startswith(target.name + ".") and not path.is_dir()):
                path.unlink(missing_ok=True)
