"""Explain why a replica was placed on its node, or nowhere: the record of one decision. Pure.

A `FleetView` is the complete input of a decision. `explain` states in one sentence what decided: the first
term of the rank in which the best node differs from the second, or what excludes all nodes. The facts of the
explanation are the number of nodes that each reason excluded, the best nodes with their terms, and the
nearest misses.

`nodes/decisions` stores the input of the decision, because the input may be large.

`explain_memory` states which nodes have the memory for a model, before any load.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson

from localai_cluster.kit.quantities import format_gib, gib_rounded_up
from nodes.placement.choose import (
    ANY_NODE,
    NO_NEED,
    Candidate,
    Decision,
    Need,
    Rank,
    Reason,
    Selector,
    choose_node,
    describe_vram_needed,
    find_refusal,
    format_context,
    format_free_gpus,
    free_index,
    gpu_shares,
    has_memory,
    rank_node,
    smaller_context,
    usable_bytes,
    vram_needed,
)
from nodes.placement.evict import ProtectionRules, Resident, choose_victims, join_names
from nodes.placement.fit import Terms
from nodes.placement.load_times import NodeBackoffs
from nodes.placement.sizes import describe_need

MAX_BYTES = 16 * 1024
"""Maximum bytes of one record as JSON, with all its columns."""
MAX_SHOWN_NODES = 5
"""Maximum number of best nodes, and of nearest misses, in an explanation."""
MAX_VERDICTS = 20
"""Maximum number of nodes whose memory an answer compares with a need."""
MAX_SENTENCE_LENGTH = 1000
_MAX_SELECTOR_LENGTH, _MAX_NAME_LENGTH = 400, 64
"""Characters; a name is cut only if the explanation is too large otherwise."""
OTHER_COLUMNS_BYTES = 2560
"""Bytes of a record reserved for its other columns: two names of 255 characters, ids and times."""

_VICTIMS_BYTES = 2048
"""Bytes of a record reserved for the description of evicted replicas."""

_NO_ALLOWED_NODE_SENTENCE = "none of the nodes that it may use is registered"
_NEARNESS_BY_REASON = {reason: place for place, reason in enumerate(reversed(Reason))}
"""How near a refused node came. `find_refusal` tests transient conditions last, so a later reason is
nearer."""


class DecisionOutcome(StrEnum):
    """What a decision led to."""

    PLACED = "placed"
    WAITING = "waiting"
    REFUSED = "refused"
    EVICTED = "evicted"
    SCALED = "scaled"
    UNLOADING = "unloading"


@dataclass(frozen=True)
class FleetView:
    """The nodes and facts that a placement decision reads: its complete input."""

    nodes: Sequence[Candidate]
    need: Need
    selector: Selector = ANY_NODE
    backoffs: NodeBackoffs = field(default_factory=dict)
    backed_off: Set[UUID] = frozenset()
    restricted: bool = False
    """True if `nodes` has only those nodes that the load may use."""

    def decide(self) -> Decision:
        """Choose a node from these nodes."""
        return choose_node(
            self.nodes,
            need=self.need,
            backoffs=self.backoffs,
            backed_off=self.backed_off,
            selector=self.selector,
        )


@dataclass(frozen=True)
class Explanation:
    """A decision with its reason; `facts` can be encoded as JSON."""

    outcome: DecisionOutcome
    sentence: str
    node: Candidate | None
    replica_index: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    gpu_layers: int = 0
    """Layers on the GPU if fewer than in the definition; 0 for the number in the definition."""


def explain(snapshot: FleetView, decision: Decision) -> Explanation:
    """Explain why the decision follows from `snapshot`, in at most `MAX_BYTES`."""
    sentence = truncate(_decision_sentence(snapshot, decision), MAX_SENTENCE_LENGTH)
    best, misses = list(_best_nodes(snapshot, decision)), list(_nearest_misses(snapshot, decision))
    facts: dict[str, Any] = {
        "need": _need_facts(snapshot.need),
        "selector": truncate(str(snapshot.selector), _MAX_SELECTOR_LENGTH)
        if snapshot.selector.labels != ANY_NODE.labels
        else "",
        "nodes": {"considered": len(snapshot.nodes), "feasible": len(decision.ranked)},
        "refused": _refusal_counts(decision),
        "best": best,
        "misses": misses,
        "evicts": [],
    }
    if len(orjson.dumps([sentence, facts])) > MAX_BYTES - OTHER_COLUMNS_BYTES - _VICTIMS_BYTES:
        for entry in [*best, *misses]:
            entry["node"] = truncate(entry["node"], _MAX_NAME_LENGTH)
            entry.pop("against", None)
    outcome = DecisionOutcome.WAITING if decision.node is None else DecisionOutcome.PLACED
    return Explanation(outcome, sentence, decision.node, decision.replica_index, facts)


def _need_facts(need: Need) -> dict[str, Any]:
    facts = {**asdict(need), "terms": dict(need.terms), "by_gpu": {str(i): size for i, size in need.by_gpu}}
    for inner in ("contexts", "partial", "unknown_fits"):
        del facts[inner]
    return facts


FACTS_WITHOUT_FLEET: Mapping[str, Any] = {
    "need": _need_facts(NO_NEED),
    "selector": "",
    "nodes": {"considered": 0, "feasible": 0},
    "refused": [],
    "best": [],
    "misses": [],
    "evicts": [],
}
"""The facts of a decision that compared no nodes."""


def describe_victims(victims: Iterable[Resident]) -> list[dict[str, Any]]:
    """Describe the first `MAX_SHOWN_NODES` evicted replicas: the bytes that each frees, and its last use."""
    return [
        {
            "replica_id": str(victim.id),
            "replica": truncate(victim.name, _MAX_NAME_LENGTH),
            "vram": victim.vram,
            "last_used": victim.last_used.isoformat(),
        }
        for victim in heapq.nsmallest(
            MAX_SHOWN_NODES, victims, key=lambda victim: (victim.last_used, victim.id)
        )
    ]


def _decision_sentence(snapshot: FleetView, decision: Decision) -> str:
    if decision.node is None:
        return (
            decision.describe_refusals()
            if snapshot.nodes or not snapshot.restricted
            else _NO_ALLOWED_NODE_SENTENCE
        )
    if len(decision.ranked) > 1:
        return _compare(snapshot, decision.node, decision.ranked[1], is_ahead=True)
    if not decision.refused:
        return "the only node"
    counts = ", ".join(f"{entry['count']} {entry['reason']}" for entry in _refusal_counts(decision))
    return f"the only node that can take it; the others: {counts}"


def _refusal_counts(decision: Decision) -> list[dict[str, Any]]:
    counts = Counter(decision.refused.values())
    return [
        {"code": reason_code(reason), "reason": str(reason), "count": count}
        for reason, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def reason_code(reason: Reason) -> str:
    """Return the machine-readable code of a reason."""
    return reason.name.lower()


def _compare(snapshot: FleetView, node: Candidate, other: Candidate, *, is_ahead: bool) -> str:
    """Describe the first term of the rank in which two nodes differ; `is_ahead`: `node` is the better one."""
    need, name = snapshot.need, truncate(other.name, _MAX_NAME_LENGTH)
    rank, other_rank = (rank_node(ranked, need, snapshot.backoffs) for ranked in (node, other))
    differing = (term for term in TERMS if getattr(rank, term) != getattr(other_rank, term))
    if (term := next(differing, None)) is None:
        return f"equal to {name} in every term, {'the first' if is_ahead else 'later'} by name"
    figure, other_figure = TERMS[term].figure(rank, node, need), TERMS[term].figure(other_rank, other, need)
    if term == "memory" and figure == other_figure:  # too near for GiB
        figure, other_figure = f"{-rank.memory} bytes", f"{-other_rank.memory} bytes"
    best_rank, words = (rank, TERMS[term].ahead) if is_ahead else (other_rank, TERMS[term].behind)
    kind = "available" if best_rank.lacks_memory else "free"
    return f"{words.format(kind)}: {figure} against {other_figure} on {name}"


_Figure = Callable[[Rank, Candidate, Need], str]


@dataclass(frozen=True)
class Term:
    """A term of the rank: its texts for the better and the worse node, and how its value is formatted."""

    ahead: str
    behind: str
    """Text for the worse node; `{}` is replaced by the kind of the better node's memory."""
    figure: _Figure


