"""Decisions of the replica pass: their records, and their input as sections of the snapshot log.

Records are written before any action, for all rules at once. A refused action gets a record of its own
afterwards. The hosts are one section for all rules; each model has a section for its replicas and one for its
rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

from nodes.decisions import decision_log, snapshot_log
from nodes.decisions.decision_log import DecisionRecord
from nodes.decisions.snapshot_log import Section, SnapshotRef, State
from nodes.models import DecisionKind
from nodes.placement.explain import LONGEST_SENTENCE, DecisionOutcome, truncate
from nodes.scheduling.snapshot import (
    ClearFlags,
    DesiredState,
    EndPressure,
    Failure,
    Fleet,
    FleetNode,
    FleetReplica,
    RuleDecision,
    Unsatisfiable,
)


def record_decisions(
    rulings: Iterable[RuleDecision],
    fleet: Fleet,
    demands: Mapping[str, DesiredState],
    now: datetime,
    *,
    tick: bool,
) -> SnapshotRef | None:
    """Record the rulings that decide anything; a constant number of statements."""
    decided = [(ruling, ending) for ruling in rulings if (ending := outcome(ruling)) is not None]
    if not decided:
        return None
    demands_by_model = {ruling.model: demands[ruling.model] for ruling, _ in decided}
    snapshot = snapshot_log.store_snapshot(encode_rules(fleet, demands_by_model, now, tick=tick), now=now)
    records = (_new_record(ruling.model, snapshot, ending, sentence(ruling)) for ruling, ending in decided)
    decision_log.record_all(records, now=now)
    return snapshot


def record_refusals(
    rulings_before: Iterable[RuleDecision],
    rulings_after: Sequence[RuleDecision],
    snapshot: SnapshotRef | None,
    now: datetime,
) -> None:
    """Record the refused rulings, with the reason of the refusal."""
    refused = [
        (before, after)
        for before, after in zip(rulings_before, rulings_after, strict=True)
        if after is not before
    ]
    if refused:
        records = (
            _new_record(
                before.model, snapshot, DecisionOutcome.REFUSED, sentence(after), decided=sentence(before)
            )
            for before, after in refused
        )
        decision_log.record_all(records, now=now)


def outcome(ruling: RuleDecision) -> DecisionOutcome | None:
    """Return the ending that the ruling decides; None if everything stays as it is."""
    decisions = [action for action in ruling.actions if not isinstance(action, ClearFlags | EndPressure)]
    if not decisions:
        return None
    return (
        DecisionOutcome.WAITING
        if all(isinstance(action, Unsatisfiable) for action in decisions)
        else DecisionOutcome.SCALED
    )


def sentence(ruling: RuleDecision) -> str:
    """Return the reason of the ruling, cut to the length of the record."""
    return truncate(ruling.reason, LONGEST_SENTENCE)


def _new_record(
    model: str, snapshot: SnapshotRef | None, ending: DecisionOutcome, reason: str, **facts: str
) -> DecisionRecord:
    return DecisionRecord(
        model,
        None,
        decision_log.explanation_without_fleet(ending, reason, **facts),
        snapshot,
        DecisionKind.SCALE,
    )


_PLACED = tuple(column.name for column in fields(FleetReplica) if column.name != "model")
_placed = attrgetter(*_PLACED)
_DEMAND = tuple(column.name for column in fields(DesiredState) if column.name not in ("selector", "model"))

_Encode = Callable[[Fleet, str], Any]
_Decode = Callable[[str, Any], Any]


def _failure(model: str, encoded: Any) -> dict[str, Failure]:
    return {} if encoded is None else {model: Failure(datetime.fromisoformat(encoded[0]), encoded[1])}


_RULE_FIELDS: Mapping[str, tuple[_Encode, _Decode]] = {
    "loads": (lambda fleet, model: fleet.loads.get(model, 0), lambda model, count: {model: count}),
    "pinned": (
        lambda fleet, model: tuple(sorted(map(str, fleet.pinned.get(model, ())))),
        lambda model, ids: {model: frozenset(map(UUID, ids))},
    ),
    "failures": (
        lambda fleet, model: (failure.at, failure.error) if (failure := fleet.failures.get(model)) else None,
        _failure,
    ),
    "defined": (
        lambda fleet, model: fleet.defined is None or model in fleet.defined,
        lambda model, is_defined: frozenset({model} if is_defined else ()),
    ),
    "revisions": (
        lambda fleet, model: fleet.revisions.get(model),
        lambda model, revision: {} if revision is None else {model: revision},
    ),
    "pressed": (lambda fleet, model: fleet.pressed.get(model, 0), lambda model, count: {model: count}),
    # The replacements of all models: there are few, and a rule reads only those of its own replicas.
    "replacing": (
        lambda fleet, _: tuple(sorted((str(id), lacks) for id, lacks in fleet.replacing.items())),
        lambda _, pairs: {UUID(id): lacks for id, lacks in pairs},
    ),
}
"""Fleet fields that concern one rule besides hosts and replicas: their encoders and decoders."""


def encode_rules(
    fleet: Fleet, demands: Mapping[str, DesiredState], now: datetime, *, tick: bool
) -> dict[str, Section]:
    """Encode the input of these rules."""
    labels = {host.id: tuple(sorted(host.labels.items())) for host in fleet.hosts if host.labels}
    result = {
        "hosts": Section({host.id: (host.name, host.slots) for host in fleet.hosts}),
        "labels of hosts": Section(labels),
    }
    replicas: dict[str, dict[UUID, Any]] = {name: {} for name in demands}
    for row in fleet.replicas:
        if row.model in replicas:
            replicas[row.model][row.id] = _placed(row)
    for name, demand in demands.items():
        result[f"replicas/{name}"] = Section(replicas[name])
        result[f"rule/{name}"] = Section(
            {
                "now": now,
                "tick": tick,
                "demand": tuple((column, getattr(demand, column)) for column in _DEMAND),
                "selector": None if demand.selector is None else tuple(sorted(demand.selector.items())),
                **{field: encode(fleet, name) for field, (encode, _) in _RULE_FIELDS.items()},
            }
        )
    return result


def decode_rule(state: State, model: str) -> tuple[Fleet, DesiredState, datetime, bool] | None:
    """Decode the input of `plan` that concerns the rule of one model; None if the state has none."""
    encoded = state.get(f"rule/{model}")
    if not encoded:
        return None
    labels = state.get("labels of hosts", {})
    fleet = Fleet(
        hosts=[
            FleetNode(UUID(id), name, dict(labels.get(id, ())), slots)
            for id, (name, slots) in state.get("hosts", {}).items()
        ],
        replicas=[_replica(model, row) for row in state.get(f"replicas/{model}", {}).values()],
        # An older version that wrote this entry may not have had all fields.
        **{
            field: decode(model, encoded[field])
            for field, (_, decode) in _RULE_FIELDS.items()
            if field in encoded
        },
    )
    return fleet, _demand(model, encoded), datetime.fromisoformat(encoded["now"]), encoded["tick"]


def _replica(model: str, row: list[Any]) -> FleetReplica:
    columns = dict(zip(_PLACED, row, strict=True))
    columns |= {"id": UUID(columns["id"]), "node_id": UUID(columns["node_id"])}
    return FleetReplica(
        model=model, **{**columns, "idle_since": datetime.fromisoformat(columns["idle_since"])}
    )


def _demand(model: str, encoded: Mapping[str, Any]) -> DesiredState:
    columns = dict(encoded["demand"])
    for name in ("until", "looked_at", "changed_at"):
        if columns[name] is not None:
            columns[name] = datetime.fromisoformat(columns[name])
    selector = None if encoded["selector"] is None else dict(encoded["selector"])
    return DesiredState(model=model, selector=selector, **columns)
