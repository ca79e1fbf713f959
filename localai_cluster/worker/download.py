"""Downloads an archive to a `.partial` file that a later try resumes (worker.md §18.6).

A lost connection is tried again. If the gallery gives a hash, which decides in the end, the download goes on
where it broke off, also after a restart; otherwise it starts over. An old part is removed by the next
download and at the worker's start. Redirects are followed for public addresses, never with the node's secret.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx

from localai_cluster import gallery_index
from localai_cluster.errors import ClusterError
from localai_cluster.worker.backend_store import remove_old_partials
from localai_cluster.worker.control_plane import CallFailed
from localai_cluster.worker.file_copy import CHUNK, ENDED, HEADROOM, OnBytes, SourceError, Stopped, Throttle
from localai_cluster.worker.halting import Halt, in_thread, settled
from localai_cluster.worker.names import PARTIAL

log = logging.getLogger(__name__)

HEADERS_LIMIT, STALL_LIMIT = 120.0, 60.0
"""Seconds until the headers of an answer, and between two parts of its body."""
MOST_BYTES = 64 * 1024**3
"""The longest archive, packed or unpacked."""
PAUSES = (1.0, 3.0, 9.0, 15.0, 15.0, 15.0)
"""Seconds before each new try. A try that brought a mebibyte starts the list again."""
AT_ONCE = 4
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,15})-\d{1,15}|\*)/(\d{1,15})")
_LENGTH = re.compile(r"\d{1,15}")

OpenServed = Callable[[str, Mapping[str, str]], Awaitable[httpx.Response]]
"""Opens a file of the control plane's own gallery, given its name and headers. CallFailed."""


class DownloadFailed(ClusterError):
    """The archive could not be downloaded."""

    code = "download_failed"

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.permanent = not again


@dataclass(frozen=True)
class Archive:
    """What to download. `sha256` is lower-case hex, "" if the gallery gives none."""

    url: str
    sha256: str
    partial: Path


@dataclass(frozen=True)
class _Part:
    """What an answer brings: bytes from `start`, of `total` (0 = not told)."""

    start: int
    total: int


def partial_path(folder: Path, name: str, url: str, sha256: str) -> Path:
    """Where the part of this archive is kept: one for each backend, address and hash."""
    key = hashlib.sha256(f"{name}\n{url}\n{sha256}".encode()).hexdigest()[:32]
    return folder / f"{PARTIAL}{key}"


