"""Transfer one file to one worker over HTTP: check it, resume a partial transfer, verify its hash.

HEAD returns the worker's state of the file. A file with our hash is complete; otherwise the missing bytes are
sent by one PUT with their range and the hash of the complete file (worker.md §12, §13), or by several, since
a worker refuses bodies above its limit. Transient failures are retried after 1, 2, 4 … 30 s as long as the
transfer advances, but a worker that does not answer at all is tried only `MAX_UNANSWERED` times; every other
failure is a refusal with the worker's text. The worker holds the state, so another controller can resume the
transfer of a killed controller. `UploadMeter` sums up the progress of all files of a model.
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

import httpx

from localai_cluster.kit import clock, names, untrusted
from localai_cluster.kit.quantities import human_bytes
from nodes.definitions.recorded_files import FileSource
from nodes.loading import worker_fetch
from nodes.loading.source_files import CHUNK, FileHasher, LocalFile, OpenedFile, path_of
from nodes.placement import load_times
from nodes.registry.dial_targets import reason_of
from operations.executor.work import retry_delay

_RATE_WINDOW = 15.0
"""Seconds of transfer over which the rate is computed."""


@dataclass
class UploadMeter:
    """The progress of all files of one model; `sizes` has the bytes of each file by path."""

    sizes: Mapping[str, int]
    node: str
    now: str = ""
    """Text of the current step."""
    moved: int = 0
    """Bytes that this attempt has read or sent, with repetitions; they grow while it advances."""
    positions: dict[str, int] = field(default_factory=dict)
    """By path: the bytes of the file that the worker has."""
    _finished: set[str] = field(default_factory=set)
    _sent: int = 0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def current(self) -> int:
        """Bytes of all files that the worker has."""
        return sum(self.positions.values())

    @property
    def file_index(self) -> int:
        """Number of the file that is being sent; the first file has number 1."""
        return min(len(self._finished) + 1, len(self.sizes))

    def start_file(self, relative: str, position: int) -> None:
        """Record that the file is sent from this position on; the worker has everything before it."""
        self.positions[relative] = position
        self.now = f"sending {relative} to {self.node}"

    def add_sent(self, relative: str, count: int) -> None:
        """Record that `count` more bytes of the file were sent."""
        self.positions[relative] = min(self.positions.get(relative, 0) + count, self.sizes[relative])
        self.moved += count
        self._sent += count

    def start_fetch(self, relative: str) -> None:
        """Record that the worker fetches the file from its source."""
        self.positions[relative] = 0
        self.now = f"{self.node} downloads {relative}"

    def set_fetched(self, relative: str, position: int) -> None:
        """Record the number of bytes that the worker has fetched of the file."""
        before, self.positions[relative] = self.positions[relative], position
        self.moved += position - before
        if before:  # the first position may be that of a download that is resumed
            self._sent += position - before

    def add_read(self, relative: str, count: int) -> None:
        """Record that `count` bytes of the file were read for its hash."""
        self.moved += count
        self.now = f"verifying {relative}"

    def finish_file(self, relative: str) -> None:
        """Record that the worker has the complete file, or that the file is skipped."""
        self.positions[relative] = self.sizes[relative]
        self._finished.add(relative)

    def rate(self, now: float) -> int:
        """Return the recent bytes per second; 0 while unknown. Each call adds a sample."""
        self._samples.append((now, self._sent))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_WINDOW:
            self._samples.popleft()
        start, sent_before = self._samples[0]
        return round((self._sent - sent_before) / (now - start)) if now - start >= 1 else 0

    def sentence(self, rate: int) -> str:
        """Describe the progress as a sentence."""
        text = self.now
        if len(self.sizes) > 1:
            text += f", file {self.file_index} of {len(self.sizes)}"
        text += f": {human_bytes(self.current)} of {human_bytes(self.total)}"
        if rate > 0 and self.current < self.total:
            text += f", {human_bytes(rate)}/s, {_format_duration((self.total - self.current) / rate)} left"
        return text

    def figures(self, percentage: float, progress_at: datetime | None) -> dict[str, Any]:
        """Return message and figures of a progress report; `percentage` is that of the last byte."""
        rate, total = self.rate(clock.monotonic()), self.total
        return {
            "message": self.sentence(rate),
            "current_bytes": self.current,
            "total_bytes": total,
            "percentage": percentage * self.current / total if total else 0.0,
            "file_index": self.file_index,
            "total_files": len(self.sizes),
            "bytes_per_second": rate,
            "progress_at": progress_at,
        }


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


_MAX_RESPONSE_BYTES = 64 * 1024
MAX_UNANSWERED = 3
"""Number of consecutive unanswered requests after which the port counts as unreachable."""
MAX_PART_BYTES = 50 * 2**30
"""Maximum bytes of one PUT; a worker refuses larger bodies (worker.md §12.3)."""
_TRANSIENT_STATUSES = {
    308: "its worker has only a part of the file",
    408: "its worker did not get the bytes in time",
    416: "its worker has another part of the file",
    503: "its worker is busy or shutting down",
}
_HASH_HEADER, _TARGET_HEADER = "X-Content-SHA256", "X-Target-SHA256"
_SIZE_HEADER, _PATH_HEADER = "X-File-Size", "X-Local-Path"
_TOKEN_REFUSAL_STATUSES = (401, 403)
_FULL_DISK_STATUS = 507
_FULL_DISK_TEXTS = ("no space left", "disk quota exceeded", "not enough space", "insufficient storage")


class FileRefused(Exception):
    """The worker refuses the file; the text contains the worker's reason."""

    def __init__(self, file: str, status: int, reason: str) -> None:
        words = names.to_readable_text(reason).strip() or "no reason given"
        super().__init__(f"its worker refused {file}: {words} ({status})")
        is_full = status == _FULL_DISK_STATUS or any(text in reason.lower() for text in _FULL_DISK_TEXTS)
        self.is_token_refusal = status in _TOKEN_REFUSAL_STATUSES
        """True if the worker does not accept our token."""
        self.affects_node = is_full or self.is_token_refusal
        """True if the node would refuse every other file too."""


