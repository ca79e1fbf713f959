"""Retention of the history of operations, and the size limits of history and inbox."""

from datetime import datetime, timedelta

from django.db.models import Q

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit.leases import update_rows
from localai_cluster.kit.transactions import committed
from operations.changes.events import emit
from operations.ledger.admission import DISMISSAL_COLUMNS, set_dismissed
from operations.models import IN_HISTORY, UNDISMISSED_FAILURE, Operation

MAX_DELETED_PER_TRANSACTION = 1000
"""Maximum number of operations deleted in one transaction."""
MAX_DISMISSED_PER_TRANSACTION = 100
MAX_INBOX_FAILURES = 1000
"""Maximum number of failures in the inbox; every open page receives all failures."""
MAX_ENDED_OPERATIONS = 100_000
"""Maximum number of operations in the history."""
ACTOR = "system"
OVERFLOW_COMMENT = f"more than {MAX_INBOX_FAILURES} failures waited for somebody: the oldest were dismissed"


def dismiss_oldest_failures(*, now: datetime) -> int:
    """Dismiss the oldest failures beyond `MAX_INBOX_FAILURES`, with a comment. Return their number.

    Dismissed failures belong to the history, and are deleted with it.
    """
    waiting = Operation.objects.filter(UNDISMISSED_FAILURE)
    dismissed = 0
    while True:
        with committed("ledger.dismiss"):
            oldest = waiting.order_by("-finished_at", "-pk")[MAX_INBOX_FAILURES:][
                :MAX_DISMISSED_PER_TRANSACTION
            ]
            # Read again under the lock: a user may have dismissed or retried them meanwhile.
            still_waiting = waiting.filter(pk__in=list(oldest.values_list("pk", flat=True))).order_by("pk")
            failures = list(still_waiting.select_for_update(no_key=True))
            for failure in failures:
                set_dismissed(failure, ACTOR, OVERFLOW_COMMENT, now)
            update_rows(failures, DISMISSAL_COLUMNS)
            emit(failures)
        dismissed += len(failures)
        if len(failures) < MAX_DISMISSED_PER_TRANSACTION:
            return dismissed


def retention_cutoff(*, before: datetime) -> datetime:
    """Return the time before which ended operations are deleted.

    It is `before`, or the end of the newest operation beyond `MAX_ENDED_OPERATIONS` if that is later.
    """
    beyond = Operation.objects.filter(IN_HISTORY).order_by("-finished_at", "-pk")[MAX_ENDED_OPERATIONS:]
    last = beyond.values_list("finished_at", flat=True).first()
    return before if last is None else max(before, last + timedelta(microseconds=1))


def delete_ended(*, before: datetime | None = None) -> int:
    """Delete ended operations, with `before` only older ones; return their number.

    Undismissed failures stay (O98).
    """
    rows = Operation.objects.filter(IN_HISTORY)
    if before is not None:
        rows = rows.filter(finished_at__lt=before)
    deleted = 0
    while True:
        with committed("ledger.clear"):
            if before is None and not deleted:
                audit.record(
                    Change("operation.history_cleared", "the record of operations that have ended", "")
                )
            ids = list(rows.order_by("pk").values_list("pk", flat=True)[:MAX_DELETED_PER_TRANSACTION])
            # Deleted rows and their children, whose parent becomes null, in the common lock order.

            affected = Operation.objects.filter(Q(pk__in=ids) | Q(parent__in=ids)).order_by("pk")
            list(affected.select_for_update().values_list("pk", flat=True))
            Operation.objects.filter(pk__in=ids).delete()
        deleted += len(ids)
        if len(ids) < MAX_DELETED_PER_TRANSACTION:
            return deleted
