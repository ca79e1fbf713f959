"""Commands to one worker over the bus.

Each command returns one of the `outcomes`, soon after the worker's death at the latest. A reply may take a
quarter of an hour, so waiting for the reply alone would block an operation for a dead worker. While a command
runs, the watch requests the worker's list of backends every few seconds. The command has died with its worker
if two requests in a row find no listener, or if another process (`instance`) replies.

The state of our own connection proves nothing about the worker. After a reconnect the command is sent again:
our worker joins the command that is still running, and a stock worker's commands are idempotent
(`contract/nats.md` §4.1). After a restart of NATS the workers reconnect one by one, so a missing listener
counts only once our connection has lasted for `RECONNECT_GRACE` seconds.

Every worker resolves the names in a command to the same backend. A stock worker looks up the installed
backend by the exact text of `backend`. If that is empty, as for an address alone, or starts with the gallery,
the lookup fails after a complete download (contract/nats.md §4.1).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar, assert_never

from localai_cluster.gallery_index import default_backend_name
from localai_cluster.kit import clock, failpoints, names
from localai_cluster.messaging import bus as carrier
from localai_cluster.messaging import messages
from localai_cluster.messaging.messages import (
    DecodeError,
    InstallRequest,
    UpgradeRequest,
    decode,
    decode_galleries,
    encode,
    encode_galleries,
)
from localai_cluster.metrics import controller as metrics
from nodes.commands import shared_commands
from nodes.commands.outcomes import (
    NAMES,
    BusDown,
    Done,
    NoCommandListener,
    NoResponders,
    NotSent,
    Outcome,
    Refused,
    Restarted,
    StillRunning,
    Unreadable,
)
from nodes.commands.shared_commands import Layers, OnProgress

Q = TypeVar("Q", InstallRequest, UpgradeRequest)


def without_gallery(name: str) -> str:
    """Return the backend's name in `gallery@name`."""
    return name.rpartition("@")[2]


def with_plain_name(request: Q) -> Q:
    """Return the request with the backend's name in place of `gallery@name`.

    For an address, `backend` and `name` are the future name of the backend. A gallery before the name becomes
    the only gallery of the request. If the request does not contain that gallery, the name stays unchanged:
    the backend of another gallery must not be installed in its place.
    """
    if request.uri:
        name = (
            without_gallery(request.name)
            or without_gallery(request.backend)
            or default_backend_name(request.uri)
        )
        return replace(request, backend=name, name=name)
    full_name = request.backend or request.name
    gallery, _, name = full_name.rpartition("@")
    if not gallery:
        return replace(request, backend=name)
    try:
        listed = decode_galleries(request.backend_galleries or "null")
    except DecodeError:
        return request  # an admin wrote them; the worker reports the mistake
    chosen = [entry for entry in listed if entry.name == gallery]
    if not chosen:
        return replace(request, backend=full_name)
    return replace(request, backend=name, backend_galleries=encode_galleries(chosen))


PING_EVERY = 2.0
PING_TIMEOUT = 5.0
LIST_TIMEOUT = 30.0
"""Reply timeout of `backend.list` in seconds (C24)."""
RUNNING_TIMEOUT = 10.0
"""Reply timeout of `models.running` in seconds (C26)."""
STOP_TIMEOUT = 10.0
"""Reply timeout of `model.stop` in seconds (C27)."""
MODEL_TIMEOUT = 30.0
"""Reply timeout of `model.unload` and `model.delete` in seconds (C25)."""
DELETE_TIMEOUT = 120.0
"""Reply timeout of `backend.delete` in seconds (C23)."""
CANCEL_TIMEOUT = 6.0
"""Reply timeout of a cancellation in seconds; our worker replies within 5 s."""
RECONNECT_GRACE = 10.0
"""Seconds after our own (re)connect during which a missing listener proves nothing: workers take up to 6 s to
reconnect."""
BUS_WAIT = 5.0
"""Seconds for which a command waits for our own connection; after that its outcome is `BusDown`."""
_EMPTY_PAYLOAD = b"null"
"""The payload that the reference publishes where a message has no content (nats.md §1)."""
_MAX_PROGRESS_BYTES = 16 * 1024
_RETRY_PAUSE_SECONDS = 0.5
_MISSES_UNTIL_GONE = 2

