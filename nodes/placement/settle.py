"""The decision of a load: where it goes, what it has to wait for, or that it ends; with what could make room.
Pure.

`choose` ranks nodes, `evict` finds victims, `explain` has the words. Here they come together, in the one way
in which a load, an answer to "what if" and a decision that is made again from stored rows all decide.
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
    """What is asked for a load, and what it knows itself."""

    view: FleetView
    refusing: frozenset[UUID] = frozenset()
    """The nodes that have refused it; they are at rest for good."""
    evicts: bool = True
    """Whether replicas may be evicted for it: not for one more replica, which no request waits for."""

    def lacking(self, decision: Decision) -> list[Candidate]:
        """The nodes on which an eviction would help."""
        if decision.node is not None or not self.evicts or self.refused_by_all(decision):
            return []
        return short_of_memory(self.view.nodes, decision.refused, self.view.resting)

    def refused_by_all(self, decision: Decision) -> bool:
        """Whether it ends: all nodes that could take it have refused it."""
        if decision.node is not None or not self.refusing:
            return False
        rests = (id for id, reason in decision.refused.items() if reason is Reason.SILENT)
        return all(id in self.refusing for id in rests)

    def fits_instead_of(self, former: Resident, decision: Decision) -> bool:
        """Whether that replica's node was refused for nothing but the room that the replica takes.

        Where more is lacking the replica would go for nothing.
        """
        view, lacks = self.view, (Reason.FULL, Reason.MEMORY, Reason.GPUS)
        if decision.refused.get(former.node_id) not in lacks:
            return False
        (node,) = (one for one in view.nodes if one.id == former.node_id)
        # Above a lowered number of slots there are more replicas than this one: they follow it.
        empty = replace(without(node, [former]), taken=frozenset())
        return refusal(empty, view.resting, view.need, selector=view.selector) is None


@dataclass(frozen=True)
class Occupants:
    """The replicas that could make room, and what keeps them from it."""

    residents: Sequence[Resident]
    guard: Guard

    def room(self, question: LoadQuestion, decision: Decision) -> Eviction | None:
        """Whose leaving makes room, or why none can; None while it would help nowhere."""
        nodes = question.lacking(decision)
        return choose_victims(nodes, self.residents, self.guard, question.view.need) if nodes else None

    def without(self, gone: Sequence[Resident]) -> "Occupants":
        """What is left when these have gone."""
        ids = {one.id for one in gone}
        loaded = Counter(self.guard.loaded)
        loaded.subtract(one.model_name for one in gone if not one.leaving)
        left = [one for one in self.residents if one.id not in ids]
        return Occupants(left, replace(self.guard, loaded=dict(loaded)))


def settle(
    question: LoadQuestion, decision: Decision, room: Eviction | None = None, *, over: bool = False
) -> Explanation:
    """What becomes of the load, and why. `room` as found for `lacking`; `over` if no request needs it."""
    told = explain(question.view, decision)
    if decision.node is None and over:
        told = replace(told, outcome=Ending.REFUSED)
    if question.refused_by_all(decision):
        sentence = cut(f"{_REFUSED_BY_ALL}; {told.sentence}", LONGEST_SENTENCE)
        return replace(told, outcome=Ending.REFUSED, sentence=sentence)
    if room is None or not room.why:
        return told
    if room.node is None:
        return replace(told, sentence=cut(f"{told.sentence}; {room.why}", LONGEST_SENTENCE))
    return replace(
        told,
        outcome=Ending.PLACED,
        sentence=cut(f"{room.why}; {told.sentence}", LONGEST_SENTENCE),
        node=room.node,
        replica_index=free_index(room.node) or 0,
        facts={**told.facts, "evicts": evicted(room.victims)},
    )
