"""A file of the models folder while it is downloaded: its bytes, and a journal of the received spans.

Both are in the hidden folder `.downloads`, under a hash of the file's path. A lock of the operating system
makes one process at a time the only writer, and the lock ends with the process. So two operations share one
download, and a process that has lost its operation cannot write at the same time as its successor. The
journal is written after the bytes that it counts, so after a kill the download resumes at the next byte.
After a power failure, bytes that the journal counts may be missing: then the file needs a hash to be trusted.

The file becomes visible under its own name by a rename, when it is complete, verified and on disk. All
functions block.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import msgspec

from localai_cluster.kit import failpoints, files, untrusted
from localai_cluster.kit.errors import ClusterError

FOLDER = ".downloads"
JOURNAL = ".json"
CHUNK = 2**20
FIRST_SPAN = 32 * 2**20
"""Bytes of the first span; its response states the file's size."""
MAX_SPANS = 64
"""Maximum spans of one file."""
HEADROOM = 256 * 2**20
"""Bytes that must stay free on the disk of the models folder."""
RETENTION = timedelta(days=7)
"""Age after which an abandoned download is removed."""
_MAX_JOURNAL_LENGTH = 64 * 1024
_LFS_POINTER_START = b"version https://git-lfs.github.com/spec/"


class DiskFull(ClusterError):
    """The disk of the models folder has too little free space, or a quota is used up."""

    status = 507
    code = "disk_full"


class FolderFailed(ClusterError):
    """The models folder cannot be read or written."""

    code = "folder_failed"


