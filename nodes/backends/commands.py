"""Commands to one worker over the bus. Each ends in one of the `outcomes`, and soon when the worker is gone.

A reply may take a quarter of an hour, so waiting for it alone would hold an operation hostage to a dead
worker. While a command runs, the worker is asked every few seconds for its list of backends: no listener
twice in a row, or an answer from another process (`instance`), means that the command died with its worker.

Our own connection proves nothing about the worker. When it was lost and found, the command is sent again: our
worker joins the one still running, and a stock worker's commands are idempotent (`contract/nats.md` §4.1).
After a restart of NATS the workers come back one by one, so the lack of a listener counts only once our
connection has lasted for `SETTLED_AFTER` seconds.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, assert_never

from localai_cluster import clock
from localai_cluster.messaging import bus as carrier
from localai_cluster.messaging import messages, subjects
from localai_cluster.messaging.codec import DecodeError, decode, encode
from nodes.backends.outcomes import BusDown, Done, NoResponders, Outcome, Refused, StillRunning, Unreadable

PING_EVERY = 2.0
PING_TIMEOUT = 5.0
LIST_TIMEOUT = 30.0
"""C24."""
RUNNING_TIMEOUT = 10.0
"""C26."""
STOP_TIMEOUT = 10.0
"""C27."""
SETTLED_AFTER = 10.0
"""A worker dials again every 6 seconds at most."""
BUS_WAIT = 5.0
"""How long a command waits for our own connection before it says so."""
_ASK_AGAIN = 0.5
_MISSES = 2

R = TypeVar("R")
T = TypeVar("T")
OnProgress = Callable[[messages.ProgressEvent], Awaitable[None]]
Refusal = Callable[[R], str]
"""Why a reply means "not done"; empty for a success."""


@dataclass(frozen=True)
class Worker:
    """One node's worker, as seen over the bus."""

    bus: carrier.Bus
    node_id: str
    name: str

    async def backends(self, timeout: float = LIST_TIMEOUT) -> Outcome[messages.ListReply]:
        """What is installed, asked once."""
        return await self._ask(
            subjects.backend_list(self.node_id),
            messages.Nothing(),
            messages.ListReply,
            lambda reply: reply.error,
            timeout,
        )

    async def contact(self) -> Outcome[messages.ListReply]:
        """What is installed, asked until it is certain whether the worker is there."""
        since = clock.monotonic()
        while True:
            outcome = await self.backends()
            match outcome:
                case NoResponders() if not self._settled:
                    pass
                case BusDown() if clock.monotonic() - since < BUS_WAIT:
                    pass
                case _:
                    return outcome
            await asyncio.sleep(_ASK_AGAIN)

    async def running(self) -> Outcome[messages.RunningReply]:
        """The engine processes that live there."""
        return await self._ask(
            subjects.models_running(self.node_id),
            messages.Nothing(),
            messages.RunningReply,
            lambda reply: reply.error,
            RUNNING_TIMEOUT,
        )

    async def stop_model(self, process_key: str, address: str) -> Outcome[messages.StopModelReply]:
        """Has the engine process at exactly this address stopped; done means that the key has no process."""
        name, _, _ = process_key.rpartition("#")
        return await self._ask(
            subjects.model_stop(self.node_id),
            messages.StopModelRequest(name, process_key, address),
            messages.StopModelReply,
            lambda reply: "" if reply.terminated else reply.error or "termination not confirmed",
            STOP_TIMEOUT,
        )

    async def stop(self, process_key: str) -> None:
        """Asks for one engine process to be stopped; a `backend.stop` has no reply."""
        with contextlib.suppress(carrier.BusError):
            await self.bus.publish(
                subjects.backend_stop(self.node_id), encode(messages.StopBackend(process_key))
            )

    async def install(
        self, request: messages.InstallRequest, *, timeout: float, on_progress: OnProgress | None = None
    ) -> Outcome[messages.InstallReply]:
        """Sends `backend.install` and waits for its reply, up to `timeout` seconds."""
        async with self._progress(request.op_id, on_progress):
            return await self._command(
                subjects.backend_install(self.node_id),
                request,
                messages.InstallReply,
                lambda reply: "" if reply.success else reply.error or "the worker reported no reason",
                timeout,
            )

    @contextlib.asynccontextmanager
    async def _progress(self, op_id: str, on_progress: OnProgress | None) -> AsyncIterator[None]:
        if on_progress is None or not op_id:
            yield
            return
        handler: OnProgress = on_progress

        async def receive(message: carrier.Message) -> None:
            with contextlib.suppress(DecodeError):
                await handler(decode(message.payload, messages.ProgressEvent))

        # Subscribed before the command leaves, so that the first report is not missed; one at a time, in
        # order.
        subscription = await self.bus.subscribe(
            subjects.install_progress(self.node_id, op_id), receive, limit=1
        )
        try:
            yield
        finally:
            await subscription.close()

    @property
    def _settled(self) -> bool:
        """Whether our connection is old enough for a missing listener to mean a missing worker."""
        return clock.monotonic() - self.bus.connected_since >= SETTLED_AFTER

    async def _ask(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float
    ) -> Outcome[R]:
        """One question, one outcome."""
        try:
            reply = await carrier.ask(self.bus, subject, request, kind, timeout)
        except carrier.NoResponders:
            return NoResponders(f"node {self.name} is not responding")
        except carrier.RequestTimeout:
            return StillRunning(f"node {self.name} did not answer within {timeout:.0f} s")
        except carrier.BusError:
            return BusDown("the message bus is not connected")
        except DecodeError as error:
            return Unreadable(f"the answer of node {self.name} cannot be read: {error.message}")
        reason = refusal(reply)
        return Refused(reason, reply) if reason else Done(reply)

    async def _command(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float
    ) -> Outcome[R]:
        """Sends the command, again after each loss of our connection, and watches over the worker."""
        deadline = clock.monotonic() + timeout
        while (left := deadline - clock.monotonic()) > 0:
            found = await self.contact()
            match found:
                case Done(listed) | Refused(_, listed):
                    instance = listed.instance
                case Unreadable():
                    instance = ""  # something listens
                case StillRunning() | NoResponders() | BusDown():
                    return found
                case _:
                    assert_never(found)
            outcome = await first(
                self._watch(self.bus.generation, instance), self._send(subject, request, kind, refusal, left)
            )
            if outcome is not None and not isinstance(outcome, BusDown):
                return outcome
            await asyncio.sleep(_ASK_AGAIN)  # the next turn begins by waiting for the bus
        return StillRunning(f"node {self.name} has not finished within {timeout:.0f} s")

    async def _send(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float
    ) -> Outcome[R]:
        """Asks until something listens, or certainly nothing does."""
        misses = 0
        while True:
            outcome = await self._ask(subject, request, kind, refusal, timeout)
            misses += 1
            if not isinstance(outcome, NoResponders) or (misses >= _MISSES and self._settled):
                return outcome
            await asyncio.sleep(PING_EVERY)

    async def _watch(self, generation: int, instance: str) -> NoResponders | None:
        """Ends when the worker is gone, or with None when the command is to be sent again."""
        misses = 0
        while True:
            await asyncio.sleep(PING_EVERY)
            if self.bus.generation != generation:
                return None
            answer = await self.backends(PING_TIMEOUT)
            match answer:
                case Done(listed) | Refused(_, listed):
                    misses = 0
                    if instance and listed.instance and listed.instance != instance:
                        return NoResponders(f"the worker of node {self.name} was restarted")
                case NoResponders():
                    misses += 1
                    if misses >= _MISSES and self._settled:
                        return NoResponders(f"node {self.name} stopped answering on the bus")
                case StillRunning() | Unreadable() | BusDown():
                    pass
                case _:
                    assert_never(answer)


async def first(one: Coroutine[Any, Any, R], other: Coroutine[Any, Any, T]) -> R | T:
    """The result of whichever ends first, the later one's if both have ended; the other is cancelled."""
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await (tasks[1] if tasks[1].done() else tasks[0])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless(trouble: Coroutine[Any, Any, NoReturn], work: Coroutine[Any, Any, R]) -> R:
    """The result of `work`, which is ended when `trouble` raises first; raises what that one raised."""
    return await first(trouble, work)
