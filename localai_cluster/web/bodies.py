"""Request bodies on raw routes: read in two steps, under one memory limit per process.

An unauthenticated caller's body is read up to `FIRST_PART` bytes only. A `Budget` limits the memory of all
bodies of a process while they arrive; the first part of a body is always admitted, so that callers without a
key cannot exhaust the budget of others.
"""

import asyncio
from contextlib import suppress

from localai_cluster.kit.errors import ClusterError, InvalidInput, Unavailable
from localai_cluster.web import wire

FIRST_PART = 16 * 1024
"""Bytes of a body that are read before its sender is confirmed."""
MOST_HELD = 256 * 1024 * 1024
"""Bytes that all bodies of one process hold while they arrive."""
_DISCARD_SECONDS = 5.0
_MOST_DISCARDED = 16 * 1024 * 1024


def too_many_bodies() -> Unavailable:
    """Return the error for a body that arrives while the budget is exceeded."""
    return Unavailable("too many request bodies are arriving at once; try again", retry_after=1)


class Budget:
    """The bytes that bodies hold while they arrive. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @property
    def is_half_used(self) -> bool:
        """Return True if unauthenticated bodies should no longer be read before the caller is confirmed."""
        return self.held * 2 >= self.limit

    def take(self, size: int) -> None:
        """Count `size` bytes more."""
        self.held += size

    def give_back(self, size: int) -> None:
        """Count `size` bytes less."""
        self.held -= size

    @property
    def is_exceeded(self) -> bool:
        """Return True if the bodies hold more than the limit."""
        return self.held > self.limit


shared_budget = Budget(MOST_HELD)
"""The budget of this web process."""


class Body:
    """The body of one request. `release` must be called when its bytes are passed on or dropped.

    Reading raises `too_large` above `limit` bytes, Unavailable when the budget is used up, and
    wire.Disconnected when the client leaves before the end.
    """

    __slots__ = ("_budget", "_limit", "_parts", "_receive", "_scope", "_size", "_too_large", "is_complete")

    def __init__(
        self,
        scope: wire.Scope,
        receive: wire.Receive,
        limit: int = wire.MAX_BODY,
        too_large: ClusterError | None = None,
        budget: Budget = shared_budget,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self._too_large = too_large
        self._budget = budget
        self._parts: list[bytes] = []
        self._size = 0
        self.is_complete = False

    async def receive(self) -> wire.Message:
        """Return the next message of the client, uncounted; for readers that keep the body elsewhere."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_complete = True
            raise wire.Disconnected
        self.is_complete = not message.get("more_body", False)
        return message

    def declared_size(self) -> int | None:
        """Return the size that the headers declare, 0 for no body, None if they declare none."""
        size: int | None = 0
        for name, value in self._scope["headers"]:
            if name == b"transfer-encoding":
                return None
            if name == b"content-length":
                size = int(value) if value.isdigit() and len(value) < 20 else None
        return size

    async def read_first_part(self) -> None:
        """Read to the end or to `FIRST_PART` bytes; read nothing of a body that is declared as longer."""
        declared = self.declared_size()
        if declared is not None and declared > FIRST_PART:
            return
        while not self.is_complete and self._size < FIRST_PART:
            await self._read_part()

    async def read_all(self) -> bytes:
        """Read to the end and return the whole body."""
        while not self.is_complete:
            await self._read_part()
        return b"".join(self._parts)

    async def _read_part(self) -> None:
        message = await self.receive()
        part: bytes = message.get("body", b"")
        self._size += len(part)
        self._budget.take(len(part))
        if self._size > self._limit:
            raise self._too_large or InvalidInput(
                f"the request body exceeds {self._limit} bytes", field="input"
            )
        if self._size > FIRST_PART and self._budget.is_exceeded:
            raise too_many_bodies()
        self._parts.append(part)

    def release(self) -> None:
        """Give the bytes back to the budget."""
        self._budget.give_back(self._size)
        self._parts, self._size = [], 0

    @property
    def is_long(self) -> bool:
        """Return True if more of the body may still arrive than is worth reading for a refusal."""
        if self.is_complete:
            return False
        declared = self.declared_size()
        return declared is None or declared > FIRST_PART

    async def answer(self, send: wire.Send, answer: wire.Answer) -> None:
        """Send a response; if much of the body is unread, which means an error, close the connection.

        Many clients read no response before they have sent the complete body: so the remaining body is
        discarded for a few seconds after the response. For a client over its limit of failures (429) the
        connection is closed at once.
        """
        if not self.is_long:
            await wire.send_answer(send, answer)
            return
        headers = (*answer.headers, (b"connection", b"close"))
        closing_answer = wire.Answer(answer.body, answer.status, headers, answer.kind)
        await wire.send_answer(send, closing_answer, more=answer.status != 429)
        if answer.status != 429:
            with suppress(TimeoutError, wire.Disconnected):
                async with asyncio.timeout(_DISCARD_SECONDS):
                    await self._discard()
            await send({"type": "http.response.body", "body": b""})

    async def _discard(self) -> None:
        discarded = 0
        while not self.is_complete and discarded < _MOST_DISCARDED:
            discarded += len((await self.receive()).get("body", b""))
