"""The ports of one worker among several on a machine: found by listening, kept for the next start.

A worker has its probes on one port and its engines on those above it. With `find_ports` it takes the first
free block of `BLOCK` ports. The probes' port is the claim to a block: two workers that start together cannot
both listen there. The block that was found is noted in the data folder and tried first at the next start, so
that addresses which others have stored stay true.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localai_cluster.worker.config import HIGHEST_PORT, Config, host_port, refuse
from localai_cluster.worker.processes import bindable

BLOCK = 100
ENGINE_PORTS = 10
"""Ports for engines that must be free in a block that is taken for the first time."""
NOTE = "worker-port"


def listen(config: Config) -> tuple[Config, socket.socket]:
    """Listens for the probes; the settings with the ports that were found. InvalidSetting, OSError."""
    if not config.find_ports:
        return config, _listener(config)
    remembered = _remembered(config.data_dir)
    for base in _bases(config.base_port, remembered):
        moved = _moved(config, base)
        with contextlib.suppress(_Occupied):
            listener = _listener(moved)
            # The engines of a worker that was killed may still be ending: its own block is taken as it is.
            if base == remembered or all(bindable(port) for port in range(base, base + ENGINE_PORTS)):
                _remember(config.data_dir, base)
                return moved, listener
            listener.close()
    refuse("addr", f"no {BLOCK} ports are free from {config.base_port} on")


class _Occupied(Exception):
    """Something else listens there."""


def _bases(first: int, remembered: int) -> Iterator[int]:
    if remembered:
        yield remembered
    yield from range(first, HIGHEST_PORT - BLOCK, BLOCK)


def _moved(config: Config, base: int) -> Config:
    """The same worker with its engines from `base` on, and below the next worker's probes."""
    http_host, _ = host_port(config.advertise_http_addr)
    return replace(
        config,
        base_port=base,
        max_port=base + BLOCK - 2,
        http_bind=(config.http_bind[0], base - 1),
        advertise_addr=f"{config.advertise_host}:{base}",
        advertise_http_addr=f"{http_host}:{base - 1}",
    )


def _listener(config: Config) -> socket.socket:
    host, port = config.http_bind[0].strip("[]"), config.http_bind[1]
    everywhere = not host and socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET)
    try:
        if everywhere:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Two sockets may be bound to one port as long as neither listens.
        listener.listen()
    except OSError as error:
        listener.close()
        if config.find_ports and error.errno == errno.EADDRINUSE:
            raise _Occupied from error
        refuse("http_addr", f"cannot listen at {config.http_bind[0]}:{port}: {error.strerror or error}")
    return listener


def _remembered(folder: Path) -> int:
    """The first port of the last start's block; 0 if there is no good note."""
    with contextlib.suppress(OSError, ValueError):
        base = int((folder / NOTE).read_text(encoding="utf-8"))
        if 1 < base <= HIGHEST_PORT - BLOCK:
            return base
    return 0


def _remember(folder: Path, base: int) -> None:
    """A lost note costs nothing but the same port; only one worker uses the folder."""
    if _remembered(folder) != base:
        (folder / NOTE).write_text(f"{base}\n", encoding="utf-8")
