"""The identities of all nodes in the memory of a web process, so that a heartbeat needs no SELECT of its own.

One statement reads them all. What it read proves a beat for at most 5 s, counted from the moment at which the
statement was sent; a NOTIFY about a node removes its entry at once. A missing entry or a mismatch refuses no
beat: the caller looks at the row first. So a lost NOTIFY lets a revoked secret pass for 5 s at most, and the
batched UPDATE, which proves every beat again, still writes nothing for it.
"""

import math
from uuid import UUID

from localai_cluster import clock
from nodes.registry.heartbeats import Beat, verdict
from nodes.registry.identity import NodeFacts
from nodes.replicas.statements import Rows

MAX_AGE = 5.0
"""Seconds for which what was read proves a beat."""
_FEW = 8
"""All identities are read again early when more than one in so many was removed by a NOTIFY."""

ALL = """
SELECT id, fingerprint, weak_identity, instance, rotation_requested_at IS NOT NULL FROM backend_nodes
"""


class KnownNodes:
    """The identities as one web process remembers them; used on one event loop."""

    def __init__(self) -> None:
        self._nodes: dict[UUID, NodeFacts] = {}
        self._removed: set[UUID] = set()
        self._as_of = self._not_before = -math.inf

    def accepts(self, beat: Beat) -> bool:
        """Whether memory proves this beat. False means: look at the row."""
        if clock.monotonic() - self._as_of >= MAX_AGE:
            return False
        known = self._nodes.get(beat.id)
        return known is not None and verdict(beat, [known]) is None

    @property
    def is_worn(self) -> bool:
        """Whether it is time to read all identities again: they are too old, or too many are missing."""
        age = clock.monotonic() - self._as_of
        return age >= MAX_AGE or len(self._removed) * _FEW > len(self._nodes)

    async def refresh(self, database: Rows) -> None:
        """Reads all identities. What changes while they are being read is left out."""
        began = clock.monotonic()
        self._removed.clear()
        found = {row[0]: NodeFacts(*row) for row in await database.rows(ALL, {})}
        if began > self._not_before:
            self._nodes = {node: facts for node, facts in found.items() if node not in self._removed}
            self._as_of = began

    def forget(self, node: str) -> None:
        """A NOTIFY about a node, or "" when some may have been missed."""
        if not node:
            self._as_of, self._not_before = -math.inf, clock.monotonic()
            return
        changed = UUID(node)
        self._removed.add(changed)
        self._nodes.pop(changed, None)


_shared = KnownNodes()


def shared() -> KnownNodes:
    """The identities that this web process remembers."""
    return _shared
