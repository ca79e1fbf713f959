"""Chains of prompts, and the table of replicas that last received the beginning of a prompt. Pure.

A chain has one hash per block of a prompt, over the block and all blocks before it. Two prompts for one model
have equal hashes at a position if and only if they are equal up to this position. Every process computes
equal hashes for equal prompts, because processes exchange them (R3.3, R3.4).

The tree of R3.8 is a radix tree per model: a node has consecutive blocks that were always used together. So
the cost of another prompt with a known beginning depends on the nodes on its path, not on its blocks. Nodes
are in order of use; expired and excess blocks are dropped from the front. The blocks of a removed replica
stay in the table and are skipped, because the replica is flagged. Each replica's weight is updated
incrementally: no function iterates over all blocks. Not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from xxhash import xxh64_intdigest

from nodes.gateway.generation import Conversation, Prompt

Chain = tuple[int, ...]
"""Hashes of the blocks of a prompt, in order."""

BLOCK_BYTES = 256
"""Bytes of a prompt in one block (C40)."""
MAX_CHAIN_BLOCKS = 64
"""Maximum number of blocks in a chain (C40)."""
MAX_PROMPT_BYTES = BLOCK_BYTES * MAX_CHAIN_BLOCKS
"""Maximum bytes of a prompt that a chain covers."""


def prompt_chain(
    model: str, prompt: bytes, window: int = BLOCK_BYTES, depth: int = MAX_CHAIN_BLOCKS
) -> Chain:
    """Return the hashes of the prompt's blocks (R3.3, R3.4). The last block may be short."""
    hashes, last = [], xxh64_intdigest(model.encode())
    for start in range(0, min(len(prompt), window * depth), window):
        last = xxh64_intdigest(last.to_bytes(8, "little") + prompt[start : start + window])
        hashes.append(last)
    return tuple(hashes)


def prompt_bytes(prompt: Prompt) -> bytes:
    """Return the beginning of the text that the engine gets as the prompt.

    If the engine renders the messages, the text is the role and content of each message. For token ids the
    result is empty, because only the engine can decode them.
    """
    if isinstance(prompt, Conversation):
        return _message_bytes(prompt) if prompt.rendered is None else _head_bytes(prompt.rendered)
    return _head_bytes(prompt) if isinstance(prompt, str) else b""


def _head_bytes(prompt: str) -> bytes:
    return prompt[:MAX_PROMPT_BYTES].encode()[:MAX_PROMPT_BYTES]


def _message_bytes(conversation: Conversation) -> bytes:
    pieces, size = [], 0
    for message in conversation.messages:
        pieces.append(f"{message.role}\n{message.content[:MAX_PROMPT_BYTES]}\n".encode())
        size += len(pieces[-1])
        if size >= MAX_PROMPT_BYTES:
            break
    return b"".join(pieces)[:MAX_PROMPT_BYTES]


HALF_LIFE_SECONDS = 120.0
"""Seconds in which the weight of a block halves (C43)."""
MAX_TABLE_BLOCKS = 131_072
"""Maximum number of blocks of all models, about 25 MB: 2,048 prompts of the maximum length."""
MAX_OWNERS_PER_MODEL = 4096
"""Maximum number of replicas of one model in its table."""

Slot = tuple[UUID, int]
"""Node and index of a replica. A new engine in the slot counts as the same replica."""


class Match(NamedTuple):
    """The slot that last received the longest cached prefix of a prompt; `depth` is the prefix in blocks."""

    slot: Slot
    depth: int


@dataclass(slots=True, eq=False)
class _BlockOwner:
    """A replica that owns blocks. `weight` is the total weight of its blocks at the time `updated_at`."""

    slot: Slot
    updated_at: float
    weight: float = 0.0
    blocks: int = 0
    removed: bool = False

    def add(self, count: int, now: float) -> None:
        """Add the weight of `count` blocks that are used at the time `now`."""
        self.weight = self.weight * _decay_factor(now - self.updated_at) + count
        self.updated_at = now
        self.blocks += count

    def subtract(self, count: int, used_at: float, now: float) -> None:
        """Subtract the weight of `count` blocks that were last used at the time `used_at`."""
        self.blocks -= count
        if now != self.updated_at:
            self.weight *= _decay_factor(now - self.updated_at)
            self.updated_at = now
        # Without blocks the weight is exactly 0, despite rounding errors.
        weight = self.weight - count * _decay_factor(now - used_at)
        self.weight = weight if self.blocks and weight > 0 else 0.0


