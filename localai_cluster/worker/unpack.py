"""Unpacks a backend's archive (`.tar`, `.tar.gz`, `.tgz`) into a new folder and trusts nothing in it.

The archive is read twice, front to back and in bounded pieces: the survey validates every entry and counts
the bytes before anything is written; then the files are written. Links are created last, so no file is
written through one, and each of them must end inside the folder. All functions block and run in a thread.
"""

import gzip
import os
import shutil
import tarfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from localai_cluster.worker.file_copy import CHUNK, ENDED, HEADROOM, OnBytes, SourceError, Stopped, Throttle

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
    total = _survey(archive, packed, stopped)
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


def _survey(archive: Path, packed: bool, stopped: threading.Event) -> int:
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
