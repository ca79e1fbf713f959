"""Sides of a comparison: this tree and an older commit, each with servers and a running product of its own.

The driver, the engine and the load generator are always those of this tree.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from localai_cluster.embedded.bundled_servers import EmbeddedPostgres
from localai_cluster.embedded.resources import SetupError
from tests.benchmarks.bench_gateway import ROWS, insert_rows
from tests.benchmarks.engine import Engine, running
from tests.benchmarks.processor import memory, spent
from tests.conftest import eventually
from tests.support.cluster import ROOT, Cluster, Process
from tests.support.ports import free_port

MODEL = "echo"
PROGRAMS = {"web": "serve", "controller": "controller", "tasks": "qcluster"}
"""Management commands by the name of the process in tables."""
_READY = re.compile(r"ready in ([\d.]+) s")
_ENGINE_NODE = {name: ROWS[name] for name in ("backend_nodes", "node_models")}


@dataclass(frozen=True)
class Tree:
    """Sources, and the Python that runs them."""

    name: str
    root: Path = ROOT
    python: str = sys.executable


def checkout(commit: str) -> Tree:
    """Unpack a commit below `build/base` and install what it locks. Raises SetupError."""
    git = shutil.which("git")
    if git is None:
        raise SetupError("git is not installed, so BASE cannot be checked out.", "Unset BASE.")
    parsed = subprocess.run(
        [git, "rev-parse", "--short=8", "--verify", f"{commit}^{{commit}}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if parsed.returncode:
        raise SetupError(f"BASE: {parsed.stderr.strip()}", "Name a commit of this repository.")
    name = parsed.stdout.strip()
    root = ROOT / "build" / "base" / name
    built = root / ".built"
    if not built.exists():
        shutil.rmtree(root, ignore_errors=True)
        archive = subprocess.run([git, "archive", name], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(root, filter="data")
        environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        done = subprocess.run(
            ["make", "gallery"], cwd=root, env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SetupError(f"`make gallery` failed in {root}: {done.stderr[-300:]}", "Run it there.")
        built.touch()
    return Tree(name, root, str(root / ".venv" / "bin" / "python"))


class Side:
    """`make run` of a tree with servers that are up before, and one loaded model on the engine in Go."""

    def __init__(self, tree: Tree, cluster: Cluster, engine: Engine) -> None:
        self.name, self.tree, self.cluster, self.engine = tree.name, tree, cluster, engine
        self._run: Process | None = None

    @property
    def web(self) -> Process:
        """The supervisor, with the port of its web process."""
        assert self._run is not None
        return self._run

    def start(self) -> float:
        """Start the product; return the seconds until it is ready."""
        environ = {
            "CLUSTER_DATA_DIR": str(self.cluster.home / "data"),
            "CLUSTER_WEB_PROCESSES": "1",
            "HOST": "127.0.0.1",
            "PORT": str(port := free_port()),
        }
        command = ("-m", "localai_cluster.embedded.run")
        self._run = run = self.cluster.spawn("run", *command, env=environ, port=port)

        def is_ready() -> bool:
            assert run.alive, run.story()
            return _READY.search(run.output()) is not None

        eventually(is_ready, seconds=120, what=f"the product is ready: {run.log}")
        self.insert_node()
        eventually(
            lambda: self.cluster.embed(run, model=MODEL).status_code == 200, what=f"it answers: {run.log}"
        )
        found = _READY.search(run.output())
        assert found
        return float(found[1])

    def insert_node(self) -> None:
        """Plant the engine's node, whose last heartbeat lies ahead: it stays healthy without a worker."""
        if not self.cluster.rows("SELECT 1 FROM backend_nodes WHERE name = 'bench'"):
            insert_rows(self.cluster, MODEL, self.engine.address, _ENGINE_NODE)
        self.cluster.execute("UPDATE backend_nodes SET last_heartbeat = '2100-01-01' WHERE name = 'bench'")

    def stop(self) -> None:
        """Stop the product, not its servers."""
        self.web.child.terminate()
        self.web.child.wait(60)
        self.cluster.end(self.web)

    def pids(self) -> dict[str, int]:
        """Return the product's processes, those that this tree has, and PostgreSQL."""
        found = {"PostgreSQL": self.cluster.postgres.pid}
        for child in psutil.Process(self.web.child.pid).children():
            words = child.cmdline()
            found |= {name: child.pid for name, command in PROGRAMS.items() if command in words}
        return found

    def spent(self) -> dict[str, float]:
        """Return the processor seconds of each process so far."""
        return {name: spent(pid) for name, pid in self.pids().items()} | {
            "engine": spent(self.engine.process.pid)
        }

    def memory(self) -> dict[str, float]:
        """Return megabytes (PSS) of web, controller and tasks, and their sum."""
        found = {name: memory(pid) for name, pid in self.pids().items() if name in PROGRAMS}
        return {f"{name} MB": size for name, size in found.items()} | {"all MB": sum(found.values())}


def costs(before: Mapping[str, float], after: Mapping[str, float], requests: int) -> dict[str, float]:
    """Return milliseconds of CPU a request, by process and of the whole server side."""
    each = {name: 1000 * (after[name] - before[name]) / max(requests, 1) for name in before}
    web, rows, rest = each["web"], each["PostgreSQL"], each.get("controller", 0.0) + each.get("tasks", 0.0)
    named = {"web ms": web, "PostgreSQL ms": rows, "controller, tasks ms": rest}
    return named | {"server side ms": web + rows + rest, "engine ms": each["engine"]}


@contextmanager
def started(tree: Tree) -> Iterator[Side]:
    """A side that is ready; its servers and its data are gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="lac-measure-"))
    cluster = Cluster(home, root=tree.root, python=tree.python)
    cluster.postgres = EmbeddedPostgres(home / "pg")
    try:
        cluster.start()
        with running(cluster.reaper, go=True) as engine:
            side = Side(tree, cluster, engine)
            side.start()
            yield side
    except BaseException:
        for process in cluster.processes:
            print(f"--- {process.name} of {tree.name}: {process.state}\n{process.story()}")
        raise
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)
