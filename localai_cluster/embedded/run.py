"""`make run`: the whole cluster on this machine, in the foreground, until Ctrl-C.

It checks the machine, starts PostgreSQL, NATS and Valkey (or checks the operator's own servers), migrates the
database and enrols the local worker. Then it starts web, controller and worker, waits until all are ready,
and prints how to use the cluster. Every failure is one line with a hint, and exit code 1.
"""

import errno
import json
import os
import shlex
import signal
import ssl
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from localai_cluster import join_script
from localai_cluster.embedded import build, lock, preparation
from localai_cluster.embedded.bundled_servers import EmbeddedPostgres
from localai_cluster.embedded.layout import (
    EXAMPLES_FOLDER,
    GALLERY_FOLDER,
    LOCAL_WORKER_NAME,
    SERVER_URLS_FILE,
    WORKER_COMMAND,
    Layout,
    free_bytes,
    manage,
)
from localai_cluster.embedded.lock import DataLock, end_leftovers
from localai_cluster.embedded.preparation import PASSWORD_CHANGED_LINE, Preparation
from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.server import EmbeddedServer, Program, Supervisor, wait_for
from localai_cluster.embedded.terminal import Foreground, Log
from localai_cluster.kit import clock, processes
from localai_cluster.kit.files import replace_file
from localai_cluster.kit.processes import describe_exit

NEEDED_BYTES = 512 * 1024 * 1024
"""Free bytes that the start requires: enough for a new database and one backend."""

SERVERS_TIMEOUT = 30.0
READY_TIMEOUT = 120.0
WORKER_STOP_SECONDS = 120.0
"""Seconds for the worker's stop: it drains its node, waits for requests, deregisters and ends its engines."""
MAKE_BEGAN_VARIABLE = "CLUSTER_MAKE_BEGAN"
"""Variable with the time when `make run` was called, in seconds since 1970."""
_COPIED_NOTICE = (
    "this data folder is a copy of another one: this cluster gets new keys for its message bus, and its nodes"
    " are offline until their workers register here"
)


class StartCancelled(Exception):
    """A stop was requested during the start."""


