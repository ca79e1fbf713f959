"""A new user's first run: start, stop, loading and recovery, beside their limits.

Copies the tree to a new folder and starts it there with `make run`, as a new user does, so the first run
includes the installation from the package cache. `TESTS=1 make measure` also times `make test`.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from examples.demo.client import Target, ask
from localai_cluster.embedded.layout import EXAMPLES_FOLDER, ROOT
from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.run import is_ok
from localai_cluster.embedded.server import wait_for
from localai_cluster.kit import clock, processes
from tests.measure.table import Measured, show
from tests.support.environment import GIVEN
from tests.support.ports import free_port
from tests.support.run import Run

FIRST_RUN, LATER_RUN, TESTS, IN_FLIGHT, COPY, VALUES = 180.0, 3.0, 900.0, 30.0, 10.0, 5
IDLE_PERCENT, IDLE_MEMORY = 1.0, 80.0
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


def started(tree: Path, reaper: processes.ProcessReaper, **more: str) -> tuple[Run, float]:
    """`make run` in `tree`, and the seconds from the command to "ready"."""
    own = ("MAKE", "PORT", "CLUSTER_DATA_DIR")
    environ = {key: value for key, value in GIVEN.items() if not key.startswith(own)}
    environ |= {**reaper.env, **more}
    begun = clock.monotonic()
    run = Run(tree / "data", free_port(), (), ("make", "run"), tree, **environ)
    reaper.add(run.process.pid, seconds=60)
    run.wait_ready()
    return run, clock.monotonic() - begun


def stop(run: Run, reaper: processes.ProcessReaper) -> float:
    """Seconds from the signal until all processes have ended."""
    begun = clock.monotonic()
    supervisor = json.loads((run.data / "run.lock").read_text())["pid"]
    os.kill(supervisor, signal.SIGTERM)
    run.process.wait(120)
    reaper.discard(run.process.pid)
    return clock.monotonic() - begun


@contextmanager
def fresh_tree() -> Iterator[Path]:
    """A copy of the sources in a new folder."""
    home = Path(tempfile.mkdtemp(prefix="localai-cluster-measure-"))
    try:
        shutil.copytree(ROOT, home / "tree", ignore=shutil.ignore_patterns(*_NOT_COPIED))
        yield home / "tree"
    finally:
        shutil.rmtree(home, ignore_errors=True)


def byte_values(target: Target, seen: set[int], ready: threading.Event) -> None:
    """Collects the distinct byte counts of running operations that a websocket client receives."""
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
    """The first request of a new cluster, with a copy throttled to ten seconds, and a second one."""
    seen: set[int] = set()
    ready = threading.Event()
    threading.Thread(target=byte_values, args=(target, seen, ready), daemon=True).start()
    ready.wait(10)
    _, cold = ask(target, request)
    _, warm = ask(target, request)
    return [
        Measured("first request, copy throttled to 10 s", cold),
        Measured("progress values during the copy", len(seen), VALUES, at_least=True, unit=""),
        Measured("second request", warm),
    ]


def in_flight(target: Target) -> int | None:
    """Running requests according to the registry; None without an answer."""
    try:
        reply = httpx.get(f"{target.url}/api/nodes", headers=target.headers, timeout=2, trust_env=False)
        return sum(int(node["in_flight_count"]) for node in reply.json())
    except (httpx.HTTPError, ValueError, TypeError, KeyError):
        return None


def keep_busy(target: Target, request: Mapping[str, Any], stop: threading.Event) -> None:
    """Sends long requests until stopped or disconnected."""
    body = {**request["body"], "input": [f"a text about number {n}" for n in range(_MANY_TEXTS)]}
    with suppress(SetupError):
        while not stop.is_set():
            ask(target, {**request, "body": body})


def idle_worker(pid: int, seconds: float = 60.0) -> list[Measured]:
    """Processor time and memory of a worker that has nothing to do, with its process reaper."""
    family = [psutil.Process(pid), *psutil.Process(pid).children()]

    def spent() -> float:
        return sum(sum(member.cpu_times()[:2]) for member in family)

    begun, before = clock.monotonic(), spent()
    threading.Event().wait(seconds)
    percent = 100 * (spent() - before) / (clock.monotonic() - begun)
    memory = sum(member.memory_full_info().pss for member in family) / 10**6
    return [
        Measured("idle worker, processor time", percent, IDLE_PERCENT, unit="% of a core"),
        Measured("idle worker, memory (PSS)", memory, IDLE_MEMORY, unit="MB"),
    ]


def after_a_crash(run: Run, request: Mapping[str, Any]) -> Measured:
    """Seconds from `kill -9` of a busy web process until the counts are correct again."""
    target, stop = run.target, threading.Event()
    for _ in range(_CLIENTS):
        threading.Thread(target=keep_busy, args=(target, request, stop), daemon=True).start()
    if not wait_for(lambda: bool(in_flight(target)), 20):
        raise SetupError("No running request was counted.", "See the log of the web process.")
    stop.set()
    os.kill(run.leaders()["web"], signal.SIGKILL)
    begun = clock.monotonic()
    wait_for(lambda: is_ok(f"{target.url}/readyz") and in_flight(target) == 0, 2 * IN_FLIGHT)
    return Measured("in-flight count correct after kill -9 of web", clock.monotonic() - begun, IN_FLIGHT)


def tests() -> Measured:
    """Seconds that `make test` takes. `SetupError` if it fails."""
    begun = clock.monotonic()
    environ = {key: value for key, value in GIVEN.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make", "test"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupError("`make test` failed.", "Run it on its own and read its output.")
    return Measured("make test", clock.monotonic() - begun, TESTS)


def measure(console: Console) -> list[Measured]:
    """All figures, in the order in which a new user meets them."""
    request = json.loads((EXAMPLES_FOLDER / "demo.json").read_text(encoding="utf-8"))["request"]
    found = []
    with fresh_tree() as tree, processes.ProcessReaper() as reaper:
        console.print("first run, including installation …")
        run, seconds = started(tree, reaper)
        found.append(Measured("first run until ready", seconds, FIRST_RUN))
        found.append(Measured("stop", stop(run, reaper)))
        console.print("second run, cold load, crash of the web process …")
        size = sum(file.stat().st_size for file in (tree / "build" / "gallery").rglob("*") if file.is_file())
        run, seconds = started(tree, reaper, LOCALAI_WORKER_DOWNLOAD_RATE=str(int(size / COPY)))
        found.append(Measured("later run until ready", seconds, LATER_RUN))
        found += idle_worker(run.leaders()["worker"])
        found += cold_load(run.target, request)
        found.append(after_a_crash(run, request))
        found.append(Measured("stop with a loaded model", stop(run, reaper)))
    if os.environ.get("TESTS"):
        console.print("make test …")
        found.append(tests())
    return found


def run(console: Console) -> bool:
    """Print all figures; return True if all are within their limits."""
    return show(measure(console), console)
