"""What web processes tell each other of prompts and replicas (`contract/nats.md` §7.4), and how it travels.

A hint only: what cannot be sent is dropped, and what is heard and cannot be right is ignored. Whether a
replica is there is told by its row.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec

from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import Bus, BusError, Message
from nodes.replicas.hooks import ALL_REPLICAS, Removed
from nodes.routing.chains import DEPTH

log = logging.getLogger(__name__)

MOST_WAITING = 1024
"""Messages that wait to be sent; the oldest go first."""
LARGEST = 16 * 1024
"""Bytes of a message that is read: four times what the longest chain of a model takes."""
LONGEST_MODEL = 255
_HASHES = 2**64
_INDICES = 2**31


class Given(msgspec.Struct, frozen=True):
    """A replica was given a prompt. Hashes are whole numbers of 64 bits, which no double holds."""

    model: str
    chain: tuple[int, ...]
    node_id: UUID
    replica: int


class Invalidated(msgspec.Struct, frozen=True):
    """A replica has gone; below 0, all of the model on the node."""

    model: str
    node_id: UUID
    replica: int


News = Given | Invalidated
_KINDS: dict[str, type[Any]] = {
    subjects.PREFIX_OBSERVED: Given,
    subjects.PREFIX_INVALIDATED: Invalidated,
}
_SUBJECTS = {kind: subject for subject, kind in _KINDS.items()}


def read(subject: str, payload: bytes) -> News | None:
    """What was told; None if that cannot be right."""
    kind = _KINDS.get(subject)
    if kind is None or len(payload) > LARGEST:
        return None
    try:
        told: News = msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    least = 0
    if isinstance(told, Invalidated):
        least = ALL_REPLICAS
    elif not 1 <= len(told.chain) <= DEPTH or not all(0 <= one < _HASHES for one in told.chain):
        return None
    named = 1 <= len(told.model) <= LONGEST_MODEL
    return told if named and max(told.replica, least) < _INDICES and told.replica >= least else None


class Outbox:
    """One process's news on their way out; lives on the loop of its bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[News] = deque(maxlen=MOST_WAITING)
        self._woken = asyncio.Event()

    def tell(self, news: News) -> None:
        """Sends it soon, or never; from the loop."""
        self._waiting.append(news)
        self._woken.set()

    def removed(self, one: Removed) -> None:
        """R3.21, R3.23: a hook for replicas whose rows this process has removed; from any thread."""
        news = Invalidated(one.model_name, one.node_id, one.replica_index)
        self._loop.call_soon_threadsafe(self.tell, news)

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._waiting:
                news = self._waiting.popleft()
                try:
                    await self._bus.publish(_SUBJECTS[type(news)], msgspec.json.encode(news))
                except BusError:
                    self._waiting.clear()


async def hear(bus: Bus, take: Callable[[News], None]) -> None:
    """Has `take` called with what others tell, in order."""

    async def heard(message: Message) -> None:
        if (news := read(message.subject, message.payload)) is not None:
            take(news)

    await bus.subscribe(subjects.PREFIX_NEWS, heard, limit=1)
