"""Read the rules for the replica pass (R1.86), and write its results: flags (R1.87), figures and reason.

A result belongs to the version of the rule that the pass has read. If the rule was edited since, or its flags
were cleared, the result is not written; the next pass checks the rule again. A change of the fleet clears all
cooldowns (R1.28, R1.88).
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from django.db import transaction
from django.db.models import Q, QuerySet

from localai_cluster.kit.leases import update_rows
from nodes.models import ModelSchedulingConfig, scheduling
from nodes.models.scheduling import RULE_LOCK_ORDER
from nodes.scheduling.snapshot import (
    ClearUnsatisfiable,
    DesiredState,
    EndPressure,
    RuleDecision,
    Unsatisfiable,
)

_RESULT_COLUMNS = [
    "wanted_replicas", "current_replicas", "loading_replicas", "reason", "checked_at",
    "unsatisfiable_until", "unsatisfiable_ticks", "pressure_ended_at", "failure_seq",
]  # fmt: skip


_SETS_NUMBER_FILTER = Q(min_replicas__gt=0) | Q(max_replicas__gt=0) | Q(spread_all=True)


def read_desired_states() -> list[DesiredState]:
    """Return the desired states of all rules that set a number of replicas (R1.86); one query."""
    return _desired_states(ModelSchedulingConfig.objects.filter(_SETS_NUMBER_FILTER))


def read_desired_states_of(model_names: Collection[str]) -> list[DesiredState]:
    """Return desired states of these models, whose rules set no number or do not exist; one query."""
    desired_states = _desired_states(
        ModelSchedulingConfig.objects.filter(~_SETS_NUMBER_FILTER, model_name__in=model_names)
    )
    models = {desired_state.model for desired_state in desired_states}
    return [*desired_states, *(DesiredState(name, {}) for name in sorted({*model_names} - models))]


def _desired_states(rules: QuerySet[ModelSchedulingConfig]) -> list[DesiredState]:
    return [
        DesiredState(
            model=row.model_name,
            selector=scheduling.readable_selector(row.node_selector),
            minimum=row.min_replicas,
            maximum=row.max_replicas,
            spread=row.spread_all,
            ticks=row.unsatisfiable_ticks,
            until=row.unsatisfiable_until,
            failure_seq=row.failure_seq,
            seen=row.current_replicas,
            changed_at=row.updated_at,
        )
        for row in rules.order_by("model_name")
    ]


def write_results(
    decisions: Iterable[RuleDecision], about: Mapping[str, DesiredState], now: datetime
) -> None:
    """Store the decisions in those rules of `about` that were not changed since; two statements."""
    decision_by_model = {decision.model: decision for decision in decisions}
    with transaction.atomic():
        rows = ModelSchedulingConfig.objects.filter(model_name__in=decision_by_model)
        locked = rows.order_by(RULE_LOCK_ORDER).select_for_update()
        unchanged = [row for row in locked if row.updated_at == about[row.model_name].changed_at]
        for row in unchanged:
            _apply_result(row, decision_by_model[row.model_name], now)
        update_rows(unchanged, _RESULT_COLUMNS)


def _apply_result(row: ModelSchedulingConfig, decision: RuleDecision, now: datetime) -> None:
    row.wanted_replicas, row.current_replicas = decision.wanted, decision.current
    row.loading_replicas, row.checked_at = decision.loading, now
    row.reason = decision.reason or row.reason
    # If the last failure was dismissed, an earlier one is read, which has been counted.
    row.failure_seq = max(row.failure_seq or 0, decision.failure_seq)
    for action in decision.actions:
        match action:
            case Unsatisfiable(_, ticks, until):
                row.unsatisfiable_ticks, row.unsatisfiable_until = ticks, until
            case ClearUnsatisfiable():
                row.unsatisfiable_ticks, row.unsatisfiable_until = 0, None
            case EndPressure():
                row.pressure_ended_at = now
            case _:
                pass


def clear_cooldowns(now: datetime) -> None:
    """Clear the cooldown flags of all rules."""
    waiting = Q(unsatisfiable_until__isnull=False) | Q(unsatisfiable_ticks__gt=0)
    flagged = ModelSchedulingConfig.objects.filter(waiting).order_by(RULE_LOCK_ORDER).select_for_update()
    if ids := list(flagged.values_list("pk", flat=True)):
        ModelSchedulingConfig.objects.filter(pk__in=ids).update(
            unsatisfiable_until=None, unsatisfiable_ticks=0, updated_at=now
        )
