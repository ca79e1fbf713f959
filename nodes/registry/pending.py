"""Nodes that await approval: their largest number, and the time until a silent one is removed.

Anyone with the registration token can register names, so their number is limited, per address and in total.
Nodes that an administrator rejected or revoked do not count. A join token has its own limit, so nodes that
register with a join token are always admitted, but count towards the limits of other nodes.
"""

import logging
from collections import Counter
from collections.abc import Collection
from datetime import datetime, timedelta

from localai_cluster.accounts import actors
from localai_cluster.kit import conf, errors
from localai_cluster.kit.transactions import lock_name
from localai_cluster.web import throttle
from nodes.models import BackendNode
from nodes.registry.change import remove_all

log = logging.getLogger(__name__)

SILENCE_LIMIT = timedelta(days=1)
"""Time without a heartbeat after which a pending node is removed."""
_RETRY_AFTER_SECONDS = 60.0


class TooManyPending(errors.ClusterError):
    """Too many nodes await approval."""

    status = 429
    code = "too_many_pending"
    permanent = False
    retry_after = _RETRY_AFTER_SECONDS


def check_limits(newcomers: Collection[BackendNode]) -> None:
    """Raise TooManyPending if the new nodes of the caller's transaction exceed a limit.

    Transactions with new nodes run this check one at a time, so that concurrent ones do not exceed a limit
    together.
    """
    if not newcomers:
        return
    lock_name("pending nodes")
    limits = conf.cluster()
    undecided = BackendNode.objects.filter(approved_at=None, rejected_at=None, revoked_at=None)
    addresses = list(undecided.values_list("source_address", flat=True))
    if len(addresses) > limits.pending_nodes:
        raise _refusal(f"{limits.pending_nodes} nodes await approval", "CLUSTER_PENDING_NODES")
    per_source = Counter(map(throttle.counter_key, addresses))
    for source in {throttle.counter_key(node.source_address) for node in newcomers} - {""}:
        if per_source[source] > limits.pending_nodes_per_address:
            raise _refusal(
                f"{limits.pending_nodes_per_address} nodes from {source} await approval",
                "CLUSTER_PENDING_NODES_PER_ADDRESS",
            )


def _refusal(problem: str, setting: str) -> TooManyPending:
    log.warning("a new node is refused: %s (%s)", problem, setting)
    return TooManyPending(
        f"{problem}: an administrator must approve or remove some, or give out a join token ({setting})"
    )


def expire(*, now: datetime) -> int:
    """Remove the pending nodes that are silent for a day; return their number.

    A node that an administrator rejected or revoked stays, so that the decision applies if the worker
    returns.
    """
    silent = BackendNode.objects.filter(
        approved_at=None, rejected_at=None, revoked_at=None, last_heartbeat__lt=now - SILENCE_LIMIT
    )
    reason = "pending, and silent for a day"
    return len(remove_all(silent, actors.task("pending nodes"), now=now, reason=reason))
