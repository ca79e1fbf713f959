"""What decisions have seen, kept so that they can be made again: the only writer of `PlacementLog`.

A base holds what one decision saw. The decisions after it add what they saw otherwise, so each names a base
and a position in its log. Every process has a base of its own: no two write to one log, and none waits for
another. A base lasts a minute, or until its log has grown larger than it; without changes it goes on for an
hour. One that no decision names, because its process died in between, does no harm and goes with the others.
"""

import os
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from django.db import IntegrityError, connection

from nodes.models import PlacementLog
from nodes.placement.sections import Changes, Sections, State, apply, changes, encoded, restored
from nodes.replicas.space import time_of_oldest_fitting

LASTS = timedelta(minutes=1)
UNCHANGED = timedelta(hours=1)
"""How long a base lasts, and how long if nothing has changed since."""
LEAST_LOG = 64 * 1024
"""Bytes that a log may have beside a small base."""


@dataclass(frozen=True)
class Seen:
    """Where it stands what a decision saw."""

    base: UUID
    position: int


@dataclass
class _Log:
    """The log that this process writes, as it was committed."""

    base: UUID
    began: datetime
    size: int
    position: int = 0
    added: int = 0
    state: State = field(default_factory=dict)

    def lasts(self, now: datetime, how_long: timedelta) -> bool:
        """Whether it is not too old, or by a clock that was set back too young; and not too large."""
        return abs(now - self.began) < how_long and self.added <= max(self.size, LEAST_LOG)


_lock = threading.Lock()
_log: _Log | None = None


def forget() -> None:
    """Begins a base with the next decision."""
    global _log, _lock
    _log, _lock = None, threading.Lock()


# The child of a fork would go on with its parent's log.
os.register_at_fork(after_in_child=forget)


def remember(seen: Sections, *, now: datetime) -> Seen:
    """Keeps what a decision saw. It costs one statement, and none if nothing has changed.

    Inside of one it begins a base for this decision alone: what may be rolled back must not be continued.
    """
    if connection.in_atomic_block:
        return _begun(changes({}, seen), now)
    with _lock:
        return _continued(seen, now)


def _continued(seen: Sections, now: datetime) -> Seen:
    global _log
    log = _log
    if log is not None:
        found = changes(log.state, seen)
        if not found and log.lasts(now, UNCHANGED):
            return Seen(log.base, log.position)
        if log.lasts(now, LASTS) and _added(log, found, now):
            return Seen(log.base, log.position)
    _log = None
    every = changes({}, seen)
    begun = _begun(every, now)
    _log = _Log(begun.base, now, len(encoded(every)))
    apply(_log.state, every)
    return begun


def _added(log: _Log, found: Changes, now: datetime) -> bool:
    """Whether it stands in the log now; not if that has gone on without this process's knowledge."""
    body = encoded(found)
    try:
        PlacementLog.objects.create(base=log.base, position=log.position + 1, at=now, body=body)
    except IntegrityError:
        return False  # the answer to an earlier write was lost, but it was made
    log.position, log.added = log.position + 1, log.added + len(body)
    apply(log.state, found)
    return True


def _begun(every: Changes, now: datetime) -> Seen:
    base = uuid4()
    PlacementLog.objects.create(base=base, position=0, at=now, body=encoded(every))
    return Seen(base, 0)


def recall(seen: Seen) -> State | None:
    """What the decision saw; None if that is not kept any more. One query."""
    rows = PlacementLog.objects.filter(base=seen.base, position__lte=seen.position).order_by("position")
    entries = [bytes(body) for body in rows.values_list("body", flat=True)]
    return restored(entries) if len(entries) == seen.position + 1 else None


def fitting_since(space: int) -> datetime | None:
    """Return the time of the oldest entries that fit into `space` bytes with all newer ones; None: all."""
    return time_of_oldest_fitting(PlacementLog.objects.all(), "at", ("body",), space)


def prune(*, before: datetime, limit: int) -> int:
    """Deletes the oldest `limit` entries from before `before`; answers how many."""
    old = PlacementLog.objects.filter(at__lt=before).order_by("at", "pk")
    deleted, _ = PlacementLog.objects.filter(pk__in=list(old.values_list("pk", flat=True)[:limit])).delete()
    return deleted
