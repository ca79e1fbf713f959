"""Decide a load: its node, the reason why it waits, or its end; and the eviction for it. Pure.

`choose` ranks nodes, `evict` selects replicas to evict, `explain` writes the sentences. This module combines
the three. A load, a what-if answer and a replayed decision all use it, so all three decide in the same way. A
simulation places replicas one by one, each as if the earlier replicas were loaded.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

from nodes.placement.choose import (
    Candidate,
    Decision,
    Need,
    Reason,
    find_refusal,
    free_index,
    gpu_shares,
    has_memory,
    rank_node,
    vram_needed,
)
from nodes.placement.evict import (
    Eviction,
    ProtectionRules,
    Resident,
    choose_victims,
    free_memory_of,
    nodes_short_of_memory,
)
from nodes.placement.explain import (
    MAX_SENTENCE_LENGTH,
    DecisionOutcome,
    Explanation,
    FleetView,
    describe_victims,
    explain,
    truncate,
)
from nodes.placement.memory import add_free_bytes, fill_gpus, total_bytes

_REFUSED_BY_ALL_REASON = "every node that could take it has refused this load"


@dataclass(frozen=True)
class LoadQuestion:
    """The input of a load's decision: the nodes, and the facts that only this load has."""

    view: FleetView
    refusing: frozenset[UUID] = frozenset()
    """Nodes that have refused the load; they are never tried again."""
    evicts: bool = True
    """True if replicas may be evicted for the load; False for a scale-up, which has no waiting request."""
    fits_by_replacement: bool = False
    """True if the load fits with all layers after the replica that it replaces is evicted."""

    def evictable_nodes(self, decision: Decision) -> list[Candidate]:
        """Return the nodes on which an eviction would help this load."""
        return self._short_of_memory(decision) if self.evicts else []

    def choose_partial(self, decision: Decision) -> tuple[Candidate, int] | None:
        """Return the node that has memory for the most layers, and their number; None if no layer fits."""
        parts, options = () if self.fits_by_replacement else self.view.need.partial, []
        for node in self._short_of_memory(decision) if parts else ():
            # The fewer layers, the less memory: the first that fits has the most.
            place = bisect_left(parts, True, key=partial(self._holds_layers, node))
            if place < len(parts):
                options.append((-place, node))
        if not options:
            return None
        most, backoffs = max(place for place, _ in options), self.view.backoffs
        layers = parts[-most][0]
        need = self.view.need.with_layers(layers)
        roomiest = (node for place, node in options if place == most)
        return min(roomiest, key=lambda node: rank_node(node, need, backoffs)), layers

    def _holds_layers(self, node: Candidate, part: tuple[int, int]) -> bool:
        return has_memory(node, self.view.need.with_layers(part[0]))

    def _short_of_memory(self, decision: Decision) -> list[Candidate]:
        if decision.node is not None or self.refused_by_all(decision):
            return []
        view = self.view
        return nodes_short_of_memory(view.nodes, decision.refused, view.backed_off, view.need)

    def refused_by_all(self, decision: Decision) -> bool:
        """Return True if all feasible nodes have refused the load, so that it ends."""
        if decision.node is not None or not self.refusing:
            return False
        backed_off = (id for id, reason in decision.refused.items() if reason is Reason.SILENT)
        return all(id in self.refusing for id in backed_off)

    def fits_by_replacing(self, replica: Resident, decision: Decision) -> bool:
        """Return True if the replica's node lacks only the memory or the slot that the replica uses.

        If anything else is missing, evicting the replica would not help.
        """
        view, replaceable = self.view, (Reason.FULL, Reason.MEMORY, Reason.GPUS)
        if decision.refused.get(replica.node_id) not in replaceable:
            return False
        (node,) = (candidate for candidate in view.nodes if candidate.id == replica.node_id)
        # Above a lowered number of slots there are more replicas than this one: they are evicted after it.
        empty = replace(free_memory_of(node, [replica]), used_indices=frozenset())
        return find_refusal(empty, view.backed_off, view.need, selector=view.selector) is None


@dataclass(frozen=True)
class EvictionCandidates:
    """The replicas that may be evicted for a load, and the facts that protect them."""

    residents: Sequence[Resident]
    guard: ProtectionRules

    def choose_eviction(self, question: LoadQuestion, decision: Decision) -> Eviction | None:
        """Return the eviction for a load; without a node, but with a reason, if none frees enough memory.

        None if no node lacks only memory.
        """
        nodes = question.evictable_nodes(decision)
        return choose_victims(nodes, self.residents, self.guard, question.view.need) if nodes else None

    def without_replicas(self, ended: Sequence[Resident]) -> "EvictionCandidates":
        """Return the candidates without the replicas `ended`."""
        ids = {replica.id for replica in ended}
        loaded = Counter(self.guard.loaded)
        loaded.subtract(replica.model_name for replica in ended if not replica.leaving)
        remaining = [replica for replica in self.residents if replica.id not in ids]
        return EvictionCandidates(remaining, replace(self.guard, loaded=dict(loaded)))


