"""Assigns ports to engines: pure state and rules, time is a parameter.

A released port is not reused for 15 s and stays reserved for its last key for 5 min: a row of the control
plane may still have the old address, and a health probe cannot distinguish engines.
"""

from dataclasses import dataclass, field

from localai_cluster.kit.errors import ClusterError

QUARANTINE = 15.0
RESERVATION = 300.0


class NoFreePort(ClusterError):
    """Every port of the range is in use or in quarantine."""

    code = "no_free_port"


@dataclass
class PortAllocator:
    """Ports `base` to `highest`, inclusive. Every `now` is in seconds of the same monotonic clock."""

    base: int
    highest: int
    _next: int = field(init=False)
    _used: dict[int, str] = field(default_factory=dict, init=False)
    _quarantined: dict[int, float] = field(default_factory=dict, init=False)
    _free: set[int] = field(default_factory=set, init=False)
    _reserved: dict[int, tuple[str, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._next = self.base

    def allocate(self, key: str, now: float) -> int:
        """Return a port for `key`: its last one, an unreserved free one, a new one, or any free one.

        Raise NoFreePort.
        """
        self._sweep(now)
        port = self._choose(key)
        if port is None:
            raise NoFreePort(
                f"no free port between {self.base} and {self.highest}: {len(self._used)} in use, "
                f"{len(self._quarantined)} in quarantine for {QUARANTINE:g} s. Raise LOCALAI_GRPC_MAX_PORT"
            )
        self._free.discard(port)
        self._reserved.pop(port, None)
        self._used[port] = key
        return port

    def release(self, port: int, now: float) -> None:
        """Return a port to the pool after its quarantine; ignore a port that is not in use."""
        key = self._used.pop(port, None)
        if key is not None:
            self._quarantined[port] = now + QUARANTINE
            self._reserved[port] = (key, now + RESERVATION)

    def _choose(self, key: str) -> int | None:
        reserved = [port for port in self._free if self._reserved.get(port, ("", 0.0))[0] == key]
        if reserved:
            return min(reserved)
        unreserved = self._free - self._reserved.keys()
        if unreserved:
            return min(unreserved)
        if self._next <= self.highest:
            self._next += 1
            return self._next - 1
        return min(self._free, default=None)

    def _sweep(self, now: float) -> None:
        released = {port for port, until in self._quarantined.items() if until <= now}
        self._free |= released
        self._quarantined = {port: until for port, until in self._quarantined.items() if port not in released}
        self._reserved = {
            port: reservation for port, reservation in self._reserved.items() if reservation[1] > now
        }
