"""A fleet whose nodes change one at a time, with a stored ranking for each kind of request. Pure.

`choose` evaluates every node for every decision. This module evaluates a node with the same functions, but
only after the node has changed: a ranking (`_Ranking`) holds the nodes that one need and one selector refuse,
with the reasons, and the other nodes in the order of their rank. Facts that only one model or one load sees
(indices in use, concurrency groups, back-offs) concern few nodes, which are evaluated again for each
decision.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from uuid import UUID

from nodes.placement.choose import (
    Candidate,
    Decision,
    Labels,
    Need,
    Rank,
    Reason,
    Selector,
    build_decision,
    find_refusal,
    rank_node,
)
from nodes.placement.explain import FleetView
from nodes.placement.load_times import NodeBackoffs

MAX_ROWS = 64_000
"""Maximum number of nodes in all rankings together; the least recently used rankings are dropped."""
_REBUILD_DIVISOR = 8
"""A ranking is sorted anew if more than one in this many of its nodes has changed."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts about nodes that depend on the model: used indices, conflicting models, bytes of files.

    A node that is not listed keeps the values of its `Candidate`.
    """

    used_indices: Mapping[UUID, frozenset[int]] = field(default_factory=dict)
    conflicts: Mapping[UUID, frozenset[str]] = field(default_factory=dict)
    staged_bytes: Mapping[UUID, int] = field(default_factory=dict)
    other_models_bytes: Mapping[UUID, int] = field(default_factory=dict)
    """By node: bytes of other models' files."""
    promised_bytes: Mapping[UUID, int] = field(default_factory=dict)
    """By node: available bytes of its disk that loads of other models will take."""

    def of(self, node: Candidate) -> Candidate:
        """Return the node with these facts about the model."""
        return replace(
            node,
            used_indices=self.used_indices.get(node.id, frozenset()),
            conflicts=self.conflicts.get(node.id, frozenset()),
            staged_bytes=self.staged_bytes.get(node.id, 0),
            promised_bytes=self.promised_bytes.get(node.id, 0),
            other_models_bytes=self.other_models_bytes.get(node.id, node.other_models_bytes),
        )


NO_MODEL_FACTS = ModelFacts()
_NO_BACKOFFS: NodeBackoffs = MappingProxyType({})


@dataclass(eq=False)
class _Order:
    """Nodes in the order of their ranks.

    Two lists hold them: comparing and hashing nodes in Python would dominate the cost.
    """

    ranks: list[Rank]
    nodes: list[Candidate]

    def add(self, node: Candidate, node_rank: Rank) -> None:
        """Insert the node at its rank."""
        position = bisect_right(self.ranks, node_rank)
        self.ranks.insert(position, node_rank)
        self.nodes.insert(position, node)

    def remove(self, id: UUID, node_rank: Rank) -> None:
        """Remove the node that was added with this rank."""
        position = bisect_left(self.ranks, node_rank)
        while self.nodes[position].id != id:
            position += 1
        del self.ranks[position], self.nodes[position]


class _Ranking:
    """All nodes for one need and one selector, refused or ranked, as for a model without a replica."""

    def __init__(self, need: Need, labels: Labels | None) -> None:
        self.need, self.selector = need, Selector("", labels)
        self.nodes: dict[UUID, Candidate] = {}
        self.refused: dict[UUID, Reason] = {}
        self.ranks: dict[UUID, Rank] = {}
        self.order = _Order([], [])
        self.changed: set[UUID] = set()

    def follow(self, fleet: Mapping[UUID, Candidate]) -> None:
        """Update the ranking after changes of nodes in the fleet."""
        rebuild = len(self.changed) * _REBUILD_DIVISOR > len(fleet)
        for id in self.changed:
            self.nodes.pop(id, None)
            self.refused.pop(id, None)
            before = self.ranks.pop(id, None)
            if before is not None and not rebuild:
                self.order.remove(id, before)
            node_rank = self._judge(fleet[id]) if id in fleet else None
            if node_rank is not None and not rebuild:
                self.order.add(self.nodes[id], node_rank)
        if rebuild:
            ranked = sorted(self.ranks.items(), key=itemgetter(1))
            self.order = _Order([node_rank for _, node_rank in ranked], [self.nodes[id] for id, _ in ranked])
        self.changed.clear()

    def _judge(self, node: Candidate) -> Rank | None:
        tested_labels = self.selector.tested_labels(node.labels)
        self.nodes[node.id] = node = (
            replace(node, labels=tested_labels) if node.labels != tested_labels else node
        )
        reason = find_refusal(node, need=self.need, selector=self.selector)
        if reason is not None:
            self.refused[node.id] = reason
            return None
        self.ranks[node.id] = node_rank = rank_node(node, self.need, _NO_BACKOFFS)
        return node_rank


class RankedFleet:
    """All nodes with all labels, without facts that depend on a model. Not thread-safe."""

    def __init__(self) -> None:
        self.nodes: dict[UUID, Candidate] = {}
        self._rankings: OrderedDict[tuple[Need, Labels | None], _Ranking] = OrderedDict()

    def put(self, node: Candidate) -> None:
        """Add or replace the node."""
        self.nodes[node.id] = node
        for ranking in self._rankings.values():
            ranking.changed.add(node.id)

    def drop(self, id: UUID) -> None:
        """Remove the node."""
        self.nodes.pop(id, None)
        for ranking in self._rankings.values():
            ranking.changed.add(id)

    def decide(self, question: FleetView, own: ModelFacts = NO_MODEL_FACTS) -> tuple[FleetView, Decision]:
        """Return the decision that `choose` would make for the question, and its complete view.

        The returned view has all nodes, with the labels that the question tests.
        """
        need, selector = question.need, question.selector
        ranking = self._ranking(need, selector.labels)
        nodes, refused = ranking.nodes.copy(), ranking.refused.copy()
        order = _Order(ranking.order.ranks.copy(), ranking.order.nodes.copy())
        judged_again = {
            *own.used_indices,
            *own.conflicts,
            *own.staged_bytes,
            *own.other_models_bytes,
            *own.promised_bytes,
            *question.backoffs,
            *question.backed_off,
        }
        for id in judged_again & nodes.keys():
            if refused.pop(id, None) is None:
                order.remove(id, ranking.ranks[id])
            nodes[id] = node = own.of(nodes[id])
            reason = find_refusal(node, question.backed_off, need, selector=selector)
            if reason is None:
                order.add(node, rank_node(node, need, question.backoffs))
            else:
                refused[id] = reason
        view = replace(question, nodes=list(nodes.values()))
        return view, build_decision(view.nodes, order.nodes, refused, need, selector)

    def _ranking(self, need: Need, labels: Labels | None) -> _Ranking:
        ranking = self._rankings.get((need, labels))
        if ranking is None:
            ranking = self._rankings[need, labels] = _Ranking(need, labels)
            ranking.changed.update(self.nodes)
        self._rankings.move_to_end((need, labels))
        while len(self._rankings) > max(MAX_ROWS // max(len(self.nodes), 1), 1):
            self._rankings.popitem(last=False)
        ranking.follow(self.nodes)
        return ranking
