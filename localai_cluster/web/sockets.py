"""Base of our websockets: authorization at the handshake and later, and topics of messages.

The surrounding application sets the caller as `scope["principal"]`, and a call of
`scope["current_principal"]` reads the caller again. Only admins are admitted. An open socket checks its
caller periodically, and at once when `recheck_sockets` is called with one of `scope["access_names"]`. A topic
is an endless stream of messages. A socket sends the messages of all its topics as they arrive, and ignores
the client's messages.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.db import Error as DatabaseError
from django.utils.http import is_same_domain

from localai_cluster.kit import cancellation
from localai_cluster.web import envelopes

log = logging.getLogger(__name__)

Scope = Mapping[str, Any]
Topic = Callable[[Scope], AsyncGenerator[str, None]]
"""Function that returns a generator of encoded messages for one client.

The socket closes the generator when it closes.
"""

UNAUTHENTICATED_CODE, NOT_ALLOWED_CODE, NOT_FOUND_CODE, FAILED_CODE = 4401, 4403, 4404, 1011
CHECK_SECONDS = 15.0
"""Seconds between two checks of an open socket's principal, in case a notification is lost."""

MAX_REASON_LENGTH = 120
"""Maximum bytes of the reason in a websocket's close frame."""

_open_sockets: set["LiveSocket"] = set()
"""The open sockets of this process."""


class TopicEnded(Exception):
    """A topic has ended; the socket closes with this code and reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason.encode()[:MAX_REASON_LENGTH].decode(errors="ignore")


def recheck_sockets(access_name: str = "") -> None:
    """Make open sockets with this access name check their principal at once; "" means all sockets."""
    for socket in tuple(_open_sockets):
        scope: Scope = socket.scope
        if not access_name or access_name in scope.get("access_names", ()):
            socket.recheck_requested.set()


class LiveSocket(AsyncWebsocketConsumer):
    """A websocket that sends the messages of `topics` to one client.

    `admit` may raise an error, such as NotFound, before the handshake is accepted. The message of `greeting`
    is sent first. With `explains` the handshake of a refused page of ours is accepted before the close,
    because browsers expose the close code only of an opened socket.
    """

    channel_layer_alias = "none"  # `operations.changes.topics` subscribes once for the whole process

    def __init__(
        self,
        *args: Any,
        topics: Sequence[Topic] = (),
        admit: Callable[[Scope], Awaitable[None]] | None = None,
        greeting: Callable[[Scope], str] | None = None,
        explains: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._topics, self._admit, self._greeting, self._explains = topics, admit, greeting, explains
        self._work: asyncio.Task[None] | None = None
        self.recheck_requested = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """Serve the connection until it ends, then end its tasks."""
        try:
            return await super().__call__(scope, receive, send)
        finally:
            _open_sockets.discard(self)
            if self._work is not None:
                await cancellation.cancel_and_wait(self._work)

    async def connect(self) -> None:
        """Accept or refuse the handshake, then start the topics."""
        scope: Scope = self.scope
        _open_sockets.add(self)
        refusal = close_code_of(scope)
        if refusal:
            if self._explains and origin_of(scope) is not None and same_origin(scope):
                await self.accept()
            await self.close(code=refusal)
            return
        if self._admit is not None and not await self._admitted(self._admit, scope):
            return
        # The access may have ended after it was read and before this socket was registered as open.
        self.recheck_requested.set()
        await self.accept()
        if self._greeting is not None:
            await self.send(text_data=self._greeting(scope))
        self._work = asyncio.create_task(self._run_topics())

    async def _admitted(self, admit: Callable[[Scope], Awaitable[None]], scope: Scope) -> bool:
        """Return True if `admit` accepts the scope. Otherwise refuse the handshake with its error."""
        try:
            await admit(scope)
            return True
        except Exception as raised:
            error = envelopes.translate_error(raised)
            if error is None:
                raise
        if "websocket.http.response" not in scope.get("extensions", {}):
            await self.close(code=4000 + error.status)
            return False
        body = encode_message(envelopes.envelope_of(error)).encode()
        headers = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
        response: tuple[Any, ...] = (
            {"type": "websocket.http.response.start", "status": error.status, "headers": headers},
            {"type": "websocket.http.response.body", "body": body},
        )
        for message in response:
            await self.base_send(message)
        return False

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Ignore the client's messages."""

    async def _run_topics(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._check_principal())
                for topic in self._topics:
                    group.create_task(self._send_topic(topic))
        except* TopicEnded as endings:
            ended = endings.exceptions[0]
            assert isinstance(ended, TopicEnded)
            await self.close(code=ended.code, reason=ended.reason)
        except* Exception as failures:
            log.exception("a socket's task failed; the socket is closed", exc_info=failures)
            await self.close(code=FAILED_CODE)

    async def _send_topic(self, topic: Topic) -> None:
        async with contextlib.aclosing(topic(self.scope)) as messages:
            async for message in messages:
                try:
                    await self.send(text_data=message)
                except OSError:
                    return  # the client has disconnected; the connection then ends this socket

    async def _check_principal(self) -> None:
        """Close the socket when its client loses access: signed out, deactivated, or key revoked."""
        scope: Scope = self.scope
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self.recheck_requested.wait()
            self.recheck_requested.clear()
            try:
                principal = await scope["current_principal"]()
            except DatabaseError as error:
                log.debug("not known whether a socket may stay open: %s", type(error).__name__)
                continue
            refusal = close_code_of({**scope, "principal": principal})
            if refusal:
                await self.close(code=refusal)
                return


