"""The routes `/v1/files…` (§12). The token is checked before any part of the key is examined.

PUT uploads a complete file, or the part of it that is missing (§12.3). A second upload of a file waits for
the first one. Its sender chose the part before the first upload changed the file, so the second upload never
removes the file: a part that does not continue the current content gets a 416, and its sender checks the
state again.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localai_cluster.kit import cancellation, clock, untrusted
from localai_cluster.worker.exchange import (
    Answer,
    Exchange,
    Part,
    Refusal,
    parse_content_range,
    requested_part,
    validate_digest,
)
from localai_cluster.worker.files import disk, keys
from localai_cluster.worker.files.disk import FileState, PartialUpload, Threads
from localai_cluster.worker.files.fetches import Fetches, partial_of
from localai_cluster.worker.files.keys import Folders, ResolvedKey, decode_key, is_side_file, resolve_key
from localai_cluster.worker.files.locks import PathLocks
from localai_cluster.worker.source_files import WorkCancelled

log = logging.getLogger(__name__)

FILES_PATH, LISTS_PATH, FETCHES_PATH = b"/v1/files/", b"/v1/files-list/", b"/v1/files-fetch/"
CAN_FETCH_HEADER = {"x-file-fetch": "1"}
"""Response header to HEAD: this worker has the route of `fetches.py`, which stock workers lack."""
MAX_LISTED_FILES = 100_000
PIECE_BYTES = 256 * 1024
"""Bytes of one piece that is read and sent."""
SEND_TIMEOUT = 60.0
"""Seconds within which a client must accept a piece of a download."""
MAX_BODY_BYTES = 50 * 1024**3
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Upload:
    """A PUT request. `part` is None for a complete file; `target` is the hash, "" if unknown."""

    key: ResolvedKey
    length: int
    part: Part | None
    target: str


def parse_upload(exchange: Exchange, key: ResolvedKey) -> Upload:
    """Return the upload that the headers describe. Raise Refusal."""
    length = exchange.length
    if length is None or not exchange.header(b"content-length"):
        raise Refusal(411, "Content-Length is required")
    if length > MAX_BODY_BYTES:
        raise Refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send it in several parts")
    part = parse_content_range(exchange.header(b"content-range"))
    return Upload(key, length, part, validate_digest(exchange.header(b"x-content-sha256")))


class Uploads:
    """Receives uploads, one at a time for each file."""

    def __init__(self, threads: Threads, locks: PathLocks) -> None:
        self._threads = threads
        self._locks = locks

    async def receive(self, request: Upload, exchange: Exchange) -> Answer:
        """Execute one upload; return the response. Raise Refusal or OSError."""
        async with self._locks.upload(request.key.real) as was_queued:
            if request.target:
                # The sender has given its fetch up, and the disk may not have space beside that part.
                await self._threads.run(partial_of(request.key, request.target).unlink, True)
            if request.part is None:
                return await self._receive_whole(request, exchange)
            return await self._receive_part(request, request.part, exchange, was_queued)

    async def _receive_whole(self, request: Upload, exchange: Exchange) -> Answer:
        path, run = request.key.real, self._threads.run
        state = await run(disk.read_state, path)
        await run(disk.prepare_folder, path, request.length, state.size)
        writing, complete = await run(PartialUpload, path, 0, ""), False
        try:
            if await self._append_body(writing, request.length, exchange) < request.length:
                raise Refusal(400, f"short body: got {writing.size} expected {request.length}")
            await self._verify_and_record(request, writing)
            complete = True
        finally:
            await run(writing.close)
            if not complete:
                await run(disk.remove, path)
        return _success_answer(request.key)

    async def _receive_part(
        self, request: Upload, part: Part, exchange: Exchange, was_queued: bool
    ) -> Answer:
        path, run = request.key.real, self._threads.run
        state = await run(disk.read_state, path)
        reclaimed = 0
        if part.start == 0 and state.size:
            if await self._recover_complete(request, part, state):
                return _success_answer(request.key)
            if not _continues_content(request, part, state):
                reclaimed, state = state.size, _discard_state(was_queued, part, state)
        elif part.start and request.target and state.target not in ("", request.target):
            _discard_state(was_queued, part, state)
            await run(disk.remove, path)
            reason = f"(was {state.target}, now {request.target}); restart from byte 0"
            raise Refusal(409, f"X-Content-SHA256 mismatch with in-progress upload {reason}")
        if part.start != state.size:
            raise _wrong_offset_refusal(part, state)
        await run(disk.prepare_folder, path, part.total - state.size, reclaimed)
        writing = await run(lambda: PartialUpload(path, state.size, request.target, known=state.target))
        try:
            return await self._append_part(request, part, writing, exchange)
        finally:
            await run(writing.close)

    async def _append_part(
        self, request: Upload, part: Part, writing: PartialUpload, exchange: Exchange
    ) -> Answer:
        received = await self._append_body(writing, part.length, exchange)
        if received < part.length:
            raise Refusal(400, f"short body: got {received} expected {part.length}")
        if writing.size < part.total:
            await self._threads.run(writing.sync)
            headers = {"range": f"bytes=0-{writing.size - 1}", "x-file-size": str(writing.size)}
            return Answer(308, headers=headers)
        await self._verify_and_record(request, writing)
        return _success_answer(request.key)

    async def _recover_complete(self, request: Upload, part: Part, state: FileState) -> bool:
        """Record the hash of an upload that is complete, but whose hash was not recorded.

        This happens if the worker was killed in between. Return False if this is not such an upload.
        """
        path = request.key.real
        if not request.target or state.target != request.target or state.size != part.total:
            return False
        await self._threads.run(disk.sync, path)
        if await self._threads.hash(disk.hash_file, path, self._threads.stopped) != request.target:
            return False
        await self._threads.run(disk.record_hash, path, request.target)
        return True

    async def _append_body(self, writing: PartialUpload, limit: int, exchange: Exchange) -> int:
        """Write at most `limit` bytes of the body; return the number of bytes received."""
        received = 0
        while received < limit and (piece := await exchange.piece()):
            piece = piece[: limit - received]
            await self._threads.run(writing.append, piece)
            received += len(piece)
        return received

    async def _verify_and_record(self, request: Upload, writing: PartialUpload) -> None:
        """Record the hash of a complete file. Raise Refusal 400 and remove the file if the hash is wrong."""
        path, run = request.key.real, self._threads.run
        await run(writing.sync)
        actual = await self._threads.hash(writing.digest, self._threads.stopped)
        if request.target and actual != request.target:
            await run(disk.remove, path)
            raise Refusal(400, f"sha256 mismatch: expected {request.target} got {actual}")
        await run(disk.record_hash, path, actual)
        log.info("received %s bytes=%d", request.key.local, writing.size)


def _continues_content(request: Upload, part: Part, state: FileState) -> bool:
    """Return True if the current content is the beginning of the uploaded file, or all of it.

    The result is False for unfinished content of the full length, because its hash was wrong.
    """
    if not request.target:
        return False
    return state.size < part.total if state.target == request.target else _has_digest(request, state)


def _has_digest(request: Upload, state: FileState) -> bool:
    return not state.target and state.digest == request.target


def _discard_state(was_queued: bool, part: Part, state: FileState) -> FileState:
    """Return the empty state, because the upload replaces the file.

    Raise Refusal 416 if this upload has waited for another one.
    """
    if was_queued:
        raise _wrong_offset_refusal(part, state)
    return FileState()


def _wrong_offset_refusal(part: Part, state: FileState) -> Refusal:
    headers = {"content-range": f"bytes */{part.total}", "x-file-size": str(state.size)}
    text = f"Content-Range start {part.start} does not match current file size {state.size}"
    return Refusal(416, text, headers)


def _success_answer(key: ResolvedKey) -> Answer:
    return Answer(200, json.dumps({"local_path": str(key.local)}), "application/json")


def translate_disk_error(error: OSError) -> Refusal:
    """Return the Refusal for an error of the disk."""
    reason = error.strerror or str(error)
    if error.errno in _DISK_FULL_ERRNOS:
        return Refusal(507, f"not enough disk space: {reason}; what was received of a part is kept")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
        return Refusal(400, f"invalid key: {reason}")
    return Refusal(500, f"the file cannot be read or written: {reason}")


class FileServer:
    """Serves the files of three folders: models, staging and data."""

    def __init__(self, folders: Folders, fetches: Fetches) -> None:
        self._folders = folders
        self._fetches = fetches
        self._threads = Threads()
        self._locks = PathLocks()
        self._uploads = Uploads(self._threads, self._locks)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Create the folders; remove old files of single requests at once and then every hour."""
        await self._threads.run(self._create_folders)
        cleaning_up = asyncio.create_task(self._clean_hourly(), name="staged files")
        try:
            yield
        finally:
            await cancellation.cancel_and_wait(cleaning_up)
            self._threads.stopped.set()

    def _create_folders(self) -> None:
        for folder in (self._folders.models, self._folders.staging, self._folders.data):
            try:
                folder.mkdir(mode=disk.FOLDER_MODE, parents=True, exist_ok=True)
            except OSError as error:
                log.warning("cannot make %s, so keys that lead there are refused: %s", folder, error)

    async def _clean_hourly(self) -> None:
        while True:
            staging = self._folders.staging
            try:
                removed = await self._threads.run(
                    keys.remove_old_staged_files, staging, clock.now(), self._locks.uploading
                )
                if removed:
                    log.info("removed %d files of former requests from %s", removed, staging)
            except Exception:
                log.exception(
                    "cannot remove files of former requests from %s, trying again in %.0f s",
                    staging,
                    keys.REMOVAL_INTERVAL_SECONDS,
                )
            await asyncio.sleep(keys.REMOVAL_INTERVAL_SECONDS)

    @staticmethod
    def serves(raw_path: bytes) -> bool:
        """Return True if the path belongs to these routes."""
        return raw_path.startswith((FILES_PATH, LISTS_PATH, FETCHES_PATH))

    async def __call__(self, exchange: Exchange, authorized: bool) -> None:
        """Handle one request."""
        try:
            if not authorized:
                raise Refusal(401, "unauthorized")
            answer = await self._answer(exchange)
        except Refusal as refusal:
            answer = refusal.answer
        except OSError as error:
            answer = translate_disk_error(error).answer
        except WorkCancelled:
            answer = Refusal(503, "the worker is shutting down").answer
        except asyncio.CancelledError:
            return  # the server ends and has cut the connection; uvicorn would log it as a failure
        if answer is None:
            return
        if answer.status >= 500:
            log.warning("%s %r: %s", exchange.method, exchange.raw_path, answer.text.strip())
        await exchange.answer(answer)

    async def _answer(self, exchange: Exchange) -> Answer | None:
        """Handle one request; return the response, None if it was already sent."""
        method, path = exchange.method, exchange.raw_path
        if path.startswith(LISTS_PATH):
            if method != "GET":
                raise Refusal(405, "method not allowed")
            return await self._answer_list(await self._resolve_key(path.removeprefix(LISTS_PATH)))
        if path.startswith(FETCHES_PATH):
            if method != "POST":
                raise Refusal(405, "method not allowed")
            key = await self._resolve_key(path.removeprefix(FETCHES_PATH))
            await self._fetches.receive(key, self._folders, exchange, self._threads, self._locks)
            return None
        if method == "POST":
            return await self._answer_temporary(path.removeprefix(FILES_PATH))
        if method not in ("HEAD", "GET", "PUT"):
            raise Refusal(405, "method not allowed")
        key = await self._resolve_key(path.removeprefix(FILES_PATH))
        if method == "PUT":
            return await self._uploads.receive(parse_upload(exchange, key), exchange)
        if method == "GET":
            await self._send_file(key, exchange)
            return None
        return await self._answer_head(key)

    async def _resolve_key(self, raw: bytes) -> ResolvedKey:
        return await self._threads.run(resolve_key, self._folders, decode_key(raw))

    async def _answer_head(self, key: ResolvedKey) -> Answer:
        path = key.real
        state, digest = await self._threads.run(disk.read_state, path), ""
        if state.has_unknown_hash and not self._locks.uploading(path):
            async with self._locks.reading(path):
                # Another request may have stored the hash meanwhile, or an upload may have replaced the file.
                state = await self._threads.run(disk.read_state, path)
                if state.has_unknown_hash:
                    digest = await self._threads.hash(disk.cached_hash, path, self._threads.stopped)
        if not state.exists:
            raise Refusal(404, "not found", CAN_FETCH_HEADER)
        headers = {**CAN_FETCH_HEADER, "content-length": str(state.size), "x-file-size": str(state.size)}
        headers |= {"x-local-path": _encode_header_path(key.local), "accept-ranges": "bytes"}
        if state.target:
            headers["x-target-sha256"] = state.target
        elif digest := digest or state.digest:
            headers["x-content-sha256"] = digest
        return Answer(200, kind="application/octet-stream", headers=headers)

    async def _send_file(self, key: ResolvedKey, exchange: Exchange) -> None:
        state = await self._threads.run(disk.read_state, key.real)
        if not state.exists:
            raise Refusal(404, "file not found")
        file, size = await self._threads.run(_open_with_size, key.real)
        try:
            part = requested_part(exchange.header(b"range"), size)
            length = size if part is None else part.length
            headers = {"content-type": "application/octet-stream", "content-length": str(length)}
            headers["accept-ranges"] = "bytes"
            if part is not None:
                file.seek(part.start)
                headers["content-range"] = f"bytes {part.start}-{part.end}/{size}"
            await exchange.start(200 if part is None else 206, headers)
            await self._send_bytes(file, length, exchange)
        finally:
            await self._threads.run(file.close)

    async def _send_bytes(self, file: BinaryIO, remaining: int, exchange: Exchange) -> None:
        """Send `remaining` bytes of the file.

        Send fewer bytes if the file has become shorter, or if the client disconnects or stops reading. The
        HTTP server drops data for a disconnected client without an error, so this also waits for the
        disconnect.
        """
        disconnect = asyncio.create_task(exchange.wait_disconnected())
        try:
            while (
                remaining
                and not disconnect.done()
                and (piece := await self._threads.run(file.read, min(PIECE_BYTES, remaining)))
            ):
                remaining -= len(piece)
                async with asyncio.timeout(SEND_TIMEOUT):
                    await exchange.send(piece, more=True)
        except TimeoutError:
            return
        finally:
            await cancellation.cancel_and_wait(disconnect)
        if not remaining:
            await exchange.send(b"", more=False)

    async def _answer_list(self, key: ResolvedKey) -> Answer:
        files = await self._threads.run(_list_files, self._folders, key)
        return Answer(200, json.dumps({"files": files}), "application/json")

    async def _answer_temporary(self, raw: bytes) -> Answer:
        if raw != b"temp":
            raise Refusal(404, "404 page not found")
        path = await self._threads.run(_create_temporary_file, self._folders.staging)
        return Answer(200, json.dumps({"local_path": path}), "application/json")


