"""The worker put together: start-up in order, the two things that may end it, and the way out."""

import asyncio
import logging
import secrets
import signal
import socket
from contextlib import AsyncExitStack
from typing import Any

import httpx

from localai_cluster import procs
from localai_cluster.fingerprints import grouped
from localai_cluster.messaging import subjects
from localai_cluster.messaging.codec import encode
from localai_cluster.messaging.messages import ProgressEvent
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.worker import hardware, probes, registration, shutdown
from localai_cluster.worker.commands import Commands
from localai_cluster.worker.config import Config
from localai_cluster.worker.controller import CALL_LIMIT, Controller, Registered
from localai_cluster.worker.heartbeat import Heart, figures
from localai_cluster.worker.identity import Identity
from localai_cluster.worker.install import Installer
from localai_cluster.worker.installs import Installs
from localai_cluster.worker.listen import listen
from localai_cluster.worker.listing import Shelf
from localai_cluster.worker.logring import LogRings
from localai_cluster.worker.ports import PortAllocator
from localai_cluster.worker.processes import Supervisor
from localai_cluster.worker.progress import Progress

log = logging.getLogger(__name__)


class Agent:
    """One worker process."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        capability: str,
        client: httpx.AsyncClient,
        guardian: procs.Guardian,
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._listener = listener
        self._capability = capability
        self._node_id = ""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._bus = NatsBus(config.nats_url, name=f"worker {config.node_name}")
        instance = secrets.token_hex(16)
        self._controller = Controller(
            config.register_to, config.registration_token, identity, instance, client
        )
        shelf = Shelf(config.backends_path, config.backends_system_path, capability)
        ports = PortAllocator(config.base_port, config.max_port)
        self._supervisor = Supervisor(ports, config.registration_token, guardian, LogRings())
        installer = Installer(shelf, config.source_roots, config.download_rate, capability, client)
        self._installs = Installs(config, shelf, installer, self._supervisor, self._open_progress)
        self._commands = Commands(
            config, self._bus, shelf, self._supervisor, self._installs, instance, self._stop.set
        )
        self._heart = Heart(
            self._controller,
            self._bus,
            config.heartbeat_interval,
            lambda: self._node_id,
            lambda: figures(config.models_path),
            self._join,
            self._knock,
            self._commands.fall_silent,
        )

    async def run(self) -> None:
        """Lives until a signal, a `stop` message or a failure. GaveUp, InvalidSetting; whatever broke."""
        self._listen_to_signals()
        server = await probes.serve(self._listener, self._problem)
        try:
            await self._until_stopped(self._join())
            if not self._stop.is_set():
                self._bus.start()
                await self._commands.listen(self._node_id)
                await self._until_stopped(self._heart.beat_for_ever())
        finally:
            await self._leave()
            server.close()
            await self._bus.close()
        log.info("stopped")

    async def _leave(self) -> None:
        log.info("leaving")
        self._commands.refuse_new()
        if self._node_id:
            await shutdown.say_goodbye(self._controller, self._node_id, self._hurry)
        await self._installs.close()
        await self._supervisor.close()

    async def _until_stopped(self, work: Any) -> None:
        """Runs `work` until it ends, fails or the worker is to stop."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            for waiting in (task, stop):
                waiting.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _join(self) -> None:
        await self._be(await registration.register(self._controller, self._told))

    async def _knock(self) -> None:
        await self._be(await registration.register_once(self._controller, self._told))

    async def _be(self, registered: Registered) -> None:
        former, self._node_id = self._node_id, registered.node_id
        if former and (former != self._node_id or not self._commands.listening):
            log.warning("listening for the node %s", self._node_id)
            await self._commands.listen(self._node_id)

    async def _told(self) -> dict[str, Any]:
        found = await hardware.gpus()
        measured = hardware.figures(self._config.models_path)
        told = registration.body(self._config, self._capability, found, measured)
        # Last, and nothing is awaited before it leaves: what starts or ends meanwhile would be told wrong.
        running = registration.listed(self._supervisor.running(), self._config.advertise_host)
        return told | {"running_processes": running}

    def _open_progress(self, op_id: str, backend: str) -> Progress:
        node_id = self._node_id

        async def send(event: ProgressEvent) -> None:
            await self._bus.publish(subjects.install_progress(node_id, op_id), encode(event))

        return Progress(send, op_id, node_id, backend)

    def _problem(self) -> str:
        if not self._node_id:
            return "not registered yet"
        if not self._bus.connected:
            return "the message bus is not connected"
        return self._heart.problem

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stop.is_set():
            log.warning("second signal: leaving at once")
            self._hurry.set()
            self._supervisor.hurry()
        self._stop.set()


async def run(config: Config, identity: Identity) -> None:
    """One life of the worker, with everything that must be closed after it."""
    for folder in (config.backends_path, config.models_path):
        folder.mkdir(parents=True, exist_ok=True)
    config, listener = listen(config)
    capability = hardware.detect_capability(config.capability, await hardware.gpus())
    Shelf(config.backends_path, config.backends_system_path, capability).recover()
    async with AsyncExitStack() as stack:
        stack.enter_context(listener)
        guardian = await asyncio.to_thread(procs.Guardian)
        stack.push_async_callback(asyncio.to_thread, guardian.close)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=CALL_LIMIT))
        log.info(
            "starting node=%s capability=%s address=%s fingerprint=%s",
            config.node_name,
            capability,
            config.advertise_addr,
            grouped(identity.fingerprint),
        )
        await Agent(config, identity, capability, client, guardian, listener).run()