class Downloads:
    """The downloads of one worker; `throttle` is shared with its copies."""

    def __init__(self, client: httpx.AsyncClient, served: OpenServed, throttle: Throttle) -> None:
        self._client = client
        self._served = served
        self._throttle = throttle
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def index(self, name: str) -> bytes:
        """An index that the control plane serves (`gallery_index.ReadServed`). ClusterError, ValueError."""
        answer = await self._served(name, {})
        try:
            return await gallery_index.body_bounded(answer)
        finally:
            await answer.aclose()

    async def fetch(self, archive: Archive, on_bytes: OnBytes, halt: Halt) -> None:
        """Downloads the archive to its partial file and checks its hash.

        DownloadFailed, SourceError (too long for the limit or the disk), Stopped, OSError. If it is
        cancelled, nothing writes to the partial file when this returns.
        """
        await asyncio.to_thread(remove_old_partials, archive.partial.parent)
        if not archive.sha256:
            log.warning("%s has no sha256 in its gallery, so it is not checked", _shown(archive))
        try:
            async with self._slots:
                await self._fetch(archive, on_bytes, halt)
        except BaseException:
            if not archive.sha256 or halt.cancelled:  # of no use to a later try
                archive.partial.unlink(missing_ok=True)
            raise

    async def _fetch(self, archive: Archive, on_bytes: OnBytes, halt: Halt) -> None:
        resumed = await asyncio.to_thread(_have, archive) > 0
        await self._complete(archive, on_bytes)
        problem = await in_thread(_problem, archive, halt)
        if problem and resumed:
            log.warning("%s: %s; downloading all of it again", _shown(archive), problem)
            await self._complete(archive, on_bytes)
            problem = await in_thread(_problem, archive, halt)
        if problem:
            raise DownloadFailed(f"{_shown(archive)}: {problem}")

    async def _complete(self, archive: Archive, on_bytes: OnBytes) -> None:
        tries, before = 0, await asyncio.to_thread(_have, archive)
        while True:
            try:
                return await self._continue(archive, on_bytes)
            except (httpx.HTTPError, TimeoutError) as error:
                problem = _reason(error)
            except (httpx.InvalidURL, ValueError) as error:
                raise DownloadFailed(f"{_shown(archive)}: {error}") from error
            except DownloadFailed as error:
                problem = error.message
                if error.permanent:
                    raise DownloadFailed(f"{_shown(archive)}: {problem}") from error
            size = await asyncio.to_thread(_have, archive)
            tries, before = (0 if size >= before + CHUNK else tries), size
            if tries == len(PAUSES):
                raise DownloadFailed(f"{_shown(archive)}: {problem}", again=True)
            log.warning("%s: %s; trying again at byte %d", _shown(archive), problem, size)
            await asyncio.sleep(PAUSES[tries])
            tries += 1

    async def _continue(self, archive: Archive, on_bytes: OnBytes) -> None:
        have = await asyncio.to_thread(_have, archive)
        async with self._opened(archive.url, {"Range": f"bytes={have}-"} if have else {}) as answer:
            part = _part(answer, have)
            if part is None:
                # Nothing follows what is there: it is complete, or not a part of this file.
                return
            if part.start == 0:
                have = 0
            await asyncio.to_thread(_check_room, archive.partial, have, part.total)
            await self._receive(answer, archive, have, part.total, on_bytes)

    async def _receive(
        self, answer: httpx.Response, archive: Archive, have: int, total: int, on_bytes: OnBytes
    ) -> None:
        name = _shown(archive).rpartition("/")[2]
        async with _writing(archive.partial, have) as file:
            on_bytes(have, max(total, have), name)
            async for piece in _pieces(answer, self._throttle.piece):
                if have + len(piece) > MOST_BYTES:
                    raise DownloadFailed(f"longer than {MOST_BYTES} bytes")
                await in_thread(file.write, piece)
                have += len(piece)
                on_bytes(have, max(total, have) if total else 0, name)
                await asyncio.sleep(self._throttle.pause(len(piece)))
        if total and have != total:
            raise DownloadFailed(f"{have} of {total} bytes came", again=True)

    @asynccontextmanager
    async def _opened(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """An open answer with status 200, 206 or 416."""
        asked = {"Accept-Encoding": "identity", **headers}
        name = gallery_index.served_name(url)
        if name is not None:
            answer = await self._open_served(name, asked)
        else:
            _ = urlsplit(url).port  # ValueError for a port that cannot be
            request = self._client.build_request("GET", url, headers=asked, timeout=None)
            async with asyncio.timeout(HEADERS_LIMIT):
                answer = await self._client.send(request, stream=True, follow_redirects=True)
        try:
            if answer.status_code not in (200, 206, 416):
                status = answer.status_code
                raise DownloadFailed(f"HTTP status {status}", again=_passing(status))
            yield answer
        finally:
            await answer.aclose()

    async def _open_served(self, name: str, headers: Mapping[str, str]) -> httpx.Response:
        try:
            return await self._served(name, headers)
        except CallFailed as error:
            raise DownloadFailed(error.message, again=_passing(error.http_status)) from error


@asynccontextmanager
async def _writing(partial: Path, have: int) -> AsyncIterator[BinaryIO]:
    """The partial file, open after its first `have` bytes."""
    opening = asyncio.ensure_future(asyncio.to_thread(open, partial, "r+b" if have else "wb"))
    try:
        file = await settled(opening)
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
        raise
    with file:
        await in_thread(file.seek, have)
        yield file


async def _pieces(answer: httpx.Response, size: int) -> AsyncIterator[bytes]:
    """The body in pieces of at most `size` bytes. TimeoutError when none comes."""
    arriving = answer.aiter_raw()
    while True:
        async with asyncio.timeout(STALL_LIMIT):
            arrived = await anext(arriving, None)
        if arrived is None:
            return
        for start in range(0, len(arrived), size):
            yield arrived[start : start + size]


def _passing(status: int) -> bool:
    """Whether a refusal with this status, 0 for no answer, may pass."""
    return status in (0, 408, 429) or status >= 500


def _part(answer: httpx.Response, have: int) -> _Part | None:
    """What this answer brings to one who has `have` bytes; None if nothing follows them. DownloadFailed."""
    if answer.status_code == 200:
        length = answer.headers.get("content-length", "")
        return _Part(0, int(length) if _LENGTH.fullmatch(length) else 0)
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if answer.status_code == 416 and have:
        return None
    if found is None or found[1] is None or int(found[1]) != have:
        raise DownloadFailed(f"HTTP status {answer.status_code} with another part than the one asked for")
    return _Part(have, int(found[2]))


def _check_room(partial: Path, have: int, total: int) -> None:
    if total > MOST_BYTES:
        raise SourceError(f"{total} bytes are more than the {MOST_BYTES} that an archive may have")
    free = shutil.disk_usage(partial.parent).free
    if max(total - have, 0) + HEADROOM > free:
        raise SourceError(
            f"{total} bytes do not fit on the disk of {partial.parent} ({free} free). Free up space."
        )


def sha256_of(path: Path, stopped: threading.Event) -> str:
    """The hash of a file, in hex. Stopped, OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            if stopped.is_set():
                raise Stopped(ENDED)
            digest.update(piece)
    return digest.hexdigest()


def hash_problem(found: str, sha256: str) -> str:
    """How the hash of a file differs from the one in its gallery, "" if not or if that gives none."""
    if not sha256 or hmac.compare_digest(found.encode(), sha256.encode()):
        return ""
    return f"its sha256 is {found}, the gallery says {sha256[:64]}"


def _problem(archive: Archive, halt: Halt) -> str:
    """What is wrong with the downloaded file, "" if nothing is; a wrong file is removed."""
    if not archive.sha256:
        return ""
    problem = hash_problem(sha256_of(archive.partial, halt), archive.sha256)
    if problem:
        archive.partial.unlink()
    return problem


def _have(archive: Archive) -> int:
    """The bytes that a download goes on from: none without a hash that could tell a mixture of two files."""
    try:
        return archive.partial.lstat().st_size if archive.sha256 else 0
    except FileNotFoundError:
        return 0


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"connection lost: {error or type(error).__name__}"


def _shown(archive: Archive) -> str:
    return gallery_index.public_url(archive.url)
