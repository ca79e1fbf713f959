"""A worker's HTTP server in its own thread, real or scripted, for the web process that reads it."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx

from localai_cluster.kit import clock
from localai_cluster.kit.connections import serving
from localai_cluster.kit.outbound import Outbound
from localai_cluster.worker.download import Downloads
from localai_cluster.worker.files.fetches import Fetches
from localai_cluster.worker.files.keys import Folders
from localai_cluster.worker.files.routes import FileServer
from localai_cluster.worker.http_server import WorkerApplication
from localai_cluster.worker.log_rings import LogLine, LogRings
from localai_cluster.worker.prefetch import refuse_served
from localai_cluster.worker.source_files import Throttle

T = TypeVar("T")
ENGINE_TOKEN = "7" * 64
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Coroutine[Any, Any, None]]


def fetches(outbound: Outbound | None = None, hub: str = "https://hub.invalid") -> Fetches:
    """Return the fetch service; without `outbound` it connects to public addresses only."""
    downloads = Downloads(httpx.AsyncClient(), refuse_served, Throttle(0))
    return Fetches(downloads, outbound or Outbound(), hub)


class Served:
    """The server at `address`; `rings` and `folders` belong to the real server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.rings = LogRings()
        self.home = TemporaryDirectory(prefix="worker-")
        self.folders = Folders.of_worker(Path(self.home.name, "models"), Path(self.home.name), ())
        self.requests: list[bytes] = []
        self._loop = loop

    def prints(self, key: str, *texts: str, stream: str = "stdout") -> None:
        """Let the engine of `key` print lines."""

        async def append() -> None:
            for text in texts:
                self.rings.append(key, LogLine(clock.now(), stream, text))

        asyncio.run_coroutine_threadsafe(append(), self._loop).result(60)


@contextmanager
def worker(script: Script | None = None, fetching: Fetches | None = None) -> Iterator[Served]:
    """Run the real server, or one that answers each connection by `script`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    served, stop, begun = Served(loop), asyncio.Event(), threading.Event()

    token = ENGINE_TOKEN

    async def real() -> None:
        files = FileServer(served.folders, fetching or fetches())
        application = WorkerApplication(lambda: "", served.rings, files, lambda: token, "")
        async with files.running(), serving(served.listener, application):
            begun.set()
            await stop.wait()

    async def scripted() -> None:
        assert script is not None

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                served.requests.append(head := await reader.readuntil(b"\r\n\r\n"))
                await script(reader, writer, head)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(answer, sock=served.listener)
        begun.set()
        await stop.wait()
        server.close()

    running = asyncio.run_coroutine_threadsafe(scripted() if script else real(), loop)
    begun.wait(60)
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(stop.set)
        running.result(60)
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        served.home.cleanup()


async def _end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def answers(status: str, body: bytes, *headers: str) -> Script:
    """Return a script that sends one HTTP answer to every request."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", "")
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return script


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    """Send no answer."""
    await reader.read()


async def trickling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    """Send an endless answer, one byte at a time."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n[")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)
