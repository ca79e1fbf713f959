"""End scheduling cooldowns when the fleet may be able to satisfy their rules again (R1.28, R1.87, R1.88)."""

from datetime import datetime

from django.db.models import Q

from nodes.models import ModelSchedulingConfig


def clear_cooldowns(now: datetime) -> None:
    """Clear the flags of every rule that has any; the rows are locked in order to prevent deadlocks."""
    waiting = Q(unsatisfiable_until__isnull=False) | Q(unsatisfiable_ticks__gt=0)
    flagged = ModelSchedulingConfig.objects.filter(waiting).order_by("model_name").select_for_update()
    if ids := list(flagged.values_list("pk", flat=True)):
        ModelSchedulingConfig.objects.filter(pk__in=ids).update(
            unsatisfiable_until=None, unsatisfiable_ticks=0, updated_at=now
        )
