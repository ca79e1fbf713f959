"""The terminal of `make run`: which process gets Ctrl-C, and whether `make` is still there.

The terminal sends Ctrl-C to its whole foreground group, and `make` reports it as an error even after an
orderly stop. So the supervisor becomes the foreground group itself, as a shell's job does, and restores the
old one at the end.
"""

import os
import signal
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self


class Foreground:
    """While entered, Ctrl-C reaches only this process. Does nothing without a terminal."""

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
        """Whether the `make` that started this process has ended."""
        return bool(os.environ.get("MAKELEVEL")) and os.getppid() != self._parent
