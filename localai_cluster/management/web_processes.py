"""Several web processes on one address (`manage.py serve --processes N`), and their parent.

`manage.py` replaces itself by the parent before it loads Django: this file, run as an isolated script of
the standard library, takes 8 MB. The parent holds the listening socket, from which all web processes
accept, so a connection waits for any of them. It starts the first, and the others once that serves. It
replaces one that ends, with back-off; if the first cannot start, the parent ends with its status. On
SIGTERM or SIGINT it has all of them stop in order.

Each web process has a socket to the parent: it sends a byte when it serves, and stops in order when the
parent is gone. They share a folder for metrics, each with files by its index, which its replacement
continues.
"""

import argparse
import errno
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INDEX_VARIABLE, METRICS_VARIABLE = "LOCALAI_CLUSTER_WEB_INDEX", "PROMETHEUS_MULTIPROC_DIR"
"""Environment of one of several web processes: its index, and the folder of the metrics of all."""
_FIRST_DELAY, _MAX_DELAY = 0.5, 30.0
_STOP_SECONDS = 25.0
"""Seconds for web processes to stop in order; then the parent kills them."""
_BACKLOG = 1024
_SERVING, _STOP = "serving", "stop"

log = logging.getLogger("web_processes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `manage.py serve`."""
    parser.add_argument(
        "--processes", type=int, metavar="N", help="web processes (default: CLUSTER_WEB_PROCESSES)"
    )
    parser.add_argument("--inherited", type=int, nargs=2, help=argparse.SUPPRESS)


def become_parent(arguments: Sequence[str]) -> None:
    """Replace this process with the parent if `manage.py serve` must run several web processes.

    Help, wrong settings and daphne, which serves with one process, are left to the command. Raise
    CommandError.
    """
    from localai_cluster.kit import conf, settings_table

    cluster, environment = conf.load()
    parser = argparse.ArgumentParser("manage.py serve", add_help=False)
    add_arguments(parser)
    options, others = parser.parse_known_args(arguments)
    number = cluster.web_processes if options.processes is None else options.processes
    is_left = options.inherited or environment.problems or {"-h", "--help"} & set(others)
    if is_left or not 1 < number <= settings_table.MAX_WEB_PROCESSES or cluster.server == "daphne":
        return
    listening = listen(cluster.host, cluster.port)
    os.set_inheritable(listening.fileno(), True)
    script = [sys.executable, "-I", "-S", os.path.realpath(__file__), str(listening.fileno()), str(number)]
    os.execv(sys.executable, [*script, sys.executable, *sys.orig_argv[1:]])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise CommandError if the address cannot be used."""
    from django.core.management import CommandError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} on {host} is in use; set PORT to a free one") from error
        raise CommandError(f"cannot listen on {host}:{port}: {error}") from error


class Parent:
    """Starts and restarts web processes that accept from one socket. A thread waits for each process."""

    def __init__(self, listening: socket.socket, command: Sequence[str], metrics: Path) -> None:
        self._listening, self._command, self._metrics = listening, command, metrics
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        """Covers a start, so that none is missed by a signal to all."""
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What the main thread waits for; unlike an Event, a signal's handler may put to it at any time."""
        self._has_served, self._stopping = False, threading.Event()
        self._status = 0

    def run(self, number: int) -> int:
        """Run `number` web processes until a signal, or until the first one cannot start.

        Return the exit status.
        """
        threads = [threading.Thread(target=self._keep, args=(index,), daemon=True) for index in range(number)]
        threads[0].start()
        if self._events.get() == _SERVING:
            for thread in threads[1:]:
                thread.start()
            while self._events.get() != _STOP:
                pass
        with self._lock:
            self._stopping.set()
            self._listening.close()
        self._signal(signal.SIGTERM)
        limit = threading.Timer(_STOP_SECONDS, self._signal, (signal.SIGKILL,))
        limit.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        limit.cancel()
        return self._status

    def request_stop(self, *_: Any) -> None:
        """Make `run` stop the web processes. A signal handler."""
        self._events.put(_STOP)

    def _signal(self, number: int) -> None:
        with self._lock:
            for child in self._children.values():
                child.send_signal(number)

    def _keep(self, index: int) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                is_serving, status, ended = self._run_child(index)
            except Exception as error:  # out of memory or process ids; without this thread none is started
                is_serving, status, ended = False, 1, f"cannot be started: {error}"
            if self._stopping.is_set():
                self._status = self._status or int(status not in (0, -signal.SIGTERM, -signal.SIGINT))
            elif not self._has_served:  # its output says why
                self._status = max(status, 1)
                self.request_stop()
                return
            else:
                failures = 1 if is_serving else failures + 1
                delay = min(_FIRST_DELAY * 2 ** min(failures - 1, 10), _MAX_DELAY)
                log.warning("Web process %s, restarting in %g s", ended, delay)
                self._stopping.wait(delay)

    def _run_child(self, index: int) -> tuple[bool, int, str]:
        """Run the web process of this index to its end.

        Return whether it has served, its exit status, and a text for the log.
        """
        link, other = socket.socketpair()
        with link:
            with other, self._lock:
                if self._stopping.is_set():
                    return False, 0, ""
                self._metrics.mkdir(mode=0o700, exist_ok=True)  # a cleaner of old files may have removed it
                inherited = (self._listening.fileno(), other.fileno())
                self._children[index] = child = subprocess.Popen(
                    [*self._command, "--inherited", *map(str, inherited)],
                    pass_fds=inherited,
                    env={**os.environ, INDEX_VARIABLE: str(index), METRICS_VARIABLE: str(self._metrics)},
                )
            if is_serving := bool(link.recv(1)):
                self._has_served = True
                self._events.put(_SERVING)
            status = child.wait()
        with self._lock:
            del self._children[index]
        # Its replacement continues its counters, but not its gauges.
        for file in self._metrics.glob(f"gauge_live*_{index}.db"):
            file.unlink()
        return is_serving, status, f"{child.pid} ended ({_describe(status)})"


def _describe(status: int) -> str:
    # `kit.processes` has the same, but this file runs as an isolated script, which cannot import the package.
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def main(listening: int, number: int, command: Sequence[str]) -> int:
    """Run the parent; return its exit status."""
    logging.basicConfig(format="{asctime} {levelname:<7} {name} [-] {message}", datefmt="%H:%M:%S", style="{")
    metrics = Path(tempfile.mkdtemp(prefix="localai-cluster-web-"))
    parent = Parent(socket.socket(fileno=listening), command, metrics)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, parent.request_stop)
    try:
        return parent.run(number)
    finally:
        shutil.rmtree(metrics, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
