"""Chains of prompts, and the table of the replica that last received each beginning of a prompt. Pure.

A chain has one hash per block of a prompt, over the block and everything before it: two prompts for one model
have equal hashes at a position if and only if they are equal up to there. Every process computes equal hashes
for equal prompts, because processes exchange them (R3.3, R3.4).

So the tree of R3.8 is a flat table per model: hash -> the replica and the time. Entries are in order of use.
Expired and excess entries are dropped from the front. The entries of a removed replica stay in the table and
are skipped, because the replica is flagged. Each replica's weight is updated incrementally: nothing here
iterates over all entries. Not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from xxhash import xxh64_intdigest

from nodes.gateway.generation import Conversation, Prompt

Chain = tuple[int, ...]

WINDOW, DEPTH = 256, 64
"""Bytes of a block, and the number of blocks that count (C40)."""
LONGEST = WINDOW * DEPTH
"""Bytes of a prompt that count."""


def chain(model: str, prompt: bytes, window: int = WINDOW, depth: int = DEPTH) -> Chain:
    """Return the hashes of the prompt's blocks (R3.3, R3.4). The last block may be short."""
    hashes, last = [], xxh64_intdigest(model.encode())
    for start in range(0, min(len(prompt), window * depth), window):
        last = xxh64_intdigest(last.to_bytes(8, "little") + prompt[start : start + window])
        hashes.append(last)
    return tuple(hashes)


def prompt_bytes(prompt: Prompt) -> bytes:
    """Return the beginning of the engine's prompt text.

    If the engine renders the messages, it is the role and content of each message. It is empty for token ids,
    because only the engine can decode them.
    """
    if isinstance(prompt, Conversation):
        return _message_bytes(prompt) if prompt.rendered is None else _text(prompt.rendered)
    return _text(prompt) if isinstance(prompt, str) else b""


def _text(prompt: str) -> bytes:
    return prompt[:LONGEST].encode()[:LONGEST]


def _message_bytes(conversation: Conversation) -> bytes:
    pieces, size = [], 0
    for message in conversation.messages:
        pieces.append(f"{message.role}\n{message.content[:LONGEST]}\n".encode())
        size += len(pieces[-1])
        if size >= LONGEST:
            break
    return b"".join(pieces)[:LONGEST]


HALF_LIFE = 120.0
"""Seconds in which an entry loses half of its weight (C43)."""
MOST_ENTRIES = 131_072
"""Limit on the entries of all models, about 25 MB: 2,048 prompts of the maximum length."""
MOST_HOMES = 4096
"""Limit on the replicas of one model in the table."""

Place = tuple[UUID, int]
"""A replica slot: node and index. A new engine in the same slot counts as the same replica."""


class Match(NamedTuple):
    """The replica that last received the longest cached prefix of a prompt; `depth` is in blocks."""

    place: Place
    depth: int


@dataclass(slots=True, eq=False)
class _Owner:
    """A replica as the owner of entries; `weight` is their total weight at the time `at`."""

    place: Place
    at: float
    weight: float = 0.0
    entries: int = 0
    removed: bool = False

    def age(self, now: float, half_life: float) -> None:
        """Decay the weight to its value at `now`."""
        self.weight *= _decay_factor(now - self.at, half_life)
        self.at = now

    def lose(self, used_at: float, now: float, half_life: float) -> None:
        """Remove one entry, which has a new owner or was dropped."""
        self.age(now, half_life)
        self.entries -= 1
        # Without entries the weight is exactly 0, despite rounding errors.
        self.weight = max(self.weight - _decay_factor(now - used_at, half_life), 0.0) if self.entries else 0.0


def _decay_factor(age: float, half_life: float) -> float:
    return float(0.5 ** (age / half_life)) if half_life else 1.0


