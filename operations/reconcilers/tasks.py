"""Recurring tasks: short and idempotent, run by django-q2 and by every controller's executor."""

import logging
from datetime import timedelta

from localai_cluster.kit import clock, conf, leases
from localai_cluster.kit.outage import skip_during_outage
from localai_cluster.kit.periodic import RecurringTask
from localai_cluster.kit.transactions import Lock, try_lock
from operations.ledger import attempts, retention

SCHEDULES = [
    RecurringTask(
        "operations: expired leases", "operations.reconcilers.tasks.reap_expired_leases", "* * * * * */5"
    ),
    RecurringTask("operations: record", "operations.reconcilers.tasks.prune_record", "23 * * * * 0"),
]


log = logging.getLogger(__name__)


@skip_during_outage
def reap_expired_leases() -> None:
    """Requeue operations with expired leases. The schedule calls this function."""
    reap()


def reap() -> None:
    """Requeue operations with expired leases; return at once if another process is doing so."""
    if not leases.any_expired(attempts.leased_operations(), now=clock.now()):
        return
    with try_lock(Lock.OPERATION_REAPER) as mine:
        if not mine:
            return
        requeued, failed = attempts.reap(now=clock.now())
    if requeued or failed:
        log.warning("expired operation leases: %d requeued, %d given up", requeued, failed)


@skip_during_outage
def prune_record() -> None:
    """Delete operations that ended before the retention (O100), and limit the size of history and inbox."""
    now = clock.now()
    if dismissed := retention.dismiss_oldest_failures(now=now):
        log.warning("inbox: the %d oldest failures dismissed; they are in the record", dismissed)
    before = retention.retention_cutoff(before=now - timedelta(seconds=conf.cluster().operation_retention))
    if pruned := retention.delete_ended(before=before):
        log.info("record of operations: %d deleted", pruned)
