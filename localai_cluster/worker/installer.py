"""Installs a backend's files: finds them, brings them to a staging folder, swaps that in by renaming.

A source is a folder or an archive of this machine (in an allowed folder), or an archive that is downloaded
first. At every moment the backend's folder holds the old version or the new one; between the two renames only
the backup exists, and the next start restores it. One install at a time works on a folder.
"""

import asyncio
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from localai_cluster import clock, gallery_index, points
from localai_cluster.errors import ClusterError, NotFound
from localai_cluster.gallery_index import SUFFIXES, stem
from localai_cluster.messaging.codec import encode
from localai_cluster.messaging.messages import Gallery
from localai_cluster.worker import build_selection
from localai_cluster.worker.backend_store import METADATA_FILE, START_FILE, BackendStore, Metadata, discard
from localai_cluster.worker.download import (
    Archive,
    Downloads,
    OpenServed,
    hash_problem,
    partial_path,
    sha256_of,
)
from localai_cluster.worker.file_copy import ENDED, OnBytes, Stopped, Throttle, copy_tree
from localai_cluster.worker.halting import Halt, in_thread, survive
from localai_cluster.worker.names import BACKUP, STAGED, folder_name
from localai_cluster.worker.progress import Report, Tick
from localai_cluster.worker.unpack import unpack

log = logging.getLogger(__name__)

PARALLEL_COPIES = 4
DIGEST = "sha256:"
"""Before the hash of the installed archive in `digest`, as OCI writes one."""


class InstallFailed(ClusterError):
    """The backend could not be installed."""

    code = "install_failed"


@dataclass(frozen=True)
class InstallSource:
    """What to install: `name` from galleries, or `uri` under the given `name` and `alias`."""

    name: str
    galleries: Sequence[Gallery]
    uri: str = ""
    alias: str = ""


@dataclass(frozen=True)
class _Place:
    """Where an entry's files come from: `uri` as it is written, and where that is."""

    uri: str
    location: str
    sha256: str = ""

    @property
    def file_name(self) -> str:
        """The last part of the path; "" for what is no URL."""
        with contextlib.suppress(ValueError):
            return urlsplit(self.location).path.rstrip("/").rpartition("/")[2]
        return ""


@dataclass(frozen=True)
class _Work:
    """What goes with one install: where it reports, and what ends it."""

    report: Report
    halt: Halt


Fill = Callable[[Path], None]
"""Makes a new folder with the backend's files; blocks."""


