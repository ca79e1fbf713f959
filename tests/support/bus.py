"""A bus whose workers the test plays."""

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeVar

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Bus, Handler, NoResponders, Subscription
from localai_cluster.messaging.messages import decode, encode

R = TypeVar("R")
NEVER = object()
"""The reply that does not come."""


async def ask(bus: Bus, subject: str, request: Any, reply: type[R], timeout: float, *, inbox: str) -> R:
    """The reply to one request."""
    return decode(await bus.request(subject, encode(request), timeout, inbox=inbox), reply)


@dataclass
class Listening:
    """A subscription that only the test publishes to."""

    handlers: dict[str, Handler]
    subject: str

    async def close(self) -> None:
        """Nobody listens any more."""
        self.handlers.pop(self.subject, None)


class PlayedBus:
    """Workers by subject; no other subject has a listener.

    A reply is a message, bytes, an exception to raise, `NEVER`, or a function that makes one of them. Of a
    list each is given once, the last one forever.
    """

    def __init__(self) -> None:
        self.connected, self.generation, self.connected_since = True, 1, -math.inf
        self.replies: dict[str, Any] = {}
        self.asked: dict[str, list[bytes]] = defaultdict(list)
        self.waits: dict[str, list[float]] = defaultdict(list)
        """For how many seconds each request would have waited."""
        self.published: list[tuple[str, bytes]] = []
        self.handlers: dict[str, Handler] = {}

    async def wait_connected(self, *, after: int = 0) -> int:
        """It is connected."""
        return self.generation

    async def publish(self, subject: str, payload: bytes) -> None:
        """Kept for the test to see."""
        self.published.append((subject, payload))

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """What the test has put there; W35: every request to a node asks for replies in its own inbox."""
        assert subject.startswith(f"nodes.{inbox.removeprefix('_INBOX.')}.")
        self.asked[subject].append(payload)
        self.waits[subject].append(timeout)
        await asyncio.sleep(0)
        reply = self.replies.get(subject, NoResponders(subject))
        if isinstance(reply, list):
            reply = reply.pop(0) if len(reply) > 1 else reply[0]
        while callable(reply):
            reply = reply()
            if asyncio.iscoroutine(reply):
                reply = await reply
        if reply is NEVER:
            await asyncio.Event().wait()
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, bytes) else encode(reply)

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Only the test publishes to it."""
        self.handlers[subject] = handler
        return Listening(self.handlers, subject)

    async def close(self) -> None:
        """Nothing to end."""

    def stops(self, node_id: Any) -> list[str]:
        """What the node's worker was asked to stop by `backend.stop`."""
        wanted = messages.subject("backend.stop", str(node_id))
        return [decode(body, m.StopBackend).backend for subject, body in self.published if subject == wanted]
