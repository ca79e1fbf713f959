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
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, TypeVar, assert_never

from localai_cluster import clock, names, points
from localai_cluster.messaging import bus as carrier
from localai_cluster.messaging import messages, subjects
from localai_cluster.messaging.codec import DecodeError, decode, encode
from localai_cluster.metrics import controller as metrics
from nodes.backends import flights, naming, reports
from nodes.backends.flights import OnProgress
from nodes.backends.layers import Layers
from nodes.backends.outcomes import (
    NAMES,
    BusDown,
    Done,
    NoResponders,
    NotSent,
    Outcome,
    Refused,
    Restarted,
    StillRunning,
    Unheard,
    Unreadable,
)

PING_EVERY = 2.0
PING_TIMEOUT = 5.0
LIST_TIMEOUT = 30.0
"""C24."""
RUNNING_TIMEOUT = 10.0
"""C26."""
STOP_TIMEOUT = 10.0
"""C27."""
MODEL_TIMEOUT = 30.0
"""C25."""
DELETE_TIMEOUT = 120.0
"""C23."""
CANCEL_TIMEOUT = 6.0
"""A worker of ours answers within 5 s."""
SETTLED_AFTER = 10.0
"""A worker dials again every 6 seconds at most."""
BUS_WAIT = 5.0
"""How long a command waits for our own connection before it says so."""
_NO_PAYLOAD = b"null"
"""What the reference publishes where there is nothing to say (nats.md §1)."""
_LARGEST_PROGRESS = 16 * 1024
_ASK_AGAIN = 0.5
_MISSES = 2

_MOST_PINGS = 50
"""Pings a second: with more commands under way than that takes, each worker is asked less often."""


class _Watching:
    """How many commands of this process are watched over, and how often each may ask."""

    def __init__(self) -> None:
        self._count = 0

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1

    @property
    def pause(self) -> float:
        """Seconds until the next ping of one command."""
        return max(PING_EVERY, self._count / _MOST_PINGS)


_watching = _Watching()

R = TypeVar("R")
T = TypeVar("T")
Refusal = Callable[[R], str]
"""Why a reply means "not done"; empty for a success."""


