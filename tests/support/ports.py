"""Ports for the servers that tests start."""

import os
import random
import socket

# Below the range from which systems take the ports of outgoing connections (Linux: 32768 and up): between the
# choice of a port and the start of its server, another test's connection must not take it.
LOWEST, HIGHEST = 18000, 32000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_size = (HIGHEST - LOWEST) // _workers
_part = range(LOWEST + _worker % _workers * _size, LOWEST + (_worker % _workers + 1) * _size)
# Other runs may have the same part at once. Tests that seed `random` must not choose where it begins.
_next = random.Random(os.urandom(16)).choice(_part)


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive unused ports.

    Each process of a test run has its own range of ports and cycles through the range, so that a port is not
    given to a second test before the first test's server has started.
    """
    global _next
    while True:
        first = _next if _next + count <= _part.stop else _part.start
        _next = first + count
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