def _decay_factor(age: float) -> float:
    return float(0.5 ** (age / HALF_LIFE_SECONDS)) if age else 1.0


@dataclass(slots=True, eq=False)
class _PrefixNode:
    """A node of the radix tree: consecutive blocks that were always used together, after those of `parent`.

    A use of a block is also a use of the blocks before it. So a node is used at least as recently as the
    nodes below it, and the table always has a chain from its beginning.
    """

    parent: "_PrefixNode | None"
    start: int
    """Position of the node's first block in its chain."""
    blocks: Chain
    owner: _BlockOwner
    used_at: float


class _ModelTable:
    """The radix tree of one model's prompts."""

    def __init__(self, tables: "PrefixTables", ttl: float) -> None:
        self._tables = tables
        self.nodes: dict[int, _PrefixNode] = {}
        """The node of each block."""
        self.size = 0
        """Number of blocks in all nodes; larger than `nodes` if a hostile chain repeats blocks."""
        self.owners: dict[Slot, _BlockOwner] = {}
        self._order: OrderedDict[_PrefixNode, None] = OrderedDict()
        """All nodes, the least recently used first; within one chain, the last node comes first."""
        self._ttl = ttl
        self._none_expires_before = 0.0

    def expire(self, now: float) -> None:
        """Drop nodes that were not used for the time to live (R3.10)."""
        if now < self._none_expires_before:
            return
        while self._order:
            node = next(iter(self._order))
            if now - node.used_at <= self._ttl:
                self._none_expires_before = node.used_at + self._ttl
                return
            self._drop(node, len(node.blocks), now)

    def shrink(self, count: int, now: float) -> None:
        """Drop the `count` least recently used blocks; of one prompt, the last blocks first."""
        while count > 0 and self._order:
            node = next(iter(self._order))
            dropped = min(count, len(node.blocks))
            self._drop(node, dropped, now)
            count -= dropped

    def depth(self, chain: Chain) -> int:
        """Return the number of blocks at the beginning of the chain that are in the table.

        Another process may send an invalid chain, so a block counts only at its position in the table.
        """
        nodes = self.nodes
        for position in range(len(chain) - 1, -1, -1):
            block = chain[position]
            if (node := nodes.get(block)) is not None:
                index = position - node.start
                if 0 <= index < len(node.blocks) and node.blocks[index] == block:
                    return position + 1
        return 0

    def match(self, chain: Chain, depth: int, now: float) -> Match | None:
        """Return the match of the last usable block among the first `depth` blocks of the chain, or None."""
        node = self.nodes[chain[depth - 1]] if depth else None
        while node is not None and (node.owner.removed or now - node.used_at > self._ttl):
            depth, node = node.start, node.parent
        return None if node is None else Match(node.owner.slot, depth)

    def observe(self, chain: Chain, slot: Slot, now: float) -> bool:
        """Make the replica the owner of the chain's blocks (R3.9). Return False if it already owned them."""
        self.expire(now)
        depth = self.depth(chain)
        is_new = depth < len(chain) or self.match(chain, depth, now) != (slot, depth)
        owner = self.owners.get(slot)
        if owner is None:
            if len(self.owners) >= MAX_OWNERS_PER_MODEL:
                return is_new
            owner = self.owners[slot] = _BlockOwner(slot, now)
        node = self._split(self.nodes[chain[depth - 1]], depth) if depth else None
        owner.add(len(chain), now)
        # From the end to the beginning, so that the first blocks, which most prompts share, are dropped last.
        if depth < len(chain):
            leaf = _PrefixNode(node, depth, chain[depth:], owner, now)
            for block in leaf.blocks:
                self.nodes[block] = leaf
            self._resize(len(chain) - depth)
            self._order[leaf] = None
        while node is not None:
            previous, used_at = node.owner, node.used_at
            node.owner, node.used_at = owner, now
            self._order.move_to_end(node)
            self._subtract(previous, len(node.blocks), used_at, now)
            node = node.parent
        return is_new

    def forget(self, node: UUID, index: int) -> None:
        """Stop matching the replica's blocks (R3.22). An index below 0 means all replicas on the node."""
        slots = [slot for slot in self.owners if slot[0] == node] if index < 0 else [(node, index)]
        for slot in slots:
            if (owner := self.owners.pop(slot, None)) is not None:
                owner.removed = True

    def weights(self, now: float) -> Iterator[tuple[Slot, float]]:
        """Yield the weight of each replica (R3.12). The caller must drop expired nodes first."""
        for owner in self.owners.values():
            yield owner.slot, owner.weight * _decay_factor(now - owner.updated_at)

    def _split(self, node: _PrefixNode, depth: int) -> _PrefixNode:
        """Split the node after `depth` blocks of its chain; return the first part."""
        count = depth - node.start
        if count == len(node.blocks):
            return node
        head = _PrefixNode(node.parent, node.start, node.blocks[:count], node.owner, node.used_at)
        node.parent, node.start, node.blocks = head, depth, node.blocks[count:]
        self.nodes.update(dict.fromkeys(head.blocks, head))
        self._order[head] = None
        return head

    def _drop(self, node: _PrefixNode, count: int, now: float) -> None:
        """Drop the last `count` blocks of a node that has no nodes below it."""
        for block in node.blocks[-count:]:
            if self.nodes.get(block) is node:
                del self.nodes[block]
        node.blocks = node.blocks[:-count]
        self._resize(-count)
        if not node.blocks:
            del self._order[node]
        self._subtract(node.owner, count, node.used_at, now)

    def _resize(self, count: int) -> None:
        self.size += count
        self._tables.size += count

    def _subtract(self, owner: _BlockOwner, count: int, used_at: float, now: float) -> None:
        if owner.removed:
            return
        owner.subtract(count, used_at, now)
        if not owner.blocks:
            del self.owners[owner.slot]


