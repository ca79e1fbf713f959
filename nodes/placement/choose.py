"""Chooses the node for one new replica.

First comes the question why each node cannot take the replica; those without a reason are ranked: fewest
failures of this load first, then those without a model of its concurrency groups (R2.82), then as R1.70 to
R1.72 say, in the order that `nodes/replicas/finders.py` has in SQL: those with enough memory free, idle
ones, fewest requests, most memory. Of nodes that are still equal, those that have the backend come first. The
reasons of all others stay in the decision, so that the caller can say what is missing.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from nodes.placement.estimate import UNKNOWN_PAYLOAD
from nodes.placement.gpus import Rooms, Shares, fit
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
    FILE_PORT = "with a file port that does not answer"
    DISK = "without the disk space it needs"
    FULL = "no free slot for this model"
    MEMORY = "without the VRAM it needs"
    GPUS = "without a GPU, or GPUs together, that have the room it needs"
    SILENT = "not answering or failed a moment ago"


_BY_STATUS = {
    "pending": Reason.PENDING,
    "offline": Reason.OFFLINE,
    "draining": Reason.DRAINING,
    "unhealthy": Reason.UNHEALTHY,
}

_NONE: Setbacks = MappingProxyType({})
_NAMED = 5
"""Nodes that a refusal for want of room names, those with the most first."""


@dataclass(frozen=True)
class Need:
    """What a replica needs of its node, in bytes; 0 = not known."""

    vram: int = 0
    vram_required: bool = False
    """R2.32: otherwise a node that lacks it only comes after those that have it."""
    disk: int = 0
    disk_required: bool = False
    files: int = 0
    """The part of `disk` that is the model's files, which are sent to the node; 0 = none, or not known."""
    own_gpus: bool = False
    """Its definition says which GPUs it uses: then it sees all of them, and the node counts as a whole."""


NOTHING = Need()


@dataclass(frozen=True)
class Candidate:
    """What placement sees of a node; memory in bytes."""

    id: UUID
    name: str
    node_type: str
    status: str
    free_vram: int
    """Effectively free: available minus what is reserved (R1.51)."""
    loaded: int
    """Loaded replicas of any model."""
    in_flight: int
    taken: frozenset[int]
    """Replica indices of this model in use on the node, in any state (R1.62 [S])."""
    slots: int
    """`max_replicas_per_model`."""
    labels: Labels = frozenset()
    """Those that a selector asks for; others may be missing."""
    available_vram: int = 0
    most_vram: int = 0
    """What it can have free at most, with nothing loaded; 0 = not reported."""
    total_disk: int = 0
    """0 = not reported."""
    available_disk: int = 0
    brought: int = 0
    """Bytes of this model's files that it has."""
    gpus: Rooms = frozenset()
    """What is effectively free on each GPU, by index; empty if the node does not tell them."""
    file_port_failed: bool = False
    """A model's files cannot be sent there now (`registry/file_port.py`)."""
    conflicts: frozenset[str] = frozenset()
    """Loaded models that share a concurrency group with this one (R2.81)."""
    has_backend: bool = False
    """The model's backend is installed; said of nodes that are equal otherwise (`replicas/installed.py`)."""

    def why_not_alone(self) -> str:
        """Why it takes a model beside those of its groups, for people."""
        shared = ", ".join(sorted(self.conflicts))
        return f"beside {shared} of the same concurrency group: no better node can take it"


@dataclass(frozen=True)
class Decision:
    """The node and replica index chosen, or neither; and why each other node was not feasible."""

    node: Candidate | None
    replica_index: int = 0
    refused: dict[UUID, Reason] = field(default_factory=dict)
    ranked: Sequence[Candidate] = ()
    """Every feasible node, the chosen one first."""
    selector: Selector = ANY
    room: Mapping[Reason, str] = field(default_factory=dict)
    """For want of room: what is needed, and what the nodes have that were refused for it."""

    def why_none(self) -> str:
        """One sentence for the caller when no node was found."""
        if not self.refused:
            return "no node is registered"
        counts = Counter(self.refused.values())
        if Reason.SELECTOR in counts and set(counts) <= {Reason.SELECTOR, Reason.AGENT}:
            return f"no node matches {self.selector}"
        parts = ", ".join(
            f"{count} {reason}{self.room.get(reason, '')}" for reason, count in sorted(counts.items())
        )
        if set(counts) == {Reason.PENDING}:
            return f"only pending nodes ({counts[Reason.PENDING]}): approve one"
        return f"no node can take it: {parts}"