class _Table:
    """The prefix entries of one model."""

    def __init__(self, ttl: float, half_life: float) -> None:
        self.entries: OrderedDict[int, tuple[_Owner, float]] = OrderedDict()
        self.owners: dict[Place, _Owner] = {}
        self._ttl = ttl
        self._half_life = half_life

    def expire(self, now: float) -> None:
        """Drop expired entries (R3.10)."""
        while self.entries:
            _, used_at = next(iter(self.entries.values()))
            if now - used_at <= self._ttl:
                return
            self.drop_oldest(now)

    def drop_oldest(self, now: float) -> None:
        """Drop the least recently used entry; within one prompt the last blocks go first."""
        _, (owner, used_at) = self.entries.popitem(last=False)
        self._remove_from(owner, used_at, now)

    def match(self, chain: Chain, now: float) -> Match | None:
        """Return the deepest live entry of the chain, or None."""
        for depth in range(len(chain), 0, -1):
            entry = self.entries.get(chain[depth - 1])
            if entry is not None and not entry[0].removed and now - entry[1] <= self._ttl:
                return Match(entry[0].place, depth)
        return None

    def put(self, chain: Chain, place: Place, now: float) -> None:
        """Make the replica the owner of every block (R3.9)."""
        owner = self.owners.get(place)
        if owner is None:
            if len(self.owners) >= MOST_HOMES:
                return
            owner = self.owners[place] = _Owner(place, now)
        owner.age(now, self._half_life)
        owner.entries += len(chain)
        owner.weight += len(chain)
        # In reverse order, so that the first blocks, which most prompts share, are dropped last.
        for block in reversed(chain):
            previous = self.entries.get(block)
            if previous is not None:
                self.entries.move_to_end(block)
            self.entries[block] = (owner, now)
            if previous is not None:
                self._remove_from(*previous, now)

    def forget(self, node: UUID, index: int) -> None:
        """Skip this replica's entries from now on (R3.22); below 0, those of all its node's replicas."""
        places = [place for place in self.owners if place[0] == node] if index < 0 else [(node, index)]
        for place in places:
            if (owner := self.owners.pop(place, None)) is not None:
                owner.removed = True

    def weights(self, now: float) -> Iterator[tuple[Place, float]]:
        """Yield each replica's weight (R3.12). Expired entries must have been dropped before."""
        for owner in self.owners.values():
            yield owner.place, owner.weight * _decay_factor(now - owner.at, self._half_life)

    def _remove_from(self, owner: _Owner, used_at: float, now: float) -> None:
        if owner.removed:
            return
        owner.lose(used_at, now, self._half_life)
        if not owner.entries:
            del self.owners[owner.place]


class Affinity:
    """The prefix tables of one web process, by model. Times are seconds of a monotonic clock."""

    def __init__(self, ttl: float, half_life: float = HALF_LIFE, most: int = MOST_ENTRIES) -> None:
        self._ttl = ttl
        self._half_life = half_life
        self._most = most
        self._tables: dict[str, _Table] = {}

    def __len__(self) -> int:
        """Return the number of entries, including those of removed replicas."""
        return sum(len(table.entries) for table in list(self._tables.values()))

    def observe(self, model: str, chain: Chain, place: Place, now: float) -> bool:
        """Record that the replica received this prompt (R3.9).

        Returns True if other processes need the update.
        """
        if not chain:
            return False
        table = self._tables.setdefault(model, _Table(self._ttl, self._half_life))
        table.expire(now)
        previous_match = table.match(chain, now)
        table.put(chain, place, now)
        self._shrink(now)
        return previous_match != Match(place, len(chain))

    def match(self, model: str, chain: Chain, now: float) -> Match | None:
        """Return the replica that last received the longest cached prefix of this prompt (R3.11), or None."""
        table = self._tables.get(model)
        return None if table is None else table.match(chain, now)

    def weights(self, model: str, now: float) -> list[tuple[Place, float]]:
        """Return the weights of all replicas with entries; every other replica weighs 0."""
        table = self._tables.get(model)
        if table is None:
            return []
        table.expire(now)
        return list(table.weights(now))

    def forget(self, model: str, node: UUID, index: int) -> None:
        """Forget a removed replica, or all of the model's replicas on the node (index below 0)."""
        if (table := self._tables.get(model)) is not None:
            table.forget(node, index)

    def clear(self) -> None:
        """Drop all entries."""
        self._tables.clear()

    def sweep(self, now: float) -> None:
        """Drop expired entries and empty tables (R3.10)."""
        for model, table in list(self._tables.items()):
            table.expire(now)
            if not table.entries:
                del self._tables[model]

    def _shrink(self, now: float) -> None:
        """Drop entries of the model with the most entries until the limit holds."""
        excess = len(self) - self._most
        if excess > 0:
            largest = max(self._tables.values(), key=lambda table: len(table.entries))
            for _ in range(min(excess, len(largest.entries))):
                largest.drop_oldest(now)
