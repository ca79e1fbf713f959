"""Install and upgrade: the two long commands, run as tasks (worker.md §8.1, §8.2).

A command may arrive twice; the second one joins the first while that runs. Commands for one backend run one
at a time. A cancel ends a command in any step: waiting, downloading, unpacking or starting the engine
(`cancellation.py`).
"""

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localai_cluster.gallery_index import default_backend_name
from localai_cluster.kit import clock, failpoints
from localai_cluster.kit.errors import ClusterError, Conflict, InvalidInput
from localai_cluster.messaging.messages import (
    Gallery,
    InstallReply,
    InstallRequest,
    UpgradeReply,
    UpgradeRequest,
    decode_galleries,
    process_key,
)
from localai_cluster.worker.backend_store import (
    BackendStore,
    folder_name,
    model_name,
    printable,
    strip_gallery,
)
from localai_cluster.worker.cancellation import Command
from localai_cluster.worker.config import Config
from localai_cluster.worker.engines import Engine, EngineSupervisor, StartInterrupted, StopFailed
from localai_cluster.worker.installer import Installer, InstallFailed, InstallSource
from localai_cluster.worker.progress import ProgressStream, ReportTick, Tick, ignore_tick
from localai_cluster.worker.source_files import WorkCancelled

log = logging.getLogger(__name__)

CANCEL_TIMEOUT = 4.0
"""Seconds within which a cancelled command must end; a controller waits 5 s for the reply."""
_CANCEL_POLL_SECONDS = 0.25

OpenProgress = Callable[[str, str], ProgressStream]
"""Opens the progress stream for the id of an operation and the name of a backend."""


