"""Installs a backend's files: finds them, copies them to a staging folder, swaps that in by renaming.

At every moment the backend's folder holds the old version or the new one; between the two renames only the
backup exists, and the next start restores it. One install at a time works on a folder.
"""

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from localai_cluster import clock, gallery_index
from localai_cluster.errors import ClusterError, NotFound
from localai_cluster.messaging.codec import encode
from localai_cluster.messaging.messages import Gallery
from localai_cluster.worker import build_selection
from localai_cluster.worker.backend_store import METADATA_FILE, START_FILE, BackendStore, Metadata, discard
from localai_cluster.worker.file_copy import Throttle, copy_tree
from localai_cluster.worker.names import BACKUP, STAGED, folder_name
from localai_cluster.worker.progress import Report, Tick

log = logging.getLogger(__name__)

PARALLEL_COPIES = 4


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


class Installer:
    """InstallCommands directory backends from allowed folders."""

    def __init__(
        self,
        store: BackendStore,
        roots: Sequence[Path],
        rate: int,
        capability: str,
        client: httpx.AsyncClient,
    ) -> None:
        self._store = store
        self._roots = roots
        self._capability = capability
        self._client = client
        self._throttle = Throttle(rate)
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(PARALLEL_COPIES, thread_name_prefix="install")
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def install(self, source: InstallSource, report: Report) -> str:
        """InstallCommands, replacing what is there; returns the folder's name. InstallFailed and other
        ClusterErrors."""
        report(Tick("resolving"))
        path = gallery_index.local_path(source.uri) if source.uri else None
        if path is not None and path.is_absolute():
            metadata = Metadata(name=source.name or path.name, alias=source.alias, uri=source.uri)
            return await self._place(self._source(source.uri, Path()), metadata, report)
        if source.uri and path is None:
            raise InstallFailed(
                f"this worker installs from folders only, not from {source.uri.split(':')[0]}: sources"
            )
        choice = await self._select(source.uri or source.name, source.galleries)
        folder = await self._install_build(choice.build, report)
        if choice.meta is not None:
            await asyncio.to_thread(self._write_meta, choice.meta, folder)
            return folder_name(choice.meta.name)
        return folder

    def close(self) -> None:
        """Stops all running copies; they end with Stopped."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _select(self, name: str, listed: Sequence[Gallery]) -> build_selection.Choice:
        builds: list[gallery_index.GalleryEntry] = []
        problems = []
        for gallery in listed:
            try:
                builds += await build_selection.fetch(gallery, self._roots, self._client)
            except gallery_index.GalleryUnreadable as error:
                problems.append(error.message)
                log.warning("%s", error)
        try:
            return build_selection.choose(name, builds, self._capability)
        except NotFound as error:
            reasons = problems or ([] if listed else ["no gallery is configured"])
            raise InstallFailed("; ".join([error.message, *reasons])) from error

    async def _install_build(self, build: gallery_index.GalleryEntry, report: Report) -> str:
        index = gallery_index.local_path(build.gallery.url)
        metadata = Metadata(
            name=build.name, alias=build.alias, gallery_url=build.gallery.url, version=build.version
        )
        base = index.parent if index else Path()
        reasons = []
        for uri in (build.uri, *build.mirrors):
            try:
                return await self._place(self._source(uri, base), replace(metadata, uri=uri), report)
            except InstallFailed as error:
                reasons.append(error.message)
        raise InstallFailed(f'backend "{build.name}": {"; ".join(reasons)}')

    def _source(self, uri: str, base: Path) -> Path:
        """The folder that `uri` names; relative paths start at `base`, the folder of the gallery's index."""
        path = gallery_index.local_path(uri) if uri else None
        if path is None or not (base / path).is_absolute():
            raise InstallFailed(
                f"{uri or 'an empty source'} is not a folder; this worker installs from folders only"
            )
        try:
            real = build_selection.within(base / path, self._roots)
        except (ValueError, OSError) as error:
            raise InstallFailed(str(error)) from error
        if not real.is_dir():
            raise InstallFailed(f"{base / path} is not a folder on this worker")
        return real

    async def _place(self, source: Path, metadata: Metadata, report: Report) -> str:
        folder = folder_name(metadata.name)
        lock = self._locks.setdefault(folder, asyncio.Lock())
        async with lock:
            metadata = replace(metadata, installed_at=clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
            work = asyncio.get_running_loop().run_in_executor(
                self._threads, self._copy_and_swap, source, folder, metadata, report
            )
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # The thread checks `_stopped`, not this task, and needs the lock until it has ended.
                await asyncio.gather(work, return_exceptions=True)
                raise
        return folder

    def _copy_and_swap(self, source: Path, folder: str, metadata: Metadata, report: Report) -> None:
        target = self._store.backends / folder
        staged = target.with_name(folder + STAGED)
        try:
            if source.is_relative_to(target.resolve()) or self._store.backends.resolve().is_relative_to(
                source
            ):
                raise InstallFailed(f"{source} is the installed backend itself, or contains it")
            discard(staged)
            copy_tree(
                source, staged, self._throttle, self._stopped, lambda *m: report(Tick("downloading", *m))
            )
            start = staged / START_FILE
            if start.is_symlink() or not start.is_file():
                raise InstallFailed(f"{source} contains no {START_FILE}")
            (staged / METADATA_FILE).unlink(missing_ok=True)
            (staged / METADATA_FILE).write_bytes(encode(metadata))
            swap(staged, target)
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


def swap(staged: Path, target: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
    """Replaces `target` with `staged`; on failure the old version is restored. OSError."""
    backup = target.with_name(target.name + BACKUP)
    discard(backup)
    if target.is_symlink() or target.is_file():
        target.unlink()
    existed = target.exists()
    if existed:
        rename(target, backup)
    try:
        rename(staged, target)
    except OSError:
        if existed:
            rename(backup, target)
        raise
    discard(backup)
