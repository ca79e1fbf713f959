"""Engine processes: start, watch, stop, and the table of running ones (worker.md §7, §8.5, §10).

The table belongs to the event loop and changes without awaiting, so it needs no lock. One task per process
waits until it ends, from any cause; only that task removes it from the table and releases its port.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from localai_cluster.kit import cancellation, clock, processes
from localai_cluster.kit.errors import ClusterError
from localai_cluster.messaging.messages import StopModelReply
from localai_cluster.metrics import worker as metrics
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendError, Unimplemented
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.gpu_drivers import visible_gpu_variables
from localai_cluster.worker.log_rings import LogLine, LogRings, clean_line, read_lines
from localai_cluster.worker.ports import PortAllocator, is_bindable

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ALL_INTERFACES = "0.0.0.0"
READY_POLL_SECONDS = 0.2
READY_PROBE_TIMEOUT = 2.0
START_TIMEOUT = 30.0
FREE_TIMEOUT = 5.0
SIGTERM_GRACE_SECONDS = 15.0
STOP_TIMEOUT = 35.0
"""Seconds after which a stop that is in progress counts as failed; a stop needs at most 25."""
LAST_OUTPUT_LINES = 20
DEFAULT_PATH_VARIABLE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOKEN_VARIABLE = "LOCALAI_GRPC_AUTH_TOKEN"


class StartFailed(ClusterError):
    """The engine did not become ready."""

    code = "start_failed"


class StartInterrupted(StartFailed):
    """The engine was stopped while it started."""

    code = "start_interrupted"
    permanent = False


class StopFailed(ClusterError):
    """The engine could not be stopped."""

    code = "stop_failed"
    permanent = False


@dataclass(eq=False)
class Engine:
    """One engine process from its start to its end. No other live engine has the same `key`."""

    key: str
    port: int
    backend: str
    folder: Path
    folder_identity: tuple[int, int]
    process: asyncio.subprocess.Process
    output: "tuple[_PipeReader, _PipeReader]"
    """Read ends of the pipes of stdout and stderr."""
    group: processes.Group
    client: BackendClient
    token: str = field(repr=False)
    """Bearer token of calls to the engine."""
    mark: str
    """Mark in the environment of all the engine's processes, even of those outside of its group."""
    gpus: tuple[str, ...] = ()
    """Ids of the only GPUs that the engine may use; empty for all GPUs."""
    stopping: bool = False
    stops: int = 0
    """Number of tasks that are ending the process."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_OUTPUT_LINES))

    @property
    def address(self) -> str:
        """Address of the engine on this machine."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def alive(self) -> bool:
        """True while the process runs; False as soon as it has ended, even before it is reaped."""
        stat = processes.stat(self.process.pid)
        return self.process.returncode is None and stat is not None and stat.running

    @contextlib.contextmanager
    def being_stopped(self) -> Iterator[None]:
        """Set `stopping` in this context. Afterwards, an engine that has not ended can be stopped again.

        The end of a failed start and a stop may overlap.
        """
        self.stops += 1
        self.stopping = True
        try:
            yield
        finally:
            self.stops -= 1
            self.stopping = self.stops > 0 or self.ended.is_set()

    async def wait_started(self) -> bool:
        """Wait until the engine is ready (return True) or has ended (return False). Raise StopFailed."""
        tasks = [asyncio.create_task(event.wait()) for event in (self.ready, self.ended)]
        limit = START_TIMEOUT + STOP_TIMEOUT
        await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if not (self.ready.is_set() or self.ended.is_set()):
            raise self._unkillable_error()
        return not self.ended.is_set()

    async def wait_ended(self) -> None:
        """Wait for the end of an engine that is being stopped or has died. Raise StopFailed."""
        if not await cancellation.wait_for(self.ended, STOP_TIMEOUT):
            raise self._unkillable_error()

    def _unkillable_error(self) -> StopFailed:
        return StopFailed(f"{self.key}: its former process {self.process.pid} cannot be killed")

    def same_folder(self) -> bool:
        """Return True unless a later install has replaced the folder that the engine started from."""
        return folder_identity(self.folder) == self.folder_identity


def bind_host_for(advertised: str) -> str:
    """Return the host on which engines listen: loopback if `advertised` is loopback, else all interfaces."""
    return LOOPBACK if advertised in (LOOPBACK, "localhost") else ALL_INTERFACES


