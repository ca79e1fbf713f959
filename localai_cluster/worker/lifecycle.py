"""The lifecycle of a worker: start in order, run until it is stopped or fails, stop in order."""

import asyncio
import logging
import secrets
import signal
import socket
from contextlib import AsyncExitStack
from typing import Any

import httpx

from localai_cluster.kit import cancellation, processes
from localai_cluster.kit.connections import serving
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.nkeys import group_characters
from localai_cluster.messaging import messages
from localai_cluster.messaging.messages import ProgressEvent, encode
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.metrics import worker as metrics
from localai_cluster.worker import hardware, registration
from localai_cluster.worker.backend_store import BackendStore
from localai_cluster.worker.commands import Commands, Pauses
from localai_cluster.worker.config import Config
from localai_cluster.worker.control_plane import (
    CALL_TIMEOUT,
    CallFailed,
    ControlPlane,
    Registered,
    ServerKind,
)
from localai_cluster.worker.download import Downloads
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.engines import EngineSupervisor, bind_host_for
from localai_cluster.worker.files.fetches import Fetches, outbound_of
from localai_cluster.worker.files.keys import Folders
from localai_cluster.worker.files.routes import FileServer
from localai_cluster.worker.hardware import GpuTotals
from localai_cluster.worker.heartbeats import HeartbeatLoop, measure_figures
from localai_cluster.worker.http_server import WorkerApplication
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.install_commands import InstallCommands
from localai_cluster.worker.installer import Installer
from localai_cluster.worker.log_rings import LogRings
from localai_cluster.worker.ports import PortAllocator, open_probe_listener
from localai_cluster.worker.prefetch import prefetch, refuse_served
from localai_cluster.worker.progress import ProgressStream
from localai_cluster.worker.registration import BusCredentials
from localai_cluster.worker.source_files import Throttle

log = logging.getLogger(__name__)

REQUEST_POLL_SECONDS = 1.0
MAX_REQUEST_WAIT_SECONDS = 30.0
DEREGISTER_TIMEOUT = 60.0


