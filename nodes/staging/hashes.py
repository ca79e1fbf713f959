"""The SHA-256 of a file in the models folder: read once, then known by the file's stamp.

A stamp has the size, both times and the inode, so a file that was replaced has another one. One that was
written a moment ago is not remembered: it could change again within the same tick of its clock. Rows are
`FileHash`; this is their only writer.
"""

import hashlib
from collections.abc import Callable
from datetime import datetime, timedelta

from localai_cluster import clock
from nodes.models import FileHash
from nodes.staging.plan import LocalFile
from nodes.staging.source import Changed, OpenedFile, aside, stamp_of
from operations.executor.work import in_thread

CHUNK = 2**20
KEPT = timedelta(days=90)
"""After that a file is read again, and the rows of files that have gone are cleared away."""
_SETTLED_AFTER = 2.0
_LONGEST_PATH = 1024
"""Bytes; a longer one is not remembered."""


async def hash_of(file: LocalFile, moved: Callable[[int], None]) -> tuple[str, str]:
    """The file's hash and its stamp; `moved` hears of the bytes that are read.

    Raises Changed for a file that changes meanwhile or is not of the size that was planned, and OSError.
    """
    status = await aside(file.path.stat)
    stamp = stamp_of(status)
    if status.st_size != file.size:
        raise Changed(f"{file.relative} was changed meanwhile")
    known = await in_thread(_known, file.relative, stamp, clock.now() - KEPT)
    if known is not None:
        return known, stamp
    began, source, digest = clock.now(), OpenedFile(file, stamp), hashlib.sha256()
    try:
        while count := await source.add_to(digest, CHUNK):
            moved(count)
    finally:
        source.close()
    settled = began.timestamp() - status.st_ctime_ns / 1e9 > _SETTLED_AFTER
    if settled and len(file.relative.encode()) <= _LONGEST_PATH:
        await in_thread(_remember, file.relative, stamp, digest.hexdigest(), clock.now())
    return digest.hexdigest(), stamp


def _known(path: str, stamp: str, since: datetime) -> str | None:
    found = FileHash.objects.filter(path=path, stamp=stamp, hashed_at__gte=since)
    return found.values_list("sha256", flat=True).first()


def _remember(path: str, stamp: str, sha256: str, now: datetime) -> None:
    FileHash.objects.filter(hashed_at__lt=now - KEPT).delete()
    FileHash.objects.update_or_create(
        path=path, defaults={"stamp": stamp, "sha256": sha256, "hashed_at": now}
    )
