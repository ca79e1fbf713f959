"""One tidy log of many processes: `web        | text`, in colour on a terminal only."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TextIO

WIDTH = 10
_COLOURS = {
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
    """Writes whole lines, each behind the name of who said it. Safe to use from several threads."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()
        self._colour = self.terminal

    @property
    def terminal(self) -> bool:
        """Whether a person looks on."""
        return self._stream.isatty()

    def say(self, name: str, text: str) -> None:
        """One line, or several behind the same name."""
        prefix = f"{name:<{WIDTH}} |"
        if self._colour and (number := _COLOURS.get(name)):
            prefix = f"\x1b[{number}m{prefix}\x1b[0m"
        lines = "".join(f"{prefix} {line}\n" for line in text.splitlines())
        # Whoever read us may be gone; that must not keep us from an orderly stop.
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(lines)
            self._stream.flush()

    def follow(self, name: str, output: IO[bytes], shown: Callable[[str], bool]) -> threading.Thread:
        """Passes on what a child says until it closes its output; ends with it."""

        def read() -> None:
            with output:
                for raw in output:
                    line = raw.decode(errors="replace").rstrip()
                    if line and shown(line):
                        self.say(name, line)

        thread = threading.Thread(target=read, name=f"log-{name}", daemon=True)
        thread.start()
        return thread
