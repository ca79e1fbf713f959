"""Replace each replica of a former definition by one of the current definition; pure.

A load names the replica that it replaces. If both fit, the new one is loaded first, and the old one
leaves the picks in the transaction in which the new one enters them (`nodes/replicas/slots.py`). If they do
not fit, the load reports it, and the old one is evicted first: at once if others serve meanwhile,
otherwise when it has no requests. Only one replica at a time is evicted first, and at most a quarter of the
replicas are being replaced at once. Running requests are never ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from nodes.scheduling.snapshot import GiveWay, Host, LoadAnother, Placed

AT_ONCE = 4
"""One in this many replicas is replaced at a time, and at least one."""


@dataclass(frozen=True)
class Renewal:
    """The replicas of one model and the current revision of its definition."""

    model: str
    revision: str
    """Current revision of the definition; empty = unknown."""
    rows: Sequence[Placed]
    serving: Sequence[Placed]
    """The subset of `rows` that requests can find, where the rule wants them."""
    hosts: Mapping[UUID, Host]
    """The nodes of the replicas."""
    replacing: Mapping[UUID, bool]
    """See `Fleet`."""
    spread: bool = False

    @property
    def outdated(self) -> list[Placed]:
        """The replicas that were loaded with a former definition, the longest idle first."""
        former = (row for row in self.serving if self.revision and row.revision not in ("", self.revision))
        return sorted(former, key=lambda row: (row.in_flight, row.idle_since, row.id))

    def evictions(self) -> list[GiveWay]:
        """Return the replica to evict before its successor, if that one reported that it does not fit."""
        if any(row.state == "unloading" for row in self.rows):
            return []
        has_others = len(self.serving) > 1
        for row in self.outdated:
            if self.replacing.get(row.id) and (has_others or not row.in_flight):
                reason = f"{self._label(row)} goes before its successor, which finds no room beside it"
                return [GiveWay(self.model, row.id, reason)]
        return []

    def successors(self) -> list[LoadAnother]:
        """Return the loads that replace the next replicas."""
        outdated = self.outdated
        under_way = sum(row.id in self.replacing for row in outdated)
        waiting = [row for row in outdated if row.id not in self.replacing]
        allowance = max(len(self.serving) // AT_ONCE, 1) - under_way
        return [self._successor(row, len(outdated)) for row in waiting[: max(allowance, 0)]]

    def _successor(self, row: Placed, count: int) -> LoadAnother:
        plural = "replica has" if count == 1 else "replicas have"
        reason = f"the definition was edited: {count} {plural} a former one, {self._label(row)} is replaced"
        only = frozenset({row.node_id}) if self.spread else None
        return LoadAnother(self.model, only, reason, pinned=self.spread, replaces=row.id)

    def _label(self, row: Placed) -> str:
        """Name the replica with its node: on nodes with one slot, every index is 0."""
        return f"replica {row.index} on {self.hosts[row.node_id].name}"
