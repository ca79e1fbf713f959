"""The last output of every engine, in memory by process key, and the places of those who follow it.

A ring is bounded in lines and in bytes of text, and survives restarts of its key. Rings of engines that have
ended stay for a while, so that the reason of a death can be read. Who follows a name is no queue but a place
in its rings: a slow reader costs nothing and is told how many lines it has missed.

The rings belong to the event loop and change without awaiting.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

LINES = 1000
BYTES = 1024 * 1024
LINE_LIMIT = 8192
"""Characters of a line that are kept."""
ENDED_KEPT = 32
"""How many engines that have ended keep their rings."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of `stdout` or `stderr`, with the time it was read."""

    timestamp: datetime
    stream: str
    text: str


class _Ring:
    """The last lines of one key; `total` counts all that it ever had."""

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque()
        self.size = 0
        self.total = 0

    def append(self, line: LogLine, most_lines: int, most_bytes: int) -> None:
        self.lines.append(line)
        self.size += _size(line)
        self.total += 1
        while len(self.lines) > most_lines or (self.size > most_bytes and len(self.lines) > 1):
            self.size -= _size(self.lines.popleft())

    def since(self, place: int) -> tuple[list[LogLine], int]:
        """The lines after the first `place`, and how many of these are gone."""
        new = self.total - place
        kept = min(new, len(self.lines))
        return list(islice(self.lines, len(self.lines) - kept, None)), new - kept


class Place:
    """Where somebody stands who follows a name; `news` is set while there may be lines to take."""

    def __init__(self, rings: "LogRings", name: str) -> None:
        self.news = asyncio.Event()
        self.news.set()
        self._rings, self._name = rings, name
        self._seen: dict[_Ring, int] = {}
        self._began = False

    def take(self) -> tuple[list[LogLine], int]:
        """The lines since the last call, of all replicas in order of time, and how many are missing."""
        self.news.clear()
        rings = self._rings.of(self._name)
        found = [ring.since(self._seen.get(ring, 0)) for ring in rings]
        if not self._began:
            # What was gone before the first look is not missing.
            self._began, found = True, [(lines, 0) for lines, _ in found]
        self._seen = {ring: ring.total for ring in rings}
        return _by_time(lines for lines, _ in found), sum(lost for _, lost in found)


class LogRings:
    """At most `lines` lines and `size` bytes of text a key; ended keys go in the order of their ends."""

    def __init__(self, lines: int = LINES, size: int = BYTES) -> None:
        self._most_lines, self._most_bytes = lines, size
        self._rings: dict[str, _Ring] = {}
        self._ended: dict[str, None] = {}
        self._following: dict[str, set[Place]] = {}

    def append(self, key: str, line: LogLine) -> None:
        """Adds a line to the ring of `key`."""
        self._ended.pop(key, None)
        self._rings.setdefault(key, _Ring()).append(line, self._most_lines, self._most_bytes)
        self._tell(key)

    def ended(self, key: str) -> None:
        """Marks the engine of `key` as ended: its ring goes when enough others have ended after it."""
        if key in self._rings:
            self._ended.pop(key, None)
            self._ended[key] = None
        while len(self._ended) > ENDED_KEPT:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._rings[oldest]
            self._tell(oldest)  # a place holds on to the rings that it has seen

    def models(self) -> list[str]:
        """The model ids that have lines (worker.md §12)."""
        return sorted({model_of(key) for key in self._rings})

    def lines(self, name: str) -> list[LogLine]:
        """The lines of a key, or of all replicas of a model id in order of time (worker.md §11)."""
        return _by_time(ring.lines for ring in self.of(name))

    @contextlib.contextmanager
    def follow(self, name: str) -> Iterator[Place]:
        """A place before the first line of a key, or of all replicas of a model id, later ones too."""
        place = Place(self, name)
        self._following.setdefault(name, set()).add(place)
        try:
            yield place
        finally:
            self._following[name].discard(place)
            if not self._following[name]:
                del self._following[name]

    def _tell(self, key: str) -> None:
        for name in (key, model_of(key)):
            for place in self._following.get(name, ()):
                place.news.set()

    def of(self, name: str) -> list[_Ring]:
        """The rings that a name means."""
        if "#" in name:
            return [self._rings[name]] if name in self._rings else []
        return [ring for key, ring in self._rings.items() if model_of(key) == name]


def model_of(key: str) -> str:
    """The model id of a process key."""
    return key.partition("#")[0]


def _by_time(parts: Iterable[Iterable[LogLine]]) -> list[LogLine]:
    return sorted((line for part in parts for line in part), key=lambda line: line.timestamp)


def _size(line: LogLine) -> int:
    return len(line.text.encode())
