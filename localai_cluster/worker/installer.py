"""Installation of a backend's files: locate them, fill a staging folder, and rename it into place.

A source is a folder or an archive on this machine (in an allowed folder), an archive to download, or an image
in a registry. The backend's folder always holds the old version or the new one. Between the two renames only
the backup exists; the next start restores it. At most one install at a time works on a folder.
"""

import asyncio
import contextlib
import logging
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from localai_cluster import gallery_index
from localai_cluster.gallery_index import ARCHIVE_SUFFIXES, archive_stem
from localai_cluster.kit import clock, failpoints
from localai_cluster.kit.errors import ClusterError, NotFound
from localai_cluster.kit.outbound import SourceMissing
from localai_cluster.messaging.messages import Gallery, encode
from localai_cluster.registries import references
from localai_cluster.registries.access import Access
from localai_cluster.registries.client import Registries
from localai_cluster.worker.archives import unpack
from localai_cluster.worker.backend_store import (
    BACKUP_SUFFIX,
    METADATA_FILE,
    STAGED_SUFFIX,
    START_FILE,
    BackendStore,
    Metadata,
    discard,
    discard_leftover,
    folder_name,
)
from localai_cluster.worker.cancellation import Halt, clear_cancellation, in_thread
from localai_cluster.worker.download import (
    Archive,
    Downloads,
    Images,
    OpenServed,
    PulledImage,
    hash_problem,
    partial_path,
    sha256_of,
)
from localai_cluster.worker.galleries import Galleries
from localai_cluster.worker.progress import ReportTick, Tick
from localai_cluster.worker.source_files import (
    SHUTDOWN_MESSAGE,
    DiskFull,
    OnBytes,
    Throttle,
    WorkCancelled,
    copy_tree,
    translate_disk_full,
)

log = logging.getLogger(__name__)

PARALLEL_COPIES = 4
DIGEST_PREFIX = "sha256:"
"""Prefix of the archive's hash in the metadata field `digest`, as in OCI."""


class InstallFailed(ClusterError):
    """The backend could not be installed."""

    message = "The backend could not be installed."
    code = "install_failed"


@dataclass(frozen=True)
class InstallSource:
    """The backend to install: `name` from galleries, or `uri` under the given `name` and `alias`."""

    name: str
    galleries: Sequence[Gallery]
    uri: str = ""
    alias: str = ""


@dataclass(frozen=True)
class _FileSource:
    """The source of an entry's files: `uri` as in the gallery, and `location`, its resolved form."""

    uri: str
    location: str
    sha256: str = ""
    is_signed: bool = False
    """True if the gallery requires a signature."""

    @property
    def file_name(self) -> str:
        """Last part of the location's path; "" if the location is not a URL."""
        with contextlib.suppress(ValueError):
            return urlsplit(self.location).path.rstrip("/").rpartition("/")[2]
        return ""


@dataclass(frozen=True)
class _InstallContext:
    """The progress callback and the halt flag of one install."""

    report: ReportTick
    halt: Halt

    def show_bytes(self, done: int, total: int, name: str) -> None:
        """Report bytes as the progress of a download."""
        self.report(Tick("downloading", done, total, name))


def _unverified_reason(source: _FileSource) -> str:
    """Return the reason why a download cannot be verified; "" if it can be (worker.md §18.3).

    The result is "" for a local folder too, because nothing is downloaded.
    """
    reference, path = references.parse(source.location), gallery_index.local_path(source.location)
    if reference and source.is_signed:
        return "is of a gallery that demands signatures, which this worker cannot check"
    if (path is not None and os.path.isdir(path)) or (reference.is_pinned if reference else source.sha256):
        return ""
    return f"has no {'digest in its reference' if reference else 'sha256 in its gallery'}"


FillFolder = Callable[[Path], None]
"""Fills a new folder with the backend's files. Blocks."""


