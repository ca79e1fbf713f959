"""A whole cluster of real processes, used through its public interfaces only.

The servers are the embedded ones, and every process runs the production command, on free ports with temporary
data. A reaper ends all processes even if the test run itself is killed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psycopg

from localai_cluster.embedded.bundled_servers import EmbeddedPostgres, EmbeddedValkey
from localai_cluster.embedded.nats import BusKeys, EmbeddedNats
from localai_cluster.kit import clock, processes
from tests.conftest import eventually
from tests.support import forking
from tests.support.ports import free_port
from tests.support.postgres import FastPostgres

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "registration-token-of-the-test-cluster"
ADMIN_KEY = "static-admin-key-of-the-test-cluster"
SCRAPER = "scraper-token-of-the-test-cluster"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
STORY = 8000
"""Characters of each log that are printed after a failure."""


@dataclass
class Process:
    """A started process and the file with its output."""

    name: str
    child: "subprocess.Popen[bytes]"
    log: Path
    port: int = 0

    @property
    def url(self) -> str:
        """Base URL of a web process."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """True if the process still runs."""
        return self.child.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to this process, not to its children, as in a crash."""
        self.child.kill()
        self.child.wait()

    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    @property
    def state(self) -> str:
        """Return "runs", or how the process ended."""
        return "runs" if self.alive else f"ended with {self.child.returncode}"

    def story(self) -> str:
        """Return the end of the log without frames of other packages, which would take most of the space."""
        lines = self.output().splitlines()
        told = [line for line in lines if not line.startswith((" ", "\t")) or f'"{ROOT}/' in line]
        return "\n".join(line[:400] for line in told if "/.venv/" not in line)[-STORY:]


