"""Starts processes of the control plane in a tenth of a second: forks of one that has imported everything.

A test that kills hundreds of controllers would spend most of its time on imports. A fork reads its own
environment for the kill (`points.arm`); what the settings read is that of the cluster. The one that forks is
`forking.py`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import ROOT, STORY, Cluster


@dataclass(frozen=True)
class Fork:
    """One forked process."""

    name: str
    pid: int
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return Path(f"/proc/{self.pid}").exists()

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is there."""
        if self.alive:
            os.kill(self.pid, number)

    def output(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(errors="replace")

    def story(self) -> str:
        """The end of its log."""
        return self.output()[-STORY:]


class Nursery:
    """The process that forks the others, as part of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._home, self._number = cluster.home, 0
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking"],
            cwd=ROOT,
            env=cluster.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        cluster.reaper.add(self._parent.pid, polite=signal.SIGTERM, seconds=5.0, whole=False)

    def fork(self, *argv: str, env: Mapping[str, str] | None = None) -> Fork:
        """Starts one process; it belongs to the cluster's reaper as all others."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._number += 1
        log = self._home / f"fork-{self._number}.log"
        log.touch()
        request = {"argv": argv, "env": dict(env or {}), "log": str(log)}
        self._parent.stdin.write(json.dumps(request) + "\n")
        self._parent.stdin.flush()
        return Fork(argv[-1], int(self._parent.stdout.readline()), log)

    def close(self) -> None:
        """No more forks; those that run are the process reaper's."""
        self._parent.kill()
        self._parent.communicate()