def _open_with_size(path: Path) -> tuple[BinaryIO, int]:
    file = untrusted.open_file(path, follow_links=False)
    return file, os.fstat(file.fileno()).st_size


def _encode_header_path(path: Path) -> str:
    """Encode a path as UTF-8 bytes in a header, as the reference does."""
    return os.fsencode(path).decode("latin-1")


def _list_files(folders: Folders, key: ResolvedKey) -> list[str]:
    """Return the files below a folder, sorted; do not follow links to folders."""
    if not key.real.is_dir():
        raise Refusal(404, "not a directory")
    paths: list[str] = []
    for folder, names, files in os.walk(key.real):
        current = Path(folder)
        names[:] = [name for name in names if folders.holds(key.folder, current / name)]
        for path in (current / name for name in files if not is_side_file(name)):
            if path.is_file() and folders.holds(key.folder, path.resolve()):
                paths.append(str(path.relative_to(key.real)))
        if len(paths) > MAX_LISTED_FILES:
            raise Refusal(400, f"more than {MAX_LISTED_FILES} files")
    return sorted(paths)


def _create_temporary_file(staging: Path) -> str:
    descriptor, name = tempfile.mkstemp(keys.TEMPORARY_SUFFIX, keys.TEMPORARY_PREFIX, staging)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), disk.FILE_MODE)
    return name