class Rank(NamedTuple):
    """The terms by which feasible nodes are ordered, the first one that differs decides; least is best."""

    failures: int
    """Of this load."""
    shared: bool
    """A model of the same concurrency group is loaded there."""
    lacks: bool
    """Not known to have the memory that is needed."""
    gpus: int
    """On so many GPUs would it be: one that it is not split over comes first."""
    busy: bool
    """Some replica is loaded there."""
    in_flight: int
    memory: int
    """Negative: the most comes first."""
    lacks_backend: bool
    """The model's backend would have to be installed."""
    name: str


def refusal(
    node: Candidate,
    resting: Set[UUID] = frozenset(),
    need: Need = NOTHING,
    *,
    selector: Selector = ANY,
) -> Reason | None:
    """Why `node` cannot take one more replica, or None.

    What does not pass by itself comes first: a node that does not match is of no use when it is back.
    """
    if node.node_type != "backend":
        return Reason.AGENT
    if not selector.matches(node.labels):
        return Reason.SELECTOR
    if node.status in _BY_STATUS:
        return _BY_STATUS[node.status]
    if need.files > 0 and node.file_port_failed:
        return Reason.FILE_PORT
    if need.disk_required and lacks_disk(node, need):
        return Reason.DISK
    if free_index(node) is None:
        return Reason.FULL
    if need.vram_required and not has_memory(node, need):
        return Reason.MEMORY if node.free_vram < need.vram else Reason.GPUS
    return Reason.SILENT if node.id in resting else None


def lacks_disk(node: Candidate, need: Need) -> bool:
    """R2.38: whether it reports a disk, and that with less space than is needed beside what is there."""
    return node.total_disk > 0 and node.available_disk + node.brought < need.disk


def has_memory(node: Candidate, need: Need) -> bool:
    """Whether what is needed is effectively free there; of an unknown need nothing can be said."""
    return shares_of(node, need) is not None


def shares_of(node: Candidate, need: Need) -> Shares | None:
    """What it would take of each GPU (`gpus.fit`); None if the memory is lacking."""
    return fit(node.free_vram, frozenset() if need.own_gpus else node.gpus, need.vram)


def free_index(node: Candidate) -> int | None:
    """R1.63: the lowest replica index not in use, or None when all slots are taken."""
    return lowest_free(node.taken, node.slots)


def lowest_free(taken: Set[int], cap: int, ending: Set[int] = frozenset()) -> int | None:
    """R1.63, R1.64: the lowest index not taken, None when `cap` are taken.

    A lowered cap leaves rows above it; they count too. The indices in `ending` belong to engines that are no
    replicas any more and may still run: they do not count toward the cap, and they are not used again.
    """
    if len(taken) >= cap:
        return None
    return next(index for index in itertools.count() if index not in taken and index not in ending)


def choose(
    nodes: Iterable[Candidate],
    *,
    need: Need = NOTHING,
    setbacks: Setbacks = _NONE,
    resting: Set[UUID] = frozenset(),
    selector: Selector = ANY,
) -> Decision:
    """The best feasible node; one that is `resting` after a failure is not feasible.

    A node that failed this load before comes after those that failed it less often.
    """
    considered: Sequence[Candidate] = list(nodes)
    reasons = ((node.id, refusal(node, resting, need, selector=selector)) for node in considered)
    refused = {id: reason for id, reason in reasons if reason is not None}
    feasible = [node for node in considered if node.id not in refused]
    ranked = sorted(feasible, key=lambda node: rank(node, need, setbacks))
    return concluded(considered, ranked, refused, need, selector)


def concluded(
    considered: Sequence[Candidate],
    ranked: Sequence[Candidate],
    refused: dict[UUID, Reason],
    need: Need,
    selector: Selector,
) -> Decision:
    """The decision that follows when every node is either ranked or refused."""
    if not ranked:
        return Decision(None, refused=refused, selector=selector, room=_room(considered, refused, need))
    return Decision(ranked[0], free_index(ranked[0]) or 0, refused, ranked, selector)


