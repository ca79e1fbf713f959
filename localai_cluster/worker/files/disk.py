"""A file and its side files on disk: the rules for trusting them, and the order of changes (§12.1).

`<file>.sha256.target` marks an unfinished upload and holds the hash of the complete file; `<file>.sha256`
holds the hash of the current content. So the first is on disk before the first byte of an upload, and the
second only after all bytes are. A kill or a power cut between any two steps leaves an unfinished file, or a
file without a hash, which is computed when a sender requests it; never a hash of other bytes. A side file
that is older than its file is ignored: the comparison includes the time of the last metadata change, since a
copy may restore an earlier modification time.

Files are never truncated but replaced: an engine may have the former one mapped. All functions block.
"""

import asyncio
import contextlib
import hashlib
import io
import os
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from localai_cluster.kit import failpoints, untrusted
from localai_cluster.kit.files import sync_folder
from localai_cluster.worker.cancellation import wait_for_thread
from localai_cluster.worker.exchange import Refusal, is_digest
from localai_cluster.worker.files.keys import HASH_SUFFIX, TARGET_SUFFIX
from localai_cluster.worker.source_files import HEADROOM_BYTES, hash_of

T = TypeVar("T")
WRITER_THREADS, HASH_THREADS = 8, 2


class Threads:
    """Two thread pools: a small one for hashes, which use a core and the disk, and one for other calls."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Ends running hashes at their next piece."""
        self._disk = ThreadPoolExecutor(WRITER_THREADS, "files")
        self._hashes = ThreadPoolExecutor(HASH_THREADS, "hashes")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a short function. Even if cancelled, return only after the thread has ended."""
        return await wait_for_thread(_run_in_pool(self._disk, function, *arguments))

    async def hash(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that reads a complete file; see `run`."""
        return await wait_for_thread(_run_in_pool(self._hashes, function, *arguments))


