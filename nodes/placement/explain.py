"""Why a replica was placed where it was, or nowhere: the record of one decision. Pure.

A `FleetView` is all that a decision depends on. `explain` says in one sentence what decided: the first term
of the rank in which the best node differs from the second, or what keeps all nodes out. Beside the sentence
stand how many nodes each reason kept out, the best nodes with their terms, and the nearest misses.

What the decision was made from is kept elsewhere (`coded.py`, `sections.py`): it may be large.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson

from nodes.placement.choose import (
    NOTHING,
    Candidate,
    Decision,
    Need,
    Rank,
    Reason,
    choose,
    free_index,
    gib,
    gpus_free,
    rank,
    shares_of,
)
from nodes.placement.evict import Resident
from nodes.placement.selector import ANY, Selector
from nodes.placement.setbacks import Setbacks

MOST_BYTES = 16 * 1024
"""Of one record as JSON, with everything."""
SHOWN = 5
"""Nodes that an explanation names: as many of the best, as many of the nearest misses."""
LONGEST_SENTENCE = 1000
_LONGEST_SELECTOR, _LONGEST_NAME = 400, 64
"""Characters; a name is cut only if the explanation is too large otherwise."""
AROUND = 2560
"""Bytes left for what a row has besides an explanation: two names of 255 characters, ids and times."""

_FOR_VICTIMS = 2048
"""And for the replicas that make room."""

_NONE_OF_ITS_NODES = "none of the nodes that it may use is registered"
_NEARNESS = {reason: place for place, reason in enumerate(reversed(Reason))}
"""`refusal` asks for what passes by itself last: who failed a later question was nearer."""


class Ending(StrEnum):
    """What came of a decision."""

    PLACED = "placed"
    WAITING = "waiting"
    REFUSED = "refused"
    EVICTED = "evicted"
    SCALED = "scaled"
    UNLOADING = "unloading"


@dataclass(frozen=True)
class FleetView:
    """All that a decision depends on."""

    nodes: Sequence[Candidate]
    need: Need
    selector: Selector = ANY
    setbacks: Setbacks = field(default_factory=dict)
    resting: Set[UUID] = frozenset()
    restricted: bool = False
    """Whether these are not all nodes, but those that the load may use."""

    def decide(self) -> Decision:
        """What placement makes of it."""
        return choose(
            self.nodes,
            need=self.need,
            setbacks=self.setbacks,
            resting=self.resting,
            selector=self.selector,
        )


@dataclass(frozen=True)
class Explanation:
    """One decision, and why; `facts` are JSON."""

    outcome: Ending
    sentence: str
    node: Candidate | None
    replica_index: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def explain(snapshot: FleetView, decision: Decision) -> Explanation:
    """Why `snapshot` led to `decision`; never larger than `MOST_BYTES`."""
    sentence = cut(_sentence(snapshot, decision), LONGEST_SENTENCE)
    best, misses = list(_best(snapshot, decision)), list(_misses(snapshot, decision))
    facts: dict[str, Any] = {
        "need": orjson.loads(orjson.dumps(asdict(snapshot.need), default=sorted)),
        "selector": cut(str(snapshot.selector), _LONGEST_SELECTOR)
        if snapshot.selector.labels != ANY.labels
        else "",
        "nodes": {"considered": len(snapshot.nodes), "feasible": len(decision.ranked)},
        "refused": _counted(decision),
        "best": best,
        "misses": misses,
        "evicts": [],
    }
    if len(orjson.dumps([sentence, facts])) > MOST_BYTES - AROUND - _FOR_VICTIMS:
        for one in [*best, *misses]:
            one["node"] = cut(one["node"], _LONGEST_NAME)
            one.pop("against", None)
    outcome = Ending.WAITING if decision.node is None else Ending.PLACED
    return Explanation(outcome, sentence, decision.node, decision.replica_index, facts)


NO_FLEET: Mapping[str, Any] = {
    "need": asdict(NOTHING),
    "selector": "",
    "nodes": {"considered": 0, "feasible": 0},
    "refused": [],
    "best": [],
    "misses": [],
    "evicts": [],
}
"""The facts of a decision that no node was compared for."""


def evicted(victims: Iterable[Resident]) -> list[dict[str, Any]]:
    """The first of the replicas that make room: what they free, and since when they were idle."""
    return [
        {
            "replica_id": str(one.id),
            "replica": cut(one.name, _LONGEST_NAME),
            "vram": one.vram,
            "last_used": one.last_used.isoformat(),
        }
        for one in heapq.nsmallest(SHOWN, victims, key=lambda one: (one.last_used, one.id))
    ]


def _sentence(snapshot: FleetView, decision: Decision) -> str:
    if decision.node is None:
        return decision.why_none() if snapshot.nodes or not snapshot.restricted else _NONE_OF_ITS_NODES
    if len(decision.ranked) > 1:
        return _against(snapshot, decision.node, decision.ranked[1])
    if not decision.refused:
        return "the only node"
    counts = ", ".join(f"{one['count']} {one['reason']}" for one in _counted(decision))
    return f"the only node that can take it; the others: {counts}"


def _counted(decision: Decision) -> list[dict[str, Any]]:
    counts = Counter(decision.refused.values())
    return [
        {"code": code(reason), "reason": str(reason), "count": count}
        for reason, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def code(reason: Reason) -> str:
    """The reason for programs."""
    return reason.name.lower()


def _against(snapshot: FleetView, chosen: Candidate, other: Candidate) -> str:
    """The term of the rank that put one node before the other."""
    mine, its = (rank(one, snapshot.need, snapshot.setbacks) for one in (chosen, other))
    behind = cut(other.name, _LONGEST_NAME)
    term, one, two = _differing(snapshot.need, (mine, chosen), (its, other))
    if term is None:
        return f"equal to {behind} in every term, the first by name"
    return f"{term.ahead(mine)}: {one} against {two} on {behind}"


def _behind(snapshot: FleetView, other: Candidate, chosen: Candidate) -> str:
    """The same, said of the node that comes after the chosen one."""
    its, best = (rank(one, snapshot.need, snapshot.setbacks) for one in (other, chosen))
    ahead = cut(chosen.name, _LONGEST_NAME)
    term, one, two = _differing(snapshot.need, (its, other), (best, chosen))
    if term is None:
        return f"equal to {ahead} in every term, later by name"
    return f"{term.behind(best)}: {one} against {two} on {ahead}"


def _differing(
    need: Need, this: tuple[Rank, Candidate], that: tuple[Rank, Candidate]
) -> tuple["Term | None", str, str]:
    """The first term in which two nodes differ, and its figures; None if they are equal."""
    term = next((name for name in TERMS if getattr(this[0], name) != getattr(that[0], name)), None)
    if term is None:
        return None, "", ""
    one, two = TERMS[term].figure(*this, need), TERMS[term].figure(*that, need)
    if term == "memory" and one == two:  # too near for GiB
        one, two = f"{-this[0].memory} bytes", f"{-that[0].memory} bytes"
    return TERMS[term], one, two


_Words = Callable[[Rank], str]
_Figure = Callable[[Rank, Candidate, Need], str]


@dataclass(frozen=True)
class Term:
    """A term of the rank in words: of the node that it puts ahead, of the one behind, and its figure."""

    ahead: _Words
    behind: _Words
    figure: _Figure


TERMS: Mapping[str, Term] = {
    "failures": Term(
        lambda _: "fewest failures of load or backend",
        lambda _: "more failures of load or backend",
        lambda rank, *_: str(rank.failures),
    ),
    "shared": Term(
        lambda _: "no model of the same concurrency group there",
        lambda _: "models of the same concurrency group there",
        lambda _, node, __: str(len(node.conflicts)),
    ),
    "lacks": Term(
        lambda _: "it has the VRAM needed",
        lambda _: "it lacks the VRAM needed",
        lambda _, node, need: f"{gpus_free(node) or gib(node.free_vram)} free of {gib(need.vram)} needed",
    ),
    "gpus": Term(lambda _: "on the fewest GPUs", lambda _: "on more GPUs", lambda rank, *_: str(rank.gpus)),
    "busy": Term(
        lambda _: "it is idle; loaded replicas",
        lambda _: "it is not idle; loaded replicas",
        lambda _, node, __: str(node.loaded),
    ),
    "in_flight": Term(
        lambda _: "fewest requests", lambda _: "more requests", lambda rank, *_: str(rank.in_flight)
    ),
    "memory": Term(
        lambda rank: "most VRAM available" if rank.lacks else "most VRAM free",
        lambda rank: "less VRAM available" if rank.lacks else "less VRAM free",
        lambda rank, *_: gib(-rank.memory),
    ),
    "lacks_backend": Term(
        lambda _: "the backend is there already",
        lambda _: "the backend is not there yet",
        lambda rank, *_: "not installed" if rank.lacks_backend else "installed",
    ),
}
"""The terms of the rank, in its order."""


def _best(snapshot: FleetView, decision: Decision) -> Iterator[dict[str, Any]]:
    for place, node in enumerate(decision.ranked[:SHOWN]):
        terms = rank(node, snapshot.need, snapshot.setbacks)
        against = {"against": _behind(snapshot, node, decision.ranked[0])} if place else {}
        yield {
            "node_id": str(node.id),
            "node": node.name,
            "replica_index": free_index(node) or 0,
            "gpus": sorted(shares_of(node, snapshot.need) or ()),
            "terms": {
                "failures": terms.failures,
                "shared": terms.shared,
                "has_memory": not terms.lacks,
                "gpus": terms.gpus,
                "busy": terms.busy,
                "in_flight": terms.in_flight,
                "memory": -terms.memory,
            },
            **against,
        }


def _misses(snapshot: FleetView, decision: Decision) -> Iterator[dict[str, Any]]:
    refused = (node for node in snapshot.nodes if node.id in decision.refused)

    def distance(node: Candidate) -> tuple[int, int, str]:
        return _NEARNESS[decision.refused[node.id]], -node.free_vram, node.name

    for node in heapq.nsmallest(SHOWN, refused, key=distance):
        reason = decision.refused[node.id]
        yield {
            "node_id": str(node.id),
            "node": node.name,
            "code": code(reason),
            "reason": str(reason),
            "free_vram": node.free_vram,
            "free_gpus": [room for _, room in sorted(node.gpus)],
            "available_disk": node.available_disk,
            "total_disk": node.total_disk,
            "replicas": len(node.taken),
            "slots": node.slots,
            "in_flight": node.in_flight,
        }


def cut(text: str, longest: int) -> str:
    """At most so many characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"