class Cluster:
    """The whole cluster on one data directory, from the first check to the last process."""

    def __init__(self, environ: Mapping[str, str], log: Log) -> None:
        self.log = log
        self.layout = Layout.of(environ)
        self.stopping = threading.Event()
        self._lock = DataLock(self.layout.data_dir)
        self._copied = lock.is_copy(self.layout.data_dir)
        self._reaper: processes.ProcessReaper | None = None
        self._supervisor: Supervisor | None = None
        self._preparation: Preparation | None = None
        self.password_changed = False
        """Whether the initial password of the admin is not the password any more."""
        self.servers: dict[str, EmbeddedServer] = {}
        self._asked = 0

    def start(self) -> None:
        """Start everything; return when the cluster is ready.

        Raise SetupError, or StartCancelled after `ask_to_stop`.
        """
        self._clean_after_killed_run()
        self._check_machine()
        self._reaper = reaper = processes.ProcessReaper(
            self._lock.new_mark(), replaced=self._log_replaced_reaper
        )
        self._supervisor = supervisor = Supervisor(self.log, reaper)
        self._lock.note(port=self.layout.port, host=self.layout.host, mark=reaper.mark)
        self.servers = self.layout.servers()
        product = self.layout.product_environment(self.servers)
        # What is wrong with the settings is said before anything starts.
        preparation = self._preparation = Preparation(
            {**product, **self.layout.bootstrap_environment(copied=self._copied), **reaper.env}
        )
        preparation.wait_checked()
        servers = [Program.of(member, rank) for rank, member in enumerate(self.servers.values())]
        self._launch_programs(supervisor, servers)
        self._wait_until_ready(supervisor, servers)
        urls = {name: member.url for name, member in self.servers.items()}
        replace_file(self.layout.secrets.directory / SERVER_URLS_FILE, json.dumps(urls) + "\n")
        self._offer_package()
        self._raise_if_cancelled()
        self.layout.seed_models()
        preparation.migrate()
        *programs, worker = self._programs(product)
        if not self._copied:  # the nodes of a copy are marked before anything reads them
            self._launch_programs(supervisor, programs)
        self._finish_preparation(preparation)
        lock.claim(self.layout.data_dir)
        if self._copied:
            self._launch_programs(supervisor, programs)
        self._wait_until_ready(supervisor, programs)
        before = self._last_heartbeat()
        self._launch_programs(supervisor, [worker])
        self._wait_until_ready(supervisor, [worker])
        url, trust = f"{self.layout.probe_url}/readyz", self.layout.probe_trust
        if not wait_for(lambda: self.stopping.is_set() or is_ok(url, trust), READY_TIMEOUT):
            raise SetupError(f"{url} does not become ready.", "See the output above.")
        self._raise_if_cancelled()
        self._wait_registered(before)

    def ask_to_stop(self, *_: Any) -> None:
        """Request an orderly stop; a second call ends all waits. Safe in a signal handler.

        A migration is interrupted: each one is a transaction, and another process may block it.
        """
        self._asked += 1
        self.stopping.set()
        if self._preparation:
            self._preparation.interrupt()
        if self._asked > 1 and self._supervisor:
            self._supervisor.hurry()

    def stop(self) -> None:
        """Stop all processes in order and release the data directory."""
        if self._preparation:
            self._preparation.close()
        if self._supervisor:
            killed = self._supervisor.stop()
            if killed:
                self.log.say("run", f"killed: {', '.join(killed)}")
        if self._reaper:
            self._reaper.close()
        if self.layout.sockets.parent != self.layout.data_dir:
            _remove_if_empty(self.layout.sockets)
        self._lock.release()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the running programs, by name."""
        return self._supervisor.pids() if self._supervisor else {}

    def _raise_if_cancelled(self) -> None:
        if self.stopping.is_set():
            raise StartCancelled

    def _launch_programs(self, supervisor: Supervisor, programs: Sequence[Program]) -> None:
        self._raise_if_cancelled()
        for program in programs:
            supervisor.launch(program)

    def _wait_until_ready(self, supervisor: Supervisor, programs: Sequence[Program]) -> None:
        for program in programs:
            supervisor.settle(program, seconds=READY_TIMEOUT, cancelled=self.stopping.is_set)
        self._raise_if_cancelled()

    def _log_replaced_reaper(self, code: int) -> None:
        self.log.say("run", f"process reaper ended ({describe_exit(code)}), restarted")

    def _clean_after_killed_run(self) -> None:
        before = self._lock.taken_over
        if before:
            self.log.say("run", f"cleaning up after a killed run (process id {before.get('pid')})")
            EmbeddedPostgres(self.layout.data_dir / "postgres").end_leftovers()
            end_leftovers(before["mark"])
        if self._copied:
            self.log.say("run", _COPIED_NOTICE)
            self.layout.forget_original()

    def _check_machine(self) -> None:
        free = free_bytes(self.layout.data_dir)
        if free < NEEDED_BYTES:
            raise SetupError(
                f"{self.layout.data_dir} has {free // 2**20} MB free; {NEEDED_BYTES // 2**20} MB are needed.",
                "Free up space, or choose another CLUSTER_DATA_DIR.",
            )
        self.layout.check_port()
        settings = self.layout.settings
        if settings.database_url:
            preparation.check_database(settings.database_url)
        if settings.redis_url:
            preparation.check_redis(settings.redis_url)
        if settings.nats_url:
            preparation.check_nats(settings.nats_url, settings.nats_account_seed, settings.nats_tls)
        if not (GALLERY_FOLDER / "index.yaml").exists():
            raise SetupError(f"The example gallery is missing from {GALLERY_FOLDER}.", "Run `make gallery`.")

    def _offer_package(self) -> None:
        """Build the wheel for other machines if it is missing or outdated; log a failure and continue."""
        if not self.layout.open_to_others or self.layout.given("CLUSTER_WHEEL_DIR"):
            return
        try:
            if build.build_wheel():
                self.log.say("run", "built the worker package for other machines")
        except (SetupError, OSError) as error:
            self.log.say("run", f"other machines cannot install the worker: {error}")

    def _finish_preparation(self, preparation: Preparation) -> None:
        """Wait for `bootstrap` and log its output. Raise SetupError if it fails."""
        said = preparation.finish().splitlines()
        self.password_changed = PASSWORD_CHANGED_LINE in said
        if told := [line for line in said if line != PASSWORD_CHANGED_LINE]:
            self.log.say("run", "\n".join(told))

    def _programs(self, product: Mapping[str, str]) -> list[Program]:
        """Return the programs web, controller and worker in start order. The highest rank stops first."""
        layout, health = self.layout, f"{self.layout.probe_url}/healthz"
        trust = layout.probe_trust
        worker = layout.worker_environment(LOCAL_WORKER_NAME, layout.data_dir / "worker")
        wait = self._wait_for_servers
        return [
            Program(
                "web", manage("serve"), product, rank=12, prepare=wait, ready=lambda: is_ok(health, trust)
            ),
            Program("controller", manage("controller", "--tasks"), product, rank=11, prepare=wait),
            Program("worker", WORKER_COMMAND, worker, rank=13, seconds=WORKER_STOP_SECONDS),
        ]

    def _wait_for_servers(self) -> None:
        # A program that restarts before its database is back would only fail and wait longer.
        servers = self.servers.values()
        wait_for(lambda: self.stopping.is_set() or all(one.ready() for one in servers), SERVERS_TIMEOUT)

    def _last_heartbeat(self) -> str:
        """Return the local worker's last heartbeat in the registry; each registration changes it."""
        wait_for(lambda: self.stopping.is_set() or bool(self._find_local_node()), READY_TIMEOUT)
        self._raise_if_cancelled()
        return str(self._find_local_node().get("last_heartbeat", ""))

    def _wait_registered(self, before: str) -> None:
        """Wait until the local worker has registered.

        Log a failure, since the cluster works without the worker.
        """

        def registered() -> bool:
            return bool(node := self._find_local_node()) and node.get("last_heartbeat") != before

        if not wait_for(lambda: self.stopping.is_set() or registered(), READY_TIMEOUT):
            self.log.say(
                "run",
                "the local worker has not registered; see its output above (worker |). "
                "The cluster keeps running without it.",
            )
        elif (status := self._find_local_node().get("status", "healthy")) != "healthy":
            page = f"{self.layout.base_url}/nodes"
            self.log.say("run", f"the local worker is {status} and receives no requests; see {page}")
        self._raise_if_cancelled()

    def _find_local_node(self) -> Mapping[str, Any]:
        url, trust = self.layout.probe_url, self.layout.probe_trust
        return find_node(url, self.layout.admin_key, LOCAL_WORKER_NAME, trust)


