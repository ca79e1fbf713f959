"""`/ws/operations`: a snapshot of the operations, then every change, in order, without gaps or doubles.

The application around the consumer says who is calling in `scope["principal"]`, and finds out anew when
`scope["principal_again"]` is called; only admins pass. `Watching` is what every socket of this product has in
common: who may open it and how long, and what becomes of the tasks behind it.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.db import Error as DatabaseError
from django.utils.http import is_same_domain

from localai_cluster import cancel
from operations import hearing, stream
from operations.stream import Follower, News

log = logging.getLogger(__name__)

UNAUTHENTICATED, NOT_ALLOWED, NOT_FOUND, FAILED = 4401, 4403, 4404, 1011
ASK_EVERY = 15.0
"""Seconds after which an open socket is asked again who it belongs to."""


class Watching(AsyncWebsocketConsumer):
    """One watching client, told by the tasks that `watches` names; it has nothing to say itself."""

    channel_layer_alias = "none"  # `hearing` serves the whole process
    look_every = stream.LOOK_EVERY
    ask_every = ASK_EVERY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._work: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """However the connection ends, its tasks end with it."""
        try:
            return await super().__call__(scope, receive, send)
        finally:
            if self._work is not None:
                await cancel.end(self._work)

    async def connect(self) -> None:
        """Refuses or accepts; then the tasks begin."""
        refusal = refusal_of(self.scope)
        if refusal:
            await self.refuse(refusal)
            return
        await self.accept()
        await self.begin()
        self._work = asyncio.create_task(self._watch())

    async def begin(self) -> None:
        """What is said first."""

    async def refuse(self, code: int) -> None:
        """Before anything was sent."""
        await self.close(code=code)

    def watches(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs while the socket is open."""
        return [self._ask_again()]

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Clients have nothing to say here."""

    async def operations(self, since: int | None) -> AsyncGenerator[News, None]:
        """First where operations stand, as seen from `since`, then every change, for ever."""
        follower = Follower(self.look_every)
        async with hearing.shared().lent(follower):
            async for news in follower.follow(since):
                yield news

    async def _watch(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self.watches():
                    group.create_task(watch)
        except* Exception as failures:
            log.exception("a socket's task failed; the socket is closed", exc_info=failures)
            await self.close(code=FAILED)

    async def _ask_again(self) -> None:
        """Closes the socket of somebody who may watch no more: signed out, deactivated, key revoked."""
        scope: Mapping[str, Any] = self.scope
        while True:
            await asyncio.sleep(self.ask_every)
            try:
                principal = await scope["principal_again"]()
            except DatabaseError as error:
                log.debug("not known whether a socket may stay open: %s", type(error).__name__)
                continue
            refusal = refusal_of({**scope, "principal": principal})
            if refusal:
                await self.close(code=refusal)
                return


class OperationsConsumer(Watching):
    """One message for each change."""

    def watches(self) -> Sequence[Coroutine[Any, Any, None]]:
        """The operations, and whether the client may still see them."""
        return [*super().watches(), self._tell()]

    async def _tell(self) -> None:
        async with contextlib.aclosing(self.operations(number_in(self.scope, "since"))) as told:
            async for news in told:
                await self._pass_on(news)

    async def _pass_on(self, news: News) -> None:
        if news.whole:
            await self._send({"type": "snapshot", "seq": news.seq, "operations": news.operations})
            return
        for operation in news.operations:
            await self._send({"type": "delta", "seq": operation["seq"], "operation": operation})

    async def _send(self, message: dict[str, Any]) -> None:
        await self.send(text_data=json.dumps(message, separators=(",", ":")))


class NoSuchSocket(AsyncWebsocketConsumer):
    """Every other websocket path."""

    async def connect(self) -> None:
        """Refuses the handshake."""
        await self.close(code=NOT_FOUND)


def refusal_of(scope: Mapping[str, Any]) -> int:
    """The close code for a caller who may not watch operations, 0 for an admin."""
    principal = scope.get("principal")
    if principal is None or not principal.is_authenticated:
        return UNAUTHENTICATED
    return 0 if principal.is_admin and same_origin(scope) else NOT_ALLOWED


def origin_of(scope: Mapping[str, Any]) -> str | None:
    """The page that opens the socket, as its browser says; programs send none."""
    return _header(scope, b"origin")


def same_origin(scope: Mapping[str, Any]) -> bool:
    """Whether the page that opens the socket came from this host, or from one that the operator has named.

    Programs send no Origin.
    """
    origin = origin_of(scope)
    if origin is None or _named(origin):
        return True
    try:
        host = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    return bool(host) and host == (_header(scope, b"host") or "").lower()


def _named(origin: str) -> bool:
    """Whether changes are taken from this page too: a proxy may have put another Host in place of its own."""
    scheme, _, host = origin.lower().partition("://")
    named = (one.partition("://") for one in settings.CSRF_TRUSTED_ORIGINS)
    return any(scheme == one and is_same_domain(host, hosts.lstrip("*")) for one, _, hosts in named)


def _header(scope: Mapping[str, Any], wanted: bytes) -> str | None:
    return next(
        (value.decode("latin-1") for name, value in scope.get("headers", []) if name.lower() == wanted), None
    )


def text_in(scope: Mapping[str, Any], name: str) -> str:
    """A query parameter, "" for none."""
    query: bytes = scope.get("query_string", b"")
    return parse_qs(query.decode("latin-1")).get(name, [""])[0]


def number_in(scope: Mapping[str, Any], name: str) -> int | None:
    """A sequence number in the query; None for none, or for what is no such number."""
    given = text_in(scope, name)
    return int(given) if given.isascii() and given.isdecimal() and len(given) <= 18 else None
