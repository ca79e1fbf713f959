"""Which replicas make room for a load that lacks memory on every node: the least recently used ones. Pure.

Memory is the only lack that an eviction helps: slots are counted for each model, so only the model's own
replicas could free one, and those serve. Victims are on one node, and no more than it needs. What is leaving
there already counts as free, and what loads have reserved counts as taken, so two loads never make the same
room twice. Whose leaving frees an unknown amount is no victim.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from nodes.placement.choose import Candidate, Need, Reason, has_memory
from nodes.placement.gpus import Rooms, given_back

JUST_LOADED = timedelta(seconds=5)
"""A replica is spared for so long after its load: the requests that waited for it are on their way."""


_NAMED, _LONGEST_NAME = 5, 64


class Spared(StrEnum):
    """Why a replica is no victim."""

    BUSY = "busy"
    OWN = "of the model itself"
    SPREAD = "kept on every node by its rule"
    MINIMUM = "kept by the minimum of its rule"
    FRESH = "loaded a moment ago"
    UNKNOWN = "of unknown size"


@dataclass(frozen=True)
class Resident:
    """A replica that uses memory of its node, as eviction sees it."""

    id: UUID
    node_id: UUID
    name: str
    """`<model>#<index>`."""
    model_name: str
    leaving: bool
    """It gets no requests any more and its engine is about to stop."""
    in_flight: int
    last_used: datetime
    vram: int
    """Bytes that it is estimated to use; 0 = not known."""
    loaded_at: datetime | None = None
    gpus: Rooms = frozenset()
    """How much of that is on which GPU, by index; empty if it is not known."""

    @property
    def replica_index(self) -> int:
        """The one in its name."""
        return int(self.name.rpartition("#")[2])


@dataclass(frozen=True)
class Guard:
    """What keeps replicas from being evicted for a load of `model_name`."""

    model_name: str
    now: datetime
    loaded: Mapping[str, int]
    """Loaded replicas by model, in the whole cluster."""
    minimums: Mapping[str, int]
    """Of the models that have a rule."""
    spread: Set[str] = frozenset()
    """The models whose rule wants one on every node."""

    def spares(self, one: Resident, going: Mapping[str, int]) -> Spared | None:
        """Why this one may not go, if so many of each model go already; None if it may."""
        if one.model_name == self.model_name:
            return Spared.OWN
        if one.in_flight > 0:
            return Spared.BUSY
        if one.model_name in self.spread:
            return Spared.SPREAD
        left = self.loaded.get(one.model_name, 0) - going.get(one.model_name, 0)
        if one.model_name in self.minimums and left <= self.minimums[one.model_name]:
            return Spared.MINIMUM
        if one.loaded_at is not None and one.loaded_at > self.now - JUST_LOADED:
            return Spared.FRESH
        return Spared.UNKNOWN if one.vram <= 0 else None


@dataclass(frozen=True)
class Eviction:
    """The node that gets room, by whose leaving; or no node."""

    node: Candidate | None
    victims: Sequence[Resident] = ()
    """To be taken out; none if what leaves already is enough."""
    leaving: Sequence[Resident] = ()
    """Those that leave already."""
    why: str = ""
    """A sentence: what the load waits for, or why nothing can make room."""
    looked_at: Sequence[UUID] = ()
    among: Sequence[Resident] = ()
    guard: Guard | None = None
    """What it was chosen from: nodes, replicas, and what keeps them."""


def short_of_memory(
    fleet: Iterable[Candidate], refused: Mapping[UUID, Reason], resting: Set[UUID] = frozenset()
) -> list[Candidate]:
    """The nodes that lack nothing but memory; none while a node has it and only rests.

    All other reasons come before it (`choose.refusal`), so these match the selector and have a free slot.
    """
    if Reason.SILENT in refused.values():
        return []
    short = (Reason.MEMORY, Reason.GPUS)
    return [n for n in fleet if refused.get(n.id) in short and n.id not in resting]


def choose_victims(
    nodes: Iterable[Candidate], residents: Iterable[Resident], guard: Guard, need: Need
) -> Eviction:
    """For a load that needs so much: the node whose victims were last used the longest ago."""
    considered, among = list(nodes), list(residents)
    by_node: dict[UUID, list[Resident]] = {node.id: [] for node in considered}
    for one in among:
        if one.node_id in by_node:
            by_node[one.node_id].append(one)
    found = [
        (node, victims)
        for node in considered
        if (victims := _least(node, by_node[node.id], guard, need)) is not None
    ]
    looked_at = list(by_node)
    if not found:
        why = _why_none(by_node.values(), guard)
        return Eviction(None, why=why, looked_at=looked_at, among=among, guard=guard)
    node, victims = min(found, key=lambda one: _rank(*one))
    leaving = [one for one in by_node[node.id] if one.leaving]
    return Eviction(node, victims, leaving, _why(node, victims, leaving), looked_at, among, guard)


def _least(
    node: Candidate, residents: Sequence[Resident], guard: Guard, need: Need
) -> tuple[Resident, ...] | None:
    """The victims that give the node enough memory, the longest unused first; None if it cannot have it."""
    soon = without(node, [one for one in residents if one.leaving])
    victims: list[Resident] = []
    going: Counter[str] = Counter()
    for one in sorted(residents, key=lambda one: (one.last_used, one.id)):
        if has_memory(without(soon, victims), need):
            break
        if not one.leaving and guard.spares(one, going) is None:
            victims.append(one)
            going[one.model_name] += 1
    if not has_memory(without(soon, victims), need):
        return None
    for one in tuple(victims):
        others = [other for other in victims if other is not one]
        if has_memory(without(soon, others), need):
            victims = others
    return tuple(victims)


def without(node: Candidate, gone: Iterable[Resident]) -> Candidate:
    """The node when the memory of these is free again, on the GPUs where it is known to be.

    What they use is an estimate: together they never give back more than the node can have.
    """
    free, gpus = node.free_vram, node.gpus
    for one in gone:
        free, gpus = free + one.vram, given_back(gpus, one.gpus)
    if node.most_vram:
        free = min(free, max(node.most_vram, node.free_vram))
    return replace(node, free_vram=free, gpus=gpus)


def _rank(node: Candidate, victims: Sequence[Resident]) -> tuple[bool, datetime | None, int, str]:
    if not victims:
        return (False, None, 0, node.name)
    return (True, max(one.last_used for one in victims), len(victims), node.name)


def _why(node: Candidate, victims: Sequence[Resident], leaving: Sequence[Resident]) -> str:
    names = named([one.name for one in [*victims, *leaving]])
    return f"waits for {names} on {node.name} to stop" + (", the least recently used" if victims else "")


def named(names: Iterable[str]) -> str:
    """The first few of them, cut, and how many more: there may be many, and names are long."""
    every = sorted(names)
    more = [f"{len(every) - _NAMED} more"] if len(every) > _NAMED else []
    return ", ".join([*(name[:_LONGEST_NAME] for name in every[:_NAMED]), *more])


def _why_none(residents: Iterable[Sequence[Resident]], guard: Guard) -> str:
    every = [one for of_node in residents for one in of_node]
    spared = Counter(str(guard.spares(one, {}) or "too small") for one in every if not one.leaving)
    if not spared:
        return ""
    said = ", ".join(f"{count} {reason}" for reason, count in sorted(spared.items()))
    return f"no replica there can make room: {said}"
