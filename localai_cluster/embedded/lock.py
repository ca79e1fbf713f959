"""One run per data directory, and the cleanup after a killed run.

The kernel holds the lock (`flock`), so it ends with its process; the file's content only names that process.
A copied folder brings the content along, with everything that the cluster is known by: its keys, the process
ids of its servers, the rows of its nodes. So a file in the folder names the folder that it was written for,
by file system and inode, and the mark of a run begins with both. Device numbers may change with a reboot,
inodes do not.
"""

import fcntl
import json
import os
import secrets
import signal
from pathlib import Path
from typing import Any

from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.server import wait_for
from localai_cluster.kit import files, processes

FOLDER_ID_FILE = "folder.json"


def folder_id(folder: Path) -> str:
    """Return the file system and inode of `folder`: no other folder of this machine has both.

    The file system is a device number or, without a device (btrfs, NFS, overlay, FUSE), the id that the file
    system states: each mount gets another number.
    """
    found = folder.stat()
    file_system = found.st_dev if os.major(found.st_dev) else os.statvfs(folder).f_fsid
    return f"{file_system:x}.{found.st_ino:x}"


def is_copy(folder: Path) -> bool:
    """Return True if `folder` is a copy of another folder, which its file `folder.json` names."""
    try:
        claimed = json.loads((folder / FOLDER_ID_FILE).read_text(encoding="utf-8"))
        file_system, inode = str(claimed["folder"]).split(".")
        boot = claimed["boot"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # an earlier version wrote no file
    own_ids = _own_ids(folder)
    is_other_inode = inode not in (own_id.partition(".")[2] for own_id in own_ids)
    return is_other_inode or (f"{file_system}.{inode}" not in own_ids and boot == files.boot_id())


def _own_ids(folder: Path) -> tuple[str, str]:
    """Return the folder's id, and its id by an earlier version, which always took the device number."""
    found = folder.stat()
    return folder_id(folder), f"{found.st_dev:x}.{found.st_ino:x}"


def claim(folder: Path) -> None:
    """Record the id of `folder` in its file `folder.json`, so that a later copy can be detected."""
    files.replace_file(
        folder / FOLDER_ID_FILE, json.dumps({"folder": folder_id(folder), "boot": files.boot_id()}) + "\n"
    )


LOCK_TIMEOUT = 0.5
"""Seconds to try to lock a folder: `holder_of` locks it for a moment."""
REAPER_TIMEOUT = 240.0
"""Seconds for the process reaper of a killed run to stop its processes, one after the other."""


class DataLock:
    """The lock on a data directory, held until the process ends."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "run.lock"
        self.taken_over: dict[str, Any] = {}
        """The last holder, if a run on this very folder ended without releasing the lock."""
        self._ids = _own_ids(data_dir)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        if not wait_for(self._try_lock, LOCK_TIMEOUT):
            holder = self._read_holder()
            os.close(self._descriptor)
            raise SetupError(
                f"{data_dir} is in use by another run (process id {holder.get('pid', 'unknown')},"
                f" port {holder.get('port', 'unknown')}).",
                "Stop it with Ctrl-C, or choose another CLUSTER_DATA_DIR.",
            )
        self.taken_over = self._read_holder()
        if not str(self.taken_over.get("mark", "")).startswith(tuple(f"{own_id}." for own_id in self._ids)):
            self.taken_over = {}
            os.ftruncate(self._descriptor, 0)

    def new_mark(self) -> str:
        """Return a new mark: text in the environment of all processes of a run on this folder."""
        return f"{self._ids[0]}.{secrets.token_hex(8)}"

    def note(self, **holder: Any) -> None:
        """Write this process to the lock file: its id, port, and the mark in its children's environment."""
        text = json.dumps({"pid": os.getpid(), **holder}).encode()
        # A single write, padded to the old length, so that a concurrent reader sees a complete record.
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)

    def release(self) -> None:
        """Release the lock."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _read_holder(self) -> dict[str, Any]:
        return _parse_json_object(os.pread(self._descriptor, 4096, 0))


def _parse_json_object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def holder_of(data_dir: Path) -> dict[str, Any]:
    """Return the run that uses `data_dir` now (process id, host, port); empty if there is none."""
    try:
        with (data_dir / "run.lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parse_json_object(file.read())
    except OSError:
        pass
    return {}


def end_leftovers(mark: str) -> int:
    """Stop the processes of a killed run, whose environment contains `mark`; return their number.

    Usually the run's process reaper is stopping them already and only needs time. If the reaper was killed
    too, the processes get SIGTERM, then SIGKILL.
    """
    left = list(processes.marked_processes(mark))
    if not left:
        return 0
    if not processes.reaper_of(mark):
        processes.kill(set(left), signal.SIGTERM)
    if not wait_for(lambda: not any(processes.marked_processes(mark)), REAPER_TIMEOUT):
        processes.sweep(mark)
    return len(left)
