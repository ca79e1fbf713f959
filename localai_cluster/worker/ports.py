"""Which engine gets which port: pure state and rules, the time is a parameter.

A released port rests for 15 s and stays reserved for its last key for 5 min: a controller's row may still
name the old address, and a health probe cannot tell one engine from another.
"""

from dataclasses import dataclass, field

from localai_cluster.errors import ClusterError

QUARANTINE = 15.0
RESERVATION = 300.0


class NoFreePort(ClusterError):
    """Every port of the range is in use or resting."""

    code = "no_free_port"


@dataclass
class PortAllocator:
    """Ports `base` to `highest`, both included. Every `now` is in seconds on one monotonic clock."""

    base: int
    highest: int
    _next: int = field(init=False)
    _used: dict[int, str] = field(default_factory=dict, init=False)
    _resting: dict[int, float] = field(default_factory=dict, init=False)
    _free: set[int] = field(default_factory=set, init=False)
    _reserved: dict[int, tuple[str, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._next = self.base

    def allocate(self, key: str, now: float) -> int:
        """A port for `key`: its own last one, an unreserved free one, a new one, any free one. NoFreePort."""
        self._sweep(now)
        port = self._choose(key)
        if port is None:
            raise NoFreePort(
                f"no free port between {self.base} and {self.highest}: {len(self._used)} in use, "
                f"{len(self._resting)} resting for {QUARANTINE:g} s; raise LOCALAI_GRPC_MAX_PORT"
            )
        self._free.discard(port)
        self._reserved.pop(port, None)
        self._used[port] = key
        return port

    def release(self, port: int, now: float) -> None:
        """Gives a port back; it rests first. A port that is not in use is left alone."""
        key = self._used.pop(port, None)
        if key is not None:
            self._resting[port] = now + QUARANTINE
            self._reserved[port] = (key, now + RESERVATION)

    def _choose(self, key: str) -> int | None:
        own = [port for port in self._free if self._reserved.get(port, ("", 0.0))[0] == key]
        if own:
            return min(own)
        unreserved = self._free - self._reserved.keys()
        if unreserved:
            return min(unreserved)
        if self._next <= self.highest:
            self._next += 1
            return self._next - 1
        return min(self._free, default=None)

    def _sweep(self, now: float) -> None:
        rested = {port for port, until in self._resting.items() if until <= now}
        self._free |= rested
        self._resting = {port: until for port, until in self._resting.items() if port not in rested}
        self._reserved = {port: held for port, held in self._reserved.items() if held[1] > now}
