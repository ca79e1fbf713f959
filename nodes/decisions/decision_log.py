"""The record of decisions: the only writer of `PlacementRecord`.

A placement is recorded in the transaction that reserves its slot, together with its evictions: all records
exist or none. A wait is recorded before its load is postponed, so after a kill in between the next attempt
finds its own sentence and adds no record. A wait that repeats for the same reasons keeps its record; only the
figures in it are updated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from nodes.decisions.snapshot_log import SnapshotRef
from nodes.models import DecisionKind, PlacementRecord
from nodes.placement.evict import Resident
from nodes.placement.explain import NO_FLEET, DecisionOutcome, Explanation

_FIGURES = ("reason", "facts", "base", "position", "last_at")


class NodeSlot(NamedTuple):
    """The node and slot of a decision."""

    node_id: UUID
    node_name: str
    replica_index: int | None


@dataclass(frozen=True)
class DecisionRecord:
    """A decision with its explanation and a reference to the snapshot that it used."""

    model_name: str
    operation_id: UUID | None
    explanation: Explanation
    snapshot: SnapshotRef | None
    kind: DecisionKind = DecisionKind.PLACEMENT
    slot: NodeSlot | None = None
    """The slot of the decision; None = the chosen node, if any."""

    def at_index(self, index: int) -> "DecisionRecord":
        """Return a copy with the reserved slot: another load may have taken the one in the snapshot."""
        return replace(self, explanation=replace(self.explanation, replica_index=index))


def explanation_without_fleet(outcome: DecisionOutcome, sentence: str, **facts: Any) -> Explanation:
    """Return the explanation of a decision that compared no nodes."""
    return Explanation(outcome, sentence, None, 0, {**NO_FLEET, **facts})


def record(decided: DecisionRecord, *, now: datetime, victims: Sequence[Resident] = ()) -> None:
    """Record the decision, unless it repeats its operation's last record, and the eviction of `victims`."""
    if decided.explanation.node is None and _repeats_last_record(decided, now):
        return
    _row(decided, now).save(force_insert=True)
    if victims:
        PlacementRecord.objects.bulk_create(_eviction(decided, victim, now) for victim in victims)


def record_all(decided: Iterable[DecisionRecord], *, now: datetime) -> None:
    """Record decisions without an operation, except those that repeat the last record of their model.

    Two statements for any number of decisions.
    """
    rows = [_row(decision, now) for decision in decided]
    model_names = [row.model_name for row in rows]
    records = PlacementRecord.objects.filter(model_name__in=model_names, operation_id=None)
    last_records = records.order_by("model_name", "-id").distinct("model_name")
    last_outcomes = {(row.model_name, row.kind): (row.outcome, row.reason) for row in last_records}
    new_rows = [row for row in rows if _is_new(row, last_outcomes.get((row.model_name, row.kind)))]
    PlacementRecord.objects.bulk_create(new_rows)


def _is_new(row: PlacementRecord, before: tuple[str, str] | None) -> bool:
    """Return True unless the row repeats a wait or a refusal; a repeated scaling is a new decision."""
    return row.outcome == DecisionOutcome.SCALED or before != (row.outcome, row.reason)


def _row(decided: DecisionRecord, now: datetime) -> PlacementRecord:
    explanation, snapshot, slot = decided.explanation, decided.snapshot, decided.slot
    if slot is None and (node := explanation.node) is not None:
        slot = NodeSlot(node.id, node.name, explanation.replica_index)
    return PlacementRecord(
        kind=decided.kind,
        model_name=decided.model_name,
        operation_id=decided.operation_id,
        at=now,
        last_at=now,
        outcome=explanation.outcome,
        node_id=slot.node_id if slot else None,
        node_name=slot.node_name if slot else "",
        replica_index=slot.replica_index if slot else None,
        reason=explanation.sentence,
        facts=explanation.facts,
        base=snapshot.base if snapshot else None,
        position=snapshot.position if snapshot else None,
    )


def _eviction(decided: DecisionRecord, victim: Resident, now: datetime) -> PlacementRecord:
    row = _row(decided, now)
    row.kind, row.outcome = DecisionKind.EVICTION, DecisionOutcome.EVICTED
    row.reason = describe_eviction(decided.model_name, victim)
    row.model_name, row.replica_index = victim.model_name, victim.replica_index
    row.facts = {**NO_FLEET, "for": decided.model_name}
    return row


def describe_eviction(model_name: str, victim: Resident) -> str:
    """Return the reason for the eviction of a replica for a load of `model_name`."""
    if victim.in_flight:
        return f"makes room for {model_name} when its requests have ended: its least time is over"
    return (
        f"makes room for {model_name}: idle since {victim.last_used:%Y-%m-%d %H:%M:%S} UTC,"
        " the least recently used of what may go there"
    )


def _repeats_last_record(decided: DecisionRecord, now: datetime) -> bool:
    """Return True if the load's last record has the same outcome and reasons; update its figures."""
    explanation = decided.explanation
    of_load = PlacementRecord.objects.filter(operation_id=decided.operation_id).order_by("-id")
    last = of_load.values("id", "kind", "outcome", "reason", "facts__refused").first()
    if last is None or (last["kind"], last["outcome"]) != (decided.kind, explanation.outcome):
        return False
    kinds = _kinds(explanation.facts["refused"])
    if last["reason"] == explanation.sentence:
        return True
    if not kinds or kinds != _kinds(last["facts__refused"]):
        return False
    row = _row(decided, now)
    PlacementRecord.objects.filter(pk=last["id"]).update(**{name: getattr(row, name) for name in _FIGURES})
    return True


def _kinds(refused: list[dict[str, Any]]) -> set[str]:
    return {refusal["code"] for refusal in refused}
