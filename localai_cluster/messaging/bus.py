"""The interface of the message bus, and the errors that it raises.

The bus loses messages while it is disconnected and reports this at once; it never stores them for a later
delivery. Database rows hold the state, so a caller that sees `generation` rise after a loss repeats its
request or reads its rows.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError, Unavailable


class BusError(Unavailable):
    """A call to the message bus failed."""

    message = "The message bus could not do that."
    code = "bus_error"


class NoResponders(BusError):
    """No worker listens on the subject of a request."""

    code = "no_responders"


class RequestTimeout(BusError):
    """No reply arrived in time. The receiver may still be processing the request."""

    status = 504
    code = "request_timeout"


class NotConnected(BusError):
    """The bus is not connected: the message was not sent."""

    code = "not_connected"


class ConnectionLost(NotConnected):
    """The connection was lost after the request was sent; it may or may not have arrived."""


class PayloadTooLarge(ClusterError):
    """The message exceeds the maximum size of the bus."""

    status = 413
    code = "payload_too_large"


@dataclass(frozen=True)
class Message:
    """A received message. `wants_reply` is True for a request, False for a published message."""

    subject: str
    payload: bytes
    wants_reply: bool
    arrived_at: float = field(default_factory=clock.since_boot)
    """Boot-clock time at which the connection received the message; its handler may run later."""


UNQUEUED = 0
"""Limit of a subscription without a queue: the handler gets each message as it arrives.

It is for reports that the handler merges. A queue would drop some of them in a flood.
"""

Handler = Callable[[Message], Awaitable[bytes | None]]
"""Handles one message. The returned bytes are the reply to a request; None sends no reply."""


class Subscription(Protocol):
    """A subscription. It survives reconnects and ends with `close`."""

    async def close(self) -> None:
        """End the subscription: start no further handlers, let running handlers continue."""


class Bus(Protocol):
    """The connection of one process to the message bus, used on one event loop."""

    @property
    def connected(self) -> bool:
        """True if a message could be sent now."""

    @property
    def generation(self) -> int:
        """Number of connections so far; each reconnect increments it."""

    @property
    def connected_since(self) -> float:
        """Monotonic time at which the current connection, or the last one, was made."""

    async def wait_connected(self, *, after: int = 0) -> int:
        """Wait for a connection whose generation is above `after`; return its generation."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish without waiting for delivery. Raise NotConnected or PayloadTooLarge."""

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """Send a request and return the reply, which must arrive within `timeout` seconds.

        Only a reply subject below `inbox` (`messages.inbox`) is used. Raise NoResponders, RequestTimeout,
        NotConnected, ConnectionLost or PayloadTooLarge.
        """

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Call `handler` for each message, at most `limit` calls at a time (1 = in order).

        Further messages are queued, up to a limit. With `UNQUEUED` no message is queued or dropped: the
        handler gets each message as it arrives, and must not wait for anything. An exception of the handler
        is logged, and no reply is sent.
        """

    async def close(self) -> None:
        """Accept no new messages, let running handlers end within a limited time, then disconnect."""
