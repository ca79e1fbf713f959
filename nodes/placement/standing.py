"""A fleet whose nodes change one at a time, with their ranking kept for each kind of request. Pure.

`choose` looks at every node for every decision. Here each node is judged by the same functions, but again
only after it has changed: a `Standing` keeps the nodes that one need and one selector refuse, with the
reasons, and the others in the order of their rank. What one model or one load sees otherwise (slots taken,
concurrency groups, setbacks) concerns few nodes, which are judged again for each decision.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from uuid import UUID

from nodes.placement.choose import Candidate, Decision, Need, Rank, Reason, concluded, rank, refusal
from nodes.placement.explain import FleetView
from nodes.placement.selector import Labels, Selector
from nodes.placement.setbacks import Setbacks

MOST_ROWS = 64_000
"""Nodes in all standings together; those that were not asked for the longest time go."""
_REBUILT = 8
"""A standing is sorted again when more than one in so many nodes has changed."""


@dataclass(frozen=True)
class Own:
    """What a model sees of nodes that others do not: slots taken, models of its groups, files."""

    taken: Mapping[UUID, frozenset[int]] = field(default_factory=dict)
    conflicts: Mapping[UUID, frozenset[str]] = field(default_factory=dict)
    brought: Mapping[UUID, int] = field(default_factory=dict)

    def nodes(self) -> set[UUID]:
        """Those that it sees so."""
        return {*self.taken, *self.conflicts, *self.brought}

    def of(self, node: Candidate) -> Candidate:
        """The node as the model sees it."""
        return replace(
            node,
            taken=self.taken.get(node.id, frozenset()),
            conflicts=self.conflicts.get(node.id, frozenset()),
            brought=self.brought.get(node.id, 0),
        )


NOTHING_OWN = Own()
_NO_SETBACKS: Setbacks = MappingProxyType({})


class _Order:
    """Nodes by rank. Two lists, because comparing and hashing in Python costs more than all the rest."""

    def __init__(self, ranks: list[Rank], nodes: list[Candidate]) -> None:
        self.ranks, self.nodes = ranks, nodes

    def copy(self) -> "_Order":
        """One that changes alone."""
        return _Order(self.ranks.copy(), self.nodes.copy())

    def add(self, node: Candidate, its: Rank) -> None:
        """Puts the node where it belongs."""
        place = bisect_right(self.ranks, its)
        self.ranks.insert(place, its)
        self.nodes.insert(place, node)

    def remove(self, id: UUID, its: Rank) -> None:
        """Takes the node out that was added with this rank."""
        place = bisect_left(self.ranks, its)
        while self.nodes[place].id != id:
            place += 1
        del self.ranks[place], self.nodes[place]


class _Standing:
    """All nodes for one need and one selector, as a model sees them that has no replica."""

    def __init__(self, need: Need, labels: Labels | None) -> None:
        self.need, self.selector = need, Selector("", labels)
        self.keys = {key for key, _ in labels or ()}
        self.nodes: dict[UUID, Candidate] = {}
        self.refused: dict[UUID, Reason] = {}
        self.ranks: dict[UUID, Rank] = {}
        self.order = _Order([], [])
        self.changed: set[UUID] = set()

    def follow(self, fleet: Mapping[UUID, Candidate]) -> None:
        """Judges again what has changed."""
        whole = len(self.changed) * _REBUILT > len(fleet)
        for id in self.changed:
            before = self._forget(id)
            if before is not None and not whole:
                self.order.remove(id, before)
            its = self._judge(fleet[id]) if id in fleet else None
            if its is not None and not whole:
                self.order.add(self.nodes[id], its)
        if whole:
            ranked = sorted(self.ranks.items(), key=itemgetter(1))
            self.order = _Order([its for _, its in ranked], [self.nodes[id] for id, _ in ranked])
        self.changed.clear()

    def _forget(self, id: UUID) -> Rank | None:
        self.nodes.pop(id, None)
        self.refused.pop(id, None)
        return self.ranks.pop(id, None)

    def _judge(self, node: Candidate) -> Rank | None:
        asked_for = frozenset(pair for pair in node.labels if pair[0] in self.keys)
        self.nodes[node.id] = node = replace(node, labels=asked_for) if node.labels != asked_for else node
        reason = refusal(node, need=self.need, selector=self.selector)
        if reason is not None:
            self.refused[node.id] = reason
            return None
        self.ranks[node.id] = its = rank(node, self.need, _NO_SETBACKS)
        return its


class StandingFleet:
    """Every node with all its labels, without what a single model sees of it. Not for two threads at once."""

    def __init__(self) -> None:
        self.nodes: dict[UUID, Candidate] = {}
        self._standings: OrderedDict[tuple[Need, Labels | None], _Standing] = OrderedDict()

    def put(self, node: Candidate) -> None:
        """The node is new, or other than before."""
        self.nodes[node.id] = node
        self._changed(node.id)

    def drop(self, id: UUID) -> None:
        """The node is gone."""
        self.nodes.pop(id, None)
        self._changed(id)

    def _changed(self, id: UUID) -> None:
        for standing in self._standings.values():
            standing.changed.add(id)

    def decide(self, asked: FleetView, own: Own = NOTHING_OWN) -> tuple[FleetView, Decision]:
        """The question with all nodes, and with the labels that it asks for; and what `choose` answers."""
        need, selector = asked.need, asked.selector
        standing = self._standing(need, selector.labels)
        nodes, refused, order = standing.nodes.copy(), standing.refused.copy(), standing.order.copy()
        for id in (own.nodes() | {*asked.setbacks, *asked.resting}) & nodes.keys():
            if refused.pop(id, None) is None:
                order.remove(id, standing.ranks[id])
            nodes[id] = node = own.of(nodes[id])
            reason = refusal(node, asked.resting, need, selector=selector)
            if reason is None:
                order.add(node, rank(node, need, asked.setbacks))
            else:
                refused[id] = reason
        seen = replace(asked, nodes=list(nodes.values()))
        return seen, concluded(seen.nodes, order.nodes, refused, need, selector)

    def _standing(self, need: Need, labels: Labels | None) -> _Standing:
        found = self._standings.get((need, labels))
        if found is None:
            found = self._standings[need, labels] = _Standing(need, labels)
            found.changed.update(self.nodes)
        self._standings.move_to_end((need, labels))
        while len(self._standings) > max(MOST_ROWS // max(len(self.nodes), 1), 1):
            self._standings.popitem(last=False)
        found.follow(self.nodes)
        return found
