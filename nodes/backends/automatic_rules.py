"""What an automatic upgrade does about each node that has the backend (O103): a pure table of decisions.

Each node is asked once for each build that the galleries offer: what failed, or was left to people, is theirs
from then on. Nodes that are away are named and not asked; the next check after their return decides again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from uuid import UUID

from nodes.backends.installed import Build
from nodes.backends.upgrade_rules import Offered, behind


class Verdict(Enum):
    """What becomes of a node."""

    NOTHING = auto()
    UPGRADE = auto()
    AWAY = auto()
    """It would be upgraded, but its worker takes no commands now."""
    LAST_REPLICA = auto()
    """An upgrade would leave a model without a replica: people decide."""


@dataclass(frozen=True)
class BackendPlace:
    """The backend on one node. `last_of`: models of which it serves the last replica."""

    id: UUID
    name: str
    status: str
    build: Build
    last_of: tuple[str, ...] = ()
    from_address: bool = False
    """Installed from an address and not from a gallery: a gallery's build would be another thing."""
    decided: bool = False
    """An automatic upgrade to this offer was made for it, or left it to people."""


def identity(offer: Offered) -> str:
    """What tells an offer from a newer one; "" if nothing does."""
    return offer.version or "".join(offer.digests[:1])


def verdict(place: BackendPlace, offer: Offered) -> Verdict:
    """The table: the first line that applies."""
    if place.decided or place.from_address or not behind(place.build, offer):
        return Verdict.NOTHING
    if place.status != "healthy":
        return Verdict.AWAY
    return Verdict.LAST_REPLICA if place.last_of else Verdict.UPGRADE


@dataclass(frozen=True)
class UpgradePlan:
    """The nodes by what becomes of them."""

    upgrade: tuple[BackendPlace, ...] = ()
    last_replica: tuple[BackendPlace, ...] = ()
    away: tuple[BackendPlace, ...] = ()

    @property
    def decided(self) -> tuple[BackendPlace, ...]:
        """Those that are not asked again for the same offer."""
        return (*self.upgrade, *self.last_replica)


def plan(places: Iterable[BackendPlace], offer: Offered) -> UpgradePlan:
    """Every node's verdict."""
    found: dict[Verdict, list[BackendPlace]] = {one: [] for one in Verdict}
    for place in places:
        found[verdict(place, offer)].append(place)
    return UpgradePlan(*(tuple(found[one]) for one in (Verdict.UPGRADE, Verdict.LAST_REPLICA, Verdict.AWAY)))