@dataclass(eq=False, repr=False)
class EngineSupervisor:
    """Starts and stops the engines of one worker.

    New engines accept only calls with `token`, and listen on `bind_host`. Engines that end by themselves are
    added to `exits`.
    """

    ports: PortAllocator
    token: str
    reaper: processes.ProcessReaper
    rings: LogRings
    exits: Exits
    bind_host: str = field(default=ALL_INTERFACES, kw_only=True)
    _engines: dict[str, Engine] = field(default_factory=dict, init=False)
    _launching: dict[str, asyncio.Event] = field(default_factory=dict, init=False)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _is_hurried: bool = field(default=False, init=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(16, thread_name_prefix="stop"), init=False
    )

    def get(self, key: str) -> Engine | None:
        """Return the engine under `key`, even while it starts or stops; None if there is none."""
        return self._engines.get(key)

    def engines(self) -> list[Engine]:
        """Return all engines."""
        return list(self._engines.values())

    def running(self) -> list[Engine]:
        """Return the engines that run or start, without those that are being stopped."""
        return [engine for engine in self._engines.values() if not engine.stopping and engine.alive]

    def of_backend(self, names: frozenset[str]) -> list[str]:
        """Return the keys of the processes that were started under one of these backend names."""
        return [engine.key for engine in self._engines.values() if engine.backend in names]

    def of_model(self, name: str) -> list[str]:
        """Return the keys of all replicas of the model `name`; a name with `#` is a key itself."""
        if name in self._engines:
            return [name]
        if "#" in name:
            return []
        return [key for key in self._engines if key.rpartition("#")[0] == name]

    async def start(self, key: str, backend: str, start_file: Path, gpus: tuple[str, ...] = ()) -> Engine:
        """Start an engine and wait until it is ready.

        `gpus` are the ids of the only GPUs that it may use; empty for all. Raise StartFailed, with the
        engine's last output, or NoFreePort.
        """
        with metrics.count_start():
            return await self._start(key, backend, start_file, gpus)

    async def _start(self, key: str, backend: str, start_file: Path, gpus: tuple[str, ...]) -> Engine:
        port = self._allocate_port(key)
        try:
            engine = await self._launch(key, port, backend, start_file, gpus)
        except OSError as error:
            self.ports.release(port, clock.monotonic())
            raise StartFailed(f"{start_file} cannot be started: {error.strerror}") from error
        log.info("started key=%s backend=%s port=%d pid=%d", key, backend, port, engine.process.pid)
        try:
            await self._wait_ready(engine)
        except BaseException:
            with engine.being_stopped():
                await self._end_process(engine)
            raise
        engine.ready.set()
        log.info("ready key=%s port=%d", key, port)
        return engine

    async def stop(self, key: str, *, force: bool) -> StopModelReply:
        """Stop one process, with `Free` first unless `force`. Return when it has ended.

        If the process cannot be ended, the reply has the error.
        """
        if launching := self._launching.get(key):
            await launching.wait()  # or its process would outlive the stop
        engine, reply = self._engines.get(key), StopModelReply(matched=True, process_key=key)
        if engine is None:
            return replace(reply, matched=False, terminated=True)
        reply = replace(reply, address=engine.address)
        if engine.stopping:
            return replace(reply, error="it is already being stopped")
        with engine.being_stopped():
            freed, error = (False, "") if force else await self._free_memory(engine)
            has_ended = await self._end_process(engine)
        if not has_ended:
            return replace(reply, freed=freed, error=f"process {engine.process.pid} cannot be killed")
        return replace(reply, freed=freed, terminated=True, error=error)

    async def ensure_stopped(self, keys: Sequence[str], *, force: bool) -> list[str]:
        """Stop these processes one after another; return the keys that had a process.

        This also waits for stops that are already in progress. Raise StopFailed.
        """
        ended_keys: list[str] = []
        for key in keys:
            engine = self._engines.get(key)
            if engine is None:
                continue
            outcome = await self.stop(key, force=force)
            if not outcome.terminated and engine.stopping:
                await cancellation.wait_for(engine.ended, STOP_TIMEOUT)
            if not engine.ended.is_set():
                raise StopFailed(f"{key}: {outcome.error}", stopped=tuple(ended_keys))
            ended_keys.append(key)
        return ended_keys

    async def unload(self, engine: Engine) -> str:
        """Free the engine's memory; return the error, or "".

        An engine without `Free` keeps its memory until it stops, which is no error (nats.md §4.9).
        """
        return (await self._free_memory(engine, must=False))[1]

    def hurry(self) -> None:
        """Skip graceful stops from now on."""
        self._is_hurried = True

    async def close(self) -> None:
        """Stop all engines gracefully and concurrently. Do not wait for a process that cannot be killed."""
        await asyncio.gather(*(self.stop(engine.key, force=self._is_hurried) for engine in self.engines()))
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=FREE_TIMEOUT)
        self._threads.shutdown(wait=False)

    def _allocate_port(self, key: str) -> int:
        while True:
            port = self.ports.allocate(key, clock.monotonic())
            if is_bindable(port):
                return port
            log.warning("port %d is in use by another program; trying another", port)
            self.ports.release(port, clock.monotonic())

    async def _launch(
        self, key: str, port: int, backend: str, start_file: Path, gpus: tuple[str, ...]
    ) -> Engine:
        folder = start_file.parent
        identity = folder_identity(folder)
        program = str(start_file)
        if not os.access(program, os.X_OK):
            os.chmod(program, 0o700)
        token = self.token
        variables = environment(token) | vulkan_driver_variables(folder) | visible_gpu_variables(gpus)
        variables[processes.MARK_VARIABLE] = mark = f"{self.reaper.mark}/{secrets.token_hex(8)}"
        launched = self._launching[key] = asyncio.Event()
        try:
            process, output = await _spawn_with_pipes(
                [program, "--addr", f"{self.bind_host}:{port}"], folder, variables
            )
            group = self.reaper.add(process.pid, seconds=SIGTERM_GRACE_SECONDS)
            client = BackendClient(f"{LOOPBACK}:{port}", token)
            engine = Engine(
                key,
                port,
                backend,
                folder,
                identity or (0, 0),
                process,
                output,
                group,
                client,
                token,
                mark,
                gpus,
            )
            self._engines[key] = engine
        finally:
            del self._launching[key]
            launched.set()
        watcher = asyncio.create_task(self._watch_until_ended(engine), name=f"engine {key}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return engine

    async def _wait_ready(self, engine: Engine) -> None:
        deadline = clock.monotonic() + START_TIMEOUT
        while clock.monotonic() < deadline:
            await cancellation.wait_for(engine.ended, READY_POLL_SECONDS)
            if engine.stopping:
                raise StartInterrupted(f"backend process {engine.key} was stopped while it started")
            if engine.ended.is_set():
                raise StartFailed(
                    _failure_with_output(engine, f"died during startup ({_describe_exit(engine)})")
                )
            with contextlib.suppress(BackendError):
                if (
                    await engine.client.health(READY_PROBE_TIMEOUT)
                    and not engine.stopping
                    and not engine.ended.is_set()
                ):
                    return
        raise StartFailed(_failure_with_output(engine, f"was not ready within {START_TIMEOUT:g} s"))

    async def _free_memory(self, engine: Engine, *, must: bool = True) -> tuple[bool, str]:
        try:
            result = await engine.client.free(FREE_TIMEOUT)
        except BackendError as error:
            if isinstance(error, Unimplemented) and not must:
                return False, ""
            log.warning("Free failed key=%s: %s", engine.key, error)
            return False, f"Free: {error.message}"
        return result.success, "" if result.success else f"Free: {result.message or 'refused'}"

    async def _end_process(self, engine: Engine) -> bool:
        """Send SIGTERM to the process group, and SIGKILL after `SIGTERM_GRACE_SECONDS` seconds.

        Return True if the process has ended.
        """
        await self._try_end_processes(engine)
        return await cancellation.wait_for(engine.ended, FREE_TIMEOUT)

    async def _try_end_processes(self, engine: Engine) -> None:
        """End the engine's processes in a thread. Log an error: file descriptors or threads may run out."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, _end_processes, engine, lambda: self._is_hurried)
        except Exception:
            log.exception("cannot end the processes of key=%s", engine.key)

    async def _watch_until_ended(self, engine: Engine) -> None:
        """Read the engine's output until the process ends, then clean up."""
        process = engine.process
        pumps = [
            asyncio.create_task(self._store_output(engine, pipe.stream, name))
            for pipe, name in zip(engine.output, ("stdout", "stderr"), strict=True)
        ]
        await process.wait()
        if not engine.stopping:
            metrics.ENGINE_CRASHES.inc()
            log.warning("engine ended key=%s %s", engine.key, _describe_exit(engine))
            if engine.ready.is_set():
                # If it was never ready, the reply of the starting command reports the failure.
                self.exits.add(engine.key, engine.port)
            # Its child processes must not outlive it or keep its port.
            await self._try_end_processes(engine)
        await asyncio.wait(pumps, timeout=1.0)
        await cancellation.cancel_and_wait(*pumps)
        for pipe in engine.output:
            pipe.transport.close()
        self._append_note(engine, f"[engine ended: {_describe_exit(engine)}]")
        self.rings.mark_ended(engine.key)
        self.reaper.discard(process.pid)
        self.ports.release(engine.port, clock.monotonic())
        del self._engines[engine.key]
        # Before the client closes: a probe checks this event first, and a closed client raises.
        engine.ended.set()
        await engine.client.close()

    async def _store_output(self, engine: Engine, stream: asyncio.StreamReader, name: str) -> None:
        async for line in read_lines(stream):
            text = clean_line(line, engine.token)
            if name == "stderr":
                engine.errors.append(text)
            self.rings.append(engine.key, LogLine(clock.now(), name, text))
            log.debug("%s %s: %s", engine.key, name, text)

    def _append_note(self, engine: Engine, text: str) -> None:
        """Append a line of the worker to the engine's output, for events that no engine can log."""
        self.rings.append(engine.key, LogLine(clock.now(), "stderr", text))


@dataclass(frozen=True)
class _PipeReader:
    """The read end of a pipe."""

    stream: asyncio.StreamReader
    transport: asyncio.BaseTransport


async def _spawn_with_pipes(
    argv: Sequence[str], folder: Path, variables: dict[str, str]
) -> tuple[asyncio.subprocess.Process, tuple[_PipeReader, _PipeReader]]:
    """Start an engine with one pipe for stdout and one for stderr. Raise OSError.

    With asyncio's own pipes, `wait` would return only after the last child of the engine has closed its
    copies.
    """
    with contextlib.ExitStack() as write_ends, contextlib.ExitStack() as read_ends:
        output, out = await _open_pipe(write_ends, read_ends)
        errors, err = await _open_pipe(write_ends, read_ends)
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=folder,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        read_ends.pop_all()
    return process, (output, errors)


async def _open_pipe(
    write_ends: contextlib.ExitStack, read_ends: contextlib.ExitStack
) -> tuple[_PipeReader, int]:
    """Open a pipe, whose ends the stacks close; return its read end and the descriptor of its write end."""
    reading, writing = os.pipe()
    write_ends.callback(os.close, writing)
    file, stream = read_ends.enter_context(os.fdopen(reading, "rb", buffering=0)), asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), file
    )
    read_ends.callback(transport.close)
    return _PipeReader(stream, transport), writing


