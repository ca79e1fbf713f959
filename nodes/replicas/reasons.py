"""The record of placement decisions: the only writer of `PlacementRecord`.

A placement is kept in the transaction that takes its slot: both are there or neither. A wait is kept before
its load is put back, so after a kill in between the next attempt finds its own words and adds nothing. A load
that waits for the same reasons again keeps its record; only the figures in it follow.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from nodes.models import PlacementRecord
from nodes.placement.explain import Explanation


@dataclass(frozen=True)
class Decided:
    """A decision of one load, and why."""

    model_name: str
    operation_id: UUID
    told: Explanation

    def at_index(self, index: int) -> "Decided":
        """The same with the slot that it got: another load may have taken the one that was seen."""
        return replace(self, told=replace(self.told, replica_index=index))


def record(decided: Decided, *, now: datetime) -> None:
    """Keeps it, unless the load's last record says the same."""
    told = decided.told
    if told.node is None and _still(decided, now):
        return
    PlacementRecord.objects.create(
        model_name=decided.model_name,
        operation_id=decided.operation_id,
        at=now,
        last_at=now,
        outcome=told.outcome,
        node_id=told.node.id if told.node else None,
        node_name=told.node.name if told.node else "",
        replica_index=told.replica_index if told.node else None,
        reason=told.sentence,
        facts=told.facts,
    )


def _still(decided: Decided, now: datetime) -> bool:
    """Whether the load's last record has the same outcome by the same reasons; its figures follow."""
    told = decided.told
    of_load = PlacementRecord.objects.filter(operation_id=decided.operation_id).order_by("-id")
    last = of_load.values("id", "outcome", "reason", "facts__refused").first()
    if last is None or last["outcome"] != told.outcome:
        return False
    if last["reason"] == told.sentence:
        return True
    kinds = _kinds(told.facts["refused"])
    if not kinds or kinds != _kinds(last["facts__refused"]):
        return False
    rows = PlacementRecord.objects.filter(pk=last["id"])
    rows.update(reason=told.sentence, facts=told.facts, last_at=now)
    return True


def _kinds(refused: list[dict[str, Any]]) -> set[str]:
    return {one["code"] for one in refused}


def prune(*, before: datetime, limit: int) -> int:
    """Deletes the oldest `limit` records that were last true before `before`; answers how many."""
    old = PlacementRecord.objects.filter(last_at__lt=before).order_by("last_at", "pk")
    deleted, _ = PlacementRecord.objects.filter(
        pk__in=list(old.values_list("pk", flat=True)[:limit])
    ).delete()
    return deleted
