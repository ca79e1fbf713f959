"""Choose the node for one new replica.

First, each node that cannot take the replica gets a reason. The nodes without a reason are ranked: fewest
failures of this load, then nodes without a model of the replica's concurrency groups (R2.82), then R1.70 to
R1.72 in this order: enough memory free, idle, fewest requests, most memory. Among nodes that are still equal,
nodes with the backend come first. The decision keeps the reasons of the refused nodes, so that the caller can
report what is missing.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from localai_cluster.kit.quantities import format_bytes, format_gib, gib_rounded_up
from nodes.placement.fit import LARGEST, Pairs
from nodes.placement.load_times import NodeBackoffs
from nodes.placement.memory import BytesByGpu, FreeByGpu, fit_gpus, fit_stated_gpus
from nodes.placement.sizes import QUOTA_HINT, describe_disk, describe_disk_need, describe_need, describe_quota

Labels = frozenset[tuple[str, str]]
"""Pairs of a label's key and value."""


@dataclass(frozen=True)
class Selector:
    """The labels that a node must have to match (R1.68); without labels every node matches."""

    model: str = ""
    labels: Labels | None = frozenset()
    """Pairs of key and value. None: the stored selector cannot be read, and no node matches (R1.69)."""

    def matches(self, labels: Set[tuple[str, str]]) -> bool:
        """Return True if a node with these labels matches; additional labels do not matter."""
        return self.labels is not None and self.labels <= labels

    def tested_labels(self, labels: Labels) -> Labels:
        """Return those of the labels whose key the selector tests."""
        keys = {key for key, _ in self.labels or ()}
        return frozenset(pair for pair in labels if pair[0] in keys) if keys else frozenset()

    def __str__(self) -> str:
        subject = f"the selector of model {self.model}" if self.model else "the selector"
        if self.labels is None:
            return f"{subject}, which cannot be read"
        pairs = ", ".join(f"{key}={value}" for key, value in sorted(self.labels))
        return f"{subject}: {pairs}"


ANY_NODE = Selector()


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
    QUOTA = "without space in the disk quota for models"
    FULL = "no free slot for this model"
    MEMORY = "without the VRAM it needs"
    GPUS = "without a GPU, or GPUs together, that have the room it needs"
    SILENT = "not answering or failed a moment ago"


_REASON_BY_STATUS = {
    "pending": Reason.PENDING,
    "offline": Reason.OFFLINE,
    "draining": Reason.DRAINING,
    "unhealthy": Reason.UNHEALTHY,
}

_NO_BACKOFFS: NodeBackoffs = MappingProxyType({})
_MAX_NAMED_NODES = 5
"""Maximum number of nodes in a sentence about lacking space; nodes with the most space come first."""


