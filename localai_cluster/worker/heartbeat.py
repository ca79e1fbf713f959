"""Heartbeats: the node's figures, every interval, for as long as the bus is connected too (worker.md §6)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from localai_cluster import clock
from localai_cluster.messaging.bus import Bus
from localai_cluster.worker import hardware
from localai_cluster.worker.controller import CallFailed, Controller
from localai_cluster.worker.registration import GaveUp, mend

log = logging.getLogger(__name__)

REMIND_EVERY = 60.0
COPIED = (
    "This worker's data folder has been copied, and the copy has registered since. Stop one of the two. Where"
    " it shall be a node of its own, delete the file node-secret before the next start"
)


async def figures(models: Path) -> dict[str, int]:
    """The body of a heartbeat: what can be measured now."""
    told = hardware.figures(models).known("available_ram", "total_disk", "available_disk")
    found = await hardware.gpus()
    return told | ({"available_vram": found.free} if found.total else {})


class Heart:
    """Beats until it is cancelled.

    `rejoin` registers again, for as long as it takes: the controller does not know the node any more. `knock`
    does so once (CallFailed): the controller refuses the secret. `give_way` stops answering commands: another
    process speaks for the node. `problem` says what an admin has to see to.
    """

    def __init__(
        self,
        controller: Controller,
        bus: Bus,
        interval: float,
        node_id: Callable[[], str],
        measure: Callable[[], Awaitable[dict[str, int]]],
        rejoin: Callable[[], Awaitable[None]],
        knock: Callable[[], Awaitable[None]],
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        self._controller = controller
        self._bus = bus
        self._interval = interval
        self._node_id = node_id
        self._measure = measure
        self._rejoin = rejoin
        self._knock = knock
        self._give_way = give_way
        self._reminded: dict[str, float] = {}
        self._quiet_until = 0.0
        self.problem = ""

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
        if clock.monotonic() < self._quiet_until:
            return
        try:
            await self._controller.heartbeat(self._node_id(), await self._measure())
        except CallFailed as error:
            await self._failed(error)
        else:
            self.problem = ""

    async def _failed(self, error: CallFailed) -> None:
        if error.http_status == 404:
            log.warning("the controller does not know this node any more; registering again")
            await self._rejoin()
        elif error.refused:
            await self._refused(error)
        elif error.http_status == 409:
            self.problem = "another process has registered with this node's secret"
            await self._give_way()
            self._remind("copied", f"heartbeat refused: {error}. {COPIED}", logging.ERROR)
        else:
            self._rest(error.wait)
            self._remind("failed", f"heartbeat failed: {error}")

    async def _refused(self, error: CallFailed) -> None:
        """The record was removed, or the secret revoked: a registration tells which, once a minute."""
        self.problem = "the controller refuses this node's secret"
        if not self._due("refused"):
            return
        log.warning("heartbeat refused: %s; registering again", error)
        try:
            await self._knock()
        except CallFailed as refusal:
            # A refused secret is refused for good; every try counts against everybody at this address.
            self._rest(REMIND_EVERY)
            log.error("registration refused: %s%s", refusal, mend(refusal))

    def _rest(self, seconds: float) -> None:
        self._quiet_until = clock.monotonic() + seconds

    def _remind(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        if self._due(kind):
            log.log(level, "%s", text)

    def _due(self, kind: str) -> bool:
        """Whether a minute has passed since this was last true for `kind`."""
        now = clock.monotonic()
        if now - self._reminded.get(kind, -REMIND_EVERY) < REMIND_EVERY:
            return False
        self._reminded[kind] = now
        return True
