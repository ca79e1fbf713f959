"""Threads for what blocks: a disk that hangs, or a hash that takes minutes, holds up nothing else."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
WRITERS, HASHERS = 8, 2


class Threads:
    """Few for hashes, since each of them keeps a core and the disk busy; others for the rest."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Ends hashes at their next piece."""
        self._disk = ThreadPoolExecutor(WRITERS, "files")
        self._hashes = ThreadPoolExecutor(HASHERS, "hashes")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Does something short with the disk."""
        return await _finished(self._disk, function, *arguments)

    async def hash(self, function: Callable[..., T], *arguments: Any) -> T:
        """Reads a whole file."""
        return await _finished(self._hashes, function, *arguments)


async def _finished(pool: Executor, function: Callable[..., T], *arguments: Any) -> T:
    """Returns only when the thread has: it holds a file that its caller closes then."""
    work = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # seen, and not told: the caller leaves
        raise
