"""Points at which a test may kill this process: after a commit, before a message leaves, and so on.

A point is named by a literal where it lies, and `tests/checks/points.py` collects the names from the
source. With `CLUSTER_KILL_AT=<point>[@n]` the process ends itself with SIGKILL when it passes that point for
the n-th time. `CLUSTER_KILL_TEST` must name a file: nothing counts before it is there, and it goes with the
kill, so that one file is one kill, in any number of processes. Without the first variable a point costs one
comparison.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

KILL_AT, KILL_TEST = "CLUSTER_KILL_AT", "CLUSTER_KILL_TEST"
KILLED = "killed at the point "
"""What a process writes to its standard error before it ends, with the point behind."""

_leaving: ContextVar[str] = ContextVar("leaving", default="")
"""The message that is handed to the bus now."""


class _Kill:
    """One kill that was asked for."""

    def __init__(self, asked: str, gate: str) -> None:
        self.point, _, number = asked.partition("@")
        self._left, self._gate = int(number or 1), Path(gate)

    def pass_by(self) -> None:
        """End this process, if the time has come."""
        if not self._gate.exists():
            return
        self._left -= 1
        if self._left > 0:
            return
        try:
            self._gate.unlink()
        except FileNotFoundError:
            return  # another process was killed in its place
        sys.stderr.write(f"{KILLED}{self.point}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


_kill: _Kill | None = None


def arm() -> None:
    """Read the two variables. SystemExit when the first one stands alone: no product sets it."""
    global _kill
    asked, gate = os.environ.get(KILL_AT, ""), os.environ.get(KILL_TEST, "")
    if asked and not gate:
        sys.exit(f"{KILL_AT} kills this process in a test, and {KILL_TEST} is not set; unset {KILL_AT}")
    _kill = _Kill(asked, gate) if asked else None


arm()


def armed() -> bool:
    """Whether a kill was asked for."""
    return _kill is not None


def passed(point: str) -> None:
    """This line was reached."""
    if _kill is not None and _kill.point == point:
        _kill.pass_by()


@contextlib.contextmanager
def asked(point: str) -> Iterator[None]:
    """Around a request on the bus: passes `:before`, `:sent` when it has left, `:answered`."""
    with told(point):
        yield
    passed(f"{point}:answered")


@contextlib.contextmanager
def told(point: str) -> Iterator[None]:
    """Around a message without an answer: passes `:before`, and `:sent` when it has left."""
    if _kill is None:
        yield
        return
    passed(f"{point}:before")
    token = _leaving.set(point)
    try:
        yield
    finally:
        _leaving.reset(token)


async def left(flush: Callable[[], Awaitable[None]]) -> None:
    """The bus has taken the message that `asked` or `told` announced; `flush` has it leave this process."""
    if _kill is not None and (point := f"{_leaving.get()}:sent") == _kill.point:
        await flush()
        passed(point)
