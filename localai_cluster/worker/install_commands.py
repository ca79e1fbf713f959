"""Install and upgrade: the two long commands, run as tasks, possibly sent twice (worker.md §8.1, §8.2).

Commands for one backend run one at a time. A command that is sent again while it runs joins the running one.
"""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from localai_cluster.errors import ClusterError, InvalidInput
from localai_cluster.messaging.codec import decode_galleries
from localai_cluster.messaging.messages import (
    Gallery,
    InstallReply,
    InstallRequest,
    UpgradeReply,
    UpgradeRequest,
    process_key,
)
from localai_cluster.worker.backend_store import BackendStore
from localai_cluster.worker.config import Config
from localai_cluster.worker.engines import Engine, EngineSupervisor, StartInterrupted, StopFailed
from localai_cluster.worker.file_copy import Stopped
from localai_cluster.worker.installer import Installer, InstallFailed, InstallSource
from localai_cluster.worker.names import folder_name, model_name, printable, strip_gallery
from localai_cluster.worker.progress import ProgressStream, Report, Tick, ignore

log = logging.getLogger(__name__)

OpenProgress = Callable[[str, str], ProgressStream]
"""Opens the progress stream of an operation (its id) for a backend."""


class InstallCommands:
    """Runs installs and upgrades."""

    def __init__(
        self,
        config: Config,
        store: BackendStore,
        installer: Installer,
        supervisor: EngineSupervisor,
        progress: OpenProgress,
    ) -> None:
        self._config = config
        self._store = store
        self._installer = installer
        self._supervisor = supervisor
        self._progress = progress
        self._running: dict[Any, asyncio.Task[Any]] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def install(self, request: InstallRequest) -> InstallReply:
        """`backend.install`; the reply carries errors. Stopped if the worker shuts down first."""
        reply: InstallReply = await self._joined(request, lambda: self._install(request))
        return reply

    async def upgrade(self, request: UpgradeRequest) -> UpgradeReply:
        """`backend.upgrade`; the reply carries errors. Stopped if the worker shuts down first."""
        reply: UpgradeReply = await self._joined(request, lambda: self._upgrade(request))
        return reply

    async def close(self) -> None:
        """Cancels what is running."""
        self._installer.close()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _joined(self, request: Any, run: Callable[[], Awaitable[Any]]) -> Any:
        task = self._running.get(request)
        if task is None:
            task = asyncio.create_task(self._logged(request, run), name=f"command {request.backend}")
            self._running[request] = task
            task.add_done_callback(lambda _: self._running.pop(request, None))
        else:
            log.info(
                "op=%s backend=%s joins the running command",
                printable(request.op_id),
                printable(request.backend),
            )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Stopped("the worker is shutting down") from None
            raise

    async def _logged(self, request: Any, run: Callable[[], Awaitable[Any]]) -> Any:
        what = _what(request)
        operation, backend = printable(request.op_id), printable(request.backend or request.uri)
        log.info("op=%s backend=%s %s started", operation, backend, what)
        reply = await run()
        outcome = "done" if reply.success else f"failed: {reply.error}"
        log.info("op=%s backend=%s %s %s", operation, backend, what, outcome)
        return reply

    async def _install(self, request: InstallRequest) -> InstallReply:
        stream = self._progress(request.op_id, request.backend) if request.op_id else None
        try:
            return await self._ensure(request, stream.report if stream else ignore)
        except Stopped:
            raise
        except (ClusterError, OSError) as error:
            return InstallReply(False, error=_text(error), interrupted=isinstance(error, StartInterrupted))
        finally:
            if stream is not None:
                await stream.finish()

    async def _ensure(self, request: InstallRequest, report: Report) -> InstallReply:
        name = requested_name(request)
        key = process_key(model_name(request.model_id) or name, _slot(request.replica_index))
        async with self._lock(name):
            if request.force:
                keys = await self._keys(name)
                await self._supervisor.ensure_stopped([*keys, key], force=True)
            elif not request.install_only and (engine := await self._current(key, name)):
                return self._address(engine)
            start_file = await self._files(request, name, report)
            if request.install_only:
                return InstallReply(True)
            report(Tick("starting"))
            # Another name of the same backend has its own lock, but may use the same key.
            async with self._lock(f"#{key}"):
                engine = await self._current(key, name)
                if engine is None:
                    entry = await asyncio.to_thread(self._store.find, name)
                    engine = await self._supervisor.start(key, entry.name if entry else name, start_file)
                return self._address(engine)

    async def _current(self, key: str, name: str) -> Engine | None:
        """The ready engine under `key` if it can serve `name`; any other engine there is stopped."""
        engine = self._supervisor.get(key)
        if engine is None:
            return None
        if engine.stopping or not engine.alive:
            await engine.gone.wait()
            return None
        names = await asyncio.to_thread(self._store.identity, name)
        if engine.backend not in names or not engine.same_folder():
            await self._supervisor.ensure_stopped([key], force=False)
            return None
        return engine if await engine.settled() else None

    async def _files(self, request: InstallRequest, name: str, report: Report) -> Path:
        start_file = await asyncio.to_thread(self._store.start_file, name)
        if start_file is not None and not request.force:
            return start_file
        installed = await self._installer.install(self._source(request, name), report)
        for known in (name, installed):
            start_file = await asyncio.to_thread(self._store.start_file, known)
            if start_file is not None:
                return start_file
        raise InstallFailed(f'backend "{name}" not found after install attempt')

    async def _upgrade(self, request: UpgradeRequest) -> UpgradeReply:
        stream = self._progress(request.op_id, request.backend) if request.op_id else None
        stopped: list[str] = []
        try:
            name = requested_name(request)
            async with self._lock(name):
                keys = [*await self._keys(name), process_key(name, _slot(request.replica_index))]
                stopped += await self._supervisor.ensure_stopped(keys, force=True)
                source = self._source(request, name)
                await self._installer.install(source, stream.report if stream else ignore)
            return report_stopped(stopped)
        except Stopped:
            raise
        except (ClusterError, OSError) as error:
            return report_stopped(stopped, error)
        finally:
            if stream is not None:
                await stream.finish()

    async def _keys(self, name: str) -> list[str]:
        return self._supervisor.of_backend(await asyncio.to_thread(self._store.identity, name))

    def _source(self, request: InstallRequest | UpgradeRequest, name: str) -> InstallSource:
        galleries: tuple[Gallery, ...] = self._config.galleries
        if request.backend_galleries:
            galleries = decode_galleries(request.backend_galleries)
        if request.uri:
            return InstallSource(strip_gallery(request.name) or name, galleries, request.uri, request.alias)
        return InstallSource(request.backend or request.name, galleries)

    def _address(self, engine: Engine) -> InstallReply:
        return InstallReply(True, address=f"{self._config.advertise_host}:{engine.port}")

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name.lower(), asyncio.Lock())


