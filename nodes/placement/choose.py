"""Chooses the node for one new replica.

First comes the question why each node cannot take the replica; those without a reason are ranked: fewest
failures of this load first, then as R1.70 to R1.72 say (idle first, then most memory effectively free, then
fewest requests). The reasons of all others stay in the decision, so that the caller can say what is missing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from uuid import UUID

from nodes.placement.selector import ANY, Labels, Selector
from nodes.placement.setbacks import Setbacks


class Reason(StrEnum):
    """Why a node cannot take a replica now."""

    AGENT = "not a backend node"
    SELECTOR = "not matching the rule's selector"
    PENDING = "pending approval"
    OFFLINE = "offline"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    FULL = "no free slot for this model"
    SILENT = "not answering or failed a moment ago"


_BY_STATUS = {
    "pending": Reason.PENDING,
    "offline": Reason.OFFLINE,
    "draining": Reason.DRAINING,
    "unhealthy": Reason.UNHEALTHY,
}

_NONE: Setbacks = MappingProxyType({})


@dataclass(frozen=True)
class Candidate:
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
    labels: Labels = frozenset()
    """Those that a selector asks for; others may be missing."""


@dataclass(frozen=True)
class Decision:
    """The node and replica index chosen, or neither; and why each other node was not feasible."""

    node: Candidate | None
    replica_index: int = 0
    refused: dict[UUID, Reason] = field(default_factory=dict)
    ranked: Sequence[Candidate] = ()
    """Every feasible node, the chosen one first."""
    selector: Selector = ANY

    def why_none(self) -> str:
        """One sentence for the caller when no node was found."""
        if not self.refused:
            return "no node is registered"
        counts = Counter(self.refused.values())
        if Reason.SELECTOR in counts and set(counts) <= {Reason.SELECTOR, Reason.AGENT}:
            return f"no node matches {self.selector}"
        parts = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        if set(counts) == {Reason.PENDING}:
            return f"only pending nodes ({counts[Reason.PENDING]}): approve one"
        return f"no node can take it: {parts}"


def refusal(node: Candidate, resting: Set[UUID] = frozenset(), *, selector: Selector = ANY) -> Reason | None:
    """Why `node` cannot take one more replica, or None.

    What does not pass by itself comes first: a node that does not match is of no use when it is back.
    """
    if node.node_type != "backend":
        return Reason.AGENT
    if not selector.matches(node.labels):
        return Reason.SELECTOR
    if node.status in _BY_STATUS:
        return _BY_STATUS[node.status]
    if free_index(node) is None:
        return Reason.FULL
    return Reason.SILENT if node.id in resting else None


def free_index(node: Candidate) -> int | None:
    """R1.63: the lowest replica index not in use, or None when all slots are taken."""
    return lowest_free(node.taken, node.slots)


def lowest_free(taken: Set[int], cap: int) -> int | None:
    """R1.63, R1.64: the lowest index not taken, None when `cap` are taken.

    A lowered cap leaves rows above it; they count too.
    """
    if len(taken) >= cap:
        return None
    return next(index for index in range(cap) if index not in taken)


def choose(
    nodes: Iterable[Candidate],
    *,
    setbacks: Setbacks = _NONE,
    resting: Set[UUID] = frozenset(),
    selector: Selector = ANY,
) -> Decision:
    """The best feasible node; one that is `resting` after a failure is not feasible.

    A node that failed this load before comes after those that failed it less often.
    """
    considered: Sequence[Candidate] = list(nodes)
    reasons = ((node.id, refusal(node, resting, selector=selector)) for node in considered)
    refused = {id: reason for id, reason in reasons if reason is not None}
    feasible = [node for node in considered if node.id not in refused]
    ranked = sorted(feasible, key=lambda node: _rank(node, setbacks))
    if not ranked:
        return Decision(None, refused=refused, selector=selector)
    return Decision(ranked[0], free_index(ranked[0]) or 0, refused, ranked, selector)


def _rank(node: Candidate, setbacks: Setbacks) -> tuple[int, bool, int, int, str]:
    failures = setbacks[node.id].times if node.id in setbacks else 0
    return (failures, node.loaded > 0, node.in_flight, -node.free_vram, node.name)
