"""The orderly stop of a worker, after a signal or a `stop` message (worker.md §19).

It stops heartbeats, drains, waits for running requests, deregisters, stops the engines and disconnects from
the bus. Every step has a time limit, a failed step does not prevent the next one, and a second signal ends
all waits.
"""

import asyncio
import logging

from localai_cluster.worker.control_plane import CallFailed, ControlPlane

log = logging.getLogger(__name__)

POLL_EVERY = 1.0
POLL_LIMIT = 30.0
DEREGISTER_LIMIT = 60.0


async def drain_and_deregister(control_plane: ControlPlane, node_id: str, hurry: asyncio.Event) -> None:
    """Drain, wait up to 30 s for running requests, deregister; all within 60 s or until `hurry`."""
    stopping = asyncio.create_task(_drain_and_deregister(control_plane, node_id, hurry))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({stopping, hurried}, timeout=DEREGISTER_LIMIT, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, hurried):
        task.cancel()
    await asyncio.gather(stopping, hurried, return_exceptions=True)


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
    for _ in range(round(POLL_LIMIT / POLL_EVERY)):
        running = await control_plane.in_flight(node_id)
        if running <= 0:
            return
        log.info("waiting for %d running request(s)", running)
        try:
            async with asyncio.timeout(POLL_EVERY):
                await hurry.wait()
            return
        except TimeoutError:
            continue
    log.warning("requests are still running after %g s; shutting down anyway", POLL_LIMIT)
