"""Free space of the data folder's disk; a full disk is a possible cause of other errors.

The bundled PostgreSQL has its files in the data folder. With a full disk the database seems to be
unreachable, so code that reports an outage checks the disk too. A reading is cached for a few seconds.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from localai_cluster.kit import clock, conf

MIN_FREE_BYTES = 32 * 1024 * 1024
"""Free bytes below which PostgreSQL can no longer add a file to its write-ahead log."""
MAX_READING_AGE_SECONDS = 5.0
"""Seconds for which a reading is cached."""
DISK_FULL_MESSAGE = "the disk of the server's data folder is full"
"""Message for any user; administrators also get the name of the disk."""


@dataclass(frozen=True)
class DiskUsage:
    """Free and total bytes of the disk of `folder`; `mount` is the disk's mount point."""

    folder: str
    mount: str
    free: int
    total: int

    @property
    def is_full(self) -> bool:
        """True if less than `MIN_FREE_BYTES` is free."""
        return self.free < MIN_FREE_BYTES

    def __str__(self) -> str:
        sizes = f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free"
        return f"{sizes} on {self.mount} (folder {self.folder})"


def read(folder: Path) -> DiskUsage:
    """Return the usage of the disk of `folder`, or of the nearest folder above it that exists."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    mount = existing.resolve()
    while not os.path.ismount(mount):
        mount = mount.parent
    return DiskUsage(str(folder), str(mount), usage.free, usage.total)


_last_reading: tuple[float, DiskUsage | None] | None = None


def current() -> DiskUsage | None:
    """Return the usage of the data folder's disk. Return None if the disk cannot be read."""
    global _last_reading
    now = clock.monotonic()
    if _last_reading is None or now - _last_reading[0] > MAX_READING_AGE_SECONDS:
        try:
            _last_reading = (now, read(conf.cluster().data_dir))
        except OSError:
            _last_reading = (now, None)
    return _last_reading[1]


def with_disk_full_hint(problem: str) -> str:
    """Return the text of a problem. If the disk is full, the text names this as the likely cause."""
    usage = current()
    return f"{problem}: {DISK_FULL_MESSAGE}" if usage is not None and usage.is_full else problem
