"""Which replica takes the next request, as a pure function: what the hot path's SQL is held against."""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True)
class Candidate:
    """A loaded replica as the policy sees it."""

    id: UUID
    in_flight: int
    last_used: datetime
    available_vram: int


def spread(candidates: Iterable[Candidate], requests: int, now: datetime) -> Counter[UUID]:
    """How many of `requests` each replica takes when they are picked one after the other at `now`.

    R1.78, in order: fewest in flight, oldest `last_used`, largest available VRAM; a full tie goes to the
    smaller id. Each pick counts for the next one. No candidate: nothing.
    """
    heap = [(c.in_flight, c.last_used, -c.available_vram, c.id) for c in candidates]
    heapq.heapify(heap)
    taken: Counter[UUID] = Counter()
    for _ in range(requests if heap else 0):
        in_flight, _, vram, replica = heap[0]
        taken[replica] += 1
        heapq.heapreplace(heap, (in_flight + 1, now, vram, replica))
    return taken
