"""Galleries of a worker: read from their addresses, else from a last good copy (worker.md §18.3)."""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from localai_cluster import gallery_index
from localai_cluster.gallery_index import BuildChoice, GalleryEntry, GalleryUnreadable
from localai_cluster.kit import clock, files
from localai_cluster.kit.errors import NotFound
from localai_cluster.messaging.messages import Gallery
from localai_cluster.worker.backend_store import PARTIAL_PREFIX, remove_old_partials
from localai_cluster.worker.download import OpenServed

log = logging.getLogger(__name__)

SKIP_ADDRESS_SECONDS = 600.0
"""Seconds for which an address is not tried after it has failed slowly."""
SLOW_FAILURE_SECONDS = 5.0
"""Seconds after which a failure counts as slow. An address that fails at once may be tried again."""


@dataclass(eq=False, repr=False)
class Galleries:
    """The galleries of one worker; `copies` is the folder for last good copies of their indexes."""

    client: httpx.AsyncClient
    served: OpenServed
    roots: Sequence[Path]
    github_url: str
    copies: Path | None
    _skipped_until: dict[str, float] = field(default_factory=dict, init=False)

    async def choose(self, name: str, galleries: Sequence[Gallery], capability: str) -> BuildChoice:
        """Return the build for `name` on this machine.

        Raise NotFound, whose message also has the reasons for unreadable galleries.
        """
        now = clock.monotonic()
        self._skipped_until = {url: until for url, until in self._skipped_until.items() if until > now}
        if skip := set(self._skipped_until):
            try:
                return await self._choose_build(name, galleries, capability, skip)
            except NotFound as error:
                log.info("%s; reading all addresses again", error.message)
        return await self._choose_build(name, galleries, capability, ())

    async def _choose_build(
        self, name: str, galleries: Sequence[Gallery], capability: str, skip: Collection[str]
    ) -> BuildChoice:
        entries: list[GalleryEntry] = []
        problems = []
        for gallery in galleries:
            try:
                index = await self._fetch_index(gallery, skip)
                entries += index.entries
                await asyncio.to_thread(self._store_copy, gallery, index.text)
            except GalleryUnreadable as error:
                problems.append(error.message)
                log.warning("%s; its last good index is used, if there is one", error)
                entries += await asyncio.to_thread(self._read_copy, gallery)
        try:
            return gallery_index.choose(name, entries, capability)
        except NotFound as error:
            reasons = problems or ([] if galleries else ["no gallery is configured"])
            raise NotFound("; ".join([error.message, *reasons])) from error

    async def _fetch_index(self, gallery: Gallery, skip: Collection[str]) -> gallery_index.Index:
        def note(url: str, seconds: float) -> None:
            if seconds >= SLOW_FAILURE_SECONDS:
                self._skipped_until[url] = clock.monotonic() + SKIP_ADDRESS_SECONDS

        return await gallery_index.fetch(
            gallery,
            self.client,
            served=self._read_served,
            resolve=lambda path: gallery_index.check_inside(path, self.roots),
            github_url=self.github_url,
            skip=skip,
            on_failure=note,
        )

    async def _read_served(self, name: str) -> bytes:
        answer = await self.served(name, gallery_index.UNENCODED_HEADERS)
        try:
            return await gallery_index.read_bounded_body(answer)
        finally:
            await answer.aclose()

    def _copy_path(self, gallery: Gallery) -> Path | None:
        """Return the path of the last good copy; None for a local index, which needs no copy."""
        if self.copies is None or gallery_index.local_path(gallery.url) is not None:
            return None
        return self.copies / f"{hashlib.sha256(gallery.url.encode()).hexdigest()}.yaml"

    def _store_copy(self, gallery: Gallery, text: bytes) -> None:
        """Replace the copy in one step, because other installs may write or read it."""
        if (copy := self._copy_path(gallery)) is None:
            return
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            remove_old_partials(copy.parent)
            files.replace_file(copy, text, prefix=PARTIAL_PREFIX)
        except OSError as error:
            log.warning("cannot keep a copy of gallery %s: %s", gallery.name, error)

    def _read_copy(self, gallery: Gallery) -> list[GalleryEntry]:
        """Return the entries of an index's last good copy; none if there is no copy."""
        copy = self._copy_path(gallery)
        try:
            text = copy.read_bytes() if copy else b""
            entries = gallery_index.parse(text, gallery) if text else []
        except (OSError, GalleryUnreadable):
            return []
        if copy and text:
            age = clock.now().timestamp() - copy.stat().st_mtime
            log.warning("using the copy of gallery %s from %.0f s ago", gallery.name or "without a name", age)
        return entries