class BeingDownloaded(Exception):
    """Another process or operation downloads the file, and has `done` bytes of it."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.done = done


class ByteSpan(msgspec.Struct, array_like=True):
    """Bytes from `start` to `end` (-1 = the unknown end of the file); the bytes before `at` are received."""

    start: int
    end: int
    at: int

    @property
    def missing(self) -> int | None:
        """The number of missing bytes; None = unknown."""
        return self.end - self.at if self.end >= 0 else None


class Journal(msgspec.Struct):
    """The received spans of a file; valid for its `boot` and `inode` only. `total` -1 = unknown."""

    path: str
    url: str
    sha256: str
    total: int = -1
    validator: str = ""
    boot: str = ""
    inode: int = 0
    spans: list[ByteSpan] = []

    @property
    def done(self) -> int:
        """The number of received bytes."""
        return sum(span.at - span.start for span in self.spans)


class PartialFile:
    """A file that is being downloaded, locked by this process.

    Thread-safe. Threads may outlive their caller; after `close` they change nothing.
    """

    def __init__(self, models: Path, path: str, data: Path, descriptor: int) -> None:
        self._models, self._data, self._descriptor = models, data, descriptor
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._journal_file = os.open(_journal_of(data), _JOURNAL_OPEN_FLAGS, 0o640)
        self._written_length = os.fstat(self._journal_file).st_size
        self.journal = Journal(path, "", "")
        self.digest: hashlib._Hash | None = None
        """Hash of the received bytes while one connection receives them in order; else None."""

    @classmethod
    def open(cls, models: Path, path: str) -> Self:
        """Create the partial file, or open that of an earlier attempt. Raise BeingDownloaded or OSError."""
        data = models / FOLDER / hashlib.sha256(path.encode()).hexdigest()[:32]
        data.parent.mkdir(mode=0o750, exist_ok=True)
        descriptor = _open_locked(data)
        try:
            return cls(models, path, data, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def resume(self, url: str, sha256: str) -> None:
        """Continue after the bytes of an earlier attempt if they can be trusted, else start over."""
        journal = _read_journal(self._data)
        own = self.journal.path
        status = os.fstat(self._descriptor)
        if (
            journal is None
            or (journal.path, journal.sha256, journal.inode) != (own, sha256, status.st_ino)
            or any(span.end < 0 or span.start < span.at > status.st_size for span in journal.spans)
        ):
            self.restart(url, sha256)
        elif sha256 or (journal.url == url and journal.validator and journal.boot == files.boot_id()):
            journal.url = url
            self.journal = journal
        else:
            self.restart(url, sha256)

    def restart(self, url: str, sha256: str) -> None:
        """Discard all bytes; pending writes of earlier spans have no effect."""
        with self._lock:
            os.ftruncate(self._descriptor, 0)
            inode = os.fstat(self._descriptor).st_ino
            self.journal = Journal(self.journal.path, url, sha256, boot=files.boot_id(), inode=inode)
            self.digest = hashlib.sha256()
            self._write_journal()

    def divide(self, first: ByteSpan, total: int, validator: str, *, with_ranges: bool) -> None:
        """Plan the spans of a file of `total` bytes (-1 = unknown); `first` is being received."""
        first.end, spans = total, [first]
        if with_ranges and total > FIRST_SPAN:
            size = max(FIRST_SPAN, -(-(total - FIRST_SPAN) // (MAX_SPANS - 1)))
            first.end = FIRST_SPAN
            spans += [ByteSpan(at, min(at + size, total), at) for at in range(FIRST_SPAN, total, size)]
            self.digest = None
        self.journal.total, self.journal.validator, self.journal.spans = total, validator, spans
        self._write_journal()

    def write(self, span: ByteSpan, piece: bytes) -> None:
        """Write the next bytes of a span. Raise DiskFull or OSError."""
        with self._lock:
            if self._closed.is_set() or not any(span is known for known in self.journal.spans):
                return
            with raising_disk_full(self._models):
                if shutil.disk_usage(self._models).free < len(piece) + HEADROOM // 4:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                view = memoryview(piece)
                while view:
                    written = os.pwrite(self._descriptor, view, span.at)
                    if self.digest is not None:
                        self.digest.update(view[:written])
                    span.at, view = span.at + written, view[written:]
                self._write_journal()
        failpoints.passed("download:piece")

    def end_at(self, span: ByteSpan) -> None:
        """Record that a file of unknown size ends with this span."""
        with self._lock:
            span.end = self.journal.total = span.at
            self._write_journal()

    @property
    def is_pointer(self) -> bool:
        """True if the source sent a Git LFS pointer instead of the file."""
        start = os.pread(self._descriptor, len(_LFS_POINTER_START), 0)
        return self.journal.total < 1024 and start == _LFS_POINTER_START

    def sha256(self, on_bytes: Callable[[int], None]) -> str:
        """Return the hash of the complete file; call `on_bytes` with each number of bytes read."""
        if self.digest is not None:
            return self.digest.hexdigest()
        digest, at = hashlib.sha256(), 0
        while not self._closed.is_set() and (piece := os.pread(self._descriptor, CHUNK, at)):
            digest.update(piece)
            at += len(piece)
            on_bytes(len(piece))
        return digest.hexdigest()

    def check_place(self) -> None:
        """Raise FolderFailed if the complete file could not be moved to its path."""
        _check_folder(self._models, (self._models / self.journal.path).parent)

    def publish(self) -> None:
        """Move the complete file to its path in the models folder. Raise FolderFailed or OSError."""
        target = self._models / self.journal.path
        failpoints.passed("download:verified")
        with self._lock:
            if self._closed.is_set():
                raise FolderFailed("the download was ended")
            _make_folders(self._models, target.parent)
            os.fchmod(self._descriptor, 0o644)
            os.fsync(self._descriptor)
            os.replace(self._data, target)
            files.sync_folder(target.parent)
            failpoints.passed("download:published")
            _journal_of(self._data).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the partial file and its journal."""
        with self._lock:
            self._unlink()

    def close(self) -> None:
        """Release the lock after the running write; remove the file if it has no bytes."""
        self._closed.set()
        with self._lock:
            if not os.fstat(self._descriptor).st_size and self._is_in_place():
                self._unlink()
            os.close(self._journal_file)
            os.close(self._descriptor)

    def _is_in_place(self) -> bool:
        """Return True if the path still leads to this open file; after publication the path may be reused."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._data))
        except FileNotFoundError:
            return False

    def _unlink(self) -> None:
        self._data.unlink(missing_ok=True)
        _journal_of(self._data).unlink(missing_ok=True)

    def _write_journal(self) -> None:
        text = msgspec.json.encode(self.journal)
        padded = text.ljust(self._written_length)
        os.pwrite(self._journal_file, padded, 0)
        self._written_length = len(padded)


_JOURNAL_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _journal_of(data: Path) -> Path:
    return data.with_name(data.name + JOURNAL)


def _open_locked(data: Path) -> int:
    """Open and lock the file; raise BeingDownloaded if another process or task holds the lock."""
    while True:
        descriptor = os.open(data, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its former owner may have published or removed it between our two calls.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(data)):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            journal = _read_journal(data)
            raise BeingDownloaded(journal.done if journal else 0) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _read_journal(data: Path) -> Journal | None:
    try:
        text = untrusted.read_file(_journal_of(data), _MAX_JOURNAL_LENGTH)
        journal = msgspec.json.decode(text.rstrip(), type=Journal)
    except (OSError, ValueError):
        return None
    spans = journal.spans
    is_sound = all(0 <= span.start <= span.at and (span.end == -1 or span.at <= span.end) for span in spans)
    return journal if is_sound else None


def _check_folder(models: Path, folder: Path) -> Path:
    """Return the folder, or its nearest existing parent.

    Raise FolderFailed if a link leads out of the models folder, or if the folder is on another disk.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not existing.resolve().is_relative_to(models.resolve()) or not existing.is_dir():
        raise FolderFailed(f"{existing} is no folder of the models folder")
    if existing.stat().st_dev != (models / FOLDER).stat().st_dev:
        raise FolderFailed(f"{existing} is on another disk than the models folder")
    return existing


