"""Child processes that end with their owner, even if it is killed. Without Django: the worker uses it too.

`spawn` starts a child in a session of its own, so that a Ctrl-C meant for the owner does not reach it and one
signal reaches the child's whole group. A `ProcessReaper` has every child registered and ends them in order if
the owner dies without cleaning up (`kill -9`). The kernel's parent-death signal is not enough: a `run.sh`
that forks, a pool's children and `unshare` all lose it. `process_reaper.py` is the reaper.
"""

import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from localai_cluster.kit import backoff, clock
from localai_cluster.kit.process_reaper import (
    MARK_VARIABLE,
    SCRIPT,
    Group,
    end,
    is_still_running,
    kill,
    line_for,
    marked_processes,
    processes,
    reaper_of,
    stat,
    sweep,
)

__all__ = [
    "MARK_VARIABLE",
    "Group",
    "ProcessIdentity",
    "ProcessReaper",
    "describe_exit",
    "end",
    "end_child",
    "group_of",
    "is_still_running",
    "kill",
    "marked_processes",
    "processes",
    "raise_file_limit",
    "reaper_of",
    "spawn",
    "stat",
    "sweep",
]

ChildStream = int | IO[Any] | None

FIRST_DELAY, MAX_DELAY, STEADY_SECONDS = 0.5, 30.0, 10.0
"""Seconds: first and longest restart delay of reapers; uptime after which the next restart is immediate."""


MAX_OPEN_FILES = 65536
"""The highest limit of open files that `raise_file_limit` sets: some programs try all descriptors."""


def raise_file_limit() -> None:
    """Raise the number of files that this process and its children may open, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS refuses more than a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True)
class ProcessIdentity:
    """Unique identity of a process: its id and start time (clock ticks since boot), as ids are reused."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Return the identity of a running process; None if the process has ended or is a zombie."""
        process = stat(pid)
        return cls(pid, process.start) if process and process.running else None

    @property
    def alive(self) -> bool:
        """Return True if this process still runs."""
        return ProcessIdentity.of(self.pid) == self


def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: ChildStream = subprocess.DEVNULL,
    stdout: ChildStream = None,
    stderr: ChildStream = None,
) -> "subprocess.Popen[bytes]":
    """Start `argv` as the leader of a new session and process group. Raise OSError if the start fails.

    `env` is the complete environment of the child; None means our own. With a reaper, add
    `ProcessReaper.env`.
    """
    return subprocess.Popen(
        [os.fspath(part) for part in argv],
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def group_of(
    pid: int, *, polite: int = signal.SIGTERM, seconds: float = 10.0, whole: bool = True, rank: int = 0
) -> Group:
    """Return the group that our child `pid` leads, with the polite signal and the seconds to wait after it.

    With `whole` the group gets the polite signal, otherwise only its leader. For a child that was already
    reaped, the group has no members, which is harmless.
    """
    leader = stat(pid)
    return Group(pid, leader.start if leader else -1, polite, seconds, whole, rank)


def end_child(
    child: "subprocess.Popen[bytes]", group: Group, hurry: Callable[[], bool] = lambda: False
) -> bool:
    """End a child of this process and reap it; return True if SIGKILL was not necessary. Blocks."""
    politely = end(group, hurry)
    child.wait()
    return politely


class ProcessReaper:
    """The owner's handle of a process reaper. Thread-safe.

    Put `env` into the environment of every child, call `add` directly after the child's start, and `discard`
    after its end. If the owner dies between start and `add`, the reaper finds the child by the mark in its
    environment. A reaper that ends before the owner is replaced; the callback `replaced` gets its return
    code.
    """

    def __init__(self, mark: str | None = None, *, replaced: Callable[[int], None] = lambda _: None) -> None:
        self.mark = mark or secrets.token_hex(8)
        self._replaced = replaced
        self._groups: dict[int, Group] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._process = self._start_reaper()
        threading.Thread(target=self._keep_alive, name="reaper", daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """Environment variable that marks a process as a child of this owner."""
        return {MARK_VARIABLE: self.mark}

    @property
    def pid(self) -> int:
        """Process id of the current reaper; it changes if the reaper is replaced."""
        with self._lock:
            return self._process.pid

    def add(
        self,
        pid: int,
        *,
        polite: int = signal.SIGTERM,
        seconds: float = 10.0,
        whole: bool = True,
        rank: int | None = None,
    ) -> Group:
        """Register the group that `pid` leads; see `group_of`.

        Without a `rank`, the reaper ends the newest group first.
        """
        with self._lock:
            number = len(self._groups) if rank is None else rank
            group = group_of(pid, polite=polite, seconds=seconds, whole=whole, rank=number)
            self._groups[pid] = group
            self._send_line(line_for(group))
            return group

    def discard(self, pid: int) -> None:
        """Remove a group that has ended."""
        with self._lock:
            if self._groups.pop(pid, None):
                self._send_line(f"-{pid}\n")

    def close(self) -> None:
        """Close the pipe to the reaper; wait until the reaper has ended all groups and itself."""
        with self._lock:
            self._closed.set()
            process = self._process
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()

    def __enter__(self) -> "ProcessReaper":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_reaper(self) -> "subprocess.Popen[bytes]":
        # An empty environment: neither our secrets nor another process reaper's mark.
        process = spawn(
            [sys.executable, "-I", "-S", SCRIPT, self.mark],
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin
        lines = list(map(line_for, self._groups.values()))
        with suppress(BrokenPipeError):
            process.stdin.write("".join(lines).encode())
            process.stdin.flush()
        return process

    def _send_line(self, line: str) -> None:
        assert self._process.stdin
        # `_keep_alive` replaces a process reaper that has died; the new one gets the complete list.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _keep_alive(self) -> None:
        failures = 0
        while not self._closed.is_set():
            started_at = clock.monotonic()
            code = self._process.wait()
            if clock.monotonic() - started_at >= STEADY_SECONDS:
                failures = 0
            delay = backoff.delay(failures, first=FIRST_DELAY, longest=MAX_DELAY) if failures else 0.0
            if not self._closed.wait(delay) and self._replace_reaper():
                self._replaced(code)
            failures += 1

    def _replace_reaper(self) -> bool:
        with self._lock:
            ended = self._process
            if self._closed.is_set():
                return False
            try:
                self._process = self._start_reaper()
            except OSError:
                return False  # out of memory or process ids: `_keep_alive` retries with back-off
        assert ended.stdin
        with suppress(BrokenPipeError):
            ended.stdin.close()
        return True


def describe_exit(code: int) -> str:
    """Return `exit code 1`, or the name of the signal that ended the process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
