"""Short, idempotent tasks that django-q2 runs for the fleet."""

import logging

from localai_cluster import clock, conf
from localai_cluster.locks import Lock, try_lock
from localai_cluster.outage import left_out_in_an_outage
from nodes.health.liveness import Limits, apply, observe, plan_liveness

log = logging.getLogger(__name__)


@left_out_in_an_outage
def liveness() -> None:
    """One liveness pass (R5.1); at once if another process is at it."""
    with try_lock(Lock.LIVENESS) as mine:
        if not mine:
            return
        now, cluster = clock.now(), conf.cluster()
        limits = Limits(node=cluster.node_stale_after, web=cluster.web_stale_after)
        nodes, processes = apply(plan_liveness(observe(), now, limits), now, limits)
    if nodes or processes:
        log.warning("liveness: %d nodes offline, %d web processes gone", nodes, processes)
