"""`/ws/operations`: a snapshot of the operations, then every change, in order, without gaps or doubles.

The application around the consumer says who is calling in `scope["principal"]`; only admins pass, and that is
decided before the socket is accepted. Changes arrive through the channel layer, which may lose them: a gap in
the numbers, or a look every few seconds, leads back to the rows (`feed.since`).
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import DatabaseError

from operations import feed
from operations.events import GROUP

log = logging.getLogger(__name__)

UNAUTHENTICATED, NOT_ALLOWED, NOT_FOUND = 4401, 4403, 4404
LOOK_EVERY = 5.0
FARTHEST_BACK = 1000
"""Changes that are worth sending one by one; a client that missed more starts anew."""


class OperationsConsumer(AsyncWebsocketConsumer):
    """One watching client; `_seq` is the last change it has seen."""

    groups = [GROUP]
    look_every = LOOK_EVERY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seq = 0
        self._one_at_a_time = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Refuses or accepts; then the state as it is, or what happened since the client's number."""
        refusal = refusal_of(self.scope)
        if refusal:
            await self.close(code=refusal)
            return
        await self.accept()
        async with self._one_at_a_time:
            await self._begin(wanted_since(self.scope))
        self._watch = asyncio.create_task(self._look_again())

    async def disconnect(self, code: int) -> None:
        """Stops looking."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Clients have nothing to say here."""

    async def operation_changed(self, event: dict[str, Any]) -> None:
        """A change from the channel layer: the next is sent, an old one dropped, a gap filled from rows."""
        async with self._one_at_a_time:
            seq = int(event["seq"])
            if seq == self._seq + 1:
                await self._delta(seq, event["operation"])
            elif seq > self._seq:
                await self._catch_up()

    async def _begin(self, since: int | None) -> None:
        if since is not None and 0 <= await _read(feed.current_seq) - since <= FARTHEST_BACK:
            self._seq = since
            await self._catch_up()
            return
        now = await _read(feed.snapshot)
        self._seq = now.seq
        await self._send({"type": "snapshot", "seq": now.seq, "operations": now.operations})

    async def _catch_up(self) -> None:
        missed = await _read(feed.since, self._seq)
        for operation in missed.operations:
            await self._delta(operation["seq"], operation)
        self._seq = max(self._seq, missed.seq)

    async def _delta(self, seq: int, operation: dict[str, Any]) -> None:
        self._seq = seq
        await self._send({"type": "delta", "seq": seq, "operation": operation})

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(self.look_every)
            try:
                async with self._one_at_a_time:
                    await self._catch_up()
            except DatabaseError as error:
                log.warning("operations not read: %s; looking again", type(error).__name__)

    async def _send(self, message: dict[str, Any]) -> None:
        await self.send(text_data=json.dumps(message, separators=(",", ":")))


class NoSuchSocket(AsyncWebsocketConsumer):
    """Every other websocket path."""

    async def connect(self) -> None:
        """Refuses the handshake."""
        await self.close(code=NOT_FOUND)


_read = database_sync_to_async(lambda look, *args: look(*args))


def refusal_of(scope: Mapping[str, Any]) -> int:
    """The close code for a caller who may not watch operations, 0 for an admin."""
    principal = scope.get("principal")
    if principal is None or not principal.is_authenticated:
        return UNAUTHENTICATED
    return 0 if principal.is_admin and same_origin(scope) else NOT_ALLOWED


def same_origin(scope: Mapping[str, Any]) -> bool:
    """Whether the page that opens the socket came from this host; programs send no Origin."""
    headers = {name.lower(): value.decode("latin-1") for name, value in scope.get("headers", [])}
    origin = headers.get(b"origin")
    if origin is None:
        return True
    try:
        return (
            bool(urlsplit(origin).netloc)
            and urlsplit(origin).netloc.lower() == headers.get(b"host", "").lower()
        )
    except ValueError:
        return False


def wanted_since(scope: Mapping[str, Any]) -> int | None:
    """`?since=N`; None for none, or for one that is no sequence number."""
    given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("since", [""])[0]
    return int(given) if given.isascii() and given.isdecimal() and len(given) <= 18 else None
