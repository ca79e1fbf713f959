"""`manage.py controller`: the process that runs operations.

Sixteen tasks in one event loop: the executors of operations and of intents on nodes, the inventory of
backends, the checks of the nodes' file ports, the wakes of what waits for nodes, the scaler that carries out
scheduling rules, the stopper of engines that nothing accounts for, the state pass over engines that may have
ended, the probes of late nodes, the revocations of credentials for the bus, the check for upgrades, the
LISTEN task whose wake-ups trigger ten of those, the ticker of django-q2's schedules, the heartbeat that shows
on pages that a controller is running, the updates about removed replicas for routing by prefix, and the
server of its metrics, if it has an address. Any number of controllers may run: they claim operations,
intents, inventory requests, port checks, stops, replicas in question and checks, and lock schedules and the
scaler's passes.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandParser
from django.db import Error as DatabaseError

from localai_cluster import bus_access, scraping
from localai_cluster.broker import count_tasks
from localai_cluster.kit import cancellation, clock, conf, periodic
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.kit.task_runner import TaskRunner
from localai_cluster.management import schema_version
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.metrics import controller as metrics
from nodes.backends import inventory, upgrade_state
from nodes.backends.intent_queue import IntentQueue
from nodes.backends.inventory import Inventory
from nodes.backends.upgrade_check import UpgradeChecker
from nodes.definitions import folder
from nodes.definitions import rows as definitions
from nodes.gateway.prefix_updates import Outbox
from nodes.loading.load_request import load_on_other_node
from nodes.reconcilers import tasks
from nodes.reconcilers.liveness import BusProbes
from nodes.reconcilers.replicas import ReplicaPass
from nodes.reconcilers.state_pass import StatePass
from nodes.reconcilers.wake_ups import NodeWakeUps
from nodes.registry import bus_credentials
from nodes.registry.bus_credentials import Revocations
from nodes.registry.file_port import FilePorts
from nodes.replicas import checks, hooks
from nodes.replicas.stops import Stopper
from nodes.scheduling import store
from operations import kinds
from operations.changes.events import NODES, OPERATIONS, listen
from operations.executor import controllers
from operations.executor.executor import Executor, OperationQueue
from operations.executor.work import WakeUps, in_thread
from operations.kinds import HandlerContext
from operations.models import Status
from operations.reconcilers import tasks as ledger_schedules

log = logging.getLogger(__name__)

TICK_EVERY = 1.0
THREADS = 6
"""Number of threads for database calls; each has its own connection.

Python's default would be the number of processors plus four.
"""


class Command(BaseCommand):
    """Runs a controller until SIGTERM or SIGINT."""

    help = "Runs operations and the schedules."
    # The settings. Django's other checks import every page; `manage.py check` and `serve` run them.
    requires_system_checks = (Tags.security,)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--tasks", action="store_true", help="run the scheduled tasks too, as `manage.py qcluster` does"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        gc.freeze()
        gc.enable()
        schema_version.refuse_other(conf.cluster().database_url)
        loop, stop = asyncio.new_event_loop(), asyncio.Event()
        runner = TaskRunner() if options["tasks"] else None

        def ask_to_stop(*_: Any) -> None:
            if runner:
                runner.stop()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop.set)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask_to_stop)
        if runner is None:
            _run(loop, stop)
            return
        # The time limit of a task is a signal, and Python handles signals on the main thread.
        controller = threading.Thread(target=_run, args=(loop, stop, runner), name="controller")
        controller.start()
        try:
            count_tasks()
            runner.run()
        finally:
            ask_to_stop()
            controller.join()


def _run(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, runner: TaskRunner | None = None) -> None:
    """Run the controller until `stop` is set or one of its loops ends, then stop the `runner`."""
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as asyncio_runner:
            asyncio_runner.run(run(stop))
    finally:
        if runner:
            runner.stop()


class Parts:
    """The components of a controller, and `wake_ups`, which some of them wait for."""

    def __init__(self, owner: str, bus: Bus) -> None:
        self.wake_ups, lease = WakeUps(), conf.cluster().operation_lease
        operations = OperationQueue(kinds.handlers(HandlerContext(bus, self.wake_ups)))
        self._intents = IntentQueue(bus, load_on_other_node)
        self.executors: Mapping[str, Executor[Any]] = {
            "operations": Executor(owner, operations, lease=lease),
            "intents": Executor(owner, self._intents, lease=lease),
        }
        self.inventory = Inventory(bus)
        self.file_ports = FilePorts()
        self.wakes = NodeWakeUps(self._nodes_changed)
        self.scaler = ReplicaPass()
        self.stopper = Stopper(bus)
        self.engines = StatePass(bus)
        self.probes = BusProbes(bus)
        self.revocations = Revocations(self.probes.disconnected)
        self.checker = UpgradeChecker(owner)
        self.news = Outbox(bus)

    async def _nodes_changed(self) -> None:
        await self._intents.nodes_changed()
        self.executors["intents"].wake()


def _loops(parts: Parts, owner: str, bus: Bus) -> list[asyncio.Task[None]]:
    """Start the loops that run until the controller stops, as tasks; the task names appear in the log."""
    loops: dict[str, Coroutine[Any, Any, None]] = {
        **{name: executor.run() for name, executor in parts.executors.items()},
        "inventory": parts.inventory.run(),
        "file ports": parts.file_ports.run(),
        "wakes": parts.wakes.run(),
        "scaler": parts.scaler.run(),
        "stopper": parts.stopper.run(),
        "state pass": parts.engines.run(),
        "bus probes": parts.probes.run(),
        "revocations": parts.revocations.run(),
        "upgrade check": parts.checker.run(),
        "wake_ups": listen_for_changes(parts),
        "schedules": Ticker().run(),
        "beat": Heartbeat(owner, bus).run(),
        "prefix news": parts.news.run(),
        "metrics": scraping.serve("controller", conf.cluster().controller_metrics),
    }
    return [asyncio.create_task(loop, name=name) for name, loop in loops.items()]


async def run(stop: asyncio.Event) -> None:
    """Run until `stop` is set or a loop ends; release all leases before returning."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "database"))
    owner = f"{socket.gethostname()[:20]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    bus = NatsBus(bus_access.service_servers("controller"), name="controller")
    bus.start()
    parts = Parts(owner, bus)
    metrics.BUS_CONNECTED.set_function(lambda: bus.connected)
    for name, executor in parts.executors.items():
        metrics.ATTEMPTS_RUNNING.labels(name).set_function(executor.running)
    hooks.on_removed.append(parts.news.queue_removal)
    loops = _loops(parts, owner, bus)
    log.info("controller %s is ready", owner)
    await _until_stop_or_failure(loops, stop)
    await asyncio.gather(*(executor.stop() for executor in parts.executors.values()))
    await cancellation.cancel_and_wait(*loops)
    hooks.on_removed.remove(parts.news.queue_removal)
    with contextlib.suppress(DatabaseError):
        await in_thread(controllers.delete_heartbeat, owner)
    await bus.close()
    log.info("controller %s stopped", owner)


