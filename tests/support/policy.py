"""The policy that chooses the replica of a request, as pure functions to compare the hot path's SQL with."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True)
class Candidate:
    """A loaded replica with the facts that the policy uses."""

    id: UUID
    in_flight: int
    last_used: datetime
    available_vram: int


def spread(candidates: Iterable[Candidate], requests: int, now: datetime) -> Counter[UUID]:
    """Return the number of `requests` that each replica takes if they are picked in sequence at `now`.

    R1.78, in order: fewest in flight, oldest `last_used`, largest available VRAM; at a full tie the smaller
    id. Each pick counts for the next pick. Without candidates the result is empty.
    """
    heap = [(c.in_flight, c.last_used, -c.available_vram, c.id) for c in candidates]
    heapq.heapify(heap)
    taken: Counter[UUID] = Counter()
    for _ in range(requests if heap else 0):
        in_flight, _, vram, replica = heap[0]
        taken[replica] += 1
        heapq.heapreplace(heap, (in_flight + 1, now, vram, replica))
    return taken


@dataclass(frozen=True)
class Warm:
    """A loaded replica with the facts that routing by prefix uses; `weight`: the prompts assigned to it."""

    node: UUID
    index: int
    in_flight: int
    weight: float = 0.0

    @property
    def place(self) -> tuple[UUID, int]:
        """Return the key on the wire."""
        return self.node, self.index


@dataclass(frozen=True)
class Limits:
    """The limits C41 and C42."""

    match: float = 0.3
    abs: int = 2
    rel: float = 1.5


USUAL = Limits()


def select(
    candidates: Sequence[Warm], hot: tuple[UUID, int] | None, share: float, limits: Limits = USUAL
) -> Warm | None:
    """Return the replica for a prompt; `hot` last received this share of its beginning (R3.13, R3.14)."""
    least = min((one.in_flight for one in candidates), default=0)
    most = min(least + limits.abs, least * limits.rel + 1)
    cold = sorted(candidates, key=lambda one: (one.weight, one.node, one.index))
    eligible = [one for one in cold if one.in_flight <= most]
    near = share >= limits.match
    return next((one for one in eligible if near and one.place == hot), next(iter(eligible), None))
