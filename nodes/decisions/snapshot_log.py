"""Stored snapshots of decisions, for repeating them: the only writer of `PlacementLog`.

A base holds the snapshot of one decision. Later decisions add the differences, so each refers to a base and a
position in its log. Every process has a base of its own: no two processes write to one log or wait for each
other. A change starts a new base if the base is older than a minute or its log has outgrown it. Without
changes a base is kept for an hour. A base without a decision, because its process died in between, does no
harm and is pruned like the others.

A snapshot is made of sections of keys and values. An entry is JSON, so a decoded section has texts for ids,
and lists for sets and tuples.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import orjson
from django.db import IntegrityError, connection

from nodes.models import PlacementLog

State = dict[str, dict[Any, Any]]
"""By section: the rows that were last recorded."""
Changes = dict[str, tuple[dict[Any, Any], list[Any]]]
"""By section: new or changed rows, and removed keys."""
_MISSING = object()


@dataclass(frozen=True)
class Section:
    """The rows that a decision read under one name; values must be immutable."""

    rows: Mapping[Any, Any]
    whole: bool = True
    """False: only these keys were read; rows with other keys are unchanged."""


SnapshotSections = Mapping[str, Section]


def find_changes(state: State, seen: SnapshotSections) -> Changes:
    """Return the differences between these sections and the state."""
    result: Changes = {}
    for name, section in seen.items():
        before, now = state.get(name, {}), section.rows
        new = {key: value for key, value in now.items() if before.get(key, _MISSING) != value}
        removed = list(before.keys() - now.keys()) if section.whole else []
        if new or removed:
            result[name] = (new, removed)
    return result


def apply_changes(state: State, changed_sections: Changes) -> None:
    """Apply the changes to the state."""
    for name, (new, removed) in changed_sections.items():
        section = state.setdefault(name, {})
        section.update(new)
        for key in removed:
            section.pop(key, None)


def encode(changed_sections: Changes) -> bytes:
    """Encode one entry of a log."""
    return orjson.dumps(changed_sections, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def restore(entries: Iterable[bytes]) -> State:
    """Return the state after these entries, starting with the first entry of the log."""
    state: State = {}
    for entry in entries:
        apply_changes(state, orjson.loads(entry))
    return state


def _plain(value: Any) -> Any:
    """Encode a set as a sorted list, so that equal sets have equal encodings; a named tuple as a list."""
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)


LIFETIME = timedelta(minutes=1)
LIFETIME_UNCHANGED = timedelta(hours=1)
"""The lifetime of a base, and its lifetime without changes."""
MIN_LOG_SIZE = 64 * 1024
"""Bytes that the log of a small base may have at least."""


@dataclass(frozen=True)
class SnapshotRef:
    """A reference to the snapshot of a decision: the base and a position in its log."""

    base: UUID
    position: int


@dataclass
class _Log:
    """The log that this process writes, in its committed state."""

    base: UUID
    began: datetime
    size: int
    position: int = 0
    added: int = 0
    state: State = field(default_factory=dict)

    def lasts(self, now: datetime, how_long: timedelta) -> bool:
        """Return True if the log is not too old, nor too young (a clock was set back), nor too large."""
        return abs(now - self.began) < how_long and self.added <= max(self.size, MIN_LOG_SIZE)


_lock = threading.Lock()
_log: _Log | None = None


def start_new_base() -> None:
    """Start a new base with the next decision."""
    global _log, _lock
    _log, _lock = None, threading.Lock()


# Otherwise the child of a fork would write to its parent's log.
os.register_at_fork(after_in_child=start_new_base)


def store_snapshot(seen: SnapshotSections, *, now: datetime) -> SnapshotRef:
    """Store the snapshot of a decision. It costs one statement, and none if nothing has changed.

    In a transaction it starts a base for this decision alone: a base that may be rolled back must have no
    further entries.
    """
    if connection.in_atomic_block:
        return _create_base(find_changes({}, seen), now)
    with _lock:
        return _store(seen, now)


def _store(snapshot: SnapshotSections, now: datetime) -> SnapshotRef:
    global _log
    log = _log
    if log is not None:
        difference = find_changes(log.state, snapshot)
        if not difference and log.lasts(now, LIFETIME_UNCHANGED):
            return SnapshotRef(log.base, log.position)
        if log.lasts(now, LIFETIME) and _append(log, difference, now):
            return SnapshotRef(log.base, log.position)
    _log = None
    content = find_changes({}, snapshot)
    reference = _create_base(content, now)
    _log = _Log(reference.base, now, len(encode(content)))
    apply_changes(_log.state, content)
    return reference


def _append(log: _Log, difference: Changes, now: datetime) -> bool:
    """Append an entry; return False if the log has an entry that this process does not know of."""
    body = encode(difference)
    try:
        PlacementLog.objects.create(base=log.base, position=log.position + 1, at=now, body=body)
    except IntegrityError:
        return False  # an earlier write was committed, but its response was lost
    log.position, log.added = log.position + 1, log.added + len(body)
    apply_changes(log.state, difference)
    return True


def _create_base(content: Changes, now: datetime) -> SnapshotRef:
    base = uuid4()
    PlacementLog.objects.create(base=base, position=0, at=now, body=encode(content))
    return SnapshotRef(base, 0)


def read_snapshot(seen: SnapshotRef) -> State | None:
    """Return the snapshot of the decision; None if it has been pruned. One query."""
    rows = PlacementLog.objects.filter(base=seen.base, position__lte=seen.position).order_by("position")
    entries = [bytes(body) for body in rows.values_list("body", flat=True)]
    return restore(entries) if len(entries) == seen.position + 1 else None
