"""Numbered changes of the nodes, stored for a while for readers who reconnect.

A reader's position is a cursor, `<epoch>:<number>`. The epoch is new with every process: its numbers have no
meaning elsewhere. Changes that a reader missed are sent as one. Nothing here waits or reads a clock.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from nodes.live.rows import LiveNode, Raw, render

Patch = dict[str, Any]

KEPT_SECONDS = 120.0
KEPT_CHANGES = 1000
KEPT_PATCHES = 50_000
"""Of all kept changes together: the bound of their memory when thousands of nodes beat."""


@dataclass(frozen=True)
class Delta:
    """The changes from one snapshot to the next: patches by node, and removed nodes."""

    number: int
    at: float
    patches: dict[str, Patch] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self.patches) + len(self.removed)


@dataclass(frozen=True)
class Difference:
    """The differences of a snapshot from the last accepted one."""

    rows: dict[str, Raw]
    nodes: dict[str, LiveNode]
    patches: dict[str, Patch]
    removed: frozenset[str]


def _patch(node: str, before: LiveNode | None, now: LiveNode) -> Patch:
    """Return the changed keys, all of them for a new node; {} if none is visible."""
    if before is None:
        return now
    changed = {key: value for key, value in now.items() if value != before[key]}
    return {"id": node} | changed if changed else {}


class History:
    """The nodes as of the last snapshot, and the latest changes."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.number = 0
        self.nodes: dict[str, LiveNode] = {}
        self._raw: dict[str, Raw] = {}
        self._kept: deque[Delta] = deque()
        self._size = 0

    @property
    def cursor(self) -> str:
        """The cursor of a reader who has every change."""
        return f"{self.epoch}:{self.number}"

    def compare(self, rows: dict[str, Raw]) -> Difference:
        """Return the differences from the last accepted snapshot. Thread-safe: it changes nothing."""
        raw_before, before = self._raw, self.nodes
        nodes, patches = {}, {}
        for node, raw in rows.items():
            if raw != raw_before.get(node):
                nodes[node] = now = render(raw)
                if patch := _patch(node, before.get(node), now):
                    patches[node] = patch
        return Difference(rows, nodes, patches, frozenset(raw_before.keys() - rows.keys()))

    def accept(self, difference: Difference, at: float) -> bool:
        """Accept the snapshot compared last, read at `at` (monotonic seconds); return True if it differs."""
        self._raw = difference.rows
        self.nodes.update(difference.nodes)
        for node in difference.removed:
            del self.nodes[node]
        self._forget(at)
        change = Delta(self.number + 1, at, difference.patches, difference.removed)
        if not change.size:
            return False
        self.number = change.number
        self._kept.append(change)
        self._size += change.size
        self._forget(at)
        return True

    def _forget(self, at: float) -> None:
        while self._kept and (
            at - self._kept[0].at > KEPT_SECONDS
            or len(self._kept) > KEPT_CHANGES
            or self._size > KEPT_PATCHES
        ):
            self._size -= self._kept.popleft().size

    def place(self, cursor: str) -> int | None:
        """Return the number in a cursor from which changes are still stored; None for any other text."""
        epoch, _, number = cursor.partition(":")
        if epoch != self.epoch or not (number.isascii() and number.isdecimal() and len(number) <= 18):
            return None
        return int(number) if self.knows(int(number)) else None

    def knows(self, number: int) -> bool:
        """Return True if every change after this number is still stored."""
        oldest = self._kept[0].number if self._kept else self.number + 1
        return oldest - 1 <= number <= self.number

    def since(self, number: int) -> tuple[list[Patch], list[str]]:
        """Return the changes after a stored number as one change: patches and removed ids."""
        patches: dict[str, Patch] = {}
        removed: set[str] = set()
        for change in self._kept:
            if change.number <= number:
                continue
            for node in change.removed:
                patches.pop(node, None)
                removed.add(node)
            for node, patch in change.patches.items():
                removed.discard(node)
                patches[node] = {**patches[node], **patch} if node in patches else patch
        return list(patches.values()), list(removed)
