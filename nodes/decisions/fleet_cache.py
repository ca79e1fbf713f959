"""In-process cache of the fleet for placement decisions, refreshed from the rows that have changed.

`snapshot.fleet` reads every row for every decision. The cache reads only rows that were written since its
last refresh: one statement counts them, and one statement for each of the three tables reads them. The rows
are the truth: `slots.reserve` proves a decision under the node's lock. Concurrent loads share a refresh.

A row has changed if the transaction that wrote it may have been invisible to the previous refresh: `xmin` is
the number of that transaction, for every writer and every statement. Reading a row twice does no harm. The
row count reveals a deleted row, one refresh later at most.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Self, TypeVar
from uuid import UUID

from django.db import connection
from django.db.models import Model

from nodes.decisions import fleet_queries, reserved_memory
from nodes.models import BackendNode, NodeLabel, NodeModel, Phase, PhaseReason
from nodes.placement.choose import Candidate, Decision
from nodes.placement.explain import FleetView
from nodes.placement.memory import Reservation
from nodes.placement.ranking import ModelFacts, RankedFleet

_LONGEST_WAY = 2**30
"""Largest distance of two refreshes, in transactions: 32-bit numbers compare within half of their range."""


def _counted(model: type[Model]) -> str:
    return f"(SELECT count(*), count(*) FILTER (WHERE {_recent(model)}) FROM {model._meta.db_table})"


def _recent(model: type[Model]) -> str:
    return f"age({model._meta.db_table}.xmin) <= age(%s::text::xid)"


_MARK = f"""
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
       current_database() || pg_postmaster_start_time(), nodes.*, labels.*, replicas.*
  FROM {_counted(BackendNode)} nodes, {_counted(NodeLabel)} labels, {_counted(NodeModel)} replicas
