"""A bus whose workers the test plays."""

import asyncio
import math
from collections import defaultdict
from typing import Any

from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import Handler, NoResponders, Subscription
from localai_cluster.messaging.codec import decode, encode

NEVER = object()
"""The reply that does not come."""


class Closed:
    """A subscription that nothing arrives on."""

    async def close(self) -> None:
        """Nothing to end."""


class PlayedBus:
    """Workers by subject; no other subject has a listener.

    A reply is a message, bytes, an exception to raise, `NEVER`, or a function that makes one of them. Of a
    list each is given once, the last one for ever.
    """

    def __init__(self) -> None:
        self.connected, self.generation, self.connected_since = True, 1, -math.inf
        self.replies: dict[str, Any] = {}
        self.asked: dict[str, list[bytes]] = defaultdict(list)
        self.published: list[tuple[str, bytes]] = []

    async def wait_connected(self, *, after: int = 0) -> int:
        """It is connected."""
        return self.generation

    async def publish(self, subject: str, payload: bytes) -> None:
        """Kept for the test to see."""
        self.published.append((subject, payload))

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        """What the test has put there."""
        self.asked[subject].append(payload)
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

    async def subscribe(
        self, subject: str, handler: Handler, *, limit: int = 64, queue: str = ""
    ) -> Subscription:
        """Nothing is ever published to it."""
        return Closed()

    async def close(self) -> None:
        """Nothing to end."""

    def stops(self, node_id: Any) -> list[str]:
        """What the node's worker was asked to stop by `backend.stop`."""
        wanted = subjects.backend_stop(str(node_id))
        return [decode(body, m.StopBackend).backend for subject, body in self.published if subject == wanted]
