"""How long the record of operations lasts."""

from datetime import datetime

from django.db.models import Q

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.commits import committed
from operations.models import Operation, Status

AT_ONCE = 1000
"""Operations deleted in one transaction."""


def clear(*, before: datetime | None = None) -> int:
    """Deletes what has ended, before a time or at all; answers how many. Undismissed failures stay (O98)."""
    ended = Q(status__in=(Status.COMPLETED, Status.CANCELLED)) | Q(
        status=Status.FAILED, dismissed_at__isnull=False
    )
    rows = Operation.objects.filter(ended)
    if before is not None:
        rows = rows.filter(finished_at__lt=before)
    deleted = 0
    while True:
        with committed("ledger.clear"):
            if before is None and not deleted:
                audit.record(
                    Change("operation.history_cleared", "the record of operations that have ended", "")
                )
            some = list(rows.order_by("pk").values_list("pk", flat=True)[:AT_ONCE])
            # Deleted rows and their children, which lose their parent, in the one order of all locks.
            concerned = Operation.objects.filter(Q(pk__in=some) | Q(parent__in=some)).order_by("pk")
            list(concerned.select_for_update().values_list("pk", flat=True))
            Operation.objects.filter(pk__in=some).delete()
        deleted += len(some)
        if len(some) < AT_ONCE:
            return deleted
