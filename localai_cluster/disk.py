"""The disk of the server's data folder: how much is free, and whether that is the reason why nothing works.

With the bundled PostgreSQL the database lies there. A full disk looks like a database that is away, so
whoever reports one looks here too. What is read counts for `MAX_AGE` seconds.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from localai_cluster import clock, conf

FULL_BELOW = 32 * 1024 * 1024
"""Free bytes below which PostgreSQL can no longer add a file of its log."""
MAX_AGE = 5.0
IS_FULL = "the disk of the server's data folder is full"
"""For anybody; administrators are told which."""


@dataclass(frozen=True)
class DiskUsage:
    """What is free on the disk of `folder`, in bytes; `mount` is where that disk is mounted."""

    folder: str
    mount: str
    free: int
    total: int

    @property
    def is_full(self) -> bool:
        """Return True if nothing worth mentioning can be written."""
        return self.free < FULL_BELOW

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


_last: tuple[float, DiskUsage | None] | None = None


def current() -> DiskUsage | None:
    """Return the usage of the data folder's disk; None if it cannot be read."""
    global _last
    now = clock.monotonic()
    if _last is None or now - _last[0] > MAX_AGE:
        try:
            _last = (now, read(conf.cluster().data_dir))
        except OSError:
            _last = (now, None)
    return _last[1]


def explained(problem: str) -> str:
    """Return the problem with the full disk as its likely reason, if the disk is full."""
    usage = current()
    return f"{problem}: {IS_FULL}" if usage is not None and usage.is_full else problem
