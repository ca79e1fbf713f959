"""PUT: uploads of a complete file, or of the part of it that is missing (§12.3).

A second upload of a file waits for the first one. Its sender chose the part before the first upload changed
the file, so the second upload never removes the file: a part that does not continue the current content gets
a 416, and its sender checks the state again.
"""

import asyncio
import contextlib
import errno
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from localai_cluster.worker.exchange import Answer, Exchange, Part, Refusal, content_range, digest
from localai_cluster.worker.files import disk
from localai_cluster.worker.files.disk import State, Threads, Writing
from localai_cluster.worker.files.keys import ResolvedKey


@dataclass
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    uploads: int = 0
    """Number of uploads that write or wait."""


class PathLocks:
    """Locks by the path without links, so that two keys of one file share a lock."""

    def __init__(self) -> None:
        self._entries: dict[Path, _Entry] = {}

    @contextlib.asynccontextmanager
    async def upload(self, path: Path) -> AsyncIterator[bool]:
        """Lock the file for writing; yield True if another upload came before this one."""
        entry = self._entries.setdefault(path, _Entry())
        was_queued = entry.uploads > 0
        entry.uploads += 1
        try:
            async with self._lock(path, entry):
                yield was_queued
        finally:
            entry.uploads -= 1

    def reading(self, path: Path) -> contextlib.AbstractAsyncContextManager[None]:
        """Lock the file for reading it completely."""
        return self._lock(path, self._entries.setdefault(path, _Entry()))

    def uploading(self, path: Path) -> bool:
        """Return True if the file is being written or an upload waits to write it. Thread-safe."""
        entry = self._entries.get(path)
        return entry is not None and entry.uploads > 0

    @contextlib.asynccontextmanager
    async def _lock(self, path: Path, entry: _Entry) -> AsyncIterator[None]:
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._entries[path]


log = logging.getLogger(__name__)

LARGEST_BODY = 50 * 1024**3
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Upload:
    """A PUT request: `part` is None for a complete file, `target` is "" if the hash is unknown."""

    key: ResolvedKey
    length: int
    part: Part | None
    target: str


def upload(exchange: Exchange, key: ResolvedKey) -> Upload:
    """Parse the headers of an upload. Raise Refusal."""
    length = exchange.length
    if length is None or not exchange.header(b"content-length"):
        raise Refusal(411, "Content-Length is required")
    if length > LARGEST_BODY:
        raise Refusal(413, f"the body is larger than {LARGEST_BODY} bytes: send it in several parts")
    part = content_range(exchange.header(b"content-range"))
    return Upload(key, length, part, digest(exchange.header(b"x-content-sha256")))


