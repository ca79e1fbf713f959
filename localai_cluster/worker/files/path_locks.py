"""One upload of a file at a time: a second one waits, and learns that it has waited."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    uploads: int = 0
    """Those that write or wait to."""


class PathLocks:
    """By the path without links, so that two keys of one file share a lock."""

    def __init__(self) -> None:
        self._entries: dict[Path, _Entry] = {}

    @contextlib.asynccontextmanager
    async def upload(self, path: Path) -> AsyncIterator[bool]:
        """Holds the file to write it; gives whether another upload went before."""
        entry = self._entries.setdefault(path, _Entry())
        behind = entry.uploads > 0
        entry.uploads += 1
        try:
            async with self._held(path, entry):
                yield behind
        finally:
            entry.uploads -= 1

    def reading(self, path: Path) -> contextlib.AbstractAsyncContextManager[None]:
        """Holds the file to read it whole."""
        return self._held(path, self._entries.setdefault(path, _Entry()))

    def uploading(self, path: Path) -> bool:
        """Whether the file is written, or is about to be; from any thread."""
        entry = self._entries.get(path)
        return entry is not None and entry.uploads > 0

    @contextlib.asynccontextmanager
    async def _held(self, path: Path, entry: _Entry) -> AsyncIterator[None]:
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._entries[path]
