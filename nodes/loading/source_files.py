"""Read a file of the models folder piece by piece in dedicated threads, because the folder may hang.

A read from a mount whose server is down returns late or never. It must block neither the event loop, nor a
thread that the database needs, nor the end of the process.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from localai_cluster.kit import untrusted
from nodes.loading.staging_plan import LocalFile

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

    async def take(self, most: int) -> bytes:
        """Return the next bytes; none at the end of the file. Raise Changed and OSError."""
        return await in_staging_thread(lambda: self._take(most))

    async def add_to(self, digest: Any, most: int) -> int:
        """Add the next bytes to the digest, in the thread; return their number. Raise Changed and OSError."""

        def add() -> int:
            piece = self._take(most)
            digest.update(piece)
            return len(piece)

        return await in_staging_thread(add)

    def close(self) -> None:
        """Close the file after a read that is under way."""
        threading.Thread(target=self._close, name="staging", daemon=True).start()

    def _take(self, most: int) -> bytes:
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
