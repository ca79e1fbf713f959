"""Memory of all nodes, one sample per minute for an hour: one statement writes it, one deletes older ones.

A node has one sample per minute: a second process or a repeated run changes nothing. A node without
heartbeats has no sample, which the chart shows as a gap.
"""

from datetime import datetime, timedelta
from uuid import UUID

from django.db import connection

from nodes.models import NodeSample

KEPT = timedelta(hours=1)
EVERY = timedelta(minutes=1)

_SAMPLE = """
INSERT INTO node_samples (node_id, at, vram_used, ram_used)
SELECT id, %(at)s,
    CASE WHEN total_vram > 0 THEN GREATEST(0,
        CASE WHEN vram_budget_bytes > 0 THEN LEAST(vram_budget_bytes, total_vram) ELSE total_vram END
        - available_vram) END,
    CASE WHEN total_ram > 0 THEN GREATEST(0, total_ram - available_ram) END
FROM backend_nodes
WHERE status NOT IN ('pending', 'offline') AND (total_vram > 0 OR total_ram > 0)
ON CONFLICT (node_id, at) DO NOTHING
"""


def keep(*, now: datetime) -> int:
    """Store this minute's sample of every online node; return the number stored.

    Deletes samples older than an hour.
    """
    minute = now.replace(second=0, microsecond=0)
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLE, {"at": minute})
        stored: int = cursor.rowcount
    NodeSample.objects.filter(at__lt=minute - KEPT).delete()
    return stored


def of_node(node_id: UUID, *, now: datetime) -> list[tuple[datetime, int | None, int | None]]:
    """Return the node's samples of the last hour, the oldest first: time, VRAM used, RAM used."""
    rows = NodeSample.objects.filter(node_id=node_id, at__gte=now - KEPT - EVERY).order_by("at")
    return list(rows.values_list("at", "vram_used", "ram_used"))
