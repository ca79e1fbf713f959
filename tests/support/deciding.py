"""Decisions of loads as the product keeps them: with what they saw in the placement log."""

from collections.abc import Sequence
from uuid import UUID, uuid4

from localai_cluster.kit import clock
from nodes.decisions import fleet_snapshots, placement_snapshot
from nodes.decisions.decision_log import Decided
from nodes.decisions.placement_snapshots import sections
from nodes.placement.choose import NOTHING, Candidate
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion, settle


def decided(
    model: str = "m", operation: UUID | None = None, nodes: Sequence[Candidate] | None = None
) -> Decided:
    """What a load that looks at all nodes, or at these, would decide; its snapshot is kept."""
    fleet = placement_snapshot.fleet(model) if nodes is None else nodes
    question, id = LoadQuestion(FleetView(fleet, NOTHING)), operation or uuid4()
    seen = fleet_snapshots.remember(sections(str(id), model, question), now=clock.now())
    return Decided(model, id, settle(question, question.view.decide()), seen)
