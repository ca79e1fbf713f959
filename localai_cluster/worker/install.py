"""Putting a backend's files in place: find it, copy it aside, swap it in by renaming.

At every moment the backend's folder is the old version, the new version, or (for the blink between two
renames) its backup, which the next start restores. One folder is worked on by one install at a time.
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

from localai_cluster import clock, galleries
from localai_cluster.errors import ClusterError, NotFound
from localai_cluster.messaging.codec import encode
from localai_cluster.messaging.messages import Gallery
from localai_cluster.worker import gallery as choosing
from localai_cluster.worker.copying import Throttle, copy_tree
from localai_cluster.worker.listing import METADATA_FILE, START_FILE, Metadata, Shelf, discard
from localai_cluster.worker.names import BACKUP, STAGED, folder_name
from localai_cluster.worker.progress import Report, Tick

log = logging.getLogger(__name__)

PARALLEL_COPIES = 4


class InstallFailed(ClusterError):
    """The backend could not be installed."""

    code = "install_failed"


@dataclass(frozen=True)
class Wanted:
    """What to install: `name` from galleries, or `uri` under the backend's own `name` and `alias`."""

    name: str
    galleries: Sequence[Gallery]
    uri: str = ""
    alias: str = ""


class Installer:
    """Installs directory backends from allowed folders."""

    def __init__(
        self, shelf: Shelf, roots: Sequence[Path], rate: int, capability: str, client: httpx.AsyncClient
    ) -> None:
        self._shelf = shelf
        self._roots = roots
        self._capability = capability
        self._client = client
        self._throttle = Throttle(rate)
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(PARALLEL_COPIES, thread_name_prefix="install")
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def install(self, wanted: Wanted, report: Report) -> str:
        """Installs, replacing what is there; returns the folder's name. InstallFailed and other
        ClusterErrors."""
        report(Tick("resolving"))
        path = galleries.local_path(wanted.uri) if wanted.uri else None
        if path is not None and path.is_absolute():
            metadata = Metadata(name=wanted.name or path.name, alias=wanted.alias, uri=wanted.uri)
            return await self._place(self._source(wanted.uri, Path()), metadata, report)
        if wanted.uri and path is None:
            raise InstallFailed(
                f"this worker installs from folders, not from {wanted.uri.split(':')[0]}: sources"
            )
        choice = await self._choose(wanted.uri or wanted.name, wanted.galleries)
        folder = await self._install_build(choice.build, report)
        if choice.meta is not None:
            await asyncio.to_thread(self._write_meta, choice.meta, folder)
            return folder_name(choice.meta.name)
        return folder

    def close(self) -> None:
        """Stops every copy under way; they end with Stopped."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _choose(self, name: str, listed: Sequence[Gallery]) -> choosing.Choice:
        builds: list[galleries.Build] = []
        problems = []
        for gallery in listed:
            try:
                builds += await choosing.fetch(gallery, self._roots, self._client)
            except galleries.GalleryUnreadable as error:
                problems.append(error.message)
                log.warning("%s", error)
        try:
            return choosing.choose(name, builds, self._capability)
        except NotFound as error:
            reasons = problems or ([] if listed else ["there is no gallery"])
            raise InstallFailed("; ".join([error.message, *reasons])) from error

    async def _install_build(self, build: galleries.Build, report: Report) -> str:
        index = galleries.local_path(build.gallery.url)
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
        """The folder `uri` names, relative paths taken from `base` (the folder of the gallery's list)."""
        path = galleries.local_path(uri) if uri else None
        if path is None or not (base / path).is_absolute():
            raise InstallFailed(
                f"{uri or 'an empty source'} is not a folder; this worker installs from folders"
            )
        try:
            real = choosing.within(base / path, self._roots)
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
                # The thread looks at `_stopped`, not at this task; the folder stays locked until it lets go.
                await asyncio.gather(work, return_exceptions=True)
                raise
        return folder

    def _copy_and_swap(self, source: Path, folder: str, metadata: Metadata, report: Report) -> None:
        target = self._shelf.backends / folder
        staged = target.with_name(folder + STAGED)
        try:
            self._refuse_itself(source, target)
            discard(staged)
            copy_tree(
                source, staged, self._throttle, self._stopped, lambda *m: report(Tick("downloading", *m))
            )
            start = staged / START_FILE
            if start.is_symlink() or not start.is_file():
                raise InstallFailed(f"{source} holds no {START_FILE}")
            (staged / METADATA_FILE).unlink(missing_ok=True)
            (staged / METADATA_FILE).write_bytes(encode(metadata))
            swap(staged, target)
        except (OSError, ValueError) as error:
            raise InstallFailed(f'cannot install "{folder}": {error}') from error
        finally:
            _tidy(staged)

    def _refuse_itself(self, source: Path, target: Path) -> None:
        if source.is_relative_to(target.resolve()) or self._shelf.backends.resolve().is_relative_to(source):
            raise InstallFailed(f"{source} is the installed backend itself, or holds it")

    def _write_meta(self, meta: galleries.Build, concrete: str) -> None:
        folder = folder_name(meta.name)
        target = self._shelf.backends / folder
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
    """Puts `staged` in the place of `target`; on failure the old version is back. OSError."""
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


def _tidy(staged: Path) -> None:
    try:
        discard(staged)
    except OSError as error:
        log.warning("cannot remove %s: %s", staged, error)
