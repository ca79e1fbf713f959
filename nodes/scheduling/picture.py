"""What the replica pass sees, and what it may decide: the words of `plan`. Nothing here does anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True)
class Demand:
    """A rule as the pass sees it."""

    model: str
    selector: Mapping[str, str] | None
    """None: it cannot be read, and matches nothing (R1.69)."""
    minimum: int = 0
    maximum: int = 0
    """0 = no limit."""
    spread: bool = False
    ticks: int = 0
    until: datetime | None = None
    looked_at: datetime | None = None
    """When the last pass looked at it."""
    seen: int = 0
    """How many replicas that pass saw serving."""
    changed_at: datetime | None = None
    """When the rule or its flags were changed; what a pass finds is about this state of them."""

    @property
    def counts(self) -> bool:
        """R1.86: whether it says how many."""
        return self.minimum > 0 or self.maximum > 0 or self.spread


@dataclass(frozen=True)
class Host:
    """A healthy backend node."""

    id: UUID
    name: str
    labels: Mapping[str, str]
    slots: int
    """Replicas of one model that it takes."""


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
    """The end of its last request; without one, when it was loaded."""
    revision: str = ""
    """Of the definition that it was loaded by; empty = not known."""


@dataclass(frozen=True)
class Failure:
    """A load that failed, and that nobody has dismissed or repeated."""

    at: datetime
    error: str


@dataclass(frozen=True)
class Fleet:
    """What the rules are about."""

    hosts: Sequence[Host] = ()
    replicas: Sequence[Placed] = ()
    loads: Mapping[str, int] = field(default_factory=dict)
    """Loads under way, by model, with a place or without."""
    pinned: Mapping[str, frozenset[UUID]] = field(default_factory=dict)
    """The nodes, by model, that have a load under way for them alone."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    defined: frozenset[str] | None = None
    """Models that have a definition; None: that cannot be told now."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """What the definitions are now, by model."""
    replacing: Mapping[UUID, bool] = field(default_factory=dict)
    """The replicas that a load under way will replace, and whether it lacks the room that they take."""
    pressed: Mapping[str, int] = field(default_factory=dict)
    """Of models under enough pressure (R4.13): how many requests were kept from the replica that remembers
    their prompt within the last minute."""


@dataclass(frozen=True)
class LoadAnother:
    """One more replica, on one of these nodes; None: on any."""

    model: str
    only: frozenset[UUID] | None
    reason: str
    pinned: bool = False
    """Whether it is for these nodes whatever comes; else its placement asks the rule again."""
    replaces: UUID | None = None
    """The replica that goes as soon as this one serves."""


@dataclass(frozen=True)
class Retire:
    """This replica is to go, if it is still idle."""

    model: str
    replica_id: UUID
    reason: str


@dataclass(frozen=True)
class GiveWay:
    """This replica of a former definition is to go before its successor, which finds no room beside it."""

    model: str
    replica_id: UUID
    reason: str


@dataclass(frozen=True)
class Unsatisfiable:
    """R4.23: what the rule wants cannot be had; how often that was so, and until when nothing is tried."""

    model: str
    ticks: int
    until: datetime | None
    reason: str


@dataclass(frozen=True)
class ClearFlags:
    """The rule can be satisfied again."""

    model: str


@dataclass(frozen=True)
class EndPressure:
    """One more replica was loaded for it: what was reported before that is over."""

    model: str


Action = LoadAnother | Retire | GiveWay | Unsatisfiable | ClearFlags | EndPressure


@dataclass(frozen=True)
class Ruling:
    """What becomes of one rule, and what it looks like: replicas wanted, there, and on their way."""

    model: str
    wanted: int
    current: int
    loading: int
    reason: str
    """Empty: that of the pass before still holds."""
    actions: tuple[Action, ...] = ()
