"""The brake on mass failure: are so many nodes down, or are we cut off from them? Pure.

When more than a third of at least twenty nodes fall silent together, a cut network between them and us is
more likely than that many failures. Then they keep their state and their replicas until they are heard again,
until a controller finds that nothing listens for them on the bus (`nodes/backends/inventory.py`), or until
the hold runs out. In a smaller fleet a few machines are easily more than a third, so each is judged alone.
Nodes that beat every ten seconds pass the limit of their silence over ten seconds, which is several passes;
so those that are nearly silent count, as soon as one has passed it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

SMALLEST_FLEET = 20
"""Nodes, the silent ones among them, from which on silent nodes may be kept."""
HEALING = timedelta(seconds=30)
"""Three beats of ten seconds."""
NEARLY = 0.75
"""The share of the limit after which a node is nearly silent: four beats of ten seconds are missing."""


@dataclass(frozen=True)
class Hold:
    """Since when and until when silent nodes are kept."""

    since: datetime
    until: datetime


@dataclass(frozen=True)
class Silence:
    """How many nodes are silent for longer than the limit, how many nearly, out of how many."""

    silent: int
    nearly: int
    of: int


def decide(found: Silence, standing: Hold | None, now: datetime, seconds: float) -> Hold | None:
    """The hold from now on, None for none; `seconds` is how long a new one lasts, 0 = there is never one.

    One that has run out is not followed by another in the same pass: its nodes are given up. While a cut
    heals the nodes are heard one after another, so the last few are kept for `HEALING` longer.
    """
    if not found.silent or not seconds:
        return None
    massive = found.of >= SMALLEST_FLEET and (found.silent + found.nearly) * 3 > found.of
    if standing is None:
        return Hold(now, now + timedelta(seconds=seconds)) if massive else None
    if not massive:
        standing = Hold(standing.since, min(standing.until, now + HEALING))
    return standing if now < standing.until else None