class NoSuchSocket(AsyncWebsocketConsumer):
    """The websocket of unknown paths, which refuses every handshake."""

    async def connect(self) -> None:
        """Refuse the handshake."""
        await self.close(code=NOT_FOUND_CODE)


def encode_message(message: Mapping[str, Any]) -> str:
    """Return a message as JSON text."""
    return orjson.dumps(message).decode()


def close_code_of(scope: Scope) -> int:
    """Return the close code for a caller without access; 0 for an admin."""
    principal = scope.get("principal")
    if principal is None or not principal.is_authenticated:
        return UNAUTHENTICATED_CODE
    return 0 if principal.is_admin and same_origin(scope) else NOT_ALLOWED_CODE


def origin_of(scope: Scope) -> str | None:
    """Return the Origin header of the page that opened the socket, None for a program, which sends none."""
    return _header(scope, b"origin")


def same_origin(scope: Scope) -> bool:
    """Return True if the socket's page comes from this host or from a trusted origin of the settings.

    The result is also True for programs, which send no Origin.
    """
    origin = origin_of(scope)
    if origin is None or _is_trusted_origin(origin):
        return True
    try:
        host = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    return bool(host) and host == (_header(scope, b"host") or "").lower()


def _is_trusted_origin(origin: str) -> bool:
    """Return True for a trusted origin of Django's CSRF settings. Behind a proxy the Host may differ."""
    scheme, _, host = origin.lower().partition("://")
    trusted = (entry.partition("://") for entry in settings.CSRF_TRUSTED_ORIGINS)
    return any(
        scheme == trusted_scheme and is_same_domain(host, hosts.lstrip("*"))
        for trusted_scheme, _, hosts in trusted
    )


def _header(scope: Scope, header_name: bytes) -> str | None:
    return next(
        (value.decode("latin-1") for name, value in scope.get("headers", []) if name.lower() == header_name),
        None,
    )


def query_text(scope: Scope, name: str) -> str:
    """Return a text from the query string, "" if it is missing."""
    query: bytes = scope.get("query_string", b"")
    return parse_qs(query.decode("latin-1")).get(name, [""])[0]


def query_number(scope: Scope, name: str) -> int | None:
    """Return a number from the query string, None if it is missing or invalid."""
    text = query_text(scope, name)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