async def _until_stop_or_failure(loops: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({waiting, *loops}, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {waiting}:
        # A task must not end by itself; the supervisor restarts this process.
        log.error("the %s loop ended", task.get_name(), exc_info=task.exception())


async def listen_for_changes(parts: Parts) -> None:
    """Wake components for notifications of the database; after each (re)connect, wake all."""
    async for channel, payload in listen(
        OPERATIONS,
        NODES,
        inventory.CHANNEL,
        checks.CHANNEL,
        bus_credentials.CHANNEL,
        upgrade_state.CHANNEL,
        store.CHANNEL,
        definitions.CHANNEL,
    ):
        if channel in (bus_credentials.CHANNEL, ""):
            parts.revocations.wake()
        if channel in (upgrade_state.CHANNEL, ""):
            parts.checker.wake()
        if channel in (checks.CHANNEL, ""):
            parts.engines.wake()
        if channel in (NODES, inventory.CHANNEL, ""):
            parts.inventory.wake()
            parts.file_ports.wake()
        if channel in (NODES, ""):
            parts.wakes.changed(payload)
            parts.scaler.wake()
            parts.stopper.wake()
        if channel in (definitions.CHANNEL, ""):
            folder.folder().rows_changed()
        if channel in (store.CHANNEL, definitions.CHANNEL):
            parts.scaler.wake()
        if channel in (OPERATIONS, ""):
            _wake_operation(parts, payload)


def _wake_operation(parts: Parts, payload: str) -> None:
    operation, _, status = payload.partition(" ")
    parts.wake_ups.notify(operation)
    if status == Status.PROCESSING:
        return  # it was claimed or has progressed, which makes nothing due
    for executor in parts.executors.values():
        executor.wake(cancelled=status == Status.CANCELLED)


class Ticker(PeriodicTask):
    """Creates the declared schedules, and every second enqueues the due ones."""

    def __init__(self) -> None:
        super().__init__("schedules", self._tick, interval=TICK_EVERY, retry_on=(DatabaseError,))
        self._declared = False

    async def _tick(self) -> None:
        if not self._declared:
            await in_thread(periodic.ensure_schedules, [*tasks.SCHEDULES, *ledger_schedules.SCHEDULES])
            self._declared = True
        await in_thread(periodic.enqueue_due_schedules)


class Heartbeat(PeriodicTask):
    """Writes this controller's heartbeat every few seconds, with the state of its bus connection."""

    def __init__(self, owner: str, bus: Bus) -> None:
        super().__init__(
            "heartbeat", self._beat, interval=controllers.HEARTBEAT_INTERVAL, retry_on=(DatabaseError,)
        )
        self._owner, self._bus = owner, bus

    async def run(self) -> None:
        """Wait for the bus, but not longer than one interval; then write heartbeats until cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(controllers.HEARTBEAT_INTERVAL):
                await self._bus.wait_connected()
        await super().run()

    async def _beat(self) -> None:
        await in_thread(
            controllers.write_heartbeat, self._owner, bus_connected=self._bus.connected, now=clock.now()
        )
