"""Any stored decision, made again from rows alone: its record and the log of what it saw (I14).

Each kind has its own way. What this finds and what the record says are equal, or something that the decision
depends on is not in the rows.
"""

from dataclasses import dataclass
from uuid import UUID

from nodes.decisions import decision_log, load_snapshots, scale_records, snapshot_log
from nodes.decisions import scale_records as scheduling
from nodes.decisions.snapshot_log import SnapshotRef, State
from nodes.loading import load_attempts
from nodes.models import DecisionKind, PlacementRecord
from nodes.placement.evict import Eviction
from nodes.placement.explain import DecisionOutcome, Explanation
from nodes.placement.load_decision import decide_load
from nodes.replicas import unload_requests
from nodes.scheduling.plan import plan


@dataclass(frozen=True)
class ReplayedDecision:
    """What a decision says."""

    outcome: str
    reason: str
    node_id: UUID | None


def recorded_decision(record: PlacementRecord) -> ReplayedDecision:
    """What the record says."""
    return ReplayedDecision(record.outcome, record.reason, record.node_id)


def replay(record: PlacementRecord) -> ReplayedDecision | None:
    """The decision again; None if what it saw is not kept any more."""
    if record.kind == DecisionKind.ATTEMPT:
        return ReplayedDecision(load_attempts.ending(record.facts), record.reason, record.node_id)
    if record.base is None or record.position is None:
        return None
    state = snapshot_log.read_snapshot(SnapshotRef(record.base, record.position))
    return None if state is None else _from(state, record)


def _from(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    match record.kind:
        case DecisionKind.SCALE:
            return _scaled(state, record)
        case DecisionKind.UNLOAD:
            words = unload_requests.replay_unload(state, record.model_name, record.operation_id)
            return None if words is None else ReplayedDecision(DecisionOutcome.UNLOADING, words, None)
        case DecisionKind.EVICTION:
            return _evicted(state, record)
        case _:
            settled = _settled(state, record, record.model_name)
            if settled is None:
                return None
            told, _ = settled
            return ReplayedDecision(told.outcome, told.sentence, told.node.id if told.node else None)


def _settled(state: State, record: PlacementRecord, model: str) -> tuple[Explanation, Eviction | None] | None:
    known = load_snapshots.decode_load(state, str(record.operation_id), model)
    if known is None:
        return None
    question, decision = known.question, known.question.view.decide()
    room = known.occupants.choose_eviction(question, decision) if known.occupants is not None else None
    return decide_load(question, decision, room, over=known.over), room


def _evicted(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    model = record.facts["for"]
    settled = _settled(state, record, model)
    if settled is None:
        return None
    told, room = settled
    for one in room.victims if room is not None else ():
        if (one.model_name, one.replica_index) == (record.model_name, record.replica_index):
            return ReplayedDecision(
                DecisionOutcome.EVICTED, decision_log.describe_eviction(model, one), one.node_id
            )
    return ReplayedDecision(told.outcome, told.sentence, told.node.id if told.node else None)


def _scaled(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    seen = scheduling.decode_rule(state, record.model_name)
    if seen is None:
        return None
    fleet, demand, now, tick = seen
    for ruling in plan(fleet, [demand], now, tick=tick):
        words = scale_records.sentence(ruling)
        if record.outcome == DecisionOutcome.REFUSED and record.facts["decided"] == words:
            # What came of it was not this decision's to say.
            return recorded_decision(record)
        return ReplayedDecision(scale_records.outcome(ruling) or "", words, None)
    return None
