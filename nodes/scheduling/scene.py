"""One scheduling rule and what of the fleet concerns it: what `plan` decides by. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from uuid import UUID

from nodes.scheduling.picture import Action, Demand, Host, LoadAnother, Placed, Retire, Ruling

LOADING = ("loading", "staging")


class Ground(tuple[Host, ...]):
    """The nodes that a selector chooses, by name. Rules share it, so that none has to look at every node."""

    @cached_property
    def by_id(self) -> dict[UUID, Host]:
        """The same by their ids."""
        return {host.id: host for host in self}

    @cached_property
    def ids(self) -> frozenset[UUID]:
        """Only these."""
        return frozenset(self.by_id)

    @cached_property
    def slots(self) -> int:
        """Those of all of them, for one model."""
        return sum(host.slots for host in self)


@dataclass(frozen=True)
class Scene:
    """One rule, and what of the fleet concerns it."""

    demand: Demand
    fits: Ground
    hosts: Mapping[UUID, Host]
    """Every healthy node."""
    rows: Sequence[Placed]
    """All of the model."""
    serving: Sequence[Placed]
    """Those that are loaded, on healthy nodes."""
    loads: int
    placed: int
    """Loads that have a slot."""
    pinned: frozenset[UUID]
    """Nodes that have a load under way for them alone."""
    failure: str
    """Why the last load failed, if that was after the last pass."""
    failed_at: datetime | None
    """When the last load failed."""
    defined: bool
    revision: str
    """Of its definition; empty if that cannot be told."""
    replacing: Mapping[UUID, bool]
    """Its replicas that a load will replace; see `Fleet`."""
    pressed: int
    """Requests that were kept away, if that is enough of them."""

    @cached_property
    def held(self) -> dict[UUID, list[Placed]]:
        """The rows by node. Any state keeps a slot (R1.62, R1.65)."""
        found: dict[UUID, list[Placed]] = defaultdict(list)
        for row in self.rows:
            found[row.node_id].append(row)
        return dict(found)

    @cached_property
    def fitting(self) -> list[Placed]:
        """Those of `serving` where the rule wants them."""
        return [row for row in self.serving if row.node_id in self.fits.ids]

    @property
    def room(self) -> int:
        """R1.65: slots that are free for one more load."""
        there = ((self.fits.by_id[id], rows) for id, rows in self.held.items() if id in self.fits.ids)
        taken = sum(min(len(rows), host.slots) for host, rows in there)
        return self.fits.slots - taken - (self.loads - self.placed)

    def free(self, host: Host) -> int:
        """The node's free slots."""
        return max(host.slots - len(self.held.get(host.id, ())), 0)

    @property
    def leaving(self) -> bool:
        """Whether a slot will be free without more ado."""
        return any(row.state == "unloading" and row.node_id in self.fits.ids for row in self.rows)

    @property
    def wanted(self) -> int:
        """The number of replicas below which it is not satisfied."""
        return len(self.fits) if self.demand.spread else self.demand.minimum

    @property
    def only(self) -> frozenset[UUID] | None:
        """R4.15: where a load may go."""
        return None if self.demand.selector == {} else self.fits.ids

    def ruling(self, reason: str, *actions: Action) -> Ruling:
        """What is to be done, with the figures."""
        more = sum(isinstance(action, LoadAnother) and action.replaces is None for action in actions)
        less = sum(isinstance(action, Retire) for action in actions)
        less += sum(row.id in self.replacing for row in self.serving)
        aim = max(self.wanted, len(self.serving) + self.loads + more - less)
        return Ruling(self.demand.model, aim, len(self.serving), self.loads, reason, actions)
