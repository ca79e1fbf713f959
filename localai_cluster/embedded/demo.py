"""`make demo`: plays the main job and compares the answer with the known figures.

Uses the cluster at PORT when one is ready there and its key is at hand; otherwise, or with `--fresh`, starts
one of its own, by the same supervisor, on free ports with temporary data, and stops it again. What is
installed and loaded meanwhile has a progress bar; where nothing is, it says so.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from localai_cluster import clock
from localai_cluster.embedded.figures import Figure, compare, rows
from localai_cluster.embedded.layout import EXAMPLES
from localai_cluster.embedded.log import Log
from localai_cluster.embedded.places import Trouble, free_port
from localai_cluster.embedded.run import Cluster, answers, one_line
from localai_cluster.embedded.server import last_line

FRESH = "--fresh"
ALREADY_THERE = (
    "The backend is installed and the model is loaded already, so there is no progress to show. "
    f"`make demo ARGS={FRESH}` starts a cluster of its own and shows both."
)
_KINDS = {"backend_install": "Install backend", "model_load": "Load model"}
REQUEST_SECONDS = 180.0
ATTEMPTS = 3
_OPERATORS = ("DATABASE_URL", "REDIS_URL", "LOCALAI_NATS_URL", "HOST", "LOCALAI_MODELS_PATH", "SECRET_KEY")
_KEYS = ("LOCALAI_API_KEY", "LOCALAI_REGISTRATION_TOKEN", "CLUSTER_ADMIN_PASSWORD")


@dataclass(frozen=True)
class Target:
    """A ready cluster and the key to it."""

    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """What proves us to be the admin."""
        return {"Authorization": f"Bearer {self.key}"}


def running_cluster(environ: Mapping[str, str]) -> Target | None:
    """The cluster at PORT, if it is ready and we can read its key."""
    url = f"http://127.0.0.1:{environ.get('PORT') or 8080}"
    data_dir = Path(environ.get("CLUSTER_DATA_DIR") or "data")
    with suppress(OSError):
        key = environ.get("LOCALAI_API_KEY") or (data_dir / "secrets" / "admin_api_key").read_text().strip()
        if answers(f"{url}/readyz"):
            return Target(url, key)
    return None


@contextmanager
def temporary_cluster(environ: Mapping[str, str]) -> Iterator[Target]:
    """A cluster on free ports with data of its own, gone at the end."""
    home = Path(tempfile.mkdtemp(prefix="localai-cluster-demo-"))
    hidden = {name for base in (*_OPERATORS, *_KEYS) for name in (base, f"{base}_FILE")}
    settings = {key: value for key, value in environ.items() if key not in hidden}
    settings |= {"CLUSTER_DATA_DIR": str(home / "data"), "PORT": str(free_port())}
    try:
        with (home / "log").open("w") as log:
            cluster = Cluster(settings, Log(log))
            try:
                cluster.start()
                key = cluster.layout.secrets.value("admin_api_key")
                yield Target(cluster.layout.base_url, key)
            finally:
                cluster.stop()
    except Trouble as trouble:
        raise Trouble(f"{trouble} Last line: {last_line(home / 'log')}", "") from trouble
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Bars:
    """One progress bar an operation, fed by the operations websocket until closed."""

    def __init__(self, target: Target, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        socket_url = target.url.replace("http", "ws", 1) + "/ws/operations"
        self._socket = connect(socket_url, additional_headers=target.headers, proxy=None)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def shown(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()
        self._thread.join(5)

    def _read(self) -> None:
        with suppress(WebSocketException, OSError):
            for text in self._socket:
                message = json.loads(text)
                for operation in message.get("operations") or [message.get("operation") or {}]:
                    if operation:
                        self._show(operation)

    def _show(self, operation: Mapping[str, Any]) -> None:
        identity = operation["jobID"]
        total = operation.get("totalBytes") or None
        if identity not in self._tasks:
            self._tasks[identity] = self._progress.add_task("", total=None, phase="")
        done = operation.get("status") == "completed"
        current = operation.get("currentBytes") or 0
        self._progress.update(
            self._tasks[identity],
            description=f"{_KINDS.get(operation['kind'], operation['kind'])} {operation['name']}",
            completed=(total or 1) if done else current,
            total=total or (1 if done else None),
            phase=operation["status"] if done else operation.get("phase") or operation.get("message") or "",
        )


def ask(target: Target, request: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The answer and the seconds it took. A 503 that says when to come back is taken at its word."""
    said = ""
    for _ in range(ATTEMPTS):
        begun = clock.monotonic()
        try:
            reply = httpx.request(
                request["method"],
                target.url + request["path"],
                json=request["body"],
                headers=target.headers,
                timeout=REQUEST_SECONDS,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise Trouble(f"The request fails: {type(error).__name__} {error}.", "Is it still up?") from error
        if reply.status_code == 200:
            return reply.json(), clock.monotonic() - begun
        said = f"{reply.status_code}: {' '.join(reply.text.split())[:500]}"
        if reply.status_code != 503 or "retry-after" not in reply.headers:
            break
        threading.Event().wait(min(float(reply.headers["retry-after"]), 30))
    raise Trouble(f"The request is answered with {said}.", "See the log of `make run`.")


def play(target: Target, console: Console) -> list[Figure]:
    """The main job, twice: perhaps cold, then warm. Returns the figures of the first answer."""
    demo = json.loads((EXAMPLES / "demo.json").read_text(encoding="utf-8"))
    request = demo["request"]
    console.print(
        f"{request['method']} {target.url}{request['path']} {json.dumps(request['body'])}", soft_wrap=True
    )
    columns = (TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[phase]}"), console=console) as progress:
        bars = Bars(target, progress)
        try:
            answer, first = ask(target, request)
        finally:
            bars.close()
    if not bars.shown:
        console.print(ALREADY_THERE, soft_wrap=True)
    _, second = ask(target, request)
    console.print(f"first answer after {first:.2f} s, the next after {second * 1000:.0f} ms")
    return compare(answer, request["body"]["input"], demo["expect"])


def show(figures: list[Figure], console: Console) -> list[str]:
    """Prints the table; returns the names of the figures that are off."""
    table = Table("Check", "Answer", "", box=SIMPLE)
    for row in rows(figures):
        table.add_row(*row)
    console.print(table)
    return [figure.name for figure in figures if not figure.holds]


@contextmanager
def some_cluster(environ: Mapping[str, str], console: Console, *, fresh: bool) -> Iterator[Target]:
    """The running cluster, or one of our own, which `fresh` asks for."""
    if not fresh and (target := running_cluster(environ)):
        console.print(f"Using the cluster at {target.url}.")
        yield target
        return
    console.print("Starting a cluster with temporary data. This takes about half a minute.")
    with temporary_cluster(environ) as own:
        yield own


def main() -> int:
    """The command; returns its exit code."""
    console = Console(highlight=False)
    try:
        with some_cluster(os.environ, console, fresh=FRESH in sys.argv[1:]) as target:
            off = show(play(target, console), console)
    except Trouble as trouble:
        console.print(f"demo: {trouble}", soft_wrap=True)
        return 1
    except OSError as error:
        console.print(f"demo: {one_line(error)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    if off:
        console.print(f"demo: wrong: {', '.join(off)}", soft_wrap=True)
        return 1
    console.print("demo: all checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
