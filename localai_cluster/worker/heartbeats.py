"""Heartbeats: the node's figures at every interval, as long as the bus is connected too (worker.md §6).

An engine that has ended by itself is reported at once, by a heartbeat out of turn.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from localai_cluster import clock
from localai_cluster.metrics.worker import HEARTBEATS
from localai_cluster.worker import hardware
from localai_cluster.worker.control_plane import CallFailed, ControlPlane
from localai_cluster.worker.exits import Exits
from localai_cluster.worker.gpus import GpuReader
from localai_cluster.worker.hardware import Gpus
from localai_cluster.worker.registration import GaveUp, hint

log = logging.getLogger(__name__)

REMIND_EVERY = 60.0
SOON = 1.0
"""Seconds after news until the figures follow: a driver frees the memory of a process that has ended."""
COPIED = (
    "This worker's data folder has been copied, and the copy has registered since. Stop one of"
    " the two workers."
    " To make this one a separate node, delete the file node-secret before the next start"
)


async def figures(models: Path, reader: GpuReader) -> dict[str, Any]:
    """The body of a heartbeat: what can be measured now."""
    measured: dict[str, Any] = hardware.figures(models).known("available_ram", "total_disk", "available_disk")
    gpus = await hardware.gpus(reader)
    if gpus is None or gpus == Gpus():
        return measured
    measured["available_vram"] = gpus.free
    return measured if gpus.each is None else measured | {"gpus": [gpu.report for gpu in gpus.each]}


class HeartbeatLoop:
    """Sends heartbeats until it is cancelled.

    `off_bus` says why this worker is not on the bus. `register` registers again, as often as it takes, when
    the control plane no longer knows the node. `register_once` tries it once (CallFailed), when the secret is
    refused. `unsubscribe` stops answering commands, when another process has become the node. `exits` are the
    engines to report. `problem` says what an admin must resolve.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        off_bus: Callable[[], str],
        interval: float,
        node_id: Callable[[], str],
        measure: Callable[[], Awaitable[dict[str, Any]]],
        register: Callable[[], Awaitable[None]],
        register_once: Callable[[], Awaitable[None]],
        unsubscribe: Callable[[], Awaitable[None]],
        exits: Exits,
    ) -> None:
        self._control_plane = control_plane
        self._off_bus = off_bus
        self._interval = interval
        self._node_id = node_id
        self._measure = measure
        self._register = register
        self._register_once = register_once
        self._unsubscribe = unsubscribe
        self._exits = exits
        self._reminded: dict[str, float] = {}
        self._paused_until = 0.0
        self.problem = ""

    async def run(self) -> None:
        """Sends one heartbeat per interval, the first one interval after the start, and one at every news.

        After news the next one comes soon: it says what the engine has given back.
        """
        due_at = clock.monotonic() + self._interval
        while True:
            hurried = await self._exits.news_within(due_at - clock.monotonic())
            try:
                await self.send(hurried=hurried)
            except GaveUp:
                raise
            except Exception:
                # A figure that cannot be read must not stop the engines of this machine.
                log.exception("heartbeat failed")
            due_at = min(due_at, clock.monotonic() + SOON) if hurried else clock.monotonic() + self._interval

    async def send(self, *, hurried: bool = False) -> None:
        """Sends one heartbeat, or logs why not. Without the bus a node must go stale, so it sends none.

        A `hurried` one has no figures: to read those of the GPUs takes time.
        """
        if reason := self._off_bus():
            HEARTBEATS.labels("off_bus").inc()
            self._remind("bus", f"no heartbeat: {reason}")
            return
        if clock.monotonic() < self._paused_until:
            return
        body: dict[str, Any] = {} if hurried else dict(await self._measure())
        sent_at, exits = clock.monotonic(), self._exits.due()
        if exits:
            body["ended_processes"] = [one.report for one in exits]
        try:
            await self._control_plane.heartbeat(self._node_id(), body)
        except CallFailed as error:
            HEARTBEATS.labels("refused" if 400 <= error.http_status < 500 else "failed").inc()
            await self._failed(error)
        else:
            HEARTBEATS.labels("ok").inc()
            self.problem = ""
            self._exits.answered(exits, sent_at)

    async def _failed(self, error: CallFailed) -> None:
        if error.http_status == 404:
            log.warning("the control plane no longer knows this node; registering again")
            await self._register()
        elif error.refused:
            await self._refused(error)
        elif error.http_status == 409:
            self.problem = "another process has registered with this node's secret"
            await self._unsubscribe()
            self._remind("copied", f"heartbeat refused: {error}. {COPIED}", logging.ERROR)
        else:
            self._pause(error.wait)
            self._remind("failed", f"heartbeat failed: {error}")

    async def _refused(self, error: CallFailed) -> None:
        """The node was removed or its secret revoked. A registration, once a minute, tells which."""
        self.problem = "the control plane refuses this node's secret"
        if not self._due("refused"):
            return
        log.warning("heartbeat refused: %s; registering again", error)
        try:
            await self._register_once()
        except CallFailed as refusal:
            # A revoked secret stays revoked, and every attempt counts against this address.
            self._pause(REMIND_EVERY)
            log.error("registration refused: %s%s", refusal, hint(refusal))

    def _pause(self, seconds: float) -> None:
        self._paused_until = clock.monotonic() + seconds

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
