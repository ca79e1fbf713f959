"""The fleet as input of placement: read from the database, or from an in-process cache.

The cache reads only the nodes whose rows were written or deleted since its last refresh: one statement finds
these nodes, and one statement per table reads their rows. The rows are authoritative: `slots.reserve`
verifies a decision under the node's lock. Concurrent loads share a refresh.

A row counts as changed if the previous refresh may not have seen the transaction that wrote it: `xmin` is the
number of that transaction, for every writer and every statement. Reading a row twice does no harm. The row
count reveals a deleted row, one refresh later at most.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from django.db import connection
from django.db.models import Count, Model

from nodes.models import BackendNode, NodeLabel, NodeModel, Phase, PhaseReason
from nodes.placement.choose import ANY_NODE, Candidate, Decision, Selector
from nodes.placement.explain import FleetView
from nodes.placement.memory import (
    CLOCK_TOLERANCE,
    NEVER,
    FreeByGpu,
    MemoryReading,
    Reservation,
    is_in_reading,
    unallocated_bytes,
    unallocated_on_gpu,
)
from nodes.placement.ranking import ModelFacts, RankedFleet

R = TypeVar("R")
_MAX_XID_DISTANCE = 2**30
"""Maximum number of transactions between two refreshes, because 32-bit numbers wrap around."""
_NODE_COLUMNS = (
    *("id", "name", "node_type", "status", "max_replicas_per_model"),
    *("available_vram", "reserved_vram", "vram_read_at", "vram_budget_bytes", "gpus"),
    *("returned_vram", "returned_beside", "total_vram"),
    *("total_disk", "available_disk", "file_port_error", "disk_quota_bytes"),
)


class _Replica(NamedTuple):
    model_name: str
    replica_index: int
    phase: str
    reason: str
    in_flight: int
    vram_needed: int
    vram_seen: int
    vram_seen_at: datetime | None
    loaded_at: datetime | None
    gpus: Sequence[Mapping[str, Any]]

    @property
    def is_serving(self) -> bool:
        return self.phase == Phase.SERVING

    @property
    def occupies_slot(self) -> bool:
        """Return True if the replica counts toward its node's limit (`NodeModelQuerySet.occupying`)."""
        ended = (self.phase, self.reason) == (Phase.STOPPING, PhaseReason.LOAD_FAILED)
        return self.phase != Phase.DEPARTED and not ended


RESERVATION_COLUMNS = _Replica._fields[5:]
"""Columns of a replica that `reservation` takes, in the order of its arguments."""


def reservation(
    needed: int,
    seen: int,
    seen_at: datetime | None,
    loaded_at: datetime | None,
    gpus: Sequence[Mapping[str, Any]],
) -> Reservation:
    """Return the reservation of a replica, from the columns in `RESERVATION_COLUMNS`."""
    shares = {gpu["index"]: (gpu["bytes"], gpu["seen"]) for gpu in gpus}
    shown_at = None if loaded_at is None else loaded_at + CLOCK_TOLERANCE
    return Reservation(needed, seen, seen_at or NEVER, shown_at, shares)


