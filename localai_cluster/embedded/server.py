"""The base of the bundled servers: prepare, argv, ready, settle, and how to stop them.

The supervisor runs these steps for `make run`; `start` and `stop` run them for tests and small tools.
"""

import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Self

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock, processes

LOOK_AGAIN_SECONDS = 0.02


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls until `condition` is true or `seconds` have passed; returns whether it became true. Blocks."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        time.sleep(LOOK_AGAIN_SECONDS)
    return True


class EmbeddedServer(ABC):
    """A bundled server on one directory. The caller ensures that nothing else uses the directory."""

    name: str
    polite: int = signal.SIGTERM
    seconds: float = 10.0
    whole = False
    """Whether the polite signal goes to the whole process group or to the server's first process only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: subprocess.Popen[bytes] | None = None
        self._guardian: processes.Guardian | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Prepares the directory for a start and cleans up after a killed run; `SetupError` if it cannot."""

    @abstractmethod
    def argv(self) -> list[str]:
        """The command; it contains no secret."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for the other processes, including credentials."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers. Returns within a second and never raises."""

    def settle(self) -> None:  # noqa: B027 - most servers have nothing to settle
        """Runs once, after the first successful start."""

    def keeps_line(self, line: str) -> bool:
        """Whether a line of its output belongs in the common log."""
        return bool(line)

    @property
    def pid(self) -> int:
        """The process id of the child that `start` has started."""
        assert self._child
        return self._child.pid

    def start(self, guardian: processes.Guardian | None = None, *, seconds: float = 30.0) -> str:
        """Starts the server and waits until it is ready; returns its URL. `SetupError` if it fails."""
        self.stop()
        self.prepare()
        log = self.directory / f"{self.name}.log"
        with log.open("wb") as file:
            self._child = child = processes.spawn(
                self.argv(),
                env=plain_environment() | (guardian.env if guardian else {}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        if guardian:
            guardian.add(child.pid, polite=self.polite, seconds=self.seconds, whole=self.whole)
            self._guardian = guardian
        if (
            not wait_for(lambda: child.poll() is not None or self.ready(), seconds)
            or child.poll() is not None
        ):
            self.stop()
            raise SetupError(f"{self.name} failed to start: {last_line(log)}", f"See {log}.")
        self.settle()
        return self.url

    def stop(self) -> bool:
        """Stops the server; True if it stopped without SIGKILL. Does nothing if it is not running."""
        child, self._child = self._child, None
        if child is None:
            return True
        group = processes.group_of(child.pid, polite=self.polite, seconds=self.seconds, whole=self.whole)
        politely = processes.end_child(child, group)
        if self._guardian:
            self._guardian.discard(child.pid)
        return politely

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def plain_environment() -> dict[str, str]:
    """An environment without any of the operator's settings or secrets."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "TZ": "UTC",
    }


def last_line(log: Path) -> str:
    """The last non-empty line, for a one-line message."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "no output"
