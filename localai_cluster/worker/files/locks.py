"""Locks of files that are being written, or read completely."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class _PathLock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    uploads: int = 0
    """Number of uploads that write the file or wait for its lock."""


class PathLocks:
    """Locks by path without links, so that two keys of one file share a lock."""

    def __init__(self) -> None:
        self._entries: weakref.WeakValueDictionary[Path, _PathLock] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def upload(self, path: Path) -> AsyncIterator[bool]:
        """Lock the file for writing; yield True if another upload was writing or waiting before."""
        entry = self._entries.setdefault(path, _PathLock())
        was_queued = entry.uploads > 0
        entry.uploads += 1
        try:
            async with entry.lock:
                yield was_queued
        finally:
            entry.uploads -= 1

    @contextlib.asynccontextmanager
    async def reading(self, path: Path) -> AsyncIterator[None]:
        """Lock the file for reading it completely."""
        entry = self._entries.setdefault(path, _PathLock())
        async with entry.lock:
            yield

    def uploading(self, path: Path) -> bool:
        """Return True if an upload writes the file or waits to write it. Thread-safe."""
        entry = self._entries.get(path)
        return entry is not None and entry.uploads > 0
