"""`make demo`: has one answer streamed, sends the example request and compares it with known figures.

Uses the cluster at PORT if one is ready there and its key can be read. Otherwise, or with `--fresh`, it
starts a temporary cluster on free ports and stops it again. Installs and loads are shown as progress bars.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from examples.demo.client import Target, ask, stream
from examples.demo.figures import Figure, compare, rows
from localai_cluster.embedded.layout import EXAMPLES_FOLDER
from localai_cluster.embedded.resources import SetupError, free_port
from localai_cluster.embedded.run import Cluster, is_ok, one_line
from localai_cluster.embedded.server import last_line
from localai_cluster.embedded.terminal import Log

FRESH = "--fresh"
ALREADY_THERE = (
    "The backend is already installed and the model loaded, so there is no progress to show. "
    f"`make demo ARGS={FRESH}` starts a temporary cluster and shows both."
)
_KINDS = {"backend_install": "Install backend", "model_load": "Load model"}
_OPERATORS = ("DATABASE_URL", "REDIS_URL", "LOCALAI_NATS_URL", "HOST", "LOCALAI_MODELS_PATH", "SECRET_KEY")
_KEYS = ("LOCALAI_API_KEY", "LOCALAI_REGISTRATION_TOKEN", "CLUSTER_ADMIN_PASSWORD")


def running_cluster(environ: Mapping[str, str]) -> Target | None:
    """The cluster at PORT, if it is ready and its key can be read."""
    url = f"http://127.0.0.1:{environ.get('PORT') or 8080}"
    data_dir = Path(environ.get("CLUSTER_DATA_DIR") or "data")
    with suppress(OSError):
        key = environ.get("LOCALAI_API_KEY") or (data_dir / "secrets" / "admin_api_key").read_text()
        if is_ok(f"{url}/readyz"):
            return Target(url, key.partition(",")[0].strip())
    return None


@contextmanager
def temporary_cluster(environ: Mapping[str, str]) -> Iterator[Target]:
    """A temporary cluster on free ports; its data is removed at the end."""
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
    except SetupError as error:
        raise SetupError(f"{error} Last line: {last_line(home / 'log')}", "") from error
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Bars:
    """One progress bar per operation, from the operations websocket."""

    def __init__(self, target: Target, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        socket_url = target.url.replace("http", "ws", 1) + "/ws/operations"
        self._socket = connect(socket_url, additional_headers=target.headers, proxy=None)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """How many bars there are."""
        return len(self._tasks)

    def close(self) -> None:
        """Closes the websocket."""
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


def play(target: Target, console: Console) -> list[Figure]:
    """Has a chat streamed and sends the request twice, cold (perhaps) and warm. Returns the figures of the
    first answer.
    """
    demo = json.loads((EXAMPLES_FOLDER / "demo.json").read_text(encoding="utf-8"))
    request = demo["request"]
    console.print(
        f"{request['method']} {target.url}{request['path']} {json.dumps(request['body'])}", soft_wrap=True
    )
    columns = (TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[phase]}"), console=console) as progress:
        bars = Bars(target, progress)
        try:
            answer, first = ask(target, request)
            ask(target, _whole(demo["chat"]))  # the model is loaded now, and its bars have been seen
        finally:
            bars.close()
    if not bars.count:
        console.print(ALREADY_THERE, soft_wrap=True)
    _, second = ask(target, request)
    console.print(f"first answer: {first:.2f} s, second answer: {second * 1000:.0f} ms")
    figures = compare(answer, request["body"]["input"], demo["expect"])
    return [*figures, *_streamed(target, demo["chat"], console)]


def _whole(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The same request for one token, not streamed."""
    body = {"model": chat["body"]["model"], "messages": chat["body"]["messages"], "max_tokens": 1}
    return {**chat, "body": body}


def _streamed(target: Target, request: Mapping[str, Any], console: Console) -> list[Figure]:
    """One streamed answer, shown as it comes; what must be true of any."""
    console.print(f"\n{request['body']['messages'][-1]['content']}")
    chat = stream(
        target,
        request,
        lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True),
    )
    rate = (chat.tokens - 1) / (chat.whole - chat.first) if chat.whole > chat.first else 0.0
    console.print(
        f"\nfirst piece after {chat.first * 1000:.0f} ms, {chat.tokens} tokens in {chat.whole:.2f} s, "
        f"{rate:.0f} a second"
    )
    # What it says depends on the machine; that it comes in pieces does not.
    return [Figure("pieces of the streamed answer", "streamed", chat.pieces > 1, 1, 0)]


def show(figures: list[Figure], console: Console) -> list[str]:
    """Prints the table; returns the names of the figures that are wrong."""
    table = Table("Check", "Answer", "", box=SIMPLE)
    for row in rows(figures):
        table.add_row(*row)
    console.print(table)
    return [figure.name for figure in figures if not figure.holds]


@contextmanager
def some_cluster(environ: Mapping[str, str], console: Console, *, fresh: bool) -> Iterator[Target]:
    """The running cluster; a temporary one if there is none or with `fresh`."""
    if not fresh and (target := running_cluster(environ)):
        console.print(f"Using the cluster at {target.url}.")
        yield target
        return
    console.print("Starting a temporary cluster. This takes about half a minute.")
    with temporary_cluster(environ) as own:
        yield own


def main() -> int:
    """The command; returns its exit code."""
    console = Console(highlight=False)
    try:
        with some_cluster(os.environ, console, fresh=FRESH in sys.argv[1:]) as target:
            off = show(play(target, console), console)
    except SetupError as error:
        console.print(f"demo: {error}", soft_wrap=True)
        return 1
    except OSError as error:
        console.print(f"demo: {one_line(error)}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    if off:
        console.print(f"demo: failed checks: {', '.join(off)}", soft_wrap=True)
        return 1
    console.print("demo: all checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
