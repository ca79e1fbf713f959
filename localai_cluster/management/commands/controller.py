"""`manage.py controller`: the process that runs operations.

Seven tasks in one event loop: the executor, the inventory of backends, the wakes of operations that wait for
nodes, the stopper of engines that nothing accounts for, the LISTEN task whose hints trigger those four, the
ticker of django-q2's schedules, and the heartbeat that tells pages that a controller is running. Any
number may run: they claim operations, inventory questions and stops, and lock schedules.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError

from localai_cluster import clock, conf, periodic
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.nats import NatsBus
from nodes.backends import install, inventory
from nodes.backends.inventory import Inventory
from nodes.definitions.files import Folder
from nodes.loading import load
from nodes.loading.stopping import Stopper
from nodes.reconcilers import schedules
from nodes.reconcilers.wakes import Wakes
from operations.changes.events import NODES, OPERATIONS, listen
from operations.executor import controllers
from operations.executor.executor import Executor
from operations.executor.waiting import Hints
from operations.executor.work import Handler, in_thread
from operations.reconcilers import schedules as ledger_schedules

log = logging.getLogger(__name__)

TICK_EVERY = 1.0
THREADS = 6
"""Each has a connection of its own. Without a number Python takes one a processor and four more."""


class Command(BaseCommand):
    """Runs a controller until SIGTERM or SIGINT."""

    help = "Runs operations and the schedules."
    # The settings. Django's other checks import every page; `manage.py check` and `serve` run them.
    requires_system_checks = (Tags.security,)

    def handle(self, *args: Any, **options: Any) -> None:
        asyncio.run(run())


async def run() -> None:
    """Runs until a signal; releases all leases before it returns."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "database"))
    owner = f"{socket.gethostname()[:20]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    bus, hints = NatsBus(conf.cluster().nats_url, name="controller"), Hints()
    bus.start()
    table: dict[str, Handler] = {
        install.KIND: install.InstallBackend(bus),
        load.KIND: load.LoadModel(bus, Folder(conf.cluster().models_path), hints),
    }
    executor = Executor(owner, table, lease=conf.cluster().operation_lease)
    lists, wakes, stopper = Inventory(bus), Wakes(), Stopper(bus)
    loops = [
        asyncio.create_task(executor.run(), name="executor"),
        asyncio.create_task(lists.run(), name="inventory"),
        asyncio.create_task(wakes.run(), name="wakes"),
        asyncio.create_task(stopper.run(), name="stopper"),
        asyncio.create_task(listen_for_changes(executor, lists, wakes, stopper, hints), name="hints"),
        asyncio.create_task(tick(), name="schedules"),
        asyncio.create_task(beat(owner, bus), name="beat"),
    ]
    log.info("controller %s is ready", owner)
    await _until_signal_or_failure(loops)
    await executor.stop()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    with contextlib.suppress(DatabaseError):
        await in_thread(controllers.sign_off, owner)
    await bus.close()
    log.info("controller %s stopped", owner)


async def _until_signal_or_failure(loops: list[asyncio.Task[None]]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({waiting, *loops}, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {waiting}:
        # A task must not end by itself; the supervisor restarts this process.
        log.error("the %s loop ended", task.get_name(), exc_info=task.exception())


async def listen_for_changes(
    executor: Executor, lists: Inventory, wakes: Wakes, stopper: Stopper, hints: Hints
) -> None:
    """Turns notifications into checks; after each (re)connect everything is checked."""
    async for channel, payload in listen(OPERATIONS, NODES, inventory.CHANNEL):
        if channel != OPERATIONS:
            lists.hint()
        if channel in (NODES, ""):
            wakes.changed(payload)
            stopper.hint()
        if channel in (OPERATIONS, ""):
            hints.notify(payload.split(" ", 1)[0])
            executor.hint()


async def tick() -> None:
    """Queues due schedules every second."""
    declared = False
    while True:
        try:
            if not declared:
                await in_thread(periodic.ensure, [*schedules.SCHEDULES, *ledger_schedules.SCHEDULES])
                declared = True
            await in_thread(periodic.tick)
        except DatabaseError as error:
            log.warning("schedules not ticked: %s", error)
        await asyncio.sleep(TICK_EVERY)


async def beat(owner: str, bus: Bus) -> None:
    """Records every few seconds that this controller is alive and whether it is connected to the bus."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(controllers.BEAT_EVERY):
            await bus.wait_connected()
    while True:
        try:
            await in_thread(controllers.beat, owner, bus_connected=bus.connected, now=clock.now())
        except DatabaseError as error:
            log.debug("controller heartbeat not written: %s", error)
        await asyncio.sleep(controllers.BEAT_EVERY)
