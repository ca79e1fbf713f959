"""A bus with workers that the test plays."""

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
"""A reply that does not arrive."""


async def ask(bus: Bus, subject: str, request: Any, reply: type[R], timeout: float, *, inbox: str) -> R:
    """Return the reply to one request."""
    return decode(await bus.request(subject, encode(request), timeout, inbox=inbox), reply)


@dataclass
class Listening:
    """A subscription that only the test publishes to."""

    handlers: dict[str, Handler]
    subject: str

    async def close(self) -> None:
        """End the subscription."""
        self.handlers.pop(self.subject, None)


class PlayedBus:
    """Workers by subject; other subjects have no listener.

    A reply is a message, bytes, an exception to raise, `NEVER`, or a function that returns one of them. Each
    reply of a list is given once, the last one from then on.
    """

    def __init__(self) -> None:
        self.connected, self.generation, self.connected_since = True, 1, -math.inf
        self.replies: dict[str, Any] = {}
        self.asked: dict[str, list[bytes]] = defaultdict(list)
        self.waits: dict[str, list[float]] = defaultdict(list)
        """Timeouts of the requests in seconds, by subject."""
        self.published: list[tuple[str, bytes]] = []
        self.handlers: dict[str, Handler] = {}

    async def wait_connected(self, *, after: int = 0) -> int:
        """Return at once: the bus is always connected."""
        return self.generation

    async def publish(self, subject: str, payload: bytes) -> None:
        """Record the message for the test."""
        self.published.append((subject, payload))

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """Return the reply that the test has set. W35: a request to a node must use its own inbox."""
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
        """Record a subscription that only the test publishes to."""
        self.handlers[subject] = handler
        return Listening(self.handlers, subject)

    async def close(self) -> None:
        """Do nothing."""

    def stops(self, node_id: Any) -> list[str]:
        """Return the process keys that the node's worker was to stop by `backend.stop`."""
        wanted = messages.subject("backend.stop", str(node_id))
        return [decode(body, m.StopBackend).backend for subject, body in self.published if subject == wanted]