class Installer:
    """Installs backends.

    `served` opens files of the control plane's own gallery; `copies` is the folder for last good copies of
    indexes.
    """

    def __init__(
        self,
        store: BackendStore,
        roots: Sequence[Path],
        throttle: Throttle,
        capability: str,
        client: httpx.AsyncClient,
        served: OpenServed,
        *,
        access: Access | None = None,
        github_url: str = gallery_index.GITHUB_URL,
        copies: Path | None = None,
        require_integrity: bool = False,
    ) -> None:
        self._store = store
        self._roots = roots
        self._capability = capability
        self._galleries = Galleries(client, served, roots, github_url, copies)
        self._throttle = throttle
        self._downloads = Downloads(client, served, self._throttle)
        self._images = Images(Registries(client, access or Access()), self._downloads, store.backends)
        self._github_url = github_url
        self._require_integrity = require_integrity
        self._threads = ThreadPoolExecutor(PARALLEL_COPIES, thread_name_prefix="install")
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def install(self, source: InstallSource, report: ReportTick, halt: Halt | None = None) -> str:
        """Install a backend in place of a former version; return the name of its folder.

        `halt` or a cancellation of the task ends the install and removes its files; once the new files are in
        place, the install succeeds. Raise InstallFailed and other ClusterErrors.
        """
        context = _InstallContext(report, halt or Halt())
        context.report(Tick("resolving"))
        uri = source.uri
        if uri and (uri.startswith("/") or ":" in uri or references.parse(uri)):
            file_source = _FileSource(uri, gallery_index.web_address(uri, self._github_url))
            name = source.name or archive_stem(file_source.file_name) or file_source.file_name
            return await self._install_source(
                file_source,
                Metadata(name=name, alias=source.alias, uri=gallery_index.public_url(uri)),
                context,
            )
        try:
            choice = await self._galleries.choose(uri or source.name, source.galleries, self._capability)
        except NotFound as error:
            raise InstallFailed(error.message) from error
        chosen_from = choice.meta or choice.build
        why = gallery_index.install_reason(chosen_from, self._capability)
        log.info("%s is %s on this node: %s", chosen_from.name, choice.build.name, why)
        folder = await self._install_build(choice.build, context)
        if choice.meta is None:
            return folder
        entry = folder_name(choice.meta.name)
        metadata = Metadata(
            name=choice.meta.name,
            meta_backend_for=folder,
            gallery_url=choice.meta.gallery.url,
            installed_at=_now_text(),
            version=choice.meta.version,
        )
        # Not `context.halt`: the files are in place, so the install succeeds.
        await self._run_in_thread(context.halt, self._fill_and_swap, Path.mkdir, entry, metadata, Halt())
        return entry

    def close(self) -> None:
        """Begin no more copies. The caller has set the halts of the running installs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _install_build(self, build: gallery_index.GalleryEntry, context: _InstallContext) -> str:
        metadata = Metadata(
            name=build.name,
            alias=build.alias,
            gallery_url=build.gallery.url,
            version=build.version,
            uri=gallery_index.public_url(build.uri),
        )
        reasons, uris = [], [build.uri, *build.mirrors]
        for uri in uris:
            try:
                location = gallery_index.resolve_source(uri, build.gallery.url, self._github_url)
                source = _FileSource(uri, location, build.sha256, bool(build.gallery.verification))
                return await self._install_source(source, metadata, context)
            except WorkCancelled:
                raise
            except (ClusterError, OSError, ValueError) as error:
                # Also for an archive that cannot be unpacked: the next source may have a good one.
                reasons.append(error.message if isinstance(error, ClusterError) else str(error))
                if isinstance(error, DiskFull):  # the next source would fill the disk as well
                    break
                if isinstance(error, SourceMissing) and uri == build.uri:
                    uris += references.fallback_images(uri)
        raise InstallFailed(f'backend "{build.name}": {"; ".join(reasons)}')

    async def _install_source(self, source: _FileSource, metadata: Metadata, context: _InstallContext) -> str:
        """Fetch the files and move them into place; at most one install at a time works on a folder."""
        if problem := await in_thread(_unverified_reason, source):
            problem = f"{gallery_index.public_url(source.location)} {problem}"
            if self._require_integrity:
                raise InstallFailed(
                    f"{problem}, and LOCALAI_REQUIRE_BACKEND_INTEGRITY refuses what cannot be verified"
                )
            log.warning("%s; it is not verified", problem)
        folder = folder_name(metadata.name)
        lock = self._locks.setdefault(folder, asyncio.Lock())
        async with lock:
            metadata = replace(metadata, installed_at=_now_text())
            path = gallery_index.local_path(source.location)
            if references.parse(source.location) is None and path is not None:
                fill, digest = await in_thread(self._local_source, source, folder, context)
                metadata = replace(metadata, digest=digest)
                await self._run_in_thread(
                    context.halt, self._fill_and_swap, fill, folder, metadata, context.halt
                )
            else:
                await self._install_download(source, folder, metadata, context)
        return folder

    async def _install_download(
        self, source: _FileSource, folder: str, metadata: Metadata, context: _InstallContext
    ) -> None:
        halt, reference = context.halt, references.parse(source.location)
        if reference is not None:
            image = await self._images.pull(reference, folder, context.show_bytes, halt)
            failpoints.passed("worker.pull:complete")
        else:
            archive = self._archive_of(source, folder)
            await self._downloads.fetch(archive, context.show_bytes, halt)
            image = PulledImage("", (archive.partial,))
        size = sum(path.lstat().st_size for path in image.layers)
        context.show_bytes(size, size, "unpacking")
        is_image = reference is not None
        fill = _unpacking_fill(image.layers, Throttle(0), halt, lambda *_: None, is_image=is_image)
        try:
            # If the gallery has a hash, the download has verified it.
            digest = image.digest or DIGEST_PREFIX + (
                source.sha256 or await in_thread(sha256_of, image.layers[0], halt)
            )
            metadata = replace(metadata, digest=digest)
            await self._run_in_thread(halt, self._fill_and_swap, fill, folder, metadata, halt)
        finally:
            if halt.cancelled or not halt.is_set():  # otherwise the next install resumes it
                for path in image.layers:
                    path.unlink(missing_ok=True)

    def _archive_of(self, source: _FileSource, folder: str) -> Archive:
        """Return the archive to download. Raise InstallFailed for a source that cannot be downloaded."""
        if not source.location.startswith(("http://", "https://", gallery_index.CLUSTER_PREFIX)):
            raise InstallFailed(
                f"{gallery_index.public_url(source.location)} is not a source that this worker knows: use a"
                f" folder, {', '.join(ARCHIVE_SUFFIXES)} as a file or over http:// or https://, or an image"
                " as oci://"
            )
        if archive_stem(source.file_name) is None:
            raise InstallFailed(
                f"{gallery_index.public_url(source.location)} is not an archive"
                f" ({', '.join(ARCHIVE_SUFFIXES)})"
            )
        partial = partial_path(self._store.backends, folder, source.location, source.sha256)
        return Archive(source.location, source.sha256, partial)

    def _local_source(
        self, source: _FileSource, folder: str, context: _InstallContext
    ) -> tuple[FillFolder, str]:
        """Return a function that copies or unpacks a local source, and the digest of a local archive.

        Raise InstallFailed.
        """
        path = gallery_index.local_path(source.location)
        if path is None or not path.is_absolute():
            raise InstallFailed(
                f"{source.uri or 'an empty source'} is not the path of a folder or an archive"
            )
        try:
            real = gallery_index.check_inside(path, self._roots)
        except (ValueError, OSError) as error:
            raise InstallFailed(str(error)) from error

        if real.is_file() and archive_stem(real.name) is not None:
            digest_hex = sha256_of(real, context.halt)
            if problem := hash_problem(digest_hex, source.sha256):
                raise InstallFailed(f"{path}: {problem}")
            return _unpacking_fill(
                [real], self._throttle, context.halt, context.show_bytes
            ), DIGEST_PREFIX + digest_hex
        if not real.is_dir():
            raise InstallFailed(
                f"{path} is not a folder or an archive ({', '.join(ARCHIVE_SUFFIXES)}) on this worker"
            )
        target = self._store.backends / folder
        if real.is_relative_to(target.resolve()) or self._store.backends.resolve().is_relative_to(real):
            raise InstallFailed(f"{real} is the installed backend itself, or contains it")
        return lambda staged: copy_tree(real, staged, self._throttle, context.halt, context.show_bytes), ""

    async def _run_in_thread(self, halt: Halt, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call` on one of the few threads. A cancellation has no effect after `call` has succeeded."""
        submitted = self._threads.submit(call, *arguments)
        task = asyncio.wrap_future(submitted)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The thread checks `halt`, not this task, and needs the lock until it has ended.
            if submitted.cancel():
                raise
            [outcome] = await asyncio.gather(task, return_exceptions=True)
            if not halt.cancelled or outcome is not None:
                raise
            clear_cancellation()

    def _fill_and_swap(self, fill: FillFolder, folder: str, metadata: Metadata, halt: Halt) -> None:
        target = self._store.backends / folder
        staged = target.with_name(folder + STAGED_SUFFIX)
        try:
            discard(staged)
            with translate_disk_full(target.parent):
                fill(staged)
            start = staged / START_FILE
            if not metadata.meta_backend_for and (start.is_symlink() or not start.is_file()):
                raise InstallFailed(f'the source of "{folder}" contains no {START_FILE} at its top')
            (staged / METADATA_FILE).unlink(missing_ok=True)
            (staged / METADATA_FILE).write_bytes(encode(replace(metadata, size=_folder_size(staged))))
            failpoints.passed("worker.install:staged")
            if halt.is_set():
                raise WorkCancelled(SHUTDOWN_MESSAGE)
            replace_folder(staged, target)
            failpoints.passed("worker.install:swapped")
        except (OSError, ValueError) as error:
            raise InstallFailed(f'cannot install "{folder}": {error}') from error
        finally:
            discard_leftover(staged)


def _now_text() -> str:
    return clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _folder_size(folder: Path) -> int:
    """Return the bytes of all files below `folder`."""
    entries = (path.lstat() for path in folder.rglob("*"))
    return sum(entry.st_size for entry in entries if stat.S_ISREG(entry.st_mode))


def _unpacking_fill(
    layers: Sequence[Path], throttle: Throttle, halt: Halt, show: OnBytes, *, is_image: bool = False
) -> FillFolder:
    return lambda staged: unpack(layers, staged, throttle, halt, show, is_image=is_image)


def replace_folder(staged: Path, target: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
    """Replace `target` with `staged`; on failure restore the old version. Raise OSError."""
    backup = target.with_name(target.name + BACKUP_SUFFIX)
    discard(backup)
    if target.is_symlink() or target.is_file():
        target.unlink()
    existed = target.exists()
    if existed:
        rename(target, backup)
        failpoints.passed("worker.install:set_aside")
    try:
        rename(staged, target)
    except OSError:
        if existed:
            rename(backup, target)
        raise
    discard_leftover(backup)
