"""Safe opening of files that an operator or another machine wrote: regular files only, up to a size.

A FIFO blocks its reader until there is a writer, a device may never end. Neither is opened.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open the file for reading. Raises OSError, also if it is not a regular file."""
    _check(os.stat(path, follow_symlinks=follow_links))
    # Another file may have replaced it since; O_NONBLOCK opens a FIFO without waiting for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    file = os.fdopen(os.open(path, flags if follow_links else flags | os.O_NOFOLLOW), "rb")
    try:
        _check(os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read(path: Path, limit: int) -> bytes:
    """Read at most `limit` + 1 bytes of the file, so that the caller can detect a longer one.

    Raises OSError, also if it is not a regular file.
    """
    with open_file(path) as file:
        return file.read(limit + 1)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
