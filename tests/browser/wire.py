"""A TCP proxy in front of a web process that can be cut, stilled, slowed and restored.

So that a cut socket is a real one: the browser's own connections end or fall silent, all that it holds open.
It runs in a thread of its own, because the test's thread belongs to Playwright's loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

CHUNK = 64 * 1024
HOST = "127.0.0.1"


class Wire:
    """A line to `target`, a port of this machine; `port` is its own end. A context manager."""

    def __init__(self, target: int, port: int = 0) -> None:
        self.target, self.port = target, port
        self.delay = 0.0
        """Seconds that every piece waits, each way."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._carriers: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()

    @property
    def url(self) -> str:
        """Where a browser goes."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._cut())
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """Ends every connection and refuses new ones."""
        self._do(self._cut())

    def restore(self) -> None:
        """Takes connections again, at the same port, and lets what was stilled flow."""
        self._do(self._listen())

    def still(self) -> None:
        """Keeps connections, lets nothing through: a network that says nothing about its end."""
        self._do(self._still())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._open.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _still(self) -> None:
        self._open.clear()

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links):
            link.transport.abort()

    async def _end(self) -> None:
        self._open.set()
        await asyncio.sleep(0.05)  # a connection that was accepted just before the server closed
        while self._carriers:
            for link in list(self._links):
                link.transport.abort()
            await asyncio.wait(self._carriers, timeout=0.1)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        carrier = self._loop.create_task(self._carry(reader, writer))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            self._links.discard(writer)
            return
        self._links.add(far_writer)
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._links -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK):
                await self._open.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(piece)
                await writer.drain()
        writer.transport.abort() if reader.exception() else writer.close()
