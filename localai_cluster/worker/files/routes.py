"""The routes `/v1/files…` (§12): who asks has shown the token before anything of the key is looked at."""

import asyncio
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from localai_cluster import cancel, clock, regular_files
from localai_cluster.worker.exchange import Answer, Exchange, Refusal
from localai_cluster.worker.files import cleaning, disk, ranges
from localai_cluster.worker.files.disk import HashStopped
from localai_cluster.worker.files.keys import FilePlace, Folders, decoded, is_side_file, locate
from localai_cluster.worker.files.path_locks import PathLocks
from localai_cluster.worker.files.threads import Threads
from localai_cluster.worker.files.uploads import Uploads, failed, upload

log = logging.getLogger(__name__)

FILES, LISTS = b"/v1/files/", b"/v1/files-list/"
MOST_LISTED = 100_000
SENT = 256 * 1024
"""Bytes that are read and sent at a time."""
SEND_LIMIT = 60.0
"""Seconds within which a reader takes such a piece."""


class FileServer:
    """Serves three folders."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._threads = Threads()
        self._locks = PathLocks()
        self._uploads = Uploads(self._threads, self._locks)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Makes the folders, and cleans what was staged for single requests, now and every hour."""
        await self._threads.run(self._make_folders)
        cleaning_up = asyncio.create_task(self._clean(), name="staged files")
        try:
            yield
        finally:
            await cancel.end(cleaning_up)
            self._threads.stopped.set()

    def _make_folders(self) -> None:
        for folder in (self._folders.models, self._folders.staging, self._folders.data):
            try:
                folder.mkdir(mode=disk.FOLDER_MODE, parents=True, exist_ok=True)
            except OSError as error:
                log.warning("cannot make %s, so keys that lead there are refused: %s", folder, error)

    async def _clean(self) -> None:
        while True:
            staging = self._folders.staging
            try:
                gone = await self._threads.run(cleaning.clean, staging, clock.now(), self._locks.uploading)
                if gone:
                    log.info("removed %d files of former requests from %s", gone, staging)
            except Exception:
                log.exception("cannot clean %s, again in %.0f s", staging, cleaning.EVERY)
            await asyncio.sleep(cleaning.EVERY)

    @staticmethod
    def serves(raw_path: bytes) -> bool:
        """Whether a request is for these routes."""
        return raw_path.startswith((FILES, LISTS))

    async def __call__(self, exchange: Exchange, authorized: bool) -> None:
        """Answers one request."""
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
        """None when the answer was sent."""
        method, path = exchange.method, exchange.raw_path
        if path.startswith(LISTS):
            if method != "GET":
                raise Refusal(405, "method not allowed")
            return await self._list(await self._located(path.removeprefix(LISTS)))
        if method == "POST":
            return await self._temporary(path.removeprefix(FILES))
        if method not in ("HEAD", "GET", "PUT"):
            raise Refusal(405, "method not allowed")
        place = await self._located(path.removeprefix(FILES))
        if method == "PUT":
            return await self._uploads.receive(upload(exchange, place), exchange)
        if method == "GET":
            await self._send(place, exchange)
            return None
        return await self._head(place)

    async def _located(self, raw: bytes) -> FilePlace:
        return await self._threads.run(locate, self._folders, decoded(raw))

    async def _head(self, place: FilePlace) -> Answer:
        path = place.real
        state, digest = await self._threads.run(disk.look, path), ""
        if state.unknown and not self._locks.uploading(path):
            async with self._locks.reading(path):
                # Another one may have computed it meanwhile, or an upload replaced the file.
                state = await self._threads.run(disk.look, path)
                if state.unknown:
                    digest = await self._threads.hash(disk.cached_hash, path, self._threads.stopped)
        if not state.exists:
            raise Refusal(404, "not found")
        headers = {"content-length": str(state.size), "x-file-size": str(state.size)}
        headers |= {"x-local-path": _header_text(place.local), "accept-ranges": "bytes"}
        if state.target:
            headers["x-target-sha256"] = state.target
        elif digest := digest or state.digest:
            headers["x-content-sha256"] = digest
        return Answer(200, kind="application/octet-stream", headers=headers)

    async def _send(self, place: FilePlace, exchange: Exchange) -> None:
        state = await self._threads.run(disk.look, place.real)
        if not state.exists:
            raise Refusal(404, "file not found")
        file, size = await self._threads.run(_opened, place.real)
        try:
            part = ranges.wanted(exchange.header(b"range"), size)
            left = size if part is None else part.length
            headers = {"content-type": "application/octet-stream", "content-length": str(left)}
            headers["accept-ranges"] = "bytes"
            if part is not None:
                file.seek(part.start)
                headers["content-range"] = f"bytes {part.start}-{part.end}/{size}"
            await exchange.start(200 if part is None else 206, headers)
            await self._send_bytes(file, left, exchange)
        finally:
            await self._threads.run(file.close)

    async def _send_bytes(self, file: BinaryIO, left: int, exchange: Exchange) -> None:
        """So many bytes; less of a file that became shorter, and to a reader that leaves or does not read.

        What is sent to one that has left is forgotten without a word, so we look for its end.
        """
        leaving = asyncio.create_task(exchange.left())
        try:
            while (
                left and not leaving.done() and (piece := await self._threads.run(file.read, min(SENT, left)))
            ):
                left -= len(piece)
                async with asyncio.timeout(SEND_LIMIT):
                    await exchange.send(piece, more=True)
        except TimeoutError:
            return
        finally:
            await cancel.end(leaving)
        if not left:
            await exchange.send(b"", more=False)

    async def _list(self, place: FilePlace) -> Answer:
        found = await self._threads.run(_listed, self._folders, place)
        return Answer(200, json.dumps({"files": found}), "application/json")

    async def _temporary(self, raw: bytes) -> Answer:
        if raw != b"temp":
            raise Refusal(404, "404 page not found")
        made = await self._threads.run(_make_temporary, self._folders.staging)
        return Answer(200, json.dumps({"local_path": made}), "application/json")


def _opened(path: Path) -> tuple[BinaryIO, int]:
    file = regular_files.open_file(path, follow_links=False)
    return file, os.fstat(file.fileno()).st_size


def _header_text(path: Path) -> str:
    """A path as bytes of UTF-8 in a header, as the reference writes it."""
    return os.fsencode(path).decode("latin-1")


def _listed(folders: Folders, place: FilePlace) -> list[str]:
    """The files below, sorted. No folder is entered through a link."""
    if not place.real.is_dir():
        raise Refusal(404, "not a directory")
    found: list[str] = []
    for folder, names, files in os.walk(place.real):
        here = Path(folder)
        names[:] = [name for name in names if folders.holds(place.folder, here / name)]
        for path in (here / name for name in files if not is_side_file(name)):
            if path.is_file() and folders.holds(place.folder, path.resolve()):
                found.append(str(path.relative_to(place.real)))
        if len(found) > MOST_LISTED:
            raise Refusal(400, f"more than {MOST_LISTED} files")
    return sorted(found)


def _make_temporary(staging: Path) -> str:
    descriptor, name = tempfile.mkstemp(cleaning.TEMPORARY_END, cleaning.TEMPORARY, staging)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), disk.FILE_MODE)
    return name
