"""Heartbeats: the node's figures, every interval, for as long as the bus is connected too (worker.md §6)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from localai_cluster import clock
from localai_cluster.messaging.bus import Bus
from nodes.agent import hardware
from nodes.agent.controller import CallFailed, Controller
from nodes.agent.registration import GaveUp

log = logging.getLogger(__name__)

REMIND_EVERY = 60.0


async def figures(models: Path) -> dict[str, int]:
    """The body of a heartbeat: what can be measured now."""
    told = hardware.figures(models).known("available_ram", "total_disk", "available_disk")
    found = await hardware.gpus()
    return told | ({"available_vram": found.free} if found.total else {})


class Heart:
    """Beats until it is cancelled. `rejoin` is called when the controller does not know the node any more."""

    def __init__(
        self,
        controller: Controller,
        bus: Bus,
        interval: float,
        node_id: Callable[[], str],
        measure: Callable[[], Awaitable[dict[str, int]]],
        rejoin: Callable[[], Awaitable[None]],
    ) -> None:
        self._controller = controller
        self._bus = bus
        self._interval = interval
        self._node_id = node_id
        self._measure = measure
        self._rejoin = rejoin
        self._reminded: dict[str, float] = {}

    async def beat_for_ever(self) -> None:
        """The first beat comes one interval after the start."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.beat()
            except GaveUp:
                raise
            except Exception:
                # A figure that cannot be read must not take the engines of this machine down.
                log.exception("heartbeat failed")

    async def beat(self) -> None:
        """One heartbeat, or the reason why there is none. A node without bus goes stale on purpose."""
        if not self._bus.connected:
            self._remind("bus", "no heartbeat: the message bus is not connected")
            return
        try:
            await self._controller.heartbeat(self._node_id(), await self._measure())
        except CallFailed as error:
            await self._failed(error)

    async def _failed(self, error: CallFailed) -> None:
        if error.http_status == 404:
            log.warning("the controller does not know this node any more; registering again")
            await self._rejoin()
        elif error.http_status in (401, 403):
            self._remind(
                "refused",
                f"heartbeat refused: {error}. The controller does not accept this node's secret: restore the "
                "file node-secret, or delete the node there so that it can enrol anew",
            )
        else:
            self._remind("failed", f"heartbeat failed: {error}")

    def _remind(self, kind: str, text: str) -> None:
        now = clock.monotonic()
        if now - self._reminded.get(kind, -REMIND_EVERY) >= REMIND_EVERY:
            self._reminded[kind] = now
            log.warning("%s", text)