@dataclass(frozen=True)
class Need:
    """The resources that a replica needs on its node, in bytes; 0 = unknown."""

    vram: int = 0
    vram_required: bool = False
    """True if a node that lacks the memory is refused (R2.32); False if it only ranks last."""
    disk: int = 0
    disk_required: bool = False
    files: int = 0
    """Bytes of `disk` that are for the model's files, which are sent to the node; 0 = none, or unknown."""
    own_gpus: bool = False
    """True if the definition chooses the GPUs, so that the engine sees all GPUs of the node."""
    vram_share: float = 0.0
    """The fraction of a GPU's memory that the backend takes; 0 = the backend takes `vram` bytes."""
    terms: tuple[tuple[str, int], ...] = ()
    """The terms of which `vram` is the sum (`fit.estimate`): their names and bytes."""
    cards: int = 0
    """Number of GPUs; the backend takes `vram_share` of each. 0 if `vram_share` is 0."""
    by_gpu: Pairs = ()
    """Bytes on each GPU that the definition names, by index. Empty if the definition names none."""
    contexts: Pairs = ()
    """Pairs of a context length in tokens, the definition's first, and the bytes that it saves."""
    source: str = "estimated"
    """The source of `vram`: `stated` by the definition, `learned` from former loads, or `estimated`."""
    readings: int = 0
    """The number of readings that determined `vram`."""
    learned_at: str = ""
    """Time of the newest reading that determined `vram`, in ISO 8601."""
    partial: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of layers on the GPU, most first, and the bytes needed; empty: all layers or none."""
    unknown_fits: bool = False
    """True if a node that reports no memory counts as a node with enough memory."""

    def shares(self, free: int, free_by_gpu: FreeByGpu, needed: int) -> BytesByGpu | None:
        """Return the bytes to take of each GPU for `needed` bytes (`fit_gpus`); None if memory is lacking."""
        if self.own_gpus:
            return fit_stated_gpus(free, free_by_gpu, needed, self.by_gpu)
        return fit_gpus(free, free_by_gpu, needed, self.cards)

    def vram_on(self, card_vram: int) -> int:
        """Return the bytes needed on a node whose average GPU has `card_vram` bytes; 0 = unknown."""
        if not self.vram_share:
            return self.vram
        return min(int(card_vram * self.vram_share) * self.cards, LARGEST)

    def requires_memory(self, *, is_reported: bool) -> bool:
        """Return True if a node without the memory is refused; `is_reported`: it reports its memory."""
        return self.vram_required and (is_reported or not self.unknown_fits)

    def lacks_card(self, card_vram: int) -> bool:
        """Return True if the need is a required fraction of a GPU, but the node reports no GPU memory."""
        return self.requires_memory(is_reported=False) and self.vram_share > 0 and not card_vram

    def with_layers(self, layers: int) -> "Need":
        """Return the need with `layers` layers on the GPU, a number in `partial`; 0 changes nothing."""
        if not layers:
            return self
        return replace(self, vram=dict(self.partial)[layers], terms=(), by_gpu=(), contexts=(), partial=())


NO_NEED = Need()


@dataclass(frozen=True)
class Candidate:
    """The facts about a node that placement reads; memory in bytes."""

    id: UUID
    name: str
    node_type: str
    status: str
    free_vram: int
    """Effectively free memory: available minus reserved (R1.51)."""
    loaded: int
    """Number of loaded replicas on the node, of any model."""
    in_flight: int
    used_indices: frozenset[int]
    """Replica indices of this model in use on the node, in any state (R1.62 [S])."""
    slots: int
    """Maximum number of replicas of one model on the node (`max_replicas_per_model`)."""
    labels: Labels = frozenset()
    """The labels that the selector tests; other labels of the node may be missing."""
    available_vram: int = 0
    most_vram: int = 0
    """Bytes that are free on the node when nothing is loaded; 0 = not reported."""
    card_vram: int = 0
    """Bytes of the node's average GPU, not limited by the memory budget; 0 = not reported."""
    total_disk: int = 0
    """Bytes of the disk; 0 = not reported."""
    available_disk: int = 0
    promised_bytes: int = 0
    """Bytes of `available_disk` that loads of other models have yet to send to the node."""
    staged_bytes: int = 0
    """Bytes of this model's files that are already on the node."""
    disk_quota: int = 0
    """Maximum bytes of the files of all models on the node; 0 = no limit."""
    other_models_bytes: int = 0
    """Bytes of other models' files, including files of active loads; 0 on a node without a quota."""
    gpus: FreeByGpu = frozenset()
    """Effectively free memory of each GPU, by index; empty if the node does not report its GPUs."""
    gpu_totals: FreeByGpu = frozenset()
    """Total memory of each GPU, by index."""
    file_port_failed: bool = False
    """True if files cannot be sent to the node now (`registry/file_port.py`)."""
    conflicts: frozenset[str] = frozenset()
    """Models with a replica on the node that should not share a node with this model (R2.81)."""
    has_backend: bool | None = None
    """True if the model's backend is installed; None if this was not read, because other facts decide."""

    @property
    def free_disk(self) -> int:
        """Return the available bytes of the disk that no load of another model will take."""
        return max(self.available_disk - self.promised_bytes, 0)

    @property
    def reports_memory(self) -> bool:
        """Return True if the node reports its memory."""
        return max(self.available_vram, self.most_vram, self.card_vram) > 0

    def describe_conflicts(self) -> str:
        """Return the sentence that the node already has models of the same concurrency groups."""
        shared = ", ".join(sorted(self.conflicts))
        return f"beside {shared} of the same concurrency group: no better node can take it"


