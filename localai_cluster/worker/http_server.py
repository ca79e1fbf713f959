"""The worker's HTTP routes: open probes, files, engine output and metrics (worker.md §12).

An ASGI application, which `kit.connections` serves. The control plane reads and writes files (`files/`) and
reads output with the token that this worker sends in its registration. A stock frontend uses the registration
token, which every joining machine has. The same token opens the metrics (`/metrics`). The operator may
configure a second token for scrapers, which opens only the metrics.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any
from urllib.parse import unquote

from localai_cluster.kit import cancellation
from localai_cluster.metrics import registries
from localai_cluster.worker.exchange import PLAIN_CONTENT_TYPE, Answer, Exchange, Scope, header, raw_path
from localai_cluster.worker.files.routes import FileServer
from localai_cluster.worker.log_rings import LogLine, LogRings

LOGS_PATH = "/v1/backend-logs"
METRICS_PATH = "/metrics"
MAX_LOG_FOLLOWERS = 64
"""Maximum number of clients that follow output at the same time."""
TOKEN_CHANGED_CLOSE_CODE = 1008
"""Close code of a websocket whose token is no longer valid: a violation of policy (RFC 6455)."""
WRITE_TIMEOUT = 30.0
"""Seconds within which a client must accept a message (§12.7)."""


@dataclass(eq=False, repr=False)
class WorkerApplication:
    """The ASGI application of the worker.

    `problem` returns the reason why the worker is not ready, "" if it is. `token` returns the token that
    opens all routes. `scraper` is a token that opens only the metrics; if it is empty, only `token` opens
    them.
    """

    problem: Callable[[], str]
    rings: LogRings
    files: FileServer
    token: Callable[[], str]
    scraper: str
    _readers: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Handle one request or websocket."""
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        if self.files.serves(exchange.raw_path):
            await self.files(exchange, _is_authorized(scope, [self.token()]))
        else:
            await exchange.answer(self._answer(scope))

    def _answer(self, scope: Scope) -> Answer:
        path, method = scope["path"], scope["method"]
        if path in ("/healthz", "/readyz"):
            problem = self.problem() if path == "/readyz" else ""
            if method not in ("GET", "HEAD"):
                return Answer(405, "method not allowed")
            return Answer(503, f"not ready: {problem}") if problem else Answer(200, "ok")
        name = _log_name(scope)
        if name is None and path != METRICS_PATH:
            return Answer(404, "not found")
        if method != "GET":
            return Answer(405, "method not allowed")
        tokens = [self.token()] if name is not None else [self.token(), self.scraper]
        if not _is_authorized(scope, tokens):
            return Answer(401, "unauthorized")
        if name is None:
            return Answer(200, registries.text("worker").decode(), registries.CONTENT_TYPE)
        body = _encode_lines(self.rings.lines(name)) if name else json.dumps(self.rings.models())
        return Answer(200, body, "application/json")

    def close_log_sockets(self) -> None:
        """Close the websockets of clients that follow output, because the token has changed."""
        for tail in self._readers:
            tail.cancel()

    async def _serve_socket(self, scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        refusal = self._socket_refusal(scope)
        if refusal:
            await _refuse_socket(send, *refusal)
            return
        name = (_log_name(scope) or "").removesuffix("/ws")
        # No await since the check of the token: `close_log_sockets` ends this one too.
        tail = asyncio.create_task(self._send_log_lines(name, send))
        self._readers.add(tail)
        disconnect = asyncio.create_task(_wait_disconnected(receive))
        try:
            ended, _ = await asyncio.wait({tail, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._readers.discard(tail)
            await cancellation.cancel_and_wait(tail, disconnect)
        if not tail.cancelled():
            tail.result()  # uvicorn logs an error that is not handled here
        elif tail in ended:
            await send({"type": "websocket.close", "code": TOKEN_CHANGED_CLOSE_CODE})

    def _socket_refusal(self, scope: Scope) -> tuple[int, str] | None:
        name = _log_name(scope)
        if not name or not name.endswith("/ws"):
            return 404, "not found"
        if not _is_authorized(scope, [self.token()]):
            return 401, "unauthorized"
        origin = header(scope, b"origin")
        if origin and origin.lower().partition("://")[2] != header(scope, b"host").lower():
            return 403, "origin not allowed"
        if len(self._readers) >= MAX_LOG_FOLLOWERS:
            return 503, f"{MAX_LOG_FOLLOWERS} readers follow logs of this worker already"
        return None

    async def _send_log_lines(self, name: str, send: Any) -> None:
        """Send the present lines, then each new line, until the client stops reading."""
        await send({"type": "websocket.accept"})
        with contextlib.suppress(TimeoutError), self.rings.follow(name) as cursor:
            lines, _ = cursor.take_unread()
            await _send_text(send, f'{{"type":"initial","lines":{_encode_lines(lines)}}}')
            while True:
                await cursor.news.wait()
                await asyncio.sleep(0)  # waiting on a set event does not yield to other tasks
                lines, missed = cursor.take_unread()
                if missed:
                    text = f"[{missed} lines are missing here: they came faster than they were read]"
                    timestamp = lines[0].timestamp
                    lines.insert(0, LogLine(timestamp, "stderr", text))
                for line in lines:
                    await _send_text(send, f'{{"type":"line","line":{_encode_line(line)}}}')


def _log_name(scope: Scope) -> str | None:
    """Return the decoded path after `/v1/backend-logs/`; "" for the list, None for another route."""
    path = raw_path(scope).decode("latin-1")
    if path == LOGS_PATH:
        return ""
    prefix, encoded_name = path[: len(LOGS_PATH) + 1], path[len(LOGS_PATH) + 1 :]
    return unquote(encoded_name) if prefix == LOGS_PATH + "/" and encoded_name else None


def _is_authorized(scope: Scope, tokens: Iterable[str]) -> bool:
    """Return True if the bearer token is one of `tokens`, in constant time. An empty token never matches."""
    scheme, _, bearer = header(scope, b"authorization").partition(" ")
    offered = bearer.strip().encode("latin-1")
    matches = [hmac.compare_digest(offered, token.encode()) for token in tokens if token]
    return any(matches) and scheme.lower() == "bearer"


def _encode_line(line: LogLine) -> str:
    at = line.timestamp.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return json.dumps({"timestamp": at, "stream": line.stream, "text": line.text}, ensure_ascii=False)


def _encode_lines(lines: Iterable[LogLine]) -> str:
    return f"[{','.join(map(_encode_line, lines))}]"


async def _send_text(send: Any, message: str) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT):
        await send({"type": "websocket.send", "text": message})


async def _wait_disconnected(receive: Any) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass


async def _refuse_socket(send: Any, status: int, text: str) -> None:
    body = text.encode()
    headers = [
        (b"content-type", PLAIN_CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
