"""Decisions of loads as the product keeps them: with what they saw in the placement log."""

from collections.abc import Sequence
from uuid import UUID, uuid4

from localai_cluster.kit import clock
from nodes.decisions import fleet_queries, snapshot_log
from nodes.decisions.decision_log import Decided
from nodes.decisions.load_snapshots import sections
from nodes.placement.choose import NOTHING, Candidate
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion, settle


def decided(
    model: str = "m", operation: UUID | None = None, nodes: Sequence[Candidate] | None = None
) -> Decided:
    """What a load that looks at all nodes, or at these, would decide; its snapshot is kept."""
    fleet = fleet_queries.fleet(model) if nodes is None else nodes
    question, id = LoadQuestion(FleetView(fleet, NOTHING)), operation or uuid4()
    seen = snapshot_log.remember(sections(str(id), model, question), now=clock.now())
    return Decided(model, id, settle(question, question.view.decide()), seen)
