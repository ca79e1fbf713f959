"""Replicas of a former definition: each is replaced by one of the definition as it is now; pure.

A load names the replica that it replaces. Where there is room it is loaded first, and the old one leaves the
picks in the transaction in which the new one enters them (`nodes/replicas/slots.py`). Where there is none,
the load says so, and the old one goes first: at once if others serve meanwhile, else when nothing runs on it.
One at a time goes first, and a quarter of the replicas at most is being replaced at once. No request that
runs is ended in either way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from nodes.scheduling.picture import GiveWay, Host, LoadAnother, Placed

AT_ONCE = 4
"""One of so many replicas is replaced at a time, and at least one."""


@dataclass(frozen=True)
class Renewal:
    """A model's replicas, as far as its definition concerns them."""

    model: str
    revision: str
    """Of the definition as it is now; empty: that is not known."""
    rows: Sequence[Placed]
    serving: Sequence[Placed]
    """Those of `rows` that requests may find, where the rule wants them."""
    hosts: Mapping[UUID, Host]
    """The nodes of these."""
    replacing: Mapping[UUID, bool]
    """See `Fleet`."""
    spread: bool = False

    @property
    def old(self) -> list[Placed]:
        """Those that were loaded by a former definition, the longest idle first."""
        found = (row for row in self.serving if self.revision and row.revision not in ("", self.revision))
        return sorted(found, key=lambda row: (row.in_flight, row.idle_since, row.id))

    def giving_way(self) -> list[GiveWay]:
        """The one that goes first, because its successor finds no room."""
        if any(row.state == "unloading" for row in self.rows):
            return []
        beside = len(self.serving) > 1
        for row in self.old:
            if self.replacing.get(row.id) and (beside or not row.in_flight):
                said = f"{self._called(row)} goes before its successor, which finds no room beside it"
                return [GiveWay(self.model, row.id, said)]
        return []

    def successors(self) -> list[LoadAnother]:
        """The loads that replace the next ones."""
        old = self.old
        under_way = sum(row.id in self.replacing for row in old)
        waiting = [row for row in old if row.id not in self.replacing]
        more = max(len(self.serving) // AT_ONCE, 1) - under_way
        return [self._successor(row, len(old)) for row in waiting[: max(more, 0)]]

    def _successor(self, row: Placed, count: int) -> LoadAnother:
        plural = "replica has" if count == 1 else "replicas have"
        reason = f"the definition was edited: {count} {plural} a former one, {self._called(row)} is replaced"
        only = frozenset({row.node_id}) if self.spread else None
        return LoadAnother(self.model, only, reason, pinned=self.spread, replaces=row.id)

    def _called(self, row: Placed) -> str:
        """With its node: on nodes that take one replica each, every index is 0."""
        return f"replica {row.index} on {self.hosts[row.node_id].name}"
