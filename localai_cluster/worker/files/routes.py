"""The routes `/v1/files…` (§12). The token is checked before any part of the key is examined."""

import asyncio
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from localai_cluster.kit import cancellation, clock, untrusted
from localai_cluster.worker.exchange import Answer, Exchange, Refusal, wanted
from localai_cluster.worker.files import disk, keys
from localai_cluster.worker.files.disk import HashStopped, Threads
from localai_cluster.worker.files.keys import Folders, ResolvedKey, decoded, is_side_file, locate
from localai_cluster.worker.files.uploads import PathLocks, Uploads, failed, upload

log = logging.getLogger(__name__)

FILES, LISTS = b"/v1/files/", b"/v1/files-list/"
MOST_LISTED = 100_000
SENT = 256 * 1024
"""Bytes per piece that is read and sent."""
SEND_LIMIT = 60.0
"""Seconds within which a client must accept such a piece."""


class FileServer:
    """Serves the files of three folders: models, staging and data."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._threads = Threads()
        self._locks = PathLocks()
        self._uploads = Uploads(self._threads, self._locks)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Create the folders, and remove the files staged for single requests, now and every hour."""
        await self._threads.run(self._create_folders)
        cleaning_up = asyncio.create_task(self._clean(), name="staged files")
        try:
            yield
        finally:
            await cancellation.end(cleaning_up)
            self._threads.stopped.set()

    def _create_folders(self) -> None:
        for folder in (self._folders.models, self._folders.staging, self._folders.data):
            try:
                folder.mkdir(mode=disk.FOLDER_MODE, parents=True, exist_ok=True)
            except OSError as error:
                log.warning("cannot make %s, so keys that lead there are refused: %s", folder, error)

    async def _clean(self) -> None:
        while True:
            staging = self._folders.staging
            try:
                removed = await self._threads.run(keys.clean, staging, clock.now(), self._locks.uploading)
                if removed:
                    log.info("removed %d files of former requests from %s", removed, staging)
            except Exception:
                log.exception("cannot clean %s, again in %.0f s", staging, keys.EVERY)
            await asyncio.sleep(keys.EVERY)

    @staticmethod
    def serves(raw_path: bytes) -> bool:
        """Return True if the path belongs to these routes."""
        return raw_path.startswith((FILES, LISTS))

    async def __call__(self, exchange: Exchange, authorized: bool) -> None:
        """Handle one request."""
        try:
            if not authorized:
                raise Refusal(401, "unauthorized")
            answer = await self._answer(exchange)
        except Refusal as refusal:
            answer = refusal.answer
        except OSError as error:
            answer = failed(error).answer
        except HashStopped:
            answer = Refusal(503, "the worker is shutting down").answer
        except asyncio.CancelledError:
            return  # the server ends and has cut the connection; uvicorn would log it as a failure
        if answer is None:
            return
        if answer.status >= 500:
            log.warning("%s %r: %s", exchange.method, exchange.raw_path, answer.text.strip())
        await exchange.answer(answer)

    async def _answer(self, exchange: Exchange) -> Answer | None:
        """Handle one request; return None if the response was already sent."""
        method, path = exchange.method, exchange.raw_path
        if path.startswith(LISTS):
            if method != "GET":
                raise Refusal(405, "method not allowed")
            return await self._list(await self._locate(path.removeprefix(LISTS)))
        if method == "POST":
            return await self._temporary(path.removeprefix(FILES))
        if method not in ("HEAD", "GET", "PUT"):
            raise Refusal(405, "method not allowed")
        key = await self._locate(path.removeprefix(FILES))
        if method == "PUT":
            return await self._uploads.receive(upload(exchange, key), exchange)
        if method == "GET":
            await self._send(key, exchange)
            return None
        return await self._head(key)

    async def _locate(self, raw: bytes) -> ResolvedKey:
        return await self._threads.run(locate, self._folders, decoded(raw))

    async def _head(self, key: ResolvedKey) -> Answer:
        path = key.real
        state, digest = await self._threads.run(disk.look, path), ""
        if state.unknown and not self._locks.uploading(path):
            async with self._locks.reading(path):
                # Another request may have stored the hash meanwhile, or an upload may have replaced the file.
                state = await self._threads.run(disk.look, path)
                if state.unknown:
                    digest = await self._threads.hash(disk.cached_hash, path, self._threads.stopped)
        if not state.exists:
            raise Refusal(404, "not found")
        headers = {"content-length": str(state.size), "x-file-size": str(state.size)}
        headers |= {"x-local-path": _header_text(key.local), "accept-ranges": "bytes"}
        if state.target:
            headers["x-target-sha256"] = state.target
        elif digest := digest or state.digest:
            headers["x-content-sha256"] = digest
        return Answer(200, kind="application/octet-stream", headers=headers)

    async def _send(self, key: ResolvedKey, exchange: Exchange) -> None:
        state = await self._threads.run(disk.look, key.real)
        if not state.exists:
            raise Refusal(404, "file not found")
        file, size = await self._threads.run(_open, key.real)
        try:
            part = wanted(exchange.header(b"range"), size)
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

        It sends fewer if the file became shorter, or the client disconnects or stops reading. The server
        drops data for a disconnected client without an error, so this waits for the disconnect as well.
        """
        disconnect = asyncio.create_task(exchange.wait_disconnected())
        try:
            while (
                remaining
                and not disconnect.done()
                and (piece := await self._threads.run(file.read, min(SENT, remaining)))
            ):
                remaining -= len(piece)
                async with asyncio.timeout(SEND_LIMIT):
                    await exchange.send(piece, more=True)
        except TimeoutError:
            return
        finally:
            await cancellation.end(disconnect)
        if not remaining:
            await exchange.send(b"", more=False)

    async def _list(self, key: ResolvedKey) -> Answer:
        files = await self._threads.run(_list_files, self._folders, key)
        return Answer(200, json.dumps({"files": files}), "application/json")

    async def _temporary(self, raw: bytes) -> Answer:
        if raw != b"temp":
            raise Refusal(404, "404 page not found")
        path = await self._threads.run(_create_temporary, self._folders.staging)
        return Answer(200, json.dumps({"local_path": path}), "application/json")


def _open(path: Path) -> tuple[BinaryIO, int]:
    file = untrusted.open_file(path, follow_links=False)
    return file, os.fstat(file.fileno()).st_size


def _header_text(path: Path) -> str:
    """Encode a path as UTF-8 bytes in a header, like the reference implementation."""
    return os.fsencode(path).decode("latin-1")


def _list_files(folders: Folders, key: ResolvedKey) -> list[str]:
    """Return the files below a folder, sorted; links to folders are not followed."""
    if not key.real.is_dir():
        raise Refusal(404, "not a directory")
    paths: list[str] = []
    for folder, names, files in os.walk(key.real):
        current = Path(folder)
        names[:] = [name for name in names if folders.holds(key.folder, current / name)]
        for path in (current / name for name in files if not is_side_file(name)):
            if path.is_file() and folders.holds(key.folder, path.resolve()):
                paths.append(str(path.relative_to(key.real)))
        if len(paths) > MOST_LISTED:
            raise Refusal(400, f"more than {MOST_LISTED} files")
    return sorted(paths)


def _create_temporary(staging: Path) -> str:
    descriptor, name = tempfile.mkstemp(keys.TEMPORARY_END, keys.TEMPORARY, staging)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), disk.FILE_MODE)
    return name
