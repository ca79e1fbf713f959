"""Binary responses: an existing file, or audio while the engine produces it.

A client that reads nothing for as long as an engine may be silent counts as disconnected. A failure after the
first byte cannot be reported: the connection ends without the end of the body. A stop of this process ends
running audio in the same way; before the first byte it is an error response.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO

from localai_cluster.kit import conf
from localai_cluster.kit.errors import ClusterError
from localai_cluster.web import wire
from localai_cluster.web.wire import Header, Send
from nodes.gateway.endpoint import until_stop
from nodes.gateway.silence_limit import silence
from nodes.gateway.streams import Outgoing

PIECE = 256 * 1024

ByteSink = Callable[[bytes], Awaitable[None]]
"""Consumer of pieces; it may block the producer."""


class FileAnswer:
    """A file as the response. It is closed when it has been sent, or sending has failed."""

    def __init__(self, file: IO[bytes], kind: bytes, headers: tuple[Header, ...] = ()) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        self._headers = [(b"content-type", kind), (b"content-length", str(self._size).encode()), *headers]

    async def play(self, send: Send) -> int:
        """Send the file without the end of the body; return the status."""
        self._file.seek(0)
        with self._file:
            async with _reader(send) as out:
                await out.head(self._headers)
                while piece := await asyncio.to_thread(self._file.read, PIECE):
                    await out.body(piece)
        return 200


class ByteStream:
    """Bytes sent while `work` produces them. `headers` is called at the first piece."""

    def __init__(
        self, work: Callable[[ByteSink], Awaitable[None]], headers: Callable[[], list[Header]]
    ) -> None:
        self._work = work
        self._headers = headers
        self._has_started = False

    async def play(self, send: Send) -> int:
        """Send the bytes without the end of the body; return the status.

        Before the first byte every error is raised; after it, Disconnected ends the response early.
        """
        async with _reader(send) as out:

            async def sink(piece: bytes) -> None:
                if not self._has_started:
                    self._has_started = True
                    await out.head(self._headers())
                await out.body(piece)

            try:
                with until_stop():
                    await self._work(sink)
            except ClusterError:
                if self._has_started:
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
