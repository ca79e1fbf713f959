"""One file to one worker over HTTP: asked for first, resumed where it broke off, verified by its hash.

HEAD tells what the worker has. A file with our hash is there; the rest is sent by one PUT with its range and
the hash of the whole file (worker.md §12, §13), or by several, since a worker refuses a body above its limit.
What may pass is tried again after 1, 2, 4 … 30 s for as long
as bytes get further than ever before, but a worker that does not answer at all only `MOST_UNANSWERED` times;
everything else is a refusal with the worker's words. The state is the
worker's: another controller goes on where this one was killed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

import httpx

from localai_cluster import clock, names
from nodes.placement import deadlines
from nodes.registry.http_client import reason_of
from nodes.staging.hashes import CHUNK, hash_of
from nodes.staging.keys import path_of
from nodes.staging.meter import Meter
from nodes.staging.plan import LocalFile
from nodes.staging.source import OpenedFile
from operations.executor.work import retry_delay

_MOST_WORDS = 64 * 1024
"""Bytes of an answer that are read."""
MOST_UNANSWERED = 3
"""Requests in a row without any answer, after which the port counts as unreachable."""
LARGEST_PART = 50 * 2**30
"""Bytes of one PUT: a worker takes no larger body (worker.md §12.3)."""
_TRANSIENT = {
    308: "its worker has only a part of the file",
    408: "its worker did not get the bytes in time",
    416: "its worker has another part of the file",
    503: "its worker is busy or shutting down",
}
"""What may pass, in words."""
_HASH, _TARGET, _SIZE, _PATH = "X-Content-SHA256", "X-Target-SHA256", "X-File-Size", "X-Local-Path"
_NOT_FOR_US = (401, 403)
_FULL = 507
_NO_SPACE = ("no space left", "disk quota exceeded", "not enough space", "insufficient storage")


Result = TypeVar("Result")


class FileRefused(Exception):
    """The worker does not take the file; the text has its words."""

    def __init__(self, file: str, status: int, said: str) -> None:
        words = names.readable(said).strip() or "no reason given"
        super().__init__(f"its worker refused {file}: {words} ({status})")
        full = status == _FULL or any(sign in said.lower() for sign in _NO_SPACE)
        self.of_token = status in _NOT_FOR_US
        """Whether the worker does not know our token."""
        self.of_node = full or self.of_token
        """Whether the node would refuse any other file too."""


class Stalled(Exception):
    """Nothing has moved for too long."""


class Unreachable(Exception):
    """The worker's file port did not answer several times in a row."""


@dataclass(frozen=True)
class Remote:
    """What the worker has under a key, as its headers say."""

    status: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    path: str = ""

    def has(self, sha256: str) -> bool:
        """Whether it is the whole file with this hash."""
        return self.status == 200 and bool(self.path) and self.sha256 == sha256

    def offset(self, size: int, sha256: str) -> int:
        """Where our file of this size goes on."""
        return self.size if 0 < self.size < size and self.target == sha256 else 0


@dataclass(frozen=True)
class Received:
    """To a PUT."""

    status: int
    body: str

    @property
    def path(self) -> str:
        """Where the worker keeps the file; "" if it does not say."""
        try:
            said = json.loads(self.body)
        except (ValueError, RecursionError):
            return ""
        path = said.get("local_path") if isinstance(said, dict) else None
        return path if isinstance(path, str) and PurePosixPath(path).is_absolute() else ""