@dataclass(frozen=True)
class Decision:
    """The node and replica index that were chosen, or no node; and why each refused node was refused."""

    node: Candidate | None
    replica_index: int = 0
    refused: dict[UUID, Reason] = field(default_factory=dict)
    ranked: Sequence[Candidate] = ()
    """All feasible nodes, the chosen one first."""
    selector: Selector = ANY_NODE
    lacking: Mapping[Reason, str] = field(default_factory=dict)
    """By reason for lack of space: a text with the needed amount and the amounts of the refused nodes."""

    def describe_refusals(self) -> str:
        """Return one sentence that explains why no node was chosen."""
        if not self.refused:
            return "no node is registered"
        counts = Counter(self.refused.values())
        if Reason.SELECTOR in counts and set(counts) <= {Reason.SELECTOR, Reason.AGENT}:
            return f"no node matches {self.selector}"
        parts = ", ".join(
            f"{count} {reason}{self.lacking.get(reason, '')}" for reason, count in sorted(counts.items())
        )
        if set(counts) == {Reason.PENDING}:
            return f"only pending nodes ({counts[Reason.PENDING]}): approve one"
        return f"no node can take it: {parts}"


class Rank(NamedTuple):
    """The sort key of feasible nodes: the first field that differs decides, and the lower value wins."""

    failures: int
    """Failures of this load on the node."""
    shared: bool
    """True if a model of the same concurrency group is loaded on the node."""
    lacks_memory: bool
    """True if the node lacks memory for the load, or the load's need is unknown."""
    gpus: int
    """Number of GPUs that the replica would use; nodes where it uses one GPU come first."""
    busy: bool
    """True if any replica is loaded on the node."""
    in_flight: int
    memory: int
    """Negated bytes of memory, so that the node with the most memory comes first."""
    lacks_backend: bool
    """True if the model's backend would have to be installed."""
    name: str


def find_refusal(
    node: Candidate,
    backed_off: Set[UUID] = frozenset(),
    need: Need = NO_NEED,
    *,
    selector: Selector = ANY_NODE,
) -> Reason | None:
    """Return why `node` cannot take one more replica; None if it can.

    Permanent reasons come before transient ones: a node that does not match the selector stays useless when
    it becomes healthy.
    """
    if node.node_type != "backend":
        return Reason.AGENT
    if not selector.matches(node.labels):
        return Reason.SELECTOR
    if node.status in _REASON_BY_STATUS:
        return _REASON_BY_STATUS[node.status]
    if need.files > 0 and node.file_port_failed:
        return Reason.FILE_PORT
    if need.disk_required and lacks_disk(node, need):
        return Reason.DISK
    # Files that the node already has count.
    if need.files > node.staged_bytes and 0 < node.disk_quota < node.other_models_bytes + need.files:
        return Reason.QUOTA
    if free_index(node) is None:
        return Reason.FULL
    if need.lacks_card(node.card_vram):
        return Reason.MEMORY
    if need.requires_memory(is_reported=node.reports_memory) and not has_memory(node, need):
        return Reason.MEMORY if node.free_vram < vram_needed(node, need) else Reason.GPUS
    return Reason.SILENT if node.id in backed_off else None


def lacks_disk(node: Candidate, need: Need) -> bool:
    """Return True if the node reports too little disk space; files that are on it already count (R2.38)."""
    return node.total_disk > 0 and node.free_disk + node.staged_bytes < need.disk


def has_memory(node: Candidate, need: Need) -> bool:
    """Return True if the needed memory is effectively free on the node, or the need is unknown."""
    return gpu_shares(node, need) is not None


def vram_needed(node: Candidate, need: Need) -> int:
    """Return the bytes that a replica needs on the node; 0 = unknown."""
    return need.vram_on(node.card_vram)


def describe_vram_needed(node: Candidate, need: Need) -> str:
    """Format the memory that a replica needs on the node; a fraction if the node reports no GPU."""
    if need.vram_share and not node.card_vram:
        return f"{need.vram_share:.0%} of {'a GPU' if need.cards == 1 else f'each of {need.cards} GPUs'}"
    return gib_rounded_up(vram_needed(node, need))


def gpu_shares(node: Candidate, need: Need) -> BytesByGpu | None:
    """Return the bytes to take of each GPU for a replica; None if there is too little memory."""
    return need.shares(node.free_vram, node.gpus, vram_needed(node, need))