def rank(node: Candidate, need: Need, setbacks: Setbacks) -> Rank:
    """R2.82, then R1.70 if the need is known and the node has it; else R1.71, R1.72, without reservations."""
    failures = setbacks[node.id].times if node.id in setbacks else 0
    shares = shares_of(node, need) if need.vram > 0 else None
    by_need = shares is not None
    memory = node.free_vram if by_need else node.available_vram
    busy = node.loaded > 0
    shared = bool(node.conflicts)
    parts, in_flight = len(shares or ()) or 1, node.in_flight if busy else 0
    return Rank(
        failures, shared, not by_need, parts, busy, in_flight, -memory, not node.has_backend, node.name
    )


def equal_to_best(decision: Decision, need: Need, setbacks: Setbacks) -> list[Candidate]:
    """Return the ranked nodes that only their names put behind the best, with it."""
    ranks = ((node, rank(node, need, setbacks)) for node in decision.ranked)
    best: tuple[object, ...] = ()
    equal: list[Candidate] = []
    for node, its in ranks:
        best = best or its[:-1]
        if its[:-1] != best:
            break
        equal.append(node)
    return equal


def _room(nodes: Sequence[Candidate], refused: Mapping[UUID, Reason], need: Need) -> dict[Reason, str]:
    """R2.39: the figures of the nodes that were refused for want of room."""
    words = {}
    by_memory, by_gpus = (
        sorted((n for n in nodes if refused.get(n.id) is reason), key=lambda n: (-n.free_vram, n.name))
        for reason in (Reason.MEMORY, Reason.GPUS)
    )
    by_disk = sorted(
        (n for n in nodes if refused.get(n.id) is Reason.DISK), key=lambda n: (-n.available_disk, n.name)
    )
    if by_memory:
        has = [f"{n.name} has {gib(n.free_vram)} free" for n in by_memory]
        words[Reason.MEMORY] = _listed(_up(need.vram), has)
    if by_gpus:
        has = [f"{n.name} has {gpus_free(n)} free" for n in by_gpus]
        words[Reason.GPUS] = _listed(_up(need.vram), has)
    if by_disk:
        has = [f"{n.name} has {gib(n.available_disk)} of {gib(n.total_disk)} free" for n in by_disk]
        words[Reason.DISK] = _listed(disk_words(need.files, need.disk), has)
    return words


def _listed(needed: str, nodes: Sequence[str]) -> str:
    more = [f"and {len(nodes) - _NAMED} more"] if len(nodes) > _NAMED else []
    return f" ({needed}: {', '.join([*nodes[:_NAMED], *more])})"


def disk_words(files: int, needed: int) -> str:
    """Return the disk space that is needed and what it is for: `files` bytes of it are the model's files."""
    if files <= 0:
        return _up(needed) + (" assumed for files of unknown size" if needed == UNKNOWN_PAYLOAD else "")
    size = (
        _up(files) if files >= 2**30 else next(f"{-(-files // 2**n)} {u}" for n, u in _UNITS if files >= 2**n)
    )
    return f"{size} of files and {_up(needed - files)} to spare" if needed > files else size


_UNITS = ((20, "MiB"), (10, "KiB"), (0, "B"))


def _up(amount: int) -> str:
    """Rounded up: what is needed never looks as small as what is there."""
    return f"{-(-amount * 10 // 2**30) / 10:.1f} GiB"


def gpus_free(node: Candidate) -> str:
    """What is free on each of its GPUs, the roomiest ones first; empty if it does not tell them."""
    rooms = sorted((room for _, room in node.gpus), reverse=True)
    more = [f"{len(rooms) - _NAMED} GPUs less"] if len(rooms) > _NAMED else []
    return " + ".join([*map(gib, rooms[:_NAMED]), *more])


def gib(amount: int) -> str:
    """Rounded down: what is there never looks as large as what is needed."""
    return f"{max(amount, 0) * 10 // 2**30 / 10:.1f} GiB"
