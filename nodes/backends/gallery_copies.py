"""The last good copies of galleries' indexes, as rows: all processes list them while a gallery is away.

Only indexes of other machines have one: a file that cannot be read is a wrong setting, not an outage.
"""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from localai_cluster import gallery_index
from localai_cluster.messaging.messages import Gallery
from nodes.models import GalleryCopy

RENEW_AFTER = timedelta(seconds=60)
"""Age of an unchanged copy at which its time is written again."""


@dataclass(frozen=True)
class CopiedIndex:
    """The entries of a copy, and when it was read."""

    entries: Sequence[gallery_index.GalleryEntry]
    read_at: datetime


def keep(gallery: Gallery, text: bytes, *, now: datetime) -> None:
    """Store an index that could be read; at most one query and one write."""
    if not _has_copy(gallery):
        return
    packed = zlib.compress(text)
    row = GalleryCopy.objects.filter(pk=_key(gallery)).first()
    if row is not None and bytes(row.text) == packed and now < row.read_at + RENEW_AFTER:
        return
    # Several processes may read the gallery at the same time; any of their copies is good.
    GalleryCopy.objects.bulk_create(
        [GalleryCopy(key=_key(gallery), text=packed, read_at=now)],
        update_conflicts=True,
        unique_fields=["key"],
        update_fields=["text", "read_at"],
    )


def last_good(gallery: Gallery) -> CopiedIndex | None:
    """Return the last good copy of a gallery, None without one."""
    row = GalleryCopy.objects.filter(pk=_key(gallery)).first() if _has_copy(gallery) else None
    if row is None:
        return None
    try:
        return CopiedIndex(gallery_index.parse(zlib.decompress(row.text), gallery), row.read_at)
    except (zlib.error, gallery_index.GalleryUnreadable):
        return None  # written by a version with other limits


def _has_copy(gallery: Gallery) -> bool:
    is_own = gallery.url.startswith(gallery_index.CLUSTER)
    return not is_own and gallery_index.local_path(gallery.url) is None


def _key(gallery: Gallery) -> str:
    return hashlib.sha256(gallery.url.encode()).hexdigest()
