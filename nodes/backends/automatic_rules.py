"""The decision of an automatic upgrade about each node that has the backend (O103): a pure table.

Each node is decided once for each build that the galleries offer: failures, and nodes that need a human
decision, are left to operators from then on. Nodes that are away are named and not decided; the first check
after their return decides about them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from uuid import UUID

from nodes.backends.installed import Build
from nodes.backends.upgrade_rules import Offered, behind


class Verdict(Enum):
    """The decision about a node."""

    NOTHING = auto()
    UPGRADE = auto()
    AWAY = auto()
    """It needs the upgrade, but its worker takes no commands now."""
    LAST_REPLICA = auto()
    """An upgrade would leave a model without a replica: an operator decides."""


@dataclass(frozen=True)
class BackendPlace:
    """The backend on one node. `last_of`: the models whose last replica the node serves."""

    id: UUID
    name: str
    status: str
    build: Build
    last_of: tuple[str, ...] = ()
    from_address: bool = False
    """Installed from an address, not from a gallery: a gallery's build would be different software."""
    decided: bool = False
    """True if an earlier automatic upgrade to this offer has decided about the node."""


def identity(offer: Offered) -> str:
    """Return the version of the offer or its first digest; "" if it has neither."""
    return offer.version or "".join(offer.digests[:1])


def verdict(place: BackendPlace, offer: Offered) -> Verdict:
    """Return the first verdict of the table that applies."""
    if place.decided or place.from_address or not behind(place.build, offer):
        return Verdict.NOTHING
    if place.status != "healthy":
        return Verdict.AWAY
    return Verdict.LAST_REPLICA if place.last_of else Verdict.UPGRADE


@dataclass(frozen=True)
class UpgradePlan:
    """The nodes by their verdict."""

    upgrade: tuple[BackendPlace, ...] = ()
    last_replica: tuple[BackendPlace, ...] = ()
    away: tuple[BackendPlace, ...] = ()

    @property
    def decided(self) -> tuple[BackendPlace, ...]:
        """The nodes that need no other decision for the same offer."""
        return (*self.upgrade, *self.last_replica)


def plan(places: Iterable[BackendPlace], offer: Offered) -> UpgradePlan:
    """Group the nodes by their verdict."""
    places_by_verdict: dict[Verdict, list[BackendPlace]] = {key: [] for key in Verdict}
    for place in places:
        places_by_verdict[verdict(place, offer)].append(place)
    upgrade, last_replica, away = Verdict.UPGRADE, Verdict.LAST_REPLICA, Verdict.AWAY
    return UpgradePlan(*(tuple(places_by_verdict[key]) for key in (upgrade, last_replica, away)))
