"""Answers of bytes that are no text: a file that is there already, or sound while it is made.

A reader who takes nothing for as long as an engine may say nothing counts as one that has left. What fails
after the first byte cannot be told any more: the connection ends without the end of the body. So ends sound
that is being made when this process stops; before its first byte that is a refusal.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO

from localai_cluster import conf
from localai_cluster.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Header, Send
from nodes.inference.endpoint import until_stop
from nodes.inference.limits import silence
from nodes.inference.streams import Outgoing

PIECE = 256 * 1024

ByteSink = Callable[[bytes], Awaitable[None]]
"""Takes pieces; it may take its time."""


class FileAnswer:
    """A file as the answer. It is closed when it has been sent, or cannot be."""

    def __init__(self, file: IO[bytes], kind: bytes, headers: tuple[Header, ...] = ()) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        self._headers = [(b"content-type", kind), (b"content-length", str(self._size).encode()), *headers]

    async def play(self, send: Send) -> int:
        """Sends it without the end of the body; returns the status."""
        self._file.seek(0)
        with self._file:
            async with _reader(send) as out:
                await out.head(self._headers)
                while piece := await asyncio.to_thread(self._file.read, PIECE):
                    await out.body(piece)
        return 200


class ByteStream:
    """Bytes while they are made. `work` makes them; `headers` are asked for at the first one."""

    def __init__(
        self, work: Callable[[ByteSink], Awaitable[None]], headers: Callable[[], list[Header]]
    ) -> None:
        self._work = work
        self._headers = headers
        self._begun = False

    async def play(self, send: Send) -> int:
        """Sends them without the end of the body; returns the status.

        Raises what kept the answer from beginning, and Disconnected for what ended it too early.
        """
        async with _reader(send) as out:

            async def sink(piece: bytes) -> None:
                if not self._begun:
                    self._begun = True
                    await out.head(self._headers())
                await out.body(piece)

            try:
                with until_stop():
                    await self._work(sink)
            except ClusterError:
                if self._begun:
                    raise wire.Disconnected from None
                raise
        return 200


@contextlib.asynccontextmanager
async def _reader(send: Send) -> AsyncIterator[Outgoing]:
    try:
        async with silence(conf.cluster().stream_stall, math.inf) as limit:
            yield Outgoing(send, limit)
    except TimeoutError:
        raise wire.Disconnected from None
