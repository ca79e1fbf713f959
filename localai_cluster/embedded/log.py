"""One log for many processes: `web        | text`, with colour on a terminal."""

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
    """Writes whole lines, each after the name of its process. Thread-safe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()
        self._colour = self.terminal

    @property
    def terminal(self) -> bool:
        """Whether the output is a terminal."""
        return self._stream.isatty()

    def say(self, name: str, text: str) -> None:
        """Writes one or more lines under a name."""
        prefix = f"{name:<{WIDTH}} |"
        if self._colour and (number := _COLOURS.get(name)):
            prefix = f"\x1b[{number}m{prefix}\x1b[0m"
        lines = "".join(f"{prefix} {line}\n" for line in text.splitlines())
        # The reader of our output may be gone; that must not prevent an orderly stop.
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(lines)
            self._stream.flush()

    def follow(self, name: str, output: IO[bytes], keeps_line: Callable[[str], bool]) -> threading.Thread:
        """Copies the output of a child in a thread, until the child closes it."""

        def read() -> None:
            with output:
                for raw in output:
                    line = raw.decode(errors="replace").rstrip()
                    if line and keeps_line(line):
                        self.say(name, line)

        thread = threading.Thread(target=read, name=f"log-{name}", daemon=True)
        thread.start()
        return thread
