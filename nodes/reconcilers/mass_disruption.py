"""The mass-disruption hold: decide whether many nodes failed, or whether we are cut off from them. Pure.

When more than a third of at least twenty nodes fall silent together, a cut network between them and us is
more likely than that many failures. Then they keep their state and their replicas until they are heard again,
until a controller finds that nothing listens for them on the bus (`nodes/backends/inventory.py`), or until
the hold expires. In a smaller fleet a few machines are easily more than a third, so each is judged alone.
Nodes that send a heartbeat every ten seconds exceed the limit within ten seconds of each other, which is
several passes; so nodes that are nearly silent count as soon as one node has exceeded the limit.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

SMALLEST_FLEET = 20
"""Number of nodes, the silent ones included, from which on silent nodes may be held."""
HEALING = timedelta(seconds=30)
"""Three heartbeat intervals of ten seconds."""
NEARLY = 0.75
"""Fraction of the limit after which a node is nearly silent: four heartbeats of ten seconds are missing."""


@dataclass(frozen=True)
class Hold:
    """The start and the end of a hold on silent nodes."""

    since: datetime
    until: datetime


@dataclass(frozen=True)
class Silence:
    """The numbers of nodes beyond the limit, of nearly silent nodes, and of all nodes."""

    silent: int
    nearly: int
    of: int


def decide(counts: Silence, hold: Hold | None, now: datetime, seconds: float) -> Hold | None:
    """Return the hold from now on, or None; `seconds` is the duration of a new one, 0 = holds are off.

    An expired hold is not followed by another one in the same pass: its nodes are given up. While a cut
    heals, the nodes are heard one after another, so the last few are held for `HEALING` longer.
    """
    if not counts.silent or not seconds:
        return None
    massive = counts.of >= SMALLEST_FLEET and (counts.silent + counts.nearly) * 3 > counts.of
    if hold is None:
        return Hold(now, now + timedelta(seconds=seconds)) if massive else None
    if not massive:
        hold = Hold(hold.since, min(hold.until, now + HEALING))
    return hold if now < hold.until else None
