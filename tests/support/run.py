"""The process of `make run` under test."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.demo.client import Target
from localai_cluster.embedded.run import find_node, is_ok
from localai_cluster.kit import processes
from tests.conftest import eventually

ROOT = Path(__file__).resolve().parents[2]
_PASSED = {name: value for name, value in os.environ.items() if name in ("PATH", "CLUSTER_SERVER")}
"""Variables that are passed on, because `make sweep` chooses the web server."""
CHILDREN = ("postgres", "nats", "valkey", "web", "controller", "worker")


class Run:
    """One run in a data directory, with its output in a file; `prefix` is put before its command."""

    def __init__(
        self,
        data: Path,
        port: int,
        prefix: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-m", "localai_cluster.embedded.run"),
        cwd: Path = ROOT,
        /,
        **more: str,
    ) -> None:
        self.data, self.port = data, port
        self.log = data.parent / f"run-{len(list(data.parent.glob('run-*')))}.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, *command],
                cwd=cwd,
                env={**_PASSED, "CLUSTER_DATA_DIR": str(data), "PORT": str(port), **more},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    @property
    def mark(self) -> str:
        """Return the mark in the environment of its children."""
        return str(json.loads((self.data / "run.lock").read_text())["mark"])

    @property
    def key(self) -> str:
        """Return the admin's API key."""
        return (self.data / "secrets" / "admin_api_key").read_text().strip()

    @property
    def target(self) -> Target:
        """Return its address, and the admin's key."""
        return Target(f"http://127.0.0.1:{self.port}", self.key)

    def wait_ready(self) -> None:
        """Wait for its announcement; fail with its output if it ends first."""
        eventually(
            lambda: re.search(r"\bready in \d", self.output) or self.process.poll() is not None, seconds=90
        )
        assert self.process.poll() is None, self.output

    def works(self) -> bool:
        """Return True if it is ready and its worker is healthy."""
        url, key = self.target.url, self.target.key
        return is_ok(f"{url}/readyz") and find_node(url, key, "local").get("status") == "healthy"

    def leaders(self) -> dict[str, int]:
        """Return the first process of each child, found by its mark and its session."""
        found = {}
        for name in CHILDREN:
            for one in processes.marked_processes(f"{self.mark}/{name}"):
                if one.session == one.pid and (name != "postgres" or one.parent == self.process.pid):
                    found[name] = one.pid
        return found


def touching(data: Path) -> dict[int, str]:
    """Return the processes with `data` as working directory, in their arguments or in their environment."""
    found = {}
    for one in processes.processes():
        place = Path("/proc", str(one.pid))
        try:
            words = (place / "cmdline").read_bytes()
            told = words + (place / "environ").read_bytes() + os.fsencode((place / "cwd").readlink())
        except OSError:
            continue
        if os.fsencode(data) in told:
            found[one.pid] = words.replace(b"\0", b" ").decode(errors="replace")
    return found
