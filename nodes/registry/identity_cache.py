"""Cache of all nodes' identities in a web process, so that a heartbeat needs no SELECT of its own.

One statement reads all of them. The result authenticates heartbeats for at most 5 s, counted from the moment
at which the statement was sent; a NOTIFY about a node removes its entry at once. A missing entry or a
mismatch refuses no heartbeat: the caller reads the row first. So after a lost NOTIFY a revoked secret passes
for 5 s at most, and the batched UPDATE, which checks every heartbeat again, still writes nothing for it.
"""

import math
from uuid import UUID

from localai_cluster.kit import clock
from nodes.registry.heartbeats import Beat, verdict
from nodes.registry.identity import NodeFacts
from nodes.replicas.statements import Rows

MAX_AGE = 5.0
"""Seconds for which the cached rows authenticate heartbeats."""
_REMOVED_RATIO = 8
"""The cache is refreshed early when a NOTIFY has removed more than one in this many identities."""

ALL = """
SELECT id, fingerprint, weak_identity, instance, rotation_requested_at IS NOT NULL FROM backend_nodes
"""


class KnownNodes:
    """The cached identities of one web process; used on one event loop."""

    def __init__(self) -> None:
        self._nodes: dict[UUID, NodeFacts] = {}
        self._removed: set[UUID] = set()
        self._read_at = self._not_before = -math.inf

    def accepts(self, beat: Beat) -> bool:
        """Return True if the cache authenticates this heartbeat. False: the caller must read the row."""
        if clock.monotonic() - self._read_at >= MAX_AGE:
            return False
        node_facts = self._nodes.get(beat.id)
        return node_facts is not None and verdict(beat, [node_facts]) is None

    @property
    def is_worn(self) -> bool:
        """Return True if the cache must be refreshed: it is too old, or too many entries are missing."""
        age = clock.monotonic() - self._read_at
        return age >= MAX_AGE or len(self._removed) * _REMOVED_RATIO > len(self._nodes)

    async def refresh(self, database: Rows) -> None:
        """Read all identities. Nodes that change during the read are left out."""
        began = clock.monotonic()
        self._removed.clear()
        facts_by_node = {row[0]: NodeFacts(*row) for row in await database.rows(ALL, {})}
        if began > self._not_before:
            self._nodes = {node: facts for node, facts in facts_by_node.items() if node not in self._removed}
            self._read_at = began

    def forget(self, node: str) -> None:
        """Remove the node of a NOTIFY from the cache; "" = some NOTIFYs may have been missed, remove all."""
        if not node:
            self._read_at, self._not_before = -math.inf, clock.monotonic()
            return
        changed = UUID(node)
        self._removed.add(changed)
        self._nodes.pop(changed, None)


_shared = KnownNodes()


def shared() -> KnownNodes:
    """Return the cache of this web process."""
    return _shared
