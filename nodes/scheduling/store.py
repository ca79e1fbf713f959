"""Scheduling rules in the database: their wire form (`contract/http-api.md` §2.12), and their writers.

Each change, its audit entry and its NOTIFY are one transaction. Setting a rule is one INSERT … ON CONFLICT,
so two writers of one model's rule run one after the other and both succeed. Setting a rule never changes the
flags of a cooldown (R1.85); `passes.clear_cooldowns` does.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime

from django.db import transaction
from django.db.models import Count, F, Model, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit import names
from localai_cluster.kit.errors import Conflict
from localai_cluster.web.shapes import (
    EXAMPLE_TIME,
    FLAG,
    NUMBER,
    TEXT,
    TIME,
    UUID,
    Row,
    Shape,
    Time,
    column,
    count,
)
from nodes.models import ModelSchedulingConfig, NodeModel, RoutePolicy
from nodes.scheduling.rules import Rule, check_rule
from operations.changes.events import notify
from operations.models import Operation

LOAD_KIND = "model_load"
"""Kind of the operation that loads a model (`nodes/loading/load.py`)."""


def _count_by_model(rows: QuerySet[Model], model_column: str) -> Coalesce:
    """Return a subquery that counts the rows of a rule's model."""
    model_rows = rows.filter(**{model_column: OuterRef("model_name")}).order_by().values(model_column)
    return Coalesce(Subquery(model_rows.annotate(rows=Count("pk")).values("rows")), 0)


CURRENT_COUNT = _count_by_model(NodeModel.objects.serving(), "model_name")
LOADING_COUNT = _count_by_model(Operation.objects.active().filter(kind=LOAD_KIND), "element")
RULE_STATE_SHAPE = Shape(
    "SchedulingState",
    "The target and result of the last pass, and the present replicas. A rule that only routes has no state.",
    [
        column("wanted", count(), "Replicas that the pass aims at.", example=1, source=F("wanted_replicas")),
        column("current", count(), "Loaded on healthy nodes now.", example=0, source=CURRENT_COUNT),
        column("loading", count(), "Loads under way now.", example=0, source=LOADING_COUNT),
        column(
            "reason",
            TEXT,
            "What the pass did and why, or why it could not.",
            example="1 wanted, 0 running, 0 loading: starting 1",
        ),
        column("at", TIME, "When that was.", example=EXAMPLE_TIME, source=Time("checked_at")),
    ],
)
RULE_SHAPE = Shape(
    "SchedulingRule",
    "Nodes and replicas of a model. Omitted fields are empty: no selector, or the cluster default.",
    [
        column("id", UUID, example="5f0f5b3e-52a4-4a47-8d52-0c9a3c1d7e11"),
        column("model_name", TEXT, example="minilm"),
        column(
            "node_selector",
            TEXT,
            'JSON of the labels a node must have: `{"tier":"fast"}`.',
            example='{"tier":"fast"}',
            optional=True,
        ),
        column("min_replicas", count(), example=1),
        column("max_replicas", count(), "0 means no limit.", example=2),
        column("spread_all", FLAG, "One replica on every node that matches.", optional=True),
        column("route_policy", {"type": "string", "enum": RoutePolicy.values}, optional=True),
        column("balance_abs_threshold", count(), optional=True),
        column("balance_rel_threshold", NUMBER, optional=True),
        column("min_prefix_match", NUMBER, optional=True),
        column("unsatisfiable_until", TIME, "Nothing is tried for this model until then.", optional=True),
        column(
            "unsatisfiable_ticks", count(), "Passes in a row that could not load what is wanted.", example=0
        ),
        column(
            "state",
            RULE_STATE_SHAPE.ref,
            source=RULE_STATE_SHAPE.read(unless_null="checked_at"),
            value_shape=RULE_STATE_SHAPE,
            optional=True,
        ),
        column("created_at", TIME, example=EXAMPLE_TIME),
        column("updated_at", TIME, example=EXAMPLE_TIME),
    ],
)


def serialize_rules(rules: QuerySet[ModelSchedulingConfig]) -> list[Row]:
    """Return the rules in wire form, by model name; one query."""
    return [_serialize(row) for row in RULE_SHAPE.rows(rules.order_by("model_name"))]


