"""The bus over core NATS; apart from `link.py` the only module that imports the NATS library.

The library's own reconnecting is off: it stores messages while it is disconnected, and it gives up for good
after rejected credentials. Here one task connects, waits for the loss of the connection, and connects again
for as long as the bus is open. `NatsBus` keeps the subscriptions and renews them on every connection. Calls
fail at once while there is no connection.

New credentials (`use`) replace the connection before the old one is closed. Both belong to one queue group
for a moment, so each message reaches exactly one of them. After a lost connection the next one uses a new
group: the server may take the lost one for alive for minutes, and would send it a part of the messages.
"""

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from localai_cluster.kit import backoff, cancellation, clock, failpoints
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.messaging.bus import (
    UNQUEUED,
    BusError,
    ConnectionLost,
    Handler,
    Message,
    NoResponders,
    NotConnected,
    PayloadTooLarge,
    RequestTimeout,
    Subscription,
)
from localai_cluster.messaging.link import FLUSH_TIMEOUT_SECONDS, Link, ignore_loss, is_auth_error
from localai_cluster.messaging.servers import Servers

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 5.0
REPLY_RECONNECT_TIMEOUT = (
    30.0  # seconds that a reply waits for the reconnect if the connection was lost meanwhile
)
CLOSE_TIMEOUT = 5.0
MAX_OUTBOUND_BYTES = 8 * 1024 * 1024
MAX_QUEUED_MESSAGES = 1024  # messages waiting for a handler, per subscription
COMPLAINT_INTERVAL_SECONDS = 30.0


