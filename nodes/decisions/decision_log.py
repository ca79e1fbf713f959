"""Records of decisions and of the snapshots that they read: the only writer of both tables.

A placement is recorded (`PlacementRecord`) in the transaction that reserves its slot, together with its
evictions: all records exist or none. A wait is recorded before its load is postponed. So if the process dies
in between, the next attempt finds the record and adds no second one. A wait that repeats for the same reasons
keeps its record; only the figures in the record are updated.

A snapshot is stored (`PlacementLog`) before the decision is recorded, because decisions can be replayed from
snapshots. A base holds the snapshot of one decision. Later decisions add the differences, so each decision
refers to a base and a position in its log. Every process has its own base: no two processes write to one log
or wait for each other. A change starts a new base if the base is older than a minute or its log has outgrown
it. Without changes a base is kept for an hour. A base without a decision, left by a process that died, does
no harm and is pruned like any other.

A snapshot consists of sections of keys and values. An entry is JSON, so a decoded section has strings for
ids, and lists for sets and tuples.
"""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import orjson
from django.db import IntegrityError, connection

from nodes.models import DecisionKind, PlacementLog, PlacementRecord
from nodes.placement.evict import Resident
from nodes.placement.explain import FACTS_WITHOUT_FLEET, DecisionOutcome, Explanation

State = dict[str, dict[Any, Any]]
"""The rows of a snapshot, by section and key."""
Changes = dict[str, tuple[dict[Any, Any], list[Any]]]
"""By section: the new or changed rows, and the keys of removed rows."""
_MISSING = object()


@dataclass(frozen=True)
class Section:
    """The rows of one kind that a decision read, by key; values must be immutable."""

    rows: Mapping[Any, Any]
    whole: bool = True
    """True if these are all rows; False if only these keys were read and other rows stay as they were."""


SnapshotSections = Mapping[str, Section]


def find_changes(state: State, sections: SnapshotSections) -> Changes:
    """Return how the sections of a snapshot differ from the state."""
    result: Changes = {}
    for name, section in sections.items():
        before, now = state.get(name, {}), section.rows
        new = {key: value for key, value in now.items() if before.get(key, _MISSING) != value}
        removed = list(before.keys() - now.keys()) if section.whole else []
        if new or removed:
            result[name] = (new, removed)
    return result


def apply_changes(state: State, changed_sections: Changes) -> None:
    """Apply the changed sections to the state."""
    for name, (new, removed) in changed_sections.items():
        section = state.setdefault(name, {})
        section.update(new)
        for key in removed:
            section.pop(key, None)


def encode(changed_sections: Changes) -> bytes:
    """Encode one entry of a log."""
    return orjson.dumps(changed_sections, default=_encode_collection, option=orjson.OPT_NON_STR_KEYS)


def restore(entries: Iterable[bytes]) -> State:
    """Return the state after these entries, which begin with the first entry of a log."""
    state: State = {}
    for entry in entries:
        apply_changes(state, orjson.loads(entry))
    return state


def _encode_collection(value: Any) -> Any:
    """Encode a set as a sorted list, so that equal sets have equal encodings, and a named tuple as a list."""
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)


LIFETIME = timedelta(minutes=1)
"""Maximum age of a base to which a change is added."""
LIFETIME_UNCHANGED = timedelta(hours=1)
"""Maximum age of a base to which no change is added."""
MIN_LOG_SIZE = 64 * 1024
"""Bytes that a log may have even if its base is smaller."""


@dataclass(frozen=True)
class SnapshotRef:
    """A reference to the snapshot of a decision: a base and a position in the base's log."""

    base: UUID
    position: int


@dataclass
class _Log:
    """The log that this process writes, as committed."""

    base: UUID
    began: datetime
    size: int
    position: int = 0
    added: int = 0
    state: State = field(default_factory=dict)

    def can_continue(self, now: datetime, lifetime: timedelta) -> bool:
        """Return True if an entry may be added: the log is not too old, too large, or from the future."""
        return abs(now - self.began) < lifetime and self.added <= max(self.size, MIN_LOG_SIZE)


_log_lock = threading.Lock()
_log: _Log | None = None


def start_new_base() -> None:
    """Make the next decision start a new base."""
    global _log, _log_lock
    _log, _log_lock = None, threading.Lock()


# Otherwise the child of a fork would write to its parent's log.
os.register_at_fork(after_in_child=start_new_base)


def store_snapshot(snapshot: SnapshotSections, *, now: datetime) -> SnapshotRef:
    """Store the snapshot of a decision and return a reference to it. One statement, or none without changes.

    Inside a transaction the snapshot gets a base of its own, because a base that may be rolled back must have
    no further entries.
    """
    global _log
    if connection.in_atomic_block:
        return _create_base(find_changes({}, snapshot), now)
    with _log_lock:
        log = _log
        if log is not None:
            difference = find_changes(log.state, snapshot)
            if not difference and log.can_continue(now, LIFETIME_UNCHANGED):
                return SnapshotRef(log.base, log.position)
            if log.can_continue(now, LIFETIME) and _append(log, difference, now):
                return SnapshotRef(log.base, log.position)
        _log = None
        content = find_changes({}, snapshot)
        reference = _create_base(content, now)
        _log = _Log(reference.base, now, len(encode(content)))
        apply_changes(_log.state, content)
        return reference


def _append(log: _Log, difference: Changes, now: datetime) -> bool:
    """Append an entry; return False if another entry already has the position."""
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


