"""Nodes that recently failed to install a backend: loads of its models try these nodes last.

The data are the rows of operations: every controller sees them, and later loads as well as the one that
failed.
"""

from datetime import datetime, timedelta
from uuid import UUID

from nodes.backends.backend_requests import INSTALL
from nodes.models import NodeBackend
from nodes.placement.node_backoff import NodeBackoff
from operations.models import OperationTarget, TargetStatus

REMEMBERED_FOR = timedelta(minutes=10)


def recent_refusals(backend: str, *, now: datetime) -> dict[UUID, NodeBackoff]:
    """Return the nodes that failed to install the backend and still lack it; one query.

    Their back-off only ranks them last: none of them has to rest.
    """
    since = now - REMEMBERED_FOR
    failed = OperationTarget.objects.filter(
        status=TargetStatus.ERROR,
        finished_at__gt=since,
        operation__kind=INSTALL,
        operation__payload__backend__iexact=backend,
        operation__finished_at__gt=since,
    )
    lacking = failed.exclude(node_id__in=NodeBackend.objects.named(backend).values("node_id"))
    return {
        id: NodeBackoff(1, at) for id, at in lacking.values_list("node_id", "finished_at") if at is not None
    }
