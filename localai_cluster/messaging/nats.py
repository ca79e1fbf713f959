"""The bus over core NATS; with `link.py` the only place that knows the NATS library.

The library's own reconnecting is off: it stores messages while it is down and gives up for good after
refused credentials. Here one task dials, waits for the loss of the connection, and dials again for as long
as the bus is open; subscriptions are kept on our side and made again on every connection. What is asked for
while there is no connection fails at once.

New credentials (`use`) replace the connection before the old one is closed. Both belong to one queue group
for a moment, so each message reaches exactly one of them. A connection that was lost is followed by a new
group: the server may believe in the old one for minutes, and would send it a share of the messages.
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

from localai_cluster import clock, points
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
from localai_cluster.messaging.link import FLUSH_TIMEOUT, Link, quietly, refused
from localai_cluster.messaging.servers import Servers

log = logging.getLogger(__name__)

RETRY_FIRST, RETRY_MAX = 0.2, 5.0
REPLY_WAIT = 30.0  # how long an answer waits for the connection that was lost while it was worked out
CLOSE_TIMEOUT = 5.0
OUTBOUND_LIMIT = 8 * 1024 * 1024
INBOUND_LIMIT = 1024  # messages waiting for a handler, per subscription
COMPLAIN_EVERY = 30.0


class NatsBus:
    """A Bus. `start` begins to dial and returns at once; everything else works, or says NotConnected,
    meanwhile.

    Without servers it does not connect until `use` names some. `on_refused` is called whenever a server does
    not accept the credentials. Without `echo` it does not hear what it says itself.
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
        self._changed = asyncio.Event()
        self._link: Link | None = None
        self._group = ""
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

    def use(self, servers: Servers | None) -> None:
        """From now on dials these, and moves there without losing a message; None closes the connection."""
        self._servers = servers
        self._changed.set()

    @property
    def connected(self) -> bool:
        """Whether a publish would leave now."""
        return self._link is not None and self._link.alive

    @property
    def generation(self) -> int:
        """How many connections there have been, each the first after a loss."""
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
            await points.left(client.flush)
        except nats.errors.Error as error:
            raise translate(error, subject) from error

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """The reply within `timeout` seconds. NoResponders, RequestTimeout, NotConnected, PayloadTooLarge."""
        try:
            reply = await self._live().request(subject, payload, inbox, timeout)
        except nats.errors.Error as error:
            raise translate(error, subject) from error
        if reply is None:
            raise NotConnected(f"the connection was lost while waiting for the reply on {subject}")
        return reply

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Calls `handler` for each message, at most `limit` at a time; kept over reconnects until closed."""
        standing = _Standing(self, subject, handler, limit)
        async with self._wiring:
            self._subscriptions.add(standing)
            if self._link is not None and self._link.alive:
                await quietly(standing.attach(self._link.client, self._group))
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
            await quietly(link.client.flush(FLUSH_TIMEOUT))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def answer(self, inbox: str, payload: bytes) -> None:
        """Sends a reply, waiting a while for a lost connection to come back. Failures are logged."""
        try:
            async with asyncio.timeout(REPLY_WAIT):
                await self.wait_connected()
            with points.told("bus.reply"):
                await self.publish(inbox, payload)
        except (ClusterError, TimeoutError) as error:
            log.warning("a reply was lost: %s", error or "no connection")

    def complain(self, text: str) -> None:
        """Logs a warning, the same text at most every 30 s."""
        now = clock.monotonic()
        if now - self._complaints.get(text, -COMPLAIN_EVERY) >= COMPLAIN_EVERY:
            self._complaints = {t: at for t, at in self._complaints.items() if now - at < COMPLAIN_EVERY}
            self._complaints[text] = now
            log.warning("%s", text)

    def _live(self) -> Link:
        if self._link is None or not self._link.alive:
            raise NotConnected(f"the message bus at {self._where} is not connected")
        return self._link

    @property
    def _where(self) -> str:
        return ", ".join(self._servers.urls) if self._servers else "an unknown address"

    async def _keep_connected(self) -> None:
        pause = RETRY_FIRST
        try:
            while True:
                try:
                    connected = await self._live_once()
                except Exception:
                    # Any failure of the library: giving up would leave this process deaf for good.
                    log.exception("the message bus client failed; reconnecting")
                    connected = False
                pause = RETRY_FIRST if connected else min(pause * 2, RETRY_MAX)
                await self._changed_within(pause * random.uniform(0.8, 1.2) if self._servers else None)
        finally:
            self._link = None

    async def _changed_within(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _live_once(self) -> bool:
        """From dialling to the loss of the connection or of its successor; whether there was one."""
        self._changed.clear()
        link = await self._dial()
        if link is None:
            return False
        try:
            self._group = secrets.token_hex(8)
            await self._adopt(link)
            await self._announce()
            while await self._until_changed(link):
                self._changed.clear()
                if self._servers is None:
                    log.info("left the message bus")
                    return True
                successor = await self._dial()
                if successor is None:
                    asyncio.get_running_loop().call_later(RETRY_MAX, self._changed.set)
                    continue
                former, link = link, successor
                await self._adopt(link)
                await former.discard()
                log.info("continues on the message bus with new credentials")
        finally:
            await link.discard()
        log.warning("lost the connection to the message bus at %s; reconnecting", self._where)
        return True

    async def _until_changed(self, link: Link) -> bool:
        """Waits for the loss of `link` (False) or for other servers to use (True)."""
        waits = {asyncio.create_task(link.lost()), asyncio.create_task(self._changed.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return link.alive

    async def _dial(self) -> Link | None:
        if self._servers is None:
            return None
        link = Link(self.complain)
        try:
            await link.dial(self._servers, self._name, echo=self._echo)
            return link
        except (nats.errors.Error, OSError) as error:
            self.complain(f"cannot reach the message bus at {self._where}: {_reason(error)}; trying again")
            if refused(error):
                self._on_refused()
        await link.discard()
        return None

    async def _adopt(self, link: Link) -> None:
        """Moves all subscriptions to `link`."""
        async with self._wiring:
            former = [await standing.attach(link.client, self._group) for standing in self._subscriptions]
            await quietly(link.client.flush(FLUSH_TIMEOUT))
            self._link = link
            for carrier in former:
                if carrier is not None:
                    await quietly(_drained(carrier))

    async def _announce(self) -> None:
        self._connected_since = clock.monotonic()
        async with self._arrived:
            self._generation += 1
            self._arrived.notify_all()
        log.info("connected to the message bus at %s", self._where)


class _Standing:
    """One subscription as its owner sees it, on any connection."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler, limit: int) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._slots = asyncio.Semaphore(limit)
        # Ours, not the library's: what has arrived outlives the connection that brought it.
        self._arrived: asyncio.Queue[tuple[Message, str]] = asyncio.Queue(INBOUND_LIMIT)
        self._running: set[asyncio.Task[None]] = set()
        self._carrier: NatsSubscription | None = None
        self._dispatcher = asyncio.create_task(self._dispatch(), name=f"dispatch {subject}")
        self._ending: asyncio.Task[None] | None = None

    async def attach(self, client: Client, group: str) -> NatsSubscription | None:
        """Subscribes on this connection; answers the former subscription."""
        former, self._carrier = self._carrier, None
        await quietly(self._subscribe(client, group))
        return former

    async def _subscribe(self, client: Client, group: str) -> None:
        self._carrier = await client.subscribe(self._subject, queue=group, cb=self._receive)
        # Known to the server before the caller goes on: a request sent a moment later finds us.
        await client.flush(FLUSH_TIMEOUT)

    async def detach(self) -> None:
        """Receives nothing more."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            await quietly(_drained(carrier))

    async def close(self) -> None:
        """Ends the subscription; handlers of what has arrived go on."""
        await self._bus.forget(self)
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self._arrived.join()
        self._dispatcher.cancel()

    async def finish(self) -> None:
        """Waits a while for what has arrived to be handled, then cancels the handlers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._arrived.join()
        self._dispatcher.cancel()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(self._dispatcher, *self._running, return_exceptions=True)

    async def _receive(self, message: Msg) -> None:
        try:
            arrived = Message(message.subject, bytes(message.data), bool(message.reply))
            self._arrived.put_nowait((arrived, message.reply))
        except asyncio.QueueFull:
            self._bus.complain(f"message bus: too many messages wait on {self._subject}; one was dropped")

    async def _dispatch(self) -> None:
        while True:
            await self._slots.acquire()
            message, inbox = await self._arrived.get()
            task = asyncio.create_task(self._handle(message, inbox))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _handle(self, message: Message, inbox: str) -> None:
        try:
            answer = await self._handler(message)
            if answer is not None and inbox:
                await self._bus.answer(inbox, answer)
        except Exception:
            log.exception("the handler of %s failed", self._subject)
        finally:
            self._slots.release()
            self._arrived.task_done()


async def _drained(carrier: NatsSubscription) -> None:
    drain: Callable[[], Coroutine[Any, Any, None]] = carrier.drain
    await drain()


async def complaint(servers: Servers) -> str:
    """What is wrong with these servers or credentials, tried once; "" if nothing is."""
    link = Link(lambda text: None)
    try:
        await link.dial(servers, "check")
    except (nats.errors.Error, OSError) as error:
        return _reason(error)
    finally:
        await link.discard()
    return ""


def _reason(error: Exception) -> str:
    return "no connection within 5 s" if isinstance(error, TimeoutError) else str(error)


def translate(error: nats.errors.Error, subject: str) -> ClusterError:
    """Our error for the library's."""
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