def usable_bytes(node: Candidate, need: Need) -> int:
    """Return the free bytes on the GPUs to use; if the replica does not fit, the largest need that would."""
    needed, rooms = vram_needed(node, need), dict(node.gpus)
    shares = need.shares(node.free_vram, node.gpus, needed)
    if shares is not None:
        return min(node.free_vram, sum(rooms[index] for index in shares) if shares else node.free_vram)
    sizes = range(1, needed + 1)
    return bisect_left(sizes, True, key=lambda size: need.shares(node.free_vram, node.gpus, size) is None)


def smaller_context(node: Candidate, need: Need) -> int:
    """Return the largest context in tokens, below the definition's, with which the replica fits; 0 = none."""
    needed = vram_needed(node, need)
    fitting = (
        context
        for context, saved in need.contexts[1:]
        if saved < needed and need.shares(node.free_vram, node.gpus, needed - saved) is not None
    )
    return next(fitting, 0)


def format_context(tokens: int) -> str:
    """Format a number of tokens; a multiple of 1,024 as for example `8k`."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def free_index(node: Candidate) -> int | None:
    """Return the lowest free replica index of the model on the node; None without a free slot (R1.63)."""
    return lowest_free_index(node.used_indices, node.slots)


def lowest_free_index(used: Set[int], cap: int, ending: Set[int] = frozenset()) -> int | None:
    """Return the lowest unused index; None when `cap` indices are in use (R1.63, R1.64).

    Rows above a lowered cap count as well. Indices in `ending` belong to engines that are no longer replicas
    and may still run: these indices do not count toward the cap, and they are not reused.
    """
    if len(used) >= cap:
        return None
    return next(index for index in itertools.count() if index not in used and index not in ending)


def choose_node(
    nodes: Iterable[Candidate],
    *,
    need: Need = NO_NEED,
    backoffs: NodeBackoffs = _NO_BACKOFFS,
    backed_off: Set[UUID] = frozenset(),
    selector: Selector = ANY_NODE,
) -> Decision:
    """Choose the best feasible node for one replica. Nodes in `backed_off` are not feasible.

    Nodes with fewer failures of this load come first.
    """
    considered: Sequence[Candidate] = list(nodes)
    reasons = ((node.id, find_refusal(node, backed_off, need, selector=selector)) for node in considered)
    refused = {id: reason for id, reason in reasons if reason is not None}
    feasible = [node for node in considered if node.id not in refused]
    ranked = sorted(feasible, key=lambda node: rank_node(node, need, backoffs))
    return build_decision(considered, ranked, refused, need, selector)


def build_decision(
    considered: Sequence[Candidate],
    ranked: Sequence[Candidate],
    refused: dict[UUID, Reason],
    need: Need,
    selector: Selector,
) -> Decision:
    """Return the decision. Each considered node is in exactly one of `ranked` and `refused`."""
    if not ranked:
        return Decision(
            None, refused=refused, selector=selector, lacking=_lacks_by_reason(considered, refused, need)
        )
    return Decision(ranked[0], free_index(ranked[0]) or 0, refused, ranked, selector)


def rank_node(node: Candidate, need: Need, backoffs: NodeBackoffs) -> Rank:
    """Return the rank of a node by R2.82 and, if the need is known and its memory is free, R1.70.

    Without a known need, or on a node without the memory, R1.71 and R1.72 apply, without reservations.
    """
    failures = backoffs[node.id].times if node.id in backoffs else 0
    shares = gpu_shares(node, need) if vram_needed(node, need) > 0 else None
    by_need = shares is not None
    memory = node.free_vram if by_need else node.available_vram
    busy = node.loaded > 0
    shared = bool(node.conflicts)
    gpu_count, in_flight = len(shares or ()) or 1, node.in_flight if busy else 0
    return Rank(
        failures, shared, not by_need, gpu_count, busy, in_flight, -memory, not node.has_backend, node.name
    )


def equal_to_best(decision: Decision, need: Need, backoffs: NodeBackoffs) -> list[Candidate]:
    """Return the ranked nodes that differ from the best node only by name, beginning with the best node."""
    ranks = ((node, rank_node(node, need, backoffs)) for node in decision.ranked)
    best: tuple[object, ...] = ()
    equal: list[Candidate] = []
    for node, node_rank in ranks:
        best = best or node_rank[:-1]
        if node_rank[:-1] != best:
            break
        equal.append(node)
    return equal


def _lacks_by_reason(
    nodes: Sequence[Candidate], refused: Mapping[UUID, Reason], need: Need
) -> dict[Reason, str]:
    """Describe, for each reason for lack of space, the memory or disk of the refused nodes (R2.39)."""
    descriptions = {}
    by_memory, by_gpus = (
        sorted((n for n in nodes if refused.get(n.id) is reason), key=lambda n: (-n.free_vram, n.name))
        for reason in (Reason.MEMORY, Reason.GPUS)
    )
    by_disk = sorted(
        (n for n in nodes if refused.get(n.id) is Reason.DISK), key=lambda n: (-n.free_disk, n.name)
    )
    by_quota = sorted(
        (n for n in nodes if refused.get(n.id) is Reason.QUOTA),
        key=lambda n: (n.other_models_bytes - n.disk_quota, n.name),
    )
    if by_memory:
        lacks = need.lacks_card
        free_by_node = [
            f"{n.name} {'reports no GPU' if lacks(n.card_vram) else f'has {format_gib(n.free_vram)} free'}"
            for n in by_memory
        ]
        descriptions[Reason.MEMORY] = _need_with_nodes(_most_needed(by_memory, need), free_by_node)
        descriptions[Reason.MEMORY] += _context_hint(by_memory, need)
    if by_gpus:
        free_by_node = [f"{n.name} has {format_free_gpus(n)} free" for n in by_gpus]
        descriptions[Reason.GPUS] = _need_with_nodes(_most_needed(by_gpus, need), free_by_node)
        descriptions[Reason.GPUS] += _context_hint(by_gpus, need)
    if by_disk:
        free_by_node = [
            f"{n.name} has {describe_disk(n.available_disk, n.total_disk, n.promised_bytes)}" for n in by_disk
        ]
        descriptions[Reason.DISK] = _need_with_nodes(describe_disk_need(need.files, need.disk), free_by_node)
    if by_quota:
        descriptions[Reason.QUOTA] = _need_with_nodes(
            f"{format_bytes(need.files)} of files",
            [f"{n.name}: {_describe_quota_of(n, need)}" for n in by_quota],
        )
        descriptions[Reason.QUOTA] += f"; {QUOTA_HINT}"
    return descriptions


def _most_needed(nodes: Sequence[Candidate], need: Need) -> str:
    largest = max(nodes, key=lambda node: vram_needed(node, need))
    return describe_need(describe_vram_needed(largest, need), need.terms, " for ")


def _context_hint(nodes: Sequence[Candidate], need: Need) -> str:
    """Return a hint at the largest context that fits one of the first nodes; "" if no context fits."""
    contexts = [(smaller_context(node, need), -place) for place, node in enumerate(nodes[:_MAX_NAMED_NODES])]
    context, place = max(contexts)
    return f"; with {format_context(context)} context it fits on {nodes[-place].name}" if context else ""


def _need_with_nodes(needed: str, nodes: Sequence[str]) -> str:
    suffix = [f"and {len(nodes) - _MAX_NAMED_NODES} more"] if len(nodes) > _MAX_NAMED_NODES else []
    return f" ({needed}: {', '.join([*nodes[:_MAX_NAMED_NODES], *suffix])})"


def _describe_quota_of(node: Candidate, need: Need) -> str:
    used = node.other_models_bytes + node.staged_bytes
    return describe_quota(used, node.disk_quota, need.files - node.staged_bytes)


def format_free_gpus(node: Candidate) -> str:
    """List the free memory of each GPU, the largest first; empty if the node does not report its GPUs."""
    free = sorted((free_bytes for _, free_bytes in node.gpus), reverse=True)
    suffix = [f"{len(free) - _MAX_NAMED_NODES} GPUs less"] if len(free) > _MAX_NAMED_NODES else []
    return " + ".join([*map(format_gib, free[:_MAX_NAMED_NODES]), *suffix])