@cache
def _probe_client(trust: ssl.SSLContext | bool) -> httpx.Client:
    """Return the shared HTTP client for probes: creating a TLS context for each call would take 20 ms."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=2, trust_env=False, verify=trust, limits=limits)


def is_ok(url: str, trust: ssl.SSLContext | bool = True) -> bool:
    """Return True if a GET of the URL returns 200."""
    try:
        return _probe_client(trust).get(url).status_code == 200
    except httpx.HTTPError:
        return False


def find_node(url: str, key: str, name: str, trust: ssl.SSLContext | bool = True) -> Mapping[str, Any]:
    """Return the node with this name; empty if it does not exist or the registry does not respond."""
    headers = {"Authorization": f"Bearer {key}"}
    try:
        found = _probe_client(trust).get(f"{url}/api/nodes", headers=headers).json()
    except (httpx.HTTPError, ValueError):
        return {}
    nodes = found.get("nodes", []) if isinstance(found, dict) else found
    return next((node for node in nodes if node.get("name") == name), {})


def print_instructions(cluster: Cluster, seconds: float) -> None:
    """Print the address, the sign-in and example requests."""
    layout, log = cluster.layout, cluster.log
    log.say("run", f"ready in {seconds:.1f} s: open {layout.base_url} in a browser")
    log.say("run", f"sign in as admin; {_initial_password(cluster)}")
    if layout.open_to_others:
        _announce_join_command(cluster)
    log.say("run", f"talk to a model: {layout.base_url}/app/chat")
    for request in example_requests(layout, served_models(layout)):
        log.say("run", f"or paste, for {request.what}:")
        log.say("run", request.line)


def _initial_password(cluster: Cluster) -> str:
    """Return a sentence that states where the initial password is, or that it was changed."""
    if cluster.password_changed:
        return "its password was changed since the first start"
    kept = cluster.layout.secrets
    if kept.given("admin_password"):
        return f"the initial password is in {kept.path('admin_password') or 'CLUSTER_ADMIN_PASSWORD'}"
    where = kept.value("admin_password") if cluster.log.terminal else f"in {kept.path('admin_password')}"
    return f"the initial password is {where} (you choose a new one when you sign in)"


def _announce_join_command(cluster: Cluster) -> None:
    """Print the shell command that adds a machine, on a terminal only: it holds a join token.

    Any other output gets the path of the file with the command.
    """
    layout, log = cluster.layout, cluster.log
    (layout.secrets.directory / "worker_command").unlink(missing_ok=True)  # what earlier versions wrote
    path = layout.join_command
    if not path.exists():
        log.say("run", "to add a worker on another machine, press Add a node on the Nodes page")
        return
    wheel = join_script.find_wheel(layout.settings.wheel_dir)
    url = layout.settings.public_url or layout.public_url
    for warning in join_script.join_warnings(url, host=layout.host, wheel=wheel):
        log.say("run", f"to add a worker on another machine: {warning}")
    if wheel is None:
        return
    shown = path.read_text(encoding="utf-8").strip() if log.terminal else f"the line in {path}"
    log.say("run", f"to add a worker on another machine, run there within 1 h: {shown}")


def _remove_if_empty(path: Path) -> None:
    for leftover in path.glob(".s.PGSQL.*"):
        leftover.unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()


def run(environ: Mapping[str, str], log: Log, forwarded: Callable[[Cluster], None]) -> None:
    """Start the cluster, print how to use it, wait for a stop request, and stop the cluster."""
    begun = clock.monotonic() - seconds_spent_by_make(environ)
    cluster = Cluster(environ, log)
    forwarded(cluster)
    with Foreground() as foreground:
        try:
            cluster.start()
            print_instructions(cluster, clock.monotonic() - begun)
            while not cluster.stopping.wait(0.5):
                if foreground.orphaned():
                    log.say("run", "make has ended, stopping")
                    break
        except StartCancelled:
            pass
        except SetupError:
            if not cluster.stopping.is_set():  # else it failed because it was interrupted
                raise
        finally:
            if cluster.pids():
                log.say("run", "stopping (press Ctrl-C again to stop at once)")
            cluster.stop()
    log.say("run", "stopped")


def seconds_spent_by_make(environ: Mapping[str, str]) -> float:
    """Return the seconds that `make` spent on installing and building before this process started."""
    with suppress(ValueError):
        return max(clock.now().timestamp() - float(environ.get(MAKE_BEGAN_VARIABLE, "")), 0.0)
    return 0.0


_RESULT_BY_EXAMPLE = {"chat": "an answer that streams", "request": "three vectors"}


@dataclass(frozen=True)
class ExampleRequest:
    """An example request as a shell command; `what` names the result."""

    what: str
    line: str


def served_models(layout: Layout) -> frozenset[str]:
    """Return the names of the running cluster's models; empty if the cluster does not respond."""
    headers = {"Authorization": f"Bearer {layout.admin_key}"}
    try:
        client = _probe_client(layout.probe_trust)
        listed = client.get(f"{layout.probe_url}/v1/models", headers=headers, timeout=10).json()
        return frozenset(model["id"] for model in listed["data"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return frozenset()


def example_requests(layout: Layout, models: Container[str]) -> list[ExampleRequest]:
    """Return the example requests (chat, embeddings) whose model the cluster has.

    The requests are in `examples/demo.json`. Their commands read the API key from its file and work in any
    folder.
    """
    demo = json.loads((EXAMPLES_FOLDER / "demo.json").read_text(encoding="utf-8"))
    return [
        ExampleRequest(what, _shell_line(layout, demo[name]["path"], demo[name]["body"]))
        for name, what in _RESULT_BY_EXAMPLE.items()
        if demo[name]["body"]["model"] in models
    ]


def _shell_line(layout: Layout, path: str, body: object) -> str:
    key_file = layout.secrets.path("admin_api_key")
    key = f"$(cut -d, -f1 {shlex.quote(str(key_file))})" if key_file else "${LOCALAI_API_KEY%%,*}"
    return (
        f'curl -sN {layout.base_url}{path} -H "Authorization: Bearer {key}"'
        f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body, separators=(',', ':')))}"
    )


def main() -> int:
    """Run `make run`; return the exit code."""
    log = Log()

    def forward(cluster: Cluster) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            cluster.ask_to_stop()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handle)

    try:
        run(os.environ, log, forward)
    except SetupError as error:
        log.say("run", str(error))
        return 1
    except OSError as error:
        log.say("run", one_line(error))
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def one_line(error: OSError) -> str:
    """Format an operating-system error as one line with a hint."""
    hints = {
        errno.ENOSPC: "Free up space on that disk.",
        errno.EACCES: "Fix its owner or mode, or choose another CLUSTER_DATA_DIR.",
        errno.EROFS: "Choose another CLUSTER_DATA_DIR.",
    }
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}. {hints.get(error.errno or 0, 'Choose another CLUSTER_DATA_DIR.')}"
    )


if __name__ == "__main__":
    sys.exit(main())
