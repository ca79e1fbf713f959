"""How far the files of one model are on their way to one node. Pure: time is a parameter.

Bytes count those that the worker has, also from an earlier attempt. The rate counts only what moved lately,
so the time that is left is not told by what was there before.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from localai_cluster.messaging.messages import human_bytes

_WINDOW = 15.0
"""Seconds whose bytes make the rate."""


@dataclass
class Meter:
    """`sizes` are those of all files, by their path."""

    sizes: Mapping[str, int]
    node: str
    now: str = ""
    """What happens, in words."""
    moved: int = 0
    """Bytes that were read or sent by this attempt, also twice: a sign of life."""
    _at: dict[str, int] = field(default_factory=dict)
    _there: set[str] = field(default_factory=set)
    _sent: int = 0
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def current(self) -> int:
        """Bytes that are there."""
        return sum(self._at.values())

    @property
    def file_index(self) -> int:
        """The number of the file that is sent, from 1."""
        return min(len(self._there) + 1, len(self.sizes))

    def finds(self, relative: str, position: int) -> None:
        """So much of the file is there, if it is the same file."""
        self._at[relative] = position

    def starts(self, relative: str, position: int) -> None:
        """The file is sent from here on; what is before it is there already."""
        self._at[relative] = position
        self.now = f"sending {relative} to {self.node}"

    def sends(self, relative: str, count: int) -> None:
        """More bytes of the file were sent."""
        self._at[relative] = min(self._at.get(relative, 0) + count, self.sizes[relative])
        self.moved += count
        self._sent += count

    def reads(self, relative: str, count: int) -> None:
        """Bytes of the file were read for its hash."""
        self.moved += count
        self.now = f"reading {relative} for its hash"

    def waits(self, reason: str) -> None:
        """Nothing moves for a while."""
        self.now = reason

    def arrived(self, relative: str) -> None:
        """The whole file is there."""
        self._at[relative] = self.sizes[relative]
        self._there.add(relative)

    def leaves_out(self, relative: str) -> None:
        """The file will not be there; it counts as one that is done with."""
        self.arrived(relative)

    def rate(self, now: float) -> int:
        """Bytes a second of late; 0 while that is not known. Keeps a mark at each call."""
        self._marks.append((now, self._sent))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW:
            self._marks.popleft()
        since, before = self._marks[0]
        return round((self._sent - before) / (now - since)) if now - since >= 1 else 0

    def sentence(self, rate: int) -> str:
        """What a person is told."""
        said = self.now
        if len(self.sizes) > 1:
            said += f", file {self.file_index} of {len(self.sizes)}"
        said += f": {human_bytes(self.current)} of {human_bytes(self.total)}"
        if rate > 0 and self.current < self.total:
            said += f", {human_bytes(rate)}/s, {_span((self.total - self.current) / rate)} left"
        return said


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
