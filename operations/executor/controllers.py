"""Heartbeats of controllers: each writes a row every few seconds, so that a page can report if none runs.

The row is for display only. Leases decide which controller runs an operation, never this row.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from localai_cluster import __version__
from localai_cluster.kit.transactions import committed
from operations.models import ControllerBeat

HEARTBEAT_INTERVAL = 3.0
SILENCE_LIMIT = 15.0
"""Seconds without a heartbeat after which a controller counts as dead."""
_DELETE_AFTER = timedelta(minutes=5)


@dataclass(frozen=True)
class LastHeartbeats:
    """The latest heartbeat of any controller, and of any controller that is connected to the bus."""

    at: datetime | None = None
    connected_at: datetime | None = None


def write_heartbeat(owner: str, *, bus_connected: bool, now: datetime) -> None:
    """Store the heartbeat of the controller `owner`, and delete the rows of dead controllers."""
    with committed("controllers.beat"):
        ControllerBeat.objects.bulk_create(
            [ControllerBeat(owner=owner, seen_at=now, bus_connected=bus_connected, version=__version__)],
            update_conflicts=True,
            unique_fields=["owner"],
            update_fields=["seen_at", "bus_connected", "version"],
        )
        ControllerBeat.objects.filter(seen_at__lt=now - _DELETE_AFTER).delete()


def delete_heartbeat(owner: str) -> None:
    """Delete the row of the controller `owner`, because it is about to end."""
    with committed("controllers.sign_off"):
        ControllerBeat.objects.filter(owner=owner).delete()


def last_heartbeats() -> LastHeartbeats:
    """Return the latest heartbeats; one query."""
    rows = list(ControllerBeat.objects.values_list("seen_at", "bus_connected"))
    return LastHeartbeats(
        at=max((at for at, _ in rows), default=None),
        connected_at=max((at for at, connected in rows if connected), default=None),
    )
