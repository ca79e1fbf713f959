"""One run per data directory, and the cleanup after a killed run.

The kernel holds the lock (`flock`), so it ends with its process; the file's content only names that process.
A copied folder brings the content along, so the mark of a run begins with the folder's device and inode, and
a record of another folder is no record.
"""

import fcntl
import json
import os
import secrets
import signal
from pathlib import Path
from typing import Any

from localai_cluster.embedded.folder_identity import folder_id
from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.server import wait_for
from localai_cluster.kit import processes

GUARDIAN_SECONDS = 60.0
"""How long the guardian of a killed run may take to stop its processes."""


class DataLock:
    """The lock on a data directory; held for the life of the process."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "run.lock"
        self.taken_over: dict[str, Any] = {}
        """The last holder, if a run on this very folder ended without releasing the lock."""
        self._folder = folder_id(data_dir)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read()
            os.close(self._descriptor)
            raise SetupError(
                f"{data_dir} is in use by another run (process id {holder.get('pid', 'unknown')},"
                f" port {holder.get('port', 'unknown')}).",
                "Stop it with Ctrl-C, or choose another CLUSTER_DATA_DIR.",
            ) from None
        self.taken_over = self._read()
        if not str(self.taken_over.get("mark", "")).startswith(f"{self._folder}."):
            self.taken_over = {}
            os.ftruncate(self._descriptor, 0)

    def new_mark(self) -> str:
        """Return a mark for the processes of a run on this folder, different for each run."""
        return f"{self._folder}.{secrets.token_hex(8)}"

    def note(self, **holder: Any) -> None:
        """Records the holder: process id, port, and the mark in its children's environment."""
        text = json.dumps({"pid": os.getpid(), **holder}).encode()
        # A single write, padded to the old length, so that a concurrent reader sees a complete record.
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)

    def release(self) -> None:
        """Releases the lock."""
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
    """The run that uses `data_dir` now (process id, host, port); empty if there is none."""
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
    """Stops the processes of a killed run, found by its mark; returns how many there were.

    Usually its guardian is already doing so and only needs time. If the guardian was killed too, the
    processes get SIGTERM, then SIGKILL.
    """
    left = list(processes.marked(mark))
    if not left:
        return 0
    if not processes.guardian_of(mark):
        processes.kill(set(left), signal.SIGTERM)
    if not wait_for(lambda: not any(processes.marked(mark)), GUARDIAN_SECONDS):
        processes.sweep(mark)
    return len(left)
