"""One run a data directory, and what a run that was killed has left behind.

The lock is the kernel's (`flock`), so it is gone with its holder; the file's content only says who that is.
"""

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

from localai_cluster import procs
from localai_cluster.embedded.places import Trouble
from localai_cluster.embedded.server import wait_for

GUARDIAN_SECONDS = 60.0
"""How long the guardian of a killed run may take to end what that run had started."""


class DataLock:
    """The right to run on a data directory; hold it as long as the process lives."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "run.lock"
        self.taken_over: dict[str, Any] = {}
        """Who held it last, when that run ended without giving it back."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read()
            os.close(self._descriptor)
            raise Trouble(
                f"{data_dir} is in use by the run with process id {holder.get('pid', 'unknown')}"
                f" (port {holder.get('port', 'unknown')}).",
                "Stop that one with Ctrl-C, or choose another CLUSTER_DATA_DIR.",
            ) from None
        self.taken_over = self._read()

    def note(self, **holder: Any) -> None:
        """Writes who holds it now: process id, port, and the mark in its children's environment."""
        text = json.dumps({"pid": os.getpid(), **holder}).encode()
        # One write over the former note, blanks over the rest: whoever reads meanwhile finds a whole one.
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)

    def release(self) -> None:
        """Gives it back in good order."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _read(self) -> dict[str, Any]:
        return _parse(os.pread(self._descriptor, 4096, 0))


def _parse(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def holder_of(data_dir: Path) -> dict[str, Any]:
    """Who runs on `data_dir` now (process id, host, port); empty when nobody does."""
    try:
        with (data_dir / "run.lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parse(file.read())
    except OSError:
        pass
    return {}


def end_leftovers(mark: str) -> int:
    """Ends what a killed run has left, told by its mark; returns how many processes there were.

    Usually its guardian is at work already and only needs time; if that was killed too, the leftovers are
    asked, then killed.
    """
    left = list(procs.marked(mark))
    if not left:
        return 0
    if not procs.guardian_of(mark):
        procs.kill(set(left), signal.SIGTERM)
    if not wait_for(lambda: not any(procs.marked(mark)), GUARDIAN_SECONDS):
        procs.sweep(mark)
    return len(left)
