"""What the embedded servers have in common: prepare, argv, ready, settle, and how they like to be stopped.

The supervisor drives these steps for `make run`; `start` and `stop` drive them for tests and small tools.
"""

import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Self

from localai_cluster import clock, procs
from localai_cluster.embedded.places import Trouble

LOOK_AGAIN_SECONDS = 0.02


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Looks until `condition` holds or `seconds` have passed; returns whether it held. Blocks."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        time.sleep(LOOK_AGAIN_SECONDS)
    return True


class Server(ABC):
    """One embedded server over one directory. The caller holds the directory; two of these on it do harm."""

    name: str
    polite: int = signal.SIGTERM
    seconds: float = 10.0
    whole = False
    """Whether the polite signal goes to the whole process group or to the server's first process only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: subprocess.Popen[bytes] | None = None
        self._guardian: procs.Guardian | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Readies the directory for a start, leftovers of a killed run included; `Trouble` if it cannot."""

    @abstractmethod
    def argv(self) -> list[str]:
        """The command; it holds no secret."""

    @property
    @abstractmethod
    def url(self) -> str:
        """What goes into the product's environment, credential included."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers. Returns at once or within a second, and never raises."""

    def settle(self) -> None:  # noqa: B027 - most servers have nothing to settle
        """What is to be done once after the first start that became ready."""

    def shown(self, line: str) -> bool:
        """Whether a line of its output is worth a line in the common log."""
        return bool(line)

    @property
    def pid(self) -> int:
        """Process id of the child that `start` started."""
        assert self._child
        return self._child.pid

    def start(self, guardian: procs.Guardian | None = None, *, seconds: float = 30.0) -> str:
        """Starts the server and waits until it is ready; returns its URL. `Trouble` if it does not."""
        self.stop()
        self.prepare()
        log = self.directory / f"{self.name}.log"
        with log.open("wb") as file:
            self._child = child = procs.spawn(
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
            raise Trouble(f"{self.name} does not start: {last_line(log)}", f"Read {log}.")
        self.settle()
        return self.url

    def stop(self) -> bool:
        """Stops what `start` started; True when the polite signal was enough. A stopped one stays stopped."""
        child, self._child = self._child, None
        if child is None:
            return True
        group = procs.group_of(child.pid, polite=self.polite, seconds=self.seconds, whole=self.whole)
        politely = procs.end_child(child, group)
        if self._guardian:
            self._guardian.discard(child.pid)
        return politely

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def plain_environment() -> dict[str, str]:
    """An environment with nothing of the operator's settings or secrets in it."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "TZ": "UTC",
    }


def last_line(log: Path) -> str:
    """The last line that says something, for a one-line message."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"
