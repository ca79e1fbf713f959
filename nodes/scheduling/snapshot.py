"""The snapshot that the replica pass reads, and the actions that it may decide: the types of `plan`.

No logic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True)
class Demand:
    """A rule as the pass reads it."""

    model: str
    selector: Mapping[str, str] | None
    """None if the stored selector cannot be read; it matches nothing (R1.69)."""
    minimum: int = 0
    maximum: int = 0
    """0 = no limit."""
    spread: bool = False
    ticks: int = 0
    until: datetime | None = None
    looked_at: datetime | None = None
    """Time of the last pass that checked the rule."""
    seen: int = 0
    """Number of replicas that were serving in that pass."""
    changed_at: datetime | None = None
    """Time of the last change of the rule or its flags; the result of a pass applies to this version."""

    @property
    def counts(self) -> bool:
        """Return True if the rule sets a number of replicas (R1.86)."""
        return self.minimum > 0 or self.maximum > 0 or self.spread


@dataclass(frozen=True)
class Host:
    """A healthy backend node."""

    id: UUID
    name: str
    labels: Mapping[str, str]
    slots: int
    """Most replicas of one model on the node."""


@dataclass(frozen=True)
class Placed:
    """The row of a replica, in any state."""

    id: UUID
    node_id: UUID
    model: str
    index: int
    state: str
    in_flight: int
    idle_since: datetime
    """The end of the replica's last request, or the time of its load if it had none."""
    revision: str = ""
    """The revision of the definition that it was loaded with; empty = unknown."""


@dataclass(frozen=True)
class Failure:
    """A failed load that nobody has dismissed or repeated."""

    at: datetime
    error: str


@dataclass(frozen=True)
class Fleet:
    """The cluster state that the rules are planned against."""

    hosts: Sequence[Host] = ()
    replicas: Sequence[Placed] = ()
    loads: Mapping[str, int] = field(default_factory=dict)
    """Number of loads under way by model, with or without a slot."""
    pinned: Mapping[str, frozenset[UUID]] = field(default_factory=dict)
    """Nodes by model for which alone a load is under way."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    defined: frozenset[str] | None = None
    """Models that have a definition; None if that is unknown now."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Current revision of each model's definition."""
    replacing: Mapping[UUID, bool] = field(default_factory=dict)
    """Replicas that a load under way will replace; True if the load needs the space that they occupy."""
    pressed: Mapping[str, int] = field(default_factory=dict)
    """Requests within the last minute that were not sent to the replica that caches their prompt, by model;
    only models under enough pressure (R4.13).
    """


@dataclass(frozen=True)
class LoadAnother:
    """Load one more replica on one of the nodes `only`; None: on any."""

    model: str
    only: frozenset[UUID] | None
    reason: str
    pinned: bool = False
    """True if `only` is final; otherwise placement reads the rule's selector again."""
    replaces: UUID | None = None
    """The replica that terminates as soon as this one serves."""


@dataclass(frozen=True)
class Retire:
    """Retire this replica if it is still idle."""

    model: str
    replica_id: UUID
    reason: str


@dataclass(frozen=True)
class GiveWay:
    """Evict this replica of a former definition before its successor loads, which does not fit beside it."""

    model: str
    replica_id: UUID
    reason: str


@dataclass(frozen=True)
class Unsatisfiable:
    """Report that the rule cannot be satisfied: for how many ticks, and the end of its cooldown (R4.23)."""

    model: str
    ticks: int
    until: datetime | None
    reason: str


@dataclass(frozen=True)
class ClearFlags:
    """Clear the flags of a rule that can be satisfied again."""

    model: str


@dataclass(frozen=True)
class EndPressure:
    """End the pressure reported so far, because one more replica was loaded for it."""

    model: str


Action = LoadAnother | Retire | GiveWay | Unsatisfiable | ClearFlags | EndPressure


@dataclass(frozen=True)
class Ruling:
    """The decision for one rule, and its figures: replicas wanted, serving, and being loaded."""

    model: str
    wanted: int
    current: int
    loading: int
    reason: str
    """Empty if the reason of the previous pass still holds."""
    actions: tuple[Action, ...] = ()
