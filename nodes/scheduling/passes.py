"""The rules that the replica pass looks at (R1.86), and what it made of them: flags (R1.87), figures, reason.

What was found is about the rule as it was read. A rule that was edited since, or whose flags were cleared,
is left as it is: the next pass looks at it.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from django.db import transaction
from django.db.models import Q, QuerySet

from nodes.models import ModelSchedulingConfig, selectors
from nodes.scheduling.picture import ClearFlags, Demand, EndPressure, Ruling, Unsatisfiable
from operations.ledger.progress import update

_WRITTEN = [
    "wanted_replicas", "current_replicas", "loading_replicas", "reason", "looked_at",
    "unsatisfiable_until", "unsatisfiable_ticks", "pressure_ended_at",
]  # fmt: skip


_COUNTED = Q(min_replicas__gt=0) | Q(max_replicas__gt=0) | Q(spread_all=True)


def demands() -> list[Demand]:
    """R1.86: the rules that say how many; one query."""
    return _demands(ModelSchedulingConfig.objects.filter(_COUNTED))


def of_models(model_names: Collection[str]) -> list[Demand]:
    """Of models whose rule does not say how many, or that have none: where replicas go; one query."""
    found = _demands(ModelSchedulingConfig.objects.filter(~_COUNTED, model_name__in=model_names))
    return [*found, *(Demand(name, {}) for name in sorted({*model_names} - {one.model for one in found}))]


def _demands(rules: QuerySet[ModelSchedulingConfig]) -> list[Demand]:
    return [
        Demand(
            model=row.model_name,
            selector=selectors.readable(row.node_selector),
            minimum=row.min_replicas,
            maximum=row.max_replicas,
            spread=row.spread_all,
            ticks=row.unsatisfiable_ticks,
            until=row.unsatisfiable_until,
            looked_at=row.looked_at,
            seen=row.current_replicas,
            changed_at=row.updated_at,
        )
        for row in rules.order_by("model_name")
    ]


def record(rulings: Iterable[Ruling], about: Mapping[str, Demand], now: datetime) -> None:
    """Writes what was made of the rules in `about`; two statements for any number of them."""
    found = {ruling.model: ruling for ruling in rulings}
    with transaction.atomic():
        # In the order of `cooldowns`, against deadlocks.
        rows = ModelSchedulingConfig.objects.filter(model_name__in=found).order_by("model_name")
        locked = rows.select_for_update()
        same = [row for row in locked if row.updated_at == about[row.model_name].changed_at]
        for row in same:
            _write(row, found[row.model_name], now)
        update(same, _WRITTEN)


def _write(row: ModelSchedulingConfig, ruling: Ruling, now: datetime) -> None:
    row.wanted_replicas, row.current_replicas = ruling.wanted, ruling.current
    row.loading_replicas, row.looked_at = ruling.loading, now
    row.reason = ruling.reason or row.reason
    for action in ruling.actions:
        match action:
            case Unsatisfiable(_, ticks, until):
                row.unsatisfiable_ticks, row.unsatisfiable_until = ticks, until
            case ClearFlags():
                row.unsatisfiable_ticks, row.unsatisfiable_until = 0, None
            case EndPressure():
                row.pressure_ended_at = now
            case _:
                pass