class FileAtSource(Exception):
    """The worker has not fetched this file, so the control plane must download it."""


class ChangedAtSource(Exception):
    """The file at the source is not the recorded one, and the control plane has no copy.

    The text describes both files.
    """


class Stalled(Exception):
    """The transfer has made no progress within the limit."""


class Unreachable(Exception):
    """The worker's file port did not answer several consecutive requests."""


def root_of(local_path: str, relative: str) -> str:
    """Return the model's folder on the worker, from the path of one of its files. Raise FileRefused."""
    root = local_path.removesuffix("/" + relative)
    if root == local_path or not PurePosixPath(root).is_absolute() or names.find_unprintable(root):
        reason = (
            f"is kept by its worker at {names.to_single_line(local_path[:200])!r}, which is no place for it"
        )
        raise FileRefused(relative, 200, reason)
    return root


@dataclass(frozen=True)
class RemoteFile:
    """The state of a file on the worker, as its response headers state it."""

    status: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    path: str = ""
    can_fetch: bool = False
    """True if the worker fetches files from their sources itself."""

    def has(self, sha256: str) -> bool:
        """Return True if the worker has the complete file with this hash."""
        return self.status == 200 and bool(self.path) and self.sha256 == sha256


@dataclass(frozen=True)
class PutResponse:
    """The response to a PUT."""

    status: int
    body: str

    @property
    def path(self) -> str:
        """Path of the file on the worker; "" if the response contains no path."""
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            return ""
        path = body.get("local_path") if isinstance(body, dict) else None
        return path if isinstance(path, str) and PurePosixPath(path).is_absolute() else ""


