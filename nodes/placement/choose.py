"""Chooses the node for one new replica.

First every node is asked why it cannot take the replica; those without a reason are ranked (R1.70 to R1.72:
idle first, then most memory effectively free, then fewest requests). The reasons of all others stay in the
decision, because "no node" alone helps nobody.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID


class Reason(StrEnum):
    """Why a node cannot take a replica now."""

    AGENT = "not a backend node"
    PENDING = "pending approval"
    OFFLINE = "offline"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    FULL = "no free slot for this model"


_BY_STATUS = {
    "pending": Reason.PENDING,
    "offline": Reason.OFFLINE,
    "draining": Reason.DRAINING,
    "unhealthy": Reason.UNHEALTHY,
}


@dataclass(frozen=True)
class NodeView:
    """What placement sees of a node; memory in bytes."""

    id: UUID
    name: str
    node_type: str
    status: str
    free_vram: int
    """Available minus reserved (R1.51)."""
    loaded: int
    """Loaded replicas of any model."""
    in_flight: int
    taken: frozenset[int]
    """Replica indices of this model in use on the node, in any state (R1.62 [S])."""
    slots: int
    """`max_replicas_per_model`."""


@dataclass(frozen=True)
class Decision:
    """The node and replica index chosen, or neither; and why each other node was not feasible."""

    node: NodeView | None
    replica_index: int = 0
    refused: dict[UUID, Reason] = field(default_factory=dict)

    def why_none(self) -> str:
        """One sentence for the caller when no node was found."""
        if not self.refused:
            return "no node is registered"
        counts = Counter(self.refused.values())
        parts = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        if set(counts) == {Reason.PENDING}:
            return f"only pending nodes ({counts[Reason.PENDING]}): approve one"
        return f"no node can take it: {parts}"


def refusal(node: NodeView) -> Reason | None:
    """Why `node` cannot take one more replica, or None."""
    if node.node_type != "backend":
        return Reason.AGENT
    if node.status in _BY_STATUS:
        return _BY_STATUS[node.status]
    return Reason.FULL if free_index(node) is None else None


def free_index(node: NodeView) -> int | None:
    """R1.63: the lowest replica index not in use, or None when all slots are taken."""
    return next((index for index in range(node.slots) if index not in node.taken), None)


def choose(nodes: Iterable[NodeView], *, avoid: Set[UUID] = frozenset()) -> Decision:
    """The best feasible node; one in `avoid` (it did not answer a moment ago) only if there is no other."""
    considered: Sequence[NodeView] = list(nodes)
    refused = {node.id: reason for node in considered if (reason := refusal(node)) is not None}
    feasible = [node for node in considered if node.id not in refused]
    best = min(feasible, key=lambda node: _rank(node, avoid), default=None)
    index = free_index(best) if best else None
    return Decision(best, index or 0, refused)


def _rank(node: NodeView, avoid: Set[UUID]) -> tuple[bool, bool, int, int, str]:
    return (node.id in avoid, node.loaded > 0, node.in_flight, -node.free_vram, node.name)
