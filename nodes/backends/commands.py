"""Commands to one worker over the bus, which end soon when the worker is gone.

A reply may take a quarter of an hour, so waiting for it alone would hold an operation hostage to a dead
worker. While a command runs, the worker is asked every few seconds for its list of backends: nobody
listening twice in a row, or an answer from another process (`instance`), means that the command died with
its worker. After the bus was lost and found, the command is sent again: our worker joins the one still
running, and a stock worker's commands are idempotent (`contract/nats.md` §4.1).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from localai_cluster import clock, errors
from localai_cluster.messaging import messages, subjects
from localai_cluster.messaging.bus import (
    Bus,
    BusError,
    Message,
    NoResponders,
    NotConnected,
    RequestTimeout,
    ask,
)
from localai_cluster.messaging.codec import DecodeError, decode, encode

PING_EVERY = 2.0
PING_TIMEOUT = 5.0
LIST_TIMEOUT = 30.0
"""C24."""

R = TypeVar("R")
OnProgress = Callable[[messages.ProgressEvent], Awaitable[None]]


class WorkerGone(errors.Unavailable):
    """The worker does not answer on the bus."""

    code = "worker_gone"


@dataclass(frozen=True)
class Worker:
    """One node's worker, as seen over the bus."""

    bus: Bus
    node_id: str
    name: str

    async def backends(self) -> messages.ListReply:
        """What is installed; WorkerGone when nobody answers."""
        try:
            return await ask(
                self.bus,
                subjects.backend_list(self.node_id),
                messages.Nothing(),
                messages.ListReply,
                LIST_TIMEOUT,
            )
        except BusError as error:
            raise WorkerGone(f"node {self.name} does not answer on the bus") from error

    async def install(
        self, request: messages.InstallRequest, *, timeout: float, on_progress: OnProgress | None = None
    ) -> messages.InstallReply:
        """Sends `backend.install` and waits for its reply, up to `timeout` seconds.

        Raises WorkerGone when the worker vanished meanwhile, Unavailable when the time ran out.
        """
        async with self._progress(request.op_id, on_progress):
            return await self._command(
                subjects.backend_install(self.node_id), request, messages.InstallReply, timeout
            )

    async def stop(self, process_key: str) -> None:
        """Has one engine process stopped; best effort, because nobody answers a `backend.stop`."""
        with contextlib.suppress(BusError):
            await self.bus.publish(
                subjects.backend_stop(self.node_id), encode(messages.StopBackend(process_key))
            )

    @contextlib.asynccontextmanager
    async def _progress(self, op_id: str, on_progress: OnProgress | None) -> AsyncIterator[None]:
        if on_progress is None or not op_id:
            yield
            return
        handler: OnProgress = on_progress

        async def receive(message: Message) -> None:
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

    async def _command(self, subject: str, request: object, reply: type[R], timeout: float) -> R:
        deadline = clock.monotonic() + timeout
        while (left := deadline - clock.monotonic()) > 0:
            try:
                return await self._attempt(subject, request, reply, left)
            except NotConnected:
                continue  # the next attempt begins by waiting for the bus
            except NoResponders as error:
                raise WorkerGone(f"node {self.name} does not answer on the bus") from error
            except (RequestTimeout, TimeoutError):
                break
        raise errors.Unavailable(f"node {self.name} did not finish within {timeout:.0f} s", retry_after=30)

    async def _attempt(self, subject: str, request: object, reply: type[R], timeout: float) -> R:
        async with asyncio.timeout(timeout):
            generation = await self.bus.wait_connected()
        instance = (await self.backends()).instance
        return await unless(
            self._watch(generation, instance), ask(self.bus, subject, request, reply, timeout)
        )

    async def _watch(self, generation: int, instance: str) -> NoReturn:
        """Returns never.

        Raises WorkerGone when the worker is gone, NotConnected when the bus was replaced.
        """
        misses = 0
        while True:
            await asyncio.sleep(PING_EVERY)
            if self.bus.generation != generation:
                raise NotConnected("the bus was lost and found; the command is sent again")
            now_running, misses = await self._ping(misses)
            if instance and now_running and now_running != instance:
                raise WorkerGone(f"the worker of node {self.name} was restarted")

    async def _ping(self, misses: int) -> tuple[str, int]:
        """The worker process that answers (empty if none did), and how often in a row nobody listened."""
        subject = subjects.backend_list(self.node_id)
        try:
            answer = await ask(self.bus, subject, messages.Nothing(), messages.ListReply, PING_TIMEOUT)
        except NoResponders:
            if misses:
                raise WorkerGone(f"node {self.name} stopped answering on the bus") from None
            return "", misses + 1
        except (RequestTimeout, NotConnected, DecodeError):
            return "", misses
        return answer.instance, 0


async def unless(trouble: Coroutine[Any, Any, NoReturn], work: Coroutine[Any, Any, R]) -> R:
    """The result of `work`, which is ended when `trouble` raises first; raises what that one raised."""
    watching, working = asyncio.create_task(trouble), asyncio.create_task(work)
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await watching
        return await working
    finally:
        for task in (watching, working):
            task.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)