def read_snapshot(reference: SnapshotRef) -> State | None:
    """Return the snapshot of the decision; None if it has been pruned. One query."""
    rows = PlacementLog.objects.filter(base=reference.base, position__lte=reference.position).order_by(
        "position"
    )
    entries = [bytes(body) for body in rows.values_list("body", flat=True)]
    return restore(entries) if len(entries) == reference.position + 1 else None


_UPDATED_COLUMNS = ("reason", "facts", "base", "position", "last_at")


class NodeSlot(NamedTuple):
    """The node and the replica index of a decision."""

    node_id: UUID
    node_name: str
    replica_index: int | None


@dataclass(frozen=True)
class DecisionRecord:
    """A decision to be recorded: its explanation, and a reference to the snapshot that it read."""

    model_name: str
    operation_id: UUID | None
    explanation: Explanation
    snapshot: SnapshotRef | None
    kind: DecisionKind = DecisionKind.PLACEMENT
    slot: NodeSlot | None = None
    """The slot of the decision; None = the slot that the explanation names, if any."""


def explanation_without_fleet(outcome: DecisionOutcome, sentence: str, **facts: Any) -> Explanation:
    """Return the explanation of a decision that compared no nodes."""
    return Explanation(outcome, sentence, None, 0, {**FACTS_WITHOUT_FLEET, **facts})


def record(decided: DecisionRecord, *, now: datetime, victims: Sequence[Resident] = ()) -> None:
    """Record a decision and the evictions of `victims`.

    A repetition of the operation's last record is not added.
    """
    if decided.explanation.node is None and _repeats_last_record(decided, now):
        return
    _build_record(decided, now).save(force_insert=True)
    if victims:
        PlacementRecord.objects.bulk_create(
            _build_eviction_record(decided, victim, now) for victim in victims
        )


def record_all(decided: Iterable[DecisionRecord], *, now: datetime) -> None:
    """Record decisions without an operation, except those that repeat the last record of their model.

    Two statements for any number of decisions.
    """
    rows = [_build_record(decision, now) for decision in decided]
    model_names = [row.model_name for row in rows]
    records = PlacementRecord.objects.filter(model_name__in=model_names, operation_id=None)
    last_records = records.order_by("model_name", "-id").distinct("model_name")
    last_outcomes = {(row.model_name, row.kind): (row.outcome, row.reason) for row in last_records}
    new_rows = [row for row in rows if _is_new(row, last_outcomes.get((row.model_name, row.kind)))]
    PlacementRecord.objects.bulk_create(new_rows)


def _is_new(row: PlacementRecord, before: tuple[str, str] | None) -> bool:
    """Return True unless the row repeats a wait or a refusal; a repeated scaling counts as new."""
    return row.outcome == DecisionOutcome.SCALED or before != (row.outcome, row.reason)


def _build_record(decided: DecisionRecord, now: datetime) -> PlacementRecord:
    explanation, snapshot, slot = decided.explanation, decided.snapshot, decided.slot
    if slot is None and (node := explanation.node) is not None:
        slot = NodeSlot(node.id, node.name, explanation.replica_index)
    return PlacementRecord(
        kind=decided.kind,
        model_name=decided.model_name,
        operation_id=decided.operation_id,
        at=now,
        last_at=now,
        outcome=explanation.outcome,
        node_id=slot.node_id if slot else None,
        node_name=slot.node_name if slot else "",
        replica_index=slot.replica_index if slot else None,
        reason=explanation.sentence,
        facts=explanation.facts,
        base=snapshot.base if snapshot else None,
        position=snapshot.position if snapshot else None,
    )


def _build_eviction_record(decided: DecisionRecord, victim: Resident, now: datetime) -> PlacementRecord:
    row = _build_record(decided, now)
    row.kind, row.outcome = DecisionKind.EVICTION, DecisionOutcome.EVICTED
    row.reason = describe_eviction(decided.model_name, victim)
    row.model_name, row.replica_index = victim.model_name, victim.replica_index
    row.facts = {**FACTS_WITHOUT_FLEET, "for": decided.model_name}
    return row


def describe_eviction(model_name: str, victim: Resident) -> str:
    """Return why a replica is evicted for a load of `model_name`."""
    if victim.in_flight:
        return f"makes room for {model_name} when its requests have ended: its least time is over"
    return (
        f"makes room for {model_name}: idle since {victim.last_used:%Y-%m-%d %H:%M:%S} UTC,"
        " the least recently used of what may go there"
    )


def _repeats_last_record(decided: DecisionRecord, now: datetime) -> bool:
    """Return True if the load's last record has this outcome and these reasons; update its figures."""
    explanation = decided.explanation
    of_load = PlacementRecord.objects.filter(operation_id=decided.operation_id).order_by("-id")
    last = of_load.values("id", "kind", "outcome", "reason", "facts__refused").first()
    if last is None or (last["kind"], last["outcome"]) != (decided.kind, explanation.outcome):
        return False
    kinds = _reason_codes(explanation.facts["refused"])
    if last["reason"] == explanation.sentence:
        return True
    if not kinds or kinds != _reason_codes(last["facts__refused"]):
        return False
    row = _build_record(decided, now)
    PlacementRecord.objects.filter(pk=last["id"]).update(
        **{name: getattr(row, name) for name in _UPDATED_COLUMNS}
    )
    return True


def _reason_codes(refused: list[dict[str, Any]]) -> set[str]:
    return {refusal["code"] for refusal in refused}
