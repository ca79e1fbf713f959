"""Input and output of the replica pass: the fleet, the rules, one rule's context, and actions. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from uuid import UUID


@dataclass(frozen=True)
class DesiredState:
    """The part of a rule that the replica pass uses."""

    model: str
    selector: Mapping[str, str] | None
    """Labels that a node must have. None if the stored one cannot be read; it matches nothing (R1.69)."""
    minimum: int = 0
    maximum: int = 0
    """Maximum number of replicas; 0 = no limit."""
    spread: bool = False
    """True if the rule wants one replica on every matching node."""
    ticks: int = 0
    """Number of consecutive unsuccessful ticks."""
    until: datetime | None = None
    """End of the cooldown; None if there is none."""
    failure_seq: int | None = None
    """`Failure.seq` of the last failed load when a pass checked the rule; 0 if there was none.

    None until a pass has checked the rule.
    """
    seen: int = 0
    """Number of replicas that served when the last pass checked the rule."""
    changed_at: datetime | None = None
    """Time of the last change of the rule or its flags. The result of a pass belongs to this version."""

    @property
    def counts(self) -> bool:
        """Return True if the rule sets a number of replicas (R1.86)."""
        return self.minimum > 0 or self.maximum > 0 or self.spread


@dataclass(frozen=True)
class FleetNode:
    """A healthy backend node."""

    id: UUID
    name: str
    labels: Mapping[str, str]
    slots: int
    """Maximum number of replicas of one model on the node."""


@dataclass(frozen=True)
class FleetReplica:
    """The row of a replica, in any state."""

    id: UUID
    node_id: UUID
    model: str
    index: int
    state: str
    in_flight: int
    idle_since: datetime
    """End of the replica's last request, or the time of its load if it had no request."""
    revision: str = ""
    """Revision of the definition with which it was loaded; empty = unknown."""


@dataclass(frozen=True)
class Failure:
    """A failed load that was not dismissed or repeated."""

    at: datetime
    error: str
    seq: int
    """Number of the change that ended the load. A later failure has a greater one, whatever the clocks of the
    controllers."""


@dataclass(frozen=True)
class Fleet:
    """The cluster state that the rules are planned against."""

    hosts: Sequence[FleetNode] = ()
    """All healthy backend nodes."""
    replicas: Sequence[FleetReplica] = ()
    loads: Mapping[str, int] = field(default_factory=dict)
    """Number of running loads by model, with or without a slot."""
    pinned: Mapping[str, frozenset[UUID]] = field(default_factory=dict)
    """By model: the nodes that running loads are restricted to."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    defined: frozenset[str] | None = None
    """Models that have a definition; None if the definitions are unknown now."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Current revision of each model's definition."""
    replacing: Mapping[UUID, bool] = field(default_factory=dict)
    """By replica that a running load will replace: True if the load needs the memory that the replica
    occupies."""
    pressed: Mapping[str, int] = field(default_factory=dict)
    """By model: requests within the last minute that were not sent to the replica that caches their prompt.
    Only models with enough of them are in it (R4.13)."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """By model, the number of loads that wait, for example for memory."""


@dataclass(frozen=True)
class LoadReplica:
    """Load one more replica on one of `allowed_nodes`; None = any node."""

    model: str
    allowed_nodes: frozenset[UUID] | None
    reason: str
    pinned: bool = False
    """True if `allowed_nodes` is final; otherwise placement also applies the rule's current selector."""
    replaces: UUID | None = None
    """The replica that terminates as soon as the new replica serves."""


@dataclass(frozen=True)
class RetireReplica:
    """Retire this replica if it is still idle."""

    model: str
    replica_id: UUID
    reason: str


@dataclass(frozen=True)
class EvictReplica:
    """Evict this replica of a former definition, because its successor does not fit beside it."""

    model: str
    replica_id: UUID
    reason: str


@dataclass(frozen=True)
class Unsatisfiable:
    """An action of a scheduling pass: record that no node can take a replica that a rule wants (R4.23).

    `ticks` is the number of successive passes without success. After too many, the rule is not tried again
    before `until`, the end of its cooldown; None = it is tried at the next pass.
    """

    model: str
    ticks: int
    until: datetime | None
    reason: str


@dataclass(frozen=True)
class ClearUnsatisfiable:
    """Clear the unsuccessful ticks and the cooldown of a rule that can be satisfied again."""

    model: str


