"""`/healthz` and `/readyz` of the worker, in a minimal HTTP/1.1 server."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

READ_LIMIT = 5.0


async def serve(listener: socket.socket, problem: Callable[[], str]) -> asyncio.Server:
    """Serves on `listener`; `/readyz` answers 503 while `problem` returns one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(READ_LIMIT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(respond(head, problem()))
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    return await asyncio.start_server(answer, sock=listener, limit=16 * 1024)


def respond(head: bytes, problem: str) -> bytes:
    """The whole response to a request head."""
    method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if path not in ("/healthz", "/readyz"):
        status, text = "404 Not Found", "not found"
    elif method not in ("GET", "HEAD"):
        status, text = "405 Method Not Allowed", "method not allowed"
    elif path == "/readyz" and problem:
        status, text = "503 Service Unavailable", f"not ready: {problem}"
    else:
        status, text = "200 OK", "ok"
    body = text.encode()
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: text/plain",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else body)
