"""Ring buffers with the last output of every engine, by process key, and the cursors of followers.

A ring is bounded in lines and in bytes of text, and survives restarts of its key. Rings of ended engines stay
for a while, so that the cause of a crash can be read. A follower of a name is not a queue but a cursor into
the rings: a slow client uses no memory and receives the number of lines that it missed.

The rings belong to the event loop and change without awaiting.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

DEFAULT_RING_LINES = 1000
DEFAULT_RING_BYTES = 1024 * 1024
MAX_LINE_LENGTH = 8192
"""Maximum stored characters of a line."""
_MAX_RAW_LINE_BYTES = 2 * MAX_LINE_LENGTH
"""Maximum bytes of a line that are kept before the line is shortened."""
_CUT_MARK = " [cut]"
MAX_ENDED_RINGS = 32
"""Maximum number of ended engines whose rings are stored."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of `stdout` or `stderr`, with the time at which it was read."""

    timestamp: datetime
    stream: str
    text: str


class _Ring:
    """The last lines of one process key; `total` counts all lines that were ever appended."""

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque()
        self.size = 0
        self.total = 0

    def append(self, line: LogLine, most_lines: int, most_bytes: int) -> None:
        self.lines.append(line)
        self.size += _text_bytes(line)
        self.total += 1
        while len(self.lines) > most_lines or (self.size > most_bytes and len(self.lines) > 1):
            self.size -= _text_bytes(self.lines.popleft())

    def since(self, position: int) -> tuple[list[LogLine], int]:
        """Return the stored lines after the first `position` lines, and the number of dropped lines."""
        unread = self.total - position
        available = min(unread, len(self.lines))
        return list(islice(self.lines, len(self.lines) - available, None)), unread - available


class Cursor:
    """The reading position of one follower of output. The event `news` is set while lines may be unread."""

    def __init__(self, rings: "LogRings", name: str) -> None:
        self.news = asyncio.Event()
        self.news.set()
        self._rings, self._name = rings, name
        self._positions: dict[_Ring, int] = {}
        self._has_read = False

    def take_unread(self) -> tuple[list[LogLine], int]:
        """Return the unread lines of all replicas, ordered by time, and the number of lost lines."""
        self.news.clear()
        rings = self._rings.rings_of(self._name)
        unread = [ring.since(self._positions.get(ring, 0)) for ring in rings]
        if not self._has_read:
            # Lines that were dropped before the first read do not count as missed.
            self._has_read, unread = True, [(lines, 0) for lines, _ in unread]
        self._positions = {ring: ring.total for ring in rings}
        return _sort_by_time(lines for lines, _ in unread), sum(missed for _, missed in unread)


class LogRings:
    """The rings of all process keys, each of at most `lines` lines and `size` bytes of text.

    The rings of the engines that ended first are dropped first.
    """

    def __init__(self, lines: int = DEFAULT_RING_LINES, size: int = DEFAULT_RING_BYTES) -> None:
        self._most_lines, self._most_bytes = lines, size
        self._rings: dict[str, _Ring] = {}
        self._ended: dict[str, None] = {}
        self._following: dict[str, set[Cursor]] = {}

    def append(self, key: str, line: LogLine) -> None:
        """Append a line to the ring of `key`."""
        self._ended.pop(key, None)
        self._rings.setdefault(key, _Ring()).append(line, self._most_lines, self._most_bytes)
        self._notify_followers(key)

    def mark_ended(self, key: str) -> None:
        """Mark the engine of `key` as ended: its ring is dropped after `MAX_ENDED_RINGS` later ends."""
        if key in self._rings:
            self._ended.pop(key, None)
            self._ended[key] = None
        while len(self._ended) > MAX_ENDED_RINGS:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._rings[oldest]
            self._notify_followers(oldest)  # a cursor keeps references to the rings that it has read

    def models(self) -> list[str]:
        """Return the model ids that have lines (worker.md §12)."""
        return sorted({model_of(key) for key in self._rings})

    def lines(self, name: str) -> list[LogLine]:
        """Return the lines of a key, or of all replicas of a model id ordered by time (worker.md §11)."""
        return _sort_by_time(ring.lines for ring in self.rings_of(name))

    @contextlib.contextmanager
    def follow(self, name: str) -> Iterator[Cursor]:
        """Return a cursor at the first line of a process key, or of all replicas of a model id.

        The cursor also reads the lines of replicas that start later.
        """
        cursor = Cursor(self, name)
        self._following.setdefault(name, set()).add(cursor)
        try:
            yield cursor
        finally:
            self._following[name].discard(cursor)
            if not self._following[name]:
                del self._following[name]

    def _notify_followers(self, key: str) -> None:
        for name in (key, model_of(key)):
            for cursor in self._following.get(name, ()):
                cursor.news.set()

    def rings_of(self, name: str) -> list[_Ring]:
        """Return the rings of a process key or a model id."""
        if "#" in name:
            return [self._rings[name]] if name in self._rings else []
        return [ring for key, ring in self._rings.items() if model_of(key) == name]


def model_of(key: str) -> str:
    """Return the model id of a process key."""
    return key.partition("#")[0]


def _sort_by_time(parts: Iterable[Iterable[LogLine]]) -> list[LogLine]:
    return sorted((line for part in parts for line in part), key=lambda line: line.timestamp)


def _text_bytes(line: LogLine) -> int:
    return len(line.text.encode())


def clean_line(line: bytes, token: str) -> str:
    """Return a line for storage: without the token, overwritten terminal text, and text over the limit.

    Output is copied into operations, replies and logs, and an engine may print its environment.
    """
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    text = text.replace(token, "***") if token else text
    if len(line) >= _MAX_RAW_LINE_BYTES:
        text = text[: -len(token)] if token else text  # the end may hold a part of the token
    return text if len(text) <= MAX_LINE_LENGTH else text[: MAX_LINE_LENGTH - len(_CUT_MARK)] + _CUT_MARK


async def read_lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream; cut each, so that an endless line cannot fill the memory."""
    buffer = b""
    while piece := await stream.read(64 * 1024):
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            yield line[:_MAX_RAW_LINE_BYTES]
        if len(buffer) > _MAX_RAW_LINE_BYTES:
            # A progress bar overwrites itself: keep its last state only.
            buffer = buffer.rpartition(b"\r")[2][:_MAX_RAW_LINE_BYTES]
    if buffer:
        yield buffer