def _what(request: InstallRequest | UpgradeRequest) -> str:
    if isinstance(request, UpgradeRequest):
        return "upgrade"
    return "install" if request.install_only else f"load of {printable(request.model_id or request.backend)}"


def requested_name(request: InstallRequest | UpgradeRequest) -> str:
    """The backend that a command names: by `backend`, `name`, or the last part of `uri`. InvalidInput."""
    name = strip_gallery(request.backend) or strip_gallery(request.name)
    name = name or request.uri.rstrip("/").rpartition("/")[2]
    folder_name(name)
    return name


def report_stopped(keys: list[str], error: Exception | None = None) -> UpgradeReply:
    """The reply to upgrade and delete: success unless there is an error, and the stopped processes."""
    known = [*keys, *(error.data.get("stopped", ()) if isinstance(error, StopFailed) else ())]
    return UpgradeReply(
        success=error is None,
        error=_text(error) if error else "",
        stopped_process_keys=tuple(dict.fromkeys(known)),
        reports_stopped_processes=True,
    )


def _slot(index: int) -> int:
    if not 0 <= index < 2**31:
        raise InvalidInput(f"not a replica index: {index}", field="replica_index")
    return index


def _text(error: Exception) -> str:
    return error.message if isinstance(error, ClusterError) else str(error)
