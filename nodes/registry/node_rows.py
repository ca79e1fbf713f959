"""Nodes and the results of approvals in the shapes of REST, the feed and the command line (`shape.py`).

Rows are read without model instances, in a constant number of queries for any number of nodes.
"""

from collections.abc import Sequence
from uuid import UUID

import orjson
from django.db import connection
from django.db.models import Case, TextField, Value, When
from django.db.models.expressions import RawSQL

from localai_cluster import __version__
from localai_cluster.kit.leases import as_array
from localai_cluster.web.shapes import TEXT, Row, Shape, Time, count, field, text
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.models import BackendNode, NodeEvent, NodeLabel, NodeModel
from nodes.models.node import STATES_COUNTED_IN_FLIGHT, BackendNodeQuerySet
from nodes.registry import shape
from nodes.registry.lifecycle import Approval, ApprovalResult
from nodes.registry.shape import NODE_STATUS, NODE_TYPE_SCHEMA
from nodes.replicas import reserved_memory

_ROW_VERSION_SQL = "{0}.xmin::text || {0}.ctid::text || (SELECT pg_postmaster_start_time()::text)"
"""SQL of a row's version: its last transaction, its physical position (ctid), and the server's start time.

Every write changes the transaction and the position; another server may repeat both.
"""
_ID_FILTER_SQL = "(%(ids)s::uuid[] IS NULL OR node_id = ANY(%(ids)s))"
_ROW_PARTS_SQL = f"""
    SELECT n.id::text, {_ROW_VERSION_SQL.format("n")}, concat(
        ',"model_count":', coalesce(loaded, 0), ',"in_flight_count":', coalesce(running, 0),
        ',"labels":' || labels, ',"open_conflicts":' || claims, '}}')
    FROM backend_nodes n
    LEFT JOIN (SELECT node_id, count(*) FILTER (WHERE state = 'loaded') AS loaded, sum(in_flight) AS running
        FROM node_models WHERE state = ANY(%(counted)s) AND {_ID_FILTER_SQL}
        GROUP BY node_id) m ON m.node_id = n.id
    LEFT JOIN (SELECT node_id, json_object_agg(key, value)::text AS labels
        FROM node_labels WHERE {_ID_FILTER_SQL} GROUP BY node_id) l ON l.node_id = n.id
    LEFT JOIN (SELECT node_id, count(*) AS claims
        FROM node_conflicts WHERE state = 'open' AND {_ID_FILTER_SQL} GROUP BY node_id) c ON c.node_id = n.id
    WHERE %(ids)s::uuid[] IS NULL OR n.id = ANY(%(ids)s)"""
"""SQL that returns, for each node, the version of its row and the last part of its list element as JSON."""
_MAX_CACHED_NODES = 20_000
_cached_rows: dict[str, tuple[str, str]] = {}
"""By node id: the version of its row, and the first part of its list element as JSON (about a kilobyte)."""


def list_json(nodes: BackendNodeQuerySet, *, whole: bool) -> list[orjson.Fragment]:
    """Return the list elements of these nodes as JSON, in their order.

    `whole` is True if `nodes` are all nodes. Only rows that were written since the last list are read again;
    labels and counts are always read.
    """
    ids = list(nodes.values_list(text("id"), flat=True))
    parts = _read_parts(None if whole else ids)
    known = [(id, _cached_rows.get(id, ("", ""))) for id in parts]
    current = {id: cached for id, cached in known if cached[0] == parts[id][0]}
    if len(current) < len(parts):
        changed = BackendNode.objects.filter(pk__in=as_array(map(UUID, parts.keys() - current.keys())))
        version = RawSQL(_ROW_VERSION_SQL.format("backend_nodes"), (), TextField())
        for *values, written in changed.values_list(*shape.NODE_SHAPE.columns.values(), version):
            row = shape.NODE_SHAPE.row(values)
            row |= {"version_skew": difference} if (difference := version_skew_of(row)) else {}
            current[row["id"]] = written, orjson.dumps(row)[:-1].decode()
        if len(_cached_rows) > _MAX_CACHED_NODES:
            _cached_rows.clear()
        _cached_rows.update(current)
    # A node may have been added or removed meanwhile.
    return [orjson.Fragment(current[id][1] + parts[id][1]) for id in ids if id in current and id in parts]


def _read_parts(ids: list[str] | None) -> dict[str, tuple[str, str]]:
    """Return the version of each node's row and the end of its list element, by id; None = of all nodes."""
    with connection.cursor() as cursor:
        cursor.execute(_ROW_PARTS_SQL, {"ids": ids, "counted": list(STATES_COUNTED_IN_FLIGHT)})
        return {id: (version, end) for id, version, end in cursor}