class Transfer:
    """One file on its way. `stall` is the time in seconds in which something has to move."""

    def __init__(
        self, client: httpx.AsyncClient, file: LocalFile, key: str, meter: Meter, stall: float
    ) -> None:
        self._client, self._file, self._meter, self._stall = client, file, meter, stall
        self._url = path_of(key)
        self._furthest, self._pauses, self._unanswered = -1, 0, 0
        self._watch: asyncio.Timeout
        self._moved_at = 0.0
        self._hashing_since: float | None = None
        self._reason = "no answer"
        self._seen = Remote()

    async def look(self) -> None:
        """See how much of the file is there, by its size. Raises FileRefused, Stalled and Unreachable."""
        await self._watched(self._look)

    async def bring(self) -> str:
        """Return the file's path on the worker, where it is now.

        Raises FileRefused, Stalled, Unreachable, Changed and OSError.
        """
        return await self._watched(self._bring)

    async def _watched(self, step: Callable[[], Awaitable[Result]]) -> Result:
        try:
            async with asyncio.timeout(self._stall) as self._watch:
                self._moves()
                return await step()
        except TimeoutError:
            if not self._watch.expired():
                raise
            limit = f"{self._stall:g} s"
            raise Stalled(f"{self._file.relative} got no further for {limit} ({self._reason})") from None

    async def _look(self) -> None:
        while True:
            try:
                self._seen = await self._head()
                break
            except httpx.TransportError as error:
                await self._pause(reason_of(error))
        self._meter.finds(self._file.relative, min(self._seen.size, self._file.size))

    async def _bring(self) -> str:
        sha256, stamp = await hash_of(self._file, self._read)
        if not self._seen.has(sha256):
            return await self._send(sha256, stamp)
        self._meter.arrived(self._file.relative)
        return self._seen.path

    async def _send(self, sha256: str, stamp: str) -> str:
        """Attempts, until the file is there."""
        refused: int | None = None
        # One HEAD is enough for the first attempt: a range that is no longer true would be refused.
        seen = self._seen if self._seen.status else None
        while True:
            before = self._furthest
            try:
                there, seen = seen or await self._head(), None
                if there.has(sha256):
                    path = there.path
                    break
                offset = there.offset(self._file.size, sha256)
                # What was refused for its range would be refused again, for as long as something on the way
                # hides what the worker has: then the file is sent from its beginning, without a range.
                ranged = self._file.size > 0 and offset != refused
                answer = await self._put(sha256, stamp, offset if ranged else 0, ranged=ranged)
            except httpx.TransportError as error:
                await self._pause(reason_of(error))
                continue
            if answer.status == 200 and (path := answer.path):
                break
            if answer.status not in _TRANSIENT:
                raise FileRefused(self._file.relative, answer.status, self._without_token(answer.body))
            refused = offset if answer.status == 416 and ranged else None
            if answer.status != 308 or not before < self._furthest < self._file.size:
                await self._pause(f"{_TRANSIENT[answer.status]} ({answer.status})")
        self._meter.arrived(self._file.relative)
        return path

    async def _head(self) -> Remote:
        self._worker_hashes()
        try:
            answer = await self._client.head(self._url)
            self._unanswered = 0
        except httpx.TransportError as error:
            self._unanswered += 1
            if self._unanswered >= MOST_UNANSWERED:
                raise Unreachable(reason_of(error)) from error
            raise
        finally:
            self._worker_answered()
        if answer.status_code in _NOT_FOR_US:
            raise FileRefused(self._file.relative, answer.status_code, "it does not accept our token")
        said = answer.headers
        size = said.get(_SIZE, "")
        return Remote(
            answer.status_code,
            int(size) if size.isascii() and size.isdigit() and len(size) < 20 else 0,
            said.get(_HASH, "").lower(),
            said.get(_TARGET, "").lower(),
            said.get(_PATH, ""),
        )

    async def _put(self, sha256: str, stamp: str, offset: int, *, ranged: bool) -> Received:
        size = self._file.size
        end = min(size, offset + LARGEST_PART) if ranged else size
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - offset),
            _HASH: sha256,
        }
        if ranged:
            headers["Content-Range"] = f"bytes {offset}-{end - 1}/{size}"
        self._meter.starts(self._file.relative, offset)
        source = OpenedFile(self._file, stamp, offset)
        try:
            body = self._pieces(source, offset, end)
            async with self._client.stream("PUT", self._url, content=body, headers=headers) as answer:
                return Received(answer.status_code, await _text(answer))
        finally:
            self._worker_answered()
            source.close()

    async def _pieces(self, source: OpenedFile, at: int, end: int) -> AsyncIterator[bytes]:
        while piece := await source.take(min(CHUNK, end - at)):
            yield piece
            at += len(piece)
            self._meter.sends(self._file.relative, len(piece))
            if at > self._furthest:
                self._furthest, self._pauses = at, 0
                self._moves()
        self._worker_hashes()

    def _without_token(self, text: str) -> str:
        token = self._client.headers.get("Authorization", "").removeprefix("Bearer ")
        return text.replace(token, "…") if token else text

    def _read(self, count: int) -> None:
        self._meter.reads(self._file.relative, count)
        self._moves()

    def _moves(self) -> None:
        """The file has got further than ever before."""
        self._moved_at = clock.monotonic()
        self._until(self._moved_at + self._stall)

    def _worker_hashes(self) -> None:
        """The worker may have to read the whole file before it answers: that time does not count."""
        self._hashing_since = clock.monotonic()
        self._until(self._moved_at + self._stall + deadlines.hashing(self._file.size))

    def _worker_answered(self) -> None:
        if self._hashing_since is not None:
            took = clock.monotonic() - self._hashing_since
            self._moved_at += min(took, deadlines.hashing(self._file.size))
            self._hashing_since = None
            self._until(self._moved_at + self._stall)

    def _until(self, when: float) -> None:
        if not self._watch.expired():
            self._watch.reschedule(when)

    async def _pause(self, reason: str) -> None:
        seconds = retry_delay(self._pauses)
        self._reason, self._pauses = reason, self._pauses + 1
        self._meter.waits(f"{self._file.relative}: {reason}; again in {seconds:.0f} s")
        await asyncio.sleep(seconds)


async def _text(answer: httpx.Response) -> str:
    """The beginning of a stranger's answer."""
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) >= _MOST_WORDS:
            break
    return bytes(body[:_MOST_WORDS]).decode("utf-8", "replace")
