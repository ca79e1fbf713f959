"""One request to a bare ASGI application, with its body in one message."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

Headers = Iterable[tuple[bytes, bytes]]
CLIENT = "192.0.2.7"


def scope_of(method: str, path: str, headers: Headers, client: str = CLIENT) -> dict[str, Any]:
    """Return the scope of a request from the address `client`."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers),
        "client": (client, 40000),
    }


def body_then(left: asyncio.Event, body: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return a `receive` that gives the body, and the client's disconnect once it has left."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    return receive


async def exchange(
    application: Any,
    method: str,
    path: str,
    body: bytes,
    headers: Headers,
    *,
    client: str = CLIENT,
    leave: asyncio.Event | None = None,
) -> list[dict[str, Any]]:
    """Return the messages of the answer: its start, then its body. `leave` makes the client disconnect."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    receive = body_then(leave or asyncio.Event(), body)
    await application(scope_of(method, path, headers, client), receive, send)
    return sent
