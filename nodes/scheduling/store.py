"""Writes scheduling rules: set, replace, delete. Each change, its audit and its NOTIFY are one transaction.

Setting a rule is one INSERT … ON CONFLICT, so two writers of one model's rule follow each other and both
succeed. It never touches the flags of a cooldown (R1.85): those end by what `cooldowns` does.
"""

import hashlib
import logging
from collections.abc import Iterable
from datetime import datetime

from django.db import transaction
from django.db.models import QuerySet

from localai_cluster import names
from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.web.shapes import Row
from nodes.models import ModelSchedulingConfig
from nodes.scheduling.rules import Rule, check
from nodes.scheduling.shape import CURRENT, LOADING, rows
from operations.changes.events import notify

log = logging.getLogger(__name__)

CHANNEL = "cluster_rules"
"""NOTIFY channel: `<model>`, when its rule was set or deleted."""


def set_rule(rule: Rule, now: datetime) -> Row:
    """Makes the model's rule or changes it; returns it as stored. Raises InvalidInput."""
    check(rule)
    given = rule.given
    made = ModelSchedulingConfig(model_name=rule.model_name, created_at=now, updated_at=now, **given)
    with transaction.atomic():
        ModelSchedulingConfig.objects.bulk_create(
            [made],
            update_conflicts=True,
            unique_fields=["model_name"],
            # What a pass made of the former rule does not hold for this one.
            update_fields=[*given, "updated_at", "reason", "looked_at"],
        )
        # That statement has locked the row: nobody has changed it since.
        (stored,) = rows(_of(rule.model_name))
        _tell("scheduling_rule.set", stored["id"], rule.model_name, rule.summary, now)
    return stored


def replace(rules: Iterable[Rule], now: datetime) -> int:
    """Sets all of these or none (R1.89), the last of a model's; other models' rules stay. Answers how many.

    They must name every field (R4.48). Raises InvalidInput.
    """
    latest = {rule.model_name: rule for rule in rules}
    with transaction.atomic():
        # In the order of `cooldowns`, against deadlocks.
        for name in sorted(latest):
            set_rule(latest[name], now)
    return len(latest)


def delete_rule(model_name: str, now: datetime) -> bool:
    """Deletes the model's rule; whether there was one."""
    with transaction.atomic():
        found = _of(model_name).select_for_update().values_list("pk", flat=True).first()
        if found is None:
            return False
        _of(model_name).delete()
        _tell("scheduling_rule.deleted", str(found), model_name, "", now)
    return True


def find(model_name: str) -> Row | None:
    """The model's rule, None if it has none."""
    return next(iter(rows(_of(model_name))), None)


def revision() -> str:
    """Return another text when a rule, what a pass made of it, or a count of its replicas has changed.

    One query.

    Of all rows, because clocks of processes differ: the latest time among them may stay while one changes.
    """
    columns = ("model_name", "updated_at", "looked_at", "reason")
    found = ModelSchedulingConfig.objects.order_by("model_name").values_list(*columns, CURRENT, LOADING)
    return hashlib.sha256(repr(list(found)).encode()).hexdigest()[:16]


def _of(model_name: str) -> QuerySet[ModelSchedulingConfig]:
    # No rule has such a name, and PostgreSQL takes no NUL.
    found = ModelSchedulingConfig.objects.filter(model_name=model_name)
    return found.none() if names.unprintable(model_name) else found


def _tell(kind: str, rule_id: str, model_name: str, detail: str, now: datetime) -> None:
    audit.record(Change(kind, f"scheduling rule {model_name}", rule_id, detail), at=now)
    notify(CHANNEL, model_name)
    log.info("%s: %s %s", kind, model_name, detail)
