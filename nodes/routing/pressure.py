"""How often requests were lately kept from the replica that remembers their prompt, by model. Pure."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from localai_cluster.cluster_settings import MOST_PRESSURE
from nodes.scheduling.pressure import WINDOW


class Pressure:
    """Of one web process; the latest times of each model, so many as count."""

    def __init__(self, window: timedelta = WINDOW) -> None:
        self._window = window
        self._times: dict[str, deque[datetime]] = {}

    def record(self, model: str, now: datetime) -> None:
        """R3.18: one more."""
        times = self._times.setdefault(model, deque(maxlen=MOST_PRESSURE))
        times.append(now)
        self._prune(times, now)

    def within(self, model: str, now: datetime) -> Sequence[datetime]:
        """R3.19: the times that count now, oldest first; one that is exactly as old as the window does."""
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
