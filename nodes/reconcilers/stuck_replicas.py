"""Replicas whose engines cannot be stopped: an operator hears of them.

What goes for good has no operation (`terminations.py`); its stop is sent again and again in silence. After
two minutes an unload of that replica is asked for. It owns the row from then on, and if it cannot stop the
engine either, it stays in the inbox as a failure with the reason, while controllers go on trying.
"""

import logging
from datetime import datetime

from localai_cluster.kit import errors
from nodes.replicas import terminations, unload_requests
from nodes.replicas.unload_requests import UnloadRequest

log = logging.getLogger(__name__)

ACTOR = "system"


def report_stuck(*, now: datetime) -> int:
    """Asks for the unloads, each in a transaction of its own; answers how many."""
    told = 0
    for row in terminations.overdue_stops(now=now):
        reason = (
            f"its engine was to go ({row.get_reason_display().lower()}) and was not stopped: {row.stop_error}"
        )
        request = UnloadRequest(
            row.model_name, ACTOR, node=row.node, index=row.replica_index, grace=0, reason=reason
        )
        try:
            told += unload_requests.unload(request, now=now).created
        except errors.ClusterError as refusal:
            log.info("%s on %s: %s; %s", row, row.node.name, reason, refusal.message)
    return told
