"""All nodes in the form of the live feed, from one snapshot with a constant number of queries.

The feed reads the nodes every second while there are watchers, and most nodes have not changed. So a node is
kept as the raw values of the queries, which compare at the speed of C. Only changed nodes are rendered in the
wire's form (`LIVE_NODE_SHAPE` in `nodes/registry/shape.py`). Every key is always present, so that a patch is
the set of changed keys.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

import orjson
from django.contrib.postgres.aggregates import JSONBAgg
from django.db.models import Aggregate, Count, F, TextField
from django.db.models.expressions import Combinable

from localai_cluster.web.shapes import Row, text
from nodes.models import BackendNode, NodeBackend, NodeConflict, NodeLabel, NodeModel, Phase
from nodes.models.node import STATES_COUNTED_IN_FLIGHT
from nodes.placement.memory import Reservation
from nodes.registry import actions
from nodes.registry.node_rows import version_skew_of
from nodes.registry.shape import LIVE_NODE_SHAPE, fact_column
from nodes.replicas import reserved_memory
from nodes.replicas.shape import LIVE_MODEL

LiveNode = dict[str, Any]

_STATUS_COLUMNS: Mapping[str, Combinable] = {
    "offline": fact_column("offline"),
    "unhealthy": fact_column("unhealthy"),
}
"""Columns by status, from which a node's `reason` and `since` follow."""
_GPU_COLUMNS: Mapping[str, Combinable] = {"gpus": text("gpus"), "vram_read_at": F("vram_read_at")}
"""Columns for the key `gpus`, which also has the bytes that loads have reserved on each GPU."""


class RawNode(NamedTuple):
    """The values of one node as the queries return them. Texts are JSON, "" for none."""

    columns: tuple[Any, ...]
    labels: str
    replicas: str
    backends: str
    open_conflicts: int
    reservations: tuple[Reservation, ...] = ()


def read_nodes() -> dict[str, RawNode]:
    """Return every node by id, in the order of names. It runs six queries in the caller's snapshot."""
    columns = (*LIVE_NODE_SHAPE.columns.values(), *_GPU_COLUMNS.values(), *_STATUS_COLUMNS.values())
    nodes = BackendNode.objects.order_by("name").values_list(*columns)
    reservations = reserved_memory.by_node(NodeModel.engines.all())
    labels, replicas, backends, conflicts = (
        _read_labels(),
        _read_replicas(),
        _read_backends(),
        _count_conflicts(),
    )
    return {
        (node := columns[0]): RawNode(
            columns,
            labels.get(node, ""),
            replicas.get(node, ""),
            backends.get(node, ""),
            conflicts.get(node, 0),
            tuple(reservations.get(UUID(node), ())) if reservations else (),
        )
        for columns in nodes
    }


class _LabelsJson(Aggregate):
    """SQL aggregate of the labels of a group as one JSON text."""

    # Half the price of `jsonb_object_agg`, which sorts the keys.
    template = "json_object_agg(%(expressions)s)::text"
    output_field = TextField()


def _ordered_json(values: Combinable, *columns: str) -> JSONBAgg:
    """Return the aggregate of a group as one JSON text, in this order: equal groups have equal texts."""
    return JSONBAgg(values, order_by=columns, output_field=TextField())


def _read_labels() -> dict[str, str]:
    grouped = NodeLabel.objects.order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=_LabelsJson(F("key"), F("value"))))


def _read_replicas() -> dict[str, str]:
    grouped = NodeModel.engines.order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=_ordered_json(LIVE_MODEL.made(), "model_name", "replica_index")))


def _read_backends() -> dict[str, str]:
    grouped = NodeBackend.objects.order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=_ordered_json(F("name"), "name")))


def _count_conflicts() -> dict[str, int]:
    grouped = NodeConflict.objects.filter(state="open").order_by().values_list(text("node_id"))
    return dict(grouped.annotate(found=Count("pk")))


def render(raw: RawNode) -> LiveNode:
    """Return the node in the form of the live feed (`LIVE_NODE_SHAPE`)."""
    node: LiveNode = LIVE_NODE_SHAPE.row(raw.columns)
    extra = dict(
        zip((*_GPU_COLUMNS, *_STATUS_COLUMNS), raw.columns[len(LIVE_NODE_SHAPE.columns) :], strict=True)
    )
    behind = {name: extra[name] for name in _STATUS_COLUMNS}
    gpu_reading = {"gpus": orjson.loads(extra["gpus"]), "vram_read_at": extra["vram_read_at"]}
    engines = [LIVE_MODEL.trimmed(model) for model in orjson.loads(raw.replicas or "[]")]
    models = [engine for engine in engines if engine["phase"] != Phase.DEPARTED]
    departed = [engine["deadline"] for engine in engines if engine["phase"] == Phase.DEPARTED]
    node["open_conflicts"] = raw.open_conflicts
    node["reason"], node["since"] = status_reason(node, behind)
    node["version_skew"] = version_skew_of(node)
    return LIVE_NODE_SHAPE.of(
        **node,
        gpus=reserved_memory.shown_gpus(gpu_reading, raw.reservations),
        labels=orjson.loads(raw.labels) if raw.labels else {},
        models=models,
        departed_engines=len(departed),
        departed_until=max(departed, default=None),
        model_count=sum(model["state"] == "loaded" for model in models),
        in_flight_count=sum(
            model["in_flight"] for model in models if model["state"] in STATES_COUNTED_IN_FLIGHT
        ),
        backends=orjson.loads(raw.backends) if raw.backends else [],
    )


def status_reason(node: LiveNode, behind: Mapping[str, str | None]) -> tuple[str, str | None]:
    """Return the reason and the beginning of the node's status, both empty for a healthy node."""
    status = node["status"]
    if status == "pending":
        return _pending_reason(node)
    if status == "draining":
        drain = node["drain"]
        by = "the worker" if drain["own"] else drain["by"]
        return _append_reason(f"{actions.DRAIN.done} by {by}", drain), drain["since"]
    if (fact_text := behind.get(status)) is None:
        return "", None
    fact = orjson.loads(fact_text)
    return fact["reason"], fact["at"]


def _pending_reason(node: LiveNode) -> tuple[str, str | None]:
    if (revoked := node["revoked"]) is not None:
        return _append_reason(f"secret revoked by {revoked['by']}", revoked), revoked["at"]
    if (rejected := node["rejected"]) is not None:
        return _append_reason(f"{actions.REJECT.done} by {rejected['by']}", rejected), rejected["at"]
    if conflicts := node["open_conflicts"]:
        claims = "another machine claims" if conflicts == 1 else f"{conflicts} other machines claim"
        return f"awaiting approval; {claims} to be this node", node["created_at"]
    return "awaiting approval", node["created_at"]


def _append_reason(sentence: str, fact: Row) -> str:
    return f"{sentence}: {fact['reason']}" if fact["reason"] else sentence
