"""One request to the worker's HTTP server: its headers, its body in pieces, and its answer.

An answer that comes before a large body was read closes the connection. What the client still sends is read
and forgotten for a moment first: a connection that is closed over unread bytes is reset, and the client might
never see the answer.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Scope = dict[str, Any]
PLAIN = "text/plain; charset=utf-8"
SMALL_REST = 256 * 1024
"""Bytes of an unread body that are read, so that the connection can be used again."""
LINGER = 2.0
"""Seconds for which what is left of a larger one is read and forgotten."""


@dataclass(frozen=True)
class Answer:
    """Status, text, content type, and other headers; the text of a HEAD's answer is not sent."""

    status: int
    text: str = ""
    kind: str = PLAIN
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """The request is not carried out; the answer says why."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.answer = Answer(status, f"{text}\n", headers=headers or {})


class Exchange:
    """A request and its answer."""

    def __init__(self, scope: Scope, receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.raw_path: bytes = raw_path(scope)
        self.gone = False
        """Whether the client has left before its body was whole."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._whole = False
        self._unread = _length(scope)

    def header(self, name: bytes) -> str:
        """The first header of this name, "" if there is none."""
        return header(self._scope, name)

    @property
    def length(self) -> int | None:
        """Bytes of the body, None if the client does not say."""
        return _length(self._scope)

    async def piece(self) -> bytes:
        """What has come of the body since; empty at its end, also at the end of a client."""
        while not (self._whole or self.gone):
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                break
            self._whole = not message.get("more_body", False)
            body: bytes = message.get("body", b"")
            self._unread = None if self._unread is None else self._unread - len(body)
            if body:
                return body
        return b""

    async def left(self) -> None:
        """Returns when the client has left; a body that it sends is forgotten."""
        while not self.gone:
            self.gone = (await self._receive())["type"] == "http.disconnect"

    async def answer(self, answer: Answer) -> None:
        """Sends it, and ends the connection if much of the body was not read."""
        body = answer.text.encode()
        headers = {"content-type": answer.kind, "content-length": str(len(body)), **answer.headers}
        if await self._rest_is_read():
            await self.start(answer.status, headers)
            await self.send(body, more=False)
            return
        await self.start(answer.status, headers | {"connection": "close"})
        await self.send(body, more=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                await self._drain()
        await self.send(b"", more=False)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends status and headers."""
        lines = {"cache-control": "no-store", "x-content-type-options": "nosniff", **headers}
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in lines.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def send(self, body: bytes, *, more: bool) -> None:
        """Sends a piece of the answer's body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _rest_is_read(self) -> bool:
        if self._unread is None or self._unread > SMALL_REST:
            return self._whole
        await self._drain()
        return True

    async def _drain(self) -> None:
        while await self.piece():
            pass


def raw_path(scope: Scope) -> bytes:
    """The path as it was sent, without the query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]


def header(scope: Scope, wanted: bytes) -> str:
    """The first header of this name (in lower case), "" if there is none."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted), "")


def _length(scope: Scope) -> int | None:
    """None for a body without an announced length; a request that names neither form has none."""
    if header(scope, b"transfer-encoding"):
        return None
    text = header(scope, b"content-length")
    return int(text) if text.isascii() and text.isdigit() else 0
