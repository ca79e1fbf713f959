"""The orderly end of a worker, the same for a signal and for a `stop` message (worker.md §19).

No more heartbeats, drain, wait for running requests, say goodbye, stop the engines, leave the bus. Every
step is bounded, no failed step keeps the next from running, and a second signal cuts the waits short.
"""

import asyncio
import logging

from localai_cluster.worker.controller import CallFailed, Controller

log = logging.getLogger(__name__)

POLL_EVERY = 1.0
POLL_LIMIT = 30.0
GOODBYE_LIMIT = 60.0


async def say_goodbye(controller: Controller, node_id: str, hurry: asyncio.Event) -> None:
    """Drains, waits up to 30 s until no request runs here, deregisters; all within 60 s or until `hurry`."""
    farewell = asyncio.create_task(_goodbye(controller, node_id, hurry))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({farewell, hurried}, timeout=GOODBYE_LIMIT, return_when=asyncio.FIRST_COMPLETED)
    for task in (farewell, hurried):
        task.cancel()
    await asyncio.gather(farewell, hurried, return_exceptions=True)


async def _goodbye(controller: Controller, node_id: str, hurry: asyncio.Event) -> None:
    try:
        await controller.drain(node_id)
        await _requests_end(controller, node_id, hurry)
    except CallFailed as error:
        log.warning("drain failed: %s", error)
    try:
        await controller.deregister(node_id)
        log.info("deregistered id=%s", node_id)
    except CallFailed as error:
        log.warning("deregistration failed: %s", error)


async def _requests_end(controller: Controller, node_id: str, hurry: asyncio.Event) -> None:
    for _ in range(round(POLL_LIMIT / POLL_EVERY)):
        running = await controller.in_flight(node_id)
        if running <= 0:
            return
        log.info("waiting for %d running request(s)", running)
        try:
            await asyncio.wait_for(hurry.wait(), POLL_EVERY)
            return
        except TimeoutError:
            continue
    log.warning("requests still run after %g s; leaving all the same", POLL_LIMIT)
