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
    """The message bus could not do that."""

    message = "The message bus could not do that."
    code = "bus_error"


class NoResponders(BusError):
    """No worker listens on that subject."""

    code = "no_responders"


class RequestTimeout(BusError):
    """No reply came in time; the receiver may still be working on it."""

    status = 504
    code = "request_timeout"


class NotConnected(BusError):
    """The bus is not connected; a request under way may or may not have arrived."""

    code = "not_connected"


class PayloadTooLarge(ClusterError):
    """The message is larger than the bus carries."""

    status = 413
    code = "payload_too_large"


@dataclass(frozen=True)
class Message:
    """A received message. `wants_reply` is True for a request and False for a publish."""

    subject: str
    payload: bytes
    wants_reply: bool
    arrived_at: float = field(default_factory=clock.since_boot)
    """Boot-clock time at which the connection received it; it may have waited for its handler since."""


UNQUEUED = 0
"""Limit of a subscription to reports that its handler merges: a queue would have to drop some of a flood."""

Handler = Callable[[Message], Awaitable[bytes | None]]
"""Handles one message; the returned bytes are the reply to a request."""


class Subscription(Protocol):
    """A subscription that survives reconnects until it is closed."""

    async def close(self) -> None:
        """End the subscription: no new message starts a handler, running handlers continue."""


class Bus(Protocol):
    """The connection of one process to the message bus, owned by one event loop."""

    @property
    def connected(self) -> bool:
        """True if a publish would be sent now."""

    @property
    def generation(self) -> int:
        """Number of connections so far: 0 before the first one, incremented at every reconnect."""

    @property
    def connected_since(self) -> float:
        """Start of the current connection, or of the last one, on the monotonic clock."""

    async def wait_connected(self, *, after: int = 0) -> int:
        """Wait for a live connection whose generation is above `after`; return its generation."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish without waiting for delivery. Raise NotConnected or PayloadTooLarge."""

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """Return the reply received within `timeout` seconds, accepted only below `inbox` (`subjects.inbox`).

        Raise NoResponders, RequestTimeout, NotConnected or PayloadTooLarge.
        """

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Call `handler` for each message, at most `limit` calls at a time (1 = sequentially, in order).

        Further messages wait, up to a limit. With `UNQUEUED` none waits or is dropped: the handler, which
        must not wait for anything, gets each one as it arrives. A handler's exception is logged and no reply
        is sent.
        """

    async def close(self) -> None:
        """Accept no new messages, let running handlers finish for a limited time, then disconnect."""