@dataclass(frozen=True)
class Worker:
    """One node's worker, as seen over the bus."""

    bus: carrier.Bus
    node_id: str
    name: str
    instance: str = ""
    """Its process, if that is known already: commands are sent without asking for it first."""
    answered: bool = False
    """It has just answered, also without naming its process: the first command is sent without asking."""

    async def backends(self, timeout: float = LIST_TIMEOUT) -> Outcome[messages.ListReply]:
        """What is installed, asked once."""
        return await self._ask(
            subjects.backend_list(self.node_id),
            messages.Nothing(),
            messages.ListReply,
            lambda reply: reply.error,
            timeout,
            point="backend.list",
        )

    async def contact(self) -> Outcome[messages.ListReply]:
        """Return the worker's list of backends, or why there is none, once that is certain.

        A worker that lost its connection dials again within seconds, so a missing listener counts when a
        second question, `PING_EVERY` seconds later, finds none either.
        """
        since, misses = clock.monotonic(), 0
        while True:
            outcome = await self.backends()
            pause = _ASK_AGAIN
            match outcome:
                case NoResponders():
                    misses += 1
                    if self.is_settled:
                        if misses >= _MISSES:
                            return outcome
                        pause = PING_EVERY
                case BusDown() if clock.monotonic() - since < BUS_WAIT:
                    pass
                case _:
                    return outcome
            await asyncio.sleep(pause)

    async def running(self) -> Outcome[messages.RunningReply]:
        """The engine processes that live there."""
        return await self._ask(
            subjects.models_running(self.node_id),
            messages.Nothing(),
            messages.RunningReply,
            lambda reply: reply.error,
            RUNNING_TIMEOUT,
            point="models.running",
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
            point="model.stop",
        )

    async def unload_model(self, model_name: str, address: str) -> Outcome[messages.UnloadReply]:
        """Has the engine at this address free its memory; its process lives on (nats.md §4.9)."""
        return await self._ask(
            subjects.model_unload(self.node_id),
            messages.UnloadRequest(model_name, address),
            messages.UnloadReply,
            _failure,
            MODEL_TIMEOUT,
            point="model.unload",
        )

    async def delete_model(self, model_name: str) -> Outcome[messages.DeleteModelReply]:
        """Has the model's staged files removed; a model without files is a success (nats.md §4.10)."""
        return await self._ask(
            subjects.model_delete(self.node_id),
            messages.DeleteModelRequest(model_name),
            messages.DeleteModelReply,
            _failure,
            MODEL_TIMEOUT,
            point="model.delete",
        )

    async def stop(self, target: str, *, force: bool = False) -> None:
        """Asks for engines to be stopped by process key, model or backend; "" means all (nats.md §4.4).

        A `backend.stop` has no reply. An unforced one for everything has no payload either (R6.5).
        """
        payload = encode(messages.StopBackend(target, force)) if target or force else _NO_PAYLOAD
        with contextlib.suppress(carrier.BusError), points.told("backend.stop"):
            await self.bus.publish(subjects.backend_stop(self.node_id), payload)

    async def stop_node(self) -> None:
        """Asks the worker to shut down; there is no reply (nats.md §4.11)."""
        with contextlib.suppress(carrier.BusError), points.told("node.stop"):
            await self.bus.publish(subjects.stop(self.node_id), _NO_PAYLOAD)

    async def install(
        self, request: messages.InstallRequest, *, timeout: float, on_progress: OnProgress | None = None
    ) -> Outcome[messages.InstallReply]:
        """Sends `backend.install` and waits for its reply, up to `timeout` seconds.

        An identical one under way, of whatever operation, is joined.
        """
        asked = naming.understood(request)

        async def send(report: OnProgress | None) -> Outcome[messages.InstallReply]:
            async with self._progress(asked.op_id, report):
                return await self._command(
                    subjects.backend_install(self.node_id),
                    asked,
                    messages.InstallReply,
                    _failure,
                    timeout,
                    point="backend.install",
                )

        return await flights.joined(self.bus, (self.node_id, replace(asked, op_id="")), send, on_progress)

    async def upgrade(
        self, request: messages.UpgradeRequest, *, timeout: float, on_progress: OnProgress | None = None
    ) -> Outcome[messages.UpgradeReply]:
        """Sends `backend.upgrade` and waits for its reply, up to `timeout` seconds.

        A worker that does not know the command gets a forced install in its place (§6.3), whose reply says
        nothing of stopped processes.
        """
        request = naming.understood(request)
        async with self._progress(request.op_id, on_progress):
            outcome = await self._command(
                subjects.backend_upgrade(self.node_id),
                request,
                messages.UpgradeReply,
                _failure,
                timeout,
                point="backend.upgrade",
            )
            if not isinstance(outcome, Unheard) or not await self._is_old():
                return outcome
            forced = messages.InstallRequest(
                backend=request.backend,
                backend_galleries=request.backend_galleries,
                uri=request.uri,
                name=request.name,
                alias=request.alias,
                force=True,
                op_id=request.op_id,
                install_only=True,
            )
            subject = subjects.backend_install(self.node_id)
            answer = await self._command(
                subject, forced, messages.InstallReply, _failure, timeout, point="backend.install.forced"
            )
        match answer:
            case Done():
                return Done(messages.UpgradeReply(success=True))
            case Refused(reason, reply):
                return Refused(reason, messages.UpgradeReply(error=reply.error))
            case _:
                return answer

    async def delete(self, backend: str, *, timeout: float = DELETE_TIMEOUT) -> Outcome[messages.DeleteReply]:
        """Has the backend's processes stopped and its files removed."""
        return await self._command(
            subjects.backend_delete(self.node_id),
            messages.DeleteRequest(naming.bare(backend)),
            messages.DeleteReply,
            _failure,
            timeout,
            point="backend.delete",
        )

    async def cancel(self, op_id: str) -> Outcome[messages.CancelReply]:
        """Has the worker end the install or upgrade of this operation, whatever it is at; asked once.

        Its own request is answered too. `found` is false if there was nothing to end (any more). Unheard if
        the worker cannot cancel, as a stock one: what it carries out goes on.
        """
        outcome = await self._ask(
            subjects.backend_cancel(self.node_id),
            messages.CancelRequest(op_id),
            messages.CancelReply,
            lambda reply: "" if reply.success else reply.error or "the worker reported no reason",
            CANCEL_TIMEOUT,
            point="backend.cancel",
        )
        if isinstance(outcome, NoResponders):
            answer = await self.backends(PING_TIMEOUT)
            if isinstance(answer, Done | Refused):
                return Unheard(f"the worker of node {self.name} cannot cancel; what it has begun goes on")
        return outcome

    async def _is_old(self) -> bool:
        """Whether a worker is there that names no `instance`, as every worker of ours does.

        Ours know all commands: one that does not listen for this one has just been restarted.
        """
        answer = await self.backends(PING_TIMEOUT)
        return isinstance(answer, Done | Refused) and not answer.reply.instance

    @contextlib.asynccontextmanager
    async def _progress(self, op_id: str, on_progress: OnProgress | None) -> AsyncIterator[None]:
        if on_progress is None or not op_id:
            yield
            return
        layers = Layers()

        def receive(payload: bytes) -> None:
            if len(payload) > _LARGEST_PROGRESS:
                return
            with contextlib.suppress(DecodeError):
                event = decode(payload, messages.ProgressEvent)
                # A worker that may publish on one subject must not report for another operation or node.
                if (event.op_id, event.node_id) == (op_id, self.node_id):
                    on_progress(layers.whole(event))

        # Subscribed before the command leaves, so that the first report is not missed.
        async with reports.received(self.bus, self.node_id, op_id, receive):
            yield

    @property
    def is_settled(self) -> bool:
        """Return True if our connection is old enough for a missing listener to mean a missing worker."""
        return clock.monotonic() - self.bus.connected_since >= SETTLED_AFTER

    async def _ask(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float, *, point: str
    ) -> Outcome[R]:
        """One question, one outcome; `point` names it for figures, and for tests that kill us here."""
        began = clock.monotonic()
        outcome = await self._asked(subject, request, kind, refusal, timeout, point=point)
        metrics.command_ended(point, NAMES[type(outcome)], clock.monotonic() - began)
        return outcome

    async def _asked(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float, *, point: str
    ) -> Outcome[R]:
        inbox = subjects.inbox(self.node_id)
        try:
            with points.asked(point):
                reply = await carrier.ask(self.bus, subject, request, kind, timeout, inbox=inbox)
        except carrier.NoResponders:
            return NoResponders(f"node {self.name} is not responding")
        except carrier.RequestTimeout:
            return StillRunning(f"node {self.name} did not answer within {timeout:.0f} s")
        except carrier.BusError:
            return BusDown("the message bus is not connected")
        except DecodeError as error:
            return Unreadable(f"the answer of node {self.name} cannot be read: {error.message}")
        reason = names.readable(refusal(reply))
        return Refused(reason, reply) if reason else Done(reply)

    async def _command(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float, *, point: str
    ) -> Outcome[R]:
        """Sends the command, again after each loss of our connection, and watches over the worker."""
        deadline, instance = clock.monotonic() + timeout, self.instance
        ask_first = not (instance or self.answered)
        while (left := deadline - clock.monotonic()) > 0:
            if ask_first:
                found = await self.contact()
                match found:
                    case Done(listed) | Refused(_, listed):
                        instance = listed.instance
                    case Unreadable():
                        pass  # something listens
                    case StillRunning(reason):
                        return NotSent(reason)
                    case NoResponders() | BusDown():
                        return found
                    case _:
                        assert_never(found)
            outcome = await first(
                self._watch(self.bus.generation, instance),
                self._send(subject, request, kind, refusal, left, point=point),
            )
            if outcome is not None and not isinstance(outcome, BusDown):
                return outcome
            instance, ask_first = "", True  # the next turn begins by waiting for the bus
            await asyncio.sleep(_ASK_AGAIN)
        return StillRunning(f"node {self.name} has not finished within {timeout:.0f} s")

    async def _send(
        self, subject: str, request: object, kind: type[R], refusal: Refusal[R], timeout: float, *, point: str
    ) -> Outcome[R]:
        """Asks until something listens, or certainly nothing does."""
        misses = 0
        while True:
            outcome = await self._ask(subject, request, kind, refusal, timeout, point=point)
            misses += 1
            if not isinstance(outcome, NoResponders):
                return outcome
            if misses >= _MISSES and self.is_settled:
                return Unheard(outcome.reason)
            await asyncio.sleep(PING_EVERY)

    async def _watch(self, generation: int, instance: str) -> NoResponders | None:
        """Ends when the worker is gone, or with None when the command is to be sent again."""
        misses = 0
        while True:
            with _watching:
                await asyncio.sleep(_watching.pause)
            if self.bus.generation != generation:
                return None
            answer = await self.backends(PING_TIMEOUT)
            match answer:
                case Done(listed) | Refused(_, listed):
                    misses = 0
                    if instance and listed.instance and listed.instance != instance:
                        return Restarted(f"the worker of node {self.name} was restarted")
                case NoResponders():
                    misses += 1
                    if misses >= _MISSES and self.is_settled:
                        return NoResponders(f"node {self.name} stopped answering on the bus")
                case StillRunning() | Unreadable() | BusDown():
                    pass
                case _:
                    assert_never(answer)


class _Verdict(Protocol):
    @property
    def success(self) -> bool: ...
    @property
    def error(self) -> str: ...


def _failure(reply: _Verdict) -> str:
    return "" if reply.success else reply.error or "the worker reported no reason"


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