def _run_in_pool(pool: Executor, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
    return asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


SYNC_EVERY_BYTES = 256 * 1024 * 1024
"""Bytes of an upload between two syncs to disk, so that the last sync is short."""
FOLDER_MODE, FILE_MODE = 0o750, 0o640
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class FileState:
    """The state of a file; `size` is 0 if the file does not exist.

    `target` and `digest` are "" without a valid side file.
    """

    exists: bool = False
    size: int = 0
    target: str = ""
    """Expected hash of an unfinished upload."""
    digest: str = ""
    """Hash of the current content."""

    @property
    def has_unknown_hash(self) -> bool:
        """True if the file must be read to determine its hash."""
        return self.exists and not (self.target or self.digest)


def read_state(path: Path) -> FileState:
    """Return the state of a file at a path without links. Raise Refusal 400 if it is not a regular file."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return FileState()
    if not stat.S_ISREG(status.st_mode):
        problem = "is a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise Refusal(400, problem)
    target, _ = _read_side_file(path, TARGET_SUFFIX)
    digest, written_at = _read_side_file(path, HASH_SUFFIX)
    is_current = written_at >= max(status.st_mtime_ns, status.st_ctime_ns)
    return FileState(True, status.st_size, target, digest if is_current else "")


def _read_side_file(path: Path, ending: str) -> tuple[str, int]:
    """Return the hash in a side file and the time of its last write.

    Return ("", -1) if the side file is missing or invalid.
    """
    try:
        with untrusted.open_file(_side_file_path(path, ending), follow_links=False) as file:
            text = file.read(80).decode("latin-1").strip().lower()
            return (text, os.fstat(file.fileno()).st_mtime_ns) if is_digest(text) else ("", -1)
    except OSError:
        return "", -1


def _side_file_path(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _write_side_file(path: Path, ending: str, digest: str) -> None:
    side = _side_file_path(path, ending)
    side.unlink(missing_ok=True)
    with os.fdopen(os.open(side, _CREATE_FLAGS, FILE_MODE), "w") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove the file and its side files, but not the folder."""
    for file in (_side_file_path(path, HASH_SUFFIX), _side_file_path(path, TARGET_SUFFIX), path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()
    sync_folder(path.parent)


def prepare_folder(path: Path, needed: int, freed_bytes: int = 0) -> None:
    """Create the parent folders of `path`, after a check that `needed` bytes fit on the disk.

    The caller frees `freed_bytes` later. Raise Refusal 507 if the bytes do not fit, 400 if a parent is a
    file.
    """
    missing, folder = [], path.parent
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    if not folder.is_dir():
        raise Refusal(400, f"invalid key: {folder.name} is a file")
    free = shutil.disk_usage(folder).free + freed_bytes
    if needed + HEADROOM_BYTES > free:
        raise Refusal(507, f"not enough disk space: {needed} bytes do not fit in {folder} ({free} free)")
    for parent in reversed(missing):
        parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        sync_folder(parent.parent)


def record_hash(path: Path, digest: str) -> None:
    """Record the hash of a complete file whose bytes are on disk."""
    _write_side_file(path, HASH_SUFFIX, digest)
    sync_folder(path.parent)
    # Last: as long as this file exists, the upload counts as unfinished.
    _side_file_path(path, TARGET_SUFFIX).unlink(missing_ok=True)


def move_complete_file(source: Path, path: Path, digest: str) -> None:
    """Move a complete file with this hash to `path`; replace a former file there."""
    source.chmod(FILE_MODE)
    sync(source)
    for ending in (HASH_SUFFIX, TARGET_SUFFIX):
        _side_file_path(path, ending).unlink(missing_ok=True)
    os.replace(source, path)
    failpoints.passed("worker.fetch:moved")
    record_hash(path, digest)


def hash_file(path: Path, stopped: threading.Event) -> str:
    """Return the SHA-256 of the file's content. Raise WorkCancelled or OSError."""
    with untrusted.open_file(path, follow_links=False) as file:
        return hash_of(file, stopped).hexdigest()


def cached_hash(path: Path, stopped: threading.Event) -> str:
    """Return the hash of a complete file; store it unless the file has changed meanwhile."""
    old = path.lstat()
    digest = hash_file(path, stopped)
    new = path.lstat()
    if all(getattr(old, field) == getattr(new, field) for field in ("st_ino", "st_size", "st_ctime_ns")):
        with contextlib.suppress(OSError):  # a read-only folder has no side files
            _write_side_file(path, HASH_SUFFIX, digest)
    return digest


class PartialUpload:
    """A file that is open for appending; `size` is the number of its bytes."""

    def __init__(self, path: Path, size: int, target: str, *, known: str = "") -> None:
        """Open the file. For size 0, create it in place of a former file.

        `known` is the target hash that the side file already holds.
        """
        self._path = path
        self.size = size
        if size == 0:
            remove(path)
        else:
            _side_file_path(path, HASH_SUFFIX).unlink(missing_ok=True)
        self._file = io.FileIO(os.open(path, _APPEND_FLAGS if size else _CREATE_FLAGS, FILE_MODE), "wb")
        try:
            if target and not (size and known == target):
                _write_side_file(path, TARGET_SUFFIX, target)
                sync_folder(path.parent)
        except OSError:
            self._file.close()
            raise
        self._hash = None if size else hashlib.sha256()
        self._synced = size

    def append(self, piece: bytes) -> None:
        """Append `piece`. Raise OSError if the disk is full; `size` counts the bytes that were written."""
        remaining = memoryview(piece)
        while remaining:
            written = self._file.write(remaining) or 0
            if self._hash is not None:
                self._hash.update(remaining[:written])
            self.size += written
            remaining = remaining[written:]
        if self.size - self._synced >= SYNC_EVERY_BYTES:
            self.sync()

    def sync(self) -> None:
        """Sync all bytes to disk."""
        os.fsync(self._file.fileno())
        self._synced = self.size

    def digest(self, stopped: threading.Event) -> str:
        """Return the hash of the complete file.

        Raise WorkCancelled or OSError; Refusal 500 if the path no longer leads to this file.
        """
        path_status, file_status = self._path.lstat(), os.fstat(self._file.fileno())
        if (path_status.st_dev, path_status.st_ino) != (file_status.st_dev, file_status.st_ino):
            raise Refusal(500, "the file was removed or replaced while it was written")
        return self._hash.hexdigest() if self._hash is not None else hash_file(self._path, stopped)

    def close(self) -> None:
        """Close the file and keep its bytes."""
        self._file.close()


def sync(path: Path) -> None:
    """Sync a file that another process or an earlier upload wrote."""
    with untrusted.open_file(path, follow_links=False) as file:
        os.fsync(file.fileno())
