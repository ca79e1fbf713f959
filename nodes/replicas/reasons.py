"""The record of decisions: the only writer of `PlacementRecord`.

A placement is kept in the transaction that takes its slot, with the evictions that make room for it: all are
there or none. A wait is kept before its load is put back, so after a kill in between the next attempt finds
its own words and adds nothing. What waits for the same reasons again keeps its record; only the figures in it
follow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from nodes.models import DecisionKind, PlacementRecord
from nodes.placement.evict import Resident
from nodes.placement.explain import NO_FLEET, Ending, Explanation
from nodes.replicas.fleet_log import Seen
from nodes.replicas.space import time_of_oldest_fitting

_FIGURES = ("reason", "facts", "base", "position", "last_at")


class Spot(NamedTuple):
    """The place that a decision is about."""

    node_id: UUID
    node_name: str
    replica_index: int | None


@dataclass(frozen=True)
class Decided:
    """A decision, why it was made, and where it stands what it was made from."""

    model_name: str
    operation_id: UUID | None
    told: Explanation
    seen: Seen | None
    kind: DecisionKind = DecisionKind.PLACEMENT
    about: Spot | None = None
    """None: the node that it chose, if any."""

    @property
    def spot(self) -> Spot | None:
        """What the row names."""
        told = self.told
        chosen = Spot(told.node.id, told.node.name, told.replica_index) if told.node else None
        return self.about or chosen

    def at_index(self, index: int) -> "Decided":
        """The same with the slot that it got: another load may have taken the one that was seen."""
        return replace(self, told=replace(self.told, replica_index=index))


def without_fleet(outcome: Ending, sentence: str, **facts: Any) -> Explanation:
    """The explanation of a decision that no nodes were compared for."""
    return Explanation(outcome, sentence, None, 0, {**NO_FLEET, **facts})


def record(decided: Decided, *, now: datetime, victims: Sequence[Resident] = ()) -> None:
    """Keeps it, unless its operation's last record says the same; and that `victims` are evicted for it."""
    if decided.told.node is None and _still(decided, now):
        return
    _row(decided, now).save(force_insert=True)
    if victims:
        PlacementRecord.objects.bulk_create(_eviction(decided, one, now) for one in victims)


def record_all(decided: Iterable[Decided], *, now: datetime) -> None:
    """Keeps decisions about models that are no operation's, unless the last one of a model says the same.

    Two statements for any number of them.
    """
    every = [_row(one, now) for one in decided]
    rows = PlacementRecord.objects.filter(model_name__in=[row.model_name for row in every], operation_id=None)
    last = rows.order_by("model_name", "-id").distinct("model_name")
    said = {(row.model_name, row.kind): (row.outcome, row.reason) for row in last}
    new = [row for row in every if _is_news(row, said.get((row.model_name, row.kind)))]
    PlacementRecord.objects.bulk_create(new)


def _is_news(row: PlacementRecord, before: tuple[str, str] | None) -> bool:
    """Whether it is no repetition of a wait or a refusal; what is done again is another decision."""
    return row.outcome == Ending.SCALED or before != (row.outcome, row.reason)


def _row(decided: Decided, now: datetime) -> PlacementRecord:
    told, seen, spot = decided.told, decided.seen, decided.spot
    return PlacementRecord(
        kind=decided.kind,
        model_name=decided.model_name,
        operation_id=decided.operation_id,
        at=now,
        last_at=now,
        outcome=told.outcome,
        node_id=spot.node_id if spot else None,
        node_name=spot.node_name if spot else "",
        replica_index=spot.replica_index if spot else None,
        reason=told.sentence,
        facts=told.facts,
        base=seen.base if seen else None,
        position=seen.position if seen else None,
    )


def _eviction(decided: Decided, victim: Resident, now: datetime) -> PlacementRecord:
    row = _row(decided, now)
    row.kind, row.outcome = DecisionKind.EVICTION, Ending.EVICTED
    row.reason = eviction_words(decided.model_name, victim)
    row.model_name, row.replica_index = victim.model_name, victim.replica_index
    row.facts = {**NO_FLEET, "for": decided.model_name}
    return row


def eviction_words(model_name: str, victim: Resident) -> str:
    """Why a replica is evicted for a load of `model_name`."""
    return (
        f"makes room for {model_name}: idle since {victim.last_used:%Y-%m-%d %H:%M:%S} UTC,"
        " the least recently used of what may go there"
    )


def _still(decided: Decided, now: datetime) -> bool:
    """Whether the load's last record has the same outcome by the same reasons; its figures follow."""
    told = decided.told
    of_load = PlacementRecord.objects.filter(operation_id=decided.operation_id).order_by("-id")
    last = of_load.values("id", "kind", "outcome", "reason", "facts__refused").first()
    if last is None or (last["kind"], last["outcome"]) != (decided.kind, told.outcome):
        return False
    kinds = _kinds(told.facts["refused"])
    if last["reason"] == told.sentence:
        return True
    if not kinds or kinds != _kinds(last["facts__refused"]):
        return False
    row = _row(decided, now)
    PlacementRecord.objects.filter(pk=last["id"]).update(**{name: getattr(row, name) for name in _FIGURES})
    return True


def _kinds(refused: list[dict[str, Any]]) -> set[str]:
    return {one["code"] for one in refused}


def fitting_since(space: int) -> datetime | None:
    """Return the time of the oldest records that fit into `space` bytes with all newer ones; None if all fit.

    One query, which reads no facts.
    """
    return time_of_oldest_fitting(PlacementRecord.objects.all(), "last_at", ("facts", "reason"), space)


def prune(*, before: datetime, limit: int) -> int:
    """Deletes the oldest `limit` records that were last true before `before`; answers how many."""
    old = PlacementRecord.objects.filter(last_at__lt=before).order_by("last_at", "pk")
    deleted, _ = PlacementRecord.objects.filter(
        pk__in=list(old.values_list("pk", flat=True)[:limit])
    ).delete()
    return deleted
