"""The SHA-256 of a file in the models folder: computed once, then looked up by the file's stamp.

A stamp has the size, both times and the inode, so a replaced file has another stamp. The hash of a file that
was written a moment ago is not stored: the file could change again within the same tick of its clock. Rows
are `FileHash`; this module is their only writer.
"""

import hashlib
from collections.abc import Callable
from datetime import datetime, timedelta

from localai_cluster.kit import clock
from nodes.loading.source_files import FileChanged, OpenedFile, in_staging_thread, stamp_of
from nodes.loading.staging_plan import LocalFile
from nodes.models import FileHash
from operations.executor.work import in_thread

CHUNK = 2**20
KEPT = timedelta(days=90)
"""Age after which a hash is computed again; it also removes the rows of deleted files."""
_SETTLED_AFTER = 2.0
_LONGEST_PATH = 1024
"""Bytes; the hash of a file with a longer path is not stored."""


async def hash_of(file: LocalFile, moved: Callable[[int], None]) -> tuple[str, str]:
    """Return the file's hash and its stamp; call `moved` with each number of bytes read.

    Raises Changed for a file that changes meanwhile or does not have the planned size, and OSError.
    """
    status = await in_staging_thread(file.path.stat)
    stamp = stamp_of(status)
    if status.st_size != file.size:
        raise FileChanged(f"{file.relative} was changed meanwhile")
    stored = await in_thread(_stored_hash, file.relative, stamp, clock.now() - KEPT)
    if stored is not None:
        return stored, stamp
    began, source, digest = clock.now(), OpenedFile(file, stamp), hashlib.sha256()
    try:
        while count := await source.add_to(digest, CHUNK):
            moved(count)
    finally:
        source.close()
    settled = began.timestamp() - status.st_ctime_ns / 1e9 > _SETTLED_AFTER
    if settled and len(file.relative.encode()) <= _LONGEST_PATH:
        await in_thread(_store_hash, file.relative, stamp, digest.hexdigest(), clock.now())
    return digest.hexdigest(), stamp


def _stored_hash(path: str, stamp: str, since: datetime) -> str | None:
    matching_rows = FileHash.objects.filter(path=path, stamp=stamp, hashed_at__gte=since)
    return matching_rows.values_list("sha256", flat=True).first()


def _store_hash(path: str, stamp: str, sha256: str, now: datetime) -> None:
    FileHash.objects.filter(hashed_at__lt=now - KEPT).delete()
    FileHash.objects.update_or_create(
        path=path, defaults={"stamp": stamp, "sha256": sha256, "hashed_at": now}
    )
