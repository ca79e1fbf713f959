"""Executor of a queue: claims due items, runs each as a task, and renews their leases.

A queue defines which items are due and how they run: operations are one queue (`OperationQueue`), intents on
nodes another. An executor claims at each wake-up, and at least once a second. A thread of its own renews all
its leases in one call. When a lease is lost or the item was cancelled, the executor cancels the task. The
task writes nothing; the fence would refuse it anyway. If the database cannot be reached for a whole lease,
the executor stops all its tasks, because by then another controller may have claimed them.

An item whose outcome could not be recorded stays claimed until its lease expires. Every executor reaps such
items; the schedule does so too, but recovery must not depend on one process.

Operations have one lease each: loads, unloads, deletions of models. Their progress is written in batches
(`work.py`). A handler ends in one of four ways: it returns a result (completed), raises a ClusterError
(failed), raises `Postpone` (requeued, with the reason), or raises `Abandoned` (cancelled).
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import psycopg
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, close_old_connections, connection

from localai_cluster.kit import cancellation, clock, errors
from localai_cluster.kit.leases import Attempt, LeaseLost
from localai_cluster.kit.logs import request_id
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.metrics import controller as metrics
from operations.executor.work import Abandoned, Handler, Postpone, Work, in_thread, write_batch
from operations.ledger import attempts
from operations.ledger.progress import Recorder
from operations.models import Event, Operation
from operations.reconcilers import tasks

log = logging.getLogger(__name__)


class Claimed(Protocol):
    """An item that this process has claimed under a lease; its `str` is for the log."""

    @property
    def id(self) -> UUID:
        """Id of the leased row."""

    @property
    def fence(self) -> int:
        """Number of the attempt, which may write only while the row has the same fence."""


C = TypeVar("C", bound=Claimed)


class Queue(Protocol[C]):
    """A queue of leased items. The calls that access rows run in threads."""

    name: str
    slots: int
    """Maximum number of items that one executor runs at the same time."""

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> Sequence[C]:
        """Claim up to `limit` due items under a lease of `lease` seconds."""

    def renew(self, owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
        """Extend the leases of `owner` on `ids`.

        Return the fences of those ids whose lease the owner still has.
        """

    def release(self, owner: str, *, now: datetime) -> int:
        """Give back all items of `owner`, so that another executor can claim them. Return their number."""

    def reap(self) -> None:
        """Requeue the items of any process whose lease has expired."""

    async def execute(self, claimed: C, /) -> None:
        """Run one attempt and record its outcome; raise LeaseLost or a DatabaseError if that fails."""

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """Set the callback for attempts whose report was refused, because they have lost their lease."""

    def forget(self, attempt: Attempt) -> None:
        """Drop the unwritten progress reports of an attempt that has ended."""

    def close(self) -> None:
        """Stop writing reports, because the executor stops."""


class LeaseKeeper:
    """The thread that renews the leases of one owner, with a database connection of its own.

    The thread does nothing else, so that leases are renewed while the shared threads are busy or blocked. A
    call that hangs is aborted: its socket is shut down, so the thread gets an error and reconnects at the
    next call.
    """

    def __init__(self, owner: str, lease: float, renew: Callable[..., dict[UUID, int]]) -> None:
        self._owner, self._lease, self._renew_rows = owner, lease, renew
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leases")
        self._link: Any = None

    async def renew(self, fences: Mapping[UUID, int]) -> dict[UUID, int]:
        """Extend the leases on these ids. Return the fences of those ids whose lease the owner still has.

        Raises TimeoutError after half a lease.
        """
        call = asyncio.get_running_loop().run_in_executor(self._thread, self._renew, list(fences))
        try:
            async with asyncio.timeout(self._lease / 2):
                return await call
        except TimeoutError:
            self._abort_call()
            raise

    async def close(self) -> None:
        """Close the connection and end the thread."""
        self._abort_call()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease / 2):
                    await asyncio.get_running_loop().run_in_executor(self._thread, _disconnect)
        finally:
            # The wait above may have timed out before the thread was free, which cancels that call.
            self._thread.submit(_disconnect)
            self._thread.shutdown(wait=False)

    def _renew(self, ids: list[UUID]) -> dict[UUID, int]:
        close_old_connections()  # a broken or an old one; Django then opens a new one
        connection.ensure_connection()
        self._link = connection.connection
        try:
            return self._renew_rows(self._owner, ids, now=clock.now(), lease=self._lease)
        finally:
            self._link = None

    def _abort_call(self) -> None:
        link = self._link
        if link is None or link.closed:
            return
        with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(link.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)


def _disconnect() -> None:
    connection.close()


POLL_INTERVAL = 1.0
"""Seconds between two polls of the rows without a wake-up."""
MAX_CLAIM_ITEMS = 1024
"""Upper bound of the number of items in one claim.

