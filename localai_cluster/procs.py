"""Child processes that end with their owner, however that ends. Without Django: the worker uses it too.

`spawn` starts a child in a session of its own, so that a Ctrl-C meant for the owner does not reach it and one
signal reaches all of it. A `Guardian` knows every child and, should the owner die without a word
(`kill -9`), ends them in order. Asking the kernel for a signal at the parent's death is not enough: a
`run.sh` that forks, a pool's children and `unshare` all lose that wish. `localai_cluster.guardian` is the
other end.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from localai_cluster import clock
from localai_cluster.guardian import (
    MARK_VARIABLE,
    SCRIPT,
    Group,
    end,
    guardian_of,
    kill,
    line_for,
    marked,
    processes,
    same,
    stat,
    sweep,
)

__all__ = [
    "MARK_VARIABLE",
    "Group",
    "Guardian",
    "ProcessIdentity",
    "end",
    "end_child",
    "group_of",
    "guardian_of",
    "kill",
    "marked",
    "processes",
    "same",
    "spawn",
    "stat",
    "sweep",
]

Stream = int | IO[Any] | None

FIRST_DELAY, LONGEST_DELAY, STEADY_SECONDS = 0.5, 30.0, 10.0
"""Between starts of guardians that end one after the other; one that was up for long is replaced at once."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process for good: its id and its start in clock ticks since boot, since ids are used again."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The identity of a running process; None when it is gone or only waits to be reaped."""
        found = stat(pid)
        return cls(pid, found.start) if found and found.running else None

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessIdentity.of(self.pid) == self


def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
) -> "subprocess.Popen[bytes]":
    """Starts `argv` as the leader of a new session and group; `OSError` when it cannot be started.

    `env` is the whole environment of the child (None: ours); with a guardian, add `Guardian.env` to it.
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
    """The group a child of ours leads, and how to end it: the polite signal, and how long to wait after it.

    `whole` sends the polite signal to the group, else to its leader only. A child that has ended already and
    was reaped gives a group without members, which is harmless.
    """
    found = stat(pid)
    return Group(pid, found.start if found else -1, polite, seconds, whole, rank)


def end_child(
    child: "subprocess.Popen[bytes]", group: Group, hurry: Callable[[], bool] = lambda: False
) -> bool:
    """`end` for a child of this process, reaped too. True when the polite signal was enough. Blocks."""
    politely = end(group, hurry)
    child.wait()
    return politely


class Guardian:
    """The owner's end of a guardian process. Safe to use from several threads.

    Put `env` into the environment of every child, `add` it right after its start, `discard` it after its end.
    A child started but not yet added when the owner dies is found by the mark in its environment. A guardian
    that ends before us is replaced; `replaced` hears of each, with the return code of the one that ended.
    """

    def __init__(self, mark: str | None = None, *, replaced: Callable[[int], None] = lambda _: None) -> None:
        self.mark = mark or secrets.token_hex(8)
        self._replaced = replaced
        self._groups: dict[int, Group] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._process = self._start()
        threading.Thread(target=self._keep, name="guardian", daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """What a child's environment needs, so that it can be told from the rest of the machine."""
        return {MARK_VARIABLE: self.mark}

    @property
    def pid(self) -> int:
        """Process id of the guardian as it runs now; another one after somebody has killed it."""
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
        """Registers the group that `pid` leads; see `group_of`. Without a rank the newest is ended first."""
        with self._lock:
            number = len(self._groups) if rank is None else rank
            group = group_of(pid, polite=polite, seconds=seconds, whole=whole, rank=number)
            self._groups[pid] = group
            self._tell(line_for(group))
            return group

    def discard(self, pid: int) -> None:
        """Forgets a group that has ended."""
        with self._lock:
            if self._groups.pop(pid, None):
                self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Lets the guardian go. It ends what is still registered first; this waits for it."""
        with self._lock:
            self._closed.set()
            process = self._process
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        # Nothing of our environment: neither secrets nor another guardian's mark.
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

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        # A guardian that is gone is noticed by `_keep`, whose successor hears the whole list.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _keep(self) -> None:
        delay = 0.0
        while not self._closed.is_set():
            begun = clock.monotonic()
            code = self._process.wait()
            if clock.monotonic() - begun >= STEADY_SECONDS:
                delay = 0.0
            if not self._closed.wait(delay) and self._replace():
                self._replaced(code)
            delay = min(max(2 * delay, FIRST_DELAY), LONGEST_DELAY)

    def _replace(self) -> bool:
        with self._lock:
            ended = self._process
            if self._closed.is_set():
                return False
            try:
                self._process = self._start()
            except OSError:
                return False  # no memory, no process ids: tried again, later each time
        assert ended.stdin
        with suppress(BrokenPipeError):
            ended.stdin.close()
        return True