"""


class _Count(NamedTuple):
    """Number of rows of a table: all of them, and those written since the previous refresh."""

    total: int
    written: int


class _Mark(NamedTuple):
    """State of the database when a refresh began: all transactions before `xid` had ended."""

    xid: int
    server: str
    nodes: _Count
    labels: _Count
    replicas: _Count

    def follows(self, before: "_Mark") -> bool:
        """Return True if both are of one server, not restored or failed over, and close enough."""
        return before.server == self.server and 0 <= self.xid - before.xid < _LONGEST_WAY


class _Node(NamedTuple):
    node_id: UUID
    columns: Mapping[str, Any]

    @classmethod
    def of(cls, id: UUID, *columns: Any) -> Self:
        return cls(id, {"id": id, **dict(zip(_NODE, columns, strict=True))})


class _Label(NamedTuple):
    node_id: UUID
    key: str
    value: str

    @classmethod
    def of(cls, _: int, *columns: Any) -> Self:
        return cls(*columns)


class _Replica(NamedTuple):
    node_id: UUID
    model_name: str
    slot: int
    loaded: bool
    occupies: bool
    """True if the replica counts toward the limit of its node (`NodeModelQuerySet.occupying`)."""
    in_flight: int
    reservation: Reservation | None

    @classmethod
    def of(
        cls, _: UUID, node_id: UUID, name: str, slot: int, phase: str, reason: str, busy: int, *memory: Any
    ) -> Self:
        reservation = reserved_memory.reservation(*memory)
        occupies = phase != Phase.DEPARTED and (phase, reason) != (Phase.STOPPING, PhaseReason.LOAD_FAILED)
        serves = phase == Phase.SERVING
        return cls(
            node_id, name, slot, serves, occupies, busy, reservation if reservation.needed > 0 else None
        )


_NODE = tuple(name for name in fleet_queries.COLUMNS if name != "id")
_REPLICA = (
    "node_id",
    "model_name",
    "replica_index",
    "phase",
    "reason",
    "in_flight",
    *reserved_memory.RESERVING,
)

_Row = TypeVar("_Row", _Node, _Label, _Replica)


class _Copy(Generic[_Row]):
    """The rows of one table, indexed by primary key and by group: the node and, for replicas, the model."""

    def __init__(self, model: type[Model], columns: Sequence[str], parse: Callable[..., _Row]) -> None:
        self._model, self._columns = model, ("id", *columns)
        self._parse: Callable[..., _Row] = parse
        self.rows: dict[Any, _Row] = {}
        self._groups: defaultdict[UUID | str, set[Any]] = defaultdict(set)

    def of(self, group: UUID | str) -> list[_Row]:
        """Return the rows of a node or of a model."""
        return [self.rows[id] for id in self._groups.get(group, ())]

    def read(self, since: int | None, count: _Count) -> set[UUID]:
        """Read the rows written since transaction `since`, or all if None; return the ids of their nodes."""
        if since is not None and count == (len(self.rows), 0):
            return set()
        written = all_rows = self._model._base_manager.order_by()
        if since is not None:
            written = all_rows.extra(where=[_recent(self._model)], params=[since])
        changed = set()
        for id, *columns in written.values_list(*self._columns):
            if id in self.rows:
                changed.add(self._drop(id))
            self.rows[id] = row = self._parse(id, *columns)
            changed.add(row.node_id)
            for group in _groups(row):
                self._groups[group].add(id)
        if len(self.rows) != count.total:
            for id in self.rows.keys() - set(all_rows.values_list("id", flat=True)):
                changed.add(self._drop(id))
        return changed

    def _drop(self, id: Any) -> UUID:
        row = self.rows.pop(id)
        for group in _groups(row):
            self._groups[group].discard(id)
            if not self._groups[group]:
                del self._groups[group]
        return row.node_id


def _groups(row: _Node | _Label | _Replica) -> tuple[UUID | str, ...]:
    return (row.node_id, row.model_name) if isinstance(row, _Replica) else (row.node_id,)


class FleetCache:
    """The fleet as of the last refresh. Thread-safe."""

    def __init__(self) -> None:
        # Held while rows are read, so that the refreshes of this process run one after the other.
        self._lock = threading.Lock()
        self._refreshes = 0
        self._mark: _Mark | None = None
        self._reset()

    def _reset(self) -> None:
        self._nodes = _Copy(BackendNode, _NODE, _Node.of)
        self._labels = _Copy(NodeLabel, ("node_id", "key", "value"), _Label.of)
        self._replicas = _Copy(NodeModel, _REPLICA, _Replica.of)
        self._fleet = RankedFleet()

    def decided(
        self,
        model_name: str,
        view: FleetView,
        *,
        only: Collection[UUID] | None = None,
        besides: Collection[UUID] = (),
        conflicts: Collection[str] = (),
    ) -> tuple[FleetView, Decision]:
        """Return `view` with the nodes that `snapshot.fleet` would read, and the decision on it."""
        if connection.in_atomic_block:  # rows that may be rolled back must not enter the cache
            fleet = fleet_queries.read_fleet(
                model_name, selector=view.selector, only=only, besides=besides, conflicts=conflicts
            )
            return _decide_uncached(view, fleet)
        file_bytes = fleet_queries.model_file_bytes(model_name) if view.need.disk else {}
        refreshes = self._refreshes
        with self._lock:
            if (
                self._mark is None or self._refreshes == refreshes
            ):  # a refresh that began meanwhile is as good
                self._refreshes += 1
                self._refresh()
            full_view, decision = self._fleet.decide(view, self._own(model_name, conflicts, file_bytes))
        if only is None and not besides:
            return full_view, decision
        allowed_nodes = (
            node for node in full_view.nodes if node.id not in besides and (only is None or node.id in only)
        )
        return _decide_uncached(view, list(allowed_nodes))

    def _own(self, model_name: str, conflicts: Collection[str], file_bytes: Mapping[UUID, int]) -> ModelFacts:
        occupied_slots: dict[UUID, frozenset[int]] = {}
        for row in (row for row in self._replicas.of(model_name) if row.occupies):
            occupied_slots[row.node_id] = occupied_slots.get(row.node_id, frozenset()) | {row.slot}
        conflicting_models: dict[UUID, frozenset[str]] = {}
        for row in (row for name in conflicts for row in self._replicas.of(name) if row.loaded):
            models = conflicting_models.get(row.node_id, frozenset())
            conflicting_models[row.node_id] = models | {row.model_name}
        return ModelFacts(occupied_slots, conflicting_models, file_bytes)

    def _refresh(self) -> None:
        before, self._mark = (
            self._mark,
            None,
        )  # after a refresh that fails half-way the next one reads all rows
        mark = _read_mark(before)
        if before is None or not mark.follows(before):
            self._reset()
            before = None
        since = _xid32(before) if before is not None else None
        changed = self._nodes.read(since, mark.nodes) | self._labels.read(since, mark.labels)
        for id in changed | self._replicas.read(since, mark.replicas):
            if id in self._nodes.rows:
                self._fleet.put(self._candidate(id))
            else:
                self._fleet.drop(id)
        self._mark = mark

    def _candidate(self, id: UUID) -> Candidate:
        replicas = self._replicas.of(id)
        candidate = fleet_queries.candidate(
            self._nodes.rows[id].columns,
            [row.reservation for row in replicas if row.reservation is not None],
            loaded=sum(row.loaded for row in replicas),
            in_flight=sum(row.in_flight for row in replicas),
        )
        labels = frozenset((label.key, label.value) for label in self._labels.of(id))
        return replace(candidate, labels=labels)


def _read_mark(before: _Mark | None) -> _Mark:
    since = _xid32(before) if before is not None else 0
    with connection.cursor() as cursor:
        cursor.execute(_MARK, [since] * 3)
        xid, server, *counts = cursor.fetchone()
    return _Mark(xid, server, _Count(*counts[:2]), _Count(*counts[2:4]), _Count(*counts[4:]))


def _xid32(mark: _Mark) -> int:
    """Return the low 32 bits of the transaction number, as `xmin` has it."""
    return mark.xid % 2**32


def _decide_uncached(view: FleetView, nodes: Sequence[Candidate]) -> tuple[FleetView, Decision]:
    full_view = replace(view, nodes=nodes)
    return full_view, full_view.decide()


_shared = FleetCache()


def shared_cache() -> FleetCache:
    """Return the cache of this process."""
    return _shared


def _replace_after_fork() -> None:
    global _shared
    _shared = FleetCache()


# The lock may be held by a thread that the child of a fork does not have.
os.register_at_fork(after_in_child=_replace_after_fork)
