"""One scheduling rule and the part of the fleet that concerns it: the input of each decision in `plan`.

Pure.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from uuid import UUID

from nodes.scheduling.snapshot import Action, Demand, Host, LoadAnother, Placed, Retire, Ruling

LOADING = ("loading", "staging")


class EligibleNodes(tuple[Host, ...]):
    """The nodes that a selector matches, sorted by name. Rules share it, so that no rule scans every node."""

    @cached_property
    def by_id(self) -> dict[UUID, Host]:
        """The nodes by id."""
        return {host.id: host for host in self}

    @cached_property
    def ids(self) -> frozenset[UUID]:
        """The ids of the nodes."""
        return frozenset(self.by_id)

    @cached_property
    def slots(self) -> int:
        """Total slots of these nodes for one model."""
        return sum(host.slots for host in self)


@dataclass(frozen=True)
class RuleContext:
    """One rule and the part of the fleet that concerns it."""

    demand: Demand
    eligible: EligibleNodes
    hosts: Mapping[UUID, Host]
    """Every healthy node."""
    rows: Sequence[Placed]
    """All replicas of the model."""
    serving: Sequence[Placed]
    """The replicas that are loaded on healthy nodes."""
    loads: int
    loads_with_slot: int
    pinned: frozenset[UUID]
    """Nodes for which alone a load is under way."""
    failure: str
    """Error of the last load, if it failed after the last pass; else empty."""
    failed_at: datetime | None
    """Time of the last failed load."""
    defined: bool
    revision: str
    """Current revision of its definition; empty if unknown."""
    replacing: Mapping[UUID, bool]
    """The model's replicas that a load will replace; see `Fleet`."""
    pressure: int
    """Requests within the last minute that could not use their cached prompt; 0 if too few."""

    @cached_property
    def rows_by_node(self) -> dict[UUID, list[Placed]]:
        """The rows by node. A row in any state occupies a slot (R1.62, R1.65)."""
        rows_by_node: dict[UUID, list[Placed]] = defaultdict(list)
        for row in self.rows:
            rows_by_node[row.node_id].append(row)
        return dict(rows_by_node)

    @cached_property
    def eligible_serving(self) -> list[Placed]:
        """The subset of `serving` on nodes that the rule's selector matches."""
        return [row for row in self.serving if row.node_id in self.eligible.ids]

    @property
    def free_slots(self) -> int:
        """Number of slots that are free for one more load (R1.65)."""
        hosts = self.eligible.by_id
        used = sum(min(len(rows), hosts[id].slots) for id, rows in self.rows_by_node.items() if id in hosts)
        return self.eligible.slots - used - (self.loads - self.loads_with_slot)

    def free_slots_of(self, host: Host) -> int:
        """Return the number of free slots of the node."""
        return max(host.slots - len(self.rows_by_node.get(host.id, ())), 0)

    @property
    def is_freeing_slot(self) -> bool:
        """Return True if a slot is being freed."""
        return any(row.state == "unloading" and row.node_id in self.eligible.ids for row in self.rows)

    @property
    def required(self) -> int:
        """The number of replicas below which the rule is not satisfied."""
        return len(self.eligible) if self.demand.spread else self.demand.minimum

    @property
    def allowed_nodes(self) -> frozenset[UUID] | None:
        """The nodes on which a load may be placed; None: any (R4.15)."""
        return None if self.demand.selector == {} else self.eligible.ids

    def ruling(self, reason: str, *actions: Action) -> Ruling:
        """Return the ruling with these actions and the rule's figures."""
        added = sum(isinstance(action, LoadAnother) and action.replaces is None for action in actions)
        removed = sum(isinstance(action, Retire) for action in actions)
        removed += sum(row.id in self.replacing for row in self.serving)
        aim = max(self.required, len(self.serving) + self.loads + added - removed)
        return Ruling(self.demand.model, aim, len(self.serving), self.loads, reason, actions)
