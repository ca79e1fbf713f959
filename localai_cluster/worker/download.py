"""Resumable downloads of archives and of images' layers to a `.partial` file (worker.md §18.6).

A lost connection is retried. If the gallery has a hash, the hash is verified at the end, and the download
resumes where it broke off, even after a restart. Without a hash the download starts over. The next download
and the worker's start remove old partial files. Redirects are followed to public addresses, never with the
node's secret. For an image the worker downloads the manifest for this machine first, then each layer like an
archive with a hash. Each attempt sends a request to the registry, so an expired signed address does not
matter.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx

from localai_cluster import gallery_index
from localai_cluster.kit import failpoints
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.outbound import SourceError, read_pieces
from localai_cluster.registries.client import Descriptor, Image, Registries
from localai_cluster.registries.references import ImageReference
from localai_cluster.worker.backend_store import PARTIAL_PREFIX, remove_old_partials
from localai_cluster.worker.cancellation import Halt, in_thread, wait_for_thread
from localai_cluster.worker.control_plane import CallFailed
from localai_cluster.worker.source_files import (
    CHUNK_BYTES,
    BadSource,
    DiskFull,
    OnBytes,
    Throttle,
    check_free_space,
    hash_of,
    translate_disk_full,
)

log = logging.getLogger(__name__)

HEADERS_TIMEOUT = 120.0
"""Seconds until the headers of a response must have arrived."""
STALL_TIMEOUT = 60.0
"""Seconds without a byte of the body after which a response counts as stalled."""
MAX_ARCHIVE_BYTES = 64 * 1024**3
"""Maximum bytes of an archive, packed or unpacked."""
RETRY_PAUSES = (1.0, 3.0, 9.0, 15.0, 15.0, 15.0)
"""Seconds before each retry. After an attempt that received a mebibyte, the list starts again."""
PARALLEL_DOWNLOADS = 4
"""Maximum number of parallel downloads."""
_CONTENT_RANGE_PATTERN = re.compile(r"bytes (?:(\d{1,15})-\d{1,15}|\*)/(\d{1,15})")
_CONTENT_LENGTH_PATTERN = re.compile(r"\d{1,15}")

OpenServed = Callable[[str, Mapping[str, str]], Awaitable[httpx.Response]]
"""Opens a file of the control plane's own gallery, given its name and headers. Raises CallFailed."""


OpenPart = Callable[[Mapping[str, str]], AbstractAsyncContextManager[httpx.Response]]
"""Opens an archive with these request headers: status 200, 206 or 416. Raises DownloadFailed."""


class DownloadFailed(ClusterError):
    """The archive could not be downloaded."""

    code = "download_failed"

    def __init__(self, message: str, *, can_retry: bool = False) -> None:
        super().__init__(message)
        self.permanent = not can_retry


class WrongHash(DownloadFailed):
    """The source has sent another file than the declared one."""


@dataclass(frozen=True)
class Archive:
    """An archive to download.

    `sha256` is lower-case hex, "" if the gallery has no hash. If `open` is set, `url` is used only in
    messages. `size` is the declared number of bytes, 0 if unknown. `publisher` is the word in messages for
    the source of the hash.
    """

    url: str
    sha256: str
    partial: Path
    open: OpenPart | None = None
    size: int = 0
    publisher: str = "gallery"


@dataclass(frozen=True)
class _BodyRange:
    """The range of a response's body: bytes from `start`, of `total` (0 = unknown)."""

    start: int
    total: int


@dataclass
class _ReceivedBytes:
    """The first `size` bytes of a partial file, by their hash."""

    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


def partial_path(folder: Path, name: str, url: str, sha256: str) -> Path:
    """Return the path of the partial file; each backend, address and hash has its own file."""
    key = hashlib.sha256(f"{name}\n{url}\n{sha256}".encode()).hexdigest()[:32]
    return folder / f"{PARTIAL_PREFIX}{key}"