class NatsBus:
    """A Bus over NATS that reconnects by itself.

    `start` begins to dial and returns at once; until a connection exists, publishes and requests raise
    NotConnected. Without servers it does not connect until `use` provides some. `on_refused` is called
    whenever a server rejects the credentials. Without `echo` it does not receive its own messages.
    """

    def __init__(
        self,
        servers: Servers | None,
        *,
        name: str,
        on_refused: Callable[[], None] = lambda: None,
        echo: bool = True,
    ) -> None:
        self._servers = servers
        self._echo = echo
        self._name = name
        self._on_refused = on_refused
        self._servers_changed = asyncio.Event()
        self._link: Link | None = None
        self._group = ""
        self._generation = 0
        self._connected_since = -math.inf
        self._connection_changed = asyncio.Condition()
        self._was_dialed = asyncio.Event()
        self._subscriptions_lock = asyncio.Lock()
        self._subscriptions: set[_Subscription] = set()
        self._connection_task: asyncio.Task[None] | None = None
        self._complaints: dict[str, float] = {}

    def start(self) -> None:
        """Start to connect. Call it once, on the event loop that owns this bus."""
        self._connection_task = asyncio.create_task(self._keep_connected(), name="nats-keeper")

    def use(self, servers: Servers | None) -> None:
        """Switch to these servers without losing a message; None closes the connection."""
        self._servers = servers
        self._servers_changed.set()

    @property
    def connected(self) -> bool:
        """True if a message could be sent now."""
        return self._link is not None and self._link.alive

    @property
    def generation(self) -> int:
        """Number of connections so far; each reconnect increments it."""
        return self._generation

    @property
    def connected_since(self) -> float:
        """Monotonic time at which the current connection, or the last one, was made."""
        return self._connected_since

    async def wait_connected(self, *, after: int = 0) -> int:
        """Wait for a connection whose generation exceeds `after`; return its generation."""
        async with self._connection_changed:
            await self._connection_changed.wait_for(lambda: self.connected and self._generation > after)
            return self._generation

    async def wait_dialed(self, seconds: float) -> None:
        """Wait at most `seconds` until the first attempt to connect has ended.

        If it succeeded, the server has all subscriptions.
        """
        await cancellation.wait_for(self._was_dialed, seconds)

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish without waiting for delivery. Raise NotConnected or PayloadTooLarge."""
        client = self._live_link().client
        if client.pending_data_size > MAX_OUTBOUND_BYTES:
            raise NotConnected("the bus takes no more messages: too many wait to be sent")
        try:
            await client.publish(subject, payload)
            await failpoints.pass_sent(client.flush)
        except nats.errors.Error as error:
            raise translate_nats_error(error, subject) from error

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """Return the reply received within `timeout` seconds.

        Raise NoResponders, RequestTimeout, NotConnected, ConnectionLost or PayloadTooLarge.
        """
        try:
            reply = await self._live_link().request(subject, payload, inbox, timeout)
        except nats.errors.Error as error:
            raise translate_nats_error(error, subject) from error
        if reply is None:
            raise ConnectionLost(f"the connection was lost while waiting for the reply on {subject}")
        return reply

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Call `handler` for each message until closed, at most `limit` calls at a time."""
        subscription = _Subscription(self, subject, handler, limit)
        async with self._subscriptions_lock:
            self._subscriptions.add(subscription)
            if self._link is not None and self._link.alive:
                await ignore_loss(subscription.attach(self._link.client, self._group))
        return subscription

    async def remove_subscription(self, subscription: "_Subscription") -> None:
        """End one subscription."""
        async with self._subscriptions_lock:
            self._subscriptions.discard(subscription)
            await subscription.detach()

    async def close(self) -> None:
        """Accept no new messages, let running handlers finish for 5 s, then disconnect."""
        for subscription in list(self._subscriptions):
            await self.remove_subscription(subscription)
            await subscription.finish()
        link = self._link
        if link is not None and link.alive:
            await ignore_loss(link.client.flush(FLUSH_TIMEOUT_SECONDS))
        if self._connection_task is not None:
            await cancellation.cancel_and_wait(self._connection_task)

    async def answer(self, inbox: str, payload: bytes) -> None:
        """Send a reply. If there is no connection, wait up to `REPLY_RECONNECT_TIMEOUT` seconds for one.

        Log a failure.
        """
        try:
            async with asyncio.timeout(REPLY_RECONNECT_TIMEOUT):
                await self.wait_connected()
            with failpoints.wrap_message("bus.reply"):
                await self.publish(inbox, payload)
        except (ClusterError, TimeoutError) as error:
            log.warning("a reply was lost: %s", error or "no connection")

    def complain(self, text: str) -> None:
        """Log a warning; log the same text at most every `COMPLAINT_INTERVAL_SECONDS` seconds."""
        now = clock.monotonic()
        if now - self._complaints.get(text, -COMPLAINT_INTERVAL_SECONDS) >= COMPLAINT_INTERVAL_SECONDS:
            self._complaints = {
                key: at for key, at in self._complaints.items() if now - at < COMPLAINT_INTERVAL_SECONDS
            }
            self._complaints[text] = now
            log.warning("%s", text)

    def _live_link(self) -> Link:
        if self._link is None or not self._link.alive:
            raise NotConnected(f"the message bus at {self._server_addresses} is not connected")
        return self._link

    @property
    def _server_addresses(self) -> str:
        return ", ".join(self._servers.urls) if self._servers else "an unknown address"

    async def _keep_connected(self) -> None:
        failures = 0
        try:
            while True:
                try:
                    connected = await self._serve_connection()
                except Exception:
                    # Any failure of the library: if the loop ended, no message would arrive any more.
                    log.exception("the message bus client failed; reconnecting")
                    connected = False
                self._was_dialed.set()
                failures = 0 if connected else failures + 1
                pause = backoff.delay(failures + 1, first=FIRST_RETRY_SECONDS, longest=MAX_RETRY_SECONDS)
                limit = pause * random.uniform(0.8, 1.2) if self._servers else None
                await cancellation.wait_for(self._servers_changed, limit)
        finally:
            self._link = None

    async def _serve_connection(self) -> bool:
        """Connect, then wait until this connection and its successors are lost.

        Return False if the first connection could not be made.
        """
        self._servers_changed.clear()
        link = await self._dial_link()
        if link is None:
            return False
        try:
            self._group = secrets.token_hex(8)
            await self._move_subscriptions(link)
            await self._mark_connected()
            while await self._wait_lost_or_changed(link):
                self._servers_changed.clear()
                if self._servers is None:
                    log.info("left the message bus")
                    return True
                successor = await self._dial_link()
                if successor is None:
                    asyncio.get_running_loop().call_later(MAX_RETRY_SECONDS, self._servers_changed.set)
                    continue
                previous, link = link, successor
                await self._move_subscriptions(link)
                await previous.discard()
                log.info("continues on the message bus with new credentials")
        finally:
            await link.discard()
        log.warning("lost the connection to the message bus at %s; reconnecting", self._server_addresses)
        return True

    async def _wait_lost_or_changed(self, link: Link) -> bool:
        """Wait until `link` is lost or `use` was called; return False if the link is lost."""
        tasks = {asyncio.create_task(link.wait_lost()), asyncio.create_task(self._servers_changed.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return link.alive

    async def _dial_link(self) -> Link | None:
        if self._servers is None:
            return None
        link = Link(self.complain)
        try:
            await link.dial(self._servers, self._name, echo=self._echo)
            return link
        except (nats.errors.Error, OSError) as error:
            self.complain(
                f"cannot reach the message bus at {self._server_addresses}: {_error_text(error)};"
                " trying again"
            )
            if is_auth_error(error):
                self._on_refused()
        await link.discard()
        return None

    async def _move_subscriptions(self, link: Link) -> None:
        """Move all subscriptions to `link`."""
        async with self._subscriptions_lock:
            former_carriers = [
                await subscription.attach(link.client, self._group) for subscription in self._subscriptions
            ]
            await ignore_loss(link.client.flush(FLUSH_TIMEOUT_SECONDS))
            self._link = link
            for carrier in former_carriers:
                if carrier is not None:
                    await ignore_loss(_drain_subscription(carrier))

    async def _mark_connected(self) -> None:
        self._connected_since = clock.monotonic()
        async with self._connection_changed:
            self._generation += 1
            self._connection_changed.notify_all()
        self._was_dialed.set()
        log.info("connected to the message bus at %s", self._server_addresses)


class _Subscription:
    """A subscription, independent of the connection that currently carries it."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler, limit: int) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._is_queued = limit != UNQUEUED
        self._slots = asyncio.Semaphore(limit)
        # Not the library's queue: received messages outlive their connection.
        self._received: asyncio.Queue[tuple[Message, str]] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._running: set[asyncio.Task[None]] = set()
        self._carrier: NatsSubscription | None = None
        self._dispatchers: list[asyncio.Task[None]] = []
        if self._is_queued:
            self._dispatchers.append(
                asyncio.create_task(self._dispatch_messages(), name=f"dispatch {subject}")
            )
        self._end_task: asyncio.Task[None] | None = None

    async def attach(self, client: Client, group: str) -> NatsSubscription | None:
        """Subscribe on this connection; return the subscription of the former connection."""
        previous, self._carrier = self._carrier, None
        await ignore_loss(self._subscribe_and_flush(client, group))
        return previous

    async def _subscribe_and_flush(self, client: Client, group: str) -> None:
        self._carrier = await client.subscribe(self._subject, queue=group, cb=self._queue_or_handle)
        # Return only when the server has the subscription, so a request sent right afterwards is received.
        await client.flush(FLUSH_TIMEOUT_SECONDS)

    async def detach(self) -> None:
        """Stop receiving messages."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            await ignore_loss(_drain_subscription(carrier))

    async def close(self) -> None:
        """End the subscription. Messages that were received before are still handled."""
        await self._bus.remove_subscription(self)
        self._end_task = asyncio.create_task(self._end_dispatchers())

    async def _end_dispatchers(self) -> None:
        await self._received.join()
        for task in self._dispatchers:
            task.cancel()

    async def finish(self) -> None:
        """Wait up to `CLOSE_TIMEOUT` seconds for received messages, then cancel the handlers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._received.join()
        await cancellation.cancel_and_wait(*self._dispatchers, *self._running)

    async def _queue_or_handle(self, message: Msg) -> None:
        try:
            received = Message(message.subject, bytes(message.data), bool(message.reply))
            if self._is_queued:
                self._received.put_nowait((received, message.reply))
            else:
                await self._handler(received)
        except asyncio.QueueFull:
            self._bus.complain(f"message bus: too many messages wait on {self._subject}; one was dropped")
        except Exception:
            log.exception("the handler of %s failed", self._subject)

    async def _dispatch_messages(self) -> None:
        while True:
            await self._slots.acquire()
            message, inbox = await self._received.get()
            task = asyncio.create_task(self._handle_message(message, inbox))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _handle_message(self, message: Message, inbox: str) -> None:
        try:
            answer = await self._handler(message)
            if answer is not None and inbox:
                await self._bus.answer(inbox, answer)
        except Exception:
            log.exception("the handler of %s failed", self._subject)
        finally:
            self._slots.release()
            self._received.task_done()


async def _drain_subscription(carrier: NatsSubscription) -> None:
    drain: Callable[[], Coroutine[Any, Any, None]] = carrier.drain
    await drain()


async def connection_problem(servers: Servers) -> str:
    """Connect to these servers once; return the reason of a failure, "" on success."""
    link = Link(lambda text: None)
    try:
        await link.dial(servers, "check")
    except (nats.errors.Error, OSError) as error:
        return _error_text(error)
    finally:
        await link.discard()
    return ""


def _error_text(error: Exception) -> str:
    return "no connection within 5 s" if isinstance(error, TimeoutError) else str(error)


def translate_nats_error(error: nats.errors.Error, subject: str) -> ClusterError:
    """Return the product's error for an error of the NATS library."""
    match error:
        case nats.errors.NoRespondersError():
            return NoResponders(f"no worker listens on {subject}")
        case nats.errors.TimeoutError():
            return RequestTimeout(f"no reply on {subject} in time")
        case nats.errors.MaxPayloadError():
            return PayloadTooLarge(f"the message on {subject} is larger than the bus carries")
        case nats.errors.BadSubjectError():
            return InvalidInput(f"not a subject: {subject!r}")
        case nats.errors.ConnectionClosedError() | nats.errors.OutboundBufferLimitError():
            return NotConnected("the message bus is not connected")
    return BusError(str(error))
