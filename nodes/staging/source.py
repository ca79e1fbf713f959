"""A file of the models folder, read piece by piece in threads of their own, for a folder that may hang.

A read from a mount whose server is gone comes back late or never. It must hold neither the event loop nor a
thread that the database needs, nor the end of the process.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from localai_cluster import regular_files
from nodes.staging.plan import LocalFile

T = TypeVar("T")


class Changed(Exception):
    """The file is not the one that was looked at any more."""


def stamp_of(status: os.stat_result) -> str:
    """What tells this file from another one under its name, also from an older one."""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


async def aside(function: Callable[[], T]) -> T:
    """What the function answers or raises, on a thread; a caller that leaves does not wait for its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: Any, error: Exception | None) -> None:
        if not done.cancelled():
            done.set_result(result) if error is None else done.set_exception(error)

    def carry_out() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=carry_out, name="staging", daemon=True).start()
    return await done


class OpenedFile:
    """The file, if it still has the stamp; opened with the first read. `close` it, it does not wait."""

    def __init__(self, file: LocalFile, stamp: str, offset: int = 0) -> None:
        self._told, self._stamp, self._offset = file, stamp, offset
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None

    async def take(self, most: int) -> bytes:
        """The next bytes; none at its end. Raises Changed and OSError."""
        return await aside(lambda: self._take(most))

    async def add_to(self, digest: Any, most: int) -> int:
        """Adds the next bytes to the digest, on the thread; answers how many. Raises Changed and OSError."""

        def add() -> int:
            piece = self._take(most)
            digest.update(piece)
            return len(piece)

        return await aside(add)

    def close(self) -> None:
        """A read that is under way ends first, if ever."""
        threading.Thread(target=self._close, name="staging", daemon=True).start()

    def _take(self, most: int) -> bytes:
        with self._lock:
            if self._file is None:
                self._file = regular_files.open_file(self._told.path, follow_links=False)
                self._file.seek(self._offset)
            piece = self._file.read(most)
            if stamp_of(os.fstat(self._file.fileno())) != self._stamp:
                raise Changed(f"{self._told.relative} was changed meanwhile")
            return piece

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
