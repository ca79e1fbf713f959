"""Decisions of the replica pass: their records, and their input as sections of the snapshot log.

Records are written before any action, for all rules at once. A refused action gets a second record
afterwards. The nodes are one section for all rules; each model has a section for its replicas and one for its
rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec

from nodes.decisions import decision_log
from nodes.decisions.decision_log import DecisionRecord, Section, SnapshotRef, State
from nodes.models import DecisionKind
from nodes.placement.explain import MAX_SENTENCE_LENGTH, DecisionOutcome, truncate
from nodes.scheduling.snapshot import (
    ClearUnsatisfiable,
    DesiredState,
    EndPressure,
    Fleet,
    FleetReplica,
    RuleDecision,
    Unsatisfiable,
)

_REPLICA_FIELDS = tuple(field.name for field in fields(FleetReplica) if field.name != "model")
_replica_values = attrgetter(*_REPLICA_FIELDS)
_RULE_FIELDS = tuple(field.name for field in fields(DesiredState) if field.name not in ("selector", "model"))


def record_decisions(
    decisions: Iterable[RuleDecision],
    fleet: Fleet,
    rules: Mapping[str, DesiredState],
    now: datetime,
    *,
    tick: bool,
) -> SnapshotRef | None:
    """Record those decisions that change something. A constant number of statements."""
    new = [decision for decision in decisions if outcome(decision) is not None]
    if not new:
        return None
    rules_of_new = {decision.model: rules[decision.model] for decision in new}
    snapshot = decision_log.store_snapshot(encode_rules(fleet, rules_of_new, now, tick=tick), now=now)
    decision_log.record_all((_new_record(one, snapshot, outcome(one)) for one in new), now=now)
    return snapshot


def record_refusals(
    decisions: Iterable[RuleDecision],
    results: Sequence[RuleDecision],
    snapshot: SnapshotRef | None,
    now: datetime,
) -> None:
    """Record each decision of which an action was refused, with the reason."""
    refused = [pair for pair in zip(decisions, results, strict=True) if pair[0] is not pair[1]]
    if refused:
        records = (
            _new_record(result, snapshot, DecisionOutcome.REFUSED, decided=sentence(decision))
            for decision, result in refused
        )
        decision_log.record_all(records, now=now)


def outcome(decision: RuleDecision) -> DecisionOutcome | None:
    """Return the outcome of the decision as records name it; None if it changes nothing."""
    actions = [
        action for action in decision.actions if not isinstance(action, ClearUnsatisfiable | EndPressure)
    ]
    if not actions:
        return None
    is_waiting = all(isinstance(action, Unsatisfiable) for action in actions)
    return DecisionOutcome.WAITING if is_waiting else DecisionOutcome.SCALED


def sentence(decision: RuleDecision) -> str:
    """Return the reason of the decision, cut to the maximum length of a record."""
    return truncate(decision.reason, MAX_SENTENCE_LENGTH)


def _new_record(
    decision: RuleDecision, snapshot: SnapshotRef | None, outcome: DecisionOutcome | None, **facts: str
) -> DecisionRecord:
    assert outcome is not None
    explanation = decision_log.explanation_without_fleet(outcome, sentence(decision), **facts)
    return DecisionRecord(decision.model, None, explanation, snapshot, DecisionKind.SCALE)


def encode_rules(
    fleet: Fleet, rules: Mapping[str, DesiredState], now: datetime, *, tick: bool
) -> dict[str, Section]:
    """Encode the input of the pass for these rules."""
    labels = {node.id: tuple(sorted(node.labels.items())) for node in fleet.hosts if node.labels}
    result = {
        "hosts": Section({node.id: (node.name, node.slots) for node in fleet.hosts}),
        "labels of hosts": Section(labels),
    }
    replicas: dict[str, dict[UUID, Any]] = {name: {} for name in rules}
    for replica in fleet.replicas:
        if replica.model in replicas:
            replicas[replica.model][replica.id] = _replica_values(replica)
    for name, rule in rules.items():
        result[f"replicas/{name}"] = Section(replicas[name])
        result[f"rule/{name}"] = Section({"now": now, "tick": tick, **_rule_facts(fleet, name, rule)})
    return result


def _rule_facts(fleet: Fleet, model: str, rule: DesiredState) -> dict[str, Any]:
    failure = fleet.failures.get(model)
    return {
        "demand": tuple((name, getattr(rule, name)) for name in _RULE_FIELDS),
        "selector": None if rule.selector is None else tuple(sorted(rule.selector.items())),
        "loads": fleet.loads.get(model, 0),
        "waiting": fleet.waiting.get(model, 0),
        "pinned": tuple(sorted(map(str, fleet.pinned.get(model, ())))),
        "failures": (failure.at, failure.error, failure.seq) if failure else None,
        "defined": fleet.defined is None or model in fleet.defined,
        "revisions": fleet.revisions.get(model),
        "pressed": fleet.pressed.get(model, 0),
        # The replacements of all models: there are few, and a rule reads only those of its own replicas.
        "replacing": tuple(sorted((str(id), needs_space) for id, needs_space in fleet.replacing.items())),
    }


def decode_rule(state: State, model: str) -> tuple[Fleet, DesiredState, datetime, bool] | None:
    """Decode the input of the pass for one model's rule; None if the state has no such rule."""
    facts = state.get(f"rule/{model}")
    if not facts:
        return None
    labels = state.get("labels of hosts", {})
    failure, revision, demand = facts.get("failures"), facts.get("revisions"), dict(facts["demand"])
    if failure and "looked_at" in demand:  # an entry of an earlier version, which compared times
        checked_at = demand["looked_at"]
        is_new = checked_at and datetime.fromisoformat(failure[0]) > datetime.fromisoformat(checked_at)
        failure, demand["failure_seq"] = (*failure, int(bool(is_new))), 0
    fleet = {
        "hosts": [
            {"id": id, "name": name, "labels": dict(labels.get(id, ())), "slots": slots}
            for id, (name, slots) in state.get("hosts", {}).items()
        ],
        "replicas": [
            {"model": model, **dict(zip(_REPLICA_FIELDS, row, strict=False))}
            for row in state.get(f"replicas/{model}", {}).values()
        ],
        "failures": {model: dict(zip(("at", "error", "seq"), failure, strict=True))} if failure else {},
        "defined": [model] if facts.get("defined", True) else [],
        "revisions": {model: revision} if revision is not None else {},
        "replacing": dict(facts.get("replacing", ())),
        **{name: {model: facts[name]} for name in ("loads", "waiting", "pinned", "pressed") if name in facts},
    }
    selector = None if facts["selector"] is None else dict(facts["selector"])
    rule = {**demand, "model": model, "selector": selector}
    now = datetime.fromisoformat(facts["now"])
    return msgspec.convert(fleet, Fleet), msgspec.convert(rule, DesiredState), now, facts["tick"]
