"""Identical commands that run at the same time share one round trip (contract/nats.md §4.1).

The first caller sends the command. Later callers with the same command get its progress from then on, and its
outcome. The command is cancelled when no caller waits for it any more.

All commands of one operation share one subscription to progress reports. A subscription costs a round trip,
and a thousand of them would delay the first command. The subject of a report determines the node whose
command receives it.

The reports of a stock worker start again at each layer of an image: `total` is the size of all layers, and
`current` the bytes of the present layer (contract/nats.md §4.3). `Layers` adds the bytes of the earlier
layers.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from localai_cluster.kit import cancellation
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import UNQUEUED, Bus, Message, Subscription
from localai_cluster.messaging.messages import ProgressEvent

T = TypeVar("T")
OnProgress = Callable[[ProgressEvent], None]


@dataclass(eq=False)
class _RunningCommand:
    """A command that is running. `waiting` has one entry for each caller that waits for its outcome."""

    waiting: list[OnProgress | None] = field(default_factory=list)

    def forward(self, event: ProgressEvent) -> None:
        for listener in list(self.waiting):
            if listener is not None:
                listener(event)


_running_commands: WeakKeyDictionary[Bus, dict[Hashable, tuple[_RunningCommand, asyncio.Task[Any]]]] = (
    WeakKeyDictionary()
)


async def join_or_send(
    bus: Bus,
    key: Hashable,
    send: Callable[[OnProgress | None], Coroutine[Any, Any, T]],
    on_progress: OnProgress | None,
) -> T:
    """Return the outcome of the command with this key: the running one on this bus, or else that of `send`.

    Progress is reported only if the first caller passed `on_progress`.
    """
    flights = _running_commands.setdefault(bus, {})
    if key not in flights:
        flight = _RunningCommand()
        work = send(flight.forward if on_progress else None)
        flights[key] = flight, asyncio.create_task(work, name="command")
        flights[key][1].add_done_callback(partial(_forget, flights, key))
    flight, task = flights[key]
    flight.waiting.append(on_progress)
    try:
        outcome: T = await asyncio.shield(task)
        return outcome
    finally:
        flight.waiting.remove(on_progress)
        if not flight.waiting and not task.done():
            _forget(flights, key, task)
            await cancellation.cancel_and_wait(task)


def _forget(
    flights: dict[Hashable, tuple[_RunningCommand, asyncio.Task[Any]]], key: Hashable, task: asyncio.Task[Any]
) -> None:
    """Remove the ended command, so that the next caller sends a new one."""
    if key in flights and flights[key][1] is task:
        del flights[key]


Receive = Callable[[bytes], None]


class _Reports:
    """One operation's subscription to progress reports, and the receivers of the reports by subject."""

    def __init__(self, bus: Bus, op_id: str) -> None:
        self.receivers: dict[str, list[Receive]] = {}
        subject = messages.install_progress_everywhere(op_id)
        opening = bus.subscribe(subject, self._receive, limit=UNQUEUED)
        self.opening: asyncio.Task[Subscription] = asyncio.create_task(opening, name=f"reports of {op_id}")

    async def _receive(self, message: Message) -> None:
        for receive in tuple(self.receivers.get(message.subject, ())):
            receive(message.payload)


_open_reports: WeakKeyDictionary[Bus, dict[str, _Reports]] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def receive_reports(bus: Bus, node_id: str, op_id: str, receive: Receive) -> AsyncIterator[None]:
    """Call `receive` with each progress report of the node for the operation, during the block."""
    reports, subject = _open_reports.setdefault(bus, {}), messages.install_progress(node_id, op_id)
    shared = reports.get(op_id) or reports.setdefault(op_id, _Reports(bus, op_id))
    listeners = shared.receivers.setdefault(subject, [])
    listeners.append(receive)
    try:
        await asyncio.shield(shared.opening)  # the others wait for it too
        yield
    finally:
        listeners.remove(receive)
        if not listeners:
            shared.receivers.pop(subject, None)
        if not shared.receivers:
            if reports.get(op_id) is shared:
                del reports[op_id]
            await (await shared.opening).close()


_LAYER_PATTERN = re.compile(r"Downloading (\d{1,4})/(\d{1,4}) ")
_EXTRACTING_PREFIX = "Extracting "


@dataclass
class Layers:
    """Converts the progress of single image layers into the progress of the whole image.

    Each command needs an instance of its own, and passes its reports in the order of their arrival.
    """

    _earlier_percent: float = 0.0
    _layer_number: int = 0
    _layer_percent: float = 0.0
    _shown_percent: float = 0.0

    def with_total_percentage(self, event: ProgressEvent) -> ProgressEvent:
        """Return the event with the percentage of the whole image, which never falls.

        Events with a sequence number, which only our workers send, contain this percentage already.
        """
        if event.seq:
            return event
        reported = min(max(event.percentage, 0.0), 100.0)
        if event.file_name.startswith(_EXTRACTING_PREFIX):
            # Extraction counts from 0 again after the download is complete.
            self._shown_percent = max(self._shown_percent, reported)
            return replace(event, phase="extracting", percentage=self._shown_percent)
        match = _LAYER_PATTERN.match(event.file_name)
        layer = int(match[1]) if match else self._layer_number
        if layer > self._layer_number:
            self._earlier_percent, self._layer_percent, self._layer_number = (
                self._earlier_percent + self._layer_percent,
                0.0,
                layer,
            )
        if layer == self._layer_number:
            self._layer_percent = max(self._layer_percent, reported)
        self._shown_percent = max(
            self._shown_percent, min(self._earlier_percent + self._layer_percent, 100.0)
        )
        return replace(event, percentage=self._shown_percent)
