"""`make run`'s own process under test."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.demo.client import Target
from localai_cluster.embedded.run import answers, find_node
from localai_cluster.kit import processes
from tests.conftest import eventually

ROOT = Path(__file__).resolve().parents[2]
_PASSED = {name: value for name, value in os.environ.items() if name in ("PATH", "CLUSTER_SERVER")}
"""`make sweep` chooses the web server."""
CHILDREN = ("postgres", "nats", "valkey", "web", "controller", "worker")


class Run:
    """One run over a data directory, its output in a file; `prefix` goes before its command."""

    def __init__(self, data: Path, port: int, prefix: Sequence[str] = (), /, **more: str) -> None:
        self.data, self.port = data, port
        self.log = data.parent / f"run-{len(list(data.parent.glob('run-*')))}.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "localai_cluster.embedded.run"],
                cwd=ROOT,
                env={**_PASSED, "CLUSTER_DATA_DIR": str(data), "PORT": str(port), **more},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace")

    @property
    def mark(self) -> str:
        """What its children carry in their environment."""
        return str(json.loads((self.data / "run.lock").read_text())["mark"])

    @property
    def key(self) -> str:
        """The admin's API key."""
        return (self.data / "secrets" / "admin_api_key").read_text().strip()

    @property
    def target(self) -> Target:
        """Where it listens, and the admin's key."""
        return Target(f"http://127.0.0.1:{self.port}", self.key)

    def wait_ready(self) -> None:
        """Waits for its announcement; fails with its output when it ends first."""
        eventually(
            lambda: re.search(r"\bready in \d", self.output) or self.process.poll() is not None, seconds=90
        )
        assert self.process.poll() is None, self.output

    def works(self) -> bool:
        """Whether it is ready and its worker is healthy."""
        url, key = self.target.url, self.target.key
        return answers(f"{url}/readyz") and find_node(url, key, "local").get("status") == "healthy"

    def leaders(self) -> dict[str, int]:
        """The first process of each child, told by its mark and its session."""
        found = {}
        for name in CHILDREN:
            for one in processes.marked_processes(f"{self.mark}/{name}"):
                if one.session == one.pid and (name != "postgres" or one.parent == self.process.pid):
                    found[name] = one.pid
        return found


def touching(data: Path) -> dict[int, str]:
    """Processes that work in `data`, name it in their arguments or carry it in their environment."""
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
