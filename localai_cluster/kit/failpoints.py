"""Failpoints at which a test may kill this process: after a commit, before a message is sent, and so on.

A failpoint is a literal at its place in the code, and `tests/checks/points.py` collects the literals from the
source. With `CLUSTER_KILL_AT=<point>[@n]` the process kills itself with SIGKILL at the n-th pass of that
point. `CLUSTER_KILL_TEST` must name a file: passes count only while it exists, and the kill deletes it, so
that one file causes one kill, in any number of processes. Without the first variable a failpoint costs one
comparison.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

KILL_AT_VARIABLE, KILL_TEST_VARIABLE = "CLUSTER_KILL_AT", "CLUSTER_KILL_TEST"
KILL_MESSAGE_PREFIX = "killed at the point "
"""Beginning of the line that a process writes to standard error before it kills itself; the point follows."""

_current_failpoint: ContextVar[str] = ContextVar("leaving", default="")
"""Name of the failpoint for the message that the current context is sending on the bus."""


class _ConfiguredKill:
    """The kill that `CLUSTER_KILL_AT` and `CLUSTER_KILL_TEST` configure."""

    def __init__(self, setting: str, gate: str) -> None:
        self.point, _, pass_number = setting.partition("@")
        self._passes_left, self._gate = int(pass_number or 1), Path(gate)

    def pass_by(self) -> None:
        """Count one pass of the failpoint; at the configured pass, kill this process."""
        if not self._gate.exists():
            return
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        try:
            self._gate.unlink()
        except FileNotFoundError:
            return  # another process passed the point first and was killed
        sys.stderr.write(f"{KILL_MESSAGE_PREFIX}{self.point}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


_configured_kill: _ConfiguredKill | None = None


def arm() -> None:
    """Read `CLUSTER_KILL_AT` and `CLUSTER_KILL_TEST`. Raise SystemExit if only the first one is set."""
    global _configured_kill
    setting, gate = os.environ.get(KILL_AT_VARIABLE, ""), os.environ.get(KILL_TEST_VARIABLE, "")
    if setting and not gate:
        sys.exit(
            f"{KILL_AT_VARIABLE} kills this process in a test, and {KILL_TEST_VARIABLE} is not set;"
            f" unset {KILL_AT_VARIABLE}"
        )
    _configured_kill = _ConfiguredKill(setting, gate) if setting else None


arm()


def armed() -> bool:
    """Return True if a kill is configured."""
    return _configured_kill is not None


def passed(point: str) -> None:
    """Pass the failpoint `point`: kill this process if the configured kill is due."""
    if _configured_kill is not None and _configured_kill.point == point:
        _configured_kill.pass_by()


@contextlib.contextmanager
def wrap_request(point: str) -> Iterator[None]:
    """Wrap a request on the bus with the failpoints `:before`, `:sent` and `:answered`."""
    if _configured_kill is None:
        yield
        return
    with wrap_message(point):
        yield
    passed(f"{point}:answered")


@contextlib.contextmanager
def wrap_message(point: str) -> Iterator[None]:
    """Wrap a message without a reply with the failpoints `:before` and `:sent`."""
    if _configured_kill is None:
        yield
        return
    passed(f"{point}:before")
    token = _current_failpoint.set(point)
    try:
        yield
    finally:
        _current_failpoint.reset(token)


async def pass_sent(flush: Callable[[], Awaitable[None]]) -> None:
    """Pass the failpoint `:sent` of the current message, after `flush` has sent the message."""
    if (
        _configured_kill is not None
        and (point := f"{_current_failpoint.get()}:sent") == _configured_kill.point
    ):
        await flush()
        passed(point)
