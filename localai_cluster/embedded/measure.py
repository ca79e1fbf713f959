"""`make measure`: limits of starting, stopping, loading and recovering, as figure, limit, held or not.

Copies the tree to a fresh folder and brings it up there with `make run`, as a newcomer does, so the first run
includes the installation from the package cache. `TESTS=1 make measure` times `make test` as well.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from localai_cluster import clock, procs
from localai_cluster.embedded.demo import Target, ask
from localai_cluster.embedded.layout import EXAMPLES, ROOT
from localai_cluster.embedded.places import Trouble, free_port
from localai_cluster.embedded.run import answers
from localai_cluster.embedded.server import last_line, wait_for

FIRST_RUN, LATER_RUN, TESTS, IN_FLIGHT, COPY, VALUES = 180.0, 15.0, 900.0, 30.0, 10.0, 5
_NOT_COPIED = (
    ".git",
    ".venv",
    "build",
    "data",
    "dist",
    "node_modules",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)
_MANY_TEXTS, _CLIENTS = 64, 4


@dataclass(frozen=True)
class Measured:
    """One figure and its limit; None where nothing is promised."""

    name: str
    value: float
    limit: float | None = None
    at_least: bool = False
    unit: str = "s"

    @property
    def held(self) -> bool:
        """Whether the limit is kept."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Run:
    """`make run` in `tree`, timed from the command to its "ready" and from the signal to its end."""

    def __init__(self, tree: Path, guardian: procs.Guardian, **more: str) -> None:
        self.tree, self.log = tree, tree.parent / "run.log"
        self.port = free_port()
        self._guardian = guardian
        self._begun = clock.monotonic()
        environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        environ |= {"PORT": str(self.port), "CLUSTER_DATA_DIR": str(tree / "data"), **guardian.env, **more}
        with self.log.open("wb") as file:
            self._child = procs.spawn(
                ["make", "run"], env=environ, cwd=tree, stdout=file, stderr=subprocess.STDOUT
            )
        guardian.add(self._child.pid, seconds=60)

    @property
    def target(self) -> Target:
        """Where it listens, and its key."""
        key = (self.tree / "data" / "secrets" / "admin_api_key").read_text().strip()
        return Target(f"http://127.0.0.1:{self.port}", key)

    def wait_ready(self, seconds: float) -> float:
        """Seconds until it said that it is ready. `Trouble` when it ended or took longer than allowed."""
        child = self._child
        wait_for(lambda: child.poll() is not None or b"ready in" in self.log.read_bytes(), seconds)
        if b"ready in" not in self.log.read_bytes():
            raise Trouble(f"`make run` is not ready: {last_line(self.log)}", f"Read {self.log}.")
        return clock.monotonic() - self._begun

    def stop(self) -> float:
        """Seconds from the signal to the end of everything."""
        begun = clock.monotonic()
        supervisor = json.loads((self.tree / "data" / "run.lock").read_text())["pid"]
        os.kill(supervisor, signal.SIGTERM)
        self._child.wait(120)
        self._guardian.discard(self._child.pid)
        return clock.monotonic() - begun

    def web_pid(self) -> int:
        """The process id of the web process."""
        mark = json.loads((self.tree / "data" / "run.lock").read_text())["mark"]
        return next(one.pid for one in procs.marked(f"{mark}/web"))


@contextmanager
def fresh_tree() -> Iterator[Path]:
    """A copy of the sources in a folder of its own."""
    home = Path(tempfile.mkdtemp(prefix="localai-cluster-measure-"))
    try:
        shutil.copytree(ROOT, home / "tree", ignore=shutil.ignore_patterns(*_NOT_COPIED))
        yield home / "tree"
    finally:
        shutil.rmtree(home, ignore_errors=True)


def byte_values(target: Target, seen: set[int], ready: threading.Event) -> None:
    """Collects the different byte counts that a websocket client sees of running operations."""
    url = target.url.replace("http", "ws", 1) + "/ws/operations"
    with (
        suppress(WebSocketException, OSError),
        connect(url, additional_headers=target.headers, proxy=None) as link,
    ):
        ready.set()
        for text in link:
            message = json.loads(text)
            operations = message.get("operations") or [message.get("operation") or {}]
            seen.update(one["currentBytes"] for one in operations if one.get("currentBytes"))


