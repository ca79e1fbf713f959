"""The bus over core NATS: the only module that knows the NATS library.

The library's own reconnecting is off: it stores messages while it is down and gives up for good after
refused credentials. Here one task dials, waits for the loss of the connection, and dials again for as long
as the bus is open; subscriptions are kept on our side and made anew on every connection. What is asked for
while there is no connection fails at once.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from localai_cluster import clock
from localai_cluster.errors import ClusterError, InvalidInput
from localai_cluster.messaging.bus import (
    BusError,
    Handler,
    Message,
    NoResponders,
    NotConnected,
    PayloadTooLarge,
    RequestTimeout,
    Subscription,
)

log = logging.getLogger(__name__)

DIAL_TIMEOUT = 5.0
FLUSH_TIMEOUT = 5
RETRY_FIRST, RETRY_MAX = 0.2, 5.0
REPLY_WAIT = 30.0  # how long an answer waits for the connection that was lost while it was worked out
CLOSE_TIMEOUT = 5.0
OUTBOUND_LIMIT = 8 * 1024 * 1024
INBOUND_LIMIT = 1024  # messages waiting for a handler, per subscription
COMPLAIN_EVERY = 30.0


@dataclass(frozen=True)
class Servers:
    """Where to dial and with what, read from `nats://user:password@host:port[,…]`."""

    urls: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)


def parse_url(text: str) -> Servers:
    """The servers in `text`, credentials taken out (those of the first URL count). InvalidInput."""
    parts = [
        urlsplit(part if "://" in part else f"nats://{part}") for part in text.split(",") if part.strip()
    ]
    if not parts:
        raise InvalidInput("a NATS URL is empty; give nats://user:password@host:4222", field="url")
    urls = []
    for part in parts:
        host = part.netloc.rpartition("@")[2]
        if part.scheme not in ("nats", "tls") or not part.hostname:
            raise InvalidInput("not a NATS URL such as nats://user:password@host:4222", field="url")
        urls.append(f"{part.scheme}://{host}")
    user, password = unquote(parts[0].username or ""), parts[0].password
    if user and password is None:
        return Servers(tuple(urls), token=user)
    return Servers(tuple(urls), user=user, password=unquote(password or ""))


class NatsBus:
    """A Bus. `start` begins to dial and returns at once; everything else works, or says NotConnected,
    meanwhile."""

    def __init__(self, url: str, *, name: str) -> None:
        self._servers = parse_url(url)
        self._name = name
        self._link: _Link | None = None
        self._generation = 0
        self._connected_since = -math.inf
        self._arrived = asyncio.Condition()
        self._wiring = asyncio.Lock()
        self._subscriptions: set[_Standing] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._complaints: dict[str, float] = {}

    def start(self) -> None:
        """Begins to dial. Call it once, inside the event loop that owns this bus."""
        self._keeper = asyncio.create_task(self._keep_connected(), name="nats-keeper")

    @property
    def connected(self) -> bool:
        """Whether a publish would leave now."""
        return self._link is not None and self._link.alive

    @property
    def generation(self) -> int:
        """How many connections there have been."""
        return self._generation

    @property
    def connected_since(self) -> float:
        """When the present connection began, or the last one; on the monotonic clock."""
        return self._connected_since

    async def wait_connected(self, *, after: int = 0) -> int:
        """Waits for a live connection of a generation above `after`; returns its generation."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.connected and self._generation > after)
            return self._generation

    async def publish(self, subject: str, payload: bytes) -> None:
        """Sends and forgets. NotConnected, PayloadTooLarge."""
        client = self._live().client
        if client.pending_data_size > OUTBOUND_LIMIT:
            raise NotConnected("the bus takes no more messages: too many wait to be sent")
        try:
            await client.publish(subject, payload)
        except nats.errors.Error as error:
            raise translate(error, subject) from error

    async def request(self, subject: str, payload: bytes, timeout: float) -> bytes:
        """The reply within `timeout` seconds. NoResponders, RequestTimeout, NotConnected, PayloadTooLarge."""
        link = self._live()
        reply = asyncio.ensure_future(link.client.request(subject, payload, timeout=timeout))
        ends: set[asyncio.Future[Any]] = {reply, link.gone}
        try:
            # The library would sit out the time limit although the connection that carries the reply is gone.
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise NotConnected(f"the connection was lost while waiting for the reply on {subject}")
            return bytes((await reply).data)
        except nats.errors.Error as error:
            raise translate(error, subject) from error
        finally:
            reply.cancel()

    async def subscribe(
        self, subject: str, handler: Handler, *, limit: int = 64, queue: str = ""
    ) -> Subscription:
        """Calls `handler` for each message, at most `limit` at a time; kept over reconnects until closed."""
        standing = _Standing(self, subject, handler, limit, queue)
        async with self._wiring:
            self._subscriptions.add(standing)
            if self._link is not None and self._link.alive:
                await _quietly(standing.attach(self._link.client))
                await _quietly(self._link.client.flush(FLUSH_TIMEOUT))
        return standing

    async def forget(self, standing: "_Standing") -> None:
        """Ends one subscription."""
        async with self._wiring:
            self._subscriptions.discard(standing)
            await standing.detach()

    async def close(self) -> None:
        """Takes no new messages, lets running handlers finish for 5 s, then disconnects."""
        for standing in list(self._subscriptions):
            await self.forget(standing)
            await standing.finish()
        link = self._link
        if link is not None and link.alive:
            await _quietly(link.client.flush(FLUSH_TIMEOUT))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def answer(self, inbox: str, payload: bytes) -> None:
        """Sends a reply, waiting a while for a lost connection to come back. Failures are logged."""
        try:
            async with asyncio.timeout(REPLY_WAIT):
                await self.wait_connected()
            await self.publish(inbox, payload)
        except (ClusterError, TimeoutError) as error:
            log.warning("a reply was lost: %s", error or "no connection")

    def _live(self) -> "_Link":
        if self._link is None or not self._link.alive:
            raise NotConnected(f"the message bus at {self._where} is not connected")
        return self._link

    @property
    def _where(self) -> str:
        return ", ".join(self._servers.urls)

    async def _keep_connected(self) -> None:
        pause = RETRY_FIRST
        try:
            while True:
                try:
                    connected = await self._live_once()
                except Exception:
                    # Whatever the library does to us, giving up would leave this process deaf for good.
                    log.exception("the message bus client failed; reconnecting")
                    connected = False
                pause = RETRY_FIRST if connected else min(pause * 2, RETRY_MAX)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        finally:
            self._link = None

    async def _live_once(self) -> bool:
        """One connection from dialling to loss; whether there was one."""
        link = await self._dial()
        if link is None:
            return False
        try:
            await self._adopt(link)
            await link.lost()
        finally:
            await link.discard()
        log.warning("lost the connection to the message bus at %s; reconnecting", self._where)
        return True

    async def _dial(self) -> "_Link | None":
        link = _Link(self)
        servers = self._servers
        try:
            async with asyncio.timeout(DIAL_TIMEOUT):
                await link.client.connect(
                    servers=list(servers.urls),
                    name=self._name,
                    user=servers.user or None,
                    password=servers.password if servers.user else None,
                    token=servers.token or None,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=int(DIAL_TIMEOUT),
                    pending_size=0,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    error_cb=link.on_error,
                    closed_cb=link.on_closed,
                )
            return link
        except (nats.errors.Error, OSError) as error:
            reason = "it took no part within 5 s" if isinstance(error, TimeoutError) else str(error)
            self.complain(f"cannot reach the message bus at {self._where}: {reason}; trying again")
        await link.discard()
        return None

    async def _adopt(self, link: "_Link") -> None:
        async with self._wiring:
            for standing in self._subscriptions:
                await _quietly(standing.attach(link.client))
            await _quietly(link.client.flush(FLUSH_TIMEOUT))
            self._link, self._connected_since = link, clock.monotonic()
        async with self._arrived:
            self._generation += 1
            self._arrived.notify_all()
        log.info("connected to the message bus at %s", self._where)

    def complain(self, text: str) -> None:
        """Logs a warning, the same text at most every 30 s."""
        now = clock.monotonic()
        if now - self._complaints.get(text, -COMPLAIN_EVERY) >= COMPLAIN_EVERY:
            self._complaints = {t: at for t, at in self._complaints.items() if now - at < COMPLAIN_EVERY}
            self._complaints[text] = now
            log.warning("%s", text)


