"""Updates about prompts and removed replicas that web processes exchange (`contract/nats.md` §7.4).

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
from nodes.gateway.prefix_table import MAX_CHAIN_BLOCKS
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica

MAX_QUEUED_UPDATES = 1024
"""Maximum number of queued updates; the oldest are dropped."""
MAX_MESSAGE_BYTES = 16 * 1024
"""Maximum bytes of a received update: four times the size of the longest valid one."""
MAX_MODEL_LENGTH = 255
_HASH_LIMIT = 2**64
_INDEX_LIMIT = 2**31


class PrefixObserved(msgspec.Struct, frozen=True):
    """Update: a replica received a prompt.

    Hashes are 64-bit integers, which exceed the precision of a double.
    """

    model: str
    chain: tuple[int, ...]
    node_id: UUID
    replica: int


class PrefixInvalidated(msgspec.Struct, frozen=True):
    """Update: a replica was removed. An index below 0 means all replicas of the model on the node."""

    model: str
    node_id: UUID
    replica: int


PrefixUpdate = PrefixObserved | PrefixInvalidated
_TYPE_BY_SUBJECT: dict[str, type[Any]] = {
    messages.PREFIX_OBSERVED_SUBJECT: PrefixObserved,
    messages.PREFIX_INVALIDATED_SUBJECT: PrefixInvalidated,
}
_SUBJECT_BY_TYPE = {kind: subject for subject, kind in _TYPE_BY_SUBJECT.items()}


def decode_update(subject: str, payload: bytes) -> PrefixUpdate | None:
    """Decode an update. Return None if it is malformed or implausible."""
    kind = _TYPE_BY_SUBJECT.get(subject)
    if kind is None or len(payload) > MAX_MESSAGE_BYTES:
        return None
    try:
        update: PrefixUpdate = msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    lowest_index = 0
    if isinstance(update, PrefixInvalidated):
        lowest_index = ALL_REPLICAS
    elif not 1 <= len(update.chain) <= MAX_CHAIN_BLOCKS or not all(
        0 <= block_hash < _HASH_LIMIT for block_hash in update.chain
    ):
        return None
    has_valid_name = 1 <= len(update.model) <= MAX_MODEL_LENGTH
    return (
        update
        if has_valid_name
        and max(update.replica, lowest_index) < _INDEX_LIMIT
        and update.replica >= lowest_index
        else None
    )


class Outbox(PeriodicTask):
    """Queue of the updates that this process sends. Bound to the event loop of its bus."""

    def __init__(self, bus: Bus) -> None:
        super().__init__("prefix updates", self._publish_queued, interval=None)
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[PrefixUpdate] = deque(maxlen=MAX_QUEUED_UPDATES)

    def queue(self, update: PrefixUpdate) -> None:
        """Queue an update. Delivery is best effort. Call it on the event loop."""
        self._waiting.append(update)
        self.wake()

    def queue_removal(self, replica: RemovedReplica) -> None:
        """Queue an update that this process deleted a replica's row (R3.21, R3.23). Thread-safe."""
        update = PrefixInvalidated(replica.model_name, replica.node_id, replica.replica_index)
        self._loop.call_soon_threadsafe(self.queue, update)

    async def _publish_queued(self) -> None:
        while self._waiting:
            update = self._waiting.popleft()
            try:
                await self._bus.publish(_SUBJECT_BY_TYPE[type(update)], msgspec.json.encode(update))
            except BusError:
                self._waiting.clear()


async def subscribe_to_updates(bus: Bus, on_update: Callable[[PrefixUpdate], None]) -> None:
    """Call `on_update` with each update of other processes, in order."""

    async def on_message(message: Message) -> None:
        if (update := decode_update(message.subject, message.payload)) is not None:
            on_update(update)

    await bus.subscribe(messages.PREFIX_SUBJECTS, on_message, limit=1)