async def drain_and_deregister(control_plane: ControlPlane, node_id: str, hurry: asyncio.Event) -> None:
    """Drain the node, wait up to 30 s for its running requests, and deregister it.

    This takes at most 60 s. `hurry` ends it earlier.
    """
    stopping = asyncio.create_task(_drain_and_deregister(control_plane, node_id, hurry))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({stopping, hurried}, timeout=DEREGISTER_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
    await cancellation.cancel_and_wait(stopping, hurried)


async def _drain_and_deregister(control_plane: ControlPlane, node_id: str, hurry: asyncio.Event) -> None:
    try:
        await control_plane.drain(node_id)
        await _wait_for_requests(control_plane, node_id, hurry)
    except CallFailed as error:
        log.warning("drain failed: %s", error)
    try:
        await control_plane.deregister(node_id)
        log.info("deregistered id=%s", node_id)
    except CallFailed as error:
        log.warning("deregistration failed: %s", error)


async def _wait_for_requests(control_plane: ControlPlane, node_id: str, hurry: asyncio.Event) -> None:
    for _ in range(round(MAX_REQUEST_WAIT_SECONDS / REQUEST_POLL_SECONDS)):
        running = await control_plane.in_flight(node_id)
        if running <= 0:
            return
        log.info("waiting for %d running request(s)", running)
        if await cancellation.wait_for(hurry, REQUEST_POLL_SECONDS):
            return
    log.warning("requests are still running after %g s; shutting down anyway", MAX_REQUEST_WAIT_SECONDS)


class Worker:
    """One worker process: creates its components, then starts, runs and stops them in order."""

    def __init__(
        self,
        config: Config,
        identity: NodeIdentity,
        capability: str,
        client: httpx.AsyncClient,
        downloads: httpx.AsyncClient,
        reaper: processes.ProcessReaper,
        listener: socket.socket,
    ) -> None:
        self._config, self._downloads, self._listener = config, downloads, listener
        self._capability, self._node_id, self._status = capability, "", ""
        self._stop, self._hurry, self._registering = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._bus = NatsBus(
            None, name=f"worker {config.node_name}", on_refused=lambda: self._bus_credentials.refused()
        )
        is_required = config.nats_require_auth or config.distributed_require_auth
        self._bus_credentials = BusCredentials(
            self._bus, config.nats, config.nats_tls, self._register_once, require_auth=is_required
        )
        instance = secrets.token_hex(16)
        self._control_plane = ControlPlane(
            config.register_to,
            config.registration_token,
            identity,
            instance,
            client,
            allow_stock=config.allow_stock_frontend,
        )
        store = BackendStore(config.backends_path, config.backends_system_path, capability)
        self._engine_token = secrets.token_hex(32)
        self._rings, exits = LogRings(config.log_lines, config.log_bytes), Exits(config.advertise_host)
        self._supervisor = self._create_supervisor(reaper, exits)
        self._gpus = hardware.create_reader(
            config.test_gpus,
            lambda: ((engine.process.pid, engine.gpus) for engine in self._supervisor.engines()),
        )
        self._throttle = Throttle(config.download_rate)
        self._install_commands = self._create_install_commands(store, downloads)
        self._files = self._create_file_server(downloads)
        self._application = WorkerApplication(
            self._readiness_problem,
            self._rings,
            self._files,
            lambda: self._supervisor.token,
            config.metrics_token,
        )
        self._pauses = Pauses()
        self._commands = self._create_commands(store, instance)
        self._heartbeats = self._create_heartbeats(exits)

    def _create_supervisor(self, reaper: processes.ProcessReaper, exits: Exits) -> EngineSupervisor:
        config = self._config
        return EngineSupervisor(
            PortAllocator(config.base_port, config.max_port),
            self._engine_token,
            reaper,
            self._rings,
            exits,
            bind_host=bind_host_for(config.advertise_host),
        )

    def _create_file_server(self, client: httpx.AsyncClient) -> FileServer:
        config = self._config
        backends = (config.backends_path, config.backends_system_path)
        downloads = Downloads(client, refuse_served, self._throttle)
        return FileServer(
            Folders.of_worker(config.models_path, config.data_dir, backends),
            Fetches(downloads, outbound_of(config), config.hugging_face_url),
        )

    def _create_install_commands(self, store: BackendStore, downloads: httpx.AsyncClient) -> InstallCommands:
        config = self._config
        installer = Installer(
            store,
            config.source_roots,
            self._throttle,
            self._capability,
            downloads,
            lambda file, headers: self._control_plane.open_gallery(self._node_id, file, headers),
            access=config.registry_access,
            require_integrity=config.require_backend_integrity,
            github_url=config.github_url,
            copies=config.data_dir / "cache" / "gallery",
        )
        return InstallCommands(
            config, store, installer, self._supervisor, self._open_progress, self._gpus.has_all
        )

    def _create_commands(self, store: BackendStore, instance: str) -> Commands:
        return Commands(
            self._config,
            self._bus,
            store,
            self._supervisor,
            self._install_commands,
            instance,
            self._pauses,
            self._stop.set,
            self._gpus,
        )

    def _create_heartbeats(self, exits: Exits) -> HeartbeatLoop:
        config = self._config
        return HeartbeatLoop(
            self._control_plane,
            self._off_bus_reason,
            config.heartbeat_interval,
            lambda: self._node_id,
            lambda: measure_figures(config.models_path, self._gpus),
            self._register_with_retries,
            self._register_once,
            self._commands.unsubscribe,
            exits,
        )

    async def run(self) -> None:
        """Run until a signal, a `stop` message or a failure. Raise GaveUp and other failures."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._handle_stop_signal)
        metrics.RUNNING_ENGINES.set_function(lambda: len(self._supervisor.running()))
        metrics.BUS_CONNECTED.set_function(lambda: self._bus.connected)
        files, application = self._files, self._application
        try:  # the HTTP server ends before the bus (worker.md §19)
            async with files.running(), serving(self._listener, application), self._pauses.watched():
                try:
                    await self._run_until_stopped()
                finally:
                    await self._shut_down()
        finally:
            await self._bus.close()
        log.info("stopped")

    async def _run_until_stopped(self) -> None:
        await self._run_work_until_stopped(self._prefetch_and_register())
        if not self._stop.is_set():
            self._bus.start()
            await self._commands.subscribe(self._node_id)
            await self._run_work_until_stopped(
                asyncio.gather(self._heartbeats.run(), self._bus_credentials.run())
            )

    async def _shut_down(self) -> None:
        log.info("shutting down")
        self._install_commands.refuse_new()
        if self._node_id:
            await drain_and_deregister(self._control_plane, self._node_id, self._hurry)
        await self._install_commands.close()
        await self._supervisor.close()

    async def _run_work_until_stopped(self, work: Any) -> None:
        """Run `work` until it ends, fails, or the worker must stop."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            await cancellation.cancel_and_wait(task, stop)

    async def _prefetch_and_register(self) -> None:
        await prefetch(self._config, self._downloads)
        await self._register_with_retries()

    async def _register_with_retries(self) -> None:
        async with self._registering:
            await self._use_registration(
                await registration.register(self._control_plane, self._registration_body)
            )

    async def _register_once(self) -> None:
        async with self._registering:
            body = await self._registration_body()
            await self._use_registration(await self._control_plane.register(body))

    async def _use_registration(self, registered: Registered) -> None:
        """Use the node id and credentials of a registration, and subscribe to the node's commands.

        Raise CallFailed if the server is of another kind and the engines of the former server cannot be
        stopped.
        """
        await self._grant_access(registered.kind)
        previous_id, self._node_id = self._node_id, registered.node_id
        if (previous_id, self._status) != (self._node_id, registered.status):
            self._status = registered.status
            log.info(
                "registered id=%s status=%s server=%r",
                registered.node_id,
                registered.status,
                str(registered.kind),
            )
        self._bus_credentials.adopt(registered)
        if previous_id and (previous_id != self._node_id or not self._commands.subscribed):
            log.warning("subscribing to the commands of node %s", self._node_id)
            await self._commands.subscribe(self._node_id)

    async def _grant_access(self, kind: ServerKind) -> None:
        """Let a server of this kind use the worker's files, logs and engines. Raise CallFailed.

        An engine accepts one token only, so the engines of a server of the other kind end first.
        """
        if kind is self._control_plane.kind:
            return
        if self._node_id:
            log.warning("the server is %s now: ending what the former one has started", kind)
            await self._commands.unsubscribe()
            await self._end_engines()
        shared = self._config.registration_token
        # Without a registration token all callers would have access: no caller knows the engine token there.
        self._supervisor.token = shared if kind is ServerKind.STOCK and shared else self._engine_token
        self._application.close_log_sockets()
        self._control_plane.kind = kind
        if kind is ServerKind.STOCK and not shared:
            log.error(
                "this worker serves a stock LocalAI frontend without a registration token: files, logs and "
                "engines stay closed. Set LOCALAI_REGISTRATION_TOKEN here and on the frontend"
            )
        elif kind is ServerKind.STOCK:
            log.warning(
                "this worker serves a stock LocalAI frontend: everybody who has the registration token can "
                "call its engines and read its files and logs"
            )

    async def _end_engines(self) -> None:
        try:
            await self._install_commands.cancel_all()
            keys = [engine.key for engine in self._supervisor.engines()]
            await asyncio.gather(*(self._supervisor.ensure_stopped([key], force=False) for key in keys))
        except ClusterError as error:
            raise CallFailed(f"engines of the former server still run: {error}") from error

    async def _registration_body(self) -> dict[str, Any]:
        # Fall back to the last reading: a node does not lose its GPUs because the driver does not respond.
        gpus = await hardware.read_gpus(self._gpus) or GpuTotals.of(self._gpus.last)
        measured = await hardware.measure_figures(self._config.models_path)
        body = registration.body(self._config, self._capability, gpus, measured, self._engine_token)
        # Last, with no await before the request is sent: the list must not be out of date.
        if self._supervisor.running() and gpus.total:
            body["available_vram"] = gpus.free or 0  # 0, also if not known, changes no figure there
        running = registration.running_processes(self._supervisor.running(), self._config.advertise_host)
        return body | {"running_processes": running}

    def _open_progress(self, op_id: str, backend: str) -> ProgressStream:
        node_id = self._node_id

        async def send(event: ProgressEvent) -> None:
            await self._bus.publish(messages.install_progress(node_id, op_id), encode(event))

        return ProgressStream(send, op_id, node_id, backend)

    def _readiness_problem(self) -> str:
        if not self._node_id:
            return "not registered yet"
        return self._off_bus_reason() or self._heartbeats.problem

    def _off_bus_reason(self) -> str:
        """Return the reason why this worker is not on the bus; "" if it is."""
        if self._bus.connected:
            return ""
        return self._bus_credentials.problem or "the message bus is not connected"

    def _handle_stop_signal(self) -> None:
        if self._stop.is_set():
            log.warning("second signal: stopping at once")
            self._hurry.set()
            self._supervisor.hurry()
        self._stop.set()


async def run(config: Config, identity: NodeIdentity) -> None:
    """Run a worker from start to stop, and close its resources."""
    if config.without_effect:
        log.warning("set, but without effect in this worker: %s", ", ".join(config.without_effect))
    for folder in (config.backends_path, config.models_path):
        folder.mkdir(parents=True, exist_ok=True)
    config, listener = open_probe_listener(config)
    gpus = await hardware.read_gpus(hardware.create_reader(config.test_gpus, tuple)) or GpuTotals()
    capability = hardware.detect_capability(config.capability, gpus, config.capability_file)
    BackendStore(config.backends_path, config.backends_system_path, capability).recover()
    async with AsyncExitStack() as stack:
        stack.enter_context(listener)
        reaper = await asyncio.to_thread(processes.ProcessReaper)
        stack.push_async_callback(asyncio.to_thread, reaper.close)
        # Galleries and registries are verified by their own CAs, not by those for the control plane.
        downloads = await stack.enter_async_context(
            httpx.AsyncClient(timeout=CALL_TIMEOUT, verify=config.registry_ca or True)
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=CALL_TIMEOUT, verify=config.tls or True)
        )
        log.info(
            "starting node=%s capability=%s address=%s fingerprint=%s",
            config.node_name,
            capability,
            config.advertise_addr,
            group_characters(identity.fingerprint),
        )
        await Worker(config, identity, capability, client, downloads, reaper, listener).run()
