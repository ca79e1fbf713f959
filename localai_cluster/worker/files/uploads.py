"""PUT: a file whole, or the part of it that is missing (§12.3).

A second upload of a file waits for the first. It was sent for what its sender saw before, so it removes
nothing any more: a part that does not continue what is there now is a 416, and its sender looks again.
"""

import errno
import json
import logging
from dataclasses import dataclass

from localai_cluster.worker.exchange import Answer, Exchange, Refusal
from localai_cluster.worker.files import disk
from localai_cluster.worker.files.disk import State, Writing
from localai_cluster.worker.files.keys import FilePlace
from localai_cluster.worker.files.path_locks import PathLocks
from localai_cluster.worker.files.ranges import Part, content_range, digest
from localai_cluster.worker.files.threads import Threads

log = logging.getLogger(__name__)

LARGEST_BODY = 50 * 1024**3
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Upload:
    """What a PUT brings: `part` None is the whole file, `target` "" an unknown hash."""

    place: FilePlace
    length: int
    part: Part | None
    target: str


def upload(exchange: Exchange, place: FilePlace) -> Upload:
    """What the headers say. Refusal."""
    length = exchange.length
    if length is None or not exchange.header(b"content-length"):
        raise Refusal(411, "Content-Length is required")
    if length > LARGEST_BODY:
        raise Refusal(413, f"the body is larger than {LARGEST_BODY} bytes: send it in several parts")
    part = content_range(exchange.header(b"content-range"))
    return Upload(place, length, part, digest(exchange.header(b"x-content-sha256")))


class Uploads:
    """Receives files."""

    def __init__(self, threads: Threads, locks: PathLocks) -> None:
        self._threads = threads
        self._locks = locks

    async def receive(self, wanted: Upload, exchange: Exchange) -> Answer:
        """Carries one upload out. Refusal, OSError."""
        async with self._locks.upload(wanted.place.real) as behind:
            if wanted.part is None:
                return await self._whole(wanted, exchange)
            return await self._part(wanted, wanted.part, exchange, behind)

    async def _whole(self, wanted: Upload, exchange: Exchange) -> Answer:
        path, run = wanted.place.real, self._threads.run
        state = await run(disk.look, path)
        await run(disk.make_room, path, wanted.length, state.size)
        writing, complete = await run(Writing, path, 0, ""), False
        try:
            if await self._append(writing, wanted.length, exchange) < wanted.length:
                raise Refusal(400, f"short body: got {writing.size} expected {wanted.length}")
            await self._finish(wanted, writing)
            complete = True
        finally:
            await run(writing.close)
            if not complete:
                await run(disk.remove, path)
        return _received(wanted.place)

    async def _part(self, wanted: Upload, part: Part, exchange: Exchange, behind: bool) -> Answer:
        path, run = wanted.place.real, self._threads.run
        state = await run(disk.look, path)
        given_back = 0
        if part.start == 0 and state.size:
            if await self._is_complete(wanted, part, state):
                return _received(wanted.place)
            if not _continues(wanted, part, state):
                given_back, state = state.size, _only(behind, part, state)
        elif part.start and wanted.target and state.target not in ("", wanted.target):
            _only(behind, part, state)
            await run(disk.remove, path)
            was = f"(was {state.target}, now {wanted.target}); restart from byte 0"
            raise Refusal(409, f"X-Content-SHA256 mismatch with in-progress upload {was}")
        if part.start != state.size:
            raise _elsewhere(part, state)
        await run(disk.make_room, path, part.total - state.size, given_back)
        writing = await run(lambda: Writing(path, state.size, wanted.target, known=state.target))
        try:
            return await self._received_part(wanted, part, writing, exchange)
        finally:
            await run(writing.close)

    async def _received_part(
        self, wanted: Upload, part: Part, writing: Writing, exchange: Exchange
    ) -> Answer:
        got = await self._append(writing, part.length, exchange)
        if got < part.length:
            raise Refusal(400, f"short body: got {got} expected {part.length}")
        if writing.size < part.total:
            await self._threads.run(writing.sync)
            there = {"range": f"bytes=0-{writing.size - 1}", "x-file-size": str(writing.size)}
            return Answer(308, headers=there)
        await self._finish(wanted, writing)
        return _received(wanted.place)

    async def _is_complete(self, wanted: Upload, part: Part, state: State) -> bool:
        """Whether it was received whole and only the end was missing: a kill before the side file."""
        path = wanted.place.real
        if not wanted.target or state.target != wanted.target or state.size != part.total:
            return False
        await self._threads.run(disk.sync, path)
        if await self._threads.hash(disk.hash_file, path, self._threads.stopped) != wanted.target:
            return False
        await self._threads.run(disk.vouch, path, wanted.target)
        return True

    async def _append(self, writing: Writing, most: int, exchange: Exchange) -> int:
        """Writes at most so many bytes of the body; returns how many came."""
        got = 0
        while got < most and (piece := await exchange.piece()):
            piece = piece[: most - got]
            await self._threads.run(writing.append, piece)
            got += len(piece)
        return got

    async def _finish(self, wanted: Upload, writing: Writing) -> None:
        """Vouches for a complete file. Refusal 400 if it is another one, which is removed."""
        path, run = wanted.place.real, self._threads.run
        await run(writing.sync)
        found = await self._threads.hash(writing.digest, self._threads.stopped)
        if wanted.target and found != wanted.target:
            await run(disk.remove, path)
            raise Refusal(400, f"sha256 mismatch: expected {wanted.target} got {found}")
        await run(disk.vouch, path, found)
        log.info("received %s bytes=%d", wanted.place.local, writing.size)


def _continues(wanted: Upload, part: Part, state: State) -> bool:
    """Whether what is there is a beginning of the same file, or the file itself.

    One that is said to be unfinished and is as long as the whole is none: its hash was another one.
    """
    if not wanted.target:
        return False
    return state.size < part.total if state.target == wanted.target else _vouched(wanted, state)


def _vouched(wanted: Upload, state: State) -> bool:
    return not state.target and state.digest == wanted.target


def _only(behind: bool, part: Part, state: State) -> State:
    """The state without the file, which goes, unless another upload went before. Refusal 416."""
    if behind:
        raise _elsewhere(part, state)
    return State()


def _elsewhere(part: Part, state: State) -> Refusal:
    headers = {"content-range": f"bytes */{part.total}", "x-file-size": str(state.size)}
    text = f"Content-Range start {part.start} does not match current file size {state.size}"
    return Refusal(416, text, headers)


def _received(place: FilePlace) -> Answer:
    return Answer(200, json.dumps({"local_path": str(place.local)}), "application/json")


def failed(error: OSError) -> Refusal:
    """What the disk refused, in an answer."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return Refusal(507, f"not enough disk space: {reason}; what was received of a part is kept")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
        return Refusal(400, f"invalid key: {reason}")
    return Refusal(500, f"the file cannot be read or written: {reason}")
