"""Locks of files that are being written, or read completely."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class _PathLock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    uploads: int = 0
    """Number of uploads that write the file or wait for its lock."""


class PathLocks:
    """Locks by path without links, so that two keys of one file share a lock."""

    def __init__(self) -> None:
        self._entries: dict[Path, _PathLock] = {}

    @contextlib.asynccontextmanager
    async def upload(self, path: Path) -> AsyncIterator[bool]:
        """Lock the file for writing; yield True if another upload was writing or waiting before."""
        entry = self._entries.setdefault(path, _PathLock())
        was_queued = entry.uploads > 0
        entry.uploads += 1
        try:
            async with self._hold_lock(path, entry):
                yield was_queued
        finally:
            entry.uploads -= 1

    def reading(self, path: Path) -> contextlib.AbstractAsyncContextManager[None]:
        """Lock the file for reading it completely."""
        return self._hold_lock(path, self._entries.setdefault(path, _PathLock()))

    def uploading(self, path: Path) -> bool:
        """Return True if an upload writes the file or waits to write it. Thread-safe."""
        entry = self._entries.get(path)
        return entry is not None and entry.uploads > 0

    @contextlib.asynccontextmanager
    async def _hold_lock(self, path: Path, entry: _PathLock) -> AsyncIterator[None]:
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._entries[path]
