"""Heartbeats: the node's figures at every interval while the bus is connected (worker.md §6).

An extra heartbeat reports an engine that has ended by itself at once.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localai_cluster.kit import clock
from localai_cluster.metrics.worker import HEARTBEATS
from localai_cluster.worker import hardware
from localai_cluster.worker.control_plane import CallFailed, ControlPlane, DowngradeRefused, ServerKind
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.hardware import GpuReader, GpuTotals
from localai_cluster.worker.registration import GaveUp, hint

log = logging.getLogger(__name__)

REMINDER_INTERVAL_SECONDS = 60.0
FIGURES_AFTER_EXIT_SECONDS = 1.0
"""Seconds between the report of an exit and new figures: the driver needs time to free the memory."""
COPIED_FOLDER_PROBLEM = (
    "This worker's data folder has been copied, and the copy has registered since. Stop one of"
    " the two workers."
    " To make this one a separate node, delete the file node-secret before the next start"
)


async def measure_figures(models: Path, reader: GpuReader) -> dict[str, Any]:
    """Measure the figures for the body of a heartbeat."""
    measured: dict[str, Any] = await hardware.measure_figures(models)
    measured.pop("total_ram", None)  # sent with registrations only
    gpus = await hardware.read_gpus(reader)
    if gpus is None or gpus == GpuTotals() or gpus.free is None:
        return measured
    measured["available_vram"] = gpus.free
    return measured if gpus.each is None else measured | {"gpus": [gpu.report for gpu in gpus.each]}


@dataclass(eq=False, repr=False)
class HeartbeatLoop:
    """Sends heartbeats until it is cancelled.

    `off_bus` returns the reason why this worker is not on the bus, "" if it is. `register` registers again,
    as often as needed; it is called if the control plane no longer has the node. `register_once` tries once
    and raises CallFailed; it is called if the secret is refused. `unsubscribe` ends the subscriptions to
    commands; it is called if another process has become the node. `exits` has the ended engines to report.
    `problem` describes a condition that an administrator must resolve.
    """

    control_plane: ControlPlane
    off_bus: Callable[[], str]
    interval: float
    node_id: Callable[[], str]
    measure: Callable[[], Awaitable[dict[str, Any]]]
    register: Callable[[], Awaitable[None]]
    register_once: Callable[[], Awaitable[None]]
    unsubscribe: Callable[[], Awaitable[None]]
    exits: Exits
    _reminded: dict[str, float] = field(default_factory=dict, init=False)
    _paused_until: float = field(default=0.0, init=False)
    problem: str = field(default="", init=False)

    async def run(self) -> None:
        """Send a heartbeat at every interval and at every exit; the first after one interval.

        A further heartbeat follows soon after an exit, because it reports the memory that the engine has
        freed.
        """
        due_at = clock.monotonic() + self.interval
        while True:
            hurried = await self.exits.wait_for_exit(due_at - clock.monotonic())
            try:
                await self.send(hurried=hurried)
            except GaveUp:
                raise
            except Exception:
                # A failed measurement must not stop the engines of this machine.
                log.exception("heartbeat failed")
            due_at = (
                min(due_at, clock.monotonic() + FIGURES_AFTER_EXIT_SECONDS)
                if hurried
                else clock.monotonic() + self.interval
            )

    async def send(self, *, hurried: bool = False) -> None:
        """Send one heartbeat, or log the reason why none is sent.

        Without the bus no heartbeat is sent, so that the node becomes stale. A `hurried` heartbeat has no
        figures, because reading the GPUs takes time.
        """
        if reason := self.off_bus():
            HEARTBEATS.labels("off_bus").inc()
            self._log_reminder("bus", f"no heartbeat: {reason}")
            return
        if clock.monotonic() < self._paused_until:
            return
        body: dict[str, Any] = {} if hurried else dict(await self.measure())
        sent_at, exits = clock.monotonic(), self.exits.due()
        if exits:
            body["ended_processes"] = [ended.report for ended in exits]
        try:
            await self.control_plane.heartbeat(self.node_id(), body)
        except CallFailed as error:
            HEARTBEATS.labels("refused" if 400 <= error.http_status < 500 else "failed").inc()
            await self._handle_failure(error, sent_at)
        else:
            HEARTBEATS.labels("ok").inc()
            self.problem = ""
            self.exits.record_answer(exits, sent_at)

    async def _handle_failure(self, error: CallFailed, sent_at: float) -> None:
        if error.http_status == 404:
            self.problem = "the control plane no longer knows this node"
            log.warning("%s; registering again", self.problem)
            await self.register()
        elif error.is_credential_refused:
            await self._handle_refusal(error)
        elif error.http_status == 409:
            if self.control_plane.registered_at > sent_at:
                return  # this process has become the node again since
            self.problem = "another process has registered with this node's secret"
            await self.unsubscribe()
            self._log_reminder(
                "copied", f"heartbeat refused: {error}. {COPIED_FOLDER_PROBLEM}", logging.ERROR
            )
        else:
            self._pause_heartbeats(error.wait)
            self._log_reminder("failed", f"heartbeat failed: {error}")

    async def _handle_refusal(self, error: CallFailed) -> None:
        """Handle a refused secret: the node was removed, the secret revoked, or the server replaced.

        A registration, at most once a minute, distinguishes these causes. A stock frontend refuses the token:
        it would refuse another registration too, and if it accepted the registration, it would forget the
        node's replicas.
        """
        is_stock = self.control_plane.kind is ServerKind.STOCK
        refused = "the registration token" if is_stock else "this node's secret"
        self.problem = f"the control plane refuses {refused}"
        if not self._is_reminder_due("refused"):
            return
        try:
            if is_stock and not await self.control_plane.knows_secrets():
                log.error("heartbeat refused: %s%s", error, hint(error))
                return
            log.warning("heartbeat refused: %s; registering again", error)
            await self.register_once()
        except CallFailed as refusal:
            # A revoked secret stays revoked, and every attempt counts against this address.
            self._pause_heartbeats(REMINDER_INTERVAL_SECONDS)
            if isinstance(refusal, DowngradeRefused):
                self.problem = refusal.message
            log.error("registration refused: %s%s", refusal, hint(refusal))

    def _pause_heartbeats(self, seconds: float) -> None:
        self._paused_until = clock.monotonic() + seconds

    def _log_reminder(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        if self._is_reminder_due(kind):
            log.log(level, "%s", text)

    def _is_reminder_due(self, kind: str) -> bool:
        """Return True at most once a minute for each `kind`."""
        now = clock.monotonic()
        if now - self._reminded.get(kind, -REMINDER_INTERVAL_SECONDS) < REMINDER_INTERVAL_SECONDS:
            return False
        self._reminded[kind] = now
        return True
