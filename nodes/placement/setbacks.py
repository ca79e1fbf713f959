"""Setbacks: which nodes failed one load, how often, and how long each rests before it is tried again.

One node's silence delays that node and nothing else. The rest doubles with each failure of the same node, up
to `LONGEST_REST`. Setbacks are kept in the operation's payload, so that the next attempt knows them on any
controller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

FIRST_REST, LONGEST_REST = 1.0, 15.0
"""Seconds."""


@dataclass(frozen=True)
class Setback:
    """How often a node failed a load, and until when it rests."""

    times: int
    until: datetime


Setbacks = Mapping[UUID, Setback]


def after_failure(setbacks: Setbacks, node_id: UUID, now: datetime) -> dict[UUID, Setback]:
    """The setbacks with one more failure of this node."""
    times = setbacks[node_id].times + 1 if node_id in setbacks else 1
    rest = min(FIRST_REST * 2.0 ** min(times - 1, 10), LONGEST_REST)
    return {**setbacks, node_id: Setback(times, now + timedelta(seconds=rest))}


def resting(setbacks: Setbacks, now: datetime) -> frozenset[UUID]:
    """The nodes that are not to be tried yet."""
    return frozenset(node_id for node_id, setback in setbacks.items() if setback.until > now)


def next_end(setbacks: Setbacks, now: datetime) -> float | None:
    """Seconds until the first node has rested; None if none rests."""
    ends = [(setback.until - now).total_seconds() for setback in setbacks.values() if setback.until > now]
    return min(ends, default=None)


def from_payload(payload: Mapping[str, Any]) -> dict[UUID, Setback]:
    """What an operation's payload says."""
    kept = payload.get("setbacks", {})
    return {UUID(id): Setback(times, datetime.fromisoformat(until)) for id, (times, until) in kept.items()}


def into_payload(payload: Mapping[str, Any], setbacks: Setbacks) -> dict[str, Any]:
    """The payload with these setbacks."""
    kept = {str(id): [setback.times, setback.until.isoformat()] for id, setback in setbacks.items()}
    return {**payload, "setbacks": kept}
