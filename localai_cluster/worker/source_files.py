"""Sources of a backend's files: copies a folder, or unpacks an archive and trusts nothing in it.

A copy counts real bytes, has a bandwidth limit, and can be stopped at any moment. Links are copied as links
and never followed.

An archive (`.tar`, `.tar.gz`, `.tgz`) is read twice, front to back and in bounded pieces: the survey
validates every entry and counts the bytes before anything is written; then the files are written. Links are
created last, so no file is written through one, and each of them must end inside the folder. All functions
block and run in a thread.
"""

import gzip
import os
import shutil
import stat
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError

CHUNK = 1024 * 1024
RATE_STEPS = 20  # pieces per second under a limit, so that progress moves evenly
HEADROOM = 64 * 1024 * 1024
ENDED = "the worker is shutting down; the install was cancelled"

OnBytes = Callable[[int, int, str], None]
"""Called with the bytes copied, the total bytes, and the current file."""


class Stopped(ClusterError):
    """The install was told to end, because the worker shuts down or it was cancelled (`cancellation.py`)."""

    code = "stopped"
    permanent = False


class SourceError(ClusterError):
    """The source folder cannot be copied."""


class Throttle:
    """Limits all copies of the worker together to `rate` bytes per second (0 = unlimited)."""

    def __init__(self, rate: int, now: Callable[[], float] = clock.monotonic) -> None:
        self._rate = rate
        self._now = now
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def piece(self) -> int:
        """Number of bytes to copy at a time."""
        return max(1024, min(CHUNK, self._rate // RATE_STEPS)) if self._rate else CHUNK

    def pause(self, size: int) -> float:
        """Reserve `size` bytes; return the seconds to wait for them."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._now()
            self._free_at = max(self._free_at, now) + size / self._rate
            return self._free_at - now


@dataclass(frozen=True)
class _Plan:
    folders: list[tuple[Path, int]]
    files: list[tuple[Path, int]]
    links: list[tuple[Path, str]]
    total: int


def copy_tree(
    source: Path, target: Path, throttle: Throttle, stopped: threading.Event, on_bytes: OnBytes
) -> None:
    """Copy the folder `source` to the new folder `target`. Raise SourceError, Stopped or OSError."""
    plan = _survey(source, stopped)
    free = shutil.disk_usage(target.parent).free
    if plan.total + HEADROOM > free:
        raise SourceError(
            f"{plan.total} bytes do not fit on the disk of {target.parent} ({free} free). Free up space."
        )
    for relative, mode in plan.folders:
        (target / relative).mkdir(mode=mode | 0o700)
    for relative, destination in plan.links:
        os.symlink(destination, target / relative)
    copy = _Copy(throttle, stopped, on_bytes, plan.total)
    copy.show("")
    for relative, mode in plan.files:
        copy.file(source / relative, target / relative, mode, str(relative))


class _Copy:
    """One running copy and its byte count."""

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
            while piece := reader.read(self._throttle.piece):
                if self._stopped.wait(self._throttle.pause(len(piece))):
                    raise Stopped(ENDED)
                writer.write(piece)
                self._done += len(piece)
                self.show(name)
            os.fchmod(writer.fileno(), mode)


def _survey(source: Path, stopped: threading.Event) -> _Plan:
    plan, total = _Plan([], [], [], 0), 0
    pending = [Path()]
    while pending:
        if stopped.is_set():
            raise Stopped(ENDED)
        folder = pending.pop()
        plan.folders.append((folder, stat.S_IMODE(os.lstat(source / folder).st_mode) & 0o777))
        with os.scandir(source / folder) as entries:
            for item in entries:
                relative, info = folder / item.name, item.stat(follow_symlinks=False)
                if stat.S_ISLNK(info.st_mode):
                    plan.links.append((relative, _destination(source, source / relative)))
                elif stat.S_ISDIR(info.st_mode):
                    pending.append(relative)
                elif stat.S_ISREG(info.st_mode):
                    plan.files.append((relative, stat.S_IMODE(info.st_mode) & 0o777))
                    total += info.st_size
                else:
                    raise SourceError(f"{relative} in the source is not a file, folder or link")
    return replace(plan, files=sorted(plan.files), total=total)


def _destination(source: Path, link: Path) -> str:
    """Return the target of the copied link: absolute links into the source become relative, others stay."""
    destination = os.readlink(link)
    if os.path.isabs(destination) and Path(destination).is_relative_to(source):
        return os.path.relpath(destination, link.parent)
    return destination


MOST_BYTES = 64 * 1024**3
MOST_ENTRIES = 100_000
LONGEST_HEADER = CHUNK
"""Maximum bytes of an extended header, since `tarfile` reads it into memory at once."""
_DATA_FILTER = getattr(tarfile, "data_filter", None)
"""`tarfile.data_filter`, present since Python 3.11.4; our own rules suffice without it."""


def unpack(
    archive: Path, packed: bool, target: Path, throttle: Throttle, stopped: threading.Event, on_bytes: OnBytes
) -> None:
    """Unpack `archive` (`packed`: with gzip) to the new folder `target`.

    Raise SourceError, Stopped or OSError.
    """
    total = _survey_archive(archive, packed, stopped)
    free = shutil.disk_usage(target.parent).free
    if total + HEADROOM > free:
        raise SourceError(
            f"{total} unpacked bytes do not fit on the disk of {target.parent} ({free} free). Free up space."
        )
    target.mkdir()
    work = _Unpacking(target, throttle, stopped, on_bytes, total)
    with _open(archive, packed, stopped) as tar:
        while (entry := tar.next()) is not None:
            work.take(tar, entry)
    work.link()


class _ForwardReader:
    """A file that `tarfile` reads front to back, never more than a bounded piece at a time."""

    def __init__(self, file: IO[bytes], stopped: threading.Event) -> None:
        self._file = file
        self._stopped = stopped
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LONGEST_HEADER:
            raise SourceError("a header in the archive is too long")
        if self._stopped.is_set():
            raise Stopped(ENDED)
        data = self._file.read(size)
        self._position += len(data)
        return data

    def seek(self, position: int) -> int:
        if position < self._position:
            raise SourceError("an entry of the archive begins before the end of the previous one")
        while self._position < position and self.read(min(CHUNK, position - self._position)):
            pass
        return self._position

    def drain(self) -> None:
        """Read the remaining bytes, so that gzip verifies its checksum."""
        while self.read(CHUNK):
            if self._position > 2 * MOST_BYTES:
                raise SourceError("the archive does not end")


@contextmanager
def _open(archive: Path, packed: bool, stopped: threading.Event) -> Iterator[tarfile.TarFile]:
    """Open the archive as a tar file; errors in it become SourceError."""
    try:
        # Neither follows a link nor waits for a pipe.
        descriptor = os.open(archive, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as raw:
            plain = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            forward = _ForwardReader(plain, stopped)
            with tarfile.TarFile(fileobj=cast(Any, forward), mode="r", errorlevel=2) as tar:
                yield tar
                forward.drain()
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise SourceError(f"the archive is damaged: {error}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise SourceError(f"the archive cannot be read: {error}") from error


def _survey_archive(archive: Path, packed: bool, stopped: threading.Event) -> int:
    """Validate every entry and return the total bytes of all files."""
    total = number = 0
    with _open(archive, packed, stopped) as tar:
        while (entry := tar.next()) is not None:
            _validate(entry)
            number += 1
            total += entry.size if entry.isreg() else 0
            if total > MOST_BYTES:
                raise SourceError(f"the archive unpacks to more than {MOST_BYTES} bytes")
            if number > MOST_ENTRIES:
                raise SourceError(f"the archive has more than {MOST_ENTRIES} entries")
    return total


def _validate(entry: tarfile.TarInfo) -> None:
    """Raise SourceError for a forbidden entry, by our own rules and those of `tarfile`'s data filter."""
    name = entry.name
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()) or entry.issparse():
        raise SourceError(f"{name!r} in the archive is not a plain file, folder or link")
    if _escapes(name) or "\0" in name or entry.size < 0:
        raise SourceError(f"{name!r} in the archive is not a path inside it")
    if entry.islnk() and _escapes(entry.linkname):
        raise SourceError(f"{name!r} in the archive is a link that leaves it")
    if entry.issym() and entry.linkname.startswith("/"):
        raise SourceError(f"{name!r} in the archive is a link that leaves it")
    if _DATA_FILTER is not None:
        try:
            _DATA_FILTER(entry, "/nowhere/in/particular")
        except tarfile.FilterError as error:
            raise SourceError(f"{name!r} in the archive: {error}") from error


def _escapes(name: str) -> bool:
    return not name or name.startswith("/") or ".." in PurePosixPath(name).parts


@dataclass
class _Links:
    """The links and folder modes to apply after all files are written."""

    symbolic: list[tuple[Path, str]]
    hard: list[tuple[Path, Path]]
    modes: list[tuple[Path, int]]


class _Unpacking:
    """The unpacking of one archive: its byte count so far, and the links still to be created."""

    def __init__(
        self, target: Path, throttle: Throttle, stopped: threading.Event, on_bytes: OnBytes, total: int
    ) -> None:
        self._target = target
        self._throttle = throttle
        self._stopped = stopped
        self._on_bytes = on_bytes
        self._total = total
        self._done = 0
        self._links = _Links([], [], [])

    def take(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        """Write a file or folder; defer a link."""
        path = self._target / entry.name
        if path == self._target:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.isdir():
            path.mkdir(exist_ok=True)
            self._links.modes.append((path, entry.mode & 0o755 | 0o700))
        elif entry.issym():
            self._links.symbolic.append((path, entry.linkname))
        elif entry.islnk():
            self._links.hard.append((path, self._target / entry.linkname))
        else:
            self._write(tar, entry, path)

    def _write(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
        reader = tar.extractfile(entry)
        assert reader is not None  # it is a plain file
        remaining = entry.size
        with reader, open(path, "xb") as writer:
            while remaining and (piece := reader.read(min(self._throttle.piece, remaining))):
                if self._stopped.wait(self._throttle.pause(len(piece))):
                    raise Stopped(ENDED)
                writer.write(piece)
                remaining -= len(piece)
                self._done += len(piece)
                self._on_bytes(self._done, self._total, entry.name)
            if remaining:
                raise SourceError("the archive is damaged: it ends inside of a file")
            # Never setuid, never writable by others.
            os.fchmod(writer.fileno(), entry.mode & 0o755 | 0o600)

    def link(self) -> None:
        """Create the links, then verify that each of them ends inside the folder."""
        for path, source in self._links.hard:
            if not source.is_file():
                raise SourceError(f"{path.name!r} in the archive is a link to a file that is not in it")
            os.link(source, path)
        for path, mode in reversed(self._links.modes):
            path.chmod(mode)
        for path, destination in self._links.symbolic:
            os.symlink(destination, path)
        root = os.path.realpath(self._target)
        for path, _ in self._links.symbolic:
            if not Path(os.path.realpath(path)).is_relative_to(root):
                raise SourceError(f"{path.name!r} in the archive is a link that leaves it")