@dataclass(frozen=True)
class EndPressure:
    """Stop counting the pressure reported so far, because one more replica was loaded for it."""

    model: str


Action = LoadReplica | RetireReplica | EvictReplica | Unsatisfiable | ClearUnsatisfiable | EndPressure


@dataclass(frozen=True)
class RuleDecision:
    """The decision for one rule, and its numbers of replicas: wanted, serving, and being loaded."""

    model: str
    wanted: int
    current: int
    loading: int
    reason: str
    """Empty if the reason of the previous pass still holds."""
    actions: tuple[Action, ...] = ()
    failure_seq: int = 0
    """`Failure.seq` of the model's last failed load; 0 = none."""


LOADING_STATES = ("loading", "staging")


class EligibleNodes(tuple[FleetNode, ...]):
    """The nodes that a selector matches, sorted by name.

    Rules with equal selectors share the object, so that not each rule scans all nodes.
    """

    @cached_property
    def by_id(self) -> dict[UUID, FleetNode]:
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
    """One rule with the part of the fleet that it concerns."""

    rule: DesiredState
    eligible: EligibleNodes
    hosts: Mapping[UUID, FleetNode]
    """Every healthy node."""
    rows: Sequence[FleetReplica]
    """All replicas of the model that occupy a slot: not the engines of failed loads."""
    serving: Sequence[FleetReplica]
    """The replicas of the model that are loaded on healthy nodes."""
    loads: int
    """Number of running loads, with or without a slot."""
    loads_with_slot: int
    """Number of running loads that have reserved a slot."""
    waiting: int
    """Number of loads that wait, for example for memory."""
    pinned: frozenset[UUID]
    """The nodes that running loads of the model are restricted to."""
    failure: str
    """Error of the model's last load if it failed after the last pass; otherwise empty."""
    last_failure: Failure | None
    """The model's last failed load."""
    defined: bool
    revision: str
    """Current revision of the model's definition; empty if unknown."""
    replacing: Mapping[UUID, bool]
    """The model's replicas that a load will replace; see `Fleet`."""
    pressure: int
    """Requests within the last minute that could not use their cached prompt; 0 if there are too few to
    count."""

    @cached_property
    def rows_by_node(self) -> dict[UUID, list[FleetReplica]]:
        """The replicas of the model by node. Each occupies a slot (R1.62, R1.65)."""
        rows_by_node: dict[UUID, list[FleetReplica]] = defaultdict(list)
        for row in self.rows:
            rows_by_node[row.node_id].append(row)
        return dict(rows_by_node)

    @cached_property
    def eligible_serving(self) -> list[FleetReplica]:
        """The serving replicas on nodes that the rule's selector matches."""
        return [row for row in self.serving if row.node_id in self.eligible.ids]

    @property
    def free_slots(self) -> int:
        """Number of free slots on the eligible nodes (R1.65)."""
        hosts = self.eligible.by_id
        used = sum(min(len(rows), hosts[id].slots) for id, rows in self.rows_by_node.items() if id in hosts)
        return self.eligible.slots - used - (self.loads - self.loads_with_slot)

    def free_slots_of(self, host: FleetNode) -> int:
        """Return the number of free slots of the node."""
        return max(host.slots - len(self.rows_by_node.get(host.id, ())), 0)

    @property
    def is_freeing_slot(self) -> bool:
        """True if a replica on an eligible node is about to give its slot back."""
        return any(row.state == "unloading" and row.node_id in self.eligible.ids for row in self.rows)

    @property
    def required(self) -> int:
        """Number of replicas below which the rule is not satisfied."""
        return len(self.eligible) if self.rule.spread else self.rule.minimum

    @property
    def allowed_nodes(self) -> frozenset[UUID] | None:
        """Nodes on which a load may be placed; None = any node (R4.15)."""
        return None if self.rule.selector == {} else self.eligible.ids

    def decision(self, reason: str, *actions: Action) -> RuleDecision:
        """Return the rule's decision with this reason, these actions, and the rule's numbers of replicas."""
        added = sum(isinstance(action, LoadReplica) and action.replaces is None for action in actions)
        removed = sum(isinstance(action, RetireReplica) for action in actions)
        removed += sum(row.id in self.replacing for row in self.serving)
        aim = max(self.required, len(self.serving) + self.loads + added - removed)
        failure_seq = self.last_failure.seq if self.last_failure else 0
        return RuleDecision(self.rule.model, aim, len(self.serving), self.loads, reason, actions, failure_seq)
