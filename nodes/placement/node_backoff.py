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

FIRST_DELAY, MAX_DELAY = 1.0, 15.0
"""Seconds."""


@dataclass(frozen=True)
class NodeBackoff:
    """The number of failures of a node in one load, and the end of its back-off."""

    times: int
    until: datetime


NodeBackoffs = Mapping[UUID, NodeBackoff]


def add_failure(backoffs: NodeBackoffs, node_id: UUID, now: datetime) -> dict[UUID, NodeBackoff]:
    """Return the back-offs with one more failure of this node."""
    times = backoffs[node_id].times + 1 if node_id in backoffs else 1
    delay = backoff.delay(times, first=FIRST_DELAY, longest=MAX_DELAY)
    return {**backoffs, node_id: NodeBackoff(times, now + timedelta(seconds=delay))}


def backed_off_nodes(backoffs: NodeBackoffs, now: datetime) -> frozenset[UUID]:
    """Return the nodes that may not be tried yet."""
    return frozenset(node_id for node_id, backoff in backoffs.items() if backoff.until > now)


def seconds_until_retry(backoffs: NodeBackoffs, now: datetime) -> float | None:
    """Return the seconds until the first back-off ends; None if no node backs off."""
    ends = [(backoff.until - now).total_seconds() for backoff in backoffs.values() if backoff.until > now]
    return min(ends, default=None)


def from_payload(payload: Mapping[str, Any]) -> dict[UUID, NodeBackoff]:
    """Parse the back-offs in an operation's payload."""
    entries = payload.get("setbacks", {})
    return {
        UUID(id): NodeBackoff(times, datetime.fromisoformat(until)) for id, (times, until) in entries.items()
    }


def into_payload(payload: Mapping[str, Any], backoffs: NodeBackoffs) -> dict[str, Any]:
    """Return the payload with these back-offs."""
    entries = {str(id): [backoff.times, backoff.until.isoformat()] for id, backoff in backoffs.items()}
    return {**payload, "setbacks": entries}
