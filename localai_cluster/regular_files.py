"""Reading files that an operator or another machine put in a folder: regular ones only, up to a size.

A FIFO makes its reader wait for a writer, a device may never end. Neither is opened.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open the file for reading. Raises OSError, also for what is no regular file."""
    _check(os.stat(path, follow_symlinks=follow_links))
    # Something else may have taken its place; it is opened without waiting for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    file = os.fdopen(os.open(path, flags if follow_links else flags | os.O_NOFOLLOW), "rb")
    try:
        _check(os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read(path: Path, limit: int) -> bytes:
    """At most `limit` + 1 bytes of the file, so that the caller sees that there are more.

    Raises OSError, also for what is no regular file.
    """
    with open_file(path) as file:
        return file.read(limit + 1)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