The limit is halved after a claim that took a quarter of a lease, and doubled after a faster full claim. A
lease counts from the beginning of the claim, so on a busy machine a large claim would outlast its leases.
"""
MIN_CLAIM_ITEMS = 128
"""Lower bound of the claim limit: a claim of 64 items costs a third of a claim of a thousand."""
_RENEWALS_PER_LEASE = 8
"""Renewals in the time of one lease. Several are needed, because a renewal skips rows that are locked."""


class Executor(Generic[C]):
    """Runs the items of one queue, under leases of `lease` seconds."""

    def __init__(self, owner: str, queue: Queue[C], *, lease: float) -> None:
        self._owner, self._queue, self._lease = owner, queue, lease
        self._tasks: dict[UUID, tuple[int, asyncio.Task[None]]] = {}
        self._claims = PeriodicTask(
            f"claims of {queue.name}", self._claim_due, interval=POLL_INTERVAL, retry_on=(DatabaseError,)
        )
        self._renewals = PeriodicTask(
            f"leases of {queue.name}", self._renew_leases, interval=lease / _RENEWALS_PER_LEASE
        )
        self._keeper = LeaseKeeper(owner, lease, queue.renew)
        self._good_until = clock.monotonic() + lease
        self._claiming = asyncio.Lock()
        self._at_once = MAX_CLAIM_ITEMS
        self._terminating: set[asyncio.Task[None]] = set()
        self._reap_at = clock.monotonic()
        self._stopping = False
        queue.on_lost(self._cancel_without_lease)

    def running(self) -> int:
        """Return the number of running attempts. Thread-safe."""
        return len(self._tasks)

    def wake(self, *, cancelled: bool = False) -> None:
        """Poll the rows soon, because an item may be due or was cancelled."""
        self._claims.wake()
        if cancelled:
            self._renewals.wake()

    async def run(self) -> None:
        """Claim and run items until `stop`; the loops are supervised together."""
        self._good_until = clock.monotonic() + self._lease
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claims.run())
                group.create_task(self._renewals.run())
        finally:
            await self._keeper.close()

    async def stop(self) -> None:
        """Cancel the running attempts and give back their items at once."""
        self._stopping = True
        self._claims.stop()
        self._renewals.stop()
        async with self._claiming:  # a running claim commits first, so that it is released too
            await cancellation.cancel_and_wait(*self._cancel_attempts(list(self._tasks)))
            self._queue.close()
            try:
                await in_thread(self._queue.release, self._owner, now=clock.now())
            except DatabaseError:
                log.warning("leases could not be handed back; they run out by themselves", exc_info=True)

    async def _claim_due(self) -> None:
        await self._reap()
        await self.claim_once()

    async def _reap(self) -> None:
        """Requeue expired items of any controller, twice per lease."""
        if clock.monotonic() >= self._reap_at:
            await in_thread(self._queue.reap)
            self._reap_at = clock.monotonic() + self._lease / 2

    async def claim_once(self) -> int:
        """Claim the due items and start their attempts. Return the number of items."""
        async with self._claiming:
            if self._stopping:
                return 0
            limit = min(self._queue.slots - len(self._tasks), self._at_once)
            if limit <= 0:
                return 0
            begun = clock.monotonic()
            claimed = await in_thread(
                self._queue.claim, self._owner, now=clock.now(), lease=self._lease, limit=limit
            )
            if clock.monotonic() - begun > self._lease / 4:
                self._at_once = max(limit // 2, MIN_CLAIM_ITEMS)
            elif len(claimed) == self._at_once:
                self._at_once = min(2 * self._at_once, MAX_CLAIM_ITEMS)
            for claim in claimed:
                self._begin(claim)
            if len(claimed) == limit:
                self._claims.wake()  # more may be due; the claimed items start meanwhile
            return len(claimed)

    def _begin(self, claim: C) -> None:
        previous = self._tasks.get(claim.id)
        if previous is not None:
            previous[1].cancel()  # its lease expired, and this executor claimed the item again
        task = asyncio.create_task(self._execute(claim), name=str(claim))
        self._tasks[claim.id] = (claim.fence, task)
        # Not in the task itself: a task that is cancelled before its first step never cleans up.
        task.add_done_callback(lambda done: self._forget_attempt((claim.id, claim.fence), done))

    def _forget_attempt(self, attempt: Attempt, task: "asyncio.Task[None]") -> None:
        self._queue.forget(attempt)
        current = self._tasks.get(attempt[0])
        if current is not None and current[1] is task:
            del self._tasks[attempt[0]]
        self._claims.wake()

    def _cancel_without_lease(self, attempt: Attempt) -> None:
        """Cancel an attempt whose report was refused, because the attempt has lost its lease."""
        if self._is_running_here(attempt):
            log.warning("%s: the lease was lost; this attempt stops", attempt[0])
            self._cancel_attempts([attempt[0]])

    def _is_running_here(self, attempt: Attempt) -> bool:
        """Return True if this process runs this attempt and no other attempt at the item."""
        current = self._tasks.get(attempt[0])
        return current is not None and current[0] == attempt[1]

    async def _renew_leases(self) -> None:
        renewed_at, fences = clock.monotonic(), {id: fence for id, (fence, _) in self._tasks.items()}
        try:
            held = await self._keeper.renew(fences) if fences else {}
        except (DatabaseError, TimeoutError) as error:
            log.warning("cannot renew leases: %s", error or "no answer from the database")
            if clock.monotonic() >= self._good_until:
                self._cancel_attempts(list(self._tasks))
            return
        self._good_until = renewed_at + self._lease
        lost = [
            id for id, fence in fences.items() if held.get(id) != fence and self._is_running_here((id, fence))
        ]
        self._cancel_attempts(lost)

    def _cancel_attempts(self, ids: list[UUID]) -> list[asyncio.Task[None]]:
        """Cancel these attempts and stop renewing their leases.

        The lease loop does not wait for the end of the attempts: a slow one would cost all others their
        leases.
        """
        attempts = [self._tasks.pop(id)[1] for id in ids if id in self._tasks]
        for attempt in attempts:
            attempt.cancel()
            self._terminating.add(attempt)
            attempt.add_done_callback(self._terminating.discard)
        return attempts

    async def _execute(self, claimed: C) -> None:
        try:
            await self._queue.execute(claimed)
        except LeaseLost:
            log.warning("%s (%s): the lease was lost; this attempt stops", claimed, claimed.id)
        except DatabaseError as error:
            # The outcome could not be written; the lease expires and the item is claimed again.
            log.warning("%s (%s): outcome not recorded: %s", claimed, claimed.id, error)


class OperationQueue:
    """Queue of operations; the handler of the operation's kind runs an attempt."""

    name = "operations"
    claim = staticmethod(attempts.claim)
    renew = staticmethod(attempts.renew)
    release = staticmethod(attempts.release)
    reap = staticmethod(tasks.reap)

    def __init__(self, handlers: Mapping[str, Handler], *, slots: int = 256) -> None:
        self._handlers, self.slots = dict(handlers), slots
        self._cancel_without_lease: Callable[[Attempt], None] = lambda attempt: None
        self._recorder = Recorder(write_batch, lambda attempt: self._cancel_without_lease(attempt))

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """See `Queue`."""
        self._cancel_without_lease = lost

    def forget(self, attempt: Attempt) -> None:
        """See `Queue`."""
        self._recorder.discard(attempt)

    def close(self) -> None:
        """See `Queue`."""
        self._recorder.close()

    async def execute(self, operation: Operation) -> None:
        """Run the handler and record the outcome of the attempt."""
        request_id.set(operation.request_id or str(operation.id))
        work = Work(operation, self._recorder)
        log.info(
            "%s %s (%s): start, fence %d", operation.kind, operation.element, operation.id, operation.fence
        )
        with metrics.count_attempt(operation.kind) as attempt:
            attempt.outcome = await self._attempt(work)

    async def _attempt(self, work: Work) -> Event:
        """Run the handler, record the outcome, and return the event of the transition."""
        handler = self._handlers.get(work.operation.kind)
        try:
            if handler is None:
                raise errors.NotFound(f"no handler for operations of kind {work.operation.kind}")
            result = await handler(work)
        except Postpone as pause:
            return await self._put_back(work, pause)
        except Abandoned as reason:
            return await self._finish(work, Event.CANCEL, message=str(reason))
        except errors.ClusterError as failure:
            return await self._finish(work, Event.FAIL, error=failure.message, result={"code": failure.code})
        except (LeaseLost, OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("%s (%s): unexpected failure", work.operation.kind, work.id)
            return await self._finish(
                work, Event.FAIL, error=f"internal error; the log has it under {request_id.get()}"
            )
        else:
            message = str(result.get("message", "")) if result else ""
            return await self._finish(work, Event.COMPLETE, result=result, message=message)

    async def _finish(self, work: Work, event: Event, **said: Any) -> Event:
        log.info(
            "%s %s (%s): %s %s",
            work.operation.kind,
            work.operation.element,
            work.id,
            event,
            said.get("error") or said.get("message") or "",
        )
        ticks = await self._recorder.take(work.attempt) or []
        await in_thread(attempts.finish, *work.attempt, event, now=clock.now(), ticks=ticks, **said)
        return event

    async def _put_back(self, work: Work, pause: Postpone) -> Event:
        log.info(
            "%s %s (%s): %s; again in %.1f s",
            work.operation.kind,
            work.operation.element,
            work.id,
            pause.reason,
            pause.seconds,
        )
        ticks, now = await self._recorder.take(work.attempt) or [], clock.now()
        event = Event.WAIT if pause.waiting else Event.POSTPONE
        await in_thread(
            attempts.put_back,
            work.id,
            work.operation.fence,
            event,
            now=now,
            until=now + timedelta(seconds=pause.seconds),
            reason=pause.reason,
            payload=pause.payload,
            ticks=ticks,
        )
        return event
