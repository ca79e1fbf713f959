"""The brake on mass failure: are so many nodes down, or are we cut off from them? Pure.

When more than a third of the nodes, and at least three, fall silent together, a cut network between them and
us is more likely than that many failures. Then they keep their state and their replicas until they are heard
again, or until the hold runs out. Nodes that beat every ten seconds pass the limit of their silence over ten
seconds, which is several passes; so those that are nearly silent count, as soon as one has passed it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

FEWEST = 3
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

    One that has run out is not followed by another in the same pass: its nodes are given up.
    """
    together = found.silent + found.nearly
    massive = found.silent > 0 and together >= FEWEST and together * 3 > found.of
    if not massive or not seconds:
        return None
    if standing is None:
        return Hold(now, now + timedelta(seconds=seconds))
    return standing if now < standing.until else None