class Installer:
    """Installs backends; `served` opens files of the control plane's own gallery."""

    def __init__(
        self,
        store: BackendStore,
        roots: Sequence[Path],
        rate: int,
        capability: str,
        client: httpx.AsyncClient,
        served: OpenServed,
    ) -> None:
        self._store = store
        self._roots = roots
        self._capability = capability
        self._client = client
        self._throttle = Throttle(rate)
        self._halts: set[Halt] = set()
        self._closed = False
        self._downloads = Downloads(client, served, self._throttle)
        self._threads = ThreadPoolExecutor(PARALLEL_COPIES, thread_name_prefix="install")
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def install(self, source: InstallSource, report: Report, halt: Halt | None = None) -> str:
        """Installs, replacing what is there; returns the folder's name.

        InstallFailed and other ClusterErrors. `halt` and a cancellation of the task end it, and what it has
        written so far is gone; once the files are in place, it succeeds.
        """
        work = _Work(report, halt or Halt())
        self._halts.add(work.halt)
        try:
            if self._closed:
                work.halt.set()
            return await self._install(source, work)
        finally:
            self._halts.discard(work.halt)

    async def _install(self, source: InstallSource, work: _Work) -> str:
        work.report(Tick("resolving"))
        uri = source.uri
        if uri and (uri.startswith("/") or ":" in uri):
            place = _Place(uri, uri)
            name = source.name or stem(place.file_name) or place.file_name
            return await self._install_place(
                place, Metadata(name=name, alias=source.alias, uri=gallery_index.public_url(uri)), work
            )
        choice = await self._select(uri or source.name, source.galleries)
        folder = await self._install_build(choice.build, work)
        if choice.meta is not None:
            await self._in_thread(work.halt, self._write_meta, choice.meta, folder)
            return folder_name(choice.meta.name)
        return folder

    def close(self) -> None:
        """Stops all running copies; they end with Stopped."""
        self._closed = True
        for halt in self._halts:
            halt.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _select(self, name: str, listed: Sequence[Gallery]) -> build_selection.Choice:
        builds: list[gallery_index.GalleryEntry] = []
        problems = []
        for gallery in listed:
            try:
                builds += await build_selection.fetch(
                    gallery, self._roots, self._client, self._downloads.index
                )
            except gallery_index.GalleryUnreadable as error:
                problems.append(error.message)
                log.warning("%s", error)
        try:
            return build_selection.choose(name, builds, self._capability)
        except NotFound as error:
            reasons = problems or ([] if listed else ["no gallery is configured"])
            raise InstallFailed("; ".join([error.message, *reasons])) from error

    async def _install_build(self, build: gallery_index.GalleryEntry, work: _Work) -> str:
        metadata = Metadata(
            name=build.name, alias=build.alias, gallery_url=build.gallery.url, version=build.version
        )
        reasons = []
        for uri in (build.uri, *build.mirrors):
            try:
                place = _Place(uri, gallery_index.located(uri, build.gallery.url), build.sha256)
                return await self._install_place(
                    place, replace(metadata, uri=gallery_index.public_url(uri)), work
                )
            except Stopped:
                raise
            except (ClusterError, OSError, ValueError) as error:
                # Also an archive that cannot be unpacked: the next place may have a good one.
                reasons.append(error.message if isinstance(error, ClusterError) else str(error))
        raise InstallFailed(f'backend "{build.name}": {"; ".join(reasons)}')

    async def _install_place(self, place: _Place, metadata: Metadata, work: _Work) -> str:
        """Brings the files and swaps them in; one install at a time works on a folder."""
        folder = folder_name(metadata.name)
        lock = self._locks.setdefault(folder, asyncio.Lock())
        async with lock:
            metadata = replace(metadata, installed_at=clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
            if gallery_index.local_path(place.location) is not None:
                fill, digest = await in_thread(self._local, place, folder, work)
                metadata = replace(metadata, digest=digest)
                await self._in_thread(work.halt, self._fill_and_swap, fill, folder, metadata, work.halt)
                return folder
            archive = self._archive(place, folder)
            halt = work.halt
            await self._downloads.fetch(archive, lambda *m: work.report(Tick("downloading", *m)), halt)
            size = archive.partial.lstat().st_size
            work.report(Tick("downloading", size, size, "unpacking"))
            fill = _unpacking(archive.partial, _is_packed(place), Throttle(0), halt, lambda *_: None)
            try:
                # With a hash in the gallery the download has checked it.
                found = place.sha256 or await in_thread(sha256_of, archive.partial, halt)
                metadata = replace(metadata, digest=DIGEST + found)
                await self._in_thread(halt, self._fill_and_swap, fill, folder, metadata, halt)
            finally:
                if halt.cancelled or not halt.is_set():  # the next start goes on with it
                    archive.partial.unlink(missing_ok=True)
        return folder

    def _archive(self, place: _Place, folder: str) -> Archive:
        """The archive to download. InstallFailed for what this worker cannot download."""
        if not place.location.startswith(("http://", "https://", gallery_index.CLUSTER)):
            raise InstallFailed(
                f"{gallery_index.public_url(place.location)} is not a source that this worker knows: use a"
                f" folder, or {', '.join(SUFFIXES)} as a file or over http:// or https://"
            )
        if stem(place.file_name) is None:
            raise InstallFailed(
                f"{gallery_index.public_url(place.location)} is not an archive ({', '.join(SUFFIXES)})"
            )
        partial = partial_path(self._store.backends, folder, place.location, place.sha256)
        return Archive(place.location, place.sha256, partial)

    def _local(self, place: _Place, folder: str, work: _Work) -> tuple[Fill, str]:
        """What brings the files of a folder or an archive of this machine, and the digest of an archive.

        InstallFailed.
        """
        path = gallery_index.local_path(place.location)
        if path is None or not path.is_absolute():
            raise InstallFailed(f"{place.uri or 'an empty source'} is not the path of a folder or an archive")
        try:
            real = build_selection.within(path, self._roots)
        except (ValueError, OSError) as error:
            raise InstallFailed(str(error)) from error

        def show(done: int, total: int, name: str) -> None:
            work.report(Tick("downloading", done, total, name))

        if real.is_file() and stem(real.name) is not None:
            found = sha256_of(real, work.halt)
            if problem := hash_problem(found, place.sha256):
                raise InstallFailed(f"{path}: {problem}")
            packed = not real.name.lower().endswith(".tar")
            return _unpacking(real, packed, self._throttle, work.halt, show), DIGEST + found
        if not real.is_dir():
            raise InstallFailed(
                f"{path} is not a folder or an archive ({', '.join(SUFFIXES)}) on this worker"
            )
        target = self._store.backends / folder
        if real.is_relative_to(target.resolve()) or self._store.backends.resolve().is_relative_to(real):
            raise InstallFailed(f"{real} is the installed backend itself, or contains it")
        return lambda staged: copy_tree(real, staged, self._throttle, work.halt, show), ""

    async def _in_thread(self, halt: Halt, call: Callable[..., None], *arguments: Any) -> None:
        """Runs `call` on one of the few threads; a cancel that comes too late for it changes nothing."""
        waiting = self._threads.submit(call, *arguments)
        task = asyncio.wrap_future(waiting)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The thread looks at `halt`, not at this task, and needs the lock until it has ended.
            if waiting.cancel():
                raise
            [outcome] = await asyncio.gather(task, return_exceptions=True)
            if not halt.cancelled or outcome is not None:
                raise
            survive()

    def _fill_and_swap(self, fill: Fill, folder: str, metadata: Metadata, halt: Halt) -> None:
        target = self._store.backends / folder
        staged = target.with_name(folder + STAGED)
        try:
            discard(staged)
            fill(staged)
            start = staged / START_FILE
            if start.is_symlink() or not start.is_file():
                raise InstallFailed(f'the source of "{folder}" contains no {START_FILE} at its top')
            (staged / METADATA_FILE).unlink(missing_ok=True)
            (staged / METADATA_FILE).write_bytes(encode(metadata))
            points.passed("worker.install:staged")
            if halt.is_set():
                raise Stopped(ENDED)
            swap(staged, target)
            points.passed("worker.install:swapped")
        except (OSError, ValueError) as error:
            raise InstallFailed(f'cannot install "{folder}": {error}') from error
        finally:
            try:
                discard(staged)
            except OSError as error:
                log.warning("cannot remove %s: %s", staged, error)

    def _write_meta(self, meta: gallery_index.GalleryEntry, concrete: str) -> None:
        folder = folder_name(meta.name)
        target = self._store.backends / folder
        staged = target.with_name(folder + STAGED)
        metadata = Metadata(
            name=meta.name,
            meta_backend_for=concrete,
            gallery_url=meta.gallery.url,
            installed_at=clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            version=meta.version,
        )
        try:
            discard(staged)
            staged.mkdir()
            (staged / METADATA_FILE).write_bytes(encode(metadata))
            swap(staged, target)
        except OSError as error:
            raise InstallFailed(f'cannot write the entry "{folder}": {error}') from error


def _unpacking(archive: Path, packed: bool, throttle: Throttle, halt: Halt, show: OnBytes) -> Fill:
    return lambda staged: unpack(archive, packed, staged, throttle, halt, show)


def _is_packed(place: _Place) -> bool:
    return not place.file_name.lower().endswith(".tar")


def swap(staged: Path, target: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
    """Replaces `target` with `staged`; on failure the old version is restored. OSError."""
    backup = target.with_name(target.name + BACKUP)
    discard(backup)
    if target.is_symlink() or target.is_file():
        target.unlink()
    existed = target.exists()
    if existed:
        rename(target, backup)
        points.passed("worker.install:set_aside")
    try:
        rename(staged, target)
    except OSError:
        if existed:
            rename(backup, target)
        raise
    discard(backup)
