"""Copies a folder as the source of a backend's files, within limits that archives share.

A copy counts the bytes that are really read, has a bandwidth limit, and can be stopped at any moment. Links
are copied as links and never followed. All functions block and run in a thread.
"""

import errno
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import IO

from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError

CHUNK_BYTES = 1024 * 1024
RATE_STEPS_PER_SECOND = 20  # pieces per second under a limit, so that progress moves evenly
HEADROOM_BYTES = 64 * 1024 * 1024
MAX_FOLDER_DEPTH = 128
"""Maximum number of folders below each other: Python before 3.13 cannot remove a much deeper tree."""
SHUTDOWN_MESSAGE = "the worker is shutting down; the install was cancelled"

OnBytes = Callable[[int, int, str], None]
"""Called with the bytes copied, the total bytes, and the current file."""


class WorkCancelled(ClusterError):
    """The worker shuts down, or a controller cancelled the work on files (`cancellation.py`)."""

    code = "stopped"
    permanent = False


class BadSource(ClusterError):
    """The source of the files cannot be copied or unpacked."""


class DiskFull(BadSource):
    """The disk has too little free space, or a quota is exhausted."""


def check_depth(folder: PurePath, source: str) -> None:
    """Raise BadSource if this relative path has more than `MAX_FOLDER_DEPTH` folders."""
    if len(folder.parts) > MAX_FOLDER_DEPTH:
        raise BadSource(f"{source} has more than {MAX_FOLDER_DEPTH} folders below each other")


def check_free_space(folder: Path, size: int, what: str = "bytes") -> None:
    """Raise DiskFull if `size` more bytes and `HEADROOM_BYTES` do not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if size + HEADROOM_BYTES > free:
        raise DiskFull(f"{size} {what} do not fit on the disk of {folder} ({free} free). Free up space.")


def hash_of(file: IO[bytes], stopped: threading.Event, size: int | None = None) -> "hashlib._Hash":
    """Return the hash object of the next `size` bytes (default: all) of a file.

    Raise WorkCancelled or OSError.
    """
    digest = hashlib.sha256()
    while piece := file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size)):
        if stopped.is_set():
            raise WorkCancelled(SHUTDOWN_MESSAGE)
        digest.update(piece)
        size = None if size is None else size - len(piece)
    return digest


@contextmanager
def translate_disk_full(folder: Path) -> Iterator[None]:
    """Convert the system's errors about a full disk or an exhausted quota to DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"cannot write to the disk of {folder}: {error.strerror}. Free up space.") from error


class Throttle:
    """Limits all copies of a worker together to `rate` bytes per second (0 = unlimited)."""

    def __init__(self, rate: int, now: Callable[[], float] = clock.monotonic) -> None:
        self._rate = rate
        self._now = now
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def piece_bytes(self) -> int:
        """Number of bytes to copy at a time."""
        return max(1024, min(CHUNK_BYTES, self._rate // RATE_STEPS_PER_SECOND)) if self._rate else CHUNK_BYTES

    def pause(self, size: int) -> float:
        """Reserve `size` bytes; return the seconds to wait for them."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._now()
            self._free_at = max(self._free_at, now) + size / self._rate
            return self._free_at - now


@dataclass(frozen=True)
class _CopyPlan:
    folders: list[tuple[Path, int]]
    files: list[tuple[Path, int]]
    links: list[tuple[Path, str]]
    total: int


def copy_tree(
    source: Path, target: Path, throttle: Throttle, stopped: threading.Event, on_bytes: OnBytes
) -> None:
    """Copy the folder `source` to the new folder `target`. Raise BadSource, WorkCancelled or OSError."""
    plan = _plan_copy(source, stopped)
    check_free_space(target.parent, plan.total)
    for relative, mode in plan.folders:
        (target / relative).mkdir(mode=mode | 0o700)
    for relative, destination in plan.links:
        os.symlink(destination, target / relative)
    copy = _FolderCopy(throttle, stopped, on_bytes, plan.total)
    copy.show("")
    for relative, mode in plan.files:
        copy.file(source / relative, target / relative, mode, str(relative))


class _FolderCopy:
    """One running copy, which counts its bytes."""

    def __init__(self, throttle: Throttle, stopped: threading.Event, on_bytes: OnBytes, total: int) -> None:
        self._throttle = throttle
        self._stopped = stopped
        self._on_bytes = on_bytes
        self._total = total
        self._done = 0

    def show(self, name: str) -> None:
        # A source that grows during the copy must not show more than 100 %.
        self._on_bytes(self._done, max(self._total, self._done), name)

    def file(self, source: Path, target: Path, mode: int, name: str) -> None:
        # Neither follows a link nor waits for a pipe that replaced the file since the survey.
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as reader, open(target, "xb") as writer:
            while piece := reader.read(self._throttle.piece_bytes):
                if self._stopped.wait(self._throttle.pause(len(piece))):
                    raise WorkCancelled(SHUTDOWN_MESSAGE)
                writer.write(piece)
                self._done += len(piece)
                self.show(name)
            os.fchmod(writer.fileno(), mode)


def _plan_copy(source: Path, stopped: threading.Event) -> _CopyPlan:
    plan, total = _CopyPlan([], [], [], 0), 0
    pending = [Path()]
    while pending:
        if stopped.is_set():
            raise WorkCancelled(SHUTDOWN_MESSAGE)
        folder = pending.pop()
        check_depth(folder, "the source")
        plan.folders.append((folder, stat.S_IMODE(os.lstat(source / folder).st_mode) & 0o777))
        with os.scandir(source / folder) as entries:
            for item in entries:
                relative, info = folder / item.name, item.stat(follow_symlinks=False)
                if stat.S_ISLNK(info.st_mode):
                    plan.links.append((relative, _copied_link_target(source, source / relative)))
                elif stat.S_ISDIR(info.st_mode):
                    pending.append(relative)
                elif stat.S_ISREG(info.st_mode):
                    plan.files.append((relative, stat.S_IMODE(info.st_mode) & 0o777))
                    total += info.st_size
                else:
                    raise BadSource(f"{relative} in the source is not a file, folder or link")
    return replace(plan, files=sorted(plan.files), total=total)


def _copied_link_target(source: Path, link: Path) -> str:
    """Return the target for the copied link. An absolute link into the source becomes relative.

    All other targets stay unchanged.
    """
    destination = os.readlink(link)
    if os.path.isabs(destination) and Path(destination).is_relative_to(source):
        return os.path.relpath(destination, link.parent)
    return destination