TERMS: Mapping[str, Term] = {
    "failures": Term(
        "fewest failures of load or backend",
        "more failures of load or backend",
        lambda rank, *_: str(rank.failures),
    ),
    "shared": Term(
        "no model of the same concurrency group there",
        "models of the same concurrency group there",
        lambda _, node, __: str(len(node.conflicts)),
    ),
    "lacks_memory": Term(
        "it has the VRAM needed",
        "it lacks the VRAM needed",
        lambda _, node, need: (
            f"{format_free_gpus(node) or format_gib(node.free_vram)} free of"
            f" {describe_vram_needed(node, need)} needed"
        ),
    ),
    "gpus": Term("on the fewest GPUs", "on more GPUs", lambda rank, *_: str(rank.gpus)),
    "busy": Term(
        "it is idle; loaded replicas",
        "it is not idle; loaded replicas",
        lambda _, node, __: str(node.loaded),
    ),
    "in_flight": Term("fewest requests", "more requests", lambda rank, *_: str(rank.in_flight)),
    "memory": Term(
        "most VRAM {}",
        "less VRAM {}",
        lambda rank, *_: format_gib(-rank.memory),
    ),
    "lacks_backend": Term(
        "the backend is there already",
        "the backend is not there yet",
        lambda rank, *_: "not installed" if rank.lacks_backend else "installed",
    ),
}
"""The terms of the rank by field name, in the order of `Rank`."""


