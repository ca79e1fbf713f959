"""Progress of an install: the ticks of the installer, and the events that a controller receives."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from localai_cluster.kit import cancellation
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.quantities import human_bytes
from localai_cluster.messaging.messages import ProgressEvent

log = logging.getLogger(__name__)

MIN_EVENT_INTERVAL_SECONDS = 0.25


@dataclass(frozen=True)
class Tick:
    """Progress of an install at one moment: phase (`resolving`, `downloading`, `starting`), bytes, file."""

    phase: str
    current: int = 0
    total: int = 0
    file_name: str = ""


ReportTick = Callable[[Tick], None]
"""Callback that accepts a progress tick. Any thread may call it, and it returns at once."""


def ignore_tick(_: Tick) -> None:
    """Drop a tick. This is the callback of an operation without a progress stream."""


class ProgressStream:
    """The progress events of one operation. Any thread may call `report`.

    The first tick is sent at once. Ticks within `MIN_EVENT_INTERVAL_SECONDS` after an event replace each
    other, and the last of them is sent then. The last event is sent before the operation's reply. Sending
    never blocks the work.
    """

    def __init__(
        self,
        send: Callable[[ProgressEvent], Awaitable[None]],
        op_id: str,
        node_id: str,
        backend: str,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._send = send
        self._ids = (op_id, node_id, backend)
        self._sleep = sleep
        self._slot: Tick | None = None
        self._seq = 0
        self._fresh = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pump = asyncio.create_task(self._send_ticks(), name=f"progress {op_id}")

    def report(self, tick: Tick) -> None:
        """Queue a tick. It replaces a queued tick that has not been sent yet."""
        self._slot = tick
        if not self._fresh.is_set():
            # A copy that is being stopped may briefly outlive the loop.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fresh.set)

    async def finish(self) -> None:
        """Send the queued tick and end the stream."""
        await cancellation.cancel_and_wait(self._pump)
        await self._send_queued()

    async def _send_ticks(self) -> None:
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            await self._send_queued()
            await self._sleep(MIN_EVENT_INTERVAL_SECONDS)

    async def _send_queued(self) -> None:
        tick, self._slot = self._slot, None
        if tick is None:
            return
        self._seq += 1
        try:
            await self._send(build_event(tick, self._seq, *self._ids))
        except ClusterError as error:
            log.debug("progress event not sent: %s", error)
        except asyncio.CancelledError:
            # `finish` sends this tick, unless there is a later one.
            self._slot = self._slot or tick
            raise


def build_event(tick: Tick, seq: int, op_id: str, node_id: str, backend: str) -> ProgressEvent:
    """Build the event for `tick`."""
    has_total = tick.total > 0
    return ProgressEvent(
        op_id=op_id,
        node_id=node_id,
        backend=backend,
        file_name=tick.file_name,
        current=human_bytes(tick.current) if has_total else "",
        total=human_bytes(tick.total) if has_total else "",
        percentage=round(100.0 * tick.current / tick.total, 1) if has_total else 0.0,
        phase=tick.phase,
        current_bytes=tick.current,
        total_bytes=tick.total,
        seq=seq,
    )
