"""Prefix updates that web processes exchange about prompts and replicas (`contract/nats.md` §7.4).

Updates are best effort: a process drops updates that it cannot send and ignores implausible updates that it
receives. Only the row of a replica decides whether the replica exists.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec

from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus, BusError, Message
from nodes.gateway.prefix_table import DEPTH
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica

MAX_WAITING = 1024
"""Limit on the queued messages; beyond it the oldest are dropped."""
MAX_MESSAGE_BYTES = 16 * 1024
"""Limit on the bytes of a received message: four times the size of the longest chain of a model."""
MAX_MODEL_LENGTH = 255
_HASHES = 2**64
_INDICES = 2**31


class PrefixObserved(msgspec.Struct, frozen=True):
    """A replica received a prompt. Hashes are 64-bit integers, which no double can represent exactly."""

    model: str
    chain: tuple[int, ...]
    node_id: UUID
    replica: int


class PrefixInvalidated(msgspec.Struct, frozen=True):
    """A replica was removed; an index below 0 means all replicas of the model on the node."""

    model: str
    node_id: UUID
    replica: int


PrefixUpdate = PrefixObserved | PrefixInvalidated
_KINDS: dict[str, type[Any]] = {
    messages.PREFIX_OBSERVED_SUBJECT: PrefixObserved,
    messages.PREFIX_INVALIDATED_SUBJECT: PrefixInvalidated,
}
_SUBJECTS = {kind: subject for subject, kind in _KINDS.items()}


def decode(subject: str, payload: bytes) -> PrefixUpdate | None:
    """Decode a prefix update; return None if it is malformed or implausible."""
    kind = _KINDS.get(subject)
    if kind is None or len(payload) > MAX_MESSAGE_BYTES:
        return None
    try:
        update: PrefixUpdate = msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    lowest_index = 0
    if isinstance(update, PrefixInvalidated):
        lowest_index = ALL_REPLICAS
    elif not 1 <= len(update.chain) <= DEPTH or not all(
        0 <= block_hash < _HASHES for block_hash in update.chain
    ):
        return None
    has_valid_name = 1 <= len(update.model) <= MAX_MODEL_LENGTH
    return (
        update
        if has_valid_name and max(update.replica, lowest_index) < _INDICES and update.replica >= lowest_index
        else None
    )


class Outbox(PeriodicTask):
    """Queue of this process's outgoing prefix updates. Bound to the event loop of its bus."""

    def __init__(self, bus: Bus) -> None:
        super().__init__("prefix updates", self._publish_queued, interval=None)
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[PrefixUpdate] = deque(maxlen=MAX_WAITING)

    def queue(self, update: PrefixUpdate) -> None:
        """Queue an update for best-effort delivery. Call it on the event loop only."""
        self._waiting.append(update)
        self.wake()

    def removed(self, replica: RemovedReplica) -> None:
        """Queue the invalidation of a replica whose row this process deleted (R3.21, R3.23). Thread-safe."""
        update = PrefixInvalidated(replica.model_name, replica.node_id, replica.replica_index)
        self._loop.call_soon_threadsafe(self.queue, update)

    async def _publish_queued(self) -> None:
        while self._waiting:
            update = self._waiting.popleft()
            try:
                await self._bus.publish(_SUBJECTS[type(update)], msgspec.json.encode(update))
            except BusError:
                self._waiting.clear()


async def subscribe(bus: Bus, on_update: Callable[[PrefixUpdate], None]) -> None:
    """Subscribe to prefix updates; call `on_update` with each update of another process, in order."""

    async def on_message(message: Message) -> None:
        if (update := decode(message.subject, message.payload)) is not None:
            on_update(update)

    await bus.subscribe(messages.PREFIX_SUBJECTS, on_message, limit=1)
