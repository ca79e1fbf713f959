"""Threads for blocking calls, so that a hanging disk or a long hash delays no other request."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
WRITERS, HASHERS = 8, 2


class Threads:
    """Two thread pools: a small one for hashes, which use a core and the disk, and one for other calls."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        """Ends running hashes at their next piece."""
        self._disk = ThreadPoolExecutor(WRITERS, "files")
        self._hashes = ThreadPoolExecutor(HASHERS, "hashes")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a short disk operation."""
        return await _run_to_end(self._disk, function, *arguments)

    async def hash(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that reads a complete file."""
        return await _run_to_end(self._hashes, function, *arguments)


async def _run_to_end(pool: Executor, function: Callable[..., T], *arguments: Any) -> T:
    """Run `function` in `pool`.

    Even if cancelled, return only after the thread has ended: the caller then closes a file that it uses.
    """
    future = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # retrieve the error and drop it: the caller was cancelled
        raise
