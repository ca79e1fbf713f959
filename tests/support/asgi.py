"""One request to a bare ASGI application, with its body in one message."""

from collections.abc import Iterable
from typing import Any

Headers = Iterable[tuple[bytes, bytes]]


async def exchange(
    application: Any, method: str, path: str, body: bytes, headers: Headers, *, client: str
) -> list[dict[str, Any]]:
    """Return the messages of the answer: its start, then its body."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": list(headers),
        "client": [client, 40000],
    }
    await application(scope, receive, send)
    return sent