class Transfer:
    """The transfer of one file. It fails after `stall` seconds without progress."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        file: LocalFile,
        key: str,
        meter: UploadMeter,
        stall: float,
        source: FileSource | None = None,
        unreached: Mapping[str, datetime] | None = None,
    ) -> None:
        self._client, self.file, self._meter, self._stall = client, file, meter, stall
        self._key, self._url, self.source = key, path_of(key), source
        self._unreached = {} if unreached is None else unreached
        self.fetch_problem = ""
        """The reason why the worker could not fetch the file from `source`; the file is then sent."""
        self.is_unreachable = False
        """True if the worker could not connect to `source`."""
        self._lost_worker = False
        self._furthest, self._pauses, self._unanswered = -1, 0, 0
        self._watch: asyncio.Timeout
        self._moved_at = 0.0
        self._hashing_since: float | None = None
        self._reason = "no answer"
        self._remote = RemoteFile()

    async def check(self) -> None:
        """Ask the worker how many bytes of the file it has.

        Raise FileRefused, Stalled and Unreachable.
        """
        async with self._stall_limit():
            while True:
                try:
                    self._remote = await self._head()
                    break
                except httpx.TransportError as error:
                    await self._pause(reason_of(error))
        self._meter.positions[self.file.relative] = min(self._remote.size, self.file.size)

    @property
    def needs_source(self) -> bool:
        """True if the file is only at its source, and the worker does not have it."""
        record = self.file.record
        return record is not None and not self._remote.has(record.sha256)

    async def fetch(self) -> str:
        """Make the worker fetch the file from its source; return its path there, "" if it must be sent.

        Raises FileRefused, ChangedAtSource, Stalled, Unreachable, FileChanged and OSError.
        """
        source = self.source
        if source is None or not self._remote.can_fetch:
            return ""
        async with self._stall_limit():
            sha256, _ = await self._hash()
        if source.sha256 != sha256 or self._remote.has(sha256):
            return ""
        if seen_at := self._unreached.get(source.host):
            self.fetch_problem = worker_fetch.skip_reason(source.host, seen_at)
            return ""
        path = await self._fetch_by_worker(source)
        for _ in range(MAX_UNANSWERED):
            if path or not self._lost_worker or self.file.record is None:
                break
            # There is no file to send: if the worker has gone, another node is better than a download here.
            await self.check()
            if self._remote.has(sha256):
                self.fetch_problem = ""
                break
            path = await self._fetch_by_worker(source)
        return path

    async def _fetch_by_worker(self, source: FileSource) -> str:
        """Make the worker fetch the file; return its path, "" after a failure. Raise ChangedAtSource."""
        self._meter.start_fetch(self.file.relative)
        self.fetch_problem, self._lost_worker = "", False
        try:
            path = await worker_fetch.fetch(
                self._client,
                self._key,
                source,
                self.file.size,
                lambda position: self._meter.set_fetched(self.file.relative, position),
            )
        except worker_fetch.FetchFailed as failure:
            self.fetch_problem = self._without_token(str(failure))
            if failure.has_changed and self.file.record is not None:
                raise ChangedAtSource(f"{self.file.relative}: {self.fetch_problem}") from failure
            self.is_unreachable, self._lost_worker = failure.is_unreachable, failure.lost_worker
            self._meter.positions[self.file.relative] = 0
            self._remote = RemoteFile()  # it may have the file in spite of the failure
            return ""
        self._meter.finish_file(self.file.relative)
        return path

    async def find(self) -> str:
        """Return the file's path on the worker if its hash is known and the worker has it, otherwise "".

        Raises FileAtSource if the control plane lacks the file too, Stalled, FileChanged and OSError.
        """
        record = self.file.record
        async with self._stall_limit():
            sha256 = record.sha256 if record is not None else await FileHasher(self.file).find_stored()
        if sha256 and self._remote.has(sha256):
            self._meter.finish_file(self.file.relative)
            return self._remote.path
        if record is not None:
            raise FileAtSource
        return ""

    async def send(self) -> str:
        """Send the file unless the worker has it; return its path on the worker.

        Raises FileRefused, Stalled, Unreachable, FileChanged and OSError.
        """
        async with self._stall_limit():
            sha256, stamp = await self._hash()
            if not self._remote.has(sha256):
                return await self._send(sha256, stamp)
            self._meter.finish_file(self.file.relative)
            return self._remote.path

    async def _hash(self) -> tuple[str, str]:
        """Return the file's hash and its stamp; for a file at its source the recorded hash and ""."""
        if self.file.record is not None:
            return self.file.record.sha256, ""
        hasher = FileHasher(self.file)
        async for count in hasher.read():
            self._meter.add_read(self.file.relative, count)
            self._record_progress()
        return hasher.sha256, hasher.stamp

    @contextlib.asynccontextmanager
    async def _stall_limit(self) -> AsyncIterator[None]:
        """Raise Stalled if there is no progress within the limit."""
        try:
            async with asyncio.timeout(self._stall) as self._watch:
                self._record_progress()
                yield
        except TimeoutError:
            if not self._watch.expired():
                raise
            limit = f"{self._stall:g} s"
            raise Stalled(f"{self.file.relative} got no further for {limit} ({self._reason})") from None

    async def _send(self, sha256: str, stamp: str) -> str:
        """Send the file with retries until the worker has all of it; return its path."""
        refused_offset: int | None = None
        # One HEAD is enough for the first attempt: the worker would refuse an outdated range.
        checked = self._remote if self._remote.status else None
        while True:
            before = self._furthest
            try:
                remote, checked = checked or await self._head(), None
                if remote.has(sha256):
                    path = remote.path
                    break
                is_part = 0 < remote.size < self.file.size and remote.target == sha256
                offset = remote.size if is_part else 0
                # A range that was refused would be refused again while something in between hides the
                # worker's state: then the file is sent from its beginning, without a range.
                ranged = self.file.size > 0 and offset != refused_offset
                response = await self._put(sha256, stamp, offset if ranged else 0, ranged=ranged)
            except httpx.TransportError as error:
                await self._pause(reason_of(error))
                continue
            if response.status == 200 and (path := response.path):
                break
            if response.status not in _TRANSIENT_STATUSES:
                raise FileRefused(self.file.relative, response.status, self._without_token(response.body))
            refused_offset = offset if response.status == 416 and ranged else None
            if response.status != 308 or not before < self._furthest < self.file.size:
                await self._pause(f"{_TRANSIENT_STATUSES[response.status]} ({response.status})")
        self._meter.finish_file(self.file.relative)
        return path

    async def _head(self) -> RemoteFile:
        self._begin_hashing()
        try:
            response = await self._client.head(self._url)
            self._unanswered = 0
        except httpx.TransportError as error:
            self._unanswered += 1
            if self._unanswered >= MAX_UNANSWERED:
                raise Unreachable(reason_of(error)) from error
            raise
        finally:
            self._end_hashing()
        if response.status_code in _TOKEN_REFUSAL_STATUSES:
            raise FileRefused(self.file.relative, response.status_code, "it does not accept our token")
        headers = response.headers
        size = headers.get(_SIZE_HEADER, "")
        return RemoteFile(
            response.status_code,
            int(size) if size.isascii() and size.isdigit() and len(size) < 20 else 0,
            headers.get(_HASH_HEADER, "").lower(),
            headers.get(_TARGET_HEADER, "").lower(),
            headers.get(_PATH_HEADER, ""),
            headers.get(worker_fetch.CAN_FETCH, "") == "1",
        )

    async def _put(self, sha256: str, stamp: str, offset: int, *, ranged: bool) -> PutResponse:
        size = self.file.size
        end = min(size, offset + MAX_PART_BYTES) if ranged else size
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - offset),
            _HASH_HEADER: sha256,
        }
        if ranged:
            headers["Content-Range"] = f"bytes {offset}-{end - 1}/{size}"
        self._meter.start_file(self.file.relative, offset)
        source = OpenedFile(self.file, stamp, offset)
        try:
            body = self._pieces(source, offset, end)
            async with self._client.stream("PUT", self._url, content=body, headers=headers) as response:
                # The worker is not trusted: the beginning of its response is enough.
                text = await untrusted.read_at_most(response.aiter_raw(), _MAX_RESPONSE_BYTES - 1)
                return PutResponse(response.status_code, text.decode("utf-8", "replace"))
        finally:
            self._end_hashing()
            source.close()

    async def _pieces(self, source: OpenedFile, at: int, end: int) -> AsyncIterator[bytes]:
        while piece := await source.read(min(CHUNK, end - at)):
            yield piece
            at += len(piece)
            self._meter.add_sent(self.file.relative, len(piece))
            if at > self._furthest:
                self._furthest, self._pauses = at, 0
                self._record_progress()
        self._begin_hashing()

    def _without_token(self, text: str) -> str:
        token = self._client.headers.get("Authorization", "").removeprefix("Bearer ")
        return text.replace(token, "…") if token else text

    def _record_progress(self) -> None:
        """Restart the stall limit, because the transfer has advanced."""
        self._moved_at = clock.monotonic()
        self._set_time_limit(self._moved_at + self._stall)

    def _begin_hashing(self) -> None:
        """Extend the stall limit, because the worker may have to read the complete file before it answers."""
        self._hashing_since = clock.monotonic()
        self._set_time_limit(self._moved_at + self._stall + load_times.hashing_limit(self.file.size))

    def _end_hashing(self) -> None:
        if self._hashing_since is not None:
            seconds = clock.monotonic() - self._hashing_since
            self._moved_at += min(seconds, load_times.hashing_limit(self.file.size))
            self._hashing_since = None
            self._set_time_limit(self._moved_at + self._stall)

    def _set_time_limit(self, when: float) -> None:
        if not self._watch.expired():
            self._watch.reschedule(when)

    async def _pause(self, reason: str) -> None:
        seconds = retry_delay(self._pauses)
        self._reason, self._pauses = reason, self._pauses + 1
        self._meter.now = f"{self.file.relative}: {reason}; again in {seconds:.0f} s"
        await asyncio.sleep(seconds)