def _end_processes(engine: Engine, hurry: Callable[[], bool]) -> None:
    """End the engine's process group, then kill processes that have left the group. Blocks."""
    processes.end(engine.group, hurry)
    processes.sweep(engine.mark)


def environment(token: str) -> dict[str, str]:
    """Return the complete environment of an engine, without the worker's secrets and virtual environment."""
    home = os.environ.get("HOME", "/")
    plain = {"PATH": DEFAULT_PATH_VARIABLE, "HOME": home, "LANG": os.environ.get("LANG", "C.UTF-8")}
    return plain | ({TOKEN_VARIABLE: token} if token else {})


def vulkan_driver_variables(folder: Path) -> dict[str, str]:
    """Return the variables that make an engine use the Vulkan drivers in its folder (worker.md §10.2)."""
    drivers = os.pathsep.join(sorted(str(path) for path in folder.glob("vulkan/icd.d/*.json")))
    return {"VK_DRIVER_FILES": drivers, "VK_ICD_FILENAMES": drivers} if drivers else {}


def folder_identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder; None if it does not exist."""
    try:
        info = folder.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _failure_with_output(engine: Engine, failure: str) -> str:
    output = "\n".join(engine.errors) or "(nothing)"
    return f"backend process {engine.key} {failure}. Last stderr:\n{output}"


def _describe_exit(engine: Engine) -> str:
    code = engine.process.returncode
    if code is None:
        return "still running"
    return processes.describe_exit(code) if code < 0 else f"exit {code}"
