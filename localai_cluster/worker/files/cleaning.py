"""Removal of files staged for single requests after a day; without it (as in the reference) the disk fills.

Only the file server's own files are removed, `ephemeral/…` and temporary output files: a folder called
`staging` beside the models may hold files of other programs. Files changed within the day and files being
uploaded stay. A folder whose last file is removed stays for another day. All functions block and run in a
thread.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from localai_cluster.worker.files.keys import EPHEMERAL

KEPT = timedelta(days=1)
EVERY = 3600.0
TEMPORARY, TEMPORARY_END = "localai-output-", ".tmp"


def clean(staging: Path, now: datetime, uploading: Callable[[Path], bool]) -> int:
    """Remove files and empty folders unchanged for `KEPT`; return the number of files removed."""
    cutoff, removed, staging = (now - KEPT).timestamp(), 0, staging.resolve()
    for path in _candidates(staging):
        with contextlib.suppress(OSError):  # in use, not permitted, or already removed: the next pass retries
            status = path.lstat()
            if max(status.st_mtime, status.st_ctime) >= cutoff or uploading(path):
                continue
            if stat.S_ISDIR(status.st_mode):
                path.rmdir()
            else:
                path.unlink()
                removed += 1
    return removed


def _candidates(staging: Path) -> Iterator[Path]:
    """Yield files before the folders that contain them; links are not followed."""
    ephemeral = staging / EPHEMERAL
    if not ephemeral.is_symlink():
        for folder, names, files in os.walk(ephemeral, topdown=False):
            yield from (Path(folder, name) for name in (*files, *names))
    with contextlib.suppress(OSError):
        for path in staging.iterdir():
            if path.name.startswith(TEMPORARY) and not path.is_dir():
                yield path
