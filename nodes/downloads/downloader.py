"""Download one file of a source into the models folder.

A large file is downloaded over several connections if its source supports ranges. After an interruption the
next byte is requested from the source itself, so a signed address may expire after a few minutes. The
download of a file that changes at its source, or whose hash is wrong after it was resumed, starts over. The
file is verified before it gets its own name.
"""

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from localai_cluster.kit import backoff, clock, untrusted
from localai_cluster.kit.outbound import (
    STALL_TIMEOUT,
    SourceBody,
    SourceBusy,
    SourceChanged,
    SourceError,
    read_pieces,
)
from nodes.definitions.recorded_files import FileConflict
from nodes.downloads.partial_files import (
    CHUNK,
    FIRST_SPAN,
    BeingDownloaded,
    ByteSpan,
    FolderFailed,
    PartialFile,
    raising_disk_full,
)
from nodes.loading.source_files import (
    FileChanged,
    FileHasher,
    LocalFile,
    in_staging_thread,
    stamp_of,
    store_hash,
)
from nodes.loading.transfer import UploadMeter
from nodes.sources.opening import SourceOpener
from nodes.sources.plans import SourceFile
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

POLL_EVERY = 1.0
"""Seconds between two checks of a file that another operation downloads."""
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
MAX_FAILURES = 6
"""Maximum consecutive failures, without a mebibyte in between, before the operation returns to the queue."""
MAX_WAIT = 60.0
"""Maximum pause in seconds that a download waits for; a longer pause puts the import back in the queue."""
MAX_RESTARTS = 3


class FetchedFiles(Protocol):
    """Remembers the files without a published hash that were fetched from their sources."""

    async def hashes_of(self, file: SourceFile) -> Collection[str]:
        """Return the hashes that the file has had after fetches from this address."""

    async def add(self, file: SourceFile, sha256: str) -> None:
        """Remember the hash of the complete file."""


class _DownloadMustRestart(Exception):
    """The received bytes cannot be used; the text gives the reason."""


@dataclass
class DownloadMeter(UploadMeter):
    """The progress of all files of an import. The sizes of some files may be unknown at first."""

    furthest: dict[str, int] = field(default_factory=dict)
    """The greatest position of each file in bytes; a file that starts over makes no progress below it."""

    @property
    def reached(self) -> int:
        """The sum of the greatest positions of all files, in bytes."""
        return sum(self.furthest.values())

    def set_size(self, path: str, size: int) -> None:
        """Record the size of a file according to its source."""
        self.sizes = {**self.sizes, path: size}

    def set_position(self, path: str, position: int) -> None:
        """Record the number of received bytes of the file, from this or another operation."""
        self.positions[path] = position
        self.furthest[path] = max(self.furthest.get(path, 0), position)
        self.sizes = {**self.sizes, path: max(self.sizes[path], position)}

    def finish_file(self, relative: str) -> None:
        """Record that the file is complete."""
        super().finish_file(relative)
        self.set_position(relative, self.positions[relative])

    def add_received(self, path: str, count: int) -> None:
        """Record that `count` more bytes of the file were received."""
        self.set_position(path, self.positions.get(path, 0) + count)
        self.moved += count
        self._sent += count
        self.now = f"downloading {path}"


@dataclass(frozen=True)
class DownloadedFile:
    """A file in the models folder, with its size and hash."""

    file: SourceFile
    size: int
    sha256: str