def cold_load(target: Target, request: Mapping[str, Any]) -> list[Measured]:
    """The first request of a fresh cluster, its copy held to ten seconds, and one after it."""
    seen: set[int] = set()
    ready = threading.Event()
    threading.Thread(target=byte_values, args=(target, seen, ready), daemon=True).start()
    ready.wait(10)
    _, cold = ask(target, request)
    _, warm = ask(target, request)
    return [
        Measured("first request, copy held to 10 s", cold),
        Measured("byte values seen meanwhile", len(seen), VALUES, at_least=True, unit=""),
        Measured("second request", warm),
    ]


def in_flight(target: Target) -> int | None:
    """Requests that the registry counts as running; None while nobody answers."""
    try:
        reply = httpx.get(f"{target.url}/api/nodes", headers=target.headers, timeout=2, trust_env=False)
        return sum(int(node["in_flight_count"]) for node in reply.json())
    except (httpx.HTTPError, ValueError, TypeError, KeyError):
        return None


def keep_busy(target: Target, request: Mapping[str, Any], stop: threading.Event) -> None:
    """Sends long requests until told to stop or cut off."""
    body = {**request["body"], "input": [f"a text about number {n}" for n in range(_MANY_TEXTS)]}
    with suppress(Trouble):
        while not stop.is_set():
            ask(target, {**request, "body": body})


def after_a_crash(run: Run, request: Mapping[str, Any]) -> Measured:
    """Seconds from `kill -9` of a busy web process until the counts are true again."""
    target, stop = run.target, threading.Event()
    for _ in range(_CLIENTS):
        threading.Thread(target=keep_busy, args=(target, request, stop), daemon=True).start()
    if not wait_for(lambda: bool(in_flight(target)), 20):
        raise Trouble("No request was counted while some ran.", "Read the log of the web process.")
    stop.set()
    os.kill(run.web_pid(), signal.SIGKILL)
    begun = clock.monotonic()
    wait_for(lambda: answers(f"{target.url}/readyz") and in_flight(target) == 0, 2 * IN_FLIGHT)
    return Measured("in-flight true after kill -9 of web", clock.monotonic() - begun, IN_FLIGHT)


def tests() -> Measured:
    """Seconds that `make test` takes here. `Trouble` when it fails."""
    begun = clock.monotonic()
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make", "test"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Trouble("`make test` fails.", "Run it alone and read its lines.")
    return Measured("make test", clock.monotonic() - begun, TESTS)


def measure(console: Console) -> list[Measured]:
    """All of it, in the order of a newcomer's day."""
    request = json.loads((EXAMPLES / "demo.json").read_text(encoding="utf-8"))["request"]
    found = []
    with fresh_tree() as tree, procs.Guardian() as guardian:
        console.print("first run: installation included …")
        run = Run(tree, guardian)
        found.append(Measured("first run until ready", run.wait_ready(2 * FIRST_RUN), FIRST_RUN))
        found.append(Measured("stop", run.stop()))
        console.print("later run, cold load, crash of web …")
        size = sum(file.stat().st_size for file in (tree / "build" / "gallery").rglob("*") if file.is_file())
        run = Run(tree, guardian, LOCALAI_WORKER_DOWNLOAD_RATE=str(int(size / COPY)))
        found.append(Measured("later run until ready", run.wait_ready(120), LATER_RUN))
        found += cold_load(run.target, request)
        found.append(after_a_crash(run, request))
        found.append(Measured("stop with a loaded model", run.stop()))
    if os.environ.get("TESTS"):
        console.print("make test …")
        found.append(tests())
    return found


def show(found: list[Measured], console: Console) -> bool:
    """Prints the table; returns whether every limit is held."""
    table = Table("figure", "measured", "limit", "")
    for one in found:
        sign = "at least" if one.at_least else "at most"
        limit = "-" if one.limit is None else f"{sign} {one.limit:g} {one.unit}".strip()
        verdict = "" if one.limit is None else "held" if one.held else "NOT HELD"
        table.add_row(one.name, f"{one.value:.2f} {one.unit}".strip(), limit, verdict)
    console.print(table)
    return all(one.held for one in found)


def main() -> int:
    """The command; returns its exit code."""
    console = Console(highlight=False)
    try:
        return 0 if show(measure(console), console) else 1
    except Trouble as trouble:
        console.print(f"measure: {trouble}", soft_wrap=True)
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
