"""What was staged for one request goes after a day: the reference never cleans, and a disk fills slowly.

Only what this server makes itself goes, `ephemeral/…` and the temporary files for outputs: a folder called
`staging` beside the models may hold what belongs to others. What was written within the day stays, and what
is uploaded now. A folder whose last file goes stays for another day. It blocks and runs in a thread.
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
    """Removes files and empty folders that nothing has changed for `KEPT`; returns how many files."""
    before, gone, staging = (now - KEPT).timestamp(), 0, staging.resolve()
    for path in _candidates(staging):
        with contextlib.suppress(OSError):  # in use, not ours, or gone: the next time
            status = path.lstat()
            if max(status.st_mtime, status.st_ctime) >= before or uploading(path):
                continue
            if stat.S_ISDIR(status.st_mode):
                path.rmdir()
            else:
                path.unlink()
                gone += 1
    return gone


def _candidates(staging: Path) -> Iterator[Path]:
    """Files before the folders that they lie in; no link is followed."""
    ephemeral = staging / EPHEMERAL
    if not ephemeral.is_symlink():
        for folder, names, files in os.walk(ephemeral, topdown=False):
            yield from (Path(folder, name) for name in (*files, *names))
    with contextlib.suppress(OSError):
        for path in staging.iterdir():
            if path.name.startswith(TEMPORARY) and not path.is_dir():
                yield path
