"""A listener between the web process and PostgreSQL that counts statements where they pass: at the
connection.

Every Execute and every simple Query message is one statement, from any sender and however prepared.
"""

import asyncio
import contextlib
import threading
from pathlib import Path

_EXECUTE, _QUERY = ord("E"), ord("Q")


class StatementCounter:
    """Forwards a Unix socket to another and counts statements, in its own thread."""

    def __init__(self, folder: Path, server: Path) -> None:
        self.folder = folder
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.statements = 0

    def __enter__(self) -> "StatementCounter":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listen = asyncio.start_unix_server(self._serve, self.folder / ".s.PGSQL.5432")
        self._loop.run_until_complete(listen)
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        left = asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True)
        self._loop.run_until_complete(left)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        down, up = await asyncio.open_unix_connection(self._server / ".s.PGSQL.5432")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._count(reader, up), _copy(down, writer), return_exceptions=True)

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the client's messages; the first message has no type byte."""
        buffer = b""
        begun = False
        while data := await reader.read(65536):
            buffer += data
            while (size := _message_size(buffer, begun)) and len(buffer) >= size:
                self.statements += begun and buffer[0] in (_EXECUTE, _QUERY)
                buffer, begun = buffer[size:], True
            writer.write(data)
        writer.close()


def _message_size(buffer: bytes, begun: bool) -> int:
    """Return the length of the message at the start of the buffer; 0 while unknown."""
    offset = 1 if begun else 0
    if len(buffer) < offset + 4:
        return 0
    return offset + int.from_bytes(buffer[offset : offset + 4])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