class Uploads:
    """Receives uploads, one at a time per file."""

    def __init__(self, threads: Threads, locks: PathLocks) -> None:
        self._threads = threads
        self._locks = locks

    async def receive(self, request: Upload, exchange: Exchange) -> Answer:
        """Execute one upload. Raise Refusal or OSError."""
        async with self._locks.upload(request.key.real) as was_queued:
            if request.part is None:
                return await self._receive_whole(request, exchange)
            return await self._receive_part(request, request.part, exchange, was_queued)

    async def _receive_whole(self, request: Upload, exchange: Exchange) -> Answer:
        path, run = request.key.real, self._threads.run
        state = await run(disk.look, path)
        await run(disk.make_room, path, request.length, state.size)
        writing, complete = await run(Writing, path, 0, ""), False
        try:
            if await self._append(writing, request.length, exchange) < request.length:
                raise Refusal(400, f"short body: got {writing.size} expected {request.length}")
            await self._finish(request, writing)
            complete = True
        finally:
            await run(writing.close)
            if not complete:
                await run(disk.remove, path)
        return _success(request.key)

    async def _receive_part(
        self, request: Upload, part: Part, exchange: Exchange, was_queued: bool
    ) -> Answer:
        path, run = request.key.real, self._threads.run
        state = await run(disk.look, path)
        reclaimed = 0
        if part.start == 0 and state.size:
            if await self._recover_complete(request, part, state):
                return _success(request.key)
            if not _continues(request, part, state):
                reclaimed, state = state.size, _discard_state(was_queued, part, state)
        elif part.start and request.target and state.target not in ("", request.target):
            _discard_state(was_queued, part, state)
            await run(disk.remove, path)
            reason = f"(was {state.target}, now {request.target}); restart from byte 0"
            raise Refusal(409, f"X-Content-SHA256 mismatch with in-progress upload {reason}")
        if part.start != state.size:
            raise _wrong_offset(part, state)
        await run(disk.make_room, path, part.total - state.size, reclaimed)
        writing = await run(lambda: Writing(path, state.size, request.target, known=state.target))
        try:
            return await self._append_part(request, part, writing, exchange)
        finally:
            await run(writing.close)

    async def _append_part(self, request: Upload, part: Part, writing: Writing, exchange: Exchange) -> Answer:
        received = await self._append(writing, part.length, exchange)
        if received < part.length:
            raise Refusal(400, f"short body: got {received} expected {part.length}")
        if writing.size < part.total:
            await self._threads.run(writing.sync)
            headers = {"range": f"bytes=0-{writing.size - 1}", "x-file-size": str(writing.size)}
            return Answer(308, headers=headers)
        await self._finish(request, writing)
        return _success(request.key)

    async def _recover_complete(self, request: Upload, part: Part, state: State) -> bool:
        """Record the hash of an upload that has all its bytes, but whose worker was killed before that.

        Return False if this is not such an upload.
        """
        path = request.key.real
        if not request.target or state.target != request.target or state.size != part.total:
            return False
        await self._threads.run(disk.sync, path)
        if await self._threads.hash(disk.hash_file, path, self._threads.stopped) != request.target:
            return False
        await self._threads.run(disk.vouch, path, request.target)
        return True

    async def _append(self, writing: Writing, limit: int, exchange: Exchange) -> int:
        """Write at most `limit` bytes of the body; return the number of bytes received."""
        received = 0
        while received < limit and (piece := await exchange.piece()):
            piece = piece[: limit - received]
            await self._threads.run(writing.append, piece)
            received += len(piece)
        return received

    async def _finish(self, request: Upload, writing: Writing) -> None:
        """Record the hash of a complete file. Raise Refusal 400 and remove the file if the hash is wrong."""
        path, run = request.key.real, self._threads.run
        await run(writing.sync)
        actual = await self._threads.hash(writing.digest, self._threads.stopped)
        if request.target and actual != request.target:
            await run(disk.remove, path)
            raise Refusal(400, f"sha256 mismatch: expected {request.target} got {actual}")
        await run(disk.vouch, path, actual)
        log.info("received %s bytes=%d", request.key.local, writing.size)


def _continues(request: Upload, part: Part, state: State) -> bool:
    """Return True if the current content is a beginning of the requested file, or that file.

    Unfinished content of the full length is not: its hash was wrong.
    """
    if not request.target:
        return False
    return state.size < part.total if state.target == request.target else _has_digest(request, state)


def _has_digest(request: Upload, state: State) -> bool:
    return not state.target and state.digest == request.target


def _discard_state(was_queued: bool, part: Part, state: State) -> State:
    """Return the empty state, as the file will be replaced.

    Raise Refusal 416 if this upload waited for another one.
    """
    if was_queued:
        raise _wrong_offset(part, state)
    return State()


def _wrong_offset(part: Part, state: State) -> Refusal:
    headers = {"content-range": f"bytes */{part.total}", "x-file-size": str(state.size)}
    text = f"Content-Range start {part.start} does not match current file size {state.size}"
    return Refusal(416, text, headers)


def _success(key: ResolvedKey) -> Answer:
    return Answer(200, json.dumps({"local_path": str(key.local)}), "application/json")


def failed(error: OSError) -> Refusal:
    """Translate an error of the disk into a refusal."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return Refusal(507, f"not enough disk space: {reason}; what was received of a part is kept")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
        return Refusal(400, f"invalid key: {reason}")
    return Refusal(500, f"the file cannot be read or written: {reason}")
