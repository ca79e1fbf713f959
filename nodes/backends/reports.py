"""Reports of commands under way: one subscription an operation, however many nodes report for it.

A subscription is a round trip to the server, and those of a thousand nodes would leave one after the other
before the first command does. So all commands of this process for one operation share theirs, and a report
goes to the command for the node whose subject it came on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from weakref import WeakKeyDictionary

from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import Bus, Message, Subscription

Receive = Callable[[bytes], None]


class _Reports:
    """Those of one operation, and who is told of them, by subject."""

    def __init__(self, bus: Bus, op_id: str) -> None:
        self.told: dict[str, list[Receive]] = {}
        # One at a time, in order.
        opening = bus.subscribe(subjects.install_progress_everywhere(op_id), self._receive, limit=1)
        self.opening: asyncio.Task[Subscription] = asyncio.create_task(opening, name=f"reports of {op_id}")

    async def _receive(self, message: Message) -> None:
        for receive in tuple(self.told.get(message.subject, ())):
            receive(message.payload)


_open: WeakKeyDictionary[Bus, dict[str, _Reports]] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def received(bus: Bus, node_id: str, op_id: str, receive: Receive) -> AsyncIterator[None]:
    """Calls `receive` with each report of this node for this operation; none that comes later is missed."""
    reports, subject = _open.setdefault(bus, {}), subjects.install_progress(node_id, op_id)
    mine = reports.get(op_id) or reports.setdefault(op_id, _Reports(bus, op_id))
    listeners = mine.told.setdefault(subject, [])
    listeners.append(receive)
    try:
        await asyncio.shield(mine.opening)  # the others wait for it too
        yield
    finally:
        listeners.remove(receive)
        if not listeners:
            mine.told.pop(subject, None)
        if not mine.told:
            if reports.get(op_id) is mine:
                del reports[op_id]
            await (await mine.opening).close()
