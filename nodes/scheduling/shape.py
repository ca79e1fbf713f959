"""What a scheduling rule looks like on the wire (`contract/http-api.md` §2.12)."""

import json

from django.db.models import QuerySet

from localai_cluster.web.shapes import FLAG, TEXT, TIME, UUID, Row, Shape, column, count
from nodes.models import ModelSchedulingConfig, RoutePolicy

NUMBER = {"type": "number", "minimum": 0}
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
        column("unsatisfiable_ticks", count()),
        column("created_at", TIME),
        column("updated_at", TIME),
    ],
)


def rows(found: QuerySet[ModelSchedulingConfig]) -> list[Row]:
    """The rules, by model name; one query."""
    return [_told(row) for row in RULE.rows(found.order_by("model_name"))]


def _told(row: Row) -> Row:
    if "node_selector" in row:
        # The reference sends a text that holds JSON, with sorted keys and no blanks.
        row["node_selector"] = json.dumps(
            row["node_selector"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
    return row
