"""Install and upgrade: the two commands that take long, run as tasks, and may be sent twice (worker.md
§8.1, §8.2).

Commands on one backend name run one after another; a command that is sent again while it runs joins it.
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
from localai_cluster.worker.config import Config
from localai_cluster.worker.copying import Stopped
from localai_cluster.worker.install import Installer, InstallFailed, Wanted
from localai_cluster.worker.listing import Shelf
from localai_cluster.worker.names import folder_name, model_name, shown, strip_gallery
from localai_cluster.worker.processes import Engine, StartInterrupted, StopFailed, Supervisor
from localai_cluster.worker.progress import Progress, Report, Tick, ignore

log = logging.getLogger(__name__)

Open = Callable[[str, str], Progress]
"""Opens the progress stream of an operation id for a backend."""


class Installs:
    """Carries installs and upgrades out."""

    def __init__(
        self, config: Config, shelf: Shelf, installer: Installer, supervisor: Supervisor, progress: Open
    ) -> None:
        self._config = config
        self._shelf = shelf
        self._installer = installer
        self._supervisor = supervisor
        self._progress = progress
        self._running: dict[Any, asyncio.Task[Any]] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def install(self, request: InstallRequest) -> InstallReply:
        """`backend.install`; errors are told in the reply. Stopped when the worker shuts down meanwhile."""
        reply: InstallReply = await self._joined(request, lambda: self._install(request))
        return reply

    async def upgrade(self, request: UpgradeRequest) -> UpgradeReply:
        """`backend.upgrade`; errors are told in the reply. Stopped when the worker shuts down meanwhile."""
        reply: UpgradeReply = await self._joined(request, lambda: self._upgrade(request))
        return reply

    async def close(self) -> None:
        """Gives up what is under way."""
        self._installer.close()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _joined(self, request: Any, carry_out: Callable[[], Awaitable[Any]]) -> Any:
        task = self._running.get(request)
        if task is None:
            task = asyncio.create_task(self._logged(request, carry_out), name=f"command {request.backend}")
            self._running[request] = task
            task.add_done_callback(lambda _: self._running.pop(request, None))
        else:
            log.info("op=%s backend=%s joined", shown(request.op_id), shown(request.backend))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Stopped("the worker is shutting down") from None
            raise

    async def _logged(self, request: Any, carry_out: Callable[[], Awaitable[Any]]) -> Any:
        what = _what(request)
        operation, backend = shown(request.op_id), shown(request.backend or request.uri)
        log.info("op=%s backend=%s %s begins", operation, backend, what)
        reply = await carry_out()
        outcome = "done" if reply.success else f"failed: {reply.error}"
        log.info("op=%s backend=%s %s %s", operation, backend, what, outcome)
        return reply

    async def _install(self, request: InstallRequest) -> InstallReply:
        stream = self._progress(request.op_id, request.backend) if request.op_id else None
        try:
            return await self._have(request, stream.report if stream else ignore)
        except Stopped:
            raise
        except (ClusterError, OSError) as error:
            return InstallReply(False, error=_text(error), interrupted=isinstance(error, StartInterrupted))
        finally:
            if stream is not None:
                await stream.finish()

    async def _have(self, request: InstallRequest, report: Report) -> InstallReply:
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
            # Another name of the same backend has another lock, but the key may be the same.
            async with self._lock(f"#{key}"):
                engine = await self._current(key, name)
                if engine is None:
                    entry = await asyncio.to_thread(self._shelf.find, name)
                    engine = await self._supervisor.start(key, entry.name if entry else name, start_file)
                return self._address(engine)

    async def _current(self, key: str, name: str) -> Engine | None:
        """The ready engine under `key` if it may serve `name`; one that may not is stopped first."""
        engine = self._supervisor.get(key)
        if engine is None:
            return None
        if engine.stopping or not engine.alive:
            await engine.gone.wait()
            return None
        names = await asyncio.to_thread(self._shelf.identity, name)
        if engine.backend not in names or not engine.same_folder():
            await self._supervisor.ensure_stopped([key], force=False)
            return None
        return engine if await engine.settled() else None

    async def _files(self, request: InstallRequest, name: str, report: Report) -> Path:
        start_file = await asyncio.to_thread(self._shelf.start_file, name)
        if start_file is not None and not request.force:
            return start_file
        installed = await self._installer.install(self._wanted(request, name), report)
        for known in (name, installed):
            start_file = await asyncio.to_thread(self._shelf.start_file, known)
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
                wanted = self._wanted(request, name)
                await self._installer.install(wanted, stream.report if stream else ignore)
            return report_stopped(stopped)
        except Stopped:
            raise
        except (ClusterError, OSError) as error:
            return report_stopped(stopped, error)
        finally:
            if stream is not None:
                await stream.finish()

    async def _keys(self, name: str) -> list[str]:
        return self._supervisor.of_backend(await asyncio.to_thread(self._shelf.identity, name))

    def _wanted(self, request: InstallRequest | UpgradeRequest, name: str) -> Wanted:
        listed: tuple[Gallery, ...] = self._config.galleries
        if request.backend_galleries:
            listed = decode_galleries(request.backend_galleries)
        if request.uri:
            return Wanted(strip_gallery(request.name) or name, listed, request.uri, request.alias)
        return Wanted(request.backend or request.name, listed)

    def _address(self, engine: Engine) -> InstallReply:
        return InstallReply(True, address=f"{self._config.advertise_host}:{engine.port}")

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name.lower(), asyncio.Lock())


def _what(request: InstallRequest | UpgradeRequest) -> str:
    if isinstance(request, UpgradeRequest):
        return "upgrade"
    return "install" if request.install_only else f"load of {shown(request.model_id or request.backend)}"


def requested_name(request: InstallRequest | UpgradeRequest) -> str:
    """The backend a command is about: its bare name, `name`, or the last part of `uri`. InvalidInput."""
    name = strip_gallery(request.backend) or strip_gallery(request.name)
    name = name or request.uri.rstrip("/").rpartition("/")[2]
    folder_name(name)
    return name


def report_stopped(keys: list[str], error: Exception | None = None) -> UpgradeReply:
    """The reply of upgrade and delete: success unless there is an error, and what was stopped."""
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
