"""The terminal of `make run`: one log for many processes, and the process that gets Ctrl-C.

The terminal sends Ctrl-C to its whole foreground group, and `make` reports it as an error even after an
orderly stop. So the supervisor becomes the foreground group itself, as a shell's job does, and restores the
old one at the end.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import IO, Self, TextIO


class Foreground:
    """Context manager in which Ctrl-C reaches only this process. Without a terminal it does nothing."""

    def __init__(self) -> None:
        self._before = 0
        self._parent = os.getppid()

    def __enter__(self) -> Self:
        with suppress(OSError, ValueError):
            if sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp() != os.getpid():
                # A background process that sets the foreground group is stopped unless it ignores the signal.
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                signal.signal(signal.SIGTSTP, signal.SIG_IGN)
                before = os.getpgrp()
                os.setpgid(0, 0)
                os.tcsetpgrp(sys.stdin.fileno(), os.getpid())
                self._before = before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            with suppress(OSError, ValueError):
                os.tcsetpgrp(sys.stdin.fileno(), self._before)

    def orphaned(self) -> bool:
        """Return True if the `make` that started this process has ended."""
        return bool(os.environ.get("MAKELEVEL")) and os.getppid() != self._parent


NAME_WIDTH = 10
_COLOUR_BY_PROCESS = {
    "run": 37,
    "postgres": 34,
    "nats": 35,
    "valkey": 36,
    "web": 32,
    "controller": 33,
    "tasks": 96,
    "worker": 92,
}


class Log:
    """The common log: whole lines, each prefixed with the name of its process. Thread-safe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()
        self._colour = self.terminal

    @property
    def terminal(self) -> bool:
        """True if the output is a terminal."""
        return self._stream.isatty()

    def say(self, name: str, text: str) -> None:
        """Write one or more lines under a process name."""
        prefix = f"{name:<{NAME_WIDTH}} |"
        if self._colour and (number := _COLOUR_BY_PROCESS.get(name)):
            prefix = f"\x1b[{number}m{prefix}\x1b[0m"
        lines = "".join(f"{prefix} {line}\n" for line in text.splitlines())
        # The reader of our output may be gone; that must not prevent an orderly stop.
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(lines)
            self._stream.flush()

    def follow(self, name: str, output: IO[bytes], keeps_line: Callable[[str], bool]) -> threading.Thread:
        """Copy the output of a child to the log in a thread, until the child closes its output."""

        def read() -> None:
            with output:
                for raw in output:
                    line = raw.decode(errors="replace").rstrip()
                    if line and keeps_line(line):
                        self.say(name, line)

        thread = threading.Thread(target=read, name=f"log-{name}", daemon=True)
        thread.start()
        return thread