class Download:
    """The download of one file into the folder `models`, over at most `connections` connections."""

    def __init__(
        self,
        file: SourceFile,
        models: Path,
        opener: SourceOpener,
        meter: DownloadMeter,
        connections: int,
        fetched_files: FetchedFiles,
    ) -> None:
        self._file, self._models, self._opener, self._fetched_files = file, models, opener, fetched_files
        self._meter, self._connections = meter, connections
        self._pending: list[ByteSpan] = []
        self._has_many_connections = False

    async def run(self, *, may_replace: bool = False) -> DownloadedFile:
        """Download the file unless it is there already; return it, complete and verified.

        `may_replace`: a different file at its path may be replaced. Raise SourceError, FileConflict, DiskFull
        or FolderFailed.
        """
        try:
            with raising_disk_full(self._models):
                return await self._find_existing() or await self._fetch(may_replace)
        except (OSError, FileChanged) as error:
            reason = getattr(error, "strerror", None) or error
            raise FolderFailed(f"{self._file.path} in the models folder: {reason}") from error

    async def _find_existing(self) -> DownloadedFile | None:
        """Return the file if the folder has it with the required hash; else None.

        Without a published hash, the file must have a hash of an earlier fetch from the same address, and its
        size there.
        """
        path = self._models / self._file.path
        if not await in_staging_thread(path.is_file):
            return None
        size = (await in_staging_thread(path.stat)).st_size
        self._meter.now = f"verifying {self._file.path}"
        hashes: Collection[str] = [self._file.sha256]
        if not self._file.sha256:
            hashes = await self._fetched_files.hashes_of(self._file)
            if not hashes or size != (self._file.size or await self._size_at_source()):
                return None
        local = LocalFile(self._file.path, path, size)
        hasher = FileHasher(local)
        async for count in hasher.read():
            self._count_read(count)
        if hasher.sha256 not in hashes:
            return None
        self._meter.set_size(self._file.path, size)
        self._meter.finish_file(self._file.path)
        return DownloadedFile(self._file, size, hasher.sha256)

    async def _size_at_source(self) -> int:
        async with self._opener.open(self._file, 0, 1) as body:
            return body.total

    async def _fetch(self, may_replace: bool) -> DownloadedFile:
        partial = await self._lock_partial()
        try:
            # The operation that downloaded it until now may have finished it.
            if (fetched := await self._find_existing()) is not None:
                return fetched
            target = self._models / self._file.path
            if not may_replace and await in_staging_thread(target.exists):
                raise FileConflict(
                    f"the models folder has another file {self._file.path}: remove it, or import under"
                    " another name"
                )
            await in_staging_thread(partial.check_place)
            await in_staging_thread(partial.resume, self._file.url, self._file.sha256)
            sha256 = await self._receive(partial)
            if not self._file.sha256:
                # Before it is published: an attempt that is repeated must know the file that it finds.
                await self._fetched_files.add(self._file, sha256)
            await in_staging_thread(partial.publish)
        finally:
            # The thread of a write that is under way closes it; a hanging folder must not block the loop.
            untrusted.in_daemon_thread(partial.close)
        status = await in_staging_thread(target.stat)
        await in_thread(store_hash, self._file.path, stamp_of(status), sha256, clock.now())
        self._meter.finish_file(self._file.path)
        return DownloadedFile(self._file, status.st_size, sha256)

    async def _lock_partial(self) -> PartialFile:
        """Wait until no other operation downloads the file; return the locked partial file."""
        while True:
            opening = untrusted.in_daemon_thread(PartialFile.open, self._models, self._file.path)
            try:
                return await asyncio.wrap_future(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_opened)
                raise
            except BeingDownloaded as other:
                self._meter.now = f"another operation downloads {self._file.path}"
                self._meter.set_position(self._file.path, other.done)
            await asyncio.sleep(POLL_EVERY)

    async def _receive(self, partial: PartialFile) -> str:
        """Receive and verify all bytes; return the hash. Start over if earlier bytes cannot be continued."""
        problem = ""
        for _ in range(MAX_RESTARTS + 1):
            was_resumed = partial.journal.done > 0
            try:
                await self._receive_spans(partial)
            except _DownloadMustRestart as start_over:
                problem = str(start_over)
            else:
                problem, sha256 = await self._verify(partial)
                if not problem:
                    return sha256
                if not was_resumed:
                    await in_staging_thread(partial.discard)
                    raise SourceChanged(f"{self._file.path}: {problem}")
            log.warning("%s: %s; downloading all of it again", self._file.path, problem)
            await in_staging_thread(partial.restart, self._file.url, self._file.sha256)
            self._meter.positions[self._file.path] = 0
        raise SourceError(f"{self._file.path}: {problem}, repeatedly", can_retry=True)

    async def _verify(self, partial: PartialFile) -> tuple[str, str]:
        """Return the problem of the complete file ("" = none), and its hash."""
        if await in_staging_thread(lambda: partial.is_pointer):
            return "the source has a pointer of Git LFS in place of the file", ""
        self._meter.now = f"verifying {self._file.path}"
        sha256 = await in_staging_thread(partial.sha256, self._count_read)
        if self._file.sha256 not in ("", sha256):
            return f"its sha256 is {sha256}, the source says {self._file.sha256}", sha256
        return "", sha256

    async def _receive_spans(self, partial: PartialFile) -> None:
        """Receive the missing spans over several connections. Raise SourceError and _DownloadMustRestart."""
        spans = partial.journal.spans
        self._meter.set_position(self._file.path, partial.journal.done)
        self._pending = [span for span in spans if span.missing != 0] if spans else [ByteSpan(0, -1, 0)]
        self._has_many_connections = False
        try:
            async with asyncio.TaskGroup() as group:
                await self._run_connection(partial, group)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _run_connection(self, partial: PartialFile, group: asyncio.TaskGroup) -> None:
        while self._pending:
            await self._receive_span(partial, self._pending.pop(0), group)

    async def _receive_span(self, partial: PartialFile, span: ByteSpan, group: asyncio.TaskGroup) -> None:
        """Receive a span; retry transient failures. Raise SourceError and _DownloadMustRestart."""
        failures = 0
        while True:
            before = span.at
            try:
                await self._read_span(partial, span, group)
                if span.missing == 0:
                    return
                raise SourceError(f"the source ended the file {span.missing} bytes early", can_retry=True)
            except SourceError as error:
                failures = 0 if span.at >= before + CHUNK else failures + 1
                wanted = error.retry_after if isinstance(error, SourceBusy) else 0.0
                if error.permanent or failures > MAX_FAILURES or wanted > MAX_WAIT:
                    raise
                pause = max(wanted, backoff.delay(failures, first=FIRST_PAUSE, longest=MAX_PAUSE))
                self._meter.now = f"{self._file.path}: {error.message}; again in {pause:.0f} s"
            await asyncio.sleep(pause)

    async def _read_span(self, partial: PartialFile, span: ByteSpan, group: asyncio.TaskGroup) -> None:
        """Read the bytes of the span from one response of the source."""
        length = FIRST_SPAN if span.missing is None else span.missing
        async with self._opener.open(self._file, span.at, length) as body:
            await in_staging_thread(self._compare, partial, span, body)
            if body.has_ranges and not self._has_many_connections:
                self._has_many_connections = True
                for _ in range(min(self._connections - 1, len(self._pending))):
                    group.create_task(self._run_connection(partial, group))
            async for piece in read_pieces(body.pieces, CHUNK, STALL_TIMEOUT):
                piece = piece if span.missing is None else piece[: span.missing]
                await in_staging_thread(partial.write, span, piece)
                self._meter.add_received(self._file.path, len(piece))
                if span.missing == 0:
                    return
        if span.missing is None:
            await in_staging_thread(partial.end_at, span)

    def _compare(self, partial: PartialFile, span: ByteSpan, body: SourceBody) -> None:
        """Plan the spans at the first response, and compare each later response with it.

        Raise SourceError and _DownloadMustRestart.
        """
        journal, total = partial.journal, body.total or self._file.size or -1
        if self._file.size and body.total and body.total != self._file.size:
            raise SourceChanged(
                f"{self._file.path} has changed at its source: it has {body.total} bytes instead of"
                f" {self._file.size}. Look the model up again."
            )
        if not journal.spans:
            if body.has_ranges and total < 0:
                raise SourceError(f"the source does not say how long {self._file.path} is")
            partial.divide(span, total, body.validator, with_ranges=body.has_ranges)
            self._pending += journal.spans[1:]
            self._meter.set_size(self._file.path, max(total, 0))
        elif total != journal.total or (not self._file.sha256 and body.validator != journal.validator):
            raise _DownloadMustRestart("it has changed at its source")
        elif body.offset != span.at:
            raise _DownloadMustRestart("the connection broke, and the source sends no ranges")

    def _count_read(self, count: int) -> None:
        self._meter.add_read(self._file.path, count)


def _close_opened(opening: "Future[PartialFile]") -> None:
    """Close a file that was opened for a cancelled caller."""
    if opening.exception() is None:
        opening.result().close()
