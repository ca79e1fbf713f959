"""Decisions of loads as the product stores them, with their snapshots in the placement log."""

from collections.abc import Sequence
from uuid import UUID, uuid4

from localai_cluster.kit import clock
from nodes.decisions import decision_log, fleet_cache
from nodes.decisions.decision_log import DecisionRecord
from nodes.loading.load_snapshots import encode_load
from nodes.placement.choose import NO_NEED, Candidate
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import LoadQuestion, decide_load


def decided(
    model: str = "m", operation: UUID | None = None, nodes: Sequence[Candidate] | None = None
) -> DecisionRecord:
    """Decide a load on all nodes, or on `nodes`; store the snapshot and return the record."""
    fleet = fleet_cache.read_fleet(model) if nodes is None else nodes
    question, id = LoadQuestion(FleetView(fleet, NO_NEED)), operation or uuid4()
    seen = decision_log.store_snapshot(encode_load(str(id), model, question), now=clock.now())
    return DecisionRecord(model, id, decide_load(question, question.view.decide()), seen)
