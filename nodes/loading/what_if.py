"""Dry run of placements on the current fleet with hypothetical nodes. Writes nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from localai_cluster.kit import conf
from localai_cluster.web.shapes import Row
from nodes.decisions import fleet_cache, fleet_queries
from nodes.loading.reason_shapes import PLAN, PLANNED, decision
from nodes.models import BackendNode
from nodes.placement.choose import ANY_NODE, Candidate, Need, Selector
from nodes.placement.explain import DecisionOutcome, FleetView
from nodes.placement.load_decision import EvictionCandidates, LoadQuestion, simulate_placements
from nodes.registry.labels import auto_labels
from nodes.replicas import eviction

GIB = 2**30


@dataclass(frozen=True)
class NewNodes:
    """A group of equal hypothetical nodes of a plan, healthy and empty; memory in GiB."""

    count: int
    vram_gib: float = 0
    disk_gib: float = 0
    """0 = not reported."""
    max_replicas_per_model: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRequest:
    """The request of a plan: a model, or only a need, with the number of replicas and the added nodes."""

    need: Need
    model: str = ""
    conflicts: frozenset[str] = frozenset()
    """The models that should not share a node with it."""
    selector: Mapping[str, str] | None = None
    """Node selector; None = the selector of the model's rule."""
    replicas: int = 1
    nodes: Sequence[NewNodes] = ()
    backend: str = ""
    """Backend of the model; among equal nodes, those that have it installed rank first."""


def need_for(vram: int, disk: int) -> Need:
    """Return a need in bytes; the settings determine what is required (R2.32, R2.39)."""
    settings = conf.cluster()
    return Need(vram, settings.vram_policy == "require", disk, settings.disk_headroom_check, disk)


def plan(question: PlanRequest, now: datetime) -> Row:
    """Return the decision for each replica, one after another."""
    picture = read_snapshot(question, now)
    explanations = simulate_placements(picture.asked, [None] * question.replicas, picture.occupants)
    decisions = [decision(explanation) for explanation in explanations]
    return PLAN.of(
        model=question.model or None,
        wanted=question.replicas,
        placed=sum(row["outcome"] == DecisionOutcome.PLACED for row in decisions),
        decisions=[
            PLANNED.of(replica=number, hypothetical=row["node_id"] in picture.new, **row)
            for number, row in enumerate(decisions, 1)
        ],
    )


@dataclass(frozen=True)
class PlanSnapshot:
    """The current fleet with the nodes that a plan adds."""

    asked: LoadQuestion
    occupants: EvictionCandidates
    new: frozenset[str]
    """The ids of the added nodes."""


def read_snapshot(question: PlanRequest, now: datetime, *, evicts: bool = True) -> PlanSnapshot:
    """Read the snapshot that a placement decision uses, in a constant number of queries."""
    model, selector = question.model, _selector(question)
    fleet = fleet_cache.read_fleet(model, selector=selector, conflicts=question.conflicts)
    fleet = fleet_queries.mark_installed(fleet, question.backend)
    added = list(added_nodes(question.nodes))
    residents = eviction.residents([node.id for node in fleet], now=now)
    return PlanSnapshot(
        LoadQuestion(FleetView([*fleet, *added], question.need, selector), evicts=evicts),
        EvictionCandidates(residents, eviction.guard(model, residents, now=now)),
        frozenset(str(node.id) for node in added),
    )


def _selector(question: PlanRequest) -> Selector:
    if question.selector is not None:
        return Selector(question.model, frozenset(question.selector.items()))
    return fleet_queries.selectors_of([question.model])[question.model] if question.model else ANY_NODE


def added_nodes(groups: Sequence[NewNodes]) -> Iterator[Candidate]:
    """Yield candidates with unused names and ids, and with the labels that the registry sets itself."""
    kinds = (group for group in groups for _ in range(group.count))
    for number, kind in enumerate(kinds, 1):
        vram, disk = int(kind.vram_gib * GIB), int(kind.disk_gib * GIB)
        node = BackendNode(
            name=f"(new {number})", total_vram=vram, max_replicas_per_model=kind.max_replicas_per_model
        )
        yield Candidate(
            id=UUID(int=number),
            name=node.name,
            node_type="backend",
            status="healthy",
            free_vram=vram,
            loaded=0,
            in_flight=0,
            taken=frozenset(),
            slots=kind.max_replicas_per_model,
            labels=frozenset((auto_labels(node) | dict(kind.labels)).items()),
            available_vram=vram,
            total_disk=disk,
            available_disk=disk,
        )