def effectively_free_bytes(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> int:
    """Return the bytes that are neither used nor reserved (R1.51); `node` has the node's columns."""
    ceiling: int = node["vram_budget_bytes"]
    available: int = node["available_vram"]
    if node["returned_beside"] is not None and node["returned_beside"] == node["vram_read_at"]:
        available += node["returned_vram"]
        available = min(available, ceiling) if ceiling else available
    reading = MemoryReading(available, node["vram_read_at"] or NEVER, ceiling)
    reserved: int = max(node["reserved_vram"], unallocated_bytes(reservations, reading))
    return available - reserved


def max_free_bytes(node: Mapping[str, Any]) -> int:
    """Return the bytes that are free on the node when nothing is loaded; 0 = not reported."""
    total: int = node["total_vram"]
    return min(total, node["vram_budget_bytes"] or total)


def gpu_totals(node: Mapping[str, Any]) -> FreeByGpu:
    """Return the total bytes of each GPU of the node, by index."""
    return frozenset((gpu["index"], gpu["total_vram"]) for gpu in node["gpus"])


def free_by_gpu(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> FreeByGpu:
    """Return the bytes of each GPU that are neither used nor reserved, by index."""
    reserved = reserved_on_gpus(node, reservations)
    return frozenset((gpu["index"], gpu["free_vram"] - reserved[gpu["index"]]) for gpu in node["gpus"])


def reserved_on_gpus(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> dict[int, int]:
    """Return the reserved bytes of each GPU that the node's last reading does not show, by index."""
    read_at = node["vram_read_at"] or NEVER
    return {
        gpu["index"]: unallocated_on_gpu(reservations, gpu["index"], MemoryReading(gpu["free_vram"], read_at))
        if reservations
        else 0
        for gpu in node["gpus"]
    }


# A load records the files of its model as they arrive; until its end the row of its replica holds the bytes
# of all of them. So two loads never count on the same bytes of a quota or of the free disk: each adds its row
# under the node's lock. Replicas of one model share its files.
_READ_FILES_SQL = f"""
WITH quota AS (SELECT id FROM backend_nodes WHERE disk_quota_bytes > 0),
active AS (SELECT node_id, model_name, files_needed FROM node_models
    WHERE phase IN ('{Phase.RESERVED}', '{Phase.STAGING}') AND files_needed > 0),
files AS (
    SELECT node_id, model_name, max(size) AS size, max(staged) AS staged,
           greatest(max(loading) - max(staged), 0) AS missing
      FROM (SELECT node_id, model_name, size, size AS staged, 0 AS loading FROM brought_models
             UNION ALL
            SELECT node_id, model_name, files_needed, 0, files_needed FROM active) AS file
     WHERE (%(nodes)s::uuid[] IS NULL OR node_id = ANY(%(nodes)s))
       AND (model_name = ANY(%(models)s) OR node_id IN (TABLE quota)
            OR node_id IN (SELECT node_id FROM active))
     GROUP BY node_id, model_name)
SELECT node_id, model_name, size, staged, missing FROM files WHERE model_name = ANY(%(models)s)
 UNION ALL
SELECT node_id, NULL, CASE WHEN node_id IN (TABLE quota) THEN sum(size)::bigint END, 0, sum(missing)::bigint
  FROM files
 WHERE node_id IN (TABLE quota) OR missing > 0 GROUP BY node_id
"""


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one model's files on a node: files on it (`staged`), and with active loads (`total`).

    `missing` are the bytes that active loads have yet to send.
    """

    staged: int
    total: int
    missing: int


@dataclass(frozen=True)
class FileBytes:
    """Bytes of the models' files by model and node, and of all models on nodes with a quota (`totals`).

    `missing` are the bytes that active loads of all models have yet to send.
    """

    models: Mapping[str, Mapping[UUID, ModelBytes]]
    totals: Mapping[UUID, int]
    missing: Mapping[UUID, int]

    def staged_by_node(self, model_name: str) -> dict[UUID, int]:
        """Return the bytes of the model's files on each node that has such files."""
        return {id: size.staged for id, size in self.models[model_name].items() if size.staged}

    def other_models_by_node(self, model_name: str, node_ids: Collection[UUID]) -> dict[UUID, int]:
        """Return the bytes of other models' files on each of these nodes that has a quota."""
        own = self.models[model_name]
        return {
            id: self.totals[id] - (own[id].total if id in own else 0) for id in node_ids if id in self.totals
        }

    def promised_by_node(self, model_name: str) -> dict[UUID, int]:
        """Return the free bytes of each node that active loads of other models will take."""
        own = self.models[model_name]
        promised = {id: size - (own[id].missing if id in own else 0) for id, size in self.missing.items()}
        return {id: size for id, size in promised.items() if size}


def read_file_bytes(model_names: Collection[str], node_ids: Collection[UUID] | None = None) -> FileBytes:
    """Read the bytes of the models' files on these nodes; None = all nodes. One query."""
    models: dict[str, dict[UUID, ModelBytes]] = {name: {} for name in model_names}
    totals: dict[UUID, int] = {}
    all_missing: dict[UUID, int] = {}
    parameters = {"models": list(models), "nodes": None if node_ids is None else list(node_ids)}
    with connection.cursor() as cursor:
        cursor.execute(_READ_FILES_SQL, parameters)
        for node_id, name, size, staged, missing in cursor.fetchall():
            if name is not None:
                models[name][node_id] = ModelBytes(staged, size, missing)
                continue
            all_missing[node_id] = missing
            if size is not None:
                totals[node_id] = size
    return FileBytes(models, totals, all_missing)


class _TableCopy(Generic[R]):
    """Copy of one table's rows, by node."""

    def __init__(
        self, model: type[Model], node: str, columns: Sequence[str], row: Callable[[Iterable[Any]], R]
    ) -> None:
        self._queryset = model._base_manager.order_by()
        self._node, self._columns, self._row = node, columns, row
        self._count = 0
        self.by_node: dict[UUID, list[R]] = {}

    def read(self, node_ids: Collection[UUID] | None = None) -> set[UUID]:
        """Read the rows of these nodes (None = all) into the empty copy; return the ids of the nodes."""
        queryset = self._queryset
        if node_ids is not None:
            queryset = queryset.filter(**{f"{self._node}__in": node_ids})
            for id in node_ids:
                self._count -= len(self.by_node.pop(id, ()))
        for id, *columns in queryset.values_list(self._node, *self._columns):
            self.by_node.setdefault(id, []).append(self._row(columns))
            self._count += 1
        return set(node_ids or ())

    def refresh(self, total: int, written: Collection[UUID] | None) -> set[UUID]:
        """Read the rows of nodes with written or deleted rows again; return the ids of these nodes."""
        changed = self.read(written) if written else set()
        if self._count != total:
            counts = dict(self._queryset.values_list(self._node).annotate(Count("pk")))
            deleted = [id for id, rows in self.by_node.items() if counts.get(id) != len(rows)]
            changed |= self.read(deleted)
        return changed


class _Rows:
    """Copies of the rows that placement reads."""

    def __init__(self) -> None:
        self._nodes = _TableCopy(BackendNode, "id", _NODE_COLUMNS, tuple)
        self._labels = _TableCopy(NodeLabel, "node_id", ("key", "value"), tuple)
        self._replicas = _TableCopy(NodeModel, "node_id", _Replica._fields, _Replica._make)
        self._nodes_by_model: defaultdict[str, set[UUID]] = defaultdict(set)
        """Nodes with replicas of a model; also former ones until `_replicas_of_models` removes them."""

    def read(self, node_ids: Collection[UUID] | None = None) -> list[Candidate]:
        """Read the rows of these nodes; None = all nodes. Return the nodes."""
        for table in (self._nodes, self._labels, self._replicas):
            table.read(node_ids)
        return [self.candidate(id) for id in self._nodes.by_node]

    def refresh(self, counts: Sequence[Any]) -> dict[UUID, Candidate | None]:
        """Read changed rows again. Return the changed nodes by id; None for a deleted node."""
        changed = self._nodes.refresh(*counts[:2]) | self._labels.refresh(*counts[2:4])
        changed |= self._replicas.refresh(*counts[4:])
        return {id: self.candidate(id) if id in self._nodes.by_node else None for id in changed}

    def candidate(self, id: UUID) -> Candidate:
        """Return the node as a candidate with all labels, without facts that depend on a model."""
        row = dict(zip(_NODE_COLUMNS, self._nodes.by_node[id][0], strict=True))
        replicas = self._replicas.by_node.get(id, ())
        for replica in replicas:
            self._nodes_by_model[replica.model_name].add(id)
        reserving = [replica for replica in replicas if replica.vram_needed > 0]
        if all(is_in_reading(replica.loaded_at, row["vram_read_at"]) for replica in reserving):
            reserving = []  # saves the computation
        reservations = [reservation(*replica[5:]) for replica in reserving]
        return Candidate(
            id=id,
            name=row["name"],
            node_type=row["node_type"],
            status=row["status"],
            free_vram=effectively_free_bytes(row, reservations),
            loaded=sum(replica.is_serving for replica in replicas),
            in_flight=sum(replica.in_flight for replica in replicas),
            used_indices=frozenset(),
            slots=row["max_replicas_per_model"],
            labels=frozenset((key, value) for key, value in self._labels.by_node.get(id, ())),
            available_vram=row["available_vram"],
            most_vram=max_free_bytes(row),
            card_vram=row["total_vram"] // max(len(row["gpus"]), 1),
            total_disk=row["total_disk"],
            available_disk=row["available_disk"],
            disk_quota=row["disk_quota_bytes"],
            file_port_failed=bool(row["file_port_error"]),
            gpus=free_by_gpu(row, reservations),
            gpu_totals=gpu_totals(row),
        )

    def model_facts(
        self,
        model_name: str,
        conflicts: Collection[str],
        staged_bytes: Mapping[UUID, int],
        other_models_bytes: Mapping[UUID, int],
        promised_bytes: Mapping[UUID, int],
    ) -> ModelFacts:
        """Return the facts about nodes that depend on the model; `conflicts` share a group with it."""
        occupied = {
            id: frozenset(replica.replica_index for replica in replicas if replica.occupies_slot)
            for id, replicas in self._replicas_of_models([model_name])
        }
        conflicting = {
            id: frozenset(replica.model_name for replica in replicas if replica.is_serving)
            for id, replicas in self._replicas_of_models(conflicts)
        }
        return ModelFacts(occupied, conflicting, staged_bytes, other_models_bytes, promised_bytes)

    def _replicas_of_models(self, names: Collection[str]) -> list[tuple[UUID, list[_Replica]]]:
        found: dict[UUID, list[_Replica]] = {}
        for name in names:
            for id in tuple(self._nodes_by_model.get(name, ())):
                rows = self._replicas.by_node.get(id, ())
                replicas = [replica for replica in rows if replica.model_name == name]
                if replicas:
                    found.setdefault(id, []).extend(replicas)
                else:
                    self._nodes_by_model[name].discard(id)
        return list(found.items())


def read_fleet(
    model_name: str,
    *,
    selector: Selector = ANY_NODE,
    allowed_nodes: Collection[UUID] | None = None,
    excluded_nodes: Collection[UUID] = (),
    conflicts: Collection[str] = (),
) -> list[Candidate]:
    """Read the nodes as candidates for a replica, with the labels that `selector` tests. Four queries.

    `allowed_nodes=None` allows all nodes. `conflicts` are the models that share a concurrency group with the
    model.
    """
    rows = _Rows()
    nodes = [node for node in rows.read(allowed_nodes) if node.id not in excluded_nodes]
    files = read_file_bytes([model_name])
    facts = rows.model_facts(
        model_name,
        conflicts,
        files.staged_by_node(model_name),
        files.other_models_by_node(model_name, files.totals),
        files.promised_by_node(model_name),
    )
    return [replace(facts.of(node), labels=selector.tested_labels(node.labels)) for node in nodes]


class FleetQuestion(NamedTuple):
    """A model to place, with the models that share a concurrency group with it."""

    model_name: str
    conflicts: Collection[str]


def read_fleets(questions: Sequence[FleetQuestion]) -> list[list[Candidate]]:
    """Read the nodes as candidates for each question, with all labels.

    Four queries for any number of questions.
    """
    rows = _Rows()
    files = read_file_bytes([question.model_name for question in questions])
    nodes = [
        replace(node, other_models_bytes=files.totals[node.id]) if node.id in files.totals else node
        for node in rows.read()
    ]
    fleets = []
    for name, conflicts in questions:
        others = files.other_models_by_node(name, files.models[name])
        promised = files.promised_by_node(name)
        facts = rows.model_facts(name, conflicts, files.staged_by_node(name), others, promised)
        special = facts.used_indices.keys() | facts.conflicts.keys() | files.models[name].keys()
        special |= promised.keys()
        fleets.append([facts.of(node) if node.id in special else node for node in nodes])
    return fleets


class _Watermark(NamedTuple):
    """The state of the database when a refresh began: all transactions before `xid` had ended."""

    xid: int
    server: str
    counts: Sequence[Any]
    """For nodes, labels and replicas: the number of rows, and the ids of the nodes whose rows were written
    since the previous refresh."""

    def follows(self, previous: "_Watermark") -> bool:
        """Return True if both watermarks are of one running server and at most `_MAX_XID_DISTANCE` apart."""
        return previous.server == self.server and 0 <= self.xid - previous.xid < _MAX_XID_DISTANCE


def _changes_query(model: type[Model], node: str) -> str:
    is_recent = f"age({model._meta.db_table}.xmin) <= age(%s::text::xid)"
    return f"(SELECT count(*), array_agg({node}) FILTER (WHERE {is_recent}) FROM {model._meta.db_table})"


_READ_WATERMARK_SQL = f"""
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
       current_database() || pg_postmaster_start_time(), nodes.*, labels.*, replicas.*
  FROM {_changes_query(BackendNode, "id")} nodes, {_changes_query(NodeLabel, "node_id")} labels,
       {_changes_query(NodeModel, "node_id")} replicas
"""


class FleetCache:
    """The nodes and replicas as of the last refresh. Thread-safe."""

    def __init__(self) -> None:
        # Held while rows are read, so that the refreshes of this process run one after the other.
        self._lock = threading.Lock()
        self._refreshes = 0
        self._watermark: _Watermark | None = None
        self._rows, self._fleet = _Rows(), RankedFleet()

    def decide(
        self,
        model_name: str,
        view: FleetView,
        *,
        allowed_nodes: Collection[UUID] | None = None,
        excluded_nodes: Collection[UUID] = (),
        conflicts: Collection[str] = (),
    ) -> tuple[FleetView, Decision]:
        """Return the decision on these nodes, and `view` with the nodes that `read_fleet` would return."""
        if connection.in_atomic_block:  # rows that may be rolled back must not enter the cache
            nodes: Sequence[Candidate] = read_fleet(
                model_name,
                selector=view.selector,
                allowed_nodes=allowed_nodes,
                excluded_nodes=excluded_nodes,
                conflicts=conflicts,
            )
            return _decide_on(nodes, view)
        files = read_file_bytes([model_name]) if view.need.disk else FileBytes({model_name: {}}, {}, {})
        staged, others, promised = (
            files.staged_by_node(model_name),
            files.other_models_by_node(model_name, files.totals),
            files.promised_by_node(model_name),
        )
        refreshes = self._refreshes
        with self._lock:
            # A refresh that another thread began meanwhile is as good.
            if self._watermark is None or self._refreshes == refreshes:
                self._refreshes += 1
                self._refresh()
            facts = self._rows.model_facts(model_name, conflicts, staged, others, promised)
            full_view, decision = self._fleet.decide(view, facts)
        if allowed_nodes is None and not excluded_nodes:
            return full_view, decision
        nodes = [node for node in full_view.nodes if node.id not in excluded_nodes]
        return _decide_on([n for n in nodes if allowed_nodes is None or n.id in allowed_nodes], view)

    def _refresh(self) -> None:
        previous, self._watermark = self._watermark, None  # after a failure the next refresh reads all
        # `xmin` has the low 32 bits of the transaction number.
        since = previous.xid % 2**32 if previous is not None else 0
        with connection.cursor() as cursor:
            cursor.execute(_READ_WATERMARK_SQL, [since] * 3)
            xid, server, *counts = cursor.fetchone()
        watermark = _Watermark(xid, server, counts)
        if previous is not None and watermark.follows(previous):
            changed = self._rows.refresh(watermark.counts)
        else:
            self._rows, self._fleet = _Rows(), RankedFleet()
            changed = {node.id: node for node in self._rows.read()}
        for id, node in changed.items():
            if node is None:
                self._fleet.drop(id)
            else:
                self._fleet.put(node)
        self._watermark = watermark


def _decide_on(nodes: Sequence[Candidate], view: FleetView) -> tuple[FleetView, Decision]:
    full_view = replace(view, nodes=nodes)
    return full_view, full_view.decide()


CACHE = FleetCache()
"""The cache of this process."""
# The lock may be held by a thread that the child of a fork does not have.
os.register_at_fork(after_in_child=CACHE.__init__)  # type: ignore[misc]
