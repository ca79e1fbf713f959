"""One request to the worker's HTTP server: its headers, its body in pieces, and its response.

A response sent before a large body was read closes the connection. Before closing, the server reads and
discards the client's data for a moment: closing a connection with unread data resets it, and the client might
never see the response.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Scope = dict[str, Any]
PLAIN_CONTENT_TYPE = "text/plain; charset=utf-8"
MAX_DRAINED_BYTES = 256 * 1024
"""Maximum unread bytes of a body that are read so that the connection can be used again."""
LINGER_SECONDS = 2.0
"""Seconds during which the rest of a larger body is read and dropped before the connection closes."""


@dataclass(frozen=True)
class Answer:
    """A response: status, text, content type and further headers. A response to HEAD omits the text."""

    status: int
    text: str = ""
    kind: str = PLAIN_CONTENT_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """An error for a refused request; `answer` is the response, whose text is the reason."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.answer = Answer(status, f"{text}\n", headers=headers or {})


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.raw_path: bytes = raw_path(scope)
        self.is_disconnected = False
        """True if the client disconnected before its body was complete."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_complete = False
        self._unread = _content_length(scope)

    def header(self, name: bytes) -> str:
        """Return the first header with this name, "" if there is none."""
        return header(self._scope, name)

    @property
    def length(self) -> int | None:
        """Bytes of the body; None if the headers do not state them."""
        return _content_length(self._scope)

    async def piece(self) -> bytes:
        """Return the next piece of the body; empty at the end of the body or after a disconnect."""
        while not (self._body_complete or self.is_disconnected):
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
                break
            self._body_complete = not message.get("more_body", False)
            body: bytes = message.get("body", b"")
            self._unread = None if self._unread is None else self._unread - len(body)
            if body:
                return body
        return b""

    async def wait_disconnected(self) -> None:
        """Wait until the client disconnects; drop any body that it sends."""
        while not self.is_disconnected:
            self.is_disconnected = (await self._receive())["type"] == "http.disconnect"

    async def answer(self, answer: Answer) -> None:
        """Send the response. Close the connection if much of the body was not read."""
        body = answer.text.encode()
        headers = {"content-type": answer.kind, "content-length": str(len(body)), **answer.headers}
        if await self._drain_small_body():
            await self.start(answer.status, headers)
            await self.send(body, more=False)
            return
        await self.start(answer.status, headers | {"connection": "close"})
        await self.send(body, more=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._drain_body()
        await self.send(b"", more=False)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        lines = {"cache-control": "no-store", "x-content-type-options": "nosniff", **headers}
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in lines.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def send(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the response's body; wait while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _drain_small_body(self) -> bool:
        if self._unread is None or self._unread > MAX_DRAINED_BYTES:
            return self._body_complete
        await self._drain_body()
        return True

    async def _drain_body(self) -> None:
        while await self.piece():
            pass


def raw_path(scope: Scope) -> bytes:
    """Return the raw path without the query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0]


def header(scope: Scope, lower_name: bytes) -> str:
    """Return the first header with this name (in lower case), "" if there is none."""
    return next(
        (value.decode("latin-1") for name, value in scope["headers"] if name.lower() == lower_name), ""
    )


def _content_length(scope: Scope) -> int | None:
    """Return the bytes of the body; None if the headers do not state them, 0 for no body."""
    if header(scope, b"transfer-encoding"):
        return None
    text = header(scope, b"content-length")
    return int(text) if text.isascii() and text.isdigit() else 0


_CONTENT_RANGE_PATTERN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_RANGE_PATTERN = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Part:
    """The bytes from `start` to `end`, both inclusive, of a file of `total` bytes."""

    start: int
    end: int
    total: int

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.end - self.start + 1


def parse_content_range(text: str) -> Part | None:
    """Parse the `Content-Range` of an upload; return None for a complete file. Raise Refusal 400."""
    if not text:
        return None
    match = _CONTENT_RANGE_PATTERN.fullmatch(text)
    if not match:
        raise Refusal(400, "invalid Content-Range: bytes START-END/TOTAL in numbers is needed")
    part = Part(*map(int, match.groups()))
    if not part.start <= part.end < part.total:
        raise Refusal(400, "invalid Content-Range: START <= END < TOTAL is needed")
    return part


def requested_part(text: str, size: int) -> Part | None:
    """Return the part that the header `Range` requests of a file of `size` bytes; None for the complete file.

    The result is also None if the client requests several ranges. Raise Refusal 416 for a range beyond the
    end.
    """
    match = _RANGE_PATTERN.fullmatch(text)
    if not match or not any(match.groups()):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last), size - 1) if first and last else size - 1
    if first and last and int(last) < start:
        return None
    if start > end:
        raise Refusal(416, f"Range starts behind the end at {size}", {"content-range": f"bytes */{size}"})
    return Part(start, end, size)


def validate_digest(text: str) -> str:
    """Return a valid SHA-256 in lower case; "" for no text. Raise Refusal 400 for an invalid text."""
    if text and not is_digest(text.lower()):
        raise Refusal(400, "invalid X-Content-SHA256: 64 hex digits are needed")
    return text.lower()


def is_digest(text: str) -> bool:
    """Return True if the text is a SHA-256 in lower case, as in side files."""
    return _SHA256_PATTERN.fullmatch(text) is not None
