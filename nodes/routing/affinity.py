"""Which replica was last given which beginning of a prompt: the memory behind routing by prefix. Pure.

A hash of a chain stands for all of the prompt up to there, so the tree of R3.8 is a flat table for each
model: hash -> the replica, and when. Its order is that of use. What is too old or too much goes from its
front, a replica that has gone is marked and its entries are passed over, and the weight of each replica is
carried along: nothing here walks over all entries.

Not for more than one thread.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from nodes.routing.chains import Chain

HALF_LIFE = 120.0
"""C43: seconds in which an entry loses half of its weight."""
MOST_ENTRIES = 131_072
"""Of all models together, about 25 MB: 2,048 prompts of the longest kind."""
MOST_HOMES = 4096
"""Replicas of one model that are remembered."""

Place = tuple[UUID, int]
"""A replica: its node and its index there. Another engine at the same place is the same replica."""


class Match(NamedTuple):
    """Where the longest known beginning of a prompt was last, and how many blocks that is."""

    place: Place
    depth: int


@dataclass(slots=True, eq=False)
class _Home:
    """A replica as the home of entries; `weight` is what they weighed at `at`."""

    place: Place
    at: float
    weight: float = 0.0
    entries: int = 0
    gone: bool = False

    def age(self, now: float, half_life: float) -> None:
        """Brings its weight up to date."""
        self.weight *= _decayed(now - self.at, half_life)
        self.at = now

    def lose(self, seen: float, now: float, half_life: float) -> None:
        """One entry is another's, or nobody's."""
        self.age(now, half_life)
        self.entries -= 1
        # Without entries it is exactly nothing, whatever rounding has left.
        self.weight = max(self.weight - _decayed(now - seen, half_life), 0.0) if self.entries else 0.0


def _decayed(age: float, half_life: float) -> float:
    return float(0.5 ** (age / half_life)) if half_life else 1.0


class _Table:
    """The entries of one model."""

    def __init__(self, ttl: float, half_life: float) -> None:
        self.entries: OrderedDict[int, tuple[_Home, float]] = OrderedDict()
        self.homes: dict[Place, _Home] = {}
        self._ttl = ttl
        self._half_life = half_life

    def expire(self, now: float) -> None:
        """R3.10: drops what is too old."""
        while self.entries:
            _, seen = next(iter(self.entries.values()))
            if now - seen <= self._ttl:
                return
            self.drop_oldest(now)

    def drop_oldest(self, now: float) -> None:
        """Drops the entry that was not used for the longest time; of one prompt the last blocks first."""
        _, (home, seen) = self.entries.popitem(last=False)
        self._taken_from(home, seen, now)

    def match(self, chain: Chain, now: float) -> Match | None:
        """The deepest live entry."""
        for depth in range(len(chain), 0, -1):
            entry = self.entries.get(chain[depth - 1])
            if entry is not None and not entry[0].gone and now - entry[1] <= self._ttl:
                return Match(entry[0].place, depth)
        return None

    def put(self, chain: Chain, place: Place, now: float) -> None:
        """Makes the replica the home of every block (R3.9)."""
        home = self.homes.get(place)
        if home is None:
            if len(self.homes) >= MOST_HOMES:
                return
            home = self.homes[place] = _Home(place, now)
        home.age(now, self._half_life)
        home.entries += len(chain)
        home.weight += len(chain)
        # Backwards, so that the first blocks, which most prompts share, are the last to go.
        for block in reversed(chain):
            former = self.entries.get(block)
            if former is not None:
                self.entries.move_to_end(block)
            self.entries[block] = (home, now)
            if former is not None:
                self._taken_from(*former, now)

    def forget(self, node: UUID, index: int) -> None:
        """R3.22: passes over what this replica is the home of from now on; below 0: all of the node's."""
        lost = [place for place in self.homes if place[0] == node] if index < 0 else [(node, index)]
        for place in lost:
            if (home := self.homes.pop(place, None)) is not None:
                home.gone = True

    def weights(self, now: float) -> Iterator[tuple[Place, float]]:
        """R3.12: how much each replica is the home of; what is expired must have been dropped."""
        for home in self.homes.values():
            yield home.place, home.weight * _decayed(now - home.at, self._half_life)

    def _taken_from(self, home: _Home, seen: float, now: float) -> None:
        if home.gone:
            return
        home.lose(seen, now, self._half_life)
        if not home.entries:
            del self.homes[home.place]


class Affinity:
    """The memory of one web process. Times are seconds of one clock that never goes back."""

    def __init__(self, ttl: float, half_life: float = HALF_LIFE, most: int = MOST_ENTRIES) -> None:
        self._ttl = ttl
        self._half_life = half_life
        self._most = most
        self._tables: dict[str, _Table] = {}

    def __len__(self) -> int:
        """How many entries there are, those of replicas that have gone included."""
        return sum(len(table.entries) for table in list(self._tables.values()))

    def observe(self, model: str, chain: Chain, place: Place, now: float) -> bool:
        """R3.9: the replica was given this prompt; whether that is news to others."""
        if not chain:
            return False
        table = self._tables.setdefault(model, _Table(self._ttl, self._half_life))
        table.expire(now)
        known = table.match(chain, now)
        table.put(chain, place, now)
        self._shrink(now)
        return known != Match(place, len(chain))

    def match(self, model: str, chain: Chain, now: float) -> Match | None:
        """R3.11: the replica that was last given the longest known beginning of this prompt."""
        table = self._tables.get(model)
        return None if table is None else table.match(chain, now)

    def weights(self, model: str, now: float) -> list[tuple[Place, float]]:
        """Of each replica that is the home of anything; others weigh nothing."""
        table = self._tables.get(model)
        if table is None:
            return []
        table.expire(now)
        return list(table.weights(now))

    def forget(self, model: str, node: UUID, index: int) -> None:
        """A replica has gone, or all of the model on the node (below 0)."""
        if (table := self._tables.get(model)) is not None:
            table.forget(node, index)

    def clear(self) -> None:
        """Forgets everything."""
        self._tables.clear()

    def sweep(self, now: float) -> None:
        """R3.10: drops what is expired, and what nothing is left of."""
        for model, table in list(self._tables.items()):
            table.expire(now)
            if not table.entries:
                del self._tables[model]

    def _shrink(self, now: float) -> None:
        """Keeps to the limit at the cost of the model that has the most."""
        beyond = len(self) - self._most
        if beyond > 0:
            largest = max(self._tables.values(), key=lambda table: len(table.entries))
            for _ in range(min(beyond, len(largest.entries))):
                largest.drop_oldest(now)
