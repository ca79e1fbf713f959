"""Define a scheduling rule on the wire (`contract/http-api.md` §2.12)."""

import json

from django.db.models import Count, F, Model, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce

from localai_cluster.web.shapes import FLAG, TEXT, TIME, UUID, Row, Shape, Time, column, count
from nodes.models import ModelSchedulingConfig, NodeModel, RoutePolicy
from operations.models import Operation

LOAD_KIND = "model_load"
"""Kind of the operation that loads a model (`nodes/loading/load.py`)."""
NUMBER = {"type": "number", "minimum": 0}


def _counted(rows: QuerySet[Model], model_column: str) -> Coalesce:
    """Count the rows that belong to the rule's model."""
    model_rows = rows.filter(**{model_column: OuterRef("model_name")}).order_by().values(model_column)
    return Coalesce(Subquery(model_rows.annotate(rows=Count("pk")).values("rows")), 0)


CURRENT = _counted(NodeModel.objects.serving(), "model_name")
LOADING = _counted(Operation.objects.active().filter(kind=LOAD_KIND), "element")
STATE = Shape(
    "SchedulingState",
    "What the last pass aims at and did, and what is there now. A rule that only routes has none.",
    [
        column("wanted", count(), "Replicas that the pass aims at.", source=F("wanted_replicas")),
        column("current", count(), "Loaded on healthy nodes now.", source=CURRENT),
        column("loading", count(), "Loads under way now.", source=LOADING),
        column("reason", TEXT, "What the pass did and why, or why it could not."),
        column("at", TIME, "When that was.", source=Time("looked_at")),
    ],
)
RULE = Shape(
    "SchedulingRule",
    "Where and how often a model shall run. What is left out is empty: no selector, or as the cluster does.",
    [
        column("id", UUID),
        column("model_name", TEXT),
        column(
            "node_selector", TEXT, 'JSON of the labels a node must have: `{"tier":"fast"}`.', optional=True
        ),
        column("min_replicas", count()),
        column("max_replicas", count(), "0 means no limit."),
        column("spread_all", FLAG, "One replica on every node that matches.", optional=True),
        column("route_policy", {"type": "string", "enum": RoutePolicy.values}, optional=True),
        column("balance_abs_threshold", count(), optional=True),
        column("balance_rel_threshold", NUMBER, optional=True),
        column("min_prefix_match", NUMBER, optional=True),
        column("unsatisfiable_until", TIME, "Nothing is tried for this model until then.", optional=True),
        column("unsatisfiable_ticks", count(), "Passes in a row that could not load what is wanted."),
        column("state", STATE.ref, source=STATE.read(unless_null="looked_at"), inner=STATE, optional=True),
        column("created_at", TIME),
        column("updated_at", TIME),
    ],
)


def rows(rules: QuerySet[ModelSchedulingConfig]) -> list[Row]:
    """Return the rules in wire form, by model name; one query."""
    return [_serialize(row) for row in RULE.rows(rules.order_by("model_name"))]


def _serialize(row: Row) -> Row:
    if "node_selector" in row:
        # The reference sends a text that holds JSON, with sorted keys and no blanks.
        row["node_selector"] = json.dumps(
            row["node_selector"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
    return row
