"""Decide a load: the node it goes to, what it waits for, or that it ends; and the eviction that helps. Pure.

`choose` ranks nodes, `evict` selects victims, `explain` writes the sentences. This module combines them in
the one way in which a load, a what-if answer and a decision that is replayed from stored rows are decided.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from nodes.placement.choose import Candidate, Decision, Reason, free_index, refusal
from nodes.placement.evict import Eviction, Guard, Resident, choose_victims, short_of_memory, without
from nodes.placement.explain import LONGEST_SENTENCE, Ending, Explanation, FleetView, cut, evicted, explain

_REFUSED_BY_ALL = "every node that could take it has refused this load"


@dataclass(frozen=True)
class LoadQuestion:
    """The request of a load, and the facts that only this load has."""

    view: FleetView
    refusing: frozenset[UUID] = frozenset()
    """Nodes that have refused the load; they back off permanently."""
    evicts: bool = True
    """True if replicas may be evicted for the load; False for a scale-up, which no request waits for."""

    def lacking(self, decision: Decision) -> list[Candidate]:
        """Return the nodes on which an eviction would help."""
        if decision.node is not None or not self.evicts or self.refused_by_all(decision):
            return []
        return short_of_memory(self.view.nodes, decision.refused, self.view.resting)

    def refused_by_all(self, decision: Decision) -> bool:
        """Return True if all nodes that could take the load have refused it, so that it ends."""
        if decision.node is not None or not self.refusing:
            return False
        backed_off = (id for id, reason in decision.refused.items() if reason is Reason.SILENT)
        return all(id in self.refusing for id in backed_off)

    def fits_instead_of(self, replica: Resident, decision: Decision) -> bool:
        """Return True if that replica's node was refused only for the memory or slot that the replica takes.

        If more is lacking, evicting the replica would not help.
        """
        view, replaceable = self.view, (Reason.FULL, Reason.MEMORY, Reason.GPUS)
        if decision.refused.get(replica.node_id) not in replaceable:
            return False
        (node,) = (candidate for candidate in view.nodes if candidate.id == replica.node_id)
        # Above a lowered number of slots there are more replicas than this one: they are evicted after it.
        empty = replace(without(node, [replica]), taken=frozenset())
        return refusal(empty, view.resting, view.need, selector=view.selector) is None


@dataclass(frozen=True)
class Occupants:
    """The replicas that could be evicted, and the facts that protect them."""

    residents: Sequence[Resident]
    guard: Guard

    def room(self, question: LoadQuestion, decision: Decision) -> Eviction | None:
        """Return the eviction that frees enough memory, or why none can; None if none helps."""
        nodes = question.lacking(decision)
        return choose_victims(nodes, self.residents, self.guard, question.view.need) if nodes else None

    def without(self, gone: Sequence[Resident]) -> "Occupants":
        """Return the occupants that remain without the replicas `gone`."""
        ids = {replica.id for replica in gone}
        loaded = Counter(self.guard.loaded)
        loaded.subtract(replica.model_name for replica in gone if not replica.leaving)
        remaining = [replica for replica in self.residents if replica.id not in ids]
        return Occupants(remaining, replace(self.guard, loaded=dict(loaded)))


def settle(
    question: LoadQuestion, decision: Decision, room: Eviction | None = None, *, over: bool = False
) -> Explanation:
    """Return the outcome of the load and its reason.

    `room` was computed for `lacking`; `over`: no request needs the load.
    """
    explanation = explain(question.view, decision)
    if decision.node is None and over:
        explanation = replace(explanation, outcome=Ending.REFUSED)
    if question.refused_by_all(decision):
        sentence = cut(f"{_REFUSED_BY_ALL}; {explanation.sentence}", LONGEST_SENTENCE)
        return replace(explanation, outcome=Ending.REFUSED, sentence=sentence)
    if room is None or not room.why:
        return explanation
    if room.node is None:
        return replace(explanation, sentence=cut(f"{explanation.sentence}; {room.why}", LONGEST_SENTENCE))
    return replace(
        explanation,
        outcome=Ending.PLACED,
        sentence=cut(f"{room.why}; {explanation.sentence}", LONGEST_SENTENCE),
        node=room.node,
        replica_index=free_index(room.node) or 0,
        facts={**explanation.facts, "evicts": evicted(room.victims)},
    )
