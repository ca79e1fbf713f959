"""Replay stored decisions from rows alone: the record, and the log of the snapshot that it used (I14).

The replayed decision equals the record, or something that the decision depends on is not in the rows.
"""

from dataclasses import dataclass
from uuid import UUID

from nodes.decisions import decision_log, load_snapshots, scale_records, snapshot_log
from nodes.decisions.snapshot_log import SnapshotRef, State
from nodes.loading import load_attempts
from nodes.models import DecisionKind, PlacementRecord
from nodes.placement.explain import DecisionOutcome
from nodes.placement.load_decision import decide_load
from nodes.replicas import unload_requests
from nodes.scheduling.plan import plan


@dataclass(frozen=True)
class ReplayedDecision:
    """The part of a decision that its record has too."""

    outcome: str
    reason: str
    node_id: UUID | None


def recorded_decision(record: PlacementRecord) -> ReplayedDecision:
    """Return the decision as the record has it."""
    return ReplayedDecision(record.outcome, record.reason, record.node_id)


def replay(record: PlacementRecord) -> ReplayedDecision | None:
    """Decide again; return None if the snapshot has been pruned."""
    if record.kind == DecisionKind.ATTEMPT:
        return ReplayedDecision(load_attempts.ending(record.facts), record.reason, record.node_id)
    if record.base is None or record.position is None:
        return None
    state = snapshot_log.read_snapshot(SnapshotRef(record.base, record.position))
    if state is None:
        return None
    if record.kind == DecisionKind.SCALE:
        return _replay_rule(state, record)
    if record.kind == DecisionKind.UNLOAD:
        words = unload_requests.replay_unload(state, record.model_name, record.operation_id)
        return None if words is None else ReplayedDecision(DecisionOutcome.UNLOADING, words, None)
    return _replay_load(state, record)


def _replay_load(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    """Replay a placement, or the eviction of a replica for a placement."""
    is_eviction = record.kind == DecisionKind.EVICTION
    model = record.facts["for"] if is_eviction else record.model_name
    snapshot = load_snapshots.decode_load(state, str(record.operation_id), model)
    if snapshot is None:
        return None
    question, decision = snapshot.question, snapshot.question.view.decide()
    candidates = snapshot.occupants
    eviction = candidates.choose_eviction(question, decision) if candidates is not None else None
    for victim in eviction.victims if is_eviction and eviction is not None else ():
        if (victim.model_name, victim.replica_index) == (record.model_name, record.replica_index):
            reason = decision_log.describe_eviction(model, victim)
            return ReplayedDecision(DecisionOutcome.EVICTED, reason, victim.node_id)
    explanation = decide_load(question, decision, eviction, over=snapshot.over)
    node_id = explanation.node.id if explanation.node else None
    return ReplayedDecision(explanation.outcome, explanation.sentence, node_id)


def _replay_rule(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    decoded = scale_records.decode_rule(state, record.model_name)
    if decoded is None:
        return None
    fleet, rule, now, tick = decoded
    for decision in plan(fleet, [rule], now, tick=tick):
        sentence = scale_records.sentence(decision)
        if record.outcome == DecisionOutcome.REFUSED and record.facts["decided"] == sentence:
            return recorded_decision(record)  # the refusal was not this decision's
        return ReplayedDecision(scale_records.outcome(decision) or "", sentence, None)
    return None
