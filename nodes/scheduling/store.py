"""Write scheduling rules: set, replace, delete. Each change, its audit and its NOTIFY are one transaction.

Setting a rule is one INSERT … ON CONFLICT, so two writers of one model's rule follow each other and both
succeed. It never changes the flags of a cooldown (R1.85): `cooldowns` clears those.
"""

import hashlib
import logging
from collections.abc import Iterable
from datetime import datetime

from django.db import transaction
from django.db.models import QuerySet

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit import names
from localai_cluster.web.shapes import Row
from nodes.models import ModelSchedulingConfig
from nodes.scheduling.rules import Rule, check
from nodes.scheduling.shape import CURRENT, LOADING, rows
from operations.changes.events import notify

log = logging.getLogger(__name__)

CHANNEL = "cluster_rules"
"""NOTIFY channel; the payload is the model whose rule was set or deleted."""


def set_rule(rule: Rule, now: datetime) -> Row:
    """Create or change the model's rule; return it as stored. Raise InvalidInput."""
    check(rule)
    columns = rule.given
    row = ModelSchedulingConfig(model_name=rule.model_name, created_at=now, updated_at=now, **columns)
    with transaction.atomic():
        ModelSchedulingConfig.objects.bulk_create(
            [row],
            update_conflicts=True,
            unique_fields=["model_name"],
            # The result of a pass for the former rule does not apply to the new one.
            update_fields=[*columns, "updated_at", "reason", "looked_at"],
        )
        # That statement has locked the row: nobody has changed it since.
        (stored,) = rows(_rules_of(rule.model_name))
        _publish_change("scheduling_rule.set", stored["id"], rule.model_name, rule.summary, now)
    return stored


def replace(rules: Iterable[Rule], now: datetime) -> int:
    """Set all of these rules or none (R1.89); return their number. Other models' rules stay.

    The last rule of a model wins. Rules must set every field (R4.48). Raises InvalidInput.
    """
    latest = {rule.model_name: rule for rule in rules}
    with transaction.atomic():
        # In the order of `cooldowns`, against deadlocks.
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


def find(model_name: str) -> Row | None:
    """Return the model's rule; None if it has none."""
    return next(iter(rows(_rules_of(model_name))), None)


def revision() -> str:
    """Return a fingerprint of all rules, their last results and the counts of their replicas; one query.

    It covers all rows, because clocks of processes differ: the latest time among them may stay while one
    changes.
    """
    columns = ("model_name", "updated_at", "looked_at", "reason")
    rows_read = ModelSchedulingConfig.objects.order_by("model_name").values_list(*columns, CURRENT, LOADING)
    return hashlib.sha256(repr(list(rows_read)).encode()).hexdigest()[:16]


def _rules_of(model_name: str) -> QuerySet[ModelSchedulingConfig]:
    # No rule has an unprintable name, and PostgreSQL rejects NUL.
    matching_rules = ModelSchedulingConfig.objects.filter(model_name=model_name)
    return matching_rules.none() if names.unprintable(model_name) else matching_rules


def _publish_change(kind: str, rule_id: str, model_name: str, detail: str, now: datetime) -> None:
    audit.record(Change(kind, f"scheduling rule {model_name}", rule_id, detail), at=now)
    notify(CHANNEL, model_name)
    log.info("%s: %s %s", kind, model_name, detail)
