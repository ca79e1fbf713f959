"""A file and its side files on disk: what may be believed of them, and in which order they change (§12.1).

`<file>.sha256.target` says that the upload of a file is unfinished and what it will be; `<file>.sha256`
vouches for what is there. So the first is on disk before the first byte of an upload, and the second only
after all bytes are. A kill or a power cut between any two steps leaves a file that is unfinished, or one that
nothing vouches for and whose hash is computed when a sender asks; never a hash of other bytes. A side file
that is older than its file is not believed: this compares with the time of the last change of any kind too,
since a copy may bring along an earlier time of its content.

Files are never truncated, they are replaced: an engine may have the former one mapped. All of it blocks.
"""

import contextlib
import hashlib
import io
import os
import shutil
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from localai_cluster import regular_files
from localai_cluster.worker.exchange import Refusal
from localai_cluster.worker.file_copy import HEADROOM
from localai_cluster.worker.files.keys import HASH, TARGET
from localai_cluster.worker.files.ranges import is_digest

PIECE = 1024 * 1024
SYNC_EVERY = 256 * 1024 * 1024
"""Bytes of an upload after which they are brought to disk, so that its end does not wait for all of them."""
FOLDER_MODE, FILE_MODE = 0o750, 0o640
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HashStopped(Exception):
    """The worker ends before a file was read whole."""


@dataclass(frozen=True)
class State:
    """What lies at a place: nothing has size 0. `target` and `digest` are "" where no side file says."""

    exists: bool = False
    size: int = 0
    target: str = ""
    """Of an upload that is not finished."""
    digest: str = ""
    """Of what is there."""

    @property
    def unknown(self) -> bool:
        """Whether somebody has to read the file to say what it is."""
        return self.exists and not (self.target or self.digest)


def look(path: Path) -> State:
    """The state of a path without links. Refusal 400 for what is no file."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return State()
    if not stat.S_ISREG(status.st_mode):
        what = "is a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise Refusal(400, what)
    target, _ = _read_side(path, TARGET)
    digest, at = _read_side(path, HASH)
    believed = at >= max(status.st_mtime_ns, status.st_ctime_ns)
    return State(True, status.st_size, target, digest if believed else "")


def _read_side(path: Path, ending: str) -> tuple[str, int]:
    """The hash that a side file holds and when it was written; ("", -1) if it cannot be believed."""
    try:
        with regular_files.open_file(_side(path, ending), follow_links=False) as file:
            text = file.read(80).decode("latin-1").strip().lower()
            return (text, os.fstat(file.fileno()).st_mtime_ns) if is_digest(text) else ("", -1)
    except OSError:
        return "", -1


def _side(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _write_side(path: Path, ending: str, digest: str) -> None:
    side = _side(path, ending)
    side.unlink(missing_ok=True)
    with os.fdopen(os.open(side, _NEW, FILE_MODE), "w") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Removes the file and its side files; the folder stays."""
    for each in (_side(path, HASH), _side(path, TARGET), path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            each.unlink()
    sync_folder(path.parent)


def make_room(path: Path, needed: int, given_back: int = 0) -> None:
    """Makes the folders above. Refusal 507 if so many bytes do not fit, 400 if a file is in the way."""
    missing, folder = [], path.parent
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    if not folder.is_dir():
        raise Refusal(400, f"invalid key: {folder.name} is a file")
    free = shutil.disk_usage(folder).free + given_back
    if needed + HEADROOM > free:
        raise Refusal(507, f"not enough disk space: {needed} bytes do not fit in {folder} ({free} free)")
    for each in reversed(missing):
        each.mkdir(mode=FOLDER_MODE, exist_ok=True)
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Has the names in it on disk."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def vouch(path: Path, digest: str) -> None:
    """Says what a complete file is, whose bytes are on disk."""
    _write_side(path, HASH, digest)
    sync_folder(path.parent)
    # Last: as long as it is there, the file counts as unfinished.
    _side(path, TARGET).unlink(missing_ok=True)


def hash_file(path: Path, stopped: threading.Event) -> str:
    """The SHA-256 of what is there. HashStopped, OSError."""
    reader = hashlib.sha256()
    with regular_files.open_file(path, follow_links=False) as file:
        while piece := file.read(PIECE):
            if stopped.is_set():
                raise HashStopped
            reader.update(piece)
    return reader.hexdigest()


def cached_hash(path: Path, stopped: threading.Event) -> str:
    """The hash of a complete file, kept for the next time if nothing changed the file meanwhile."""
    before = path.lstat()
    digest = hash_file(path, stopped)
    after = path.lstat()
    if all(getattr(before, one) == getattr(after, one) for one in ("st_ino", "st_size", "st_ctime_ns")):
        with contextlib.suppress(OSError):  # a folder that cannot be written has no side files
            _write_side(path, HASH, digest)
    return digest


class Writing:
    """A file that bytes are appended to. `size` counts those that are there."""

    def __init__(self, path: Path, size: int, target: str, *, known: str = "") -> None:
        """Opens a new file for size 0, in place of a former one. `known` is the target that is on disk."""
        self._path = path
        self.size = size
        if size == 0:
            remove(path)
        else:
            _side(path, HASH).unlink(missing_ok=True)
        self._file = io.FileIO(os.open(path, _APPEND if size else _NEW, FILE_MODE), "wb")
        try:
            if target and not (size and known == target):
                _write_side(path, TARGET, target)
                sync_folder(path.parent)
        except OSError:
            self._file.close()
            raise
        self._hash = None if size else hashlib.sha256()
        self._synced = size

    def append(self, piece: bytes) -> None:
        """OSError when the disk takes no more; what it took is counted."""
        rest = memoryview(piece)
        while rest:
            written = self._file.write(rest) or 0
            if self._hash is not None:
                self._hash.update(rest[:written])
            self.size += written
            rest = rest[written:]
        if self.size - self._synced >= SYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Has all bytes on disk."""
        os.fsync(self._file.fileno())
        self._synced = self.size

    def digest(self, stopped: threading.Event) -> str:
        """The hash of the whole file. HashStopped, OSError; Refusal 500 if another one has its name now."""
        at_path, ours = self._path.lstat(), os.fstat(self._file.fileno())
        if (at_path.st_dev, at_path.st_ino) != (ours.st_dev, ours.st_ino):
            raise Refusal(500, "the file was removed or replaced while it was written")
        return self._hash.hexdigest() if self._hash is not None else hash_file(self._path, stopped)

    def close(self) -> None:
        """Ends it; the bytes stay."""
        self._file.close()


def sync(path: Path) -> None:
    """Has all bytes of a file on disk that somebody else wrote."""
    with regular_files.open_file(path, follow_links=False) as file:
        os.fsync(file.fileno())
