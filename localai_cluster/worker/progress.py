"""Progress of one operation on its way to the bus: at most one event a window, never late, never in the way.

The first tick leaves at once; what follows within the window overwrites one slot that leaves at the
window's end; the last one leaves before the operation is answered. Losing an event is harmless.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from localai_cluster.errors import ClusterError
from localai_cluster.messaging.messages import ProgressEvent, human_bytes

log = logging.getLogger(__name__)

WINDOW = 0.25


@dataclass(frozen=True)
class Tick:
    """How far an operation is: phase (`resolving`, `downloading`, `starting`), bytes, the file at hand."""

    phase: str
    current: int = 0
    total: int = 0
    file_name: str = ""


Report = Callable[[Tick], None]
"""Takes ticks from any thread and returns at once."""


def ignore(_: Tick) -> None:
    """The report of an operation nobody watches."""


class Progress:
    """The stream of events of one operation; `report` may be called from any thread."""

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
        self._pump = asyncio.create_task(self._run(), name=f"progress {op_id}")

    def report(self, tick: Tick) -> None:
        """Offers a tick; one that was offered before and has not left yet is forgotten."""
        self._slot = tick
        if not self._fresh.is_set():
            # A copy that is being stopped may outlive the loop by a moment.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fresh.set)

    async def finish(self) -> None:
        """Sends what still waits and ends the stream."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._leave()

    async def _run(self) -> None:
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            await self._leave()
            await self._sleep(WINDOW)

    async def _leave(self) -> None:
        tick, self._slot = self._slot, None
        if tick is None:
            return
        self._seq += 1
        try:
            await self._send(event(tick, self._seq, *self._ids))
        except ClusterError as error:
            log.debug("a progress event was lost: %s", error)


def event(tick: Tick, seq: int, op_id: str, node_id: str, backend: str) -> ProgressEvent:
    """The event that tells `tick`."""
    known = tick.total > 0
    return ProgressEvent(
        op_id=op_id,
        node_id=node_id,
        backend=backend,
        file_name=tick.file_name,
        current=human_bytes(tick.current) if known else "",
        total=human_bytes(tick.total) if known else "",
        percentage=round(100.0 * tick.current / tick.total, 1) if known else 0.0,
        phase=tick.phase,
        current_bytes=tick.current,
        total_bytes=tick.total,
        seq=seq,
    )