@dataclass
class Cluster:
    """Servers, processes and clients of one test cluster."""

    home: Path
    extra: Mapping[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    root: Path = ROOT
    """The source tree of the product; `make measure` runs an older commit in comparison."""
    python: str = sys.executable
    forks: ClassVar[bool] = False
    """True in a test run: processes are forked, because a start costs one to two seconds of processor time.
    """

    def __post_init__(self) -> None:
        self.started = 0
        self.reaper = processes.ProcessReaper()
        self.postgres: EmbeddedPostgres = FastPostgres(self.home / "pg")
        self.valkey = EmbeddedValkey(self.home / "vk", password="valkey-password-of-the-tests")
        self.nats = EmbeddedNats(
            self.home / "nats",
            port=free_port(),
            keys=BusKeys.generate(),
        )
        self.gallery = self.root / "build" / "gallery"
        self.models = self.home / "models"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the server processes."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.root),
            "PYTHONUNBUFFERED": "1",
            "CLUSTER_DATA_DIR": str(self.home),
            "DATABASE_URL": self.postgres.url,
            "REDIS_URL": self.valkey.url,
            "LOCALAI_NATS_URL": self.nats.url,
            "LOCALAI_NATS_ACCOUNT_SEED": self.nats.keys.account.seed,
            "CLUSTER_NATS_OPERATOR_SEED": self.nats.keys.operator.seed,
            "CLUSTER_NATS_SYSTEM_SEED": self.nats.keys.system.seed,
            "LOCALAI_REGISTRATION_TOKEN": TOKEN,
            "LOCALAI_API_KEY": ADMIN_KEY,
            "LOCALAI_MODELS_PATH": str(self.models),
            "CLUSTER_GALLERY_DIR": str(self.gallery),
            "LOCALAI_BACKEND_GALLERIES": json.dumps(
                [
                    {"name": "local", "url": "cluster:index.yaml"},
                    {"name": "tests", "url": (self.gallery / "tests.yaml").as_uri()},
                ]
            ),
            "LOCALAI_AUTO_APPROVE_NODES": "true",
            "CLUSTER_OPERATION_LEASE": "4s",
            "SECRET_KEY": "secret-key-of-the-test-cluster-only",
            **self.reaper.env,
            **self.extra,
        }

    def start(self) -> None:
        """Start the servers and create the schema."""
        subprocess.run(
            [self.python, str(self.root / "examples/gallery/build.py")],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        shutil.copytree(self.root / "examples" / "models", self.models)
        for server in (self.postgres, self.valkey, self.nats):
            server.start(self.reaper)

    def manage(self, *arguments: str, **more: str) -> str:
        """Run a management command to its end; return its output."""
        env = {**self.environment, **more}
        if self.forks:
            done = forking.run_command(*arguments, env=env, cwd=self.root, folder=self.home)
        else:
            done = subprocess.run(
                [self.python, "-W", forking.STRICT, "manage.py", *arguments],
                cwd=self.root,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def spawn(self, name: str, *argv: str, env: Mapping[str, str], port: int = 0) -> Process:
        """Start a long-running process in its own session."""
        self.started += 1
        log, env = self.home / f"{name}-{self.started}.log", {**self.environment, **env}
        with log.open("wb") as file:
            if self.forks and forking.can_fork(argv):
                child: subprocess.Popen[bytes] = forking.Fork(argv, env=env, cwd=self.root, log=log)
            else:
                child = processes.spawn(
                    [self.python, *argv], env=env, cwd=self.root, stdout=file, stderr=subprocess.STDOUT
                )
        self.reaper.add(child.pid, polite=signal.SIGTERM, seconds=10.0, whole=False)
        process = Process(name, child, log, port)
        self.processes.append(process)
        return process

    def web(self, **env: str) -> Process:
        """Start a web process and wait until it is ready."""
        port = free_port()
        process = self.spawn("web", "manage.py", "serve", port=port, env={"PORT": str(port), **env})
        eventually(lambda: is_ready(process), seconds=30, what=f"web is ready: {process.log}")
        return process

    def controller(self, **env: str) -> Process:
        """Start a controller and wait until it is ready."""
        process = self.spawn("controller", "manage.py", "controller", env=env)
        eventually(lambda: "is ready" in process.output(), seconds=20, what=f"controller: {process.log}")
        return process

    def tasks(self) -> Process:
        """Start a process that runs the scheduled tasks."""
        process = self.spawn("tasks", "manage.py", "qcluster", env={})
        eventually(lambda: runs_tasks(process), seconds=30, what=f"tasks: {process.log}")
        return process

    def worker(self, name: str, web: Process, *, wait: bool = True, **env: str) -> Process:
        """Start a worker with its own data folder, registered with `web`."""
        home = self.home / f"worker-{name}"
        for folder in ("backends", "models"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        process = self.spawn(
            f"worker-{name}",
            "-m",
            "localai_cluster.worker",
            env={
                "LOCALAI_NODE_NAME": name,
                "LOCALAI_REGISTER_TO": web.url,
                "LOCALAI_ADDR": f"127.0.0.1:{free_port()}",
                "LOCALAI_HTTP_ADDR": f"127.0.0.1:{free_port()}",
                "LOCALAI_BACKENDS_PATH": str(home / "backends"),
                "LOCALAI_MODELS_PATH": str(home / "models"),
                "LOCALAI_WORKER_SOURCE_ROOTS": str(self.gallery),
                "LOCALAI_HEARTBEAT_INTERVAL": "2s",
                **env,
            },
        )
        if wait:
            eventually(lambda: self.node(web, name), seconds=20, what=f"{name} registers: {process.log}")
        return process

    def node(self, web: Process, name: str) -> dict[str, Any] | None:
        """Return the node of this name from the API; None if there is none."""
        found: list[dict[str, Any]] = self.get(web, "/api/nodes").json()
        return next((node for node in found if node["name"] == name), None)

    def get(self, web: Process, path: str) -> httpx.Response:
        """Send GET as admin."""
        return call("GET", web.url + path, headers=ADMIN, timeout=120)

    def post(self, web: Process, path: str, body: Any = None, *, timeout: float = 120) -> httpx.Response:
        """Send POST as admin."""
        return call("POST", web.url + path, headers=ADMIN, json=body, timeout=timeout)

    def embed(
        self, web: Process, text: Any = "a cat", *, model: str = "echo", timeout: float = 120
    ) -> httpx.Response:
        """Send one embeddings request as admin."""
        return self.post(web, "/v1/embeddings", {"model": model, "input": text}, timeout=timeout)

    def rows(self, query: str, *values: Any, **named: Any) -> list[tuple[Any, ...]]:
        """Query the database, for facts that no interface shows."""
        with psycopg.connect(self.postgres.url) as link:
            return link.execute(query, named or values).fetchall()

    def execute(self, statement: str, *values: Any) -> None:
        """Change rows for which there is no interface."""
        with psycopg.connect(self.postgres.url) as link:
            link.execute(statement, values or None)

    def end(self, process: Process) -> None:
        """Stop one process."""
        group = processes.group_of(process.child.pid, polite=signal.SIGTERM, seconds=10.0, whole=False)
        processes.end_child(process.child, group)
        self.processes.remove(process)

    def stop(self) -> None:
        """Stop all processes, newest first."""
        for process in reversed(self.processes[:]):
            self.end(process)
        for server in (self.nats, self.valkey, self.postgres):
            server.stop()
        self.reaper.close()


_TRANSPORT = httpx.HTTPTransport(verify=False, limits=httpx.Limits(max_keepalive_connections=0))


def call(method: str, url: str, **options: Any) -> httpx.Response:
    """Send one request on a connection of its own.

    The functions of httpx read the proxies and create a TLS context for each request.
    """
    return httpx.Client(transport=_TRANSPORT, trust_env=False).request(method, url, **options)


def runs_tasks(process: Process) -> bool:
    """Return True if the process runs scheduled tasks; fail at once if it ended."""
    assert process.alive, process.story()
    return "ready to run tasks" in process.output()


def is_ready(process: Process) -> bool:
    """Return True if the web process answers /readyz with 200; fail at once if it ended."""
    assert process.alive, process.story()
    try:
        return call("GET", f"{process.url}/readyz", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def running_cluster(**extra: str) -> Iterator[Cluster]:
    """Yield a started cluster without processes.

    At the end everything is removed, and the logs are printed if the test failed.
    """
    home = Path(tempfile.mkdtemp(prefix="lac-cluster-"))
    cluster = Cluster(home, extra)
    try:
        cluster.start()
        yield cluster
    except BaseException:
        print(rows_left(cluster))
        for process in cluster.processes:
            print(f"--- {process.name} ({process.log}): {process.state}\n{process.story()}")
        raise
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


def rows_left(cluster: Cluster) -> str:
    """Return operations, schedules and waiting tasks as text, if the database responds."""
    asked = (
        "SELECT kind, element, status, phase, message, fence, attempts, lost_leases, lease_owner, lease_until"
        " FROM operations ORDER BY seq",
        "SELECT name, next_run FROM django_q_schedule ORDER BY name",
        "SELECT id, lock FROM django_q_ormq ORDER BY id",
    )
    try:
        found = [f"--- {query}\n" + "\n".join(map(str, cluster.rows(query))) for query in asked]
    except psycopg.Error as error:
        return f"--- the database does not answer: {error}"
    return "\n".join([f"--- {clock.now()}", *found])


def engines_of(home: Path) -> list[int]:
    """Return the processes whose working directory is below `home`: engines that a worker started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                cwd = (entry / "cwd").readlink()
            except OSError:
                continue
            if cwd.is_relative_to(home) and cwd != home:
                found.append(int(entry.name))
    return found