def _best_nodes(snapshot: FleetView, decision: Decision) -> Iterator[dict[str, Any]]:
    for place, node in enumerate(decision.ranked[:MAX_SHOWN_NODES]):
        terms = rank_node(node, snapshot.need, snapshot.backoffs)
        against = {"against": _compare(snapshot, node, decision.ranked[0], is_ahead=False)} if place else {}
        lacks_backend = {} if node.has_backend is None else {"lacks_backend": terms.lacks_backend}
        yield {
            "node_id": str(node.id),
            "node": node.name,
            "replica_index": free_index(node) or 0,
            "gpus": sorted(gpu_shares(node, snapshot.need) or ()),
            "terms": {
                "failures": terms.failures,
                "shared": terms.shared,
                "has_memory": not terms.lacks_memory,
                "gpus": terms.gpus,
                "busy": terms.busy,
                "in_flight": terms.in_flight,
                "memory": -terms.memory,
                **lacks_backend,
            },
            **against,
        }


def _nearest_misses(snapshot: FleetView, decision: Decision) -> Iterator[dict[str, Any]]:
    refused = (node for node in snapshot.nodes if node.id in decision.refused)

    def distance(node: Candidate) -> tuple[int, int, str]:
        return _NEARNESS_BY_REASON[decision.refused[node.id]], -node.free_vram, node.name

    for node in heapq.nsmallest(MAX_SHOWN_NODES, refused, key=distance):
        reason = decision.refused[node.id]
        yield {
            "node_id": str(node.id),
            "node": node.name,
            "code": reason_code(reason),
            "reason": str(reason),
            "free_vram": node.free_vram,
            "free_gpus": [free_bytes for _, free_bytes in sorted(node.gpus)],
            "available_disk": node.available_disk,
            "promised_bytes": node.promised_bytes,
            "total_disk": node.total_disk,
            "disk_quota": node.disk_quota,
            "quota_used": node.other_models_bytes + node.staged_bytes if node.disk_quota else 0,
            "replicas": len(node.used_indices),
            "slots": node.slots,
            "in_flight": node.in_flight,
        }


def truncate(text: str, longest: int) -> str:
    """Cut the text to at most `longest` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


class MemoryVerdict(StrEnum):
    """The result of comparing a node's memory with the need of a model."""

    FITS = "fits"
    SMALLER_CONTEXT = "smaller_context"
    LACKS_MEMORY = "lacks_memory"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True)