class _Link:
    """One connection, from dialling to its loss; never dialled twice."""

    def __init__(self, bus: NatsBus) -> None:
        self.client = Client()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus = bus

    @property
    def alive(self) -> bool:
        return not self.gone.done() and self.client.is_connected

    async def on_closed(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def on_error(self, error: Exception) -> None:
        if self.client.is_connected:
            self._bus.complain(f"message bus: {error}")

    async def lost(self) -> None:
        """Returns when the connection is gone; looks every second, as the library may hang while closing."""
        while self.alive:
            await asyncio.wait({self.gone}, timeout=1.0)

    async def discard(self) -> None:
        await self.on_closed()
        try:
            async with asyncio.timeout(2.0):
                await self.client.close()
        except Exception as error:
            log.debug("closing a lost connection: %s", error)


class _Standing:
    """One subscription as its owner sees it, whatever connection carries it at the moment."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler, limit: int, queue: str) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._queue = queue
        self._slots = asyncio.Semaphore(limit)
        self._running: set[asyncio.Task[None]] = set()
        self._carrier: NatsSubscription | None = None

    async def attach(self, client: Client) -> None:
        self._carrier = await client.subscribe(
            self._subject, queue=self._queue, cb=self._receive, pending_msgs_limit=INBOUND_LIMIT
        )
        # Known to the server before the caller goes on: a request sent a moment later finds us.
        await _quietly(client.flush(FLUSH_TIMEOUT))

    async def detach(self) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            drain: Callable[[], Coroutine[Any, Any, None]] = carrier.drain
            await _quietly(drain())

    async def close(self) -> None:
        await self._bus.forget(self)

    async def finish(self) -> None:
        """Waits for running handlers, then cancels them."""
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_TIMEOUT)
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _receive(self, message: Msg) -> None:
        await self._slots.acquire()
        task = asyncio.create_task(self._handle(message))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _handle(self, message: Msg) -> None:
        try:
            answer = await self._handler(Message(message.subject, bytes(message.data), bool(message.reply)))
            if answer is not None and message.reply:
                await self._bus.answer(message.reply, answer)
        except Exception:
            log.exception("the handler of %s failed", self._subject)
        finally:
            self._slots.release()


def translate(error: nats.errors.Error, subject: str) -> ClusterError:
    """Our error for the library's."""
    match error:
        case nats.errors.NoRespondersError():
            return NoResponders(f"nobody listens on {subject}")
        case nats.errors.TimeoutError():
            return RequestTimeout(f"no reply on {subject} in time")
        case nats.errors.MaxPayloadError():
            return PayloadTooLarge(f"the message on {subject} is larger than the bus carries")
        case nats.errors.BadSubjectError():
            return InvalidInput(f"not a subject: {subject!r}")
        case nats.errors.ConnectionClosedError() | nats.errors.OutboundBufferLimitError():
            return NotConnected("the message bus is not connected")
    return BusError(str(error))


async def _quietly(step: Coroutine[Any, Any, None]) -> None:
    """Runs one step on a connection that may just be dying: the next connection repeats it."""
    try:
        async with asyncio.timeout(FLUSH_TIMEOUT):
            await step
    except nats.errors.BadSubjectError as error:
        log.warning("message bus: %s", error)
    except (nats.errors.Error, OSError) as error:
        log.debug("message bus: %s", error)