def _make_folders(models: Path, folder: Path) -> None:
    """Create the folder below the models folder. Raise FolderFailed."""
    existing = _check_folder(models, folder)
    folder.mkdir(parents=True, exist_ok=True)
    while existing != folder:
        files.sync_folder(existing)
        existing = existing / folder.relative_to(existing).parts[0]


def check_free_space(models: Path, missing: int) -> None:
    """Raise DiskFull if `missing` more bytes do not fit on the disk of the models folder."""
    free = shutil.disk_usage(models).free
    if missing + HEADROOM > free:
        raise DiskFull(
            f"{missing / 2**30:.2f} GiB do not fit on the disk of the models folder:"
            f" {free / 2**30:.2f} GiB are free, and {HEADROOM / 2**30:.2f} GiB stay so. Remove unused files."
        )


@contextmanager
def raising_disk_full(models: Path) -> Iterator[None]:
    """Raise DiskFull instead of the system's errors about a full disk or a used-up quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"the disk of the models folder {models} is full: {error.strerror}") from error


def partial_files(models: Path) -> Iterator[tuple[Path, str, os.stat_result]]:
    """Yield the partial files, each with the path of the complete file ("" = unknown) and its status."""
    with suppress(FileNotFoundError), os.scandir(models / FOLDER) as entries:
        for entry in entries:
            if entry.name.endswith(JOURNAL):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    journal = _read_journal(Path(entry.path))
                    yield Path(entry.path), journal.path if journal else "", status


def bytes_of_partials(models: Path) -> dict[str, int]:
    """Return the received bytes of files that are being downloaded, by the path of the complete file."""
    journals = (_read_journal(data) for data, _, _ in partial_files(models))
    return {journal.path: journal.done for journal in journals if journal is not None}


def remove_partial(data: Path) -> bool:
    """Remove a partial file unless a download writes it; return True if it is gone."""
    with suppress(FileNotFoundError, BeingDownloaded):
        descriptor = _open_locked(data)
        try:
            data.unlink(missing_ok=True)
            _journal_of(data).unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        return True
    return False


def remove_old_partials(models: Path, now: datetime, keep: Collection[str]) -> int:
    """Remove the partial files that are unchanged for `RETENTION`, except `keep`; return their number.

    A journal without its file is from a process that was killed after it had published the file.
    """
    for journal in (models / FOLDER).glob(f"*{JOURNAL}"):
        if not (data := journal.with_suffix("")).exists():
            remove_partial(data)
    cutoff = (now - RETENTION).timestamp()
    old = [
        data for data, path, status in partial_files(models) if status.st_mtime < cutoff and path not in keep
    ]
    return sum(map(remove_partial, old))
