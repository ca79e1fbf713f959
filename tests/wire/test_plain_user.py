"""A worker without root and without capabilities (docs/operating/slurm.md)."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.wire.node import Node
from tests.wire.servers import NatsServer, ask, until

UNPRIVILEGED = ("unshare", "--user")
"""Runs a command as a user that has no rights beyond those to its own files."""


def prefix() -> tuple[str, ...]:
    """What makes a plain user of the one who runs the tests; skips the test where nothing does."""
    if os.geteuid():
        return ()
    if not shutil.which(UNPRIVILEGED[0]) or subprocess.run([*UNPRIVILEGED, "true"], check=False).returncode:
        pytest.skip("root, and no user namespaces to run as a plain user")
    return UNPRIVILEGED


def capabilities(pid: int) -> int:
    """The effective capabilities of a process, as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)


async def test_a_plain_user_runs_a_worker_with_its_engines(tmp_path: Path) -> None:
    """It installs, starts, takes files and ends in order; nothing is left of it."""
    server = NatsServer(tmp_path)
    node = Node(tmp_path / "node", server)
    node.prefix = prefix()
    try:
        await server.start()
        await node.start()
        process = node.process
        assert process
        assert capabilities(process.pid) == 0
        address = await node.load("plain", "plain")
        assert await node.healthy(address)
        put = await ask(node.http, "PUT", "/v1/files/models/m/f", node.engine_token, b"weights")
        assert put.status == 200
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None, "the worker ends", 30)
        assert process.returncode == 0
        assert node.pids() == {}
    finally:
        await node.stop()
        server.stop()
