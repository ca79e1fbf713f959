"""The times of a load: limits of its steps, its progress deadline, and node back-offs. Pure.

All times are in seconds. A load as a whole has no fixed limit: `progress_deadline` is its first limit, and
any progress extends the limit (`nodes/loading/load_request.py`).

One unresponsive node delays only itself. The back-off doubles with each failure of the same node in one load,
up to `MAX_DELAY`. The operation's payload stores the back-offs, so that the next attempt has them on any
controller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from localai_cluster.kit import backoff

LOAD, MAX_LOAD = 300.0, 6 * 3600.0
"""Seconds that loading a payload of unknown size may take, and the maximum for any size (C28)."""
_SECONDS_PER_GIB = 20.0
INSTALL = 900.0
MARGIN, MIN_HOLD = 300.0, 1500.0
"""Seconds added to the limits for the progress deadline, and its minimum in seconds (C29)."""
STALL = 300.0
"""Seconds without progress after which a load is abandoned (C30)."""
_BYTES_READ_PER_SECOND = 32 * 2**20
MAX_HOLD = 24 * 3600.0
"""Maximum age of a load in seconds (C31)."""


def load_limit(payload: int, given: float = 0.0) -> float:
    """Return the limit of one LoadModel for `payload` bytes (0 = unknown); `given` replaces it (R2.60)."""
    if given > 0:
        return given
    return min(LOAD + _SECONDS_PER_GIB * max(payload, 0) / 2**30, MAX_LOAD)


def progress_deadline(install: float, load: float) -> float:
    """Return the first progress deadline of a load, from its install and load limits (R2.24, R2.25)."""
    return max((install if install > 0 else INSTALL) + (load if load > 0 else LOAD) + MARGIN, MIN_HOLD)


def extend_deadline(age: float, more: float, base: float) -> float:
    """Return how many seconds a load may take from now, after progress or before a step of `more` s (R2.24).

    The sum of `age` and the result never exceeds the absolute limit, which is at least `base`.
    """
    return max(min(more, max(MAX_HOLD, base) - age), 0.0)


def hashing_limit(size: int) -> float:
    """Return the seconds that a worker may take to hash a file of `size` bytes."""
    return max(size, 0) / _BYTES_READ_PER_SECOND


FIRST_DELAY = 1.0
"""Seconds of a node's back-off after its first failure in a load."""
MAX_DELAY = 15.0
"""Maximum seconds of a node's back-off."""


@dataclass(frozen=True)
class NodeBackoff:
    """How often a node has failed in one load, and until when the load does not try it again."""

    times: int
    until: datetime


NodeBackoffs = Mapping[UUID, NodeBackoff]
"""Back-offs of one load, by node."""


def add_failure(backoffs: NodeBackoffs, node_id: UUID, now: datetime) -> dict[UUID, NodeBackoff]:
    """Return the back-offs with one more failure of this node."""
    times = backoffs[node_id].times + 1 if node_id in backoffs else 1
    delay = backoff.delay(times, first=FIRST_DELAY, longest=MAX_DELAY)
    return {**backoffs, node_id: NodeBackoff(times, now + timedelta(seconds=delay))}


def backed_off_nodes(backoffs: NodeBackoffs, now: datetime) -> frozenset[UUID]:
    """Return the nodes that must not be tried yet."""
    return frozenset(node_id for node_id, backoff in backoffs.items() if backoff.until > now)


def seconds_until_retry(backoffs: NodeBackoffs, now: datetime) -> float | None:
    """Return the seconds until the first back-off ends; None if no node backs off."""
    ends = [(backoff.until - now).total_seconds() for backoff in backoffs.values() if backoff.until > now]
    return min(ends, default=None)


def from_payload(payload: Mapping[str, Any]) -> dict[UUID, NodeBackoff]:
    """Return the back-offs that an operation's payload has."""
    entries = payload.get("setbacks", {})
    return {
        UUID(id): NodeBackoff(times, datetime.fromisoformat(until)) for id, (times, until) in entries.items()
    }


def into_payload(payload: Mapping[str, Any], backoffs: NodeBackoffs) -> dict[str, Any]:
    """Return a copy of the payload with these back-offs."""
    entries = {str(id): [backoff.times, backoff.until.isoformat()] for id, backoff in backoffs.items()}
    return {**payload, "setbacks": entries}
