"""Ports for the servers that tests start."""

import os
import random
import socket

# Below the range from which systems take the ports of outgoing connections (Linux: 32768 and up): between the
# choice of a port and the start of its server, another test's connection must not take it.
LOWEST, HIGHEST = 18000, 32000
# Every process of a test run draws other ports; tests that seed `random` must not repeat them.
_dice = random.Random(os.urandom(16))


def free_port(count: int = 1) -> int:
    """Return the first of `count` neighbouring ports on which no one listens."""
    while True:
        first = _dice.randrange(LOWEST, HIGHEST - count)
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