class NodeMemory:
    """The memory of one node compared with a need, and what would help; in bytes."""

    node: Candidate
    verdict: MemoryVerdict
    needed: int
    """Bytes that the replica needs on the node; 0 = unknown."""
    usable: int
    """The bytes that the replica could use on the node."""
    context: int = 0
    """The largest smaller context with which the replica fits, in tokens; 0 = none."""
    unload: tuple[str, ...] = ()
    """Names of the replicas whose eviction would free enough memory."""
    reason: str = ""
    """Why the node is refused for another reason than memory; empty if it is not."""

    @property
    def missing(self) -> int:
        is_lacking = self.verdict in (MemoryVerdict.SMALLER_CONTEXT, MemoryVerdict.LACKS_MEMORY)
        return self.needed - self.usable if is_lacking else 0

    def describe(self, terms: Terms = ()) -> str:
        """Return the comparison as a sentence, with the terms of the need if `terms` has any."""
        name = truncate(self.node.name, _MAX_NAME_LENGTH)
        match self.verdict:
            case MemoryVerdict.REFUSED:
                return f"not on {name}: {self.reason}"
            case MemoryVerdict.UNKNOWN:
                unknown = "it reports no VRAM" if self.needed else "the need is not known"
                return f"may fit on {name}: {unknown}"
            case MemoryVerdict.FITS:
                figures = f"{gib_rounded_up(self.needed)[:-4]} of {format_gib(self.usable)}"
                return f"fits on {name} (needs {describe_need(figures, terms, ': ')})"
        missing, context = gib_rounded_up(self.missing), format_context(self.context)
        if self.verdict == MemoryVerdict.SMALLER_CONTEXT:
            return f"on {name} with {context} context: {missing} missing for all of it"
        help_words = [f"unload {join_names(self.unload)}"] if self.unload else []
        help_words += [f"lower the context to {context}"] if self.context else []
        return f"not on {name}: {missing} missing{', ' if help_words else ''}{' or '.join(help_words)}"


@dataclass(frozen=True)
class MemoryExplanation:
    """A need compared with the memory of the first nodes; nodes that fit come first."""

    need: Need
    considered: int
    """Number of all nodes, also of those that are not among `nodes`."""
    nodes: Sequence[NodeMemory]

    def describe(self) -> str:
        """Return one sentence on the first `MAX_SHOWN_NODES` nodes; the terms of the need appear once."""
        terms, parts = self.need.terms, list[str]()
        for entry in self.nodes[:MAX_SHOWN_NODES]:
            parts.append(entry.describe(terms))
            terms = () if entry.verdict == MemoryVerdict.FITS else terms
        rest = self.considered - len(parts)
        return truncate("; ".join([*parts, *([f"and {rest} more"] if rest else [])]), MAX_SENTENCE_LENGTH)


def nearest_by_memory(snapshot: FleetView) -> list[tuple[Candidate, Reason | None]]:
    """Return the first nodes by their memory, each with its refusal for another reason, or None.

    Order: nodes that fit, nodes that lack only memory, then all others.
    """
    need, selector = replace(snapshot.need, vram_required=False), snapshot.selector
    pairs = [(node, find_refusal(node, need=need, selector=selector)) for node in snapshot.nodes]

    def distance(pair: tuple[Candidate, Reason | None]) -> tuple[bool, bool, int, str]:
        node, refusal = pair
        return refusal is not None, not has_memory(node, need), -node.free_vram, node.name

    return heapq.nsmallest(MAX_VERDICTS, pairs, key=distance)


def explain_memory(
    snapshot: FleetView, residents: Sequence[Resident], guard: ProtectionRules
) -> MemoryExplanation:
    """Compare the nodes' memory with the need; `residents` are the replicas on nodes that lack memory."""
    nodes = [
        _node_memory(node, refusal, snapshot.need, residents, guard)
        for node, refusal in nearest_by_memory(snapshot)
    ]
    return MemoryExplanation(snapshot.need, len(snapshot.nodes), nodes)


def _node_memory(
    node: Candidate,
    refusal: Reason | None,
    need: Need,
    residents: Sequence[Resident],
    guard: ProtectionRules,
) -> NodeMemory:
    needed, usable = vram_needed(node, need), max(usable_bytes(node, need), 0)
    if refusal is not None:
        return NodeMemory(node, MemoryVerdict.REFUSED, needed, usable, reason=str(refusal))
    if need.lacks_card(node.card_vram):
        reason = f"it reports no GPU, and the model needs {describe_vram_needed(node, need)}"
        return NodeMemory(node, MemoryVerdict.REFUSED, needed, usable, reason=reason)
    if not needed or not node.reports_memory:
        return NodeMemory(node, MemoryVerdict.UNKNOWN, needed, usable)
    if has_memory(node, need):
        return NodeMemory(node, MemoryVerdict.FITS, needed, usable)
    context, eviction = smaller_context(node, need), choose_victims([node], residents, guard, need)
    unload = tuple(replica.name for replica in [*eviction.victims, *eviction.leaving])
    is_smaller = context > 0 and not unload
    verdict = MemoryVerdict.SMALLER_CONTEXT if is_smaller else MemoryVerdict.LACKS_MEMORY
    return NodeMemory(node, verdict, needed, usable, context, unload)
