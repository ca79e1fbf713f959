"""Node back-off per load: the nodes that failed the load, how often, and when each may be tried again.

One unresponsive node delays that node and nothing else. The delay doubles with each failure of the same node,
up to `LONGEST_REST`. Back-offs are stored in the operation's payload, so that the next attempt has them on
any controller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from localai_cluster.kit import backoff

FIRST_REST, LONGEST_REST = 1.0, 15.0
"""Seconds."""


@dataclass(frozen=True)
class Setback:
    """The number of failures of a node in one load, and the end of its back-off."""

    times: int
    until: datetime


Setbacks = Mapping[UUID, Setback]


def after_failure(setbacks: Setbacks, node_id: UUID, now: datetime) -> dict[UUID, Setback]:
    """Return the back-offs with one more failure of this node."""
    times = setbacks[node_id].times + 1 if node_id in setbacks else 1
    delay = backoff.delay(times, first=FIRST_REST, longest=LONGEST_REST)
    return {**setbacks, node_id: Setback(times, now + timedelta(seconds=delay))}


def resting(setbacks: Setbacks, now: datetime) -> frozenset[UUID]:
    """Return the nodes that may not be tried yet."""
    return frozenset(node_id for node_id, setback in setbacks.items() if setback.until > now)


def next_end(setbacks: Setbacks, now: datetime) -> float | None:
    """Return the seconds until the first back-off ends; None if no node backs off."""
    ends = [(setback.until - now).total_seconds() for setback in setbacks.values() if setback.until > now]
    return min(ends, default=None)


def from_payload(payload: Mapping[str, Any]) -> dict[UUID, Setback]:
    """Parse the back-offs in an operation's payload."""
    entries = payload.get("setbacks", {})
    return {UUID(id): Setback(times, datetime.fromisoformat(until)) for id, (times, until) in entries.items()}


def into_payload(payload: Mapping[str, Any], setbacks: Setbacks) -> dict[str, Any]:
    """Return the payload with these back-offs."""
    entries = {str(id): [setback.times, setback.until.isoformat()] for id, setback in setbacks.items()}
    return {**payload, "setbacks": entries}
