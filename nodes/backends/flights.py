"""Identical commands under way are one round trip (contract/nats.md §4.1).

The first to ask sends it; who asks for the same meanwhile gets its progress and its outcome. It ends early
when the last of them is gone.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from localai_cluster import cancel
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import ProgressEvent

T = TypeVar("T")
OnProgress = Callable[[ProgressEvent], None]


@dataclass(eq=False)
class _Flight:
    """One command under way; an entry for each that waits for it."""

    waiting: list[OnProgress | None] = field(default_factory=list)

    def tell(self, event: ProgressEvent) -> None:
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
    """The outcome of `send`, which is called unless a command with this key is under way on this bus.

    Progress is reported if the first to ask wanted it.
    """
    flights = _flights.setdefault(bus, {})
    if key not in flights:
        flight = _Flight()
        work = send(flight.tell if on_progress else None)
        flights[key] = flight, asyncio.create_task(work, name="command")
        flights[key][1].add_done_callback(lambda task: _landed(flights, key, task))
    flight, task = flights[key]
    flight.waiting.append(on_progress)
    try:
        outcome: T = await asyncio.shield(task)
        return outcome
    finally:
        flight.waiting.remove(on_progress)
        if not flight.waiting and not task.done():
            _landed(flights, key, task)
            await cancel.end(task)


def _landed(
    flights: dict[Hashable, tuple[_Flight, asyncio.Task[Any]]], key: Hashable, task: asyncio.Task[Any]
) -> None:
    """Who asks from now on asks for another one."""
    if key in flights and flights[key][1] is task:
        del flights[key]