def _serialize(row: Row) -> Row:
    if "node_selector" in row:
        # The reference sends a text that holds JSON, with sorted keys and no blanks.
        row["node_selector"] = json.dumps(
            row["node_selector"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
    return row


log = logging.getLogger(__name__)

CHANNEL = "cluster_rules"
"""NOTIFY channel of set and deleted rules; the payload is the model's name."""


def set_rule(rule: Rule, now: datetime) -> Row:
    """Create or change the model's rule; return the stored rule. Raise InvalidInput."""
    check_rule(rule)
    columns = rule.given
    row = ModelSchedulingConfig(model_name=rule.model_name, created_at=now, updated_at=now, **columns)
    with transaction.atomic():
        ModelSchedulingConfig.objects.bulk_create(
            [row],
            update_conflicts=True,
            unique_fields=["model_name"],
            # The result of a pass for the former rule does not apply to the new one.
            update_fields=[*columns, "updated_at", "reason", "checked_at", "failure_seq"],
        )
        # That statement has locked the row: nobody has changed it since.
        (stored,) = serialize_rules(_rules_of(rule.model_name))
        _publish_change("scheduling_rule.set", stored["id"], rule.model_name, rule.summary, now)
    return stored


def replace_rules(rules: Iterable[Rule], now: datetime) -> int:
    """Set all of these rules or none (R1.89); return their number. The rules of all other models stay.

    If a model has several rules, the last one counts. Each rule must set every field (R4.48). Raises
    InvalidInput.
    """
    latest = {rule.model_name: rule for rule in rules}
    with transaction.atomic():
        # The order of `RULE_LOCK_ORDER`.
        for name in sorted(latest):
            set_rule(latest[name], now)
    return len(latest)


def delete_rule(model_name: str, now: datetime) -> bool:
    """Delete the model's rule; return True if it existed."""
    with transaction.atomic():
        rule_id = _rules_of(model_name).select_for_update().values_list("pk", flat=True).first()
        if rule_id is None:
            return False
        _rules_of(model_name).delete()
        _publish_change("scheduling_rule.deleted", str(rule_id), model_name, "", now)
    return True


def pinned_models() -> set[str]:
    """Return the models whose rule sets a minimum of at least one replica."""
    keeps = Q(min_replicas__gt=0) | Q(spread_all=True)
    return set(ModelSchedulingConfig.objects.filter(keeps).values_list("model_name", flat=True))


def set_pinned(model_name: str, pinned: bool, now: datetime) -> None:
    """Set the minimum of the model's rule to at least 1 (`pinned`) or to 0; the other fields stay.

    A rule without any other content is deleted. Raises Conflict for a rule with one replica on every node.
    """
    with transaction.atomic():
        row = _lock_rule(model_name)
        if row is None and not pinned:
            return
        while row is None:
            # Two writers of the first rule: the second one must see what the first one has set.
            empty = ModelSchedulingConfig(model_name=model_name, created_at=now, updated_at=now)
            ModelSchedulingConfig.objects.bulk_create([empty], ignore_conflicts=True)
            row = _lock_rule(model_name)
        if row.spread_all and not pinned:
            raise Conflict("its scheduling rule requires a replica on every matching node; change the rule")
        if row.spread_all or (row.min_replicas > 0) is pinned:
            return
        row.min_replicas = 1 if pinned else 0
        rule = Rule(**{column.name: getattr(row, column.name) for column in fields(Rule)})
        if any(rule.given.values()):
            set_rule(rule, now)
        else:
            delete_rule(model_name, now)


def _lock_rule(model_name: str) -> ModelSchedulingConfig | None:
    return _rules_of(model_name).select_for_update().first()


def find_rule(model_name: str) -> Row | None:
    """Return the model's rule; None if it has none."""
    return next(iter(serialize_rules(_rules_of(model_name))), None)


def rules_revision() -> str:
    """Return a fingerprint of all rules, their last results and their replica counts; one query.

    It covers all rows and not just the latest time: the clocks of processes differ, so a row may change
    without raising the maximum.
    """
    columns = ("model_name", "updated_at", "checked_at", "reason")
    rows_read = ModelSchedulingConfig.objects.order_by("model_name").values_list(
        *columns, CURRENT_COUNT, LOADING_COUNT
    )
    return hashlib.sha256(repr(list(rows_read)).encode()).hexdigest()[:16]


def _rules_of(model_name: str) -> QuerySet[ModelSchedulingConfig]:
    # No rule has an unprintable name, and PostgreSQL rejects NUL.
    matching_rules = ModelSchedulingConfig.objects.filter(model_name=model_name)
    return matching_rules.none() if names.find_unprintable(model_name) else matching_rules


def _publish_change(kind: str, rule_id: str, model_name: str, detail: str, now: datetime) -> None:
    audit.record(Change(kind, f"scheduling rule {model_name}", rule_id, detail), at=now)
    notify(CHANNEL, model_name)
    log.info("%s: %s %s", kind, model_name, detail)