def decide_load(
    question: LoadQuestion, decision: Decision, eviction: Eviction | None = None, *, is_expired: bool = False
) -> Explanation:
    """Return the outcome of the load and the reason for it.

    `eviction` is the eviction for `evictable_nodes`. `is_expired`: no request needs the load any more.
    """
    explanation = explain(question.view, decision)
    if decision.node is None and is_expired:
        explanation = replace(explanation, outcome=DecisionOutcome.REFUSED)
    if question.refused_by_all(decision):
        sentence = truncate(f"{_REFUSED_BY_ALL_REASON}; {explanation.sentence}", MAX_SENTENCE_LENGTH)
        return replace(explanation, outcome=DecisionOutcome.REFUSED, sentence=sentence)
    if eviction is None or eviction.node is None or eviction.drains:
        chosen = question.choose_partial(decision)
        if chosen is not None:
            return _with_fewer_layers(explanation, *chosen)
    if eviction is None or not eviction.why:
        return explanation
    if eviction.node is None:
        return replace(
            explanation, sentence=truncate(f"{explanation.sentence}; {eviction.why}", MAX_SENTENCE_LENGTH)
        )
    return replace(
        explanation,
        outcome=DecisionOutcome.PLACED,
        sentence=truncate(f"{eviction.why}; {explanation.sentence}", MAX_SENTENCE_LENGTH),
        node=eviction.node,
        replica_index=free_index(eviction.node) or 0,
        facts={**explanation.facts, "evicts": describe_victims(eviction.victims)},
    )


def _with_fewer_layers(explanation: Explanation, node: Candidate, layers: int) -> Explanation:
    sentence = (
        f"with {layers} layers on the GPU of {node.name}, which does not have the memory for all of them"
    )
    return replace(
        explanation,
        outcome=DecisionOutcome.PLACED,
        sentence=truncate(f"{sentence}; {explanation.sentence}", MAX_SENTENCE_LENGTH),
        node=node,
        replica_index=free_index(node) or 0,
        gpu_layers=layers,
    )


AllowedNodes = Sequence[Set[UUID] | None]
"""By position of the replica: the nodes that it may use; None = all nodes."""


def simulate_placements(
    question: LoadQuestion, allowed_nodes: AllowedNodes, occupants: EvictionCandidates | None = None
) -> Iterator[Explanation]:
    """Yield the decision for each replica, as if all earlier replicas were loaded.

    The simulation ends when a replica that may use any node finds no node, because all later replicas would
    fail too. A replica that is evicted for one decision does not exist for the next decision.
    """
    view = question.view
    nodes = {node.id: node for node in view.nodes}
    for node_ids in allowed_nodes:
        candidates = [node for node in nodes.values() if node_ids is None or node.id in node_ids]
        allowed_view = replace(view, nodes=candidates, restricted=view.restricted or node_ids is not None)
        allowed_question = replace(question, view=allowed_view)
        decision = allowed_view.decide()
        eviction = occupants.choose_eviction(allowed_question, decision) if occupants is not None else None
        explanation = decide_load(allowed_question, decision, eviction)
        yield explanation
        if explanation.node is None:
            if node_ids is None:
                return
            continue
        node = explanation.node
        if eviction is not None and occupants is not None and not explanation.gpu_layers:
            node, occupants = (
                _node_after_eviction(node, eviction),
                occupants.without_replicas([*eviction.victims, *eviction.leaving]),
            )
        need = view.need.with_layers(explanation.gpu_layers)
        nodes[node.id] = _node_with_replica(node, explanation.replica_index, need)


def _node_after_eviction(node: Candidate, eviction: Eviction) -> Candidate:
    freed = free_memory_of(node, [*eviction.victims, *eviction.leaving])
    return replace(freed, loaded=max(freed.loaded - len(eviction.victims), 0))


def _node_with_replica(node: Candidate, index: int, need: Need) -> Candidate:
    """Return the node as if the replica were loaded; replicas of a model share its files."""
    disk = 0 if node.used_indices else max(need.disk - node.staged_bytes, 0)
    shares, needed = gpu_shares(node, need), vram_needed(node, need)
    if shares is None:
        shares = fill_gpus(node.gpus, needed)
    used_vram = total_bytes(shares, needed)
    return replace(
        node,
        used_indices=node.used_indices | {index},
        loaded=node.loaded + 1,
        free_vram=node.free_vram - used_vram,
        available_vram=max(node.available_vram - used_vram, 0),
        gpus=add_free_bytes(node.gpus, ((index, -share) for index, share in shares.items())),
        available_disk=max(node.available_disk - disk, 0),
    )
