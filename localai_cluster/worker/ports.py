"""The port block of one worker among several on a machine, and the assignment of ports to engines.

A worker serves its probes on one port and its engines on the ports above it. With `find_ports` the worker
takes the first free block of `BLOCK_SIZE` ports. Listening on the probe port reserves the block, because two
workers that start at the same time cannot both listen there. The worker stores its block in the data folder
and tries it first at the next start, so that stored addresses stay valid.
"""

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from localai_cluster.kit.addresses import split_host_port
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.files import replace_file
from localai_cluster.worker.config import MAX_PORT, Config, refuse

log = logging.getLogger(__name__)

QUARANTINE_SECONDS = 15.0
"""Seconds after its release for which a port is not used."""
RESERVATION_SECONDS = 300.0
"""Seconds after its release for which a port is reserved for its last key."""


class NoFreePort(ClusterError):
    """Every port of the range is in use or in quarantine."""

    code = "no_free_port"


@dataclass
class PortAllocator:
    """Assigns the ports from `base` to `highest` to engines. Every `now` is a time of one monotonic clock.

    A released port is not used for 15 s and stays reserved for its last key for 5 min: a row of the control
    plane may still have the old address, and a health probe cannot distinguish engines.
    """

    base: int
    highest: int
    _used: dict[int, str] = field(default_factory=dict, init=False)
    _released: dict[int, tuple[str, float]] = field(default_factory=dict, init=False)
    """By port: the last key, and the time of its release. Ports above these and those in use are new."""

    def allocate(self, key: str, now: float) -> int:
        """Return a port for `key`. Raise NoFreePort.

        In order of preference: the last port of `key`, an unreserved free port, a port that was never used,
        any free port.
        """
        free = {port: at for port, (_, at) in self._released.items() if at + QUARANTINE_SECONDS <= now}
        unreserved = [port for port, at in free.items() if at + RESERVATION_SECONDS <= now]
        own = [port for port in free if port not in unreserved and self._released[port][0] == key]
        never_used = self.base + len(self._used) + len(self._released)
        choices = own or unreserved or ([never_used] if never_used <= self.highest else list(free))
        if not choices:
            raise NoFreePort(
                f"no free port between {self.base} and {self.highest}: {len(self._used)} in use, "
                f"{len(self._released)} in quarantine for {QUARANTINE_SECONDS:g} s. "
                "Raise LOCALAI_GRPC_MAX_PORT"
            )
        port = min(choices)
        self._released.pop(port, None)
        self._used[port] = key
        return port

    def release(self, port: int, now: float) -> None:
        """Return a port to the pool after its quarantine; ignore a port that is not in use."""
        key = self._used.pop(port, None)
        if key is not None:
            self._released[port] = (key, now)


BLOCK_SIZE = 100
"""Number of ports of a block."""
MIN_FREE_ENGINE_PORTS = 10
"""Number of engine ports that must be free when a worker takes a block for the first time."""
BLOCK_FILE = "worker-port"
"""File name, in the data folder, of the stored block."""


def open_probe_listener(config: Config, *, store: bool = True) -> tuple[Config, socket.socket]:
    """Open the listener of the health probes; return it, and the settings with the ports in use.

    With `store`, write the block to the data folder. Raise InvalidSettings or OSError.
    """
    if not config.find_ports:
        return config, _listen_on_probe_port(config)
    stored_base = _read_stored_base(config.data_dir)
    for base in _candidate_base_ports(config.base_port, stored_base):
        block_config = _with_port_block(config, base)
        with contextlib.suppress(_PortInUse):
            listener = _listen_on_probe_port(block_config)
            # Engines of a killed worker may still be stopping, so its own block need not be free.
            if base == stored_base or all(
                is_bindable(port) for port in range(base, base + MIN_FREE_ENGINE_PORTS)
            ):
                if store:
                    _store_base(config.data_dir, base)
                return block_config, listener
            listener.close()
    refuse("addr", f"no block of {BLOCK_SIZE} ports is free from {config.base_port} up")


def is_bindable(port: int) -> bool:
    """Return True if an engine could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


class _PortInUse(Exception):
    """The port is in use."""


def _candidate_base_ports(first: int, stored_base: int) -> Iterator[int]:
    if stored_base:
        yield stored_base
    yield from range(first, MAX_PORT - BLOCK_SIZE, BLOCK_SIZE)


def _with_port_block(config: Config, base: int) -> Config:
    """Return the settings with the ports of the block that begins at `base`."""
    http_host, _ = split_host_port(config.advertise_http_addr)
    return replace(
        config,
        addr=f"{config.advertise_host}:{base}",
        grpc_max_port=base + BLOCK_SIZE - 2,
        http_addr=f"{config.http_bind[0]}:{base - 1}",
        advertise_addr=f"{config.advertise_host}:{base}",
        advertise_http_addr=f"{http_host}:{base - 1}",
    )


def _listen_on_probe_port(config: Config) -> socket.socket:
    host, port = config.http_bind[0].strip("[]"), config.http_bind[1]
    is_wildcard = not host and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if is_wildcard or ":" in host else socket.AF_INET)
    try:
        if is_wildcard:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Two sockets can bind to one port as long as neither of them listens.
        listener.listen()
    except OSError as error:
        listener.close()
        if config.find_ports and error.errno == errno.EADDRINUSE:
            raise _PortInUse from error
        refuse("http_addr", f"cannot listen on {config.http_bind[0]}:{port}: {error.strerror or error}")
    return listener


def _read_stored_base(folder: Path) -> int:
    """Return the first port of the stored block; 0 if there is no valid one."""
    with contextlib.suppress(OSError, ValueError):
        base = int((folder / BLOCK_FILE).read_text(encoding="utf-8"))
        if 1 < base <= MAX_PORT - BLOCK_SIZE:
            return base
    return 0


def _store_base(folder: Path, base: int) -> None:
    """Store the first port of the block. If that fails, the worker only gets other ports later.

    No other worker uses this folder.
    """
    if _read_stored_base(folder) == base:
        return
    try:
        replace_file(folder / BLOCK_FILE, f"{base}\n")
    except OSError as error:
        log.warning("cannot store the ports in %s, so the next start may get others: %s", folder, error)
