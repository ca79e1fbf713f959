"""What if: where replicas would go on the present fleet, with nodes that do not exist. Writes nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from localai_cluster import conf
from localai_cluster.web.shapes import Row
from nodes.loading.reason_shapes import PLAN, PLANNED, decision
from nodes.models import BackendNode
from nodes.placement.choose import Candidate, Need
from nodes.placement.explain import Ending, FleetView
from nodes.placement.plan import successive
from nodes.placement.selector import ANY, Selector
from nodes.placement.settle import LoadQuestion, Occupants
from nodes.registry.labels import auto_labels
from nodes.replicas import eviction, installed, snapshot

GIB = 2**30


@dataclass(frozen=True)
class NewNodes:
    """Some equal nodes that the plan adds, healthy and empty; memory in GiB."""

    count: int
    vram_gib: float = 0
    disk_gib: float = 0
    """0 = not reported."""
    max_replicas_per_model: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanWish:
    """What is to be placed: a model, or something of which only the need is known."""

    need: Need
    model: str = ""
    conflicts: frozenset[str] = frozenset()
    """The models that it should have no node in common with."""
    selector: Mapping[str, str] | None = None
    """None: that of the model's rule."""
    replicas: int = 1
    nodes: Sequence[NewNodes] = ()
    backend: str = ""
    """Of the model; of equal nodes those that have it come first."""


def need_for(vram: int, disk: int) -> Need:
    """A need in bytes, obliging as the settings say (R2.32, R2.39)."""
    settings = conf.cluster()
    return Need(vram, settings.vram_policy == "require", disk, settings.disk_headroom_check, disk)


def planned(question: PlanWish, now: datetime) -> Row:
    """The decision for each replica, one after another."""
    picture = pictured(question, now)
    told = successive(picture.asked, [None] * question.replicas, picture.occupants)
    decisions = [decision(one) for one in told]
    return PLAN.of(
        model=question.model or None,
        wanted=question.replicas,
        placed=sum(one["outcome"] == Ending.PLACED for one in decisions),
        decisions=[
            PLANNED.of(replica=number, hypothetical=one["node_id"] in picture.new, **one)
            for number, one in enumerate(decisions, 1)
        ],
    )


@dataclass(frozen=True)
class PlanPicture:
    """The present fleet with the nodes that a plan adds."""

    asked: LoadQuestion
    occupants: Occupants
    new: frozenset[str]
    """The ids of those that are added."""


def pictured(question: PlanWish, now: datetime, *, evicts: bool = True) -> PlanPicture:
    """What a load would see; a constant number of queries."""
    model, selector = question.model, _selector(question)
    fleet = snapshot.fleet(model, selector=selector, conflicts=question.conflicts)
    fleet = installed.mark(fleet, question.backend)
    added = list(added_nodes(question.nodes))
    found = eviction.residents([node.id for node in fleet], now=now)
    return PlanPicture(
        LoadQuestion(FleetView([*fleet, *added], question.need, selector), evicts=evicts),
        Occupants(found, eviction.guard(model, found, now=now)),
        frozenset(str(node.id) for node in added),
    )


def _selector(question: PlanWish) -> Selector:
    if question.selector is not None:
        return Selector(question.model, frozenset(question.selector.items()))
    return snapshot.selectors_of([question.model])[question.model] if question.model else ANY


def added_nodes(groups: Sequence[NewNodes]) -> Iterator[Candidate]:
    """Candidates with names and ids that no registered node has; they have the registry's own labels."""
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
