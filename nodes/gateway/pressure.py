"""Recent diversions: requests that were not sent to the replica with their prefix, by model. Pure."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from localai_cluster.kit.cluster_settings import MOST_PRESSURE
from nodes.scheduling.pressure import WINDOW


class Pressure:
    """The diversions of one web process: for each model the latest times, as many as count."""

    def __init__(self, window: timedelta = WINDOW) -> None:
        self._window = window
        self._times: dict[str, deque[datetime]] = {}

    def record(self, model: str, now: datetime) -> None:
        """Record one diversion (R3.18)."""
        times = self._times.setdefault(model, deque(maxlen=MOST_PRESSURE))
        times.append(now)
        self._prune(times, now)

    def within(self, model: str, now: datetime) -> Sequence[datetime]:
        """Return the times that are at most one window old, oldest first (R3.19)."""
        times = self._times.get(model)
        if times is None:
            return ()
        self._prune(times, now)
        if not times:
            del self._times[model]
        return tuple(times)

    def _prune(self, times: deque[datetime], now: datetime) -> None:
        while times and now - times[0] > self._window:
            times.popleft()