class PrefixTables:
    """The prefix tables of one web process by model. Times are monotonic seconds."""

    def __init__(self, ttl: float, most: int = MAX_TABLE_BLOCKS) -> None:
        self._ttl = ttl
        self._most = most
        self._tables: dict[str, _ModelTable] = {}
        self.size = 0
        """Number of blocks in all tables, including blocks of removed replicas."""

    def observe(self, model: str, chain: Chain, slot: Slot, now: float) -> bool:
        """Record that the replica received this prompt (R3.9).

        Return True if other processes must be notified.
        """
        if not chain:
            return False
        table = self._tables.get(model)
        if table is None:
            table = self._tables[model] = _ModelTable(self, self._ttl)
        is_new = table.observe(chain, slot, now)
        if (excess := self.size - self._most) > 0:
            # The model with the most blocks loses some.
            max(self._tables.values(), key=lambda table: table.size).shrink(excess, now)
        return is_new

    def match(self, model: str, chain: Chain, now: float) -> Match | None:
        """Return the match of the longest cached prefix of the prompt (R3.11), or None."""
        table = self._tables.get(model)
        return None if table is None else table.match(chain, table.depth(chain), now)

    def weights(self, model: str, now: float) -> list[tuple[Slot, float]]:
        """Return the weights of all replicas that own blocks. A replica without blocks has the weight 0."""
        table = self._tables.get(model)
        if table is None:
            return []
        table.expire(now)
        return list(table.weights(now))

    def forget(self, model: str, node: UUID, index: int) -> None:
        """Forget a removed replica. An index below 0 means all replicas of the model on the node."""
        if (table := self._tables.get(model)) is not None:
            table.forget(node, index)

    def clear(self) -> None:
        """Drop all blocks."""
        self._tables.clear()
        self.size = 0

    def sweep(self, now: float) -> None:
        """Drop expired blocks and empty tables (R3.10)."""
        for model, table in list(self._tables.items()):
            table.expire(now)
            if not table.size:
                del self._tables[model]