class Downloads:
    """Downloads archives for one worker. `throttle` limits them together with the copies of local folders."""

    def __init__(self, client: httpx.AsyncClient, served: OpenServed, throttle: Throttle) -> None:
        self._client = client
        self._served = served
        self._throttle = throttle
        self._slots = asyncio.Semaphore(PARALLEL_DOWNLOADS)
        self.in_use: set[Path] = set()
        """Partial files that are not removed, however old they are: running installs need them."""

    @property
    def is_full(self) -> bool:
        """True if a further download has to wait."""
        return self._slots.locked()

    async def fetch(self, archive: Archive, on_bytes: OnBytes, halt: Halt) -> None:
        """Download the archive to its partial file and verify its hash.

        Raise DownloadFailed, BadSource for an archive over the limit, DiskFull, WorkCancelled or OSError.
        Even after a cancellation, return only when no thread writes to the partial file.
        """
        await asyncio.to_thread(remove_old_partials, archive.partial.parent, self.in_use)
        try:
            async with self._slots:
                with translate_disk_full(archive.partial.parent):
                    await self._fetch(archive, on_bytes, halt)
        except BaseException as error:
            # A later attempt cannot resume it, or the disk must not stay full until then.
            if not archive.sha256 or halt.cancelled or isinstance(error, DiskFull):
                archive.partial.unlink(missing_ok=True)
            raise

    async def _fetch(self, archive: Archive, on_bytes: OnBytes, halt: Halt) -> None:
        is_resumed = await asyncio.to_thread(_resumable_size, archive) > 0
        sha256 = await self._download_with_retries(archive, on_bytes, halt)
        problem = await in_thread(_verify_hash, archive, sha256)
        if problem and is_resumed:
            log.warning("%s: %s; downloading all of it again", _public_url(archive), problem)
            sha256 = await self._download_with_retries(archive, on_bytes, halt)
            problem = await in_thread(_verify_hash, archive, sha256)
        if problem:
            raise WrongHash(f"{_public_url(archive)}: {problem}")

    async def _download_with_retries(self, archive: Archive, on_bytes: OnBytes, halt: Halt) -> str:
        """Return the SHA-256 of the file in hex."""
        retries, furthest = 0, await asyncio.to_thread(_resumable_size, archive)
        received = _ReceivedBytes()
        while True:
            try:
                return await self._resume_download(archive, received, on_bytes, halt)
            except (httpx.HTTPError, TimeoutError) as error:
                problem = _connection_problem(error)
            except (httpx.InvalidURL, ValueError) as error:
                raise DownloadFailed(f"{_public_url(archive)}: {error}") from error
            except DownloadFailed as error:
                problem = error.message
                if error.permanent:
                    raise DownloadFailed(f"{_public_url(archive)}: {problem}") from error
            size = await asyncio.to_thread(_resumable_size, archive)
            if size >= furthest + CHUNK_BYTES:  # a source without ranges starts over each time
                retries, furthest = 0, size
            if retries == len(RETRY_PAUSES):
                raise DownloadFailed(f"{_public_url(archive)}: {problem}", can_retry=True)
            log.warning("%s: %s; trying again at byte %d", _public_url(archive), problem, size)
            await asyncio.sleep(RETRY_PAUSES[retries])
            retries += 1

    async def _resume_download(
        self, archive: Archive, received: _ReceivedBytes, on_bytes: OnBytes, halt: Halt
    ) -> str:
        offset = await asyncio.to_thread(_resumable_size, archive)
        if offset != received.size:
            # Before the request: no source waits until gigabytes have been read.
            received.digest = await in_thread(_digest_of_start, archive, offset, halt)
            received.size = offset
        async with self._open(archive, {"Range": f"bytes={offset}-"} if offset else {}) as answer:
            part = _response_range(answer, offset)
            if part is None:
                # No bytes follow the present ones: the file is complete, or it belongs to another version.
                return str(received.digest.hexdigest())
            if part.start == 0:
                received.size, received.digest = 0, hashlib.sha256()
            await asyncio.to_thread(_check_disk_space, archive.partial, part.start, part.total)
            await self._receive_body(answer, archive, part, received, on_bytes)
            return str(received.digest.hexdigest())

    async def _receive_body(
        self,
        answer: httpx.Response,
        archive: Archive,
        part: _BodyRange,
        received: _ReceivedBytes,
        on_bytes: OnBytes,
    ) -> None:
        name = _public_url(archive).rpartition("/")[2]
        offset, total = part.start, part.total
        async with _open_partial(archive.partial, offset) as file:
            on_bytes(offset, max(total, offset), name)
            # One piece is written while the next one arrives.
            writing = asyncio.get_running_loop().create_future()
            writing.set_result(None)
            try:
                async for piece in read_pieces(answer.aiter_raw(), self._throttle.piece_bytes, STALL_TIMEOUT):
                    if offset + len(piece) > (archive.size or MAX_ARCHIVE_BYTES):
                        await wait_for_thread(writing)
                        archive.partial.unlink(missing_ok=True)
                        raise DownloadFailed(f"longer than {archive.size or MAX_ARCHIVE_BYTES} bytes")
                    await wait_for_thread(writing)
                    writing = asyncio.ensure_future(
                        asyncio.to_thread(_write_piece, archive, file, received, piece)
                    )
                    offset += len(piece)
                    on_bytes(offset, max(total, offset) if total else 0, name)
                    await asyncio.sleep(self._throttle.pause(len(piece)))
            finally:
                await wait_for_thread(writing)
        if total and offset != total:
            raise DownloadFailed(f"{offset} of {total} bytes came", can_retry=True)

    @asynccontextmanager
    async def _open(self, archive: Archive, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """Open a response with status 200, 206 or 416."""
        request_headers = {"Accept-Encoding": "identity", **headers}
        name = gallery_index.served_name(archive.url)
        if archive.open is not None:
            async with archive.open(request_headers) as opened:
                yield opened
            return
        if name is not None:
            answer = await self._open_served(name, request_headers)
        else:
            _ = urlsplit(archive.url).port  # ValueError for an invalid port
            request = self._client.build_request("GET", archive.url, headers=request_headers, timeout=None)
            async with asyncio.timeout(HEADERS_TIMEOUT):
                answer = await self._client.send(request, stream=True, follow_redirects=True)
        try:
            if answer.status_code not in (200, 206, 416):
                status = answer.status_code
                raise DownloadFailed(f"HTTP status {status}", can_retry=_is_retryable(status))
            yield answer
        finally:
            await answer.aclose()

    async def _open_served(self, name: str, headers: Mapping[str, str]) -> httpx.Response:
        try:
            return await self._served(name, headers)
        except CallFailed as error:
            raise DownloadFailed(error.message, can_retry=_is_retryable(error.http_status)) from error


@asynccontextmanager
async def _open_partial(partial: Path, offset: int) -> AsyncIterator[BinaryIO]:
    """Open the partial file for writing after its first `offset` bytes."""
    open_task = asyncio.ensure_future(asyncio.to_thread(open, partial, "r+b" if offset else "wb"))
    try:
        file = await wait_for_thread(open_task)
    except asyncio.CancelledError:
        if not open_task.cancelled() and open_task.exception() is None:
            open_task.result().close()
        raise
    with file:
        await in_thread(file.seek, offset)
        yield file


def _is_retryable(status: int) -> bool:
    """Return True if a retry can help after this HTTP status; 0 means that there was no response."""
    return status in (0, 408, 429) or status >= 500


def _response_range(answer: httpx.Response, offset: int) -> _BodyRange | None:
    """Return the range of the response to a download that already has `offset` bytes.

    The result is None if no bytes follow. Raise DownloadFailed for another range.
    """
    if answer.status_code == 200:
        length = answer.headers.get("content-length", "")
        return _BodyRange(0, int(length) if _CONTENT_LENGTH_PATTERN.fullmatch(length) else 0)
    match = _CONTENT_RANGE_PATTERN.fullmatch(answer.headers.get("content-range", ""))
    if answer.status_code == 416 and offset:
        return None
    if match is None or match[1] is None or int(match[1]) != offset:
        raise DownloadFailed(f"HTTP status {answer.status_code} with another part than the one asked for")
    return _BodyRange(offset, int(match[2]))


def _check_disk_space(partial: Path, offset: int, total: int) -> None:
    if total > MAX_ARCHIVE_BYTES:
        raise BadSource(f"{total} bytes are more than the {MAX_ARCHIVE_BYTES} that an archive may have")
    check_free_space(partial.parent, max(total - offset, 0))


def sha256_of(path: Path, stopped: threading.Event) -> str:
    """Return the SHA-256 of a file in hex. Raise WorkCancelled or OSError."""
    with open(path, "rb") as file:
        return hash_of(file, stopped).hexdigest()


def _digest_of_start(archive: Archive, size: int, halt: Halt) -> Any:
    """Return the hash object of the partial file's first `size` bytes. Raise WorkCancelled or OSError."""
    if not size:
        return hashlib.sha256()
    with open(archive.partial, "rb") as file:
        return hash_of(file, halt, size)


def _write_piece(archive: Archive, file: BinaryIO, received: _ReceivedBytes, piece: bytes) -> None:
    # The length may be unknown, and others fill the disk as well.
    check_free_space(archive.partial.parent, len(piece))
    file.write(piece)
    received.digest.update(piece)
    received.size += len(piece)


def hash_problem(actual: str, sha256: str, source: str = "gallery") -> str:
    """Return a message if the hashes differ; "" if they are equal or no hash is expected."""
    if not sha256 or hmac.compare_digest(actual.encode(), sha256.encode()):
        return ""
    return f"its sha256 is {actual}, the {source} says {sha256[:64]}"


def _verify_hash(archive: Archive, sha256: str) -> str:
    """Compare the hash of the downloaded file; return the problem, or "". Remove a wrong file."""
    problem = hash_problem(sha256, archive.sha256, archive.publisher)
    if problem:
        archive.partial.unlink()
    return problem


def _resumable_size(archive: Archive) -> int:
    """Return the number of bytes of the partial file that a download can keep.

    It is 0 without a hash, because only a hash detects a mixture of two files.
    """
    try:
        return archive.partial.lstat().st_size if archive.sha256 else 0
    except FileNotFoundError:
        return 0


def _connection_problem(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"connection lost: {error or type(error).__name__}"


def _public_url(archive: Archive) -> str:
    return gallery_index.public_url(archive.url)


@dataclass(frozen=True)
class PulledImage:
    """A downloaded image: the digest of its manifest, and its layers' files from the lowest up."""

    digest: str
    layers: tuple[Path, ...]


class Images:
    """Downloads the layers of images for one worker, to partial files in `folder`."""

    def __init__(self, registries: Registries, downloads: Downloads, folder: Path) -> None:
        self._registries = registries
        self._downloads = downloads
        self._folder = folder

    async def pull(
        self, reference: ImageReference, backend: str, on_bytes: OnBytes, halt: Halt
    ) -> PulledImage:
        """Download the layers of an image for `backend`. Raise SourceError and as `Downloads.fetch`."""
        image = await self._read_manifest(reference)
        layers = list(dict.fromkeys(image.layers))
        total = sum(layer.size for layer in layers)
        if total > MAX_ARCHIVE_BYTES:
            raise SourceError(f"{reference} has more than {MAX_ARCHIVE_BYTES} bytes")
        log.info("%s is %s: %d layers, %d bytes", reference, image.digest, len(layers), total)
        archives = {layer.digest: self._layer_archive(reference, layer, backend) for layer in layers}
        partials = {archive.partial for archive in archives.values()}
        self._downloads.in_use |= partials  # a single layer may take longer than partial files are kept
        try:
            await asyncio.to_thread(self._check_disk_space, archives.values(), total)
            done = 0
            for number, layer in enumerate(layers, 1):
                show = _show_layer(on_bytes, done, total, f"{number}/{len(layers)} {reference}")
                await self._downloads.fetch(archives[layer.digest], show, halt)
                done += layer.size
                await asyncio.to_thread(_touch_partials, partials)
                failpoints.passed("worker.pull:layer")
        except BaseException as error:
            if halt.cancelled or isinstance(error, DiskFull):  # no later install resumes them
                for partial in partials:
                    partial.unlink(missing_ok=True)
            raise
        finally:
            self._downloads.in_use -= partials
        return PulledImage(image.digest, tuple(archives[layer.digest].partial for layer in image.layers))

    def _check_disk_space(self, archives: Iterable[Archive], total: int) -> None:
        """Raise DiskFull if the missing bytes of the layers do not fit on the disk."""
        present = sum(archive.partial.stat().st_size for archive in archives if archive.partial.exists())
        check_free_space(self._folder, max(total - present, 0), "bytes of layers")

    async def _read_manifest(self, reference: ImageReference) -> Image:
        """Read the image's manifest; retry transient failures."""
        for pause in (*RETRY_PAUSES[:3], None):
            try:
                return await self._registries.image(reference)
            except SourceError as error:
                if error.permanent or pause is None:
                    raise
                log.warning("%s; trying again", error.message)
                await asyncio.sleep(pause)
        raise AssertionError  # the last attempt returns or raises

    def _layer_archive(self, reference: ImageReference, layer: Descriptor, backend: str) -> Archive:
        name = f"{reference.host}/{reference.path}@{layer.digest}"
        sha256 = layer.digest.removeprefix("sha256:")

        @asynccontextmanager
        async def open_part(headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
            try:
                answer = await self._registries.open_layer(reference, layer.digest, headers)
            except SourceError as error:
                raise DownloadFailed(error.message, can_retry=not error.permanent) from error
            async with contextlib.aclosing(answer):
                yield answer

        partial = partial_path(self._folder, backend, name, sha256)
        return Archive(name, sha256, partial, open_part, layer.size, "image")


def _touch_partials(partials: Iterable[Path]) -> None:
    """Touch the present partial files, so that the next install can resume them after a kill."""
    for partial in partials:
        with contextlib.suppress(FileNotFoundError):
            os.utime(partial)


def _show_layer(on_bytes: OnBytes, before: int, total: int, label: str) -> OnBytes:
    """Return the callback for a layer that shows its bytes as a part of the image."""
    return lambda done, *_: on_bytes(min(before + done, total), total, label)
