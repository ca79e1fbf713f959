"""The progress of one model's files on their way to one node. Pure: time is a parameter.

Byte counts include bytes that the worker has from an earlier attempt. The rate counts only recent transfers,
so those bytes do not distort the remaining time.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from localai_cluster.messaging.messages import human_bytes

_WINDOW = 15.0
"""Seconds of transfer from which the rate is computed."""


@dataclass
class UploadMeter:
    """The progress of all files; `sizes` maps each path to its bytes."""

    sizes: Mapping[str, int]
    node: str
    now: str = ""
    """The current step, in words."""
    moved: int = 0
    """Bytes that this attempt has read or sent, repetitions included: a sign of life."""
    _positions: dict[str, int] = field(default_factory=dict)
    _finished: set[str] = field(default_factory=set)
    _sent: int = 0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def current(self) -> int:
        """Bytes that the worker has."""
        return sum(self._positions.values())

    @property
    def file_index(self) -> int:
        """Number of the file that is being sent, from 1."""
        return min(len(self._finished) + 1, len(self.sizes))

    def finds(self, relative: str, position: int) -> None:
        """Record the bytes that the worker has, if it is the same file."""
        self._positions[relative] = position

    def starts(self, relative: str, position: int) -> None:
        """Record that the file is sent from this position on; the worker has the bytes before it."""
        self._positions[relative] = position
        self.now = f"sending {relative} to {self.node}"

    def sends(self, relative: str, count: int) -> None:
        """Record that more bytes of the file were sent."""
        self._positions[relative] = min(self._positions.get(relative, 0) + count, self.sizes[relative])
        self.moved += count
        self._sent += count

    def reads(self, relative: str, count: int) -> None:
        """Record that bytes of the file were read for its hash."""
        self.moved += count
        self.now = f"reading {relative} for its hash"

    def waits(self, reason: str) -> None:
        """Record that nothing moves for a while."""
        self.now = reason

    def arrived(self, relative: str) -> None:
        """Record that the worker has the complete file."""
        self._positions[relative] = self.sizes[relative]
        self._finished.add(relative)

    def leaves_out(self, relative: str) -> None:
        """Record that the file is skipped; it counts as finished."""
        self.arrived(relative)

    def rate(self, now: float) -> int:
        """Return the recent bytes per second, 0 while unknown. Stores one sample per call."""
        self._samples.append((now, self._sent))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW:
            self._samples.popleft()
        start, sent_before = self._samples[0]
        return round((self._sent - sent_before) / (now - start)) if now - start >= 1 else 0

    def sentence(self, rate: int) -> str:
        """Describe the progress for people."""
        text = self.now
        if len(self.sizes) > 1:
            text += f", file {self.file_index} of {len(self.sizes)}"
        text += f": {human_bytes(self.current)} of {human_bytes(self.total)}"
        if rate > 0 and self.current < self.total:
            text += f", {human_bytes(rate)}/s, {_format_duration((self.total - self.current) / rate)} left"
        return text


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