@dataclass(eq=False, repr=False)
class InstallCommands:
    """Runs installs and upgrades, at most one per backend at a time."""

    config: Config
    store: BackendStore
    installer: Installer
    supervisor: EngineSupervisor
    progress: OpenProgress
    gpus_known: Callable[[Sequence[str]], bool]
    _is_shutting_down: bool = field(default=False, init=False)
    _running: dict[Any, Command] = field(default_factory=dict, init=False)
    _stops: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _locks: weakref.WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=weakref.WeakValueDictionary, init=False
    )

    async def install(self, request: InstallRequest) -> InstallReply:
        """Run `backend.install`; return errors in the reply.

        Raise Conflict or WorkCancelled if the worker shuts down.
        """
        reply: InstallReply = await self._run_or_join(
            request, lambda command: self._install(request, command)
        )
        return reply

    async def upgrade(self, request: UpgradeRequest) -> UpgradeReply:
        """Run `backend.upgrade`; return errors in the reply.

        Raise Conflict or WorkCancelled if the worker shuts down.
        """
        reply: UpgradeReply = await self._run_or_join(
            request, lambda command: self._upgrade(request, command)
        )
        return reply

    async def cancel(self, op_id: str) -> bool:
        """Run `backend.cancel`: end the commands of this operation; return True if one was ended.

        Return False also if the files were already in place: the command then succeeds. Raise Conflict if a
        command has not ended in time; it will end later.
        """
        commands = [command for command in self._running.values() if op_id and command.op_id == op_id]
        results = await asyncio.gather(*(self._cancel_command(command) for command in commands))
        return any(results)

    async def _cancel_command(self, command: Command) -> bool:
        log.info("op=%s cancelled", printable(command.op_id))
        command.cancel()
        task, deadline = command.task, clock.monotonic() + CANCEL_TIMEOUT
        assert task is not None
        while not task.done():
            if clock.monotonic() > deadline:
                raise Conflict("the engine of the cancelled command is still being stopped")
            engine = self.supervisor.get(command.key)
            if engine is not None and not engine.stopping:
                stop = asyncio.create_task(self.supervisor.stop(command.key, force=True))
                self._stops.add(stop)
                stop.add_done_callback(self._stops.discard)
            await asyncio.wait({task}, timeout=_CANCEL_POLL_SECONDS)
        return not task.cancelled() and task.exception() is None and not task.result().success

    async def cancel_all(self) -> None:
        """End all running commands. Raise Conflict if a command has not ended in time."""
        await asyncio.gather(*(self._cancel_command(command) for command in list(self._running.values())))

    def refuse_new(self) -> None:
        """Refuse new installs and upgrades from now on, because the worker is shutting down."""
        self._is_shutting_down = True

    async def close(self) -> None:
        """Cancel the running commands."""
        commands = list(self._running.values())
        for command in commands:
            command.halt.set()
        self.installer.close()
        tasks = [command.task for command in commands if command.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_or_join(self, request: Any, run: Callable[[Command], Coroutine[Any, Any, Any]]) -> Any:
        if self._is_shutting_down:
            raise Conflict("the worker is shutting down")
        command = self._running.get(request)
        if command is None:
            command = self._running[request] = Command(request.op_id)
            task = asyncio.create_task(
                self._run_and_log(request, run(command)), name=f"command {request.backend}"
            )
            task.add_done_callback(lambda _: self._running.pop(request, None))
            command.task = task
        else:
            log.info(
                "op=%s backend=%s joins the running command",
                printable(request.op_id),
                printable(request.backend),
            )
        assert command.task is not None
        try:
            return await asyncio.shield(command.task)
        except asyncio.CancelledError:
            if command.task.cancelled():
                raise WorkCancelled("the worker is shutting down") from None
            raise

    async def _run_and_log(self, request: Any, work: Coroutine[Any, Any, Any]) -> Any:
        label = _command_label(request)
        operation, backend = printable(request.op_id), printable(request.backend or request.uri)
        log.info("op=%s backend=%s %s started", operation, backend, label)
        reply = await work
        outcome = "done" if reply.success else f"failed: {reply.error}"
        log.info("op=%s backend=%s %s %s", operation, backend, label, outcome)
        failpoints.passed("worker.command:done")
        return reply

    async def _install(self, request: InstallRequest, command: Command) -> InstallReply:
        stream = self.progress(request.op_id, request.backend) if request.op_id else None
        try:
            with command.interruptible():
                return await self._ensure_installed(
                    request, command, stream.report if stream else ignore_tick
                )
        except WorkCancelled:
            raise
        except (ClusterError, OSError) as error:
            return InstallReply(
                False, error=_error_text(error), interrupted=isinstance(error, StartInterrupted)
            )
        finally:
            if stream is not None:
                await stream.finish()

    async def _ensure_installed(
        self, request: InstallRequest, command: Command, report: ReportTick
    ) -> InstallReply:
        name = requested_name(request)
        key = process_key(model_name(request.model_id) or name, _valid_replica_index(request.replica_index))
        if not self.gpus_known(request.gpus):
            raise InvalidInput(f"this node has no such GPUs: {_format_first_ids(request.gpus)}", field="gpus")
        async with self._lock_name_and_folder(name):
            if request.force:
                keys = await self._running_keys(name)
                with command.uninterruptible():
                    await self.supervisor.ensure_stopped([*keys, key], force=True)
            elif not request.install_only and (
                engine := await self._reuse_or_stop_engine(key, name, command, request.gpus)
            ):
                return self._success_reply(engine)
            start_file = await self._ensure_start_file(request, name, command, report)
            if request.install_only:
                return InstallReply(True)
            report(Tick("starting"))
            # Another name of the same backend has its own lock, but may use the same key.
            async with self._lock_of(f"\0{key}"):  # no backend name contains a NUL
                engine = await self._reuse_or_stop_engine(key, name, command, request.gpus)
                if engine is None:
                    entry = await asyncio.to_thread(self.store.find, name)
                    backend = entry.name if entry else name
                    engine = await self._start_engine(command, key, backend, start_file, request.gpus)
                return self._success_reply(engine)

    async def _start_engine(
        self, command: Command, key: str, backend: str, start_file: Path, gpus: tuple[str, ...]
    ) -> Engine:
        with command.uninterruptible(key):
            engine = await self.supervisor.start(key, backend, start_file, gpus)
            if command.halt.cancelled:
                await self.supervisor.stop(key, force=True)
        return engine

    async def _reuse_or_stop_engine(
        self, key: str, name: str, command: Command, gpus: tuple[str, ...]
    ) -> Engine | None:
        """Return the ready engine under `key` if it can serve the backend `name`.

        Otherwise stop the engine and return None. If `gpus` are given, the engine must use exactly these
        GPUs. Raise StopFailed.
        """
        engine = self.supervisor.get(key)
        if engine is None:
            return None
        if engine.stopping or not engine.alive:
            await engine.wait_ended()
            return None
        names = await asyncio.to_thread(self.store.identity, name)
        has_other_gpus = bool(gpus) and engine.gpus != gpus
        if engine.backend not in names or has_other_gpus or not engine.same_folder():
            with command.uninterruptible():
                await self.supervisor.ensure_stopped([key], force=False)
            return None
        return engine if await engine.wait_started() else None

    async def _ensure_start_file(
        self, request: InstallRequest, name: str, command: Command, report: ReportTick
    ) -> Path:
        start_file = await asyncio.to_thread(self.store.start_file, name)
        if start_file is not None and not request.force:
            return start_file
        installed = await self.installer.install(self._install_source(request, name), report, command.halt)
        for candidate in (name, installed):
            start_file = await asyncio.to_thread(self.store.start_file, candidate)
            if start_file is not None:
                return start_file
        raise InstallFailed(f'backend "{name}" not found after install attempt')

    async def _upgrade(self, request: UpgradeRequest, command: Command) -> UpgradeReply:
        stream = self.progress(request.op_id, request.backend) if request.op_id else None
        stopped: list[str] = []
        try:
            name = requested_name(request)
            with command.interruptible():
                async with self._lock_name_and_folder(name):
                    keys = [
                        *await self._running_keys(name),
                        process_key(name, _valid_replica_index(request.replica_index)),
                    ]
                    with command.uninterruptible():
                        stopped += await self.supervisor.ensure_stopped(keys, force=True)
                    source = self._install_source(request, name)
                    report = stream.report if stream else ignore_tick
                    await self.installer.install(source, report, command.halt)
            return stopped_engines_reply(stopped)
        except WorkCancelled:
            raise
        except (ClusterError, OSError) as error:
            return stopped_engines_reply(stopped, error)
        finally:
            if stream is not None:
                await stream.finish()

    async def _running_keys(self, name: str) -> list[str]:
        return self.supervisor.of_backend(await asyncio.to_thread(self.store.identity, name))

    def _install_source(self, request: InstallRequest | UpgradeRequest, name: str) -> InstallSource:
        galleries: tuple[Gallery, ...] = self.config.backend_galleries
        if request.backend_galleries:
            galleries = decode_galleries(request.backend_galleries)
        if request.uri:
            return InstallSource(strip_gallery(request.name) or name, galleries, request.uri, request.alias)
        return InstallSource(request.backend or request.name, galleries)

    def _success_reply(self, engine: Engine) -> InstallReply:
        return InstallReply(True, address=f"{self.config.advertise_host}:{engine.port}", gpus=engine.gpus)

    @contextlib.asynccontextmanager
    async def _lock_name_and_folder(self, name: str) -> AsyncIterator[None]:
        """Hold the locks of the name and of its build's folder, one command at a time for each.

        The folder's lock is always taken last and is no other build's name, so commands cannot deadlock.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._lock_of(name))
            start_file = await asyncio.to_thread(self.store.start_file, name)
            build = start_file.parent.name if start_file else folder_name(name)
            if build.lower() != name.lower():
                await stack.enter_async_context(self._lock_of(build))
            yield

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name.lower(), asyncio.Lock())


def _command_label(request: InstallRequest | UpgradeRequest) -> str:
    if isinstance(request, UpgradeRequest):
        return "upgrade"
    return "install" if request.install_only else f"load of {printable(request.model_id or request.backend)}"


def requested_name(request: InstallRequest | UpgradeRequest) -> str:
    """Return the name of a command's backend: `backend`, `name`, or the last part of `uri`.

    Raise InvalidInput.
    """
    name = strip_gallery(request.backend) or strip_gallery(request.name)
    if not name:
        name = default_backend_name(request.uri)
    folder_name(name)
    return name


def stopped_engines_reply(keys: list[str], error: Exception | None = None) -> UpgradeReply:
    """Return the reply to upgrade and delete, with the keys of the stopped processes.

    The reply is a success unless there is an error.
    """
    stopped = [*keys, *(error.data.get("stopped", ()) if isinstance(error, StopFailed) else ())]
    return UpgradeReply(
        success=error is None,
        error=_error_text(error) if error else "",
        stopped_process_keys=tuple(dict.fromkeys(stopped)),
        reports_stopped_processes=True,
    )


def _valid_replica_index(index: int) -> int:
    if not 0 <= index < 2**31:
        raise InvalidInput(f"not a replica index: {index}", field="replica_index")
    return index


def _format_first_ids(ids: Sequence[str]) -> str:
    """Format the first ids for an error message; they are untrusted."""
    return printable(", ".join(ids[:8]))[:200]


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, ClusterError) else str(error)
