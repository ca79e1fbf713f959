"""Identical commands that run at the same time share one round trip (contract/nats.md §4.1).

The first caller sends the command; callers with the same command get its progress and its outcome meanwhile.
The command is cancelled when its last caller is gone.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from localai_cluster.kit import cancellation
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import ProgressEvent

T = TypeVar("T")
OnProgress = Callable[[ProgressEvent], None]


@dataclass(eq=False)
class _Flight:
    """One running command; an entry in `waiting` for each of its callers."""

    waiting: list[OnProgress | None] = field(default_factory=list)

    def forward(self, event: ProgressEvent) -> None:
        for listener in list(self.waiting):
            if listener is not None:
                listener(event)


_flights: WeakKeyDictionary[Bus, dict[Hashable, tuple[_Flight, asyncio.Task[Any]]]] = WeakKeyDictionary()


async def joined(
    bus: Bus,
    key: Hashable,
    send: Callable[[OnProgress | None], Coroutine[Any, Any, T]],
    on_progress: OnProgress | None,
) -> T:
    """Return the outcome of `send`, or of the running command with this key on this bus.

    Progress is reported if the first caller passed `on_progress`.
    """
    flights = _flights.setdefault(bus, {})
    if key not in flights:
        flight = _Flight()
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
            await cancellation.end(task)


def _forget(
    flights: dict[Hashable, tuple[_Flight, asyncio.Task[Any]]], key: Hashable, task: asyncio.Task[Any]
) -> None:
    """Forget the command, so that the next caller sends a new one."""
    if key in flights and flights[key][1] is task:
        del flights[key]
