"""One connection to a NATS server, from its start to its loss. A `Link` connects only once.

The client chooses the reply subject of a request, `<inbox>.<connection>.<number>`: the inbox belongs to the
node that receives the request, and the node's credentials allow it no other inbox. One wildcard subscription
per connection receives all replies; a reply to a request that has ended is dropped.
"""

import asyncio
import itertools
import logging
import secrets
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import nats.errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg

from localai_cluster.kit import failpoints
from localai_cluster.messaging.servers import Servers

log = logging.getLogger(__name__)

DIAL_TIMEOUT = 5.0
FLUSH_TIMEOUT_SECONDS = 5
_NO_RESPONDERS_STATUS = "503"


class _Client(Client):
    """The NATS library's client with three defects corrected.

    The original continues without encryption if the server does not require TLS. The PING of its `flush`
    overtakes data that was not written yet, so the PONG would prove nothing. It receives nothing more after a
    message with headers or a subject that it cannot decode, which any worker may send.
    """

    must_encrypt = False

    def __init__(self, complain: Callable[[str], None]) -> None:
        super().__init__()
        self._complain = complain

    async def _process_msg(self, *message: Any) -> None:
        try:
            await super()._process_msg(*message)
        except Exception as error:
            self._complain(f"message bus: a message cannot be read ({type(error).__name__}); it was dropped")

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self.must_encrypt:
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)


class Link:
    """One connection to a NATS server. `complain` gets each error that the server reports after the start."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self.client = _Client(complain)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._complain = complain
        self._id = secrets.token_hex(11)
        self._numbers = itertools.count()
        self._pending_replies: dict[str, asyncio.Future[Msg]] = {}
        self._subscribing: asyncio.Future[Any] | None = None

    async def dial(self, servers: Servers, name: str, *, echo: bool = True) -> None:
        """Connect within 5 s. Raise nats.errors.Error or OSError."""
        credentials, tls = servers.credentials, servers.tls
        if tls is None and any(url.startswith("tls:") for url in servers.urls):
            tls = ssl.create_default_context()
        self.client.must_encrypt = tls is not None
        async with asyncio.timeout(DIAL_TIMEOUT):
            await self.client.connect(
                servers=list(servers.urls),
                name=name,
                user=servers.user or None,
                password=servers.password if servers.user else None,
                token=servers.token or None,
                user_jwt_cb=(lambda: bytearray(credentials.jwt.encode())) if credentials else None,
                signature_cb=credentials.sign if credentials else None,
                tls=tls,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=int(DIAL_TIMEOUT),
                pending_size=0,
                no_echo=not echo,
                ping_interval=10,
                max_outstanding_pings=2,
                error_cb=self._on_error,
                closed_cb=self._on_closed,
            )

    @property
    def alive(self) -> bool:
        """True if a message could be sent now."""
        return not self.closed.done() and self.client.is_connected

    async def request(self, subject: str, payload: bytes, inbox: str, timeout: float) -> bytes | None:
        """Return the reply that arrives within `timeout` seconds; None if this connection is lost first.

        Raise nats.errors.Error.
        """
        inbox = f"{inbox}.{self._id}.{next(self._numbers)}"
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._pending_replies[inbox] = reply
        outcomes: set[asyncio.Future[Any]] = {reply, self.closed}
        try:
            if self._subscribing is None or (self._subscribing.done() and self._subscribing.exception()):
                # Only at the first request: a worker sends none and has no permission for this subject.
                replies = self.client.subscribe(f"_INBOX.*.{self._id}.*", cb=self._on_reply)
                self._subscribing = asyncio.ensure_future(replies)
            await asyncio.shield(self._subscribing)  # shared by all requests; none may cancel it
            await self.client.publish(subject, payload, reply=inbox)
            await failpoints.pass_sent(self.client.flush)
            await asyncio.wait(outcomes, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._pending_replies[inbox]
        if not reply.done():
            if self.closed.done():
                return None
            raise nats.errors.TimeoutError
        message = reply.result()
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS_STATUS:
            raise nats.errors.NoRespondersError
        return bytes(message.data)

    async def wait_lost(self) -> None:
        """Wait until the connection is lost; poll every second, because the library may hang as it closes."""
        while self.alive:
            await asyncio.wait({self.closed}, timeout=1.0)

    async def discard(self) -> None:
        """Close the connection."""
        await self._on_closed()
        try:
            async with asyncio.timeout(2.0):
                await self.client.close()
        except Exception as error:
            log.debug("closing a lost connection: %s", error)

    async def _on_reply(self, message: Msg) -> None:
        reply = self._pending_replies.get(message.subject)
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def _on_closed(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    async def _on_error(self, error: Exception) -> None:
        if self.client.is_connected:
            self._complain(f"message bus: {error}")


def is_auth_error(error: Exception) -> bool:
    """Return True if the server rejected the credentials."""
    text = str(error).lower()
    return isinstance(error, nats.errors.AuthorizationError) or any(
        reason in text
        for reason in ("authorization violation", "authentication expired", "authentication revoked")
    )


async def ignore_loss(step: Coroutine[Any, Any, object]) -> None:
    """Run one step on a connection. Ignore the loss of the connection: the next one repeats the step."""
    try:
        async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
            await step
    except nats.errors.BadSubjectError as error:
        log.warning("message bus: %s", error)
    except (nats.errors.Error, OSError) as error:
        log.debug("message bus: %s", error)
