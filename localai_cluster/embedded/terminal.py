"""The terminal's part in `make run`: who gets Ctrl-C, and noticing that `make` itself is gone.

Ctrl-C goes to every process of the terminal's foreground group, and `make` answers it with an error of its
own, however orderly the stop was. So the supervisor takes the foreground for itself, as a shell's job does,
and hands it back at the end.
"""

import os
import signal
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self


class Foreground:
    """While entered, Ctrl-C reaches this process only. Does nothing without a terminal of our own."""

    def __init__(self) -> None:
        self._before = 0
        self._parent = os.getppid()

    def __enter__(self) -> Self:
        with suppress(OSError, ValueError):
            if sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp() != os.getpid():
                # Who sets the foreground from the background is stopped, unless it ignores the signal.
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
        """Whether the `make` that started us has been killed."""
        return bool(os.environ.get("MAKELEVEL")) and os.getppid() != self._parent
