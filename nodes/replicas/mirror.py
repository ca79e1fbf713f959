"""What placement sees of the fleet, kept in this process and followed from the rows.

`snapshot.fleet` reads every row for every decision. Here only those are read that were written since the last
look: one statement says whether there are any, and one for each of the three tables reads them. The rows are
the truth: `slots.reserve` proves a decision under the node's lock. Loads that ask at the same moment share a
look.

A row has changed if the transaction that wrote it may not have been visible to the look before: `xmin` is the
number of that transaction, whoever wrote the row and by whatever statement. What was read twice does no harm.
A row that was deleted is missed by the count, one look later at most.
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

from nodes.models import BackendNode, NodeLabel, NodeModel, Phase, PhaseReason
from nodes.placement.choose import Candidate, Decision
from nodes.placement.explain import FleetView
from nodes.placement.reservations import Reservation
from nodes.placement.standing import Own, StandingFleet
from nodes.replicas import snapshot, vram

_LONGEST_WAY = 2**30
"""Transactions; their numbers are compared by half of the 32 bits that a row has."""


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
    """Rows of a table: how many there are, and how many were written since the look before."""

    every: int
    written: int


class _Mark(NamedTuple):
    """Where a look began: all transactions before `xid` had ended then."""

    xid: int
    server: str
    nodes: _Count
    labels: _Count
    replicas: _Count

    def follows(self, before: "_Mark") -> bool:
        """Whether it is of the same server, not one that was restored or took over, and not too far on."""
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
    """It counts toward the limit of replicas of its node (`NodeModelQuerySet.occupying`)."""
    in_flight: int
    reservation: Reservation | None

    @classmethod
    def of(
        cls, _: UUID, node_id: UUID, name: str, slot: int, phase: str, reason: str, busy: int, *rest: Any
    ) -> Self:
        its = vram.reservation(*rest)
        occupies = phase != Phase.DEPARTED and (phase, reason) != (Phase.STOPPING, PhaseReason.LOAD_FAILED)
        serves = phase == Phase.SERVING
        return cls(node_id, name, slot, serves, occupies, busy, its if its.needed > 0 else None)


_NODE = tuple(name for name in snapshot.COLUMNS if name != "id")
_REPLICA = ("node_id", "model_name", "replica_index", "phase", "reason", "in_flight", *vram.RESERVING)

_Row = TypeVar("_Row", _Node, _Label, _Replica)


class _Copy(Generic[_Row]):
    """The rows of one table, by their keys and by what they belong to."""

    def __init__(self, model: type[Model], columns: Sequence[str], made: Callable[..., _Row]) -> None:
        self._model, self._columns = model, ("id", *columns)
        self._made: Callable[..., _Row] = made
        self.rows: dict[Any, _Row] = {}
        self._groups: defaultdict[UUID | str, set[Any]] = defaultdict(set)

    def of(self, group: UUID | str) -> list[_Row]:
        """Those of a node, or of a model."""
        return [self.rows[id] for id in self._groups.get(group, ())]

    def read(self, since: int | None, count: _Count) -> set[UUID]:
        """Reads what was written since, or all; answers the nodes that this is about."""
        if since is not None and count == (len(self.rows), 0):
            return set()
        written = every = self._model._base_manager.order_by()
        if since is not None:
            written = every.extra(where=[_recent(self._model)], params=[since])
        changed = set()
        for id, *columns in written.values_list(*self._columns):
            if id in self.rows:
                changed.add(self._drop(id))
            self.rows[id] = row = self._made(id, *columns)
            changed.add(row.node_id)
            for group in _groups(row):
                self._groups[group].add(id)
        if len(self.rows) != count.every:
            for id in self.rows.keys() - set(every.values_list("id", flat=True)):
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


class Mirror:
    """The fleet as the last look has seen it."""

    def __init__(self) -> None:
        # Of this process only, held while rows are read, so that looks follow each other.
        self._lock = threading.Lock()
        self._looks = 0
        self._mark: _Mark | None = None
        self._begin()

    def _begin(self) -> None:
        self._nodes = _Copy(BackendNode, _NODE, _Node.of)
        self._labels = _Copy(NodeLabel, ("node_id", "key", "value"), _Label.of)
        self._replicas = _Copy(NodeModel, _REPLICA, _Replica.of)
        self._fleet = StandingFleet()

    def decided(
        self,
        model_name: str,
        asked: FleetView,
        *,
        only: Collection[UUID] | None = None,
        besides: Collection[UUID] = (),
        conflicts: Collection[str] = (),
    ) -> tuple[FleetView, Decision]:
        """What is asked with the nodes that `snapshot.fleet` sees, and what placement makes of it."""
        if connection.in_atomic_block:  # what may be rolled back must not be followed
            fleet = snapshot.fleet(
                model_name, selector=asked.selector, only=only, besides=besides, conflicts=conflicts
            )
            return _plainly(asked, fleet)
        brought = snapshot.files_there(model_name) if asked.need.disk else {}
        asked_in = self._looks
        with self._lock:
            if self._mark is None or self._looks == asked_in:  # else a look has begun since: it is as good
                self._looks += 1
                self._follow()
            seen, decision = self._fleet.decide(asked, self._own(model_name, conflicts, brought))
        if only is None and not besides:
            return seen, decision
        allowed = (one for one in seen.nodes if one.id not in besides and (only is None or one.id in only))
        return _plainly(asked, list(allowed))

    def _own(self, model_name: str, conflicts: Collection[str], brought: Mapping[UUID, int]) -> Own:
        taken: dict[UUID, frozenset[int]] = {}
        for one in (one for one in self._replicas.of(model_name) if one.occupies):
            taken[one.node_id] = taken.get(one.node_id, frozenset()) | {one.slot}
        there: dict[UUID, frozenset[str]] = {}
        for one in (one for name in conflicts for one in self._replicas.of(name) if one.loaded):
            there[one.node_id] = there.get(one.node_id, frozenset()) | {one.model_name}
        return Own(taken, there, brought)

    def _follow(self) -> None:
        before, self._mark = self._mark, None  # whatever ends a look half-way, the next one begins again
        mark = _looked(before)
        if before is None or not mark.follows(before):
            self._begin()
            before = None
        since = _short(before) if before is not None else None
        changed = self._nodes.read(since, mark.nodes) | self._labels.read(since, mark.labels)
        for id in changed | self._replicas.read(since, mark.replicas):
            if id in self._nodes.rows:
                self._fleet.put(self._candidate(id))
            else:
                self._fleet.drop(id)
        self._mark = mark

    def _candidate(self, id: UUID) -> Candidate:
        replicas = self._replicas.of(id)
        plain = snapshot.candidate(
            self._nodes.rows[id].columns,
            [one.reservation for one in replicas if one.reservation is not None],
            loaded=sum(one.loaded for one in replicas),
            in_flight=sum(one.in_flight for one in replicas),
        )
        return replace(plain, labels=frozenset((one.key, one.value) for one in self._labels.of(id)))


def _looked(before: _Mark | None) -> _Mark:
    since = _short(before) if before is not None else 0
    with connection.cursor() as cursor:
        cursor.execute(_MARK, [since] * 3)
        xid, server, *counts = cursor.fetchone()
    return _Mark(xid, server, _Count(*counts[:2]), _Count(*counts[2:4]), _Count(*counts[4:]))


def _short(mark: _Mark) -> int:
    """The number as rows have it, in 32 bits."""
    return mark.xid % 2**32


def _plainly(asked: FleetView, nodes: Sequence[Candidate]) -> tuple[FleetView, Decision]:
    seen = replace(asked, nodes=nodes)
    return seen, seen.decide()


_shared = Mirror()


def shared() -> Mirror:
    """This process's."""
    return _shared


def _begin_again() -> None:
    global _shared
    _shared = Mirror()


# The lock may be held by a thread that the child of a fork does not have.
os.register_at_fork(after_in_child=_begin_again)