def list_rows(nodes: BackendNodeQuerySet, *, of: Shape = shape.NODE_SHAPE) -> list[Row]:
    """Return these nodes in the shape `of`, in their order."""
    rows = of.rows(nodes)
    parts = _read_parts([row["id"] for row in rows])
    for row in rows:
        # A node may have been removed meanwhile.
        _, end = parts.get(row["id"], ("", ',"model_count":0,"in_flight_count":0}'))
        row |= orjson.loads("{" + end.removeprefix(","))
        if difference := version_skew_of(row):
            row["version_skew"] = difference
    return rows


def version_skew_of(row: Row) -> str:
    """Return how the worker's version differs from the server's; `row` is a node in any of its shapes."""
    weak = bool(row.get("weak_identity"))
    return version_skew(row["node_type"], row.get("worker_version", ""), weak=weak)


def detail_row(node_id: UUID) -> Row | None:
    """Return a node as in the list, with the facts that determine its status; None for an unknown node.

    `labels` is always an object (R1.107).
    """
    rows = list_rows(BackendNode.objects.filter(pk=node_id), of=shape.NODE_DETAIL_SHAPE)
    if not rows:
        return None
    sources = dict(NodeLabel.objects.filter(node=node_id).values_list("key", "source"))
    row: Row = {"labels": {}} | rows[0] | {"label_sources": sources, "gpus": _read_gpus(node_id)}
    return shape.NODE_DETAIL_SHAPE.of(**row, overrides=_read_overrides(node_id, row))


def _read_gpus(node_id: UUID) -> list[Row]:
    node = BackendNode.objects.values("gpus", "vram_read_at").filter(pk=node_id).first()
    if node is None or not node["gpus"]:
        return []
    reservations = reserved_memory.by_node(NodeModel.engines.filter(node_id=node_id))
    return reserved_memory.shown_gpus(node, reservations.get(node_id, []))


def _read_overrides(node_id: UUID, node: Row) -> Row:
    """Return who set each override and when, as far as the timeline still has the events."""
    overridden = [
        name
        for name in shape.OVERRIDES_SHAPE.fields
        if node.get(f"{name}_manually_set", bool(node.get(name)))
    ]
    override_events = NodeEvent.objects.filter(node_id=node_id, kind=NodeEvent.Kind.OVERRIDE)
    override_events = override_events.annotate(
        what=Case(*(When(detail__has_key=name, then=Value(name)) for name in overridden), default=Value(""))
    )
    latest = override_events.order_by("what", "-id").distinct("what").values_list("what", "actor", Time("at"))
    author_by_name = {name: shape.OVERRIDE_SHAPE.of(by=by, at=at) for name, by, at in latest}
    return shape.OVERRIDES_SHAPE.of(
        **{name: author_by_name.get(name) or shape.OVERRIDE_SHAPE.of(by="", at=None) for name in overridden}
    )


STOCK_WORKER_SKEW = "stock worker"


def version_skew(node_type: str, worker_version: str, *, weak: bool) -> str:
    """Return how the worker's version differs from the server's; "" if it does not, or is unknown.

    A node without a secret of its own is a stock worker: our workers always have one.
    """
    if node_type == "agent":
        return ""
    if worker_version:
        return "" if worker_version == __version__ else f"worker {worker_version}, server {__version__}"
    return STOCK_WORKER_SKEW if weak else ""


APPROVAL_SHAPE = Shape(
    "Approved",
    "The answer to an approval; an agent's token is shown this once.",
    [
        field("id", UUID_SCHEMA),
        field("name", TEXT),
        field("node_type", NODE_TYPE_SCHEMA.ref),
        field("status", NODE_STATUS.ref),
        field("message", TEXT),
        field("api_token", TEXT, optional=True),
    ],
)
APPROVAL_RESULT_SHAPE = Shape(
    "Outcome",
    "What became of one of them; `name` and `status` if it worked, otherwise `error`.",
    [
        field("id", UUID_SCHEMA),
        field("name", TEXT, optional=True),
        field("status", NODE_STATUS.ref, optional=True),
        field("api_token", TEXT, "An agent's, shown this once.", optional=True),
        field("error", TEXT, optional=True),
    ],
)
APPROVAL_RESULTS_SHAPE = Shape(
    "Outcomes",
    "How many were approved, and each in the order of the request.",
    [field("approved", count()), field("results", APPROVAL_RESULT_SHAPE.many)],
)


def approval_body(approval: Approval) -> Row:
    """Return the response to one approval."""
    node = approval.node
    return APPROVAL_SHAPE.of_object(node, message="node approved", api_token=approval.api_token)


def approvals_body(results: Sequence[ApprovalResult]) -> Row:
    """Return the response to several approvals."""
    rows = [APPROVAL_RESULT_SHAPE.of_object(result) for result in results]
    return APPROVAL_RESULTS_SHAPE.of(approved=sum(not result.error for result in results), results=rows)
