"""The last log lines of every engine, in memory by process key; they survive restarts of that key."""

from collections import deque
from dataclasses import dataclass
from datetime import datetime

LINES = 1000
KEYS = 256
LINE_LIMIT = 8192


@dataclass(frozen=True)
class LogLine:
    """One line of `stdout` or `stderr`, with the time it was read."""

    timestamp: datetime
    stream: str
    text: str


class LogRings:
    """1000 lines per key, for at most 256 keys; the least recently used key is dropped first."""

    def __init__(self) -> None:
        self._rings: dict[str, deque[LogLine]] = {}

    def append(self, key: str, line: LogLine) -> None:
        """Adds a line to the ring of `key`."""
        ring = self._rings.pop(key, None)
        if ring is None:
            ring = deque(maxlen=LINES)
            if len(self._rings) >= KEYS:
                del self._rings[next(iter(self._rings))]
        self._rings[key] = ring
        ring.append(line)

    def lines(self, name: str) -> list[LogLine]:
        """The lines of a key, or of all replicas of a model id in order of time (worker.md §11)."""
        if "#" in name:
            return list(self._rings.get(name, ()))
        rings = [ring for key, ring in self._rings.items() if key.rpartition("#")[0] == name]
        return sorted((line for ring in rings for line in ring), key=lambda line: line.timestamp)
