"""Short, idempotent tasks that django-q2 runs for the ledger."""

import logging

from localai_cluster import clock
from localai_cluster.locks import Lock, try_lock
from operations import services

log = logging.getLogger(__name__)


def reap_expired_leases() -> None:
    """Operations whose controller fell silent go on elsewhere; at once if another reaper is at it."""
    with try_lock(Lock.OPERATION_REAPER) as mine:
        if not mine:
            return
        requeued, failed = services.reap(now=clock.now())
    if requeued or failed:
        log.warning("expired operation leases: %d requeued, %d given up", requeued, failed)
