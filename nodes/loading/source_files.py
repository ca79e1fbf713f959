"""Reads files of the models folder and stores their hashes, in dedicated threads: the folder may hang.

A read from a mount whose server is down returns late or never. It must block neither the event loop, nor a
thread that the database needs, nor the end of the process. The SHA-256 of a file is computed once, then
looked up by its stamp, which has the size, both times and the inode: a replaced file has another stamp. The
hash of a file that was written a moment ago is not stored: the file could change again within the same tick
of its clock.
"""

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, BinaryIO, TypeVar

from localai_cluster.kit import clock, untrusted
from nodes.loading.staging_plan import LocalFile
from nodes.models import FileHash
from operations.executor.work import in_thread

T = TypeVar("T")


class FileChanged(Exception):
    """The file has been replaced or changed since it was examined."""


def stamp_of(status: os.stat_result) -> str:
    """Return a text that distinguishes this file from other files and versions under its name."""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


async def in_staging_thread(function: Callable[[], T]) -> T:
    """Run the function in a thread; return its result. A cancelled caller does not wait for its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: Any, error: Exception | None) -> None:
        if not done.cancelled():
            done.set_result(result) if error is None else done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=run, name="staging", daemon=True).start()
    return await done


class OpenedFile:
    """The file, if it still has the stamp; the first read opens it. `close` does not block."""

    def __init__(self, file: LocalFile, stamp: str, offset: int = 0) -> None:
        self._local_file, self._stamp, self._offset = file, stamp, offset
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None

    async def read(self, most: int) -> bytes:
        """Return the next bytes; none at the end of the file. Raise Changed and OSError."""
        return await in_staging_thread(lambda: self._read(most))

    async def add_to_digest(self, digest: Any, most: int) -> int:
        """Add the next bytes to the digest, in the thread; return their number. Raise Changed and OSError."""

        def add() -> int:
            piece = self._read(most)
            digest.update(piece)
            return len(piece)

        return await in_staging_thread(add)

    def close(self) -> None:
        """Close the file after a read that is under way."""
        threading.Thread(target=self._close, name="staging", daemon=True).start()

    def _read(self, most: int) -> bytes:
        with self._lock:
            if self._file is None:
                self._file = untrusted.open_file(self._local_file.path, follow_links=False)
                self._file.seek(self._offset)
            piece = self._file.read(most)
            if stamp_of(os.fstat(self._file.fileno())) != self._stamp:
                raise FileChanged(f"{self._local_file.relative} was changed meanwhile")
            return piece

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()


CHUNK = 2**20
KEPT = timedelta(days=90)
"""Age after which a hash is computed again; it also removes the rows of deleted files."""
_SETTLED_AFTER = 2.0
_LONGEST_PATH = 1024
"""Bytes; the hash of a file with a longer path is not stored."""


async def hash_of(file: LocalFile, moved: Callable[[int], None]) -> tuple[str, str]:
    """Return the file's hash and its stamp; call `moved` with each number of bytes read.

    Raises Changed for a file that changes meanwhile or does not have the planned size, and OSError.
    """
    status = await in_staging_thread(file.path.stat)
    stamp = stamp_of(status)
    if status.st_size != file.size:
        raise FileChanged(f"{file.relative} was changed meanwhile")
    stored = await in_thread(_stored_hash, file.relative, stamp, clock.now() - KEPT)
    if stored is not None:
        return stored, stamp
    began, source, digest = clock.now(), OpenedFile(file, stamp), hashlib.sha256()
    try:
        while count := await source.add_to_digest(digest, CHUNK):
            moved(count)
    finally:
        source.close()
    settled = began.timestamp() - status.st_ctime_ns / 1e9 > _SETTLED_AFTER
    if settled and len(file.relative.encode()) <= _LONGEST_PATH:
        await in_thread(_store_hash, file.relative, stamp, digest.hexdigest(), clock.now())
    return digest.hexdigest(), stamp


def _stored_hash(path: str, stamp: str, since: datetime) -> str | None:
    matching_rows = FileHash.objects.filter(path=path, stamp=stamp, hashed_at__gte=since)
    return matching_rows.values_list("sha256", flat=True).first()


def _store_hash(path: str, stamp: str, sha256: str, now: datetime) -> None:
    FileHash.objects.filter(hashed_at__lt=now - KEPT).delete()
    FileHash.objects.update_or_create(
        path=path, defaults={"stamp": stamp, "sha256": sha256, "hashed_at": now}
    )