_MAX_PINGS_PER_SECOND = 50
"""Maximum pings per second of this process; with more commands, each worker is pinged less often."""


_watch_tasks: set["asyncio.Task[Any] | None"] = set()
"""Tasks that watch a worker and wait for their next ping."""

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Worker:
    """Client that sends commands to one node's worker over the bus."""

    bus: carrier.Bus
    node_id: str
    name: str
    instance: str = ""
    """Process id of the worker, if known. Commands are then sent without a ping first."""
    answered: bool = False
    """True if the worker has just replied, so that the first command needs no ping."""

    async def backends(self, timeout: float = LIST_TIMEOUT) -> Outcome[messages.ListReply]:
        """Return the worker's list of backends, from a single request."""
        return await self._request(
            messages.EmptyRequest(),
            messages.ListReply,
            timeout,
            point="backend.list",
        )

    async def contact(self) -> Outcome[messages.ListReply]:
        """Return the worker's list of backends, or the outcome that proves why there is none.

        A worker that lost its connection reconnects within seconds, so a missing listener counts only if a
        second request, `PING_EVERY` seconds later, finds none either.
        """
        since, misses = clock.monotonic(), 0
        while True:
            outcome = await self.backends()
            pause = _RETRY_PAUSE_SECONDS
            match outcome:
                case NoResponders():
                    misses += 1
                    if self.is_settled:
                        if misses >= _MISSES_UNTIL_GONE:
                            return outcome
                        pause = PING_EVERY
                case BusDown() if clock.monotonic() - since < BUS_WAIT:
                    pass
                case _:
                    return outcome
            await asyncio.sleep(pause)

    async def running(
        self, measure: str = "", timeout: float = RUNNING_TIMEOUT
    ) -> Outcome[messages.RunningReply]:
        """Return the engine processes that the worker runs; of the process `measure` also its memory."""
        return await self._request(
            messages.RunningRequest(measure),
            messages.RunningReply,
            timeout,
            point="models.running",
        )

    async def stop_model(self, process_key: str, address: str) -> Outcome[messages.StopModelReply]:
        """Stop the engine process with this key at this address. `Done`: no process has the key any more."""
        name, _, _ = process_key.rpartition("#")
        return await self._request(
            messages.StopModelRequest(name, process_key, address),
            messages.StopModelReply,
            STOP_TIMEOUT,
            point="model.stop",
        )

    async def unload_model(self, model_name: str, address: str) -> Outcome[messages.UnloadReply]:
        """Make the engine at this address free its memory; its process keeps running (nats.md §4.9)."""
        return await self._request(
            messages.UnloadRequest(model_name, address),
            messages.UnloadReply,
            MODEL_TIMEOUT,
            point="model.unload",
        )

    async def delete_model(self, model_name: str) -> Outcome[messages.DeleteModelReply]:
        """Remove the staged files of the model; a model without files is a success (nats.md §4.10)."""
        return await self._request(
            messages.DeleteModelRequest(model_name),
            messages.DeleteModelReply,
            MODEL_TIMEOUT,
            point="model.delete",
        )

    async def stop(self, target: str, *, force: bool = False) -> None:
        """Request the stop of engines by process key, model or backend; "" means all (nats.md §4.4).

        A `backend.stop` has no reply. An unforced stop of all engines has no payload either (R6.5).
        """
        payload = encode(messages.StopBackend(target, force)) if target or force else _EMPTY_PAYLOAD
        with contextlib.suppress(carrier.BusError), failpoints.wrap_message("backend.stop"):
            await self.bus.publish(messages.subject("backend.stop", self.node_id), payload)

    async def stop_node(self) -> None:
        """Request the shutdown of the worker; there is no reply (nats.md §4.11)."""
        with contextlib.suppress(carrier.BusError), failpoints.wrap_message("node.stop"):
            await self.bus.publish(messages.subject("stop", self.node_id), _EMPTY_PAYLOAD)

    async def install(
        self, request: messages.InstallRequest, *, timeout: float, on_progress: OnProgress | None = None
    ) -> Outcome[messages.InstallReply]:
        """Send `backend.install` and wait up to `timeout` seconds for its reply.

        Join an identical command that is already running, whichever operation sent it.
        """
        command = with_plain_name(request)

        async def send(report: OnProgress | None) -> Outcome[messages.InstallReply]:
            async with self._progress(command.op_id, report):
                return await self._command(
                    command,
                    messages.InstallReply,
                    timeout,
                    point="backend.install",
                )

        return await shared_commands.join_or_send(
            self.bus, (self.node_id, replace(command, op_id="")), send, on_progress
        )

    async def upgrade(
        self, request: messages.UpgradeRequest, *, timeout: float, on_progress: OnProgress | None = None
    ) -> Outcome[messages.UpgradeReply]:
        """Send `backend.upgrade` and wait up to `timeout` seconds for its reply.

        A worker that does not support the command gets a forced install instead (§6.3), whose reply does not
        report stopped processes.
        """
        request = with_plain_name(request)
        async with self._progress(request.op_id, on_progress):
            outcome = await self._command(
                request,
                messages.UpgradeReply,
                timeout,
                point="backend.upgrade",
            )
            if not isinstance(outcome, NoCommandListener) or not await self._is_old():
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
            answer = await self._command(
                forced, messages.InstallReply, timeout, point="backend.install.forced"
            )
        match answer:
            case Done():
                return Done(messages.UpgradeReply(success=True))
            case Refused(reason, reply):
                return Refused(reason, messages.UpgradeReply(error=reply.error))
            case _:
                return answer

    async def delete(self, backend: str, *, timeout: float = DELETE_TIMEOUT) -> Outcome[messages.DeleteReply]:
        """Stop the processes of the backend and remove its files."""
        return await self._command(
            messages.DeleteRequest(without_gallery(backend)),
            messages.DeleteReply,
            timeout,
            point="backend.delete",
        )

    async def cancel(self, op_id: str) -> Outcome[messages.CancelReply]:
        """Cancel the install or upgrade of this operation at the worker, in any of its steps. Sent once.

        The cancelled command gets its own reply too. `found` is false if the worker runs no such command.
        Returns NoCommandListener if the worker does not support cancellation, as a stock worker: the command
        continues.
        """
        outcome = await self._request(
            messages.CancelRequest(op_id),
            messages.CancelReply,
            CANCEL_TIMEOUT,
            point="backend.cancel",
        )
        if isinstance(outcome, NoResponders):
            answer = await self.backends(PING_TIMEOUT)
            if isinstance(answer, Done | Refused):
                return NoCommandListener(
                    f"the worker of node {self.name} cannot cancel; what it has begun goes on"
                )
        return outcome

    async def _is_old(self) -> bool:
        """Return True if the worker replies without an `instance`, as a stock worker does.

        Our workers send it and support all commands: if one has no listener for a command, it has just been
        restarted.
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
            if len(payload) > _MAX_PROGRESS_BYTES:
                return
            with contextlib.suppress(DecodeError):
                event = decode(payload, messages.ProgressEvent)
                # A worker that may publish on one subject must not report for another operation or node.
                if (event.op_id, event.node_id) == (op_id, self.node_id):
                    on_progress(layers.with_total_percentage(event))

        # Subscribed before the command leaves, so that the first report is not missed.
        async with shared_commands.receive_reports(self.bus, self.node_id, op_id, receive):
            yield

    @property
    def is_settled(self) -> bool:
        """True if our connection is old enough for a missing listener to prove a missing worker."""
        return clock.monotonic() - self.bus.connected_since >= RECONNECT_GRACE

    async def _request(self, request: object, kind: type[R], timeout: float, *, point: str) -> Outcome[R]:
        """Send one request; return its outcome.

        `point` is the command's name in metrics and for failpoints, with `.forced` for an install in place of
        an upgrade.
        """
        began, inbox = clock.monotonic(), messages.inbox(self.node_id)
        subject = messages.subject(point.removesuffix(".forced"), self.node_id)
        outcome: Outcome[R]
        try:
            with failpoints.wrap_request(point):
                reply = decode(await self.bus.request(subject, encode(request), timeout, inbox=inbox), kind)
        except carrier.NoResponders:
            outcome = NoResponders(f"node {self.name} is not responding")
        except carrier.RequestTimeout:
            outcome = StillRunning(f"node {self.name} did not answer within {timeout:.0f} s")
        except carrier.BusError as error:
            sent = isinstance(error, carrier.ConnectionLost)
            outcome = BusDown("the message bus is not connected", sent=sent)
        except DecodeError as error:
            outcome = Unreadable(f"the answer of node {self.name} cannot be read: {error.message}")
        else:
            reason = names.to_readable_text(_failure(reply))
            outcome = Refused(reason, reply) if reason else Done(reply)
        metrics.command_ended(point, NAMES[type(outcome)], clock.monotonic() - began)
        return outcome

    async def _command(self, request: object, kind: type[R], timeout: float, *, point: str) -> Outcome[R]:
        """Send the command, and again after each reconnect; watch the worker meanwhile.

        Once it was sent, only a reply or the worker's absence proves that it is not running.
        """
        deadline, instance, sent = clock.monotonic() + timeout, self.instance, False
        ping_first = not (instance or self.answered)
        while (remaining := deadline - clock.monotonic()) > 0:
            if ping_first:
                contact = await self.contact()
                match contact:
                    case Done(listed) | Refused(_, listed):
                        instance = listed.instance
                    case Unreadable():
                        pass  # something listens
                    case StillRunning(reason) | BusDown(reason) if sent:
                        return StillRunning(reason)
                    case StillRunning(reason):
                        return NotSent(reason)
                    case NoResponders() | BusDown():
                        return contact
                    case _:
                        assert_never(contact)
            outcome = await first_result(
                self._watch(self.bus.generation, instance),
                self._send(request, kind, remaining, point=point),
            )
            if outcome is not None and not isinstance(outcome, BusDown):
                return outcome
            sent = sent or outcome is None or outcome.sent
            instance, ping_first = "", True  # the next turn begins by waiting for the bus
            await asyncio.sleep(_RETRY_PAUSE_SECONDS)
        return StillRunning(f"node {self.name} has not finished within {timeout:.0f} s")

    async def _send(self, request: object, kind: type[R], timeout: float, *, point: str) -> Outcome[R]:
        """Send the request until it finds a listener, or the lack of a listener is certain."""
        misses = 0
        while True:
            outcome = await self._request(request, kind, timeout, point=point)
            misses += 1
            if not isinstance(outcome, NoResponders):
                return outcome
            if misses >= _MISSES_UNTIL_GONE and self.is_settled:
                return NoCommandListener(outcome.reason)
            await asyncio.sleep(PING_EVERY)

    async def _watch(self, generation: int, instance: str) -> NoResponders | None:
        """Watch the worker; return NoResponders once it is gone, None once the command must be sent again."""
        misses = 0
        while True:
            _watch_tasks.add(task := asyncio.current_task())
            try:
                await asyncio.sleep(max(PING_EVERY, len(_watch_tasks) / _MAX_PINGS_PER_SECOND))
            finally:
                _watch_tasks.discard(task)
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
                    if misses >= _MISSES_UNTIL_GONE and self.is_settled:
                        return NoResponders(f"node {self.name} stopped answering on the bus")
                case StillRunning() | Unreadable() | BusDown():
                    pass
                case _:
                    assert_never(answer)


def _failure(reply: Any) -> str:
    """Return why a worker's reply means failure; "" for a success."""
    if isinstance(reply, messages.ListReply | messages.RunningReply):
        return reply.error
    if isinstance(reply, messages.StopModelReply):
        return "" if reply.terminated else reply.error or "termination not confirmed"
    return "" if reply.success else reply.error or "the worker reported no reason"


async def first_result(first_work: Coroutine[Any, Any, R], second_work: Coroutine[Any, Any, T]) -> R | T:
    """Return the result, or raise the exception, of the coroutine that ends first.

    Cancel the other coroutine. If both have ended, `second_work` counts.
    """
    tasks = asyncio.create_task(first_work), asyncio.create_task(second_work)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await (tasks[1] if tasks[1].done() else tasks[0])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
