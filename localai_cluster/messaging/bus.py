"""What any carrier of messages promises, and the errors it may raise.

The bus loses messages while it is down and says so at once; it never stores and delivers later. Rows are
the truth, so a caller that sees `generation` rise after a loss asks again or looks at its rows.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from localai_cluster import clock
from localai_cluster.errors import ClusterError, Unavailable
from localai_cluster.messaging.codec import decode, encode

R = TypeVar("R")


class BusError(Unavailable):
    """The message bus could not do that."""

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
    """One message; `wants_reply` tells a request from a publish."""

    subject: str
    payload: bytes
    wants_reply: bool
    arrived_at: float = field(default_factory=clock.since_boot)
    """When it was read from the connection; it may have waited for its handler."""


Handler = Callable[[Message], Awaitable[bytes | None]]
"""Takes one message; the bytes it returns answer a request."""


class Subscription(Protocol):
    """A standing subscription; it survives reconnects until it is closed."""

    async def close(self) -> None:
        """Ends it: no new message starts a handler, running handlers go on."""


class Bus(Protocol):
    """A connection of one process to the bus, owned by one event loop."""

    @property
    def connected(self) -> bool:
        """Whether a publish would leave now."""

    @property
    def generation(self) -> int:
        """How many connections there have been: 0 before the first, one more after every reconnect."""

    @property
    def connected_since(self) -> float:
        """When the present connection began, or the last one; on the monotonic clock."""

    async def wait_connected(self, *, after: int = 0) -> int:
        """Waits for a live connection of a generation above `after`; returns its generation."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Sends and forgets. NotConnected, PayloadTooLarge."""

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """The reply within `timeout` seconds, accepted only below `inbox` (`subjects.inbox`).

        NoResponders, RequestTimeout, NotConnected, PayloadTooLarge.
        """

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Calls `handler` for each message, at most `limit` at a time (1 = one after the other, in order).

        Further messages wait. A handler's exception is logged and answers nothing.
        """

    async def close(self) -> None:
        """Takes no new messages, lets running handlers finish for a while, then disconnects."""


async def ask(bus: Bus, subject: str, request: Any, reply: type[R], timeout: float, *, inbox: str) -> R:
    """Sends the message `request`, decodes the reply. The bus's errors, and DecodeError for a bad reply."""
    return decode(await bus.request(subject, encode(request), timeout, inbox=inbox), reply)
